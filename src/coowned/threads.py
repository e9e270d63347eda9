"""The machine's cores, and the threads that share work on them.

Threads of Python's own: the kernels release the interpreter lock, and numba's parallel loops end the process where two
callers enter them at once or after a fork.
"""

import collections
import concurrent.futures
import functools
import itertools
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

Result = TypeVar("Result")


def cores() -> int:
    """Returns the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def step_workers() -> concurrent.futures.ThreadPoolExecutor:
    """Returns threads in addition to the trainer's, one for each further core.

    All work of the host during a step runs on them, since one thread more than there are cores would halt one that
    others wait for.
    """
    return pool("step", os.getpid())


def run_all(tasks: Sequence[Callable[[], Result]], *, threads: int | None = None) -> list[Result]:
    """Returns the results of all tasks, in order, computed by this thread and by others that are free.

    Guarantees:
      - It ends even if every other thread is busy, so tasks may call it themselves.   (test_tasks_may_share_tasks)
      - An error of any task is raised here, after the running tasks have ended.   (test_errors_are_raised)
      - A forked process has its own threads.   (test_forked_process_has_threads_of_its_own)

    Args:
      threads: number of threads, this one included; default: one per core.

    Example:
      >>> run_all([lambda: 1, lambda: 2])
      [1, 2]
    """
    limit = min(cores() if threads is None else threads, len(tasks))
    if limit <= 1:
        return [task() for task in tasks]
    results: list[Result] = [None] * len(tasks)  # type: ignore[list-item]
    pending = collections.deque(enumerate(tasks))

    def work() -> None:
        try:
            while pending:
                try:
                    index, task = pending.popleft()
                except IndexError:  # another thread was faster
                    return
                results[index] = task()
        except BaseException:
            pending.clear()
            raise

    others = [pool("parts", os.getpid()).submit(work) for _ in range(1, limit)]
    try:
        work()
    finally:
        begun = [other for other in others if not other.cancel()]
        concurrent.futures.wait(begun)
    for other in begun:
        other.result()
    return results


def over_ranges(
    function: Callable[[int, int], Result], total: int, *, parts: int, threads: int | None = None
) -> list[Result]:
    """Calls function(begin, end) for `parts` nearly equal ranges that cover 0..total.

    >>> over_ranges(lambda begin, end: (begin, end), 10, parts=3)
    [(0, 3), (3, 6), (6, 10)]
    """
    edges = [total * part // parts for part in range(parts + 1)]
    tasks = [functools.partial(function, begin, end) for begin, end in itertools.pairwise(edges)]
    return run_all(tasks, threads=threads)


@functools.cache
def pool(purpose: str, process: int) -> concurrent.futures.ThreadPoolExecutor:
    """Returns a pool for each process: threads do not survive a fork."""
    return concurrent.futures.ThreadPoolExecutor(max(1, cores() - 1), thread_name_prefix=f"coowned-{purpose}")
