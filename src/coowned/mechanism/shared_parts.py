"""Threads that share the parts of a sum: each takes the next part that nobody has begun."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from coowned import threads
from coowned.mechanism.compiled import compiled


@intrinsic
def atomic_add(typing_context, counter, by):
    """counter[0] += by, as one operation among all threads; what it was. Others then see what was written before."""

    def generate(context, builder, signature, arguments):
        view = context.make_array(signature.args[0])(context, builder, arguments[0])
        first = context.get_constant(types.intp, 0)
        address = cgutils.get_item_pointer(context, builder, signature.args[0], view, [first])
        return builder.atomic_rmw("add", address, arguments[1], "seq_cst")

    return types.int64(counter, types.int64), generate


def in_parts(add_parts: Callable[..., None], arguments: tuple[Any, ...], parts: int) -> None:
    """Has all parts done by this thread and by others that are free; add_parts(*given, taken, done) does them.

    Guarantees:
      - Who is late, having had something else to do, finds none left and is not waited for.
        (test_who_is_late_is_not_waited_for)
      - An error of another thread is raised here.   (test_an_error_of_another_thread_is_raised)
    """
    taken, done = np.zeros(1, np.int64), np.zeros(1, np.int64)  # how many parts were begun, and how many ended
    helpers = range(1, min(parts, threads.cores()))
    others = [threads.step_workers().submit(add_parts, *arguments, taken, done) for _ in helpers]
    add_parts(*arguments, taken, done)
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
