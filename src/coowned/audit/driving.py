"""Runs the trainer itself on synthetic data and returns what every step released.

The plan is the run's own with a fresh key: `TrainingPlan.batches`, `Feeder`, the step and the noise stream are those
that trained. Plain gradient steps with a tiny learning rate from parameters of zero leave the gradients where they
were, and the change of the parameters is what was released.

Where gradients are scaled, what was released is the change times the scales, which must follow from earlier releases.
As if these had shown rows of very different sizes, scales are far apart from the first step on.

Every worst-case user of the synthetic data has a coordinate of the model to themself, and as many copies as the run's
bound allows: the gradient of each of their examples is far longer than the clip norm and lies along it, so that after
clipping it is one clip norm there and nothing elsewhere. What a step releases at that coordinate is then what a whole
training of a one-parameter model would release about one user.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from coowned.attribution.graph import AttributionGraph
from coowned.certificate import ContributionCertificate
from coowned.content.data import Draw, TrainingData, with_norms
from coowned.errors import InputError
from coowned.exact.keys import RunKey
from coowned.mechanism.banded_strategy import BandedStrategy
from coowned.mechanism.mechanism import Mechanism, WorstUser
from coowned.models.model import Model
from coowned.models.probes import QUIET, WorstCase
from coowned.selection.selector import Schedule, Selection
from coowned.training.loop import Trainer
from coowned.training.optimizers import OPTION_DEFAULTS, mean_squares
from coowned.training.plan import Checkpoint, TrainingPlan

_SMALL = 2.0**-50  # change of a parameter by one clip norm: far too small to change any gradient
_ROUNDED = 1e-3  # by which mean squares that are computed in two ways may differ, relatively
Released = dict[str, npt.NDArray[np.float64]]
"""By tensor: (steps, [members,] ...) the sum with its noise, scaled if it is, in clip norms of the member."""


def audited(
    plan: TrainingPlan, selected: Selection | Schedule, run_key: RunKey, *, change: float = _SMALL
) -> TrainingPlan:
    """Returns the plan with another key, a synthetic S or schedule, and plain gradient steps; scaled where they are.

    A test run stays one and a real run a real one, whatever the key: an audit claims nothing.

    Args:
      change: about how much one clip norm changes a parameter by; by default too little to change any gradient.
    """
    assert plan.clip_norm is not None
    key = RunKey(run_key.secret, 0 if plan.run_key.is_test_run else None)
    rate = math.ldexp(change, round(math.log2(plan.batch_size / plan.clip_norm)))  # times a power of two: exact
    options = OPTION_DEFAULTS | {"scale_gradients": plan.scale_gradients}
    return dataclasses.replace(plan, selected=selected, run_key=key, optimizer="sgd", learning_rate=rate, **options)


def drive(
    plans: Sequence[TrainingPlan],
    model: Model,
    data: TrainingData,
    *,
    steps: int,
    resume_at: int | None = None,
    seconds: float = math.inf,
    start_from: Mapping[str, npt.NDArray[np.float32]] | None = None,
    devices: int = 1,
) -> Released:
    """Returns the releases of a training's first steps.

    Guarantees:
      - It is the trainer that trains: nothing of it is replaced.   (test_the_trainer_itself_is_driven)
      - What a step with scales that do not follow from earlier releases gave is NaN.   (test_private_scales_are_seen)

    Args:
      plans: one, or the members of a sweep; from `audited`.
      steps: maximum number.
      resume_at: stop after so many, and go on from the checkpoint with a new trainer.
      seconds: end so long after the first step, which compiles, but not before the second (and one after resuming).
      start_from: parameters (default: all zero, frozen ones too, so that their small changes are not rounded).
      devices: among which a batch is split.
    """
    if start_from is None:
        model = getattr(model, "zeroed", model)
        start_from = {name: np.zeros(shape, np.float32) for name, shape in model.shapes().items()}
    seen: list[_Seen] = []
    read, checkpoint, began = with_norms(data), None, math.inf
    for stop in (resume_at, steps) if resume_at is not None and 0 < resume_at < steps else (steps,):
        trainer = Trainer(plans, model, devices=devices)
        state, start = _start(trainer, plans[0], start_from), 0
        if checkpoint is None:
            seen.append(_Seen.of(trainer, state))
        else:
            state, _, start = trainer.restore(state, checkpoint)

        def record(step: int, current: Any, rows: list, trainer: Trainer = trainer, stop: int = stop) -> None:
            seen.append(_Seen.of(trainer, current))
            nonlocal began
            if step + 1 >= stop or time.monotonic() > began + seconds:
                raise _EnoughError(Checkpoint(step + 1, trainer.tensors(current, rows)))
            began = min(began, time.monotonic())

        try:
            trainer.run(read, state, [], start=start, after=record)
        except _EnoughError as enough:
            checkpoint = enough.args[0]
    released = _released(seen, plans)
    return released if len(plans) > 1 else {name: rows[:, 0] for name, rows in released.items()}


def first_scales(plan: TrainingPlan, model: Model) -> Mapping[str, Any] | None:
    """Returns what the first step that `drive` takes multiplies gradients by; None where it leaves them as they are."""
    trainer = Trainer([plan], model)
    scales = trainer.scales(_start(trainer, plan, model.initial()))
    return None if scales is None else {name: np.asarray(array)[0] for name, array in scales.items()}


class _EnoughError(Exception):
    """Raised to end a training that has run far enough."""


def _start(trainer: Trainer, plan: TrainingPlan, parameters: Mapping[str, npt.NDArray[np.float32]]) -> Any:
    """Returns the state before the first step; with scales, as if rows of 0.01 to 10^4 times the noise came out."""
    own, kept = trainer.initial_state(parameters)
    if not plan.scale_gradients:
        return own, kept
    generator, variance = np.random.default_rng(0), _noise(plan) ** 2
    squares = {  # those of the first steps count a hundredfold
        name: np.float32(variance * 10.0 ** generator.uniform(-4, 2, array.shape))
        for name, array in kept["squares"].items()
    }
    return own, kept | {"squares": squares}


def _noise(plan: TrainingPlan) -> float:
    """Returns the standard deviation in the mean gradient, as released."""
    assert plan.clip_norm is not None
    return plan.noise_multiplier * plan.clip_norm / plan.batch_size


class _Seen(NamedTuple):
    """The parts of a state that are read; every array has a leading axis for the members."""

    parameters: dict[str, npt.NDArray[np.float32]]
    scales: dict[str, npt.NDArray[np.float32]] | None  # of the next step
    kept: dict[str, dict[str, npt.NDArray[np.float32]]]  # the mean squares that scales follow from

    @classmethod
    def of(cls, trainer: Trainer, state: Any) -> "_Seen":
        import jax

        parameters, kept = state
        scales = trainer.scales(state)
        which = () if scales is None else ("squares", "noise")
        return cls(*jax.tree.map(np.array, (parameters, scales, {name: kept[name] for name in which})))


def _released(seen: list[_Seen], plans: Sequence[TrainingPlan]) -> Released:
    """Computes the (steps, members, ...) decrease of parameters in every step, in clip norms, times the scales."""
    units = np.array([plan.learning_rate * (plan.clip_norm or 1.0) / plan.batch_size for plan in plans])
    released = {}
    for name in seen[0].parameters:
        values = np.array([own.parameters[name] for own in seen], np.float64)
        released[name] = -np.diff(values, axis=0) / units.reshape(-1, *(1,) * (values.ndim - 2))
    for step, (before, after) in enumerate(itertools.pairwise(seen)):
        if before.scales is None:
            break
        gradients = {name: rows[step] * (units[0] / plans[0].learning_rate) for name, rows in released.items()}
        follow = mean_squares(before.kept, before.scales, gradients, _noise(plans[0]))
        public = all(
            np.allclose(after.kept[which][name], array, rtol=_ROUNDED, atol=0)
            for which, arrays in follow.items()
            for name, array in arrays.items()
        )
        for name, rows in released.items():
            rows[step] *= before.scales[name] if public else np.nan
    return released


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
