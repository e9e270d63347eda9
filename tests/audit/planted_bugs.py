"""Trainers with one thing wrong, the plan each is tried on, and the tests of the audit that must see it.

Every bug here is one that somebody could write, and that leaves the training loop running and the model learning. It
is planted into the code that trains: the audit is not told, and nothing of it is replaced.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.special import erfinv

from coowned import (
    AttributionGraph,
    CyclicPoisson,
    Greedy,
    GreedyMinSeparation,
    GreedyWithDuplicates,
    MinSeparation,
    PoissonSampling,
    RandomAllocation,
    Selection,
    certify,
    guarantee,
)
from coowned.audit.run_audit import RunAudit, audit_plan
from coowned.exact import normals
from coowned.exact.keys import Purpose, RunKey, random_words
from coowned.exact.linear_sums import RowsInPlace
from coowned.mechanism.banded_strategy import BandedStrategy
from coowned.mechanism.batching import CyclicPoissonBatches, PoissonBatches
from coowned.mechanism.random_allocation import AllocationBatches
from coowned.models.bert_files import BertConfig
from coowned.models.bert_model import BertModel
from coowned.models.example_model import ExampleModel, linear_stand_in
from coowned.models.logistic_regression import LogisticRegression
from coowned.models.model import Model
from coowned.models.parameter_trees import FrozenParameters
from coowned.training.loop import Trainer
from coowned.training.optimizers import compiled_scales
from coowned.training.plan import TrainingPlan
from coowned.training.step import Step

# ---- the plans ------------------------------------------------------------------------------------------------------


def graph(examples: int, per_user: int) -> AttributionGraph:
    return AttributionGraph.from_users_per_example([[i // per_user] for i in range(examples)])


@functools.cache
def poisson() -> TrainingPlan:
    given = graph(900, 4)
    return _plan(given, Greedy(contribution_bound=3).select(given), PoissonSampling, batch_size=24, iterations=24)


@functools.cache
def duplicates() -> TrainingPlan:
    """400 examples, three copies of each."""
    given = graph(400, 1)
    selected = GreedyWithDuplicates(contribution_bound=3).select(given)
    return _plan(given, selected, PoissonSampling, batch_size=24, iterations=24)


@functools.cache
def schedule() -> TrainingPlan:
    given = graph(2000, 10)
    selected = GreedyMinSeparation(batch_size=32, iterations=24, min_separation=4).select(given)
    return _plan(given, selected, MinSeparation, noise_multiplier=2.0)


@functools.cache
def cyclic() -> TrainingPlan:
    given = graph(1200, 2)
    selected = Selection.from_copies(given, np.ones(1200, int), np.arange(1200) // 2 % 4)
    return _plan(given, selected, CyclicPoisson, batch_size=30, iterations=24)


@functools.cache
def allocation() -> TrainingPlan:
    """Four groups of 120 users, four rounds in an epoch, and an epoch that ends after two of them."""
    given = graph(480, 1)
    selected = Selection.from_copies(given, np.ones(480, int), np.arange(480) % 4)
    return _plan(given, selected, RandomAllocation, batch_size=30, iterations=40)


@functools.cache
def large() -> TrainingPlan:
    """Batches of a million numbers and more."""
    given = graph(4000, 1)
    return _plan(given, Greedy(contribution_bound=1).select(given), PoissonSampling, batch_size=512, iterations=12)


@functools.cache
def scaled() -> TrainingPlan:
    return dataclasses.replace(poisson(), scale_gradients=True)


def _plan(given, selected, kind, *, noise_multiplier=1.0, **settings) -> TrainingPlan:
    certificate = certify(given, selected)
    mechanism = kind.from_certificate(certificate, **settings)
    claim = guarantee(
        certificate, mechanism, noise_multiplier=noise_multiplier, delta=1e-6, adjacency="zero-out", test_run=True
    )
    return TrainingPlan(
        certificate=certificate,
        selected=selected,
        mechanism=mechanism,
        guarantee=claim,
        clip_norm=0.3,
        learning_rate=0.1,
        run_key=RunKey.from_seed(0),
    )


class TwoTensors(LogisticRegression):
    """With a second tensor that no example has a gradient in."""

    def shapes(self):
        return super().shapes() | {"unused": (self.num_features + 1,)}

    def initial(self):
        return super().initial() | {"unused": np.zeros(self.num_features + 1, np.float32)}

    def clipped_sum(self, parameters, *rest):
        summed, clipped = super().clipped_sum(parameters, *rest)
        return {**summed, "unused": 0 * summed["coefficients"]}, clipped


SMALL = LogisticRegression(num_features=20)
WIDE = LogisticRegression(num_features=2048)
ROWS = linear_stand_in({"w": (8, 4), "b": (8,)}, 32)
SMALL_BERT = BertModel.masked_lm(
    config=BertConfig(
        vocab_size=30, hidden_size=8, num_hidden_layers=1, intermediate_size=8, max_position_embeddings=8
    ),
    sequence_length=8,
)
FROZEN_BERT = SMALL_BERT.training_only(["bert.encoder.*", "cls.predictions.bias"], SMALL_BERT.initial())[0]


# ---- the bugs --------------------------------------------------------------------------------------------------------


class ChangedNoise:
    """A stream whose rows are changed before a step reads them."""

    def __init__(self, stream: Any, change: Callable[[Any], Any]):
        self._stream, self._change = stream, change

    def next(self):
        return {name: self._change(row).astype(row.dtype) for name, row in self._stream.next().items()}


def change_noise(monkeypatch, change: Callable[[Trainer, Any], Any]) -> None:
    honest = Trainer._noise
    monkeypatch.setattr(
        Trainer,
        "_noise",
        lambda self, start: ChangedNoise(honest(self, start), functools.partial(change, self)),
    )


def scaled_noise(factor: float) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: change_noise(monkeypatch, lambda trainer, row: factor * row)


def half_noise_in_large_batches(monkeypatch):
    change_noise(monkeypatch, lambda trainer, row: row * (0.5 if trainer._plans[0].batch_size > 500 else 1.0))


def no_noise_on_one_coordinate(monkeypatch):
    def change(trainer, row):
        row = row.copy()
        row[..., 7] = 0
        return row

    change_noise(monkeypatch, change)


def noise_over_root_of_participations(monkeypatch):
    def change(trainer, row):
        mechanism = trainer._plans[0].mechanism
        return row / (math.sqrt(mechanism.contribution_bound) if mechanism.needs_schedule else 1)

    change_noise(monkeypatch, change)


def noise_repeated_on_resume(monkeypatch):
    honest = Trainer._noise
    monkeypatch.setattr(Trainer, "_noise", lambda self, start: honest(self, 0))


def noise_reused_between_steps(monkeypatch):
    forget(monkeypatch, step=0)


def same_noise_for_two_tensors(monkeypatch):
    forget(monkeypatch, tensor="any")


def forget(monkeypatch, **fixed):
    """Something is missing from the key of the noise."""
    honest = RunKey.derive_many

    def derive_many(self, purpose, **given):
        return honest(self, purpose, **(given | fixed if purpose is Purpose.NOISE else given))

    monkeypatch.setattr(RunKey, "derive_many", derive_many)


def other_correlation(monkeypatch):
    """Noise of a strategy with twice the bands: its columns are as short, but a user's overlap."""
    honest = TrainingPlan.coefficients.fget

    def coefficients(plan):
        own = honest(plan)
        return BandedStrategy(num_bands=2 * len(own), iterations=plan.iterations).coefficients

    monkeypatch.setattr(TrainingPlan, "coefficients", property(coefficients))


