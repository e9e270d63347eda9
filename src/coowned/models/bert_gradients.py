"""Per-example gradients, losses and predictions of a BERT.

One forward and one backward pass give what each layer is fed and the gradient at what it gives; from these follows the
gradient of each layer's weights. The word embedding, most of a small model, is left in factors (`EmbeddingGradients`,
`LookupGradients`), which are far smaller than what they make, and so is a layer that sees one row of each example
(`OuterGradients`): a classifier's whole last layer but for keys and values.
"""

from typing import Any

from coowned.exact.gradient_sums import FirstRowsGradients, OuterGradients
from coowned.extras import jax, jnp
from coowned.models import bert_network as network
from coowned.models.bert_network import Arrays, Head, Tape, product
from coowned.models.embedding_gradients import EmbeddingGradients, LookupGradients


def example_gradients(head: Head, config: Any, parameters: Arrays, batch: Arrays) -> Arrays:
    """Computes the gradient of every example, or its factors: by parameter, (batch, ...)."""
    tokens, targets = batch["tokens"], head.targets(batch)

    def forward(added: Arrays | None):
        tape = Tape(added)
        rows = network.encode(config, parameters, batch, targets.positions, tape)
        return head.hidden(config, parameters, rows, tape), (tape.inputs, tape.outputs)

    shapes = jax.eval_shape(lambda: forward(None)[1][1])
    added = {name: jnp.zeros(given.shape, given.dtype) for name, given in shapes.items()}
    hidden, backward, (inputs, _) = jax.vjp(forward, added, has_aux=True)  # inputs: what each layer is fed
    examples, predicted, width = hidden.shape
    scores = _scores(head, parameters, hidden.reshape(-1, width))
    powers = jnp.exp(scores - scores.max(axis=1, keepdims=True))
    norms = powers.sum(axis=1)
    # The scores' gradient is weights times residuals: softmax minus one at the target, times its norm. Changed at one
    # class a row: the difference is rounded once, where it is small.
    residuals = powers.at[jnp.arange(examples * predicted), targets.classes.reshape(-1)].add(-norms)
    weights = targets.weights.reshape(-1) / norms
    at_hidden = product(residuals, parameters[head.projection]) * weights[:, None]
    (slopes,) = backward(at_hidden.reshape(hidden.shape))  # by layer: the gradient at what it gives
    embedded = slopes.pop(network.EMBEDDED)  # (batch, sequence_length, hidden), at the sum of the three embeddings
    residuals, weights = residuals.reshape(examples, predicted, -1), weights.reshape(examples, predicted)
    projected = hidden * weights[:, :, None]
    gradients: Arrays = {
        network.POSITIONS: FirstRowsGradients(embedded),
        network.TYPES: FirstRowsGradients(jnp.sum(embedded, axis=1, keepdims=True)),
        head.bias: jnp.einsum("bm,bmv->bv", weights, residuals, precision="highest"),
    }
    if head.projection == network.WORDS:
        gradients[network.WORDS] = EmbeddingGradients(residuals, projected, tokens, embedded)
    else:
        gradients[network.WORDS] = LookupGradients(tokens, embedded)
        gradients[head.projection] = _products(residuals, projected)
    for name, own in slopes.items():
        gradients |= _layer(name, inputs[name], own)
    return gradients


def _scores(head: Head, parameters: Arrays, hidden: Any) -> Any:
    """Computes (..., classes) logits; a masked language model uses its word embedding again here."""
    return product(hidden, parameters[head.projection].T) + parameters[head.bias]


def _layer(names: str, inputs: Any, slopes: Any) -> Arrays:
    """Computes the per-example gradients of a layer's weight and bias, or of several layers computed as one product."""
    if names.endswith("LayerNorm"):
        return {f"{names}.weight": jnp.sum(inputs * slopes, axis=1), f"{names}.bias": jnp.sum(slopes, axis=1)}
    found: Arrays = {}
    for name, own in zip(names.split("+"), jnp.split(slopes, names.count("+") + 1, axis=-1), strict=True):
        found[f"{name}.weight"] = _products(own, inputs)
        found[f"{name}.bias"] = jnp.sum(own, axis=1)
    return found


def _products(left: Any, right: Any) -> Any:
    """Sums each example's outer products over rows, (batch, outputs, inputs); a single row stays as its factors."""
    if left.shape[1] == 1:
        return OuterGradients(left[:, 0], right[:, 0])
    return jnp.einsum("bto,bti->boi", left, right, precision="highest")


# ---- losses ----------------------------------------------------------------------------------------------------------


def example_losses(head: Head, config: Any, parameters: Arrays, batch: Arrays) -> tuple[Any, Any]:
    """Computes ((batch,) loss, (batch,) whether at least half of the targets are predicted right)."""
    _, classes, weights = head.targets(batch)
    scores = scores_of(head, config, parameters, batch)
    at_targets = jnp.take_along_axis(scores, classes[:, :, None], axis=2)[:, :, 0]
    entropies = jax.nn.logsumexp(scores, axis=2) - at_targets
    right = jnp.sum(weights * (scores.argmax(axis=2) == classes), axis=1)
    # A text without words has no loss; counted as 0 it would make the mean look better.
    some = jnp.any(weights > 0, axis=1)
    return jnp.where(some, jnp.sum(weights * entropies, axis=1), jnp.nan), right >= 0.5 - 1e-6  # weights are rounded


def predictions(head: Head, config: Any, parameters: Arrays, batch: Arrays) -> tuple[Any, Any]:
    """Returns ((batch,) class at the first position, (batch,) its probability, NaN for an empty text)."""
    shares = probabilities(head, config, parameters, batch)
    return shares.argmax(axis=-1).astype(jnp.int32), shares.max(axis=-1)


def probabilities(head: Head, config: Any, parameters: Arrays, batch: Arrays) -> Any:
    """Computes the (batch, classes) probabilities at the first position, NaN for an empty text."""
    shares = jax.nn.softmax(scores_of(head, config, parameters, batch)[:, 0], axis=-1)
    return jnp.where(batch["lengths"][:, None] > 0, shares, jnp.nan)


def scores_of(head: Head, config: Any, parameters: Arrays, batch: Arrays) -> Any:
    """Computes (batch, m, classes) logits."""
    tape = Tape()
    rows = network.encode(config, parameters, batch, head.targets(batch).positions, tape)
    return _scores(head, parameters, head.hidden(config, parameters, rows, tape))
