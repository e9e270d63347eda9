"""Runs the trainer itself on synthetic data and returns what every step released.

The plan is the run's own with a fresh key: `TrainingPlan.batches`, `Feeder`, the step and the noise stream are those
that trained. Plain gradient steps with a tiny learning rate from parameters of zero leave the gradients where they
were, and the change of the parameters is what was released.

Where gradients are scaled, what was released is the change times the scales, which must follow from earlier releases.
As if these had shown rows of very different sizes, scales are far apart from the first step on.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from coowned.content.data import TrainingData, with_norms
from coowned.exact.keys import RunKey
from coowned.models.model import Model
from coowned.selection.selector import Schedule, Selection
from coowned.training.checkpoint import Checkpoint
from coowned.training.loop import Trainer
from coowned.training.optimizers import OPTION_DEFAULTS, mean_squares
from coowned.training.plan import TrainingPlan

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
