"""The order in which greedy selectors visit examples: fewest users first, ties by a keyed hash or in input order.

The hash is that of Spark SQL's xxhash64(cast(seed as bigint), cast(id as string)), compared as a signed number;
equal hashes are ordered by the id's bytes. So the order is total, the same on every engine, and depends on nothing
but the graph's ids, its users per example and the seed. An example without an id has its index for one.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from coowned.attribution.graph import AttributionGraph, read_only
from coowned.attribution.identifiers import utf8_buffers
from coowned.errors import InputError
from coowned.progress import Progress
from coowned.selection import order_kernels as kernels
from coowned.threads import cores, over_ranges

_RANGE = 1 << 22  # examples a kernel handles between two calls of progress: a fraction of a second
_BUCKET = 8192  # keys that are sorted together: with their users they fit the second-level cache
_MOST_BITS = 20  # of the hash that choose a bucket


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrderedRows:
    """The examples of a graph in walking order, each with its users: row r is example examples[r].

    Those without users come first, since they have the fewest.
    """

    examples: npt.NDArray[Any]  # (num_examples,) example indices
    counts: npt.NDArray[np.int64]  # (most users + 1,) how many examples have 0, 1, 2, ... users
    users: npt.NDArray[Any]  # (num_pairs,) the users of each row, end to end

    @property
    def num_unattributed(self) -> int:
        return int(self.counts[0])

    @property
    def attributed(self) -> npt.NDArray[Any]:
        """The examples with at least one user, in order."""
        return self.examples[self.num_unattributed :]

    @functools.cached_property
    def indptr(self) -> npt.NDArray[np.int64]:
        """Offsets (num_examples + 1,): the users of row r are users[indptr[r]:indptr[r + 1]]."""
        indptr = np.zeros(len(self.examples) + 1, np.int64)
        np.cumsum(np.repeat(np.arange(len(self.counts)), self.counts), out=indptr[1:])
        return indptr

    def attributed_rows(self) -> npt.NDArray[Any]:
        """Returns a new array of the rows with at least one user, in order."""
        return np.arange(self.num_unattributed, len(self.examples), dtype=self.examples.dtype)

    def split(self, threshold: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Returns the rows with at least one and at most `threshold` users, and those with more."""
        few, many = np.split(self.attributed_rows(), [int(self.counts[1 : threshold + 1].sum())])
        return few, many


def ordered_rows(graph: AttributionGraph, *, seed: int, ties: str, progress: Progress) -> OrderedRows:
    """Returns the examples of a graph, fewest users first, with their users laid out in that order.

    Cost: linear time; a copy of the graph's pairs, and while it sorts by hash another.

    Example:
      >>> from coowned.progress import silent
      >>> graph = AttributionGraph.from_users_per_example([[0, 1], [2], [1, 2], [0]])
      >>> ordered_rows(graph, seed=0, ties="input", progress=silent).examples
      array([1, 3, 0, 2], dtype=int32)
    """
    rows = kernels.Rows(graph.users_per_example, graph.indptr, graph.users)
    counts = np.bincount(rows.ranks, minlength=1)
    if ties == "input":
        examples, users = _input_order(rows, counts, progress)
    else:
        examples, users = _hash_order(rows, counts, graph.example_ids, seed, progress)
    return OrderedRows(examples=examples, counts=counts, users=users)


def hash_order(
    ranks: npt.NDArray[np.int32], ids: pa.Array | None, *, seed: int, progress: Progress
) -> npt.NDArray[Any]:
    rows = kernels.Rows(read_only(ranks), read_only(np.empty(0, np.int64)), read_only(np.empty(0, np.int32)))
    return _hash_order(rows, None, ids, seed, progress)[0]


def in_ranges(total: int, progress: Progress, message: str, step: int | None = None) -> Iterator[tuple[int, int]]:
    """Yields consecutive ranges of 0..total, reporting progress before each."""
    step = step or _RANGE
    for begin in range(0, total, step):
        progress(begin / total, message)
        yield begin, min(begin + step, total)


def part(progress: Progress, low: float, high: float) -> Progress:
    """Returns a progress callback for the part of the work from `low` to `high`."""
    return lambda done, message: progress(low + done * (high - low), message)


