"""Gradients of a BERT: of every example apart, or their sum.

One forward and one backward pass give what each layer is fed and the gradient at what it gives; from these follows the
gradient of each layer's weights, of one example or of all. The word embedding, most of a small model, is left in
factors (`EmbeddingGradients`, `LookupGradients`), which are far smaller than what they make, and so is a layer that
sees one row of each example (`OuterGradients`): a classifier's whole last layer but for keys and values.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from coowned.mechanism.gradient_sums import FirstRowsGradients, OuterGradients
from coowned.training.models import bert_network as network
from coowned.training.models.bert_heads import Head
from coowned.training.models.bert_network import Arrays, Tape, product
from coowned.training.models.embedding_gradients import EmbeddingGradients, LookupGradients


class _Passes(NamedTuple):
    inputs: Arrays  # by layer: (batch, rows, inputs) what it is fed
    slopes: Arrays  # by layer: (batch, rows, outputs) the gradient at what it gives
    embedded: Any  # (batch, sequence_length, hidden) the gradient at the sum of the three embeddings
    residuals: Any  # (batch, m, classes) softmax minus one at the target, times its norm
    weights: Any  # (batch, m) an example's weight over that norm; times residuals: the scores' gradient
    projected: Any  # (batch, m, hidden) what the projection multiplies, times these weights


def example_gradients(head: Head, config: Any, parameters: Arrays, batch: Arrays) -> Arrays:
    """By parameter: (batch, ...) the gradient of every example, or its factors."""
    tokens = batch["tokens"]
    found = _passes(head, config, parameters, batch, jnp.ones(len(tokens)))
    gradients: Arrays = {
        network.POSITIONS: FirstRowsGradients(found.embedded),
        network.TYPES: FirstRowsGradients(jnp.sum(found.embedded, axis=1, keepdims=True)),
        head.bias: jnp.einsum("bm,bmv->bv", found.weights, found.residuals, precision="highest"),
    }
    if head.projection == network.WORDS:
        gradients[network.WORDS] = EmbeddingGradients(found.residuals, found.projected, tokens, found.embedded)
    else:
        gradients[network.WORDS] = LookupGradients(tokens, found.embedded)
        gradients[head.projection] = _products(found.residuals, found.projected)
    for name, slopes in found.slopes.items():
        gradients |= _layer(name, found.inputs[name], slopes, "b")
    return gradients


def gradient_sum(
    head: Head, config: Any, parameters: Arrays, batch: Arrays, mask: Any, microbatch: int, trained: Sequence[str]
) -> Arrays:
    """The plain sum over the batch, microbatch by microbatch: for training without privacy."""
    parts, steps = _in_parts({**batch, "real": mask}, microbatch)

    def add(step, total):
        rows = {name: lax.dynamic_index_in_dim(array, step, axis=1, keepdims=False) for name, array in parts.items()}
        keep = rows.pop("real").astype(jnp.float32)
        found = _microbatch_sum(head, config, parameters, rows, keep)
        return {name: array + found[name] for name, array in total.items()}

    zeros = {name: jnp.zeros(parameters[name].shape, jnp.float32) for name in trained}
    return lax.fori_loop(0, steps, add, zeros)


def _microbatch_sum(head: Head, config: Any, parameters: Arrays, batch: Arrays, keep: Any) -> Arrays:
    found = _passes(head, config, parameters, batch, keep)
    residuals, width = found.residuals.reshape(-1, found.residuals.shape[-1]), found.embedded.shape[-1]
    by_position = jnp.sum(found.embedded, axis=0)  # (sequence_length, hidden)
    by_type = jnp.sum(by_position, axis=0, keepdims=True)
    summed = {name: jnp.zeros_like(parameters[name]) for name in (network.WORDS, network.POSITIONS, network.TYPES)}
    summed[head.projection] = product(residuals.T, found.projected.reshape(-1, width))
    summed[head.bias] = product(found.weights.reshape(-1), residuals)
    for name, rows, added in (
        (network.WORDS, batch["tokens"].reshape(-1), found.embedded.reshape(-1, width)),
        (network.POSITIONS, slice(len(by_position)), by_position),
        (network.TYPES, slice(1), by_type),
    ):
        summed[name] = summed[name].at[rows].add(added)
    for name, slopes in found.slopes.items():
        summed |= _layer(name, found.inputs[name], slopes, "")
    return summed


def _passes(head: Head, config: Any, parameters: Arrays, batch: Arrays, keep: Any) -> _Passes:
    """keep (batch,): what every example's loss is multiplied by."""
    targets = head.targets(batch)

    def forward(added: Arrays | None):
        tape = Tape(added)
        rows = network.encode(config, parameters, batch, targets.positions, tape)
        return head.hidden(config, parameters, rows, tape), (tape.inputs, tape.outputs)

    shapes = jax.eval_shape(lambda: forward(None)[1][1])
    added = {name: jnp.zeros(given.shape, given.dtype) for name, given in shapes.items()}
    hidden, backward, (inputs, _) = jax.vjp(forward, added, has_aux=True)
    examples, predicted, width = hidden.shape
    scores = _scores(head, parameters, hidden.reshape(-1, width))
    powers = jnp.exp(scores - scores.max(axis=1, keepdims=True))
    norms = powers.sum(axis=1)
    # Changed at one class a row: the difference is rounded once, where it is small.
    residuals = powers.at[jnp.arange(examples * predicted), targets.classes.reshape(-1)].add(-norms)
    weights = (targets.weights * keep[:, None]).reshape(-1) / norms
    at_hidden = product(residuals, parameters[head.projection]) * weights[:, None]
    (slopes,) = backward(at_hidden.reshape(hidden.shape))
    embedded = slopes.pop(network.EMBEDDED)
    residuals, weights = residuals.reshape(examples, predicted, -1), weights.reshape(examples, predicted)
    return _Passes(inputs, slopes, embedded, residuals, weights, hidden * weights[:, :, None])


