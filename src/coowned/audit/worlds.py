"""Synthetic data of a run's shape, in which worst-case users own as many copies as the run's bound allows.

Every worst-case user has a coordinate of the model to themself: the gradient of each of their examples is far longer
than the clip norm and lies along it, so that after clipping it is one clip norm there and nothing elsewhere. What a
step releases at that coordinate is then what a whole training of a one-parameter model would release about one user.
"""

import dataclasses
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from coowned.attribution.graph import AttributionGraph
from coowned.certificate import ContributionCertificate
from coowned.content.data import Draw, TrainingData
from coowned.errors import InputError
from coowned.mechanism.banded_strategy import BandedStrategy
from coowned.mechanism.mechanism import Mechanism, WorstUser
from coowned.models.model import Model
from coowned.models.probes import QUIET, WorstCase
from coowned.selection.selector import Schedule, Selection

_IN_MEMORY = 2**25  # numbers of a table that is built as a whole


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """Examples of worst-case users and of a crowd, and the S or schedule that holds them."""

    graph: AttributionGraph
    selected: Selection | Schedule
    owner: npt.NDArray[np.int64]  # (examples,) the worst-case user each belongs to, -1 for the crowd's
    users: int

    @classmethod
    def like(
        cls,
        certificate: ContributionCertificate,
        mechanism: Mechanism,
        *,
        users: int,
        strategy: BandedStrategy | None = None,
    ) -> "World":
        """Builds a world with the certified copies, distinct examples and groups (or batches), for up to so many users.

        Guarantees:
          - Every worst-case user is in as many copies as the bound allows.   (test_worst_case_users_are_at_the_bound)
          - Size, distinct examples, groups and batches are the run's.   (test_world_has_the_shape_of_the_run)
        """
        worst = mechanism.worst_user(strategy)
        if mechanism.needs_schedule:
            return cls._scheduled(mechanism, worst, users)
        sizes = certificate.groups.sizes if certificate.groups else (certificate.size,)
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
        if certificate.groups:
            others = np.repeat(np.arange(len(sizes)), [0 if g == worst.group else n for g, n in enumerate(sizes)])
            groups = np.concatenate([np.full(len(copies) - elsewhere, worst.group), others])
        return cls(graph=graph, selected=Selection.from_copies(graph, copies, groups), owner=owner, users=users)

    @classmethod
    def _scheduled(cls, mechanism: Mechanism, worst: WorstUser, users: int) -> "World":
        """Schedules users in the same rounds, at the first positions of each batch, and the crowd everywhere else."""
        iterations, size = mechanism.iterations, mechanism.batch_size
        assert size is not None
        users, own = max(1, min(users, size)), len(worst.rounds)
        owner = np.concatenate([np.repeat(np.arange(users), own), np.full(iterations * size, -1)])
        slots = users * own + np.arange(iterations * size).reshape(iterations, size)
        slots[worst.rounds, :users] = np.arange(users * own).reshape(users, own).T
        graph = _graph(owner, users)
        return cls(graph=graph, selected=Schedule.from_batches(graph, slots), owner=owner, users=users)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WorldData:
    """The content of a world's examples: those of worst-case users, and the crowd's.

    With more users than coordinates, user u has coordinate u mod their number.
    """

    world: World
    content: WorstCase
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
        return {name: np.shape(value) for name, value in self.content.example().items()}

    def dtypes(self) -> dict[str, np.dtype[Any]]:
        return {name: value.dtype for name, value in self.content.example().items()}

    def fill(self, examples: npt.NDArray[np.int64], out: dict[str, npt.NDArray[Any]], draw: Draw | None = None) -> None:
        owner = self.world.owner[examples]
        rows = {name: array[: len(examples)] for name, array in out.items()}
        coordinate = np.where(owner < 0, -1, owner % self.content.users)
        self.content.fill(rows, coordinate, np.where(owner < 0, self.crowd, self.held))
        for name, value in self.content.example().items() if self.one in examples else ():
            rows[name][examples == self.one] = value

    def in_memory(self) -> TrainingData:
        """Returns the table that a run reads in place, if there is one and it is small enough."""
        count, shapes, kinds = self.graph.num_examples, self.shapes(), self.dtypes()
        if count * sum(math.prod(shape) for shape in shapes.values()) > _IN_MEMORY:
            return self
        out = {name: np.empty((count, *shape), kinds[name]) for name, shape in shapes.items()}
        self.fill(np.arange(count), out)
        table = self.content.table(self.graph, out)
        return self if table is None else table


def content_for(model: Model) -> WorstCase:
    """Returns the worst-case content for a model; InputError if it has none (`coowned.models.probes.Auditable`)."""
    make = getattr(model, "worst_case", None)
    if make is None:
        raise InputError(f"the audit has no worst-case content for {type(model).__name__}; implement worst_case()")
    return make()


def audited_model(model: Model) -> Model:
    """Returns the model that an audit trains: where no gradient of it is known, another one with the same clipper.

    Whatever the loss, what a copy adds is its clipped gradient: that it is clipped, and everything after it, is tested.
    """
    make = getattr(model, "stand_in", None)
    return model if make is None else make()


def _graph(owner: npt.NDArray[np.int64], users: int) -> AttributionGraph:
    """Returns a graph in which every example has one user: its owner, or one of the crowd."""
    crowd = owner < 0
    keys = owner.copy()
    keys[crowd] = users + np.arange(np.count_nonzero(crowd))
    count = users + int(np.count_nonzero(crowd))
    return AttributionGraph.from_csr(np.arange(len(keys) + 1), keys.astype(np.int32), num_users=count)
