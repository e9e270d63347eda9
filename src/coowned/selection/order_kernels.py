"""The compiled inner loops of the shared order, nothing else: the keyed hash of an id, and the sort by it.

The hash is what Spark SQL calls xxhash64(cast(seed as bigint), cast(id as string)): XXH64 of the UTF-8 of str(id),
keyed with the XXH64 of the seed's eight little-endian bytes, itself keyed with 42; compared as signed numbers.
Hash and sort share a file because a compiled loop is cached by the file it stands in.
"""

import numba
import numpy as np

_PRIME_1 = np.uint64(0x9E3779B185EBCA87)
_PRIME_2 = np.uint64(0xC2B2AE3D27D4EB4F)
_PRIME_3 = np.uint64(0x165667B19E3779F9)
_PRIME_4 = np.uint64(0x85EBCA77C2B2AE63)
_PRIME_5 = np.uint64(0x27D4EB2F165667C5)
_SIGN = np.uint64(1 << 63)
_EIGHT_ZEROS = np.uint64(0x3030303030303030)  # "00000000"
_LOW_8 = np.uint64(0xFF)
_LOW_32 = np.uint64(0xFFFFFFFF)

_njit = numba.njit(cache=True, nogil=True)
_inline = numba.njit(inline="always")

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
    """The next `count` (4 or 8) bytes, the first one lowest."""
    word = np.uint64(0)
    for i in range(count):
        word |= np.uint64(data[at + i]) << np.uint64(8 * i)
    return word


@_njit
def hash_seed(seed):
    """The key that a seed gives: XXH64 of its eight bytes with key 42."""
    return _finish(_mix_8(np.uint64(42) + _PRIME_5 + np.uint64(8), np.uint64(seed)))


@_njit
def hash_text(data, begin, end, key):
    """XXH64 of data[begin:end], uint8, as an unsigned number."""
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


@_inline
def _eight_digits(value):
    """A number below 10^8 as eight decimal digits (0 to 9, not yet letters), the first in the lowest byte."""
    high = value // np.uint64(10_000)
    pairs = high | ((value - high * np.uint64(10_000)) << np.uint64(32))  # two numbers below 10^4
    hundreds = ((pairs * np.uint64(10_486)) >> np.uint64(20)) & np.uint64(0x0000007F0000007F)
    pairs = hundreds | ((pairs - hundreds * np.uint64(100)) << np.uint64(16))  # four numbers below 100
    tens = ((pairs * np.uint64(103)) >> np.uint64(10)) & np.uint64(0x000F000F000F000F)
    return tens | ((pairs - tens * np.uint64(10)) << np.uint64(8))


@_inline
def _mix_tail(h, word, count):
    """Mixes in the first `count` < 8 bytes of a word."""
    if count >= 4:
        h = _mix_4(h, word & _LOW_32)
        word >>= np.uint64(32)
        count -= 4
    for _ in range(count):
        h = _mix_1(h, word & _LOW_8)
        word >>= np.uint64(8)
    return h


@_njit
def _hash_long_number(value, key):
    """hash_number where the decimal text has eight characters or more."""
    text = np.empty(20, np.uint8)
    at = 20
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
    return hash_text(text, at, 20, key)


@_inline
def _count_digits(value):
    """Decimal digits of a number below 10^8."""
    count = 1
    count += value >= 10
    count += value >= 100
    count += value >= 1_000
    count += value >= 10_000
    count += value >= 100_000
    count += value >= 1_000_000
    count += value >= 10_000_000
    return count


@_inline
def _digits(value, count):
    """The `count` decimal digits of a number below 10^8 as letters, the first in the lowest byte."""
    return (_eight_digits(np.uint64(value)) | _EIGHT_ZEROS) >> np.uint64(8 * (8 - count))


@_njit
def hash_number(value, key):
    """XXH64 of the decimal text of an int64; up to 10^16 it never leaves the registers."""
    key = np.uint64(key)
    if 0 <= value < 10_000_000:
        count = _count_digits(value)
        return _finish(_mix_tail(key + _PRIME_5 + np.uint64(count), _digits(value, count), count))
    if 0 <= value < 100_000_000:
        return _finish(_mix_8(key + _PRIME_5 + np.uint64(8), _digits(value, 8)))
    if 0 <= value < 10_000_000_000_000_000:
        upper = value // 100_000_000
        count = _count_digits(upper)
        lower = _digits(value - upper * 100_000_000, 8)
        h = key + _PRIME_5 + np.uint64(8 + count)
        if count == 8:
            return _finish(_mix_8(_mix_8(h, _digits(upper, 8)), lower))
        h = _mix_8(h, _digits(upper, count) | (lower << np.uint64(8 * count)))
        return _finish(_mix_tail(h, lower >> np.uint64(8 * (8 - count)), count))
    return _hash_long_number(value, key)


