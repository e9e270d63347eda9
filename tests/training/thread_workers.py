"""Workers of a run as threads of one process: the protocol of `coowned.training.workers` without an engine."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np


class _Meeting:
    def __init__(self, count: int):
        self.barrier, self.brought = threading.Barrier(count, timeout=120), [None] * count


class ThreadWorkers:
    """One of several workers that meet in memory."""

    def __init__(self, meeting: _Meeting, rank: int):
        self._meeting, self.rank, self.count = meeting, rank, len(meeting.brought)

    def sum(self, numbers):
        assert numbers.dtype == np.int64
        self._meeting.brought[self.rank] = numbers
        self._meeting.barrier.wait()
        total = np.sum(self._meeting.brought, axis=0)
        self._meeting.barrier.wait()  # before anybody brings the next
        return total

    def leave(self) -> None:
        """Ends the meeting for all: the others' sums fail."""
        self._meeting.barrier.abort()


def meet(count: int) -> list[ThreadWorkers]:
    """All workers of one run."""
    meeting = _Meeting(count)
    return [ThreadWorkers(meeting, rank) for rank in range(count)]


def together(count: int, work: Callable[[ThreadWorkers], Any]) -> list[Any]:
    """What work(workers) gives on each worker; the first error of one of them is raised, in the order of the ranks."""
    everybody, found, failed = meet(count), [None] * count, [None] * count

    def run(rank: int) -> None:
        try:
            found[rank] = work(everybody[rank])
        except BaseException as error:
            failed[rank] = error
            everybody[rank].leave()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [error for error in failed if error is not None]
    own = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (own or errors)[0]
    return found
