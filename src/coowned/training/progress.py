"""Progress of a run: speed, privacy spent so far, and training curves that no guarantee covers."""

import io
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from coowned.accounting import calculators
from coowned.accounting.statement import rounded_down, rounded_up
from coowned.errors import CoownedError
from coowned.progress import Progress, counted, duration
from coowned.training.plan import TrainingPlan

if TYPE_CHECKING:
    import polars as pl

_PAUSE = 0.2  # seconds between two reports
_WINDOW = 10.0  # seconds that steps a second are counted over

NOT_COVERED = (
    "Not covered by the guarantee: losses, clipped shares and batch sizes depend on raw content and on the secret "
    "coins. Show them only to people who may see the data."
)

OnMetrics = Callable[[dict[str, Any]], object]
"""Called as on_metrics({"step": 20, "loss": 0.41, "clipped_share": 0.9, "copies": 251}) at some steps."""


class Report:
    """A reporter of steps per second, time left and privacy so far to a `Progress`, at most a few times a second.

    Guarantees:
      - Steps a second and time left are those of the last seconds: the first step, which waits for the compiler, and
        slow times long past are not in them.   (test_speed_is_that_of_the_last_seconds)
      - Privacy so far is reported for tenths of the run, which are fixed before it, and for no other step.
        (test_privacy_is_told_for_tenths_alone)
    """

    def __init__(self, plan: TrainingPlan, progress: Progress | None):
        self._plan, self._progress = plan, progress
        self._told: deque[tuple[float, int]] = deque()  # when, and after how many steps, within the last seconds
        self._spent = (0, "")

    def __call__(self, done: int) -> None:
        if self._progress is None:
            return
        now, reports = time.monotonic(), self._told
        if reports and now - reports[-1][0] < _PAUSE and done < self._plan.iterations:
            return
        reports.append((now, done))
        while len(reports) > 2 and now - reports[0][0] > _WINDOW:
            reports.popleft()
        self._progress(done / self._plan.iterations, ", ".join([*self._speed(), *self._privacy(done)]))

    def _speed(self) -> list[str]:
        (began, first), (now, done) = self._told[0], self._told[-1]
        if done == first:
            return []
        rate = (done - first) / max(1e-9, now - began)
        left = (self._plan.iterations - done) / rate
        return [f"{rate:{',.0f' if rate >= 10 else '.2g'}} steps/s", f"{duration(left)} left"]

    def _privacy(self, done: int) -> list[str]:
        """Returns epsilon after the last completed tenth of the run."""
        iterations = self._plan.iterations
        tenths = 10 * done // iterations
        reached = -(-tenths * iterations // 10)
        if reached != self._spent[0]:
            self._spent = (reached, privacy_so_far(self._plan, reached))
        return [self._spent[1]] if self._spent[1] else []


def claim(plan: TrainingPlan) -> str:
    """Returns the whole claim in one line, to print above every epsilon shown during the run."""
    guarantee = plan.guarantee
    if guarantee is None or guarantee.test_run:
        return f"no guarantee, {counted(plan.iterations, 'step')}"
    steps = "its only step" if plan.iterations == 1 else f"all {plan.iterations:,} steps"
    if guarantee.tuning is not None:
        steps = "the whole tuning"
    text = f"epsilon {guarantee.shown_epsilon} in {steps} ({guarantee.terms()})"
    cost, evaluation = [], guarantee.evaluation
    if evaluation is not None and evaluation.unshared_noise_multiplier is not None:
        without = rounded_down(evaluation.unshared_noise_multiplier)
        cost = [f"Noise multiplier {guarantee.shown_noise_multiplier}; without the covered evaluation: {without}"]
    return ". ".join([text, *cost, *guarantee.warnings()])


def privacy_so_far(plan: TrainingPlan, step: int) -> str:
    """Returns the privacy spent if the run had been planned to end at this step; "" if there is no such figure.

    A claim only for a step that was fixed beforehand: a run that is stopped early keeps the epsilon of all its steps.
    Before the first step, and where so few cannot be accounted for, there is none: training goes on without it.
    """
    guarantee = plan.guarantee
    if guarantee is None or guarantee.test_run:
        return "no guarantee"
    if step == 0 or guarantee.tuning is not None:  # which has no part that ends after a step
        return ""
    spent = guarantee.shown_epsilon
    if step < plan.iterations:
        terms = {name: getattr(guarantee, name) for name in ("noise_multiplier", "delta", "adjacency")}
        try:
            spent = rounded_up(calculators.epsilon(plan.mechanism.after(step), **terms))
        except CoownedError:
            return ""
    return f"epsilon {spent} after {counted(step, 'step')}"


class StepMetrics(NamedTuple):
    """Metrics of one step, whose numbers may still be on their way from a device."""

    step: int
    loss: Any  # mean over the batch, before the step
    clipped: Any  # how many copies were
    copies: int

    def row(self) -> dict[str, Any]:
        """Returns the metrics as a row of the table and for `OnMetrics`."""
        share = float(self.clipped) / max(1, self.copies)
        return {"step": self.step, "loss": float(self.loss), "clipped_share": share, "copies": self.copies}


def metrics_table(metrics: Sequence[StepMetrics]) -> "pl.DataFrame":
    """Returns a table with one row per step."""
    import polars as pl

    schema = {"step": pl.Int64, "loss": pl.Float64, "clipped_share": pl.Float64, "copies": pl.Int64}
    table = pl.DataFrame([step.row() for step in metrics], schema=schema)
    return table.with_columns(covered_by_guarantee=pl.lit(False))


def parquet_bytes(table: "pl.DataFrame", note: str) -> bytes:
    """Returns a Parquet file with a note in its metadata."""
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    pq.write_table(table.to_arrow().replace_schema_metadata({"coowned": note}), buffer)
    return buffer.getvalue()
