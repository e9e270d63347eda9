"""The order that every greedy walks: fewest users first, ties by a keyed hash of the id or by position.

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

from coowned.attribution.graph import AttributionGraph
from coowned.attribution.identifiers import utf8_buffers
from coowned.errors import InputError
from coowned.selection import order_kernels as kernels
from coowned.selection.selector import Progress

_RANGE = 1 << 22  # examples a kernel handles between two calls of progress: a fraction of a second
_BUCKET = 8192  # keys that are sorted together: with their users they fit the second-level cache


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExampleOrder:
    """All examples of a graph in walking order; those without users come first, since they have the fewest."""

    examples: npt.NDArray[Any]  # (num_examples,) example indices
    counts: npt.NDArray[np.int64]  # (most users + 1,) how many examples have 0, 1, 2, ... users

    @property
    def num_unattributed(self) -> int:
        """Examples without users."""
        return int(self.counts[0])

    @property
    def unattributed(self) -> npt.NDArray[Any]:
        """The examples without users."""
        return self.examples[: self.num_unattributed]

    @property
    def attributed(self) -> npt.NDArray[Any]:
        """The examples with at least one user, in order."""
        return self.examples[self.num_unattributed :]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrderedRows(ExampleOrder):
    """The examples in walking order, each with its users: row r is example examples[r]."""

    users: npt.NDArray[Any]  # (num_pairs,) the users of each row, end to end

    @functools.cached_property
    def indptr(self) -> npt.NDArray[np.int64]:
        """(num_examples + 1,): the users of row r are users[indptr[r]:indptr[r + 1]]."""
        indptr = np.empty(len(self.examples) + 1, np.int64)
        kernels.lay_indptr(self.counts, indptr)
        return indptr

    def attributed_rows(self) -> npt.NDArray[Any]:
        """A new array of the rows with at least one user, in order."""
        return np.arange(self.num_unattributed, len(self.examples), dtype=self.examples.dtype)

    def split(self, threshold: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """The rows with at least one and at most `threshold` users, and those with more."""
        rows = self.attributed_rows()
        place = int(self.counts[1 : threshold + 1].sum())
        return rows[:place], rows[place:]


def example_order(graph: AttributionGraph, *, seed: int, ties: str, progress: Progress) -> ExampleOrder:
    """The examples of a graph, fewest users first.

    Example:
      >>> graph = AttributionGraph.from_users_per_example([[0, 1], [2], [1, 2], [0]])
      >>> example_order(graph, seed=0, ties="input", progress=lambda done, message: None).examples
      array([1, 3, 0, 2], dtype=int32)
    """
    ranks = graph.users_per_example
    counts = kernels.count_ranks(ranks)
    if ties == "input":
        examples = _input_order(ranks, counts, progress, _NO_ROWS)
    else:
        examples = _hash_order(ranks, counts, graph.example_ids, seed, progress, _NO_ROWS)
    return ExampleOrder(examples=examples, counts=counts)


def ordered_rows(graph: AttributionGraph, *, seed: int, ties: str, progress: Progress) -> OrderedRows:
    """The examples of a graph, fewest users first, with their users laid out in that order.

    Cost: linear time; a copy of the graph's pairs, and while it sorts by hash another.
    """
    ranks = graph.users_per_example
    counts = kernels.count_ranks(ranks)
    users = np.empty(graph.num_pairs, graph.users.dtype)
    rows = (graph.indptr, graph.users, users)
    if ties == "input":
        examples = _input_order(ranks, counts, progress, rows)
    else:
        examples = _hash_order(ranks, counts, graph.example_ids, seed, progress, rows)
    return OrderedRows(examples=examples, counts=counts, users=users)


def hash_order(
    ranks: npt.NDArray[np.int32], ids: pa.Array | None, *, seed: int, progress: Progress
) -> npt.NDArray[Any]:
    """Sort by rank, then by keyed hash of the id, then by the id's bytes."""
    _refuse_too_many(len(ranks))
    return _hash_order(ranks, kernels.count_ranks(ranks), ids, seed, progress, _NO_ROWS)


# indptr and users, whose row sizes are the ranks, and the array for the users in the order found; here none of them,
# in the types that a graph has, so that the kernels are compiled once.
_Rows = tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]
_NO_ROWS: _Rows = (_read_only(np.empty(0, np.int64)), _read_only(np.empty(0, np.int32)), np.empty(0, np.int32))


