"""What is kept on disk is what the sources say; threads do every part once, and wait for nobody who has none."""

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.exact.test_linear_sums import sums, world

import coowned
from coowned import threads
from coowned.exact.compiled import in_parts

PROGRAM = """
from coowned.exact.keys import RunKey
from coowned.exact.noise import NoiseStream
from coowned.exact.normals import central_normal
stream = NoiseStream(RunKey.from_seed(0), deviations=[1e6], coefficients=(1.0,), shapes={"w": (1,)}, iterations=1)
print(central_normal(0.25), int(stream.next()["w"].ravel()[0]))
"""


@pytest.mark.full
def test_a_change_in_another_file_is_seen(tmp_path):
    """Normals that are twofold in one file double the noise that another file's loop, kept on disk, makes of them."""
    shutil.copytree(Path(coowned.__file__).parent, tmp_path / "coowned", ignore=shutil.ignore_patterns("*.nb[ic]"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    environment.pop("NUMBA_CACHE_DIR", None)

    def run() -> tuple[float, int]:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        normal, noise = done.stdout.split()
        return float(normal), int(noise)

    normal, noise = run()
    assert (normal, noise) == run()
    assert normal == pytest.approx(0.6744897501960817)
    assert abs(noise) > 1000
    assert list(tmp_path.rglob("noise.round_normals*.nbc"))  # it was kept, and read the second time
    changed = tmp_path / "coowned" / "exact" / "normals.py"
    source = changed.read_text()
    once = "return q * top / low"
    assert once in source
    changed.write_text(source.replace(once, "return 2 * q * top / low"))
    doubled, more = run()
    assert doubled == 2 * normal
    assert abs(more - 2 * noise) <= 1


LOOP = """
import sys
import numpy as np
from coowned.exact.compiled import compiled, parts_left

@compiled()
def add_parts(totals, counters):
    for part in parts_left(3, counters):
        totals[0] += part

totals, counters = np.zeros(1, sys.argv[1]), np.zeros(2, np.int64)
add_parts(totals, counters)
print(totals[0], counters[1])
"""


def test_a_loop_over_parts_is_compiled_for_further_types_by_a_later_process(tmp_path):
    """Numba fails there if the generator of the parts was read from disk."""
    (tmp_path / "loop.py").write_text(LOOP)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kept")}
    for kind in ("float64", "float64", "float32"):
        command = [sys.executable, str(tmp_path / "loop.py"), kind]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["3.0", "3"]


# ---- parts ---------------------------------------------------------------------------------------------------------


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

    def add_parts(counters):
        if threading.current_thread() is not here:
            counters[0] += 1
            raise MemoryError("of the other thread")
        while not counters[0]:  # until the other has taken its part
            time.sleep(0.001)
        counters[1] += 1

    with pytest.raises(MemoryError, match="other thread"):
        in_parts(add_parts, (), 2)
