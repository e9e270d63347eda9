"""Starts the processes of a run on this machine and waits for them."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

from coowned import threads
from coowned.errors import InputError, WorkerLostError

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
    """(worker, exit code) of the first that failed, or of one that says more than that another was lost."""
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
    """A port of this machine that nobody listens on now."""
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


def _parts_of_cores(processes: int) -> list[list[int]]:
    """The cores of each process; none where there are too few, or none can be named."""
    if not hasattr(os, "sched_setaffinity") or threads.cores() < processes:
        return []
    cores = sorted(os.sched_getaffinity(0))
    return [cores[rank::processes] for rank in range(processes)]