# ---- the sort -------------------------------------------------------------------------------------------------------


@_njit
def count_ranks(ranks):
    """(largest rank + 1,) int64: how many examples have rank 0, 1, 2, ..."""
    most = 0
    for e in range(ranks.shape[0]):
        most = max(most, ranks[e])
    counts = np.zeros(most + 1, np.int64)
    for e in range(ranks.shape[0]):
        counts[ranks[e]] += 1
    return counts


@_njit
def place_by_rank(ranks, slot, begin, end, order, indptr, users, pair_offset, laid_users):
    """Stable counting sort: puts examples begin..end in order[slot[rank]], and moves slot (ranks,) on.

    Where laid_users is not empty, ranks are numbers of users, and those of slot s go to pair_offset[rank] + s * rank.
    """
    with_users = laid_users.shape[0] > 0
    source = indptr[begin] if with_users else 0
    for e in range(begin, end):
        rank = ranks[e]
        s = slot[rank]
        order[s] = e
        slot[rank] = s + 1
        if with_users:
            target = pair_offset[rank] + s * rank
            for i in range(rank):
                laid_users[target + i] = users[source + i]
            source += rank


@_inline
def _signed_hash(e, kind, values, offsets, data, key):
    """The hash of example e as an unsigned number that is ordered like the signed one."""
    if kind == 0:
        h = hash_number(np.int64(e), key)
    elif kind == 1:
        h = hash_number(values[e], key)
    else:
        h = hash_text(data, offsets[e], offsets[e + 1], key)
    return h ^ _SIGN


@_inline
def _put_key(h, e, rank, first_bucket, shift, keys, bucket_sizes):
    bucket_sizes[first_bucket[rank] + np.int64((h >> np.uint64(32)) >> shift[rank])] += 1
    keys[e] = h >> np.uint64(32)


