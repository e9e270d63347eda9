"""Kills real `coowned` processes with SIGKILL at chosen and at random moments, and reruns them until they end.

A process reports every file it opens, renames or removes through Python's audit hooks, so nothing in the package is
replaced. That tells in which phase it was killed, and lets it be killed at exactly one of these events, or while it
waits for the disk, with half of the file's bytes lost.
"""

import contextlib
import dataclasses
import itertools
import json
import random
import re
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.faults.world import COMMANDS, coowned, run_coowned, write_world

from coowned.errors import CoownedError
from coowned.runs.stored_run import StoredRun

# Phases of each verb in order: each begins with the first event that matches after the one before has begun.
PHASES = {
    "select": {
        "starting": "",
        "making room": r"os.mkdir \.S\.parquet",
        "reading and selecting": r"open mail\.jsonl",
        "writing": r"open \.S\.certificate",
        "replacing": r"os\.rename",
        "clearing away": r"shutil\.rmtree",
    },
    "train": {
        "starting": "",
        "locking": r"fcntl\.flock",
        "reading": r"open mail\.jsonl",
        "preparing": r"open RUN/\.run\.json\.part",
        "training": r"open RUN/\.checkpoint",
        "evaluating": r"open RUN/\.validation",
        "finishing": r"open RUN/\.model",
        "destroying the key": r"open RUN/run-key\.json",
    },
    "audit": {
        "starting": "",
        "reading": r"open RUN/run\.json",
        "auditing": r"open RUN/model\.safetensors",
        "writing": r"open RUN/\.audit\.json",
        "replacing": r"os\.rename",
    },
    "report": {
        "starting": "",
        "reading": r"open RUN/run\.json",
        "reading the counts": r"open RUN/graph\.json",
        "drawing": r"open RUN/audit\.json",
        "writing": r"open RUN/\.report\.html",
        "replacing": r"os\.rename",
        "clearing away": r"shutil\.rmtree",
    },
    "predict": {
        "starting": "",
        "reading the run": r"open RUN/run\.json",
        "making room": r"os.mkdir \.P\.parquet",
        "predicting": r"open mail\.jsonl",
        "replacing": r"os\.rename",
        "clearing away": r"shutil\.rmtree",
    },
}
REPORTING = """
import json, os, re, secrets, signal
_events, _kill = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT), json.loads(sys.argv[2])
del sys.argv[1:3]
_here, _seen = os.getcwd() + "/", {"event": 0, "sync": 0}
_names = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree", "fcntl.flock")

def _reached(kind, label):
    os.write(_events, f"{kind} {label}\\n".encode())
    _seen[kind] += 1
    return _seen[kind] == _kill.get(kind)

def _report(name, arguments):
    if name == "import" and str(arguments[0]).startswith("coowned."):
        label = f"import {arguments[0]}"
    elif name in _names:
        path = str(arguments[0]).removeprefix(_here).removeprefix("./")
        if path.startswith("/"):
            return
        label = f"{name} {path}"
    else:
        return
    if _reached("event", label):
        os.kill(os.getpid(), signal.SIGKILL)

def _sync(handle, sync=os.fsync):
    file = os.readlink(f"/proc/self/fd/{handle}")
    if _reached("sync", f"fsync {file.removeprefix(_here)}"):
        if os.path.isfile(file):
            os.truncate(file, os.path.getsize(file) // 2)
        os.kill(os.getpid(), signal.SIGKILL)
    sync(handle)

def _token_hex(count, token_hex=secrets.token_hex):
    return "0" * 16 if count == 8 else token_hex(count)  # the run's id, which even a test run draws at random

sys.addaudithook(_report)
os.fsync, secrets.token_hex = _sync, _token_hex
"""
_CHANGING = {"run.json", "run-key.json", "checkpoint.safetensors"}  # files of a run that has not ended
# How long an audit took, and which of the run's audits it is: one killed after its end is rightly counted.
_OF_AN_AUDIT = re.compile(rb'"seconds": [0-9.]+|"audits_run": [0-9]+|audit [0-9]+ of this run')