def short_tail(monkeypatch):
    """Normals from a uniform number that is a float32, as common generators make them: they end at 5.42."""

    def approximate(words, out):
        tail = (words & np.uint64(2**63 - 1)).astype(np.float64) * 2.0**-64
        below_one = np.nextafter(np.float32(1), np.float32(0))
        uniform = np.minimum((1 - 2 * tail).astype(np.float32), below_one)
        sign = np.where(words >> np.uint64(63), 1.0, -1.0)
        out[:] = sign * math.sqrt(2) * erfinv(uniform.astype(np.float64))

    monkeypatch.setattr(normals, "approximate", approximate)


def change_batches(monkeypatch, change: Callable[[TrainingPlan, Any], Any]) -> None:
    honest = TrainingPlan.batches
    monkeypatch.setattr(TrainingPlan, "batches", lambda plan, **given: change(plan, honest(plan, **given)))


def probability_over_distinct(monkeypatch):
    def change(plan, batches):
        if not isinstance(batches, PoissonBatches):
            return batches
        return dataclasses.replace(batches, sampling_probability=plan.batch_size / plan.selected.num_distinct)

    change_batches(monkeypatch, change)


def other_sampler(kind, base=PoissonBatches) -> Callable[[pytest.MonkeyPatch], None]:
    def change(plan, batches):
        fields = {field.name: getattr(batches, field.name) for field in dataclasses.fields(batches)}
        return kind(**fields) if type(batches) is base else batches

    return lambda monkeypatch: change_batches(monkeypatch, change)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class JointBatches(PoissonBatches):
    """One coin for every three copies in a row: a user's copies are drawn together."""

    def _draw(self, step):
        examples, numbers = self._groups[0]
        drawn = self.coins[0].draw(self.run_key.derive(Purpose.COINS, step=step), len(examples) // 3)
        together = (drawn[:, None] * 3 + np.arange(3)).ravel()
        return examples[together], numbers[together]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TruncatedBatches(PoissonBatches):
    """What is above the batch size is dropped."""

    def _draw(self, step):
        examples, numbers = super()._draw(step)
        return examples[: self.batch_size], numbers[: self.batch_size]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ShuffledBatches(PoissonBatches):
    """S is shuffled and cut into batches, anew in each epoch."""

    def _draw(self, step):
        examples, numbers = self._groups[0]
        size = max(1, round(len(examples) * self.sampling_probability))
        epoch, number = divmod(step, len(examples) // size)
        drawn = self._order(epoch)[number * size : (number + 1) * size]
        return examples[drawn], numbers[drawn]

    def _order(self, epoch):
        words = random_words(self.run_key.derive(Purpose.COINS, step=epoch), len(self._groups[0][0]))
        return np.argsort(words)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TwoRounds(CyclicPoissonBatches):
    """Every other group is drawn in the next group's round too, which is left out."""

    def _draw(self, step):
        return super()._draw(step - step % 2)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class UserInTwoGroups(CyclicPoissonBatches):
    """Examples are grouped one by one, not by their users: every other one of a group goes to the next."""

    @functools.cached_property
    def _groups(self):
        parts = [examples for examples, _ in super()._groups]
        pairs = zip(parts, parts[-1:] + parts[:-1], strict=True)
        moved = [np.concatenate((own[::2], before[1::2])) for own, before in pairs]
        return [(examples, np.zeros(len(examples), np.int32)) for examples in moved]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TwoRoundsAnEpoch(AllocationBatches):
    """Every copy is also in the round after its own."""

    def _draw(self, step):
        turn = step // self.num_groups % self.rounds_per_epoch
        before = step + self.num_groups * (-1 if turn else self.rounds_per_epoch - 1)
        examples = np.union1d(super()._draw(step)[0], super()._draw(before)[0])  # one copy each
        return examples, np.zeros(len(examples), np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RepeatedAllocation(AllocationBatches):
    """The rounds of the first epoch serve in all: the key does not know the epoch."""

    def _draw(self, step):
        return super()._draw(step % (self.num_groups * self.rounds_per_epoch))


def two_copies_of_a_user(monkeypatch):
    """The bound is not held: a user is in two copies, each with a round of its own."""
    honest = RandomAllocation.worst_user
    monkeypatch.setattr(
        RandomAllocation,
        "worst_user",
        lambda self, strategy: dataclasses.replace(honest(self, strategy), copies=2),
    )


def coins_repeated_on_resume(monkeypatch):
    honest = Trainer.run

    class FromTheStart:
        def __init__(self, batches, start):
            self._batches, self._start = batches, start

        def batch(self, step):
            return dataclasses.replace(self._batches.batch(step - self._start), step=step)

    def run(self, *given, start, **more):
        self._batches = FromTheStart(self._batches, start)
        return honest(self, *given, start=start, **more)

    monkeypatch.setattr(Trainer, "run", run)


def change_trainer(monkeypatch, change: Callable[[Trainer], None]) -> None:
    honest = Trainer.__init__

    def init(self, *given, **more):
        honest(self, *given, **more)
        change(self)

    monkeypatch.setattr(Trainer, "__init__", init)


class DividedByTheDrawn(Step):
    """Takes the mean over what was drawn, in place of the public batch size."""

    def __call__(self, state, batch, mask, noise):
        honest = Step(self.model, self.rule, self.rates, max(1, mask.sum()), self.grids, self.devices)
        return honest(state, batch, mask, noise)


def divided_by_the_drawn(monkeypatch):
    def change(trainer):
        step = trainer._step
        trainer._step = DividedByTheDrawn(step.model, step.rule, step.rates, step.batch_size, step.grids, step.devices)

    change_trainer(monkeypatch, change)


def change_sums(monkeypatch, change: Callable[..., Any], model: type = LogisticRegression) -> None:
    honest = model.clipped_sum
    monkeypatch.setattr(model, "clipped_sum", lambda self, *given: change(honest, self, *given))


def of_other_grids(honest, model, parameters, batch, mask, grids, others):
    """Clipped as on other grids, in units of its own."""
    sums, clipped = honest(model, parameters, batch, mask, others)
    units = [other.unit / own.unit for own, other in zip(grids, others, strict=True)]
    return {
        name: np.array([np.rint(unit * total) for unit, total in zip(units, totals, strict=True)]).astype(np.int64)
        for name, totals in sums.items()
    }, clipped


def leaky_clip(monkeypatch, model: type = LogisticRegression):
    """A clip that lets 5% through."""

    def change(honest, own, parameters, batch, mask, grids, devices):
        larger = [dataclasses.replace(grid, clip_norm=1.05 * grid.clip_norm) for grid in grids]
        return of_other_grids(honest, own, parameters, batch, mask, grids, larger)

    change_sums(monkeypatch, change, model)


def largest_clip_norm_for_all(monkeypatch):
    def change(honest, model, parameters, batch, mask, grids, devices):
        largest = [max(grids, key=lambda grid: grid.clip_norm)] * len(grids)
        return of_other_grids(honest, model, parameters, batch, mask, grids, largest)

    change_sums(monkeypatch, change)


def others_are_changed(monkeypatch):
    """All copies are clipped a little more where one of them is not finite or too large to be squared."""

    def change(honest, model, parameters, batch, mask, grids, devices):
        sums, clipped = honest(model, parameters, batch, mask, grids)
        features = batch["features"]
        features = features.arrays()["features"] if isinstance(features, RowsInPlace) else features
        with np.errstate(over="ignore"):
            factor = 1.0 if np.isfinite(np.square(features[mask])).all() else 1 - 3e-6
        return {name: np.rint(total * factor).astype(np.int64) for name, total in sums.items()}, clipped

    change_sums(monkeypatch, change)


def change_scaled_steps(monkeypatch, change: Callable[..., Any]) -> None:
    """change(honest step, it, scales, state, batch, mask, noise) in place of a step that scales gradients."""
    honest = Step.__call__

    def step(self, state, *given):
        scales = compiled_scales(self.rule)(state)
        return honest(self, state, *given) if scales is None else change(honest, self, scales, state, *given)

    monkeypatch.setattr(Step, "__call__", step)


def noise_scaled_like_gradients(monkeypatch):
    """Too little noise where the scale is small."""

    def change(honest, step, scales, state, batch, mask, noise):
        smaller = {name: np.rint(row * np.asarray(scales[name])).astype(row.dtype) for name, row in noise.items()}
        return honest(step, state, batch, mask, smaller)

    change_scaled_steps(monkeypatch, change)


def scales_from_gradients_without_noise(monkeypatch):
    """The mean squares that scales follow from are those of the sums before the noise."""
    import jax

    def change(honest, step, scales, state, batch, mask, noise):
        copied, none = jax.tree.map(np.array, state), {name: np.zeros_like(row) for name, row in noise.items()}
        (_, without), _ = honest(step, copied, batch, mask, none)
        (parameters, kept), clipped = honest(step, state, batch, mask, noise)
        return (parameters, kept | {"squares": without["squares"]}), clipped

    change_scaled_steps(monkeypatch, change)


def clipped_before_scaling(monkeypatch):
    """A copy adds a clip norm times the scale."""

    def change(honest, model, parameters, batch, mask, grids, devices, scales=None):
        sums, clipped = honest(model, parameters, batch, mask, grids, devices)
        if scales is None:
            return sums, clipped
        return {name: np.rint(sums[name] * np.asarray(scales[name])).astype(np.int64) for name in sums}, clipped

    change_sums(monkeypatch, change, ExampleModel)


def frozen_parameters_in_the_norm(monkeypatch):
    """Gradients are clipped as if everything were trained."""

    def change(honest, model, parameters, *given):
        whole = dataclasses.replace(model, frozen=FrozenParameters())
        sums, clipped = honest(whole, {**model.frozen.placed, **parameters}, *given)
        return {name: sums[name] for name in parameters}, clipped

    change_sums(monkeypatch, change, BertModel)


# ---- how each is caught ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planted:
    """A bug, and the tests that must see it. An honest trainer has no bug."""

    name: str
    seen_by: tuple[str, ...] = ()
    plant: Callable[[pytest.MonkeyPatch], None] | None = None
    plan: Callable[[], TrainingPlan] = poisson
    model: Model = SMALL
    trials: int = 2000

    def run(self, seed: int, *, alpha: float = 1e-3, trials: int | None = None) -> RunAudit:
        """Audits the trainer with its bug, which is removed again afterwards."""
        with pytest.MonkeyPatch.context() as monkeypatch:
            if self.plant is not None:
                self.plant(monkeypatch)
            return audit_plan(self.plan(), self.model, alpha=alpha, trials=trials or self.trials, seed=seed)


PLANTED = [
    Planted(name="1% of the noise", plant=scaled_noise(0.01), seen_by=("noise", "sweep", "zero-out curve")),
    Planted(name="10% too little noise", plant=scaled_noise(1 / 1.1), seen_by=("noise of all trials",)),
    Planted(
        name="half the noise in large batches",
        plant=half_noise_in_large_batches,
        plan=large,
        model=WIDE,
        seen_by=("noise",),
    ),
    Planted(name="no noise on one coordinate", plant=no_noise_on_one_coordinate, seen_by=("noise",)),
    Planted(
        name="noise over the root of the participations",
        plant=noise_over_root_of_participations,
        plan=schedule,
        seen_by=("noise", "zero-out curve"),
    ),
    Planted(name="noise repeated on resumption", plant=noise_repeated_on_resume, seen_by=("noise",)),
    Planted(name="noise reused between steps", plant=noise_reused_between_steps, seen_by=("noise", "zero-out curve")),
    Planted(
        name="the same noise for two tensors",
        plant=same_noise_for_two_tensors,
        model=TwoTensors(num_features=20),
        seen_by=("noise",),
    ),
    Planted(
        name="noise correlated otherwise",
        plant=other_correlation,
        plan=schedule,
        seen_by=("replace curve",),
        trials=4000,
    ),
    Planted(name="float32 noise tail", plant=short_tail, seen_by=("noise tail",)),
    Planted(
        name="probability of batch size over distinct examples",
        plant=probability_over_distinct,
        plan=duplicates,
        seen_by=("participation", "zero-out curve"),
    ),
    Planted(
        name="copies sampled jointly", plant=other_sampler(JointBatches), seen_by=("participation", "zero-out curve")
    ),
    Planted(name="truncated batches", plant=other_sampler(TruncatedBatches), seen_by=("participation",)),
    Planted(name="shuffling", plant=other_sampler(ShuffledBatches), seen_by=("participation",)),
    Planted(
        name="a group drawn in two rounds",
        plant=other_sampler(TwoRounds, CyclicPoissonBatches),
        plan=cyclic,
        seen_by=("participation",),
    ),
    Planted(
        name="one user in two groups",
        plant=other_sampler(UserInTwoGroups, CyclicPoissonBatches),
        plan=cyclic,
        seen_by=("participation",),
    ),
    Planted(
        name="two rounds in an epoch",
        plant=other_sampler(TwoRoundsAnEpoch, AllocationBatches),
        plan=allocation,
        seen_by=("participation", "zero-out curve"),
    ),
    Planted(
        name="the same rounds in every epoch",
        plant=other_sampler(RepeatedAllocation, AllocationBatches),
        plan=allocation,
        seen_by=("participation",),
    ),
    Planted(
        name="two copies of a user allocated",
        plant=two_copies_of_a_user,
        plan=allocation,
        seen_by=("zero-out curve",),
    ),
    Planted(name="coins repeated on resumption", plant=coins_repeated_on_resume, seen_by=("contributions",)),
    Planted(name="divided by the drawn size", plant=divided_by_the_drawn, seen_by=("contributions",)),
    Planted(name="clip lets 5% through", plant=leaky_clip, seen_by=("contributions", "gradient")),
    Planted(
        name="one example changes what others add",
        plant=others_are_changed,
        plan=large,
        model=WIDE,
        seen_by=("contributions",),
    ),
    Planted(name="largest clip norm for all of a sweep", plant=largest_clip_norm_for_all, seen_by=("sweep",)),
    Planted(
        name="noise scaled like the gradients",
        plant=noise_scaled_like_gradients,
        plan=scaled,
        model=ROWS,
        seen_by=("contributions",),
    ),
    Planted(
        name="scales from gradients without noise",
        plant=scales_from_gradients_without_noise,
        plan=scaled,
        model=ROWS,
        seen_by=("contributions", "gradient", "noise", "noise of all trials"),
    ),
    Planted(
        name="clipped before scaling",
        plant=clipped_before_scaling,
        plan=scaled,
        model=ROWS,
        seen_by=("contributions", "gradient"),
    ),
    Planted(
        name="frozen parameters in the norm",
        plant=frozen_parameters_in_the_norm,
        model=FROZEN_BERT,
        seen_by=("gradient",),
    ),
    Planted(
        name="clip of a partly frozen BERT lets 5% through",
        plant=functools.partial(leaky_clip, model=BertModel),
        model=FROZEN_BERT,
        seen_by=("contributions", "gradient"),
    ),
]

HONEST = [
    Planted(name="Poisson"),
    Planted(name="Poisson with duplicates", plan=duplicates),
    Planted(name="min separation", plan=schedule),
    Planted(name="cyclic", plan=cyclic),
    Planted(name="random allocation", plan=allocation),
    Planted(name="summed on the host", plan=large, model=WIDE),
    Planted(name="two tensors", model=TwoTensors(num_features=20)),
    Planted(name="scaled gradients", plan=scaled, model=ROWS),
    Planted(name="partly frozen BERT", model=FROZEN_BERT),
]
