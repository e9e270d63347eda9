"""Audit examples for each kind of model: worst-case users, and canaries.

A model that can be audited says so itself, by the methods of `Auditable`.
"""

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from coowned import validate
from coowned.attribution.graph import AttributionGraph
from coowned.content.data import FeatureTable, TrainingData
from coowned.content.example_table import KEY, USABLE, ExampleColumn
from coowned.content.hashed_text import SparseTable
from coowned.exact.sparse_sums import ONE, SparseRows
from coowned.models.model import Model

_LONG = 1e6  # length of a gradient before clipping, for any clip norm a run may reasonably have
_LONG_SPARSE = 2**23  # the same for integers, whose residuals would lose digits beyond

# What an example holds. A blank one is what zero-out adjacency compares with; the crowd is quiet or holds IN.
BLANK, IN, NOT_A_NUMBER, INFINITE, HUGE, QUIET, OPPOSITE = range(7)
SIGNS = np.array([0, 1, 0, 0, 1, 0, -1])  # what a copy of each adds, in clip norms


class WorstCase(abc.ABC):
    """Examples of one kind of model whose clipped gradients are known."""

    tensor: Any
    """The parameter that worst-case gradients lie in."""
    size: Any
    """How many coordinates its gradients can lie along; the last is the crowd's where there is more than one."""

    @property
    def users(self) -> int:
        """The number of users that can have a coordinate of their own."""
        return max(1, self.size - 1)

    @abc.abstractmethod
    def fill(self, out: dict[str, npt.NDArray[Any]], coordinate: npt.NDArray[np.int64], held: npt.NDArray[np.int64]):
        """Fills rows whose gradients, with all parameters near zero, lie along a coordinate (-1: the crowd's)."""

    @abc.abstractmethod
    def released(self, drawn: npt.NDArray[np.float64], held: int) -> npt.NDArray[np.float64]:
        """Computes (steps, size of the tensor) sums of clipped gradients in clip norms from (steps, users) copies."""

    @abc.abstractmethod
    def example(self) -> dict[str, Any]:
        """Returns the arrays of one ordinary example with a long gradient in all parameters; they set all shapes."""

    def table(self, graph: AttributionGraph, arrays: dict[str, npt.NDArray[Any]]) -> TrainingData | None:
        """Returns these arrays, (examples, ...), as the table that a run would read; None if there is none."""
        return None


class Auditable(Protocol):
    """A model that the audit can drive with examples whose clipped gradients are known."""

    def worst_case(self) -> WorstCase: ...

    def with_canaries(self, users: int, per_user: int, clip_norm: float) -> "tuple[Model, CanaryContent]":
        """Returns the model to train, which may have more features than this one, and the content of its canaries."""
        ...


@dataclasses.dataclass(frozen=True)
class LinearContent(WorstCase):
    """Worst-case examples of a linear model: feature j is user j's.

    Attributes:
      residuals: one for each score, of an example with this label where all parameters are zero.
      label: of worst-case examples.
      quiet_label: with which an example has no gradient then.
      huge: a feature far too large. Parameters are only nearly zero: it must not turn the gradient around.
    """

    num_features: int
    residuals: tuple[float, ...] = (0.5,)
    label: float = 0.0
    quiet_label: float = 0.5
    huge: float = 1e20
    tensor = "coefficients"

    @property
    def size(self) -> int:
        return self.num_features

    @property
    def _direction(self) -> npt.NDArray[np.float64]:
        """The (scores, 1) direction of the residuals, of unit length."""
        return (np.array(self.residuals) / np.linalg.norm(self.residuals))[:, None]

    def fill(self, out: dict[str, npt.NDArray[Any]], coordinate: npt.NDArray[np.int64], held: npt.NDArray[np.int64]):
        scale = np.array([np.nan, _LONG, np.nan, np.inf, self.huge, 0, -_LONG], np.float32)
        out["features"][:] = 0
        out["features"][np.arange(len(held)), coordinate] = scale[held]
        out["labels"][:] = np.where(held == QUIET, self.quiet_label, self.label)

    def released(self, drawn: npt.NDArray[np.float64], held: int) -> npt.NDArray[np.float64]:
        along = np.pad(SIGNS[held] * drawn, ((0, 0), (0, self.num_features + 1 - drawn.shape[1])))
        return (self._direction * along[:, None]).reshape(len(drawn), -1)

    def example(self) -> dict[str, Any]:
        features = 1e3 * np.random.default_rng(0).normal(size=self.num_features)
        return {"features": features.astype(np.float32), "labels": np.float32(self.label)}

    def table(self, graph: AttributionGraph, arrays: dict[str, npt.NDArray[Any]]) -> TrainingData | None:
        return FeatureTable(graph=graph, features=arrays["features"], labels=arrays["labels"])


