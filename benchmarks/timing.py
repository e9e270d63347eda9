"""What benchmarks measure with, and the rows they give."""

import time
from collections.abc import Callable


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


def figure(name: str, value: float, unit: str, bar: str = "", ok: bool | None = None) -> dict:
    """A row; bar is empty and ok None where a figure is only for information."""
    return {"name": name, "value": value, "unit": unit, "bar": bar, "ok": ok}
