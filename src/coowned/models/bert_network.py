"""BERT as functions of a flat dictionary of arrays: the encoder and its heads.

Names and layouts are those of Hugging Face: a linear layer's weight is (outputs, inputs). There is no dropout. The last
layer is worked out only where something is to be predicted.

A head, one that fills in hidden words or one that tells classes apart, says where something is predicted and what; it
makes hidden rows of the encoder's, which a last matrix and its bias make into scores. The loss is the weighted cross
entropy of these.

Our own because transformers computes in PyTorch alone; the outputs are its own (tests/peers/test_transformers.py).
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np

from coowned import validate
from coowned.content.columns import declared_classes
from coowned.errors import jax, jnp

WORDS = "bert.embeddings.word_embeddings.weight"
POSITIONS = "bert.embeddings.position_embeddings.weight"
TYPES = "bert.embeddings.token_type_embeddings.weight"
EMBEDDED = "embedded"  # the tap at the sum of the three embeddings
_TRANSFORM, _POOLER = "cls.predictions.transform", "bert.pooler.dense"
_FAR = -1e30  # in place of a score that must not count

Arrays = dict[str, Any]


def encoder_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Returns name and shape of every encoder parameter of a `BertConfig`, as Hugging Face stores them."""
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
    """A record of each layer's inputs, with a zero added to its output for differentiation.

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
    """Computes the last layer's rows at the (batch, m) positions: (batch, m, hidden).

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
    """Computes all the named layers, which have the same input, in one matrix product."""
    weight = jnp.concatenate([parameters[f"{name}.weight"] for name in names])
    bias = jnp.concatenate([parameters[f"{name}.bias"] for name in names])
    return tape.layer("+".join(names), rows, product(rows, weight.T) + bias)


def layer_norm(config: Any, parameters: Arrays, name: str, rows: Any, tape: Tape) -> Any:
    centred = rows - rows.mean(axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(variance + config.layer_norm_eps)
    return tape.layer(name, normed, normed * parameters[f"{name}.weight"] + parameters[f"{name}.bias"])


def _attend(heads: int, queries: Any, keys: Any, values: Any, seen: Any) -> Any:
    """Computes attention: each row's weighted mean of the visible values, (batch, rows, hidden)."""

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
    "relu": lambda rows: jax.nn.relu(rows),
}


# ---- heads -----------------------------------------------------------------------------------------------------------


class Targets(NamedTuple):
    """The prediction targets of each example."""

    positions: Any  # (batch, m) int32, where
    classes: Any  # (batch, m) int32, what
    weights: Any  # (batch, m) float32, of each cross entropy; 0 where there is nothing to predict


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head(abc.ABC):
    """The head of a BERT, which decides what it predicts.

    Attributes:
      kind: what a configuration calls it.
      architecture: the class of transformers that opens it.
      projection, bias: the last matrix and its bias.
      target: the array of a batch that says what is to be predicted.
      optional: beginnings of names that a checkpoint need not have; they then start anew.
      ignored: beginnings of names in a checkpoint that are not read.
      classes: what the predicted indices mean; None where an example as a whole has no class.
    """

    kind: ClassVar[str]
    architecture: ClassVar[str]
    projection: ClassVar[str]
    bias: ClassVar[str]
    target: ClassVar[str]
    optional: ClassVar[tuple[str, ...]] = ()
    ignored: ClassVar[tuple[str, ...]]
    classes: ClassVar[tuple[str | int, ...] | None]

    def describe(self) -> dict[str, Any]:
        """Returns plain values from which the head can be rebuilt."""
        fields = dataclasses.asdict(self).items()
        return {name: list(value) if isinstance(value, tuple) else int(value) for name, value in fields}

    @abc.abstractmethod
    def shapes(self, config: Any) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the head's own parameters."""

    @abc.abstractmethod
    def arrays(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Returns the shape and type of each array that the head reads besides tokens and lengths, per example."""

    @abc.abstractmethod
    def targets(self, batch: Arrays) -> Targets: ...

    @abc.abstractmethod
    def hidden(self, config: Any, parameters: Arrays, rows: Any, tape: Tape) -> Any:
        """Computes the (batch, m, hidden) inputs of the projection."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedLMHead(Head):
    """A masked-language-model head, whose projection is the word embedding.

    Attributes:
      max_predictions: positions to predict in an example at most.
    """

    kind: ClassVar[str] = "bert-masked-lm"
    architecture: ClassVar[str] = "BertForMaskedLM"
    projection: ClassVar[str] = WORDS
    bias: ClassVar[str] = "cls.predictions.bias"
    target: ClassVar[str] = "targets"
    ignored: ClassVar[tuple[str, ...]] = ("bert.pooler.", "cls.seq_relationship.")
    classes: ClassVar[None] = None
    max_predictions: int

    def __post_init__(self) -> None:
        validate.positive(max_predictions=self.max_predictions)

    def shapes(self, config: Any) -> dict[str, tuple[int, ...]]:
        width = config.hidden_size
        transform = dense_shapes(f"{_TRANSFORM}.dense", width, width) | norm_shapes(f"{_TRANSFORM}.LayerNorm", width)
        return transform | {self.bias: (config.vocab_size,)}

    def arrays(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        shape = (self.max_predictions,)
        return {"positions": (shape, np.int32), "targets": (shape, np.int32), "weights": (shape, np.float32)}

    def targets(self, batch: Arrays) -> Targets:
        return Targets(batch["positions"], batch["targets"], batch["weights"])

    def hidden(self, config: Any, parameters: Arrays, rows: Any, tape: Tape) -> Any:
        rows = activation(config)(dense(parameters, (f"{_TRANSFORM}.dense",), rows, tape))
        return layer_norm(config, parameters, f"{_TRANSFORM}.LayerNorm", rows, tape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifierHead(Head):
    """A head that predicts the class of a text from its first token: a pooler and a linear layer.

    Attributes:
      classes: as the data spell them, in the order of their indices.
    """

    kind: ClassVar[str] = "bert-classifier"
    architecture: ClassVar[str] = "BertForSequenceClassification"
    projection: ClassVar[str] = "classifier.weight"
    bias: ClassVar[str] = "classifier.bias"
    target: ClassVar[str] = "labels"
    optional: ClassVar[tuple[str, ...]] = (f"{_POOLER}.", "classifier.")
    ignored: ClassVar[tuple[str, ...]] = ("cls.",)
    classes: tuple[str | int, ...]  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", declared_classes(self.classes))

    def shapes(self, config: Any) -> dict[str, tuple[int, ...]]:
        width = config.hidden_size
        return dense_shapes(_POOLER, width, width) | dense_shapes("classifier", len(self.classes), width)

    def arrays(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        return {"labels": ((), np.float32), "weights": ((), np.float32)}

    def targets(self, batch: Arrays) -> Targets:
        labels = batch["labels"]
        known = jnp.isfinite(labels)
        weights = jnp.where(known, batch["weights"], 0.0)
        classes = jnp.where(known, labels, 0).astype(jnp.int32)
        return Targets(jnp.zeros((*labels.shape, 1), jnp.int32), classes[:, None], weights[:, None])

    def hidden(self, config: Any, parameters: Arrays, rows: Any, tape: Tape) -> Any:
        return jnp.tanh(dense(parameters, (_POOLER,), rows, tape))


HEADS: dict[str, type[Head]] = {head.kind: head for head in (MaskedLMHead, ClassifierHead)}