def _pair_offset(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """(ranks,): slot s of a rank, which is the number of users, has its users at pair_offset[rank] + s * rank."""
    ranks = np.arange(len(counts))
    return np.cumsum(counts * ranks) - np.cumsum(counts) * ranks


def _input_order(
    ranks: npt.NDArray[Any], counts: npt.NDArray[np.int64], progress: Progress, rows: _Rows
) -> npt.NDArray[Any]:
    """Stable sort by rank; counts says how many have each."""
    order = np.empty(len(ranks), _index_type(len(ranks)))
    slot = np.cumsum(counts) - counts
    indptr, users, laid_users = rows
    for begin, end in in_ranges(len(ranks), progress, "sorting by users per example"):
        kernels.place_by_rank(ranks, slot, begin, end, order, indptr, users, _pair_offset(counts), laid_users)
    return order


def _hash_order(
    ranks: npt.NDArray[Any],
    counts: npt.NDArray[np.int64],
    ids: pa.Array | None,
    seed: int,
    progress: Progress,
    rows: _Rows,
) -> npt.NDArray[Any]:
    """Sort by rank, then by keyed hash of the id, then by the id's bytes; counts says how many have each rank."""
    num_examples = len(ranks)
    _refuse_too_many(num_examples)
    key = np.uint64(kernels.hash_seed(np.int64(seed)))
    kind, values, offsets, data = _id_arrays(ids)
    # Examples of one rank are spread over 2^bits buckets by the upper bits of their hash.
    bits = np.ceil(np.log2(np.maximum(counts, 1) / _BUCKET)).clip(0, 20).astype(np.int64)  # (ranks,)
    first_bucket = np.cumsum(1 << bits) - (1 << bits)
    shift = (32 - bits).astype(np.uint64)
    sizes = np.zeros(int((1 << bits).sum()), np.int64)
    keys = np.empty(num_examples, np.uint32)
    for begin, end in in_ranges(num_examples, part(progress, 0.0, 0.4), "hashing ids"):
        kernels.make_keys(
            ranks, kind, values, offsets, data, key, first_bucket, shift, begin, end, keys, sizes
        )  # fmt: skip
    slot = np.cumsum(sizes) - sizes
    placed = np.empty(num_examples, np.uint64)
    indptr, users, laid_users = rows
    placed_users = np.empty_like(laid_users)
    pair_offset = _pair_offset(counts)
    for begin, end in in_ranges(num_examples, part(progress, 0.4, 0.8), "sorting by users per example and hash"):
        kernels.place_by_bucket(
            ranks, keys, first_bucket, shift, slot, begin, end, placed, indptr, users, pair_offset, placed_users
        )  # fmt: skip
    order = np.empty(num_examples, _index_type(num_examples))
    bucket_rank = np.repeat(np.arange(len(counts)), 1 << bits)
    scratch = np.empty(int(sizes.max(initial=0)), np.uint64)
    step = max(_RANGE // _BUCKET, 1)
    for begin, end in in_ranges(len(sizes), part(progress, 0.8, 1.0), "sorting by hash", step):
        kernels.sort_buckets(
            placed, slot, bucket_rank, shift, begin, end, kind, values, offsets, data, key,
            scratch, order, pair_offset, placed_users, laid_users,
        )  # fmt: skip
    return order


def in_ranges(total: int, progress: Progress, message: str, step: int | None = None) -> Iterator[tuple[int, int]]:
    """Cuts 0..total into ranges, reporting before each."""
    step = _RANGE if step is None else step
    for begin in range(0, total, step):
        progress(begin / total, message)
        yield begin, min(begin + step, total)


def part(progress: Progress, low: float, high: float) -> Progress:
    """A progress for a part of the work that goes from low to high of the whole."""
    return lambda done, message: progress(low + done * (high - low), message)


def _refuse_too_many(num_examples: int) -> None:
    if num_examples >= 1 << 32:  # an example's index has half of a key
        raise InputError(f"{num_examples} examples are too many for one machine; use the Spark engine")


def _index_type(num_examples: int) -> type:
    return np.int32 if num_examples < 1 << 31 else np.int64


def _id_arrays(ids: pa.Array | None) -> tuple[int, npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """(kind, values, offsets, data) as the kernels take them; what the kind does not need is empty."""
    values, offsets, data = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint8)
    kind = 0
    if ids is not None and pa.types.is_integer(ids.type):
        kind, values = 1, ids.to_numpy()
    elif ids is not None:
        kind, (offsets, data) = 2, utf8_buffers(ids, length=len(ids))
    # All read-only, so that one compiled version serves every kind.
    return kind, _read_only(values), _read_only(offsets), _read_only(data)
