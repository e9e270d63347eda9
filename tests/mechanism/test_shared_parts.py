"""Threads that share parts: none is done twice or left out, and nobody is waited for who has none."""

import os
import threading
import time

import pytest
from tests.mechanism.test_linear_sums import sums, world

from coowned import threads
from coowned.mechanism import shared_parts


def test_every_process_has_threads_of_its_own(monkeypatch):
    """Those of the process that was forked are not there in the new one: waiting for them would never end."""
    monkeypatch.setattr(threads, "cores", lambda: 2)
    given = world(4096, 150, 1)
    wanted = sums(*given)
    forked = os.getpid() + 10**9
    monkeypatch.setattr(os, "getpid", lambda: forked)
    assert sums(*given).tolist() == wanted.tolist()
    threads.step_workers().shutdown()
    with pytest.raises(RuntimeError):  # its own were asked: the comparison can fail
        sums(*given)


def test_who_is_late_is_not_waited_for(monkeypatch):
    """The other thread has something else to do: all parts are done here."""
    monkeypatch.setattr(threads, "cores", lambda: 2)
    given = world(4096, 150, 1)
    wanted = sums(*given)
    number = os.getpid() + 10**9 + 1
    monkeypatch.setattr(os, "getpid", lambda: number)
    finished = threading.Event()
    busy = threads.step_workers().submit(finished.wait, 60)
    assert sums(*given).tolist() == wanted.tolist()
    assert not busy.done()
    finished.set()


def test_an_error_of_another_thread_is_raised(monkeypatch):
    monkeypatch.setattr(threads, "cores", lambda: 2)
    here = threading.current_thread()

    def add_parts(taken, done):
        if threading.current_thread() is not here:
            taken[0] += 1
            raise MemoryError("of the other thread")
        while not taken[0]:  # until the other has taken its part
            time.sleep(0.001)
        done[0] += 1

    with pytest.raises(MemoryError, match="other thread"):
        shared_parts.in_parts(add_parts, (), 2)
