"""The order in which greedy selectors visit examples: fewest users first, ties by a keyed hash or in input order.

The hash is what Spark SQL calls xxhash64(cast(seed as bigint), cast(id as string)): XXH64 of the UTF-8 of str(id),
keyed with the XXH64 of the seed's eight little-endian bytes, itself keyed with 42; compared as signed numbers. Equal
hashes are ordered by the id's bytes. So the order is total, the same on every engine, and depends on nothing but the
graph's ids, its users per example and the seed. An example without an id has its index for one.

The compiled sort is four times as fast as numpy's: it moves the users of an example along with its key, in the order in
which they are stored, and sorts buckets that fit the cache.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from coowned.attribution.graph import AttributionGraph, read_only
from coowned.attribution.identifiers import utf8_buffers
from coowned.errors import InputError
from coowned.progress import Progress
from coowned.threads import cores, over_ranges

_PRIME_1 = np.uint64(0x9E3779B185EBCA87)
_PRIME_2 = np.uint64(0xC2B2AE3D27D4EB4F)
_PRIME_3 = np.uint64(0x165667B19E3779F9)
_PRIME_4 = np.uint64(0x85EBCA77C2B2AE63)
_PRIME_5 = np.uint64(0x27D4EB2F165667C5)
_SIGN = np.uint64(1 << 63)  # flipped, it makes unsigned numbers compare like signed ones
_LOW_32 = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_DIGITS = 20  # of an int64, with its sign
_NINE = 57  # "9"
_MOST_SORTED_BITS = 13  # bits of a bucket's keys that are sorted by counting

_njit = numba.njit(cache=True, nogil=True)
_inline = numba.njit(inline="always")


class Ids(NamedTuple):
    """Ids of examples: integers, or UTF-8 texts data[offsets[e]:offsets[e + 1]] where `numbers` is empty."""

    key: np.uint64  # of the hash: `hash_seed` of the seed
    numbers: np.ndarray  # (num_examples,) int64
    offsets: np.ndarray  # (num_examples + 1,) int64
    data: np.ndarray  # (bytes,) uint8


class Rows(NamedTuple):
    """Examples with their ranks and users; where `users` is empty, only the examples are sorted."""

    ranks: np.ndarray  # (num_examples,) what is sorted by first: the number of users, if there are any
    indptr: np.ndarray  # (num_examples + 1,)
    users: np.ndarray  # (num_pairs,)


class Placed(NamedTuple):
    """Examples in slots, with the users of each where there are any."""

    slots: np.ndarray  # (num_examples,) the example, in uint64 below the upper half of its hash until it is sorted
    users: np.ndarray  # (num_pairs,)


class Buckets(NamedTuple):
    rank: np.ndarray  # (buckets,)
    end: np.ndarray  # (buckets,) the slot after the last


class Layout(NamedTuple):
    """The destination of each rank's examples: its buckets, by the upper bits of the key, and its users."""

    first_bucket: np.ndarray  # (ranks,) int64
    shift: np.ndarray  # (ranks,) uint64: the bucket of a key is first_bucket[rank] + (key >> shift[rank])
    pair_offset: np.ndarray  # (ranks,) int64: the users of slot s are at pair_offset[rank] + s * rank


# ---- the hash -------------------------------------------------------------------------------------------------------


@_inline
def _rotate(x, bits):
    return (x << np.uint64(bits)) | (x >> np.uint64(64 - bits))


@_inline
def _mix_8(h, word):
    return _rotate(h ^ (_rotate(word * _PRIME_2, 31) * _PRIME_1), 27) * _PRIME_1 + _PRIME_4


@_inline
def _mix_4(h, word):
    return _rotate(h ^ (word * _PRIME_1), 23) * _PRIME_2 + _PRIME_3


@_inline
def _mix_1(h, byte):
    return _rotate(h ^ (byte * _PRIME_5), 11) * _PRIME_1


@_inline
def _finish(h):
    h = (h ^ (h >> np.uint64(33))) * _PRIME_2
    h = (h ^ (h >> np.uint64(29))) * _PRIME_3
    return h ^ (h >> np.uint64(32))


@_inline
def _lane(lane, word):
    return _rotate(lane + word * _PRIME_2, 31) * _PRIME_1


@_inline
def _merge(h, lane):
    return (h ^ _lane(np.uint64(0), lane)) * _PRIME_1 + _PRIME_4