@dataclasses.dataclass
class Tally:
    """What came of a number of kills.

    Attributes:
      kills: processes killed, by how the moment was chosen ("time", "event", "sync").
      phases: kills in each phase.
      failures: sentences about what was not as it must be.
    """

    kills: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(("time", "event", "sync"), 0))
    phases: dict[str, int] = dataclasses.field(default_factory=dict)
    failures: list[str] = dataclasses.field(default_factory=list)

    @property
    def num_kills(self) -> int:
        return sum(self.kills.values())


class Killer:
    """The undisturbed road, a copy of the folder after each verb, and folders in which a verb is killed.

    Args:
      room: a folder for everything.
      verbs: the verbs of the road, from the first; only these can be killed.
      before: Python that every killed process runs first, to plant a fault.
    """

    def __init__(self, room: Path, *, verbs: Iterable[str] = COMMANDS, before: str = ""):
        self.room = room
        self.before = before
        self._events: dict[str, list[str]] = {}
        self._seconds: dict[str, float] = {}
        whole = write_world(room / "whole")
        for verb in verbs:
            shutil.copytree(whole, room / f"before {verb}")
            begun = time.monotonic()
            code, err, self._events[verb] = self._process(whole, verb, {}).end()
            self._seconds[verb] = time.monotonic() - begun
            assert code == 0, err
            shutil.copytree(whole, room / f"after {verb}")

    def run(self, verb: str, kills: int, *, seed: int = 0) -> Tally:
        """Kills a verb so often, up to twice in one folder; then reruns it and compares with the undisturbed files."""
        draws, tally = random.Random(f"{verb} {seed}"), Tally()
        turns = self._turns(verb, draws)
        for number in range(3 * kills):  # a process that is resumed may end before the moment of its kill
            if tally.num_kills >= kills:
                break
            folder = self.room / f"killed {verb} {number}"
            shutil.copytree(self.room / f"before {verb}", folder)
            for kept in ("accounting", "selections"):  # as in the undisturbed run, whose events are counted
                shutil.rmtree(self.room / "cache" / kept, ignore_errors=True)
            for kill in next(turns)[: kills - tally.num_kills]:
                if not self._kill(verb, folder, kill, tally):
                    break
            self._rerun(verb, folder, tally)
            shutil.rmtree(folder)
        return tally

    def kill_once(self, verb: str, kill: dict[str, float]) -> Tally:
        """Kills a verb at this moment alone, {"event": number}, {"sync": number} or {"time": seconds}."""
        tally, folder = Tally(), self.room / f"killed {verb} once"
        shutil.copytree(self.room / f"before {verb}", folder)
        self._kill(verb, folder, kill, tally)
        shutil.rmtree(folder)
        return tally

    def _turns(self, verb: str, draws: random.Random) -> Iterator[list[dict[str, float]]]:
        """For each folder an event of the next phase, then a half-written file or a time drawn over the whole run."""
        events = self._events[verb]
        phases: dict[str, list[int]] = {}  # phase -> its events, counted from 1
        count = 0
        for event, phase in zip(events, phases_of(verb, events), strict=True):
            count += event.startswith("event ")
            phases.setdefault(phase, []).append(max(1, count))
        assert list(phases) == list(PHASES[verb]), (list(phases), events)
        num_syncs = sum(event.startswith("sync ") for event in events)
        order = list(phases.values())
        draws.shuffle(order)
        for number, own in enumerate(itertools.cycle(order)):
            other = (
                {"sync": draws.randint(1, num_syncs)} if number % 2 else {"time": draws.uniform(0, self._seconds[verb])}
            )
            yield [{"event": draws.choice(own)}, other]

    def _process(self, folder: Path, verb: str, kill: dict[str, float]) -> "_Watched":
        log = self.room / "events"
        log.unlink(missing_ok=True)
        before, options = REPORTING + self.before, (str(log), json.dumps(kill))
        return _Watched(coowned(folder, *COMMANDS[verb], before=before, options=options), log)

    def _kill(self, verb: str, folder: Path, kill: dict[str, float], tally: Tally) -> bool:
        """Whether the process was killed: it may have ended before."""
        code, err, events = self._process(folder, verb, kill).end(kill.get("time"))
        [(kind, moment)] = kill.items()
        phase = (phases_of(verb, events) or ["starting"])[-1]
        name = f"{verb} killed at {kind} {moment:.3g} ({phase})"
        tally.failures += self._partial_files(verb, folder, name)
        if code != -signal.SIGKILL:
            if not _is_done(code, err):
                tally.failures.append(f"{name}: exit code {code}, {err[-300:]}")
            return False
        tally.kills[kind] += 1
        tally.phases[phase] = tally.phases.get(phase, 0) + 1
        return True

    def _partial_files(self, verb: str, folder: Path, name: str) -> list[str]:
        """Files under their own name that are not whole, and files that others could read."""
        found, reference = [], self.room / f"after {verb}"
        for file in (path for path in folder.rglob("*") if path.is_file()):
            inside = file.relative_to(folder)
            hidden = [part for part in inside.parts if part.startswith(".")]
            target = reference / inside.with_name(re.sub(r"^\.(.*?)(\.[0-9a-f]{8})?\.part$", r"\1", inside.name))
            private = target.name in _CHANGING or (target.exists() and stat.S_IMODE(target.stat().st_mode) == 0o600)
            if private and stat.S_IMODE(file.stat().st_mode) != 0o600:
                found.append(f"{name}: {inside} can be read by others")
            if not hidden and file.name not in _CHANGING and not (target.exists() and _same(file, target)):
                found.append(f"{name}: {inside} is not whole")
        with contextlib.suppress(CoownedError):  # a run that has not ended is refused
            if (folder / "RUN").is_dir() and StoredRun.open(folder / "RUN").record.state != "finished":
                found.append(f"{name}: a run that has not ended is read as one that has")
        return found

    def _rerun(self, verb: str, folder: Path, tally: Tally) -> None:
        """The same command again, now undisturbed: then every file is that of the undisturbed road."""
        code, err, _ = self._process(folder, verb, {}).end()
        if code == 2 and "--overwrite" in err:  # S is there already, whole
            code, _, err = run_coowned(folder, *COMMANDS[verb], "--overwrite")
        if not _is_done(code, err):
            tally.failures.append(f"{verb} run again: exit code {code}, {err[-300:]}")
            return
        there, wanted = _visible(folder), _visible(self.room / f"after {verb}")
        if there.keys() != wanted.keys():
            tally.failures.append(f"{verb} run again: files {sorted(there.keys() ^ wanted.keys())}")
        tally.failures += [
            f"{verb} run again: {name} has other bytes"
            for name in there.keys() & wanted.keys()
            if not _same(there[name], wanted[name])
        ]


