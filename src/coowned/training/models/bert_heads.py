"""What stands on BERT's encoder: a head that fills in hidden words, or one that tells classes apart.

A head says where something is predicted and what; it makes hidden rows of the encoder's, which a last matrix and its
bias make into scores. The loss is the weighted cross entropy of these. Names are those of Hugging Face's models.
"""

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np

from coowned import validate
from coowned.training.labels import declared_classes
from coowned.training.models.bert_network import (
    WORDS,
    Arrays,
    Tape,
    activation,
    dense,
    dense_shapes,
    layer_norm,
    norm_shapes,
)

_TRANSFORM, _POOLER = "cls.predictions.transform", "bert.pooler.dense"


class Targets(NamedTuple):
    """What is to be predicted of each example."""

    positions: Any  # (batch, m) int32, where
    classes: Any  # (batch, m) int32, what
    weights: Any  # (batch, m) float32, of each cross entropy; 0 where there is nothing to predict


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head(abc.ABC):
    """One kind of BERT.

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
        """Plain values that make it again."""
        fields = dataclasses.asdict(self).items()
        return {name: list(value) if isinstance(value, tuple) else int(value) for name, value in fields}

    @abc.abstractmethod
    def shapes(self, config: Any) -> dict[str, tuple[int, ...]]:
        """Of its own parameters."""

    @abc.abstractmethod
    def arrays(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Shape and type, by name, of what it reads of each example besides tokens and lengths."""

    @abc.abstractmethod
    def targets(self, batch: Arrays) -> Targets: ...

    @abc.abstractmethod
    def hidden(self, config: Any, parameters: Arrays, rows: Any, tape: Tape) -> Any:
        """(batch, m, hidden): what the projection multiplies."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedLMHead(Head):
    """Predicts hidden words; the projection is the word embedding.

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
    """Predicts the class of a text from its first token: a pooler and a linear layer.

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