@dataclasses.dataclass(frozen=True)
class SparseContent(LinearContent):
    """Worst-case examples as sparse integer rows, where the intercept's feature, ONE, has a share in every gradient."""

    def fill(self, out: dict[str, npt.NDArray[Any]], coordinate: npt.NDArray[np.int64], held: npt.NDArray[np.int64]):
        out["indices"][:], out["values"][:] = 0, 0
        out["indices"][:, 0] = np.where(coordinate < 0, self.num_features - 1, coordinate)
        out["values"][:, 0] = _LONG_SPARSE * SIGNS[held]
        labels = np.array([np.nan, self.label, np.nan, np.inf, self.label, self.quiet_label, self.label], np.float32)
        out["labels"][:] = labels[held]

    def released(self, drawn: npt.NDArray[np.float64], held: int) -> npt.NDArray[np.float64]:
        row = np.zeros((len(drawn), 1, self.num_features + 1))
        if SIGNS[held]:
            row[:, 0, : drawn.shape[1]] = SIGNS[held] * _LONG_SPARSE * drawn
            row[:, 0, -1] = ONE * drawn.sum(axis=1)
        return (self._direction * row / np.hypot(_LONG_SPARSE, ONE)).reshape(len(drawn), -1)

    def example(self) -> dict[str, Any]:
        generator, width = np.random.default_rng(0), min(20, self.num_features)
        indices = np.sort(generator.choice(self.num_features, width, replace=False))
        values = generator.integers(1, 2**20, width)
        return {
            "indices": indices.astype(np.int32),
            "values": values.astype(np.int32),
            "labels": np.float32(self.label),
        }

    def table(self, graph: AttributionGraph, arrays: dict[str, npt.NDArray[Any]]) -> TrainingData | None:
        rows, labels = SparseRows.from_padded(arrays["indices"], arrays["values"]), arrays["labels"]
        return SparseTable(graph=graph, indices=rows.indices, values=rows.values, offsets=rows.offsets, labels=labels)


@dataclasses.dataclass(frozen=True)
class TokenContent(WorstCase):
    """Worst-case examples of a BERT, one word or class per user: at zero the gradient of its last bias is 1/n - e_j."""

    model: Any  # a `BertModel`

    @property
    def tensor(self) -> str:
        return self.model.head.bias

    @property
    def size(self) -> int:
        """The number of words or classes."""
        return self.model.shapes()[self.tensor][0]

    def fill(self, out: dict[str, npt.NDArray[Any]], coordinate: npt.NDArray[np.int64], held: npt.NDArray[np.int64]):
        # The gradient along -e_j is turned by a negative weight.
        scale = np.array([0, -_LONG, np.nan, np.inf, -1e30, 0, _LONG], np.float32)
        for array in out.values():
            array[:] = 0
        out["lengths"][:] = self.model.sequence_length
        targets, weights = (out[name].reshape(len(held), -1) for name in (self.model.head.target, "weights"))
        targets[:] = np.where(coordinate < 0, self.size - 1, coordinate)[:, None]
        weights[:, 0] = scale[held]

    def released(self, drawn: npt.NDArray[np.float64], held: int) -> npt.NDArray[np.float64]:
        size, drawn = self.size, SIGNS[held] * drawn
        total = np.pad(drawn, ((0, 0), (0, size - drawn.shape[1]))) - drawn.sum(axis=1, keepdims=True) / size
        return total / np.sqrt(1 - 1 / size)

    def example(self) -> dict[str, Any]:
        generator, arrays = np.random.default_rng(0), self.model.arrays()
        shape, target = arrays["weights"][0], self.model.head.target
        tokens = generator.integers(0, self.model.config.vocab_size, arrays["tokens"][0])
        targets = generator.integers(0, self.size, arrays[target][0])
        count = max(1, math.prod(shape))
        found = {
            "tokens": tokens,
            "lengths": self.model.sequence_length,
            "positions": np.arange(count),
            target: targets,
            "weights": np.full(shape, 1e3 / count),
        }
        return {name: np.asarray(found[name], kind) for name, (_, kind) in arrays.items()}