def _input_order(
    rows: kernels.Rows, counts: npt.NDArray[np.int64], progress: Progress
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Sorts stably by rank; counts: number of examples of each rank."""
    layout = _layout(counts, bits=np.zeros(len(counts), np.int64))
    placed = kernels.Placed(np.empty(len(rows.ranks), np.uint64), np.empty(len(rows.users), rows.users.dtype))
    keys = np.zeros(len(rows.ranks), np.uint32)
    slot = np.cumsum(counts) - counts
    for begin, end in in_ranges(len(keys), progress, "sorting by users per example"):
        kernels.scatter(rows, keys, layout, slot, begin, end, placed)
    return placed.slots.astype(_index_type(len(keys))), placed.users


def _hash_order(
    rows: kernels.Rows, counts: npt.NDArray[np.int64] | None, ids: pa.Array | None, seed: int, progress: Progress
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Sorts by rank, then by keyed hash of the id, then by the id's bytes; counts: number of examples of each rank."""
    num_examples = len(rows.ranks)
    if num_examples >= 1 << 32:  # an example's index has half of a 64-bit number
        raise InputError(f"{num_examples} examples are too many for one machine; use the Spark engine")
    counts = np.bincount(rows.ranks, minlength=1) if counts is None else counts
    id_arrays = _id_arrays(ids, num_examples, seed)
    keys = np.empty(num_examples, np.uint32)
    for begin, end in in_ranges(num_examples, part(progress, 0.0, 0.4), "hashing ids"):
        over_ranges(
            lambda low, high, begin=begin: kernels.hash_ids(id_arrays, begin + low, begin + high, keys),
            end - begin,
            parts=4 * cores(),
        )
    # Examples of one rank are spread over 2^bits buckets by the upper bits of their hash.
    bits = np.ceil(np.log2(np.maximum(counts, 1) / _BUCKET)).clip(0, _MOST_BITS).astype(np.int64)  # (ranks,)
    layout = _layout(counts, bits)
    sizes = np.zeros(int((1 << bits).sum()), np.int64)
    kernels.count_buckets(rows, keys, layout, sizes)
    slot = np.cumsum(sizes) - sizes
    placed = kernels.Placed(np.empty(num_examples, np.uint64), np.empty(len(rows.users), rows.users.dtype))
    for begin, end in in_ranges(num_examples, part(progress, 0.4, 0.8), "sorting by users per example and hash"):
        kernels.scatter(rows, keys, layout, slot, begin, end, placed)
    found = kernels.Placed(np.empty(num_examples, _index_type(num_examples)), np.empty_like(placed.users))
    buckets = kernels.Buckets(rank=np.repeat(np.arange(len(counts)), 1 << bits), end=slot)
    step = max(_RANGE // _BUCKET, 1)
    for begin, end in in_ranges(len(sizes), part(progress, 0.8, 1.0), "sorting by hash", step):
        kernels.sort_buckets(layout, buckets, begin, end, id_arrays, placed, found)
    return found.slots, found.users


def _layout(counts: npt.NDArray[np.int64], bits: npt.NDArray[np.int64]) -> kernels.Layout:
    """Returns 2^bits buckets for each rank, with users laid out in the order of the ranks."""
    ranks = np.arange(len(counts))
    return kernels.Layout(
        first_bucket=np.cumsum(1 << bits) - (1 << bits),
        shift=(32 - bits).astype(np.uint64),
        pair_offset=np.cumsum(counts * ranks) - np.cumsum(counts) * ranks,
    )


def _index_type(num_examples: int) -> type:
    return np.int32 if num_examples < 1 << 31 else np.int64


def _id_arrays(ids: pa.Array | None, num_examples: int, seed: int) -> kernels.Ids:
    numbers, offsets, data = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint8)
    if ids is None:
        numbers = np.arange(num_examples)
    elif pa.types.is_integer(ids.type):
        numbers = ids.to_numpy()
    else:
        offsets, data = utf8_buffers(ids, length=num_examples)
    # All read-only, so that one compiled version serves every kind.
    key = np.uint64(kernels.hash_seed(np.int64(seed)))
    return kernels.Ids(key, read_only(numbers), read_only(offsets), read_only(data))