@_njit
def make_keys(ranks, kind, values, offsets, data, key, first_bucket, shift, begin, end, keys, bucket_sizes):
    """Fills keys[begin:end], uint32, with the upper half of the hash, and counts the keys of each bucket.

    Ids by kind: 0 the index; 1 values (num_examples,) int64; 2 data[offsets[e]:offsets[e + 1]], UTF-8.
    The bucket of a key is first_bucket[rank] + (key >> shift[rank]).
    """
    e = begin
    while e < end:
        if kind == 0 and e >= 10 and e < 10_000_000 and not 1_000 <= e < 10_000:
            # Ten indices that differ in the last digit alone share all of the hash but its last step.
            count = _count_digits(e)
            h = _mix_tail(key + _PRIME_5 + np.uint64(count), _digits(e // 10, count - 1), count - 1)
            tens = e - e % 10
            for f in range(e, min(tens + 10, end)):
                last = _finish(_mix_1(h, np.uint64(48 + f - tens))) ^ _SIGN
                _put_key(last, f, ranks[f], first_bucket, shift, keys, bucket_sizes)
            e = min(tens + 10, end)
        else:
            h = _signed_hash(e, kind, values, offsets, data, key)
            _put_key(h, e, ranks[e], first_bucket, shift, keys, bucket_sizes)
            e += 1


@_njit
def place_by_bucket(
    ranks, keys, first_bucket, shift, slot, begin, end, placed, indptr, users, pair_offset, placed_users
):
    """Puts keys[begin:end], each with its example, in placed[slot[bucket]], uint64, and moves slot (buckets,) on.

    Where placed_users is not empty, ranks are numbers of users, and those of slot s go to pair_offset[rank] + s * rank.
    Moving users along here, where they are read in order, spares the walk from fetching every row from afar.
    """
    with_users = placed_users.shape[0] > 0
    source = indptr[begin] if with_users else 0
    for e in range(begin, end):
        rank = ranks[e]
        key = np.uint64(keys[e])
        bucket = first_bucket[rank] + np.int64(key >> shift[rank])
        s = slot[bucket]
        placed[s] = (key << np.uint64(32)) | np.uint64(e)
        slot[bucket] = s + 1
        if with_users:
            target = pair_offset[rank] + s * rank
            for i in range(rank):
                placed_users[target + i] = users[source + i]
            source += rank


@_njit
def _comes_before(e, f, kind, values, offsets, data, key):
    """Whether example e comes before f, whose hashes have the same upper half: by hash, then by the id's bytes."""
    h = _signed_hash(e, kind, values, offsets, data, key)
    g = _signed_hash(f, kind, values, offsets, data, key)
    if h != g:
        return h < g
    if kind == 2:
        for i in range(min(offsets[e + 1] - offsets[e], offsets[f + 1] - offsets[f])):
            a, b = data[offsets[e] + i], data[offsets[f] + i]
            if a != b:
                return a < b
        return offsets[e + 1] - offsets[e] < offsets[f + 1] - offsets[f]
    a, b = (np.int64(e), np.int64(f)) if kind == 0 else (values[e], values[f])
    return _decimal_before(a, b)


@_njit
def _decimal_before(a, b):
    """Whether the decimal text of int64 a comes before that of b, byte by byte: "-" < "0", "10" < "9"."""
    if (a < 0) != (b < 0):
        return a < 0
    x, y = np.uint64(a), np.uint64(b)
    if a < 0:
        x, y = ~x + np.uint64(1), ~y + np.uint64(1)
    p, q = np.uint64(1), np.uint64(1)  # the place of the first digit of each
    while x // p >= 10:
        p *= np.uint64(10)
    while y // q >= 10:
        q *= np.uint64(10)
    while p > 0 and q > 0:
        i, j = (x // p) % np.uint64(10), (y // q) % np.uint64(10)
        if i != j:
            return i < j
        p //= np.uint64(10)
        q //= np.uint64(10)
    return p < q


@_njit
def sort_buckets(
    placed, bucket_end, bucket_rank, shift, begin, end, kind, values, offsets, data, key,
    scratch, order, pair_offset, placed_users, laid_users,
):  # fmt: skip
    """Sorts what was placed in buckets begin..end and writes their examples to order, their users to laid_users.

    bucket_end, bucket_rank (buckets,); shift (ranks,): bits of the hash's upper half that a bucket of the rank leaves
    open; scratch (largest bucket,) uint64: upper half of the hash, then the place in the bucket. First by as many of
    the open bits as the bucket has keys, then by insertion.
    """
    with_users = placed_users.shape[0] > 0
    counts = np.empty(1 << 13, np.int32)
    low = 0 if begin == 0 else bucket_end[begin - 1]
    for bucket in range(begin, end):
        high = bucket_end[bucket]
        size = high - low
        rank = bucket_rank[bucket]
        bits, most = 0, min(13, np.int64(shift[rank]))
        while bits < most and (1 << bits) < size:
            bits += 1
        if bits > 4:
            down = np.uint64(32) + shift[rank] - np.uint64(bits)
            mask = np.uint64((1 << bits) - 1)
            counts[: 1 << bits] = 0
            for i in range(low, high):
                counts[np.int64((placed[i] >> down) & mask)] += 1
            total = 0
            for digit in range(1 << bits):
                count = counts[digit]
                counts[digit] = total
                total += count
            for i in range(low, high):
                digit = np.int64((placed[i] >> down) & mask)
                scratch[counts[digit]] = (placed[i] & ~_LOW_32) | np.uint64(i - low)
                counts[digit] += 1
        else:
            for i in range(low, high):
                scratch[i - low] = (placed[i] & ~_LOW_32) | np.uint64(i - low)
        for i in range(1, size):
            moving = scratch[i]
            upper = moving >> np.uint64(32)
            j = i
            while j > 0:
                other = scratch[j - 1] >> np.uint64(32)
                if other < upper:
                    break
                if other == upper:  # one pair in four thousand million: only here the lower half of the hash is needed
                    e = np.int64(placed[low + np.int64(moving & _LOW_32)] & _LOW_32)
                    f = np.int64(placed[low + np.int64(scratch[j - 1] & _LOW_32)] & _LOW_32)
                    if not _comes_before(e, f, kind, values, offsets, data, key):
                        break
                scratch[j] = scratch[j - 1]
                j -= 1
            scratch[j] = moving
        for i in range(size):
            place = low + np.int64(scratch[i] & _LOW_32)
            order[low + i] = placed[place] & _LOW_32
            if with_users:
                source, target = pair_offset[rank] + place * rank, pair_offset[rank] + (low + i) * rank
                for p in range(rank):
                    laid_users[target + p] = placed_users[source + p]
        low = high


@_njit
def lay_indptr(counts, indptr):
    """Fills indptr (rows + 1,) for rows laid out by size: counts[0] rows of size 0, counts[1] of size 1, and so on."""
    row = pair = 0
    indptr[0] = 0
    for size in range(counts.shape[0]):
        for _ in range(counts[size]):
            row += 1
            pair += size
            indptr[row] = pair
