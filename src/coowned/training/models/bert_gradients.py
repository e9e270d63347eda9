"""The sum of clipped gradients of a masked-LM BERT, without building any example's gradient of the large matrices.

One forward and one backward pass give what each layer is fed and the gradient at what it gives. From these come every
example's exact norm and, weighted by its clip factor, the sum: there is no second backward pass. A linear layer's
gradient of one example is either built (where it is smaller than what it is made of, and then it is added up as it is),
or its norm is taken through the products of the rows among themselves. The word embedding is one parameter used twice:
rows looked up and the output projection are measured together, their cross term included.
"""

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from coowned.mechanism.clipping import replace_rows
from coowned.mechanism.compensated import CompensatedSum, two_sum
from coowned.training.models import bert_network as network
from coowned.training.models.bert_network import Arrays, Tape, product

_EPSILON = 2.0**-24  # rounding error of one float32 operation
_FLOOR = 1e-28  # squares and products below float32's range, added up: more than all of them
_CHUNK = 2048  # words whose products are added up at a time


@dataclasses.dataclass(frozen=True)
class _Square:
    """(batch,) a squared norm as it was computed, and a bound on its rounding error."""

    value: Any
    error: Any

    def __add__(self, other: "_Square") -> "_Square":
        return _Square(self.value + other.value, self.error + other.error)


def gradient_sum(
    config: Any, parameters: Arrays, batch: Arrays, mask: Any, clip_norm: Any, microbatch: int, compensated: bool
) -> tuple[Arrays, Any]:
    """The sum over the batch of clipped gradients, microbatch by microbatch, and the number clipped (private).

    A microbatch with an example whose gradient is not finite is done again with another's content in its place, and
    counted without it: multiplying by zero would not remove it. Sums are added up with their rounding errors kept.
    """
    parts, steps, size = _in_parts({**batch, "real": mask}, microbatch)
    zeros = {name: jnp.zeros(array.shape, jnp.float32) for name, array in parameters.items()}

    def more(state):
        return state[0] < steps

    def one(state):
        step, bad, stand_in, total, rest, clipped = state
        rows = {name: lax.dynamic_index_in_dim(array, step, axis=1, keepdims=False) for name, array in parts.items()}
        real = rows.pop("real")
        rows = replace_rows(rows, real)
        # Not by zeros: what parameters make of zeros is not known to be finite, and then all would be lost.
        rows = {name: jnp.where(_along(bad, array), array[stand_in], array) for name, array in rows.items()}
        keep = real & ~bad
        summed, finite, too_long = _microbatch_sum(config, parameters, rows, keep, clip_norm)
        use = finite.all()
        again = ~use & ~bad.any() & finite.any()
        total, rest = _add(total, rest, summed, use)
        clipped = clipped + jnp.where(use, jnp.sum(too_long & keep), 0)
        bad, stand_in = jnp.where(again, ~finite, False), jnp.argmax(finite).astype(jnp.int32)
        return jnp.where(again, step, step + 1), bad, stand_in, total, rest, clipped

    nothing = jnp.zeros((), jnp.int32)
    start = nothing, jnp.zeros(size, bool), nothing, zeros, zeros, nothing
    *_, total, rest, clipped = lax.while_loop(more, one, start)
    summed = {name: CompensatedSum(total[name], rest[name]) for name in total}
    return (summed if compensated else {name: part.rounded for name, part in summed.items()}), clipped


