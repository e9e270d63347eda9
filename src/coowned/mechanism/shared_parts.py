"""Threads that share the parts of a sum: each takes the next part that nobody has begun."""

from collections.abc import Callable
from typing import Any

import numpy as np

from coowned import threads
from coowned.mechanism.compiled import compiled
from coowned.mechanism.intrinsics import atomic_add


def in_parts(add_parts: Callable[..., None], given: tuple[Any, ...], parts: int) -> None:
    """Has all parts done by this thread and by others that are free; add_parts(*given, taken, done) does them.

    Guarantees:
      - Who is late, having had something else to do, finds none left and is not waited for.
        (test_who_is_late_is_not_waited_for)
      - An error of another thread is raised here.   (test_an_error_of_another_thread_is_raised)
    """
    taken, done = np.zeros(1, np.int64), np.zeros(1, np.int64)  # how many parts were begun, and how many ended
    helpers = range(1, min(parts, threads.cores()))
    others = [threads.step_workers().submit(add_parts, *given, taken, done) for _ in helpers]
    add_parts(*given, taken, done)
    if not _all_done(done, parts):
        for other in others:  # slow, or ended by an error, which is raised here
            other.result()


@compiled()
def _all_done(done, parts):
    """Waits for others' last parts, a moment only: it is awake, where a sleeping thread takes long to wake."""
    looks = 100_000
    while looks and atomic_add(done, 0) < parts:  # pyright: ignore[reportCallIssue]
        looks -= 1
    return looks > 0