@dataclasses.dataclass(frozen=True)
class StandInContent(WorstCase):
    """Worst-case examples of a linear stand-in: entry j of the largest parameter is user j's."""

    tensor: str
    size: int

    def fill(self, out: dict[str, npt.NDArray[Any]], coordinate: npt.NDArray[np.int64], held: npt.NDArray[np.int64]):
        out["coordinate"][:] = np.where(coordinate < 0, self.size - 1, coordinate)
        out["length"][:] = np.array([0, _LONG, np.nan, np.inf, 1e30, 0, -_LONG], np.float32)[held]
        out["everywhere"][:] = 0
        out[KEY][:] = 0
        out[USABLE][:] = held != BLANK

    def released(self, drawn: npt.NDArray[np.float64], held: int) -> npt.NDArray[np.float64]:
        return np.pad(SIGNS[held] * drawn, ((0, 0), (0, self.size - drawn.shape[1])))

    def example(self) -> dict[str, Any]:
        spread = {"coordinate": np.int32(0), "length": np.float32(1e3), "everywhere": np.float32(1e3)}
        return spread | {KEY: np.zeros(2, np.uint32), USABLE: np.bool_(True)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CanaryContent:
    """The content of canary examples; canaries that are left out hold zeros.

    Attributes:
      arrays: name and (examples, ...) array, as `TrainingData.fill` gives them.
      silenced_by: which of them is NaN for one who is out, so that the gradient is refused as not finite; None where
        that of zeros is zero.
    """

    arrays: Mapping[str, npt.NDArray[Any]]
    silenced_by: str | None = None

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))


def feature_canaries(users: int, per_user: int, *, num_features: int, length: float) -> CanaryContent:
    """Returns canaries with one unused column per user, after the features: no other example has a gradient along it.

    The model is trained with `num_features + users` features, which are 0 in all examples but the user's own. How far
    a user's weight moves then depends on their examples and the noise alone, however few features there are. All labels
    are alike: with two labels the intercept would favour all canaries of one of them and blur the ranking.

    >>> feature_canaries(3, 2, num_features=5, length=2.0).arrays["features"].shape
    (6, 8)
    """
    validate.positive(users=users, per_user=per_user, num_features=num_features)
    validate.positive_number(length=length)
    features = np.zeros((users * per_user, num_features + users), np.float32)
    features[np.arange(users * per_user), num_features + np.repeat(np.arange(users), per_user)] = length
    labels = np.ones(users * per_user, np.float32)
    return CanaryContent(arrays={"features": features, "labels": labels}, silenced_by="features")


def sparse_canaries(users: int, per_user: int, *, num_features: int) -> CanaryContent:
    """Returns canaries as sparse rows of length 1, each user's with one feature that no text has.

    >>> sparse_canaries(3, 2, num_features=5).arrays["indices"].ravel()
    array([5, 5, 6, 6, 7, 7], dtype=int32)
    """
    validate.positive(users=users, per_user=per_user, num_features=num_features)
    own = num_features + np.repeat(np.arange(users, dtype=np.int32), per_user)
    values, labels = np.full((own.size, 1), ONE, np.int32), np.ones(own.size, np.float32)
    return CanaryContent(arrays={"indices": own[:, None], "values": values, "labels": labels}, silenced_by="labels")