@dataclasses.dataclass(frozen=True)
class _Watched:
    """A running process, and the file it writes its events to."""

    process: subprocess.Popen[str]
    log: Path

    def end(self, after: float | None = None) -> tuple[int, str, list[str]]:
        """(exit code, stderr, events) when it has ended by itself, or was killed after so many seconds."""
        try:
            _, err = self.process.communicate(timeout=300 if after is None else after)
        except subprocess.TimeoutExpired:
            self.process.kill()
            _, err = self.process.communicate()
            assert after is not None, f"a process did not end within 300 s: {err}"
        events = self.log.read_text(encoding="utf-8").splitlines() if self.log.exists() else []
        return self.process.returncode, err, events


def phases_of(verb: str, events: list[str]) -> list[str]:
    """The phase of each event."""
    names, found = list(PHASES[verb]), []
    current = 0
    for event in events:
        for later in range(current + 1, len(names)):
            if re.search(PHASES[verb][names[later]], event):
                current = later
                break
        found.append(names[current])
    return found


def _is_done(code: int, err: str) -> bool:
    """Whether a process ended well, or found that all was done already."""
    return code == 0 or (code == 2 and ("this run is finished" in err or "already exists" in err))


def _visible(folder: Path) -> dict[str, Path]:
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path for name, path in files.items() if not any(part.startswith(".") for part in name.split("/"))}


def _same(one: Path, other: Path) -> bool:
    return _OF_AN_AUDIT.sub(b"", one.read_bytes()) == _OF_AN_AUDIT.sub(b"", other.read_bytes())
