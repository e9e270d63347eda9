"""Starts the processes of a run on this machine, sends them what is in memory, and waits for them."""

import contextlib
import functools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

from coowned import errors, threads
from coowned.errors import CoownedError, InputError, WorkerLostError
from coowned.progress import Progress
from coowned.runs.engines import workers_from
from coowned.training.progress import OnMetrics
from coowned.training.workers import Workers

GRACE = 30.0  # seconds in which workers end by themselves once one has
_WAIT = 0.05


def launch(
    command: Sequence[str],
    processes: int,
    *,
    send: bytes | None = None,
    told: Callable[[str], None] | None = None,
) -> int:
    """Runs one command in several processes, as workers of one run; returns the exit code of the first that failed.

    Worker 0 writes to this process's standard streams; of others only the last line of an error is shown, where worker
    0 has none.

    Guarantees:
      - None of them outlives this call, whatever ends it.   (test_no_worker_is_left)

    Args:
      command: with everything but the number of processes.
      processes: at least two.
      send: written to the standard input of each.
      told: called with each line of worker 0's standard output, in place of writing it.
    """
    if processes < 2 or processes > 4096:
        raise InputError(f"processes must be from 1 to 4096, not {processes}")
    place = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with contextlib.ExitStack() as stack:
        started: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, started)
        errors = []
        for rank in range(processes):
            errors.append(stack.enter_context(tempfile.TemporaryFile()))
            environment = os.environ | place | {"RANK": str(rank)}
            environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA's lines about other workers
            own = subprocess.DEVNULL if rank else None if told is None else subprocess.PIPE
            given = subprocess.DEVNULL if send is None else subprocess.PIPE
            started.append(
                subprocess.Popen(
                    command, env=environment, stdin=given, stdout=own, stderr=errors[rank] if rank else None
                )
            )
        for process, cores in zip(started, _parts_of_cores(processes), strict=False):
            with contextlib.suppress(OSError):  # it has ended
                os.sched_setaffinity(process.pid, cores)  # before it starts threads, which inherit it
        for process in started if send is not None else ():
            with contextlib.suppress(BrokenPipeError), process.stdin as opened:  # type: ignore[union-attr]
                opened.write(send or b"")
        if told is not None:
            with started[0].stdout as lines:  # type: ignore[union-attr]
                for line in lines:
                    told(line.decode().rstrip("\n"))
        first = _first_failed(started)
        if first is None:
            return 0
        rank, code = first
        if code < 0:
            raise WorkerLostError(
                f"worker {rank} was ended by signal {-code} ({signal.Signals(-code).name}), so all ended; the last "
                "checkpoint is kept: run the same command again, with any number of processes, to resume"
            )
        if rank:
            errors[rank].seek(0)
            lines = errors[rank].read().decode(errors="replace").strip().splitlines()
            sys.stderr.write(f"{lines[-1] if lines else f'worker {rank} ended with exit code {code}'}\n")
        return code


def _first_failed(started: list[subprocess.Popen[bytes]]) -> tuple[int, int] | None:
    """Returns (worker, exit code) of the first that failed by itself, not only because another was lost."""
    failed: dict[int, int] = {}
    last = None
    while any(process.poll() is None for process in started):
        failed |= {
            rank: code for rank, process in enumerate(started) if (code := process.poll()) and rank not in failed
        }
        if failed and last is None:
            last = time.monotonic() + GRACE
        if last is not None and time.monotonic() > last:
            break
        time.sleep(_WAIT)
    failed |= {rank: code for rank, process in enumerate(started) if (code := process.poll()) and rank not in failed}
    # Killed ones and those with an error of their own explain the others, which only lost a worker.
    return min(failed.items(), key=lambda item: (item[1] == 3, list(failed).index(item[0])), default=None)


def _end(started: list[subprocess.Popen[bytes]]) -> None:
    for process in started:
        if process.poll() is None:
            process.terminate()
    last = time.monotonic() + 5
    for process in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, last - time.monotonic()))
        if process.poll() is None:
            process.kill()
            process.wait()


def free_port() -> int:
    """Returns a port of this machine that is not in use now."""
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


def _parts_of_cores(processes: int) -> list[list[int]]:
    """Divides the cores among the processes; empty if there are too few, or if affinity is unsupported."""
    if not hasattr(os, "sched_setaffinity") or threads.cores() < processes:
        return []
    cores = sorted(os.sched_getaffinity(0))
    return [cores[rank::processes] for rank in range(processes)]


_START = "from coowned.runs.launch import serve; serve()"


class Told(NamedTuple):
    """The callbacks of a run."""

    progress: Progress | None
    announce: Callable[[str], None]
    advise: Callable[[str], object]
    on_metrics: OnMetrics | None


class Work(Protocol):
    """A training task that can be pickled."""

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
        match kind:
            case "progress" if told.progress is not None:
                told.progress(*value)
            case "announce":
                told.announce(value)
            case "advise":
                told.advise(value)
            case "metrics" if told.on_metrics is not None:
                told.on_metrics(value)
            case "error":
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
    """Trains, in a process of its own, the work read from standard input; ends the process."""
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
