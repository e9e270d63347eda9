"""What a person is told while a run goes on."""

import dataclasses
import time
from collections.abc import Callable

from coowned.accounting.guarantee import PrivacyGuarantee
from coowned.errors import CoownedError
from coowned.training.plan import TrainingPlan

Progress = Callable[[int, str], None]
"""progress(steps done, what to say beside them)."""


class Report:
    """Tells a `Progress` of steps a second, time left and privacy so far, at most a few times a second."""

    def __init__(self, plan: TrainingPlan, progress: Progress | None, start: int):
        self._plan, self._progress, self._first = plan, progress, start
        self._began = self._last = time.monotonic()
        self._spent = (0, "")

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if self._progress is None or (now - self._last < 0.2 and done < self._plan.iterations):
            return
        self._last = now
        rate = (done - self._first) / max(1e-9, now - self._began)
        left = (self._plan.iterations - done) / max(1e-9, rate)
        self._progress(done, f"{rate:,.0f} steps/s, {_duration(left)} left{self._privacy(done)}")

    def _privacy(self, done: int) -> str:
        """At tenths of the run, which are fixed before it: epsilon after the last of them that has passed."""
        iterations = self._plan.iterations
        tenth = max(1, iterations // 10)
        reached = iterations if done == iterations else done // tenth * tenth
        if reached != self._spent[0]:
            self._spent = (reached, privacy_so_far(self._plan, reached))
        return f", {self._spent[1]}" if self._spent[1] else ""


def privacy_so_far(plan: TrainingPlan, step: int) -> str:
    """What had been spent after so many steps, had the run been meant to end there; "" where there is no such figure.

    A claim only for a step that was fixed beforehand: a run that is stopped early keeps the epsilon of all its steps.
    Before the first step, and where so few cannot be accounted for, there is none: training goes on without it.
    """
    made = plan.guarantee
    if made is None or made.test_run:
        return "no guarantee"
    if step == 0:
        return ""
    try:
        spent = made.epsilon if step >= plan.iterations else _epsilon_after(plan, made, step)
    except CoownedError:
        return ""
    return f"epsilon {spent:.3g} after {step:,} steps ({made.epsilon:.3g} in all)"


def _epsilon_after(plan: TrainingPlan, made: PrivacyGuarantee, step: int) -> float:
    from coowned.accounting import calculators
    from coowned.mechanism.sampling import MinSeparation

    part = dataclasses.replace(plan.mechanism, iterations=step)
    if isinstance(part, MinSeparation):
        most = min(part.contribution_bound, -(-step // part.min_separation))
        part = dataclasses.replace(part.for_copies(most), iterations=step)
    return calculators.epsilon(part, noise_multiplier=made.noise_multiplier, delta=made.delta, adjacency=made.adjacency)


def _duration(seconds: float) -> str:
    """
    >>> _duration(3725), _duration(65), _duration(3)
    ('1:02:05', '1:05', '0:03')
    """
    minutes, seconds = divmod(int(min(seconds, 1e9)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