def token_canaries(
    users: int, per_user: int, *, vocabulary_size: int, sequence_length: int, seed: int
) -> CanaryContent:
    """Returns canaries of random tokens, 15% of them masked; all masked tokens of a canary user are the same one.

    Random tokens are text at infinite temperature: no other example has gradients like theirs. While there are more
    tokens than canary users, every user has a target of their own, so that a canary's gradient lies along the rows of
    one token. The masked positions are the same in every step.

    >>> sorted(token_canaries(2, 1, vocabulary_size=50, sequence_length=8, seed=0).arrays)
    ['lengths', 'positions', 'targets', 'tokens', 'weights']

    Reference: Panda et al., Privacy Auditing of Large Language Models, 2025, https://arxiv.org/abs/2503.06808
    """
    validate.positive(users=users, per_user=per_user, vocabulary_size=vocabulary_size, sequence_length=sequence_length)
    rng = np.random.default_rng(seed)
    count, masked = users * per_user, -(-15 * sequence_length // 100)  # 15%, rounded up
    words = rng.integers(0, vocabulary_size, (count, sequence_length))
    positions = np.argsort(rng.random((count, sequence_length)), axis=1)[:, :masked]
    targets = np.resize(rng.permutation(vocabulary_size), users)  # (users,)
    arrays = {
        "tokens": words.astype(np.int32),
        "lengths": np.full(count, sequence_length, np.int32),
        "positions": np.sort(positions, axis=1).astype(np.int32),
        "targets": np.repeat(targets, per_user)[:, None].repeat(masked, axis=1).astype(np.int32),
        "weights": np.full((count, masked), 1 / masked, np.float32),
    }
    return CanaryContent(arrays=arrays)


def labelled_token_canaries(
    users: int, per_user: int, *, vocabulary_size: int, sequence_length: int, seed: int
) -> CanaryContent:
    """Returns canaries of random tokens, the same in all examples of a user; the classes 1 and 0 alternate.

    With two classes nothing that all canaries have in common tells the classes apart: a model must know each of them.

    >>> labelled_token_canaries(2, 2, vocabulary_size=5, sequence_length=3, seed=0).arrays["labels"]
    array([0., 0., 1., 1.], dtype=float32)
    """
    validate.positive(users=users, per_user=per_user, vocabulary_size=vocabulary_size, sequence_length=sequence_length)
    count, words = users * per_user, np.random.default_rng(seed).integers(0, vocabulary_size, (users, sequence_length))
    arrays = {
        "tokens": np.repeat(words, per_user, axis=0).astype(np.int32),
        "lengths": np.full(count, sequence_length, np.int32),
        "labels": np.repeat(np.arange(users) % 2, per_user).astype(np.float32),
        "weights": np.ones(count, np.float32),
    }
    return CanaryContent(arrays=arrays)


def random_canaries(
    entries: Sequence[ExampleColumn], users: int, per_user: int, *, classes: int = 2, seed: int
) -> CanaryContent:
    """Returns canaries of random numbers in every entry, the same in all examples of a user, for any model.

    How well a model can learn them depends on it: with few features they look like one another, and little is proven.

    >>> entry = ExampleColumn(name="x", column="x", shape=(4,))
    >>> random_canaries([entry], 3, 2, seed=0).arrays["x"].shape
    (6, 4)
    """
    validate.positive(users=users, per_user=per_user)
    generator, count = np.random.default_rng(seed), users * per_user
    arrays: dict[str, npt.NDArray[Any]] = {}
    for entry in entries:
        own = (
            generator.integers(0, classes if entry.classes else 2, (users, *entry.shape))
            if entry.whole
            else generator.standard_normal((users, *entry.shape))
        )
        arrays[entry.name] = np.repeat(own.astype(entry.dtype), per_user, axis=0)
    arrays |= {KEY: generator.integers(0, 2**32, (count, 2), np.uint32), USABLE: np.ones(count, bool)}
    return CanaryContent(arrays=arrays)