@_inline
def _load(data, at, count):
    """Returns the next `count` (4 or 8) bytes, the first one lowest."""
    word = np.uint64(0)
    for i in range(count):
        word |= np.uint64(data[at + i]) << np.uint64(8 * i)
    return word


@_njit
def hash_seed(seed):
    """Returns the key of a seed: XXH64 of its eight bytes with key 42."""
    return _finish(_mix_8(np.uint64(42) + _PRIME_5 + np.uint64(8), np.uint64(seed)))


@_njit
def hash_text(data, begin, end, key):
    """Computes XXH64 of data[begin:end], uint8, as an unsigned number."""
    key = np.uint64(key)  # numba would turn a sum of signed and unsigned numbers into a float
    at = begin
    if end - begin >= 32:
        a, b, c, d = key + _PRIME_1 + _PRIME_2, key + _PRIME_2, key, key - _PRIME_1
        while at + 32 <= end:
            a = _lane(a, _load(data, at, 8))
            b = _lane(b, _load(data, at + 8, 8))
            c = _lane(c, _load(data, at + 16, 8))
            d = _lane(d, _load(data, at + 24, 8))
            at += 32
        h = _rotate(a, 1) + _rotate(b, 7) + _rotate(c, 12) + _rotate(d, 18)
        h = _merge(_merge(_merge(_merge(h, a), b), c), d)
    else:
        h = key + _PRIME_5
    h += np.uint64(end - begin)
    while at + 8 <= end:
        h = _mix_8(h, _load(data, at, 8))
        at += 8
    if at + 4 <= end:
        h = _mix_4(h, _load(data, at, 4))
        at += 4
    while at < end:
        h = _mix_1(h, np.uint64(data[at]))
        at += 1
    return _finish(h)


@_njit
def put_decimal(value, text):
    """Writes an int64 in decimal at the end of text (_DIGITS,); returns where it begins."""
    at = _DIGITS
    rest = np.uint64(value)
    if value < 0:
        rest = ~rest + np.uint64(1)
    while True:
        tenth = rest // np.uint64(10)
        at -= 1
        text[at] = np.uint8(rest - tenth * np.uint64(10) + np.uint64(48))
        rest = tenth
        if rest == 0:
            break
    if value < 0:
        at -= 1
        text[at] = np.uint8(45)  # "-"
    return at


@_inline
def _hash_id(ids, e, text):
    """Returns the hash of the id of example e, as an unsigned number that is ordered like the signed one."""
    if ids.numbers.shape[0] > 0:
        return hash_text(text, put_decimal(ids.numbers[e], text), _DIGITS, ids.key) ^ _SIGN
    return hash_text(ids.data, ids.offsets[e], ids.offsets[e + 1], ids.key) ^ _SIGN


@_njit
def hash_ids(ids, begin, end, keys):
    """Fills keys[begin:end], uint32, with the upper half of the hash."""
    text = np.zeros(_DIGITS, np.uint8)
    if ids.numbers.shape[0] == 0:
        for e in range(begin, end):
            keys[e] = _hash_id(ids, e, text) >> _HALF
        return
    start = _DIGITS
    for e in range(begin, end):
        number = ids.numbers[e]
        if e > begin and number > 0 and number - 1 == ids.numbers[e - 1] and text[_DIGITS - 1] != _NINE:
            text[_DIGITS - 1] += 1  # numbers in a row: nine of ten differ from the one before in the last digit alone
        else:
            start = put_decimal(number, text)
        keys[e] = (hash_text(text, start, _DIGITS, ids.key) ^ _SIGN) >> _HALF


@_njit
def id_before(ids, e, f):
    """Returns whether e comes before f, whose hashes have the same upper half: by hash, then by the id's bytes."""
    text, other = np.empty(_DIGITS, np.uint8), np.empty(_DIGITS, np.uint8)
    h, g = _hash_id(ids, e, text), _hash_id(ids, f, other)
    if h != g:
        return h < g
    if ids.numbers.shape[0] > 0:
        return bytes_before(
            text, put_decimal(ids.numbers[e], text), _DIGITS, other, put_decimal(ids.numbers[f], other), _DIGITS
        )
    return bytes_before(ids.data, ids.offsets[e], ids.offsets[e + 1], ids.data, ids.offsets[f], ids.offsets[f + 1])


@_njit
def bytes_before(data, begin, end, other, other_begin, other_end):
    for i in range(min(end - begin, other_end - other_begin)):
        if data[begin + i] != other[other_begin + i]:
            return data[begin + i] < other[other_begin + i]
    return end - begin < other_end - other_begin


