"""BERT's encoder as a function of a flat dictionary of arrays.

Names and layouts are those of Hugging Face: a linear layer's weight is (outputs, inputs). There is no dropout. The last
layer is worked out only where something is to be predicted.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

WORDS = "bert.embeddings.word_embeddings.weight"
POSITIONS = "bert.embeddings.position_embeddings.weight"
TYPES = "bert.embeddings.token_type_embeddings.weight"
EMBEDDED = "embedded"  # the tap at the sum of the three embeddings
_FAR = -1e30  # in place of a score that must not count

Arrays = dict[str, Any]


def encoder_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of the encoder of a `BertConfig`, as Hugging Face stores them."""
    width, inner = config.hidden_size, config.intermediate_size
    shapes = {
        WORDS: (config.vocab_size, width),
        POSITIONS: (config.max_position_embeddings, width),
        TYPES: (config.type_vocab_size, width),
        **norm_shapes("bert.embeddings.LayerNorm", width),
    }
    for number in range(config.num_hidden_layers):
        layer = f"bert.encoder.layer.{number}"
        for part in ("query", "key", "value"):
            shapes |= dense_shapes(f"{layer}.attention.self.{part}", width, width)
        shapes |= dense_shapes(f"{layer}.attention.output.dense", width, width)
        shapes |= norm_shapes(f"{layer}.attention.output.LayerNorm", width)
        shapes |= dense_shapes(f"{layer}.intermediate.dense", inner, width)
        shapes |= dense_shapes(f"{layer}.output.dense", width, inner)
        shapes |= norm_shapes(f"{layer}.output.LayerNorm", width)
    return shapes


def dense_shapes(name: str, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def norm_shapes(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


class Tape:
    """What each layer is fed, and a place to add something to what it gives.

    The gradient with respect to what is added (zero) is the gradient at the layer's output: with the layer's input it
    makes the gradient of the layer's weights, of each example apart, without that gradient ever being taken.

    Attributes:
      inputs: by layer: (batch, rows, inputs) of a linear layer, or the normed rows of a layer norm.
      outputs: by layer: what it gives, for the shapes of `added`.
    """

    def __init__(self, added: Arrays | None = None):
        self._added = added
        self.inputs: Arrays = {}
        self.outputs: Arrays = {}

    def layer(self, name: str, fed: Any, given: Any) -> Any:
        self.inputs[name], self.outputs[name] = fed, given
        return given if self._added is None else given + self._added[name]


def encode(config: Any, parameters: Arrays, batch: Arrays, positions: Any, tape: Tape) -> Any:
    """(batch, m, hidden): the last layer's rows at the (batch, m) positions.

    Layers with more than one weight go by all their names, joined with '+'.
    """
    tokens = batch["tokens"]
    length = tokens.shape[1]
    seen = jnp.arange(length) < batch["lengths"][:, None]  # (batch, sequence_length)
    rows = parameters[WORDS][tokens] + (parameters[POSITIONS][:length] + parameters[TYPES][0])
    rows = tape.layer(EMBEDDED, rows, rows)
    rows = layer_norm(config, parameters, "bert.embeddings.LayerNorm", rows, tape)
    for number in range(config.num_hidden_layers):
        last = number == config.num_hidden_layers - 1
        layer = f"bert.encoder.layer.{number}"
        query, key, value = (f"{layer}.attention.self.{part}" for part in ("query", "key", "value"))
        if last:  # nobody asks for the other rows
            keys, values = jnp.split(dense(parameters, (key, value), rows, tape), 2, axis=-1)
            rows = jnp.take_along_axis(rows, positions[:, :, None], axis=1)
            queries = dense(parameters, (query,), rows, tape)
        else:
            queries, keys, values = jnp.split(dense(parameters, (query, key, value), rows, tape), 3, axis=-1)
        mixed = _attend(config.num_attention_heads, queries, keys, values, seen)
        mixed = dense(parameters, (f"{layer}.attention.output.dense",), mixed, tape)
        rows = layer_norm(config, parameters, f"{layer}.attention.output.LayerNorm", rows + mixed, tape)
        inner = activation(config)(dense(parameters, (f"{layer}.intermediate.dense",), rows, tape))
        inner = dense(parameters, (f"{layer}.output.dense",), inner, tape)
        rows = layer_norm(config, parameters, f"{layer}.output.LayerNorm", rows + inner, tape)
    return rows


def product(left: Any, right: Any) -> Any:
    return jnp.matmul(left, right, precision="highest")


def dense(parameters: Arrays, names: tuple[str, ...], rows: Any, tape: Tape) -> Any:
    """One product for all the named layers, which are fed the same."""
    weight = jnp.concatenate([parameters[f"{name}.weight"] for name in names])
    bias = jnp.concatenate([parameters[f"{name}.bias"] for name in names])
    return tape.layer("+".join(names), rows, product(rows, weight.T) + bias)


def layer_norm(config: Any, parameters: Arrays, name: str, rows: Any, tape: Tape) -> Any:
    centred = rows - rows.mean(axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(variance + config.layer_norm_eps)
    return tape.layer(name, normed, normed * parameters[f"{name}.weight"] + parameters[f"{name}.bias"])


def _attend(heads: int, queries: Any, keys: Any, values: Any, seen: Any) -> Any:
    """(batch, rows, hidden): each row's mixture of the values that it may see."""

    def by_head(rows):
        return rows.reshape(*rows.shape[:2], heads, -1)

    queries, keys, values = by_head(queries), by_head(keys), by_head(values)
    scale = queries.shape[-1] ** -0.5
    scores = jnp.einsum("bqhd,bkhd->bhqk", queries * scale, keys, precision="highest")
    shares = jax.nn.softmax(jnp.where(seen[:, None, None, :], scores, _FAR), axis=-1)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", shares, values, precision="highest")
    return mixed.reshape(*mixed.shape[:2], -1)


def activation(config: Any) -> Callable[[Any], Any]:
    return _ACTIVATIONS[config.hidden_act]


def _gelu(rows: Any) -> Any:
    return 0.5 * rows * (1.0 + jax.lax.erf(rows * 0.5**0.5))


_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "gelu": _gelu,
    "gelu_new": lambda rows: jax.nn.gelu(rows, approximate=True),
    "relu": jax.nn.relu,
}
