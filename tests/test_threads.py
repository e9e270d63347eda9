"""Shared work: nothing is left out or done twice, and nobody waits for ever."""

import os
import threading
from collections import Counter

import pytest

from coowned import threads


@pytest.fixture(autouse=True)
def three_cores(monkeypatch):
    monkeypatch.setattr(threads, "cores", lambda: 3)


def test_every_task_is_run_once():
    ran = Counter()
    results = threads.run_all([lambda number=number: ran.update([number]) or number**2 for number in range(100)])
    assert results == [number**2 for number in range(100)]
    assert set(ran.values()) == {1}
    assert len(ran) == 100
    assert threads.run_all([]) == []


def test_others_take_part():
    """Two tasks that wait for each other can only end on two threads."""
    together = threading.Barrier(2, timeout=60)
    assert sorted(threads.run_all([together.wait, together.wait])) == [0, 1]


def test_tasks_may_share_tasks():
    def nested(depth):
        return 1 if depth == 0 else sum(threads.run_all([lambda: nested(depth - 1)] * 4))

    assert nested(4) == 4**4


def test_errors_are_raised():
    here, begun = threading.current_thread(), threading.Event()

    def fails():
        begun.set()
        if threading.current_thread() is not here:
            raise MemoryError("of the other thread")
        assert begun.wait(60)

    for _ in range(20):
        begun.clear()
        with pytest.raises(MemoryError, match="no memory"):
            threads.run_all([lambda: (_ for _ in ()).throw(MemoryError("no memory"))] * 5)
    together = threading.Barrier(2, timeout=60)
    with pytest.raises(MemoryError, match="other thread"):
        threads.run_all([lambda: together.wait() + 1 and fails()] * 2)


def test_forked_process_has_threads_of_its_own(monkeypatch):
    """Those of the process that was forked are not in the new one: waiting for them would never end."""
    assert threads.run_all([lambda: 1] * 4) == [1] * 4
    forked = os.getpid() + 10**9
    monkeypatch.setattr(os, "getpid", lambda: forked)
    assert threads.run_all([lambda: 1] * 4) == [1] * 4
    threads.pool("parts", forked).shutdown()
    with pytest.raises(RuntimeError):  # its own were asked: the comparison can fail
        threads.run_all([lambda: 1] * 4)


@pytest.mark.parametrize(("total", "parts"), [(0, 3), (1, 4), (10, 3), (64, 8)])
def test_ranges_make_up_the_whole(total, parts):
    ranges = threads.over_ranges(lambda begin, end: range(begin, end), total, parts=parts)
    assert [row for part in ranges for row in part] == list(range(total))