# ---- the sort -------------------------------------------------------------------------------------------------------


@_njit
def count_buckets(rows, keys, layout, sizes):
    """Adds the number of examples in each bucket to sizes (buckets,)."""
    for e in range(keys.shape[0]):
        rank = rows.ranks[e]
        sizes[layout.first_bucket[rank] + np.int64(np.uint64(keys[e]) >> layout.shift[rank])] += 1


@_njit
def scatter(rows, keys, layout, slot, begin, end, placed):
    """Puts keys[begin:end], each with its example, in placed.slots[slot[bucket]] and advances slot (buckets,).

    The users of an example go along, which spares the selectors from fetching every row from far apart.
    """
    slots, placed_users = placed
    with_users = placed_users.shape[0] > 0
    source = rows.indptr[begin] if with_users else 0
    for e in range(begin, end):
        rank = rows.ranks[e]
        key = np.uint64(keys[e])
        bucket = layout.first_bucket[rank] + np.int64(key >> layout.shift[rank])
        s = slot[bucket]
        slots[s] = (key << _HALF) | np.uint64(e)
        slot[bucket] = s + 1
        if with_users:
            target = layout.pair_offset[rank] + s * rank
            for i in range(rank):
                placed_users[target + i] = rows.users[source + i]
            source += rank


@_njit
def sort_buckets(layout, buckets, begin, end, ids, placed, out):
    """Sorts what was placed in buckets begin..end into `out`.

    A bucket is sorted first by as many of the open bits of its keys as it has keys, by counting, then by insertion.
    """
    largest = 0
    for bucket in range(begin, end):
        largest = max(largest, buckets.end[bucket] - (buckets.end[bucket - 1] if bucket > 0 else 0))
    scratch = np.empty(largest, np.uint64)  # upper half of the hash, then the position in the bucket
    counts = np.empty(1 << _MOST_SORTED_BITS, np.int32)
    low = buckets.end[begin - 1] if begin > 0 else 0
    slots, placed_users, order, users = placed.slots, placed.users, out.slots, out.users
    for bucket in range(begin, end):
        rank = buckets.rank[bucket]
        size = buckets.end[bucket] - low
        bits, most = 0, min(_MOST_SORTED_BITS, np.int64(layout.shift[rank]))
        while bits < most and (1 << bits) < size:
            bits += 1
        down = _HALF + layout.shift[rank] - np.uint64(bits)
        mask = np.uint64((1 << bits) - 1)
        counts[: 1 << bits] = 0
        for i in range(low, low + size):
            counts[np.int64((slots[i] >> down) & mask)] += 1
        total = 0
        for digit in range(1 << bits):
            count = counts[digit]
            counts[digit] = total
            total += count
        for i in range(low, low + size):
            digit = np.int64((slots[i] >> down) & mask)
            scratch[counts[digit]] = (slots[i] & ~_LOW_32) | np.uint64(i - low)
            counts[digit] += 1
        _insertion_sort(scratch, size, slots, low, ids)
        for i in range(size):
            source = low + np.int64(scratch[i] & _LOW_32)
            order[low + i] = slots[source] & _LOW_32
            if users.shape[0] > 0:
                first, target = layout.pair_offset[rank] + source * rank, layout.pair_offset[rank] + (low + i) * rank
                for p in range(rank):
                    users[target + p] = placed_users[first + p]
        low += size


@_inline
def _insertion_sort(scratch, size, slots, low, ids):
    for i in range(1, size):
        moving = scratch[i]
        j = i
        while j > 0 and scratch[j - 1] >> _HALF >= moving >> _HALF:
            if scratch[j - 1] >> _HALF == moving >> _HALF:  # one pair in 2^32: the lower half of the hash decides
                e = np.int64(slots[low + np.int64(moving & _LOW_32)] & _LOW_32)
                f = np.int64(slots[low + np.int64(scratch[j - 1] & _LOW_32)] & _LOW_32)
                if not id_before(ids, e, f):
                    break
            scratch[j] = scratch[j - 1]
            j -= 1
        scratch[j] = moving


RANGE = 1 << 22  # examples a kernel handles between two calls of progress: a fraction of a second
BUCKET = 8192  # keys that are sorted together: with their users they fit the second-level cache
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
    rows = Rows(graph.users_per_example, graph.indptr, graph.users)
    counts = np.bincount(rows.ranks, minlength=1)
    if ties == "input":
        examples, users = _input_order(rows, counts, progress)
    else:
        examples, users = _hash_order(rows, counts, graph.example_ids, seed, progress)
    return OrderedRows(examples=examples, counts=counts, users=users)


