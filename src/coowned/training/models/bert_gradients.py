"""Gradients of a masked-LM BERT: of every example apart, or their sum.

One forward and one backward pass give what each layer is fed and the gradient at what it gives; from these follows the
gradient of each layer's weights, of one example or of all. The word embedding, most of a small model, is looked up and
also projects: its gradient is left in factors (`EmbeddingGradients`), which are far smaller than what they make.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from coowned.mechanism.gradient_sums import EmbeddingGradients
from coowned.training.models import bert_network as network
from coowned.training.models.bert_network import Arrays, Tape, product


class _Passes(NamedTuple):
    inputs: Arrays  # by layer: (batch, rows, inputs) what it is fed
    slopes: Arrays  # by layer: (batch, rows, outputs) the gradient at what it gives
    embedded: Any  # (batch, sequence_length, hidden) the gradient at the sum of the three embeddings
    hidden: Any  # (batch, max_predictions, hidden) what the vocabulary is multiplied by
    residuals: Any  # (batch, max_predictions, vocabulary) softmax minus one at the target, times its norm
    weights: Any  # (batch, max_predictions) an example's weight over that norm; times residuals: the logits' gradient


def example_gradients(config: Any, parameters: Arrays, batch: Arrays) -> Arrays:
    """By parameter: (batch, ...) the gradient of every example; of the word embedding as `EmbeddingGradients`."""
    found = _passes(config, parameters, batch, jnp.ones(batch["tokens"].shape[0]))
    by_position = jnp.pad(found.embedded, _missing_rows(found.embedded, parameters[network.POSITIONS], axis=1))
    by_type = jnp.sum(found.embedded, axis=1, keepdims=True)
    gradients: Arrays = {
        network.WORDS: EmbeddingGradients(
            found.residuals, found.hidden * found.weights[:, :, None], batch["tokens"], found.embedded
        ),
        network.POSITIONS: by_position,
        network.TYPES: jnp.pad(by_type, _missing_rows(by_type, parameters[network.TYPES], axis=1)),
        network.VOCABULARY_BIAS: jnp.einsum("bm,bmv->bv", found.weights, found.residuals, precision="highest"),
    }
    for name, slopes in found.slopes.items():
        gradients |= _layer(name, found.inputs[name], slopes, "b")
    return gradients


def gradient_sum(config: Any, parameters: Arrays, batch: Arrays, mask: Any, microbatch: int) -> Arrays:
    """The plain sum over the batch, microbatch by microbatch: for training without privacy."""
    parts, steps = _in_parts({**batch, "real": mask}, microbatch)

    def add(step, total):
        rows = {name: lax.dynamic_index_in_dim(array, step, axis=1, keepdims=False) for name, array in parts.items()}
        keep = rows.pop("real").astype(jnp.float32)
        return jax.tree.map(jnp.add, total, _microbatch_sum(config, parameters, rows, keep))

    zeros = {name: jnp.zeros(array.shape, jnp.float32) for name, array in parameters.items()}
    return lax.fori_loop(0, steps, add, zeros)


def _microbatch_sum(config: Any, parameters: Arrays, batch: Arrays, keep: Any) -> Arrays:
    found = _passes(config, parameters, batch, keep)
    residuals = found.residuals.reshape(-1, found.residuals.shape[-1])
    weights, width = found.weights.reshape(-1), found.hidden.shape[-1]
    words = product(residuals.T, found.hidden.reshape(-1, width) * weights[:, None])
    words = words.at[batch["tokens"].reshape(-1)].add(found.embedded.reshape(-1, width))
    by_position = jnp.sum(found.embedded, axis=0)  # (sequence_length, hidden)
    by_type = jnp.sum(by_position, axis=0, keepdims=True)
    summed = {
        network.WORDS: words,
        network.POSITIONS: jnp.pad(by_position, _missing_rows(by_position, parameters[network.POSITIONS], axis=0)),
        network.TYPES: jnp.pad(by_type, _missing_rows(by_type, parameters[network.TYPES], axis=0)),
        network.VOCABULARY_BIAS: product(weights, residuals),
    }
    for name, slopes in found.slopes.items():
        summed |= _layer(name, found.inputs[name], slopes, "")
    return summed


def _passes(config: Any, parameters: Arrays, batch: Arrays, keep: Any) -> _Passes:
    """keep (batch,): what every example's loss is multiplied by."""

    def forward(added: Arrays | None):
        tape = Tape(added)
        hidden = network.hidden_rows(config, parameters, batch, tape)
        return hidden, (tape.inputs, tape.outputs)

    shapes = jax.eval_shape(lambda: forward(None)[1][1])
    added = {name: jnp.zeros(given.shape, given.dtype) for name, given in shapes.items()}
    hidden, backward, (inputs, _) = jax.vjp(forward, added, has_aux=True)
    examples, places, width = hidden.shape
    scores = network.vocabulary_scores(parameters, hidden.reshape(-1, width))
    powers = jnp.exp(scores - scores.max(axis=1, keepdims=True))
    norms = powers.sum(axis=1)
    # In place at one word a row: the difference is rounded once, where it is small.
    residuals = powers.at[jnp.arange(examples * places), batch["targets"].reshape(-1)].add(-norms)
    weights = (batch["weights"] * keep[:, None]).reshape(-1) / norms
    at_hidden = product(residuals, parameters[network.WORDS]) * weights[:, None]
    (slopes,) = backward(at_hidden.reshape(hidden.shape))
    embedded = slopes.pop(network.EMBEDDED)
    residuals, weights = residuals.reshape(examples, places, -1), weights.reshape(examples, places)
    return _Passes(inputs, slopes, embedded, hidden, residuals, weights)


def _layer(names: str, inputs: Any, slopes: Any, examples: str) -> Arrays:
    """Weight and bias of a layer, or of layers that were one product; examples is "b" to keep them apart, else ""."""
    axes = (1,) if examples else (0, 1)
    if names.endswith("LayerNorm"):
        return {f"{names}.weight": jnp.sum(inputs * slopes, axis=axes), f"{names}.bias": jnp.sum(slopes, axis=axes)}
    apart = names.split("+")
    weight = jnp.einsum(f"bto,bti->{examples}oi", slopes, inputs, precision="highest")
    bias = jnp.sum(slopes, axis=axes)
    weights, biases = jnp.split(weight, len(apart), axis=-2), jnp.split(bias, len(apart), axis=-1)
    return {f"{name}.weight": weights[i] for i, name in enumerate(apart)} | {
        f"{name}.bias": biases[i] for i, name in enumerate(apart)
    }


def _missing_rows(rows: Any, parameter: Any, axis: int) -> list[tuple[int, int]]:
    """How to fill up with zeros what has fewer rows than the parameter."""
    return [(0, parameter.shape[0] - rows.shape[axis] if i == axis else 0) for i in range(rows.ndim)]


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


def losses(config: Any, parameters: Arrays, batch: Arrays, microbatch: int) -> tuple[Any, Any]:
    """((batch,) loss, (batch,) whether at least half of its positions are right), a microbatch at a time."""
    count = batch["tokens"].shape[0]
    parts, _ = _in_parts(batch, microbatch)
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
