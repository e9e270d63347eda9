"""Training one model in several processes, which exchange nothing but exact integer sums.

A step's sum of clipped gradients is an integer vector, so it does not matter who adds up which copies. Every worker
adds up its own, the sums are added over workers, and noise, release and update are computed by each from the run key
that all have: the same bits on any number of workers.
"""

import dataclasses
import hashlib
import math
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from coowned.errors import CertificateMismatchError, InputError
from coowned.mechanism.batching import Batch

_MOST_COPIES = 2**28  # of a step: times the radius of a grid is below 2^63
_LOSS_UNIT = 2.0**-20  # in which losses are added up

Sums = dict[str, npt.NDArray[np.int64]]


class Workers(Protocol):
    """The processes of a run, as seen by each of them."""

    @property
    def rank(self) -> int:
        """The number of this process; worker 0 makes the run key and writes the folder."""
        ...

    @property
    def count(self) -> int:
        """The number of processes."""
        ...

    def sum(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Sums vectors of equal length over workers; raises WorkerLostError if one does not answer."""
        ...


class SingleProcess:
    """A process that trains alone."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def count(self) -> int:
        return 1

    def sum(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return numbers


ALONE: Workers = SingleProcess()


@dataclasses.dataclass(frozen=True, eq=False)
class Share:
    """One worker's share of each batch.

    Guarantees:
      - Every copy is exactly one worker's, whichever their number.   (test_every_copy_is_one_workers)
      - The virtual shard of an example depends on its id alone.   (test_shards_follow_the_ids)

    Attributes:
      shards: (num_examples,) the virtual shard of each example.
      rank, count: of the worker.
    """

    shards: npt.NDArray[np.int64] = dataclasses.field(repr=False)
    rank: int
    count: int

    def of(self, drawn: Batch, *, batch_size: int, multiple_of: int) -> Batch:
        """Returns the worker's part of a batch, padded to one of a few sizes."""
        own = np.flatnonzero(drawn.mask & (self.shards[drawn.examples] % self.count == self.rank))
        unit = multiple_of * max(1, round(batch_size / self.count / 8 / multiple_of))  # about eight sizes at most
        size = unit * max(1, math.ceil(own.size / unit))
        examples, numbers = np.zeros(size, np.int64), np.zeros(size, np.int32)
        examples[: own.size], numbers[: own.size] = drawn.examples[own], drawn.copy_numbers[own]
        return Batch(drawn.step, examples, numbers, np.arange(size) < own.size)


def summed(
    workers: Workers, sums: Sums, clipped: int, mask: npt.NDArray[np.bool_], drawn: int | None
) -> tuple[Sums, int]:
    """Adds up a step's sums and number of clipped copies over all workers.

    Guarantees:
      - Where workers together do not hold exactly the copies that the plan's coins drew, nothing is released.
        (test_a_wrong_count_stops_the_run)

    Args:
      sums, clipped: of this worker's copies.
      mask: (batch,) True where a row of this worker's batch is real.
      drawn: how many copies the plan's coins drew in this step.
    """
    if drawn is None or drawn > _MOST_COPIES:
        raise InputError(f"a step on several workers has at most {_MOST_COPIES} copies, and their number is known")
    flat = [array.reshape(-1) for array in sums.values()]
    total = workers.sum(np.concatenate([*flat, np.array([clipped, np.count_nonzero(mask)], np.int64)]))
    if total[-1] != drawn:
        raise CertificateMismatchError(
            f"the {workers.count} workers hold {total[-1]} copies of a step for which {drawn} were drawn; their data, "
            "keys or shards differ, and nothing was released"
        )
    ends = np.cumsum([array.size for array in flat])
    parts = np.split(total[: ends[-1]], ends[:-1])
    return {name: part.reshape(sums[name].shape) for name, part in zip(sums, parts, strict=True)}, int(total[-2])


def mean_loss(workers: Workers, total: float, count: int) -> np.float32:
    """Computes the mean loss over the copies of all workers from this one's total: a metric, rounded to 2^-20."""
    found = workers.sum(np.array([round(float(total) / _LOSS_UNIT), int(count)], np.int64))
    return np.float32(found[0] * _LOSS_UNIT / max(1, int(found[1])))


def send(workers: Workers, content: bytes | None) -> bytes:
    """Sends worker 0's bytes to every worker; the others pass None."""
    own = content if workers.rank == 0 else b""
    assert own is not None
    if workers.count == 1:
        return own
    length = int(workers.sum(np.array([len(own)], np.int64))[0])
    padded = np.zeros(-(-length // 8), np.int64)
    padded.view(np.uint8)[: len(own)] = np.frombuffer(own, np.uint8)
    return workers.sum(padded).tobytes()[:length]


def agree(workers: Workers, values: Mapping[str, str]) -> None:
    """Raises InputError on every worker for values that are not worker 0's.

    Guarantees:
      - All are refused where one differs, and the error names what differs and on which worker.
        (test_workers_that_differ_are_refused)

    Args:
      values: by what an error calls them.
    """
    if workers.count == 1:
        return
    digests = b"".join(hashlib.sha256(value.encode()).digest() for value in values.values())
    own = np.frombuffer(digests, np.uint8).reshape(len(values), -1)
    first = np.frombuffer(send(workers, digests), np.uint8).reshape(len(values), -1)
    differs = np.zeros((workers.count, len(values)), np.int64)
    differs[workers.rank] = (own != first).any(axis=1)
    differs = workers.sum(differs.reshape(-1)).reshape(workers.count, -1)
    for worker, found in enumerate(differs):
        if found.any():
            named = ", ".join(name for name, one in zip(values, found, strict=True) if one)
            raise InputError(
                f"worker {worker} has another {named} than worker 0; start every worker with the same command, data, "
                "code and versions"
            )
