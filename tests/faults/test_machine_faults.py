"""A full disk, a read-only one, a clock that runs backwards, two processes at once: a clear error, nothing lost."""

import contextlib
import errno
import os
import resource
import subprocess
import time
from pathlib import Path

import pytest
from tests.faults.world import COMMANDS, DATA_OPTIONS, write_world

from coowned.cli.main import run
from coowned.runs.run_folder import RunFolder

pytestmark = pytest.mark.full


@contextlib.contextmanager
def disk(folder: Path, options: str):
    """A small disk at that path; yields whether the machine lets us mount one."""
    folder.mkdir(exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=False, capture_output=True)
    try:
        yield mounted.returncode == 0
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "-l", folder], check=True)


@contextlib.contextmanager
def full_disk(folder: Path, size: int):
    """No more than so many bytes can be written there; without the right to mount, in any one file."""
    with disk(folder, f"size={size}") as mounted:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if not mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def read_only_disk(folder: Path, monkeypatch):
    """Nothing can be written there; without the right to mount, because `open` and `mkdir` say so."""
    with disk(folder, "size=1m") as mounted:
        if mounted:
            subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
            yield
            return
        with monkeypatch.context() as patch:
            for name in ("open", "mkdir"):
                patch.setattr(os, name, _refusing(getattr(os, name), folder))
            yield


def _refusing(function, folder: Path):
    def refusing(path, *given, **more):
        writes = function is not _OPEN or (given and given[0] & (os.O_WRONLY | os.O_RDWR))
        if writes and str(path).startswith(str(folder)):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return function(path, *given, **more)

    return refusing


_OPEN = os.open


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def moved(verb: str, folder: str) -> list[str]:
    """The command of a verb, with its output in another folder."""
    return [f"{folder}/{word}" if word in ("S.parquet", "RUN") else word for word in COMMANDS[verb]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A world with a finished run, which every test copies."""
    folder = write_world(tmp_path_factory.mktemp("machine") / "world")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run(COMMANDS["train"]) == 0
    return folder


@pytest.mark.parametrize("verb", ["select", "train"])
def test_full_disk(trained, monkeypatch, capsys, verb):
    """Exit code 3 and what to do; then, with room, the same command ends as if nothing had been."""
    monkeypatch.chdir(trained)
    room = Path(f"full {verb}")
    with full_disk(room, 4096):
        assert run(moved(verb, str(room))) == 3
        said = capsys.readouterr().err
        assert "No space left on device" in said or "File too large" in said
        assert said.splitlines()[-1].startswith("coowned: ")
        assert "Traceback" not in said
        assert [name for name in files(room) if "/." not in f"/{name}"] == []
    assert run(moved(verb, str(room))) == 0
    if verb == "train":
        kept = ("model.safetensors", "metrics.parquet", "validation.parquet")
        assert all((room / "RUN" / name).stat().st_size for name in kept)
        assert (room / "RUN" / "metrics.parquet").read_bytes() == Path("RUN/metrics.parquet").read_bytes()


def test_disk_that_fills_up_while_training(trained, monkeypatch, capsys):
    """The last checkpoint stays, and the run is resumed from it to the same bits."""
    monkeypatch.chdir(trained)
    writes = []

    def full(path, content, **more):
        writes.append(path.name)
        if path.name == "validation.parquet" and writes.count("validation.parquet") == 1:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write_file(path, content, **more)

    from coowned.runs import run_folder as checkpoint

    write_file = checkpoint.write_file
    monkeypatch.setattr(checkpoint, "write_file", full)
    assert run(["train", "run.toml", "-o", "FULL"]) == 3
    assert "run the same command again to resume" in capsys.readouterr().err
    assert {"run.json", "run-key.json", "checkpoint.safetensors"} <= files(Path("FULL")).keys()
    assert run(["train", "run.toml", "-o", "FULL"]) == 0
    for name in ("metrics.parquet", "validation.parquet", "test.parquet"):
        assert Path("FULL", name).read_bytes() == Path("RUN", name).read_bytes()


@pytest.mark.parametrize(
    "command",
    [
        ["select", "mail.jsonl", *DATA_OPTIONS, "--contribution-bound", "2", "-o", "fixed/S.parquet"],
        ["train", "run.toml", "-o", "fixed/RUN"],
        ["report", "RUN", "-o", "fixed/report.html"],
        ["aliases", "mail.jsonl", *DATA_OPTIONS, "-o", "fixed/aliases.csv"],
    ],
    ids=lambda command: command[0],
)
def test_read_only_disk(trained, monkeypatch, capsys, command):
    monkeypatch.chdir(trained)
    with read_only_disk(Path("fixed"), monkeypatch):
        assert run(command) == 2
        assert "cannot be written to; choose another" in capsys.readouterr().err
        assert files(Path("fixed")) == {}


def test_clock_that_runs_backwards(trained, monkeypatch):
    """Neither the time of day nor the times of files decide anything."""
    monkeypatch.chdir(trained)
    now = iter(range(2_000_000_000, 0, -1000))
    monkeypatch.setattr(time, "time", lambda: float(next(now)))
    assert run(["train", "run.toml", "-o", "BACK"]) == 0
    assert Path("BACK/metrics.parquet").read_bytes() == Path("RUN/metrics.parquet").read_bytes()


def test_two_processes_in_one_folder(trained, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    with RunFolder.open("TWO"):
        assert run(["train", "run.toml", "-o", "TWO"]) == 2
        assert "another process is training there; wait, or choose another folder" in capsys.readouterr().err


def test_two_selections_into_one_file(trained, monkeypatch, capsys):
    """What another process wrote meanwhile is kept."""
    monkeypatch.chdir(trained)
    from coowned.selection import selection_files

    def meanwhile(path, graph, selected):
        Path("S2.parquet").write_bytes(b"of another process")
        write_selection(path, graph, selected)

    write_selection = selection_files.write_selection
    monkeypatch.setattr(selection_files, "write_selection", meanwhile)
    command = ["select", "mail.jsonl", *DATA_OPTIONS, "--contribution-bound", "2", "-o", "S2.parquet"]
    assert run(command) == 2
    assert "S2.parquet: already exists" in capsys.readouterr().err
    assert Path("S2.parquet").read_bytes() == b"of another process"
    assert not Path("S2.certificate.json").exists()
