"""Made-up data of a run's shape, in which worst-case users own as many copies as the run's bound allows.

Every worst-case user has a coordinate of the model to themself: the gradient of each of their examples is far longer
than the clip norm and lies along it, so that after clipping it is one clip norm there and nothing elsewhere. What a
step releases at that coordinate is then what a whole training of a one-parameter model would release about one user.
"""

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from coowned.attribution.graph import AttributionGraph
from coowned.audit.claims import MechanismClaim
from coowned.certificate import ContributionCertificate
from coowned.errors import InputError
from coowned.selection.selector import Schedule, Selection
from coowned.training.data import Draw, FeatureTable, TrainingData
from coowned.training.example_table import KEY, USABLE
from coowned.training.model import Model
from coowned.training.models.example_model import ExampleModel, largest_tensor
from coowned.training.models.logistic_regression import LogisticRegression

if TYPE_CHECKING:
    from coowned.training.models.bert_model import BertModel

_LONG = 1e6  # length of a gradient before clipping, for any clip norm a run may reasonably have
_IN_MEMORY = 2**25  # numbers of a feature table that is built as a whole

# What an example holds. A blank one is what zero-out adjacency compares with; the crowd is quiet or holds IN.
BLANK, IN, NOT_A_NUMBER, INFINITE, HUGE, QUIET, OPPOSITE = range(7)
SIGNS = np.array([0, 1, 0, 0, 1, 0, -1])  # what a copy of each adds, in clip norms


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """Examples of worst-case users and of a crowd, and the S or schedule that holds them."""

    graph: AttributionGraph
    selected: Selection | Schedule
    owner: npt.NDArray[np.int64]  # (examples,) the worst-case user each belongs to, -1 for the crowd's
    users: int

    @classmethod
    def like(cls, certificate: ContributionCertificate, claim: MechanismClaim, *, users: int) -> "World":
        """As many copies, distinct examples and groups (or batches) as were certified; up to so many users.

        Guarantees:
          - Every worst-case user is in as many copies as the bound allows.   (test_worst_case_users_are_at_the_bound)
          - Size, distinct examples, groups and batches are the run's.   (test_world_has_the_shape_of_the_run)
        """
        if claim.mechanism.needs_schedule:
            return cls._scheduled(claim, users)
        worst = claim.worst_user
        sizes = certificate.group_sizes or (certificate.size,)
        size = sizes[worst.group]
        users = max(1, min(users, size // worst.copies))
        repeated = min(worst.copies, max(1, certificate.most_copies_of_one_example))
        own = np.append(repeated, np.ones(worst.copies - repeated, np.int64))  # copies of each example of a user
        elsewhere = sum(sizes) - size  # copies in other groups, one example each
        crowd = size - users * worst.copies
        distinct = min(crowd, max(1, certificate.num_distinct - elsewhere - users * len(own)))
        shared = np.array([crowd // distinct + (i < crowd % distinct) for i in range(distinct)], np.int64)
        copies = np.concatenate([np.tile(own, users), shared, np.ones(elsewhere, np.int64)])
        owner = np.full(len(copies), -1)
        owner[: users * len(own)] = np.repeat(np.arange(users), len(own))
        graph, groups = _graph(owner, users), None
        if certificate.group_sizes:
            others = np.repeat(np.arange(len(sizes)), [0 if g == worst.group else n for g, n in enumerate(sizes)])
            groups = np.concatenate([np.full(len(copies) - elsewhere, worst.group), others])
        return cls(graph=graph, selected=Selection.from_copies(graph, copies, groups), owner=owner, users=users)

    @classmethod
    def _scheduled(cls, claim: MechanismClaim, users: int) -> "World":
        """Users in the same rounds, at the first positions of each batch, and the crowd everywhere else."""
        iterations, size = claim.iterations, claim.mechanism.batch_size
        assert size is not None
        users, own = max(1, min(users, size)), len(claim.worst_user.rounds)
        owner = np.concatenate([np.repeat(np.arange(users), own), np.full(iterations * size, -1)])
        slots = users * own + np.arange(iterations * size).reshape(iterations, size)
        slots[claim.worst_user.rounds, :users] = np.arange(users * own).reshape(users, own).T
        graph = _graph(owner, users)
        return cls(graph=graph, selected=Schedule.from_batches(graph, slots), owner=owner, users=users)


class Content(Protocol):
    """What examples of one kind of model hold so that their clipped gradients are known."""

    @property
    def tensor(self) -> str:
        """The parameter that worst-case gradients lie in."""
        ...

    @property
    def users(self) -> int:
        """How many users can have a coordinate of their own."""
        ...

    def shapes(self) -> dict[str, tuple[int, ...]]: ...
    def dtypes(self) -> dict[str, np.dtype[Any]]: ...

    def fill(self, out: dict[str, npt.NDArray[Any]], coordinate: npt.NDArray[np.int64], held: npt.NDArray[np.int64]):
        """Rows whose gradients, with all parameters near zero, lie along a coordinate (-1: the crowd's)."""
        ...

    def released(self, drawn: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """(steps, size of the tensor) sums of clipped gradients, for (steps, users) copies drawn, signed."""
        ...

    def example(self) -> dict[str, Any]:
        """Arrays of one ordinary example with a long gradient, in all parameters."""
        ...


@dataclasses.dataclass(frozen=True)
class LogisticContent:
    """Feature j is user j's; the last is the crowd's where there is more than one."""

    num_features: int
    tensor = "coefficients"

    @property
    def users(self) -> int:
        return max(1, self.num_features - 1)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"features": (self.num_features,), "labels": ()}

    def dtypes(self) -> dict[str, np.dtype[Any]]:
        return dict.fromkeys(self.shapes(), np.dtype(np.float32))

    def fill(self, out: dict[str, npt.NDArray[Any]], coordinate: npt.NDArray[np.int64], held: npt.NDArray[np.int64]):
        # At parameters near zero the gradient is (1/2 - label) (features, 1): a label of 1/2 has none.
        scale = np.array([np.nan, _LONG, np.nan, np.inf, 1e30, 0, _LONG], np.float32)
        out["features"][:] = 0
        out["features"][np.arange(len(held)), coordinate] = scale[held]
        out["labels"][:] = np.array([0, 0, 0, 0, 0, 0.5, 1], np.float32)[held]

    def released(self, drawn: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.pad(drawn, ((0, 0), (0, self.num_features + 1 - drawn.shape[1])))

    def example(self) -> dict[str, Any]:
        features = 1e3 * np.random.default_rng(0).normal(size=self.num_features)
        return {"features": features.astype(np.float32), "labels": np.float32(1 - (features[0] > 0))}


@dataclasses.dataclass(frozen=True)
class TokenContent:
    """Word or class j is user j's: with all parameters zero, BERT's gradient is that of its last bias, 1/n - e_j."""

    model: "BertModel"

    @property
    def tensor(self) -> str:
        return self.model.head.bias

    @property
    def size(self) -> int:
        """How many words or classes there are."""
        return self.model.shapes()[self.tensor][0]

    @property
    def users(self) -> int:
        return self.size - 1

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, (shape, _) in self.model.arrays().items()}

    def dtypes(self) -> dict[str, np.dtype[Any]]:
        return {name: np.dtype(kind) for name, (_, kind) in self.model.arrays().items()}

    def fill(self, out: dict[str, npt.NDArray[Any]], coordinate: npt.NDArray[np.int64], held: npt.NDArray[np.int64]):
        # The gradient along -e_j is turned by a negative weight.
        scale = np.array([0, -_LONG, np.nan, np.inf, -1e30, 0, _LONG], np.float32)
        for array in out.values():
            array[:] = 0
        out["lengths"][:] = self.model.sequence_length
        targets, weights = (out[name].reshape(len(held), -1) for name in (self.model.head.target, "weights"))
        targets[:] = np.where(coordinate < 0, self.size - 1, coordinate)[:, None]
        weights[:, 0] = scale[held]

    def released(self, drawn: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        size = self.size
        total = np.pad(drawn, ((0, 0), (0, size - drawn.shape[1]))) - drawn.sum(axis=1, keepdims=True) / size
        return total / np.sqrt(1 - 1 / size)

    def example(self) -> dict[str, Any]:
        generator, shapes = np.random.default_rng(0), self.shapes()
        tokens = generator.integers(0, self.model.config.vocab_size, shapes["tokens"])
        targets = generator.integers(0, self.size, shapes[self.model.head.target])
        count = max(1, math.prod(shapes["weights"]))
        found = {
            "tokens": tokens,
            "lengths": self.model.sequence_length,
            "positions": np.arange(count),
            self.model.head.target: targets,
            "weights": np.full(shapes["weights"], 1e3 / count),
        }
        return {name: np.asarray(found[name], kind) for name, kind in self.dtypes().items()}


@dataclasses.dataclass(frozen=True)
class StandInContent:
    """Number j of the largest parameter is user j's; the last is the crowd's where there is more than one."""

    tensor: str
    size: int

    @property
    def users(self) -> int:
        return max(1, self.size - 1)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"coordinate": (), "length": (), "everywhere": (), KEY: (2,), USABLE: ()}

    def dtypes(self) -> dict[str, np.dtype[Any]]:
        kinds = {
            "coordinate": np.int32,
            "length": np.float32,
            "everywhere": np.float32,
            KEY: np.uint32,
            USABLE: np.bool_,
        }
        return {name: np.dtype(kind) for name, kind in kinds.items()}

    def fill(self, out: dict[str, npt.NDArray[Any]], coordinate: npt.NDArray[np.int64], held: npt.NDArray[np.int64]):
        out["coordinate"][:] = np.where(coordinate < 0, self.size - 1, coordinate)
        out["length"][:] = np.array([0, _LONG, np.nan, np.inf, 1e30, 0, -_LONG], np.float32)[held]
        out["everywhere"][:] = 0
        out[KEY][:] = 0
        out[USABLE][:] = held != BLANK

    def released(self, drawn: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.pad(drawn, ((0, 0), (0, self.size - drawn.shape[1])))

    def example(self) -> dict[str, Any]:
        spread = {"coordinate": np.int32(0), "length": np.float32(1e3), "everywhere": np.float32(1e3)}
        return spread | {KEY: np.zeros(2, np.uint32), USABLE: np.bool_(True)}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WorldData:
    """The content of a world's examples: what those of worst-case users hold, and what the crowd's do.

    With more users than coordinates, user u has coordinate u mod their number.
    """

    world: World
    content: Content
    held: int
    crowd: int = QUIET
    one: int = -1  # index of one example that holds `content.example()`

    @property
    def graph(self) -> AttributionGraph:
        return self.world.graph

    @property
    def digest(self) -> str:
        return "made up for an audit"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.content.shapes()

    def dtypes(self) -> dict[str, np.dtype[Any]]:
        return self.content.dtypes()

    def fill(self, examples: npt.NDArray[np.int64], out: dict[str, npt.NDArray[Any]], draw: Draw | None = None) -> None:
        owner = self.world.owner[examples]
        rows = {name: array[: len(examples)] for name, array in out.items()}
        coordinate = np.where(owner < 0, -1, owner % self.content.users)
        self.content.fill(rows, coordinate, np.where(owner < 0, self.crowd, self.held))
        for name, value in self.content.example().items() if self.one in examples else ():
            rows[name][examples == self.one] = value

    def in_memory(self) -> TrainingData:
        """As a table of features where that is small enough: the trainer reads its rows in place."""
        count, shapes = self.graph.num_examples, self.shapes()
        if "features" not in shapes or count * shapes["features"][0] > _IN_MEMORY:
            return self
        out = {name: np.empty((count, *shape), np.float32) for name, shape in shapes.items()}
        self.fill(np.arange(count), out)
        return FeatureTable(graph=self.graph, features=out["features"], labels=out["labels"])


def content_for(model: Model) -> Content:
    """Worst-case content for a model; InputError where none is known."""
    if isinstance(model, LogisticRegression):
        return LogisticContent(model.shapes()["coefficients"][0] - 1)
    from coowned.training.models.bert_model import BertModel

    if isinstance(model, BertModel):
        return TokenContent(model)
    if isinstance(model, ExampleModel):  # what `audited_model` gives for one
        tensor = largest_tensor(model.shapes())
        return StandInContent(tensor, math.prod(model.shapes()[tensor]))
    raise InputError(f"the audit has no worst-case content for {type(model).__name__}")


def audited_model(model: Model) -> Model:
    """The model that an audit trains: for a loss of somebody's own one with known gradients and the same clipper.

    Whatever the loss, what a copy adds is its clipped gradient: that it is clipped, and everything after it, is tested.
    """
    return model.stand_in() if isinstance(model, ExampleModel) else model


def _graph(owner: npt.NDArray[np.int64], users: int) -> AttributionGraph:
    """Every example has one user: its owner, or somebody of the crowd."""
    crowd = owner < 0
    keys = owner.copy()
    keys[crowd] = users + np.arange(np.count_nonzero(crowd))
    count = users + int(np.count_nonzero(crowd))
    return AttributionGraph.from_csr(np.arange(len(keys) + 1), keys.astype(np.int32), num_users=count)
