"""Worker processes connected by `jax.distributed` or `torch.distributed`, found from environment variables.

torchrun and Kubernetes' operators set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; SLURM sets SLURM_PROCID and
SLURM_NTASKS, and the first two are then read from these.
"""

import concurrent.futures
import contextlib
import datetime
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from coowned.errors import InputError, WorkerLostError
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
