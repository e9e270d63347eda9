"""Compiles loops, keeps them on disk until a file that they may call changes, and divides their work among threads.

Two things that numba's public names lack: its cache looks at one file alone (hence `_cache` and `_source_stamp`,
without which nothing is kept and results are the same), and it has no atomic counter on the CPU (hence a few lines of
LLVM, without which threads could not take parts as they become free).
"""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from coowned import threads


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit` without Python's lock, kept on disk until a file of this folder or of the function's own changes.

    Numba looks at a function's own file alone: a loop that calls one of another file would go on with the old one.

    Guarantees:
      - A change in another file of either folder is seen.   (test_a_change_in_another_file_is_seen)
    What it is not: for loops that call files of other folders.
    """

    def compile_later(function: Callable[..., Any]) -> Any:
        dispatcher: Any = numba.njit(nogil=True, error_model="numpy", **options)(function)
        try:
            dispatcher.enable_caching()
        except RuntimeError:  # there is no file, as in a console
            return dispatcher
        kept: Any = getattr(dispatcher._cache, "_cache_file", None)
        if not hasattr(kept, "_source_stamp"):  # not a public part of numba: without it nothing is kept
            return numba.njit(nogil=True, error_model="numpy", **options)(function)
        folders = {Path(__file__).parent, Path(function.__code__.co_filename).parent}
        kept._source_stamp = (kept._source_stamp, *(_stamps(folder) for folder in sorted(folders)))
        return dispatcher

    return compile_later


@functools.cache
def _stamps(folder: Path) -> tuple[tuple[str, str], ...]:
    """(name, digest) of every source file: times and sizes may be the same after a change."""
    return tuple((path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in sorted(folder.glob("*.py")))


@intrinsic
def atomic_add(typing_context, counters, index, by):
    """Adds to counters[index] as one operation among all threads and returns what it was.

    Other threads then see what was written before. Numba has no atomic operation on the CPU outside of its own
    parallel loops, hence these lines of LLVM.
    """

    def generate(context, builder, signature, arguments):
        view = context.make_array(signature.args[0])(context, builder, arguments[0])
        address = cgutils.get_item_pointer(context, builder, signature.args[0], view, [arguments[1]])
        return builder.atomic_rmw("add", address, arguments[2], "seq_cst")

    return types.int64(counters, types.intp, types.int64), generate


@numba.njit(nogil=True, error_model="numpy")  # not kept: numba cannot compile calls of a generator read from disk
def parts_left(parts, counters):
    """Yields the parts that this thread takes, each the next that no thread has begun.

    counters (2,) int64: how many parts were begun, and how many ended.
    """
    while True:
        part = atomic_add(counters, 0, 1)  # pyright: ignore[reportCallIssue]
        if part >= parts:
            return
        yield part
        atomic_add(counters, 1, 1)  # pyright: ignore[reportCallIssue]


def in_parts(add_parts: Callable[..., None], arguments: tuple[Any, ...], parts: int) -> None:
    """Calls add_parts(*arguments, counters) in this thread and in others that are free; each does its `parts_left`.

    Guarantees:
      - Who is late, having had something else to do, finds none left and is not waited for.
        (test_who_is_late_is_not_waited_for)
      - An error of another thread is raised here.   (test_an_error_of_another_thread_is_raised)
    """
    counters = np.zeros(2, np.int64)
    helpers = range(1, min(parts, threads.cores()))
    others = [threads.step_workers().submit(add_parts, *arguments, counters) for _ in helpers]
    add_parts(*arguments, counters)
    if not _all_done(counters, parts):
        for other in others:  # slow, or ended by an error, which is raised here
            other.result()


@compiled()
def _all_done(counters, parts):
    """Waits for others' last parts, a moment only: it is awake, where a sleeping thread takes long to wake."""
    looks = 100_000
    while looks and atomic_add(counters, 1, 0) < parts:  # pyright: ignore[reportCallIssue]
        looks -= 1
    return looks > 0
