"""Trains in several processes what is in this one's memory: sent to each, and their progress sent back."""

import functools
import json
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, Protocol

from coowned import errors
from coowned.errors import CoownedError, InputError, WorkerLostError
from coowned.progress import Progress
from coowned.runs.engines import workers_from
from coowned.runs.launch import launch
from coowned.training.progress import OnMetrics
from coowned.training.workers import Workers

_START = "from coowned.runs.given_processes import serve; serve()"


class Told(NamedTuple):
    """Who is told what happens."""

    progress: Progress | None
    announce: Callable[[str], None]
    advise: Callable[[str], object]
    on_metrics: OnMetrics | None


class Work(Protocol):
    """What is trained; it must survive `pickle`."""

    def train(self, workers: Workers, told: Told) -> None:
        """Trains as one of the workers."""
        ...


def train_in_processes(work: Work, processes: int, told: Told) -> None:
    """Trains in new processes; an error of worker 0 is raised here as the same error."""
    try:
        content = pickle.dumps((sys.path, pickle.dumps(work)))
    except Exception as error:  # pickle raises various kinds
        raise InputError(f"processes: this cannot be sent to other processes ({error}); {_REMEDY}") from error
    failed: list[tuple[str, str]] = []

    def hear(line: str) -> None:
        kind, value = json.loads(line)
        if kind == "progress" and told.progress is not None:
            told.progress(*value)
        elif kind == "announce":
            told.announce(value)
        elif kind == "advise":
            told.advise(value)
        elif kind == "metrics" and told.on_metrics is not None:
            told.on_metrics(value)
        elif kind == "error":
            failed.append(value)

    code = launch([sys.executable, "-c", _START], processes, send=content, told=hear)
    if failed:
        _raise(*failed[0])
    if code:
        raise WorkerLostError("a process of this training has failed; its last line is above")


_REMEDY = (
    "define functions and classes in a module of their own, not in a script or notebook, or train with processes=1"
)


def _raise(kind: str, message: str) -> NoReturn:
    found = getattr(errors, kind, None)
    if kind == "OSError":
        raise OSError(message)
    try:
        error = (found or CoownedError)(message)
    except TypeError:  # it needs more than a message
        error = CoownedError(message)
    raise error


def serve() -> NoReturn:
    """Trains, in a process of its own, what comes from standard input; ends the process."""
    with os.fdopen(os.dup(1), "w", buffering=1) as out:
        os.dup2(2, 1)  # whatever else is printed

        def say(kind: str, value: Any) -> None:
            out.write(json.dumps([kind, value]) + "\n")

        code = 0
        try:
            _train(sys.stdin.buffer.read(), say)
        except (CoownedError, OSError) as error:
            kind = "OSError" if isinstance(error, OSError) else type(error).__name__
            say("error", [kind, str(error)])
            sys.stderr.write(f"{error}\n")
            code = 3 if isinstance(error, WorkerLostError | OSError) else 2
    sys.stderr.flush()
    os._exit(code)  # threads may still wait for another worker


def _train(content: bytes, say: Any) -> None:
    workers = workers_from(os.environ)
    try:
        sys.path[:], sent = pickle.loads(content)
        work = pickle.loads(sent)  # its modules are found by that path
    except Exception as error:
        raise InputError(f"processes: this cannot be read in another process ({error}); {_REMEDY}") from error
    announce, advise, metrics = (functools.partial(say, kind) for kind in ("announce", "advise", "metrics"))
    work.train(workers, Told(lambda done, text: say("progress", [done, text]), announce, advise, metrics))
