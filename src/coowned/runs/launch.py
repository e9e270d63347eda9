"""The processes of a run: connected by `jax.distributed` or `torch.distributed`, and started here on one machine.

torchrun and Kubernetes' operators set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; SLURM sets SLURM_PROCID and
SLURM_NTASKS, and the first two are then read from these. Processes that are started here get what is in memory sent,
and are waited for.
"""

import concurrent.futures
import contextlib
import datetime
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from coowned import errors, threads
from coowned.errors import CoownedError, InputError, WorkerLostError
from coowned.progress import Progress
from coowned.training.progress import OnMetrics
from coowned.training.workers import ALONE, Workers

PATIENCE = 600.0  # seconds that a worker waits for others, which may still read or select
_LOST = (
    "another worker of this run has ended or does not answer, so all end; the last checkpoint is kept: start every "
    "worker with the same command again to resume"
)


class Place(NamedTuple):
    """One process of several, and the address of worker 0."""

    rank: int
    count: int
    address: str
    port: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Place | None":
        """Reads the place from the environment; None for a single process.

        >>> Place.of({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"})
        Place(rank=1, count=2, address='10.0.0.7', port=29500)
        >>> Place.of({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None
        True
        """
        slurm = "WORLD_SIZE" not in environment
        names = ("SLURM_PROCID", "SLURM_NTASKS") if slurm else ("RANK", "WORLD_SIZE")
        if environment.get(names[1], "1") == "1":
            return None
        names = (*names, "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if name not in environment]
        if missing:
            raise InputError(
                f"the environment has {names[1]} but not {missing[0]}; set {', '.join(names)} for every worker, or "
                "unset them to train in one process"
            )
        try:
            rank, count, port = (int(environment[name]) for name in (*names[:2], names[3]))
        except ValueError:
            raise InputError(
                f"{names[0]}, {names[1]} and {names[3]} in the environment must be whole numbers"
            ) from None
        if not 0 <= rank < count:
            raise InputError(f"{names[0]} is {rank}; it must be at least 0 and below {names[1]}, which is {count}")
        return cls(rank, count, environment["MASTER_ADDR"], port)

    @property
    def unreached(self) -> str:
        return (
            f"worker {self.rank} did not reach all of the {self.count} workers at {self.address}:{self.port}; start "
            "every worker with the same MASTER_ADDR and MASTER_PORT, where worker 0 listens"
        )


def workers_from(environment: Mapping[str, str], *, patience: float = PATIENCE) -> Workers:
    """Joins the other processes that the environment names; returns a single process if it names none.

    Through `torch.distributed` where torchrun started them, otherwise through `jax.distributed`.

    Args:
      environment: `os.environ`.
      patience: seconds to wait for others.
    """
    place = Place.of(environment)
    if place is None:
        return ALONE
    return TorchWorkers(place, patience) if "TORCHELASTIC_RUN_ID" in environment else JaxWorkers(place, patience)


class Engine:
    """The parts that both engines share: the place, and the timeout of a sum.

    Guarantees:
      - A worker that dies, or is silent for `patience` seconds, ends the run on all others with WorkerLostError.
        (test_a_killed_worker_ends_the_run, test_a_silent_worker_ends_the_run)
      - So does a connection that cannot be made.   (test_a_connection_that_fails_is_told)
    """

    def __init__(self, place: Place, patience: float):
        self.rank, self.count, self._patience = place.rank, place.count, patience
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="coowned-sum")

    def sum(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Sums over workers."""
        return self._answer(lambda: self._sum(np.ascontiguousarray(numbers, np.int64)), _LOST)

    def _sum(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        raise NotImplementedError

    def _answer(self, work: Callable[[], Any], failed: str) -> Any:
        found = self._thread.submit(work)  # so that this thread can stop waiting
        try:
            return found.result(self._patience)
        except (TimeoutError, RuntimeError, ValueError) as error:  # of gloo and XLA
            why = next(iter(str(error).splitlines()), "") or f"waited {self._patience:.0f} s"
            raise WorkerLostError(f"{failed} ({why})") from error


class JaxWorkers(Engine):
    """Workers connected by `jax.distributed`: with gloo on CPUs, and natively on accelerators."""

    def __init__(self, place: Place, patience: float = PATIENCE):
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        super().__init__(place, patience)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")

        def connect() -> tuple[Any, Any]:
            where = f"{place.address}:{place.port}"
            jax.distributed.initialize(
                where,
                place.count,
                place.rank,
                cluster_detection_method="deactivate",
                # Of one machine: nobody else can join, and be sent the key.
                coordinator_bind_address=where if place.address == "127.0.0.1" else None,
                initialization_timeout=max(1, int(patience)),
                shutdown_timeout_seconds=max(1, int(patience)),
            )
            first = [next(d for d in jax.devices() if d.process_index == rank) for rank in range(place.count)]
            mesh = Mesh(np.array(first), ("worker",))
            split, whole = (NamedSharding(mesh, PartitionSpec(*names)) for names in (("worker",), ()))
            return split, jax.jit(lambda rows: rows.sum(axis=0), out_shardings=whole)

        with _quietly():  # in this thread, which reports errors, however long the other takes
            self._split, self._add = self._answer(connect, place.unreached)
            self._answer(self._leave_service, place.unreached)

    def _leave_service(self) -> None:
        """Ends the coordination service, which would abort a worker in the middle of anything when another one ends.

        A first sum connects them directly.
        """
        import jax

        self._sum(np.zeros(1, np.int64))
        jax.distributed.shutdown()

    def _sum(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        import jax

        with jax.enable_x64(True):  # int64 would silently become int32
            rows = jax.make_array_from_process_local_data(self._split, numbers[None], (self.count, numbers.size))
            total = np.asarray(self._add(rows).addressable_data(0))
        assert total.dtype == np.int64
        return total


class TorchWorkers(Engine):
    """Workers connected by `torch.distributed` with gloo; an existing group, of NCCL say, is used as it is."""

    def __init__(self, place: Place, patience: float = PATIENCE):
        import torch.distributed as distributed  # pyright: ignore[reportMissingImports]

        super().__init__(place, patience)
        if distributed.is_initialized():
            return
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        where = "env://" if agent else f"tcp://{place.address}:{place.port}"
        limit = datetime.timedelta(seconds=patience)
        self._answer(
            lambda: distributed.init_process_group(
                "gloo", init_method=where, rank=place.rank, world_size=place.count, timeout=limit
            ),
            place.unreached,
        )

    def _sum(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        import torch  # pyright: ignore[reportMissingImports]
        import torch.distributed as distributed  # pyright: ignore[reportMissingImports]

        device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
        total = torch.from_numpy(numbers.copy()).to(device)
        distributed.all_reduce(total)
        return total.cpu().numpy()


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Discards standard output, to which gloo prints, since it is the command's own; standard error stays as it is."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


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
