"""Several processes that train one model: nothing but exact integer sums travels between them.

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

from coowned.attribution.graph import AttributionGraph
from coowned.attribution.identifiers import utf8_buffers
from coowned.content.splits import hash_ids
from coowned.errors import CertificateMismatchError, InputError
from coowned.mechanism.batching import Batch

SHARDS = 1024  # virtual: dealt to workers in turn
_SEED = 6_117_820_935_522_413  # of the hash: a stream of its own
_MOST_COPIES = 2**28  # of a step: times the radius of a grid is below 2^63
_LOSS_UNIT = 2.0**-20  # in which losses are added up

Sums = dict[str, npt.NDArray[np.int64]]


class Workers(Protocol):
    """The processes of a run, as each of them sees it."""

    @property
    def rank(self) -> int:
        """The number of this process; worker 0 makes the run key and writes the folder."""
        ...

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    def sum(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The sum over workers of a vector as long on each; raises WorkerLostError where one does not answer."""
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
    """The copies of each batch that are one worker's.

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
        """The part of a batch, padded to one of a few sizes."""
        own = np.flatnonzero(drawn.mask & (self.shards[drawn.examples] % self.count == self.rank))
        unit = multiple_of * max(1, round(batch_size / self.count / 8 / multiple_of))  # about eight sizes at most
        size = unit * max(1, math.ceil(own.size / unit))
        examples, numbers = np.zeros(size, np.int64), np.zeros(size, np.int32)
        examples[: own.size], numbers[: own.size] = drawn.examples[own], drawn.copy_numbers[own]
        return Batch(drawn.step, examples, numbers, np.arange(size) < own.size)


def shards_of(graph: AttributionGraph) -> npt.NDArray[np.int64]:
    """(num_examples,) the virtual shard of every example.

    >>> graph = AttributionGraph.from_users_per_example([[0]] * 4096)
    >>> len(np.unique(shards_of(graph)))
    1010
    """
    offsets, data = utf8_buffers(graph.example_ids, length=graph.num_examples)
    return (hash_ids(offsets, data, graph.num_examples, _SEED) >> np.uint64(54)).astype(np.int64)  # of 64 bits: 1,024


def summed(
    workers: Workers, sums: Sums, clipped: int, mask: npt.NDArray[np.bool_], drawn: int | None
) -> tuple[Sums, int]:
    """A step's sums and number of clipped copies, over all workers.

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
    """The mean over the copies of all workers, of which this one's have this total: a metric, rounded to 2^-20."""
    found = workers.sum(np.array([round(float(total) / _LOSS_UNIT), int(count)], np.int64))
    return np.float32(found[0] * _LOSS_UNIT / max(1, int(found[1])))


def send(workers: Workers, content: bytes | None) -> bytes:
    """Gives every worker the bytes that worker 0 has; others give None."""
    own = content if workers.rank == 0 else b""
    assert own is not None
    if workers.count == 1:
        return own
    length = int(workers.sum(np.array([len(own)], np.int64))[0])
    padded = np.zeros(-(-length // 8), np.int64)
    padded.view(np.uint8)[: len(own)] = np.frombuffer(own, np.uint8)
    return workers.sum(padded).tobytes()[:length]


def agree(workers: Workers, values: Mapping[str, str]) -> None:
    """Refuses, with InputError on every worker, values that are not worker 0's.

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
