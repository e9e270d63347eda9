"""What benchmarks measure with, and the rows they give."""

import operator
import time
from collections.abc import Callable
from typing import Any, NamedTuple

_COMPARISONS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt, "=": operator.eq}


class Figure(NamedTuple):
    """A row of a benchmark; without a bar, such as "<= 1.5", it is for information only."""

    name: str
    value: float
    unit: str
    bar: str = ""

    @property
    def ok(self) -> bool | None:
        """Whether the value meets its bar; None where it has none.

        >>> Figure("time", 2.0, "s", "<= 1.5").ok
        False
        """
        if not self.bar:
            return None
        comparison, limit = self.bar.split()
        return bool(_COMPARISONS[comparison](self.value, float(limit)))


def interleaved(
    actions: dict[str, Callable[[], object]], *, rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Seconds of each action's fastest round; taken in turn, so that a busy moment hits all of them."""
    best = dict.fromkeys(actions, float("inf"))
    for action in actions.values():
        action()  # compile first
    for _ in range(rounds):
        for name, action in actions.items():
            started = clock()
            action()
            best[name] = min(best[name], clock() - started)
    return best


def timed(work: Callable[[], Any], runs: int = 1) -> tuple[float, Any]:
    """Seconds of the fastest run, and the last result."""
    fastest, answer = float("inf"), None
    for _ in range(runs):
        started = time.perf_counter()
        answer = work()
        fastest = min(fastest, time.perf_counter() - started)
    return fastest, answer
