"""A key that several processes read serves one run, and one process at a time."""

import os
import signal
import subprocess
import sys

import pytest

from coowned.errors import InputError
from coowned.exact.claimed_keys import claimed
from coowned.exact.keys import RunKey

HOLD = """
import sys
from coowned.exact.keys import RunKey
key = RunKey.from_json(sys.stdin.readline())
with key.serving(sys.argv[1], sent=sys.argv[2] == "sent"):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COOWNED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def process():
    started = []

    def start(key, run, how="read"):
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        started.append(subprocess.Popen([sys.executable, "-c", HOLD, run, how], text=True, **pipes))
        started[-1].stdin.write(key.to_json() + "\n")
        started[-1].stdin.flush()
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.communicate()


def test_a_key_in_use_is_refused(process):
    """Also for the same run; a worker that was sent the key by the one that holds it is not refused."""
    key = RunKey.from_operating_system()
    first = process(key, "run")
    assert first.stdout.readline() == "held\n"
    with pytest.raises(InputError, match="another process is training with this run key"), key.serving("run"):
        pass
    assert process(key, "run", "sent").stdout.readline() == "held\n"
    first.communicate("\n")
    with key.serving("run"), key.serving("run"):
        pass


def test_a_key_is_held_until_its_last_use_here_ends(process):
    """Two uses that do not end in the order in which they began."""
    key = RunKey.from_operating_system()
    first, second = key.serving("run"), key.serving("run")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert "another process is training with this run key" in process(key, "run").communicate()[1]
    second.__exit__(None, None, None)
    assert process(key, "run").stdout.readline() == "held\n"


def test_another_run_is_refused_later(process):
    key = RunKey.from_operating_system()
    with key.serving("run"):
        pass
    second = process(key, "other")
    assert "was used by another run, in another process" in second.communicate()[1]
    assert second.returncode == 1
    assert process(key, "run").stdout.readline() == "held\n"


def test_a_killed_process_holds_nothing(process):
    key = RunKey.from_operating_system()
    first = process(key, "run")
    assert first.stdout.readline() == "held\n"
    first.send_signal(signal.SIGKILL)
    first.wait()
    with key.serving("run"):
        pass


def test_what_is_remembered_is_no_secret(cache):
    key = RunKey.from_operating_system()
    with key.serving("run"):
        pass
    [record] = (cache / "keys").iterdir()
    assert record.name == key.fingerprint
    assert key.secret.hex() not in record.read_text()
    assert record.stat().st_mode & 0o077 == 0


def test_test_runs_are_not_remembered(cache):
    for run in ("a", "b"):
        with RunKey.from_seed(3).serving(run):
            pass
    assert not cache.exists()


def test_a_place_that_cannot_be_written_stops_nobody(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COOWNED_CACHE", str(tmp_path / "file"))
    with claimed("name", "run"):
        pass


def test_without_a_cache_it_is_remembered_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("COOWNED_CACHE", "off")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with claimed("name", "run"):
        pass
    assert (tmp_path / f"coowned-{os.getuid()}" / "keys" / "name").exists()
