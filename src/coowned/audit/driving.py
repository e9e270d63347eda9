"""Runs the trainer itself on synthetic data and returns what every step released.

The plan is the run's own with a fresh key: `TrainingPlan.batches`, `Feeder`, the step and the noise stream are those
that trained. Plain gradient steps with a tiny learning rate from parameters of zero leave the gradients where they
were, and the change of the parameters is what was released.
"""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from coowned.mechanism.keys import RunKey
from coowned.selection.selector import Schedule, Selection
from coowned.training.checkpoint import Checkpoint
from coowned.training.data import TrainingData, with_norms
from coowned.training.loop import Trainer
from coowned.training.model import Model
from coowned.training.optimizers import OPTION_DEFAULTS
from coowned.training.plan import TrainingPlan

_SMALL = 2.0**-50  # change of a parameter by one clip norm: far too small to change any gradient
Released = dict[str, npt.NDArray[np.float64]]
"""By tensor: (steps, [members,] ...) the sum with its noise, in clip norms of the member."""


def audited(
    plan: TrainingPlan, selected: Selection | Schedule, run_key: RunKey, *, change: float = _SMALL
) -> TrainingPlan:
    """The plan with another key, on a synthetic S or schedule, with plain gradient steps.

    A test run stays one and a real run a real one, whatever the key: an audit claims nothing.

    Args:
      change: about how much one clip norm changes a parameter by; by default too little to change any gradient.
    """
    assert plan.clip_norm is not None
    key = RunKey(run_key.secret, 0 if plan.run_key.is_test_run else None)
    rate = math.ldexp(change, round(math.log2(plan.batch_size / plan.clip_norm)))  # times a power of two: exact
    return dataclasses.replace(
        plan, selected=selected, run_key=key, optimizer="sgd", learning_rate=rate, **OPTION_DEFAULTS
    )


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
    """What the first steps of a training release.

    Guarantees:
      - It is the trainer that trains: nothing of it is replaced.   (test_the_trainer_itself_is_driven)

    Args:
      plans: one, or the members of a sweep; from `audited`.
      steps: maximum number.
      resume_at: stop after so many, and go on from the checkpoint with a new trainer.
      seconds: end so long after the first step, which compiles, but not before the second (and one after resuming).
      start_from: parameters (default: all zero, so that their small changes are not rounded).
      devices: among which a batch is split.
    """
    if start_from is None:
        start_from = {name: np.zeros(shape, np.float32) for name, shape in model.shapes().items()}
    kept = {name: [array] for name, array in start_from.items()}
    read, checkpoint, began = with_norms(data), None, math.inf
    for stop in (resume_at, steps) if resume_at is not None and 0 < resume_at < steps else (steps,):
        trainer = Trainer(plans, model, devices=devices)
        state, start = trainer.initial_state(start_from), 0
        if checkpoint is not None:
            state, _, start = trainer.restore(state, checkpoint)

        def record(step: int, current: Any, rows: list, trainer: Trainer = trainer, stop: int = stop) -> None:
            for name, rows_kept in kept.items():
                rows_kept.append(np.array(current[0][name]))
            nonlocal began
            if step + 1 >= stop or time.monotonic() > began + seconds:
                raise _EnoughError(Checkpoint(step + 1, trainer.tensors(current, rows)))
            began = min(began, time.monotonic())

        try:
            trainer.run(read, state, [], start=start, after=record)
        except _EnoughError as enough:
            checkpoint = enough.args[0]
    units = np.array([plan.learning_rate * (plan.clip_norm or 1.0) / plan.batch_size for plan in plans])
    released = {name: _differences(rows, units) for name, rows in kept.items()}
    return released if len(plans) > 1 else {name: rows[:, 0] for name, rows in released.items()}


class _EnoughError(Exception):
    """Ends a training that has run far enough."""


def _differences(rows: list[npt.NDArray[np.float32]], units: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """(steps, members, ...) the decrease of each member's parameters in every step, in units."""
    values = np.array(np.broadcast_arrays(*rows), np.float64)  # all members start from the same
    return -np.diff(values, axis=0) / units.reshape(-1, *(1,) * (values.ndim - 2))