def _scores(head: Head, parameters: Arrays, hidden: Any) -> Any:
    """(..., classes); of the masked model the word embedding is used a second time here."""
    return product(hidden, parameters[head.projection].T) + parameters[head.bias]


def _layer(names: str, inputs: Any, slopes: Any, examples: str) -> Arrays:
    """Weight and bias of a layer, or of layers that were one product; examples is "b" to keep them apart, else ""."""
    axes = (1,) if examples else (0, 1)
    if names.endswith("LayerNorm"):
        return {f"{names}.weight": jnp.sum(inputs * slopes, axis=axes), f"{names}.bias": jnp.sum(slopes, axis=axes)}
    found: Arrays = {}
    for name, own in zip(names.split("+"), jnp.split(slopes, names.count("+") + 1, axis=-1), strict=True):
        if examples:
            found[f"{name}.weight"] = _products(own, inputs)
        else:
            found[f"{name}.weight"] = jnp.einsum("bto,bti->oi", own, inputs, precision="highest")
        found[f"{name}.bias"] = jnp.sum(own, axis=axes)
    return found


def _products(left: Any, right: Any) -> Any:
    """(batch, outputs, inputs): of each example the sum over rows of the products; of one row its factors."""
    if left.shape[1] == 1:
        return OuterGradients(left[:, 0], right[:, 0])
    return jnp.einsum("bto,bti->boi", left, right, precision="highest")


def _in_parts(batch: Arrays, microbatch: int) -> tuple[Arrays, int]:
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

    return {name: divide(array) for name, array in batch.items()}, steps


# ---- losses ----------------------------------------------------------------------------------------------------------


def losses(head: Head, config: Any, parameters: Arrays, batch: Arrays, microbatch: int) -> tuple[Any, Any]:
    """((batch,) loss, (batch,) whether at least half of what is to be predicted is right), a microbatch at a time."""
    return _by_microbatch(lambda rows: example_losses(head, config, parameters, rows), batch, microbatch)


def example_losses(head: Head, config: Any, parameters: Arrays, batch: Arrays) -> tuple[Any, Any]:
    """The same at once."""
    _, classes, weights = head.targets(batch)
    scores = scores_of(head, config, parameters, batch)
    at_targets = jnp.take_along_axis(scores, classes[:, :, None], axis=2)[:, :, 0]
    entropies = jax.nn.logsumexp(scores, axis=2) - at_targets
    right = jnp.sum(weights * (scores.argmax(axis=2) == classes), axis=1)
    # A text without words has no loss; counted as 0 it would make the mean look better.
    some = jnp.any(weights > 0, axis=1)
    return jnp.where(some, jnp.sum(weights * entropies, axis=1), jnp.nan), right >= 0.5 - 1e-6  # weights are rounded


def predictions(head: Head, config: Any, parameters: Arrays, batch: Arrays, microbatch: int) -> tuple[Any, Any]:
    """((batch,) the first position's class, (batch,) its probability, NaN where there is no text)."""

    def predict(rows: Arrays) -> tuple[Any, Any]:
        shares = jax.nn.softmax(scores_of(head, config, parameters, rows)[:, 0], axis=-1)
        likely = jnp.where(rows["lengths"] > 0, shares.max(axis=-1), jnp.nan)
        return shares.argmax(axis=-1).astype(jnp.int32), likely

    return _by_microbatch(predict, batch, microbatch)


def scores_of(head: Head, config: Any, parameters: Arrays, batch: Arrays) -> Any:
    """(batch, m, classes) logits."""
    tape = Tape()
    rows = network.encode(config, parameters, batch, head.targets(batch).positions, tape)
    return _scores(head, parameters, head.hidden(config, parameters, rows, tape))


def _by_microbatch(function: Any, batch: Arrays, microbatch: int) -> tuple[Any, Any]:
    """Two numbers of every example, a microbatch at a time."""
    count = batch["tokens"].shape[0]
    parts, _ = _in_parts(batch, microbatch)
    found = lax.map(function, {name: jnp.moveaxis(array, 1, 0) for name, array in parts.items()})  # (steps, size) each
    first, second = (array.T.reshape(-1)[:count] for array in found)
    return first, second