def _in_parts(batch: Arrays, microbatch: int) -> tuple[Arrays, int, int]:
    """The rows as (size, steps): size examples in each of steps microbatches, padded with zeros.

    The first axis stays the batch's, so that a batch divided among devices is divided in every microbatch.
    """
    count = next(iter(batch.values())).shape[0]
    steps = max(1, -(-count // microbatch))
    size = max(1, -(-count // steps))

    def divide(array):
        missing = steps * size - count
        array = jnp.pad(array, ((0, missing),) + ((0, 0),) * (array.ndim - 1)) if missing else array
        return array.reshape(size, steps, *array.shape[1:])

    return {name: divide(array) for name, array in batch.items()}, steps, size


def _along(flags: Any, array: Any) -> Any:
    return flags.reshape((-1,) + (1,) * (array.ndim - 1))


def _add(total: Arrays, rest: Arrays, summed: Arrays, use: Any) -> tuple[Arrays, Arrays]:
    """total + summed, what rounding took from it added to rest."""
    new_total, new_rest = {}, {}
    for name, old in total.items():
        new_total[name], lost = two_sum(old, jnp.where(use, summed[name], 0.0))
        new_rest[name] = rest[name] + lost
    return new_total, new_rest


def _microbatch_sum(config: Any, parameters: Arrays, batch: Arrays, keep: Any, clip_norm: Any):
    """(sum of clipped gradients, (batch,) whether each is finite, (batch,) whether each was too long)."""
    described = jax.eval_shape(lambda: _forward(config, parameters, batch, None)[1][1])
    added = {name: jnp.zeros(given.shape, given.dtype) for name, given in described.items()}
    hidden, backward, (inputs, _) = jax.vjp(
        lambda added: _forward(config, parameters, batch, added), added, has_aux=True
    )
    head = _head(parameters, batch, hidden)
    (slopes,) = backward(head.slopes)  # by layer: the gradient at its output
    embedded = slopes.pop(network.EMBEDDED)
    layers = []
    for name, slope in slopes.items():
        kind = _LayerNorm if name.endswith("LayerNorm") else _linear_kind(inputs[name], slope, clip_norm is not None)
        layers.append(kind(name, inputs[name], slope))
    if clip_norm is None:
        finite, too_long = jnp.ones_like(keep), jnp.zeros_like(keep)
        factors = keep.astype(jnp.float32)
    else:
        squares = [_words_square(batch["tokens"], embedded, hidden, head), *(layer.square() for layer in layers)]
        square = functools.reduce(operator.add, squares)
        lengths = jnp.sqrt(square.value + square.error + _FLOOR) * (1 + 16 * _EPSILON)
        finite, too_long = jnp.isfinite(lengths), lengths > clip_norm
        factors = jnp.where(keep, jnp.where(too_long, clip_norm / lengths, 1.0), 0.0)
    summed = _words_sum(parameters, batch["tokens"], embedded, hidden, head, factors)
    for layer in layers:
        summed |= layer.sum(factors)
    return summed, finite, too_long


def _forward(config: Any, parameters: Arrays, batch: Arrays, added: Arrays | None):
    tape = Tape(added)
    hidden = network.hidden_rows(config, parameters, batch, tape)
    return hidden, (tape.inputs, tape.outputs)


# ---- layers ----------------------------------------------------------------------------------------------------------


class _LayerNorm:
    """Scale and shift: vectors, built for every example."""

    def __init__(self, name: str, inputs: Any, slopes: Any):
        self._name = name
        self._scale = jnp.sum(inputs * slopes, axis=1)  # (batch, hidden)
        self._shift = jnp.sum(slopes, axis=1)

    def square(self) -> _Square:
        return _square_of(self._scale) + _square_of(self._shift)

    def sum(self, factors: Any) -> Arrays:
        return {
            f"{self._name}.weight": product(factors, self._scale),
            f"{self._name}.bias": product(factors, self._shift),
        }


class _BuiltLinear:
    """A linear layer whose gradient of one example is smaller than the rows that it is made of."""

    def __init__(self, name: str, inputs: Any, slopes: Any):
        self._name = name
        self._weight = jnp.einsum("bto,bti->boi", slopes, inputs, precision="highest")
        self._bias = jnp.sum(slopes, axis=1)  # (batch, outputs)

    def square(self) -> _Square:
        return _square_of(self._weight) + _square_of(self._bias)

    def sum(self, factors: Any) -> Arrays:
        flat = self._weight.reshape(self._weight.shape[0], -1)
        weight = product(factors, flat).reshape(self._weight.shape[1:])
        return _apart(self._name, weight, product(factors, self._bias))


class _GhostLinear:
    """A linear layer whose gradient of one example is never built: |sum_t d_t x_t'|^2 = sum_ts (d_t.d_s)(x_t.x_s)."""

    def __init__(self, name: str, inputs: Any, slopes: Any):
        self._name, self._inputs, self._slopes = name, inputs, slopes

    def square(self) -> _Square:
        among_inputs, among_slopes = _products(self._inputs), _products(self._slopes)
        return _square_of_products(among_inputs, among_slopes, self._inputs.shape[-1], self._slopes.shape[-1])

    def sum(self, factors: Any) -> Arrays:
        slopes = self._slopes * factors[:, None, None]
        weight = jnp.einsum("bto,bti->oi", slopes, self._inputs, precision="highest")
        return _apart(self._name, weight, jnp.sum(slopes, axis=(0, 1)))


def _linear_kind(inputs: Any, slopes: Any, clips: bool):
    """Built where that is no larger than its two factors: less work, and the memory is that of activations."""
    rows, given, fed = slopes.shape[1], slopes.shape[2], inputs.shape[2]
    return _BuiltLinear if clips and given * fed < rows * (given + fed) else _GhostLinear


def _apart(names: str, weight: Any, bias: Any) -> Arrays:
    """The gradients of layers that were one product."""
    apart = names.split("+")
    weights, biases = jnp.split(weight, len(apart)), jnp.split(bias, len(apart))
    return {f"{name}.weight": weights[i] for i, name in enumerate(apart)} | {
        f"{name}.bias": biases[i] for i, name in enumerate(apart)
    }


# ---- the word embedding: looked up, and multiplied by in the head ----------------------------------------------------


class _Head(NamedTuple):
    residuals: Any  # (batch, max_predictions, vocabulary): softmax minus one at the target, times norms
    weights: Any  # (batch, max_predictions): an example's weight over that norm; times residuals: the logits' gradient
    slopes: Any  # (batch, max_predictions, hidden): the gradient at the hidden rows


def _head(parameters: Arrays, batch: Arrays, hidden: Any) -> _Head:
    examples, places, width = hidden.shape
    scores = network.vocabulary_scores(parameters, hidden.reshape(-1, width))
    powers = jnp.exp(scores - scores.max(axis=1, keepdims=True))
    norms = powers.sum(axis=1)
    # In place at one word a row: the difference is rounded once, where it is small.
    residuals = powers.at[jnp.arange(examples * places), batch["targets"].reshape(-1)].add(-norms)
    weights = batch["weights"].reshape(-1) / norms
    slopes = product(residuals, parameters[network.WORDS]) * weights[:, None]
    return _Head(
        residuals.reshape(examples, places, -1), weights.reshape(examples, places), slopes.reshape(hidden.shape)
    )


def _words_square(tokens: Any, embedded: Any, hidden: Any, head: _Head) -> _Square:
    """Of all three embeddings and the vocabulary's bias."""
    weights = head.weights
    among_scores = _vocabulary_products(head.residuals) * weights[:, :, None] * weights[:, None, :]
    words = head.residuals.shape[-1]
    pieces = words // _CHUNK + 1
    projected = _square_of_products(_products(hidden), among_scores, hidden.shape[-1], min(words, _CHUNK) + pieces)
    same = tokens[:, :, None] == tokens[:, None, :]
    among = _products(embedded)
    lengths = jnp.sqrt(jnp.einsum("btt->bt", among))  # (batch, sequence_length)
    length = embedded.shape[1] + embedded.shape[2]
    looked_up = _Square(
        _sum_of(jnp.where(same, among, 0.0)),
        _bound(length) * jnp.einsum("bts,bt,bs->b", same.astype(jnp.float32), lengths, lengths),
    )
    at_tokens = jnp.take_along_axis(head.residuals, tokens[:, None, :], axis=2) * weights[:, :, None]  # (b, m, t)
    meeting = jnp.einsum("bmh,bth->bmt", hidden, embedded, precision="highest")
    hidden_lengths = jnp.sqrt(jnp.einsum("bmh,bmh->bm", hidden, hidden))
    crossed = _Square(
        2 * _sum_of(at_tokens * meeting),
        2 * _bound(length) * jnp.einsum("bmt,bm,bt->b", jnp.abs(at_tokens), hidden_lengths, lengths),
    )
    own_place = _square_of(embedded)
    own_type = _square_of(jnp.sum(embedded, axis=1))
    return projected + looked_up + crossed + own_place + own_type


def _words_sum(parameters: Arrays, tokens: Any, embedded: Any, hidden: Any, head: _Head, factors: Any) -> Arrays:
    width = hidden.shape[-1]
    residuals = head.residuals.reshape(-1, head.residuals.shape[-1])
    weights = (head.weights * factors[:, None]).reshape(-1)
    words = product(residuals.T, hidden.reshape(-1, width) * weights[:, None])
    embedded = embedded * factors[:, None, None]
    words = words.at[tokens.reshape(-1)].add(embedded.reshape(-1, width))
    by_place = jnp.sum(embedded, axis=0)  # (sequence_length, hidden)
    return {
        network.WORDS: words,
        network.POSITIONS: _grown(by_place, parameters[network.POSITIONS].shape[0]),
        network.TYPES: _grown(jnp.sum(by_place, axis=0, keepdims=True), parameters[network.TYPES].shape[0]),
        network.VOCABULARY_BIAS: product(weights, residuals),
    }


def _grown(rows: Any, count: int) -> Any:
    return jnp.pad(rows, ((0, count - rows.shape[0]), (0, 0)))


# ---- squares and their rounding --------------------------------------------------------------------------------------


def _bound(terms: int) -> float:
    """Relative rounding error of a sum of so many products in any order, and of the few operations around it."""
    return (terms + 16) * _EPSILON


def _square_of(gradients: Any) -> _Square:
    """The squared norm of gradients that are there."""
    rows = gradients if gradients.ndim == 3 else gradients[:, None, :]
    value = _sum_of(rows * rows)
    return _Square(value, _bound(rows.shape[1] + rows.shape[2]) * value)


def _sum_of(terms: Any) -> Any:
    """(batch,) in two steps, so that no sum is longer than rows and columns."""
    return lax.optimization_barrier(jnp.sum(terms, axis=2)).sum(axis=1)


def _products(rows: Any) -> Any:
    """(batch, rows, rows): each row's product with each."""
    return jnp.einsum("bti,bsi->bts", rows, rows, precision="highest")


def _vocabulary_products(rows: Any) -> Any:
    """The same for rows as long as the vocabulary, a piece at a time: quicker, and with less rounding."""
    examples, places, size = rows.shape
    chunks = size // _CHUNK
    last = rows[:, :, chunks * _CHUNK :]

    def piece(number, total):
        return total + _products(lax.dynamic_slice_in_dim(rows, number * _CHUNK, _CHUNK, axis=2))

    start = _products(last) if last.shape[2] else jnp.zeros((examples, places, places), rows.dtype)
    return lax.fori_loop(0, chunks, piece, start) if chunks else start


def _square_of_products(among_inputs: Any, among_slopes: Any, inputs_length: int, slopes_length: int) -> _Square:
    """|sum_t d_t (x_t, 1)'|^2 from the rows' products; the one is the bias. The lengths are those of the sums in them.

    A product of rows is off by at most its bound times both lengths: first those of the inputs, then of the slopes.
    """
    value = _sum_of((among_inputs + 1.0) * among_slopes)
    inputs = jnp.sqrt(jnp.einsum("btt->bt", among_inputs) + 1.0)  # (batch, rows)
    slopes = jnp.sqrt(jnp.einsum("btt->bt", among_slopes))
    last = 2 * among_inputs.shape[1]  # of the sum over both rows
    error = _bound(inputs_length + last) * jnp.einsum("bts,bt,bs->b", jnp.abs(among_slopes), inputs, inputs)
    other = _bound(slopes_length) * jnp.einsum("bts,bt,bs->b", jnp.abs(among_inputs) + 1.0, slopes, slopes)
    return _Square(value, error + other)


# ---- losses ----------------------------------------------------------------------------------------------------------


def losses(config: Any, parameters: Arrays, batch: Arrays, microbatch: int) -> tuple[Any, Any]:
    """((batch,) loss, (batch,) whether at least half of its places are right), a microbatch at a time."""
    count = batch["tokens"].shape[0]
    parts, _, _ = _in_parts(batch, microbatch)
    parts = {name: jnp.moveaxis(array, 1, 0) for name, array in parts.items()}
    loss, right = lax.map(lambda rows: example_losses(config, parameters, rows), parts)  # (steps, size)
    return loss.T.reshape(-1)[:count], right.T.reshape(-1)[:count]


def example_losses(config: Any, parameters: Arrays, batch: Arrays) -> tuple[Any, Any]:
    """The same at once."""
    hidden = network.hidden_rows(config, parameters, batch, Tape())
    scores = network.vocabulary_scores(parameters, hidden)  # (batch, max_predictions, vocabulary)
    targets, weights = batch["targets"], batch["weights"]
    at_targets = jnp.take_along_axis(scores, targets[:, :, None], axis=2)[:, :, 0]
    entropies = jax.nn.logsumexp(scores, axis=2) - at_targets
    right = jnp.sum(weights * (scores.argmax(axis=2) == targets), axis=1)
    # A text without words has no loss; counted as 0 it would make the mean look better.
    some = jnp.any(weights > 0, axis=1)
    return jnp.where(some, jnp.sum(weights * entropies, axis=1), jnp.nan), right >= 0.5 - 1e-6  # weights are rounded