def hash_order(
    ranks: npt.NDArray[np.int32], ids: pa.Array | None, *, seed: int, progress: Progress
) -> npt.NDArray[Any]:
    rows = Rows(read_only(ranks), read_only(np.empty(0, np.int64)), read_only(np.empty(0, np.int32)))
    return _hash_order(rows, None, ids, seed, progress)[0]


def in_ranges(total: int, progress: Progress, message: str, step: int | None = None) -> Iterator[tuple[int, int]]:
    """Yields consecutive ranges of 0..total, reporting progress before each."""
    step = step or RANGE
    for begin in range(0, total, step):
        progress(begin / total, message)
        yield begin, min(begin + step, total)


def part(progress: Progress, low: float, high: float) -> Progress:
    """Returns a progress callback for the part of the work from `low` to `high`."""
    return lambda done, message: progress(low + done * (high - low), message)


def _input_order(
    rows: Rows, counts: npt.NDArray[np.int64], progress: Progress
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Sorts stably by rank; counts: number of examples of each rank."""
    layout = _layout(counts, bits=np.zeros(len(counts), np.int64))
    placed = Placed(np.empty(len(rows.ranks), np.uint64), np.empty(len(rows.users), rows.users.dtype))
    keys = np.zeros(len(rows.ranks), np.uint32)
    slot = np.cumsum(counts) - counts
    for begin, end in in_ranges(len(keys), progress, "sorting by users per example"):
        scatter(rows, keys, layout, slot, begin, end, placed)
    return placed.slots.astype(_index_type(len(keys))), placed.users


def _hash_order(
    rows: Rows, counts: npt.NDArray[np.int64] | None, ids: pa.Array | None, seed: int, progress: Progress
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
            lambda low, high, begin=begin: hash_ids(id_arrays, begin + low, begin + high, keys),
            end - begin,
            parts=4 * cores(),
        )
    # Examples of one rank are spread over 2^bits buckets by the upper bits of their hash.
    bits = np.ceil(np.log2(np.maximum(counts, 1) / BUCKET)).clip(0, _MOST_BITS).astype(np.int64)  # (ranks,)
    layout = _layout(counts, bits)
    sizes = np.zeros(int((1 << bits).sum()), np.int64)
    count_buckets(rows, keys, layout, sizes)
    slot = np.cumsum(sizes) - sizes
    placed = Placed(np.empty(num_examples, np.uint64), np.empty(len(rows.users), rows.users.dtype))
    for begin, end in in_ranges(num_examples, part(progress, 0.4, 0.8), "sorting by users per example and hash"):
        scatter(rows, keys, layout, slot, begin, end, placed)
    found = Placed(np.empty(num_examples, _index_type(num_examples)), np.empty_like(placed.users))
    buckets = Buckets(rank=np.repeat(np.arange(len(counts)), 1 << bits), end=slot)
    step = max(RANGE // BUCKET, 1)
    for begin, end in in_ranges(len(sizes), part(progress, 0.8, 1.0), "sorting by hash", step):
        sort_buckets(layout, buckets, begin, end, id_arrays, placed, found)
    return found.slots, found.users


def _layout(counts: npt.NDArray[np.int64], bits: npt.NDArray[np.int64]) -> Layout:
    """Returns 2^bits buckets for each rank, with users laid out in the order of the ranks."""
    ranks = np.arange(len(counts))
    return Layout(
        first_bucket=np.cumsum(1 << bits) - (1 << bits),
        shift=(32 - bits).astype(np.uint64),
        pair_offset=np.cumsum(counts * ranks) - np.cumsum(counts) * ranks,
    )


def _index_type(num_examples: int) -> type:
    return np.int32 if num_examples < 1 << 31 else np.int64


def _id_arrays(ids: pa.Array | None, num_examples: int, seed: int) -> Ids:
    numbers, offsets, data = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint8)
    if ids is None:
        numbers = np.arange(num_examples)
    elif pa.types.is_integer(ids.type):
        numbers = ids.to_numpy()
    else:
        offsets, data = utf8_buffers(ids, length=num_examples)
    # All read-only, so that one compiled version serves every kind.
    key = np.uint64(hash_seed(np.int64(seed)))
    return Ids(key, read_only(numbers), read_only(offsets), read_only(data))
