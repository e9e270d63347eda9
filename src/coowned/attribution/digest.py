"""Digests of sets of rows that can be computed in parts, in any order, and merged.

A set's digest is the sum, modulo 2^64 in four lanes, of the SHA-256 of each of its rows, hashed once more together
with the number of rows. Adding is associative and commutative, so partitions, row order and machines do not matter,
and any engine with SHA-256 and sums (SQL's `sha2` and `sum`) computes the same.

The rows are text, so that they are the same everywhere; lengths are in bytes, spaces are not part of them:

    example   "example:" length ":" id, then length ":" key of each of its users, in byte order of the keys
    copies    "copies:" copies ":" id
    group     "group:" group ":" id
    slot      "slot:" batch ":" position ":" id

No two graphs have the same rows, and two different sets have equal sums by accident with probability 2^-256.
What it is not: a signature, or a defence against whoever writes both graphs. Whoever can write a certificate can write
its digests, and sums, unlike SHA-256 itself, let someone free to choose millions of ids search for two sets with equal
sums (the generalized birthday problem). The digests bind files to each other.

Where the processor has instructions for SHA-256 they are used, five times as fast; elsewhere the same is computed as
FIPS 180-4 says. A loop over hashlib takes 29 times as long for the same rows (200,000 examples of three users).
"""

import dataclasses
import hashlib
from collections.abc import Callable
from typing import NamedTuple

import numba
import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from coowned.threads import over_ranges

_HAS_SHA = bool(binding.get_host_cpu_features().get("sha"))

# FIPS 180-4, section 4.2.2: the first 32 bits of the fractional parts of the cube roots of the first 64 primes.
_ROUND_CONSTANTS = np.array(
    [
        0x428A2F98, 0x71374491, 0xB5C0FBCF, 0xE9B5DBA5, 0x3956C25B, 0x59F111F1, 0x923F82A4, 0xAB1C5ED5,
        0xD807AA98, 0x12835B01, 0x243185BE, 0x550C7DC3, 0x72BE5D74, 0x80DEB1FE, 0x9BDC06A7, 0xC19BF174,
        0xE49B69C1, 0xEFBE4786, 0x0FC19DC6, 0x240CA1CC, 0x2DE92C6F, 0x4A7484AA, 0x5CB0A9DC, 0x76F988DA,
        0x983E5152, 0xA831C66D, 0xB00327C8, 0xBF597FC7, 0xC6E00BF3, 0xD5A79147, 0x06CA6351, 0x14292967,
        0x27B70A85, 0x2E1B2138, 0x4D2C6DFC, 0x53380D13, 0x650A7354, 0x766A0ABB, 0x81C2C92E, 0x92722C85,
        0xA2BFE8A1, 0xA81A664B, 0xC24B8B70, 0xC76C51A3, 0xD192E819, 0xD6990624, 0xF40E3585, 0x106AA070,
        0x19A4C116, 0x1E376C08, 0x2748774C, 0x34B0BCB5, 0x391C0CB3, 0x4ED8AA4A, 0x5B9CCA4F, 0x682E6FF3,
        0x748F82EE, 0x78A5636F, 0x84C87814, 0x8CC70208, 0x90BEFFFA, 0xA4506CEB, 0xBEF9A3F7, 0xC67178F2,
    ],
    dtype=np.uint32,
)  # fmt: skip
# Section 5.3.3, in the order in which the instructions hold them: F, E, B, A, then H, G, D, C.
INITIAL_STATE = np.array(
    [0x9B05688C, 0x510E527F, 0xBB67AE85, 0x6A09E667, 0x5BE0CD19, 0x1F83D9AB, 0xA54FF53A, 0x3C6EF372], dtype=np.uint32
)
_FOUR = ir.VectorType(ir.IntType(32), 4)
_COLON = 58
_NUMBER = 20  # most bytes of a number and its colon
_WIDE = 32  # bytes copied or cleared at once
_PADDING = 128  # most bytes that padding adds, and what wide copies write after a text
_ROWS_TOGETHER = 256  # rows that are fetched, written and then hashed together

_njit = numba.njit(cache=True, nogil=True)
_inline = numba.njit(inline="always")


class Texts(NamedTuple):
    """UTF-8 texts concatenated: text i is data[offsets[i]:offsets[i + 1]]."""

    offsets: np.ndarray  # (texts + 1,) int64
    data: np.ndarray  # (bytes,) uint8


def _address(context, builder, item, kind, array, index):
    """Returns a pointer to array[index], an element of this array type, as an item of that LLVM type."""
    view = context.make_array(kind)(context, builder, array)
    return builder.bitcast(cgutils.get_item_pointer(context, builder, kind, view, [index]), item.as_pointer())


@intrinsic
def _copy_wide(typing_context, target, at, source, begin):
    """Copies target[at:at + _WIDE] = source[begin:begin + _WIDE] (bytes); both arrays must be long enough."""
    line = ir.VectorType(ir.IntType(8), _WIDE)

    def generate(context, builder, signature, arguments):
        to = _address(context, builder, line, signature.args[0], *arguments[:2])
        given = _address(context, builder, line, signature.args[2], *arguments[2:])
        builder.store(builder.load(given, align=1), to, align=1)
        return context.get_dummy_value()

    return types.none(target, types.intp, source, types.intp), generate


@intrinsic
def _clear_wide(typing_context, target, at):
    """Sets target[at:at + _WIDE] = 0 (bytes); the array must be long enough."""
    line = ir.VectorType(ir.IntType(8), _WIDE)

    def generate(context, builder, signature, arguments):
        to = _address(context, builder, line, signature.args[0], *arguments)
        builder.store(ir.Constant(line, None), to, align=1)
        return context.get_dummy_value()

    return types.none(target, types.intp), generate


@intrinsic
def _eight_bytes(typing_context, source, begin):
    """Returns source[begin:begin + 8] (bytes) as a big-endian number; the array must be long enough."""
    word = ir.IntType(64)

    def generate(context, builder, signature, arguments):
        return builder.bswap(builder.load(_address(context, builder, word, signature.args[0], *arguments), align=1))

    return types.uint64(source, types.intp), generate


# ---- SHA-256 ---------------------------------------------------------------------------------------------------------


@intrinsic
def _compress_by_instructions(typing_context, state, message, at):
    """Adds the block message[at:at + 64] to the hash `state` (8,) uint32, in the order of INITIAL_STATE."""
    index = ir.IntType(64)

    def generate(context, builder, signature, arguments):
        halves = _address(context, builder, _FOUR, signature.args[0], arguments[0], index(0))
        block = _address(context, builder, ir.VectorType(ir.IntType(8), 16), signature.args[1], *arguments[1:])
        ends = [builder.gep(halves, [index(i)]) for i in range(2)]
        before = [builder.load(end, align=4) for end in ends]
        abef, cdgh = before
        words = []
        for i in range(16):  # four rounds each
            if i < 4:
                read = builder.load(builder.gep(block, [index(i)]), align=1)
                words.append(builder.bitcast(_shuffle(builder, read, read, [j ^ 3 for j in range(16)]), _FOUR))
            else:
                a, b, c, d = words[-4:]
                begun = builder.add(_instruction(builder, "msg1", a, b), _shuffle(builder, c, d, [1, 2, 3, 4]))
                words.append(_instruction(builder, "msg2", begun, d))
            added = builder.add(words[-1], ir.Constant(_FOUR, _ROUND_CONSTANTS[4 * i : 4 * i + 4].tolist()))
            cdgh = _instruction(builder, "rnds2", cdgh, abef, added)
            abef = _instruction(builder, "rnds2", abef, cdgh, _shuffle(builder, added, added, [2, 3, 0, 0]))
        for end, old, new in zip(ends, before, (abef, cdgh), strict=True):
            builder.store(builder.add(old, new), end, align=4)
        return context.get_dummy_value()

    return types.none(state, message, types.intp), generate


def _instruction(builder, name, *given):
    """Emits a call of the processor's instruction sha256`name`."""
    name = f"llvm.x86.sha256{name}"
    known = builder.module.globals.get(name)
    return builder.call(known or ir.Function(builder.module, ir.FunctionType(_FOUR, [_FOUR] * len(given)), name), given)


def _shuffle(builder, one, other, lanes):
    return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes))


@_inline
def _rotate(x, n):
    return (x >> np.uint32(n)) | (x << np.uint32(32 - n))


@_njit
def compress_plainly(state, message, at):
    """Does the same as `_compress_by_instructions`, on any processor."""
    words = np.empty(64, np.uint32)
    for i in range(16):
        words[i] = 0
        for j in range(4):
            words[i] = (words[i] << np.uint32(8)) | np.uint32(message[at + 4 * i + j])
    for i in range(16, 64):
        p, q = words[i - 15], words[i - 2]
        s0 = _rotate(p, 7) ^ _rotate(p, 18) ^ (p >> np.uint32(3))
        s1 = _rotate(q, 17) ^ _rotate(q, 19) ^ (q >> np.uint32(10))
        words[i] = words[i - 16] + s0 + words[i - 7] + s1
    f, e, b, a, h, g, d, c = state
    for i in range(64):
        s1 = _rotate(e, 6) ^ _rotate(e, 11) ^ _rotate(e, 25)
        t1 = h + s1 + ((e & f) ^ (~e & g)) + _ROUND_CONSTANTS[i] + words[i]
        t2 = (_rotate(a, 2) ^ _rotate(a, 13) ^ _rotate(a, 22)) + ((a & b) ^ (a & c) ^ (b & c))
        h, g, f, e, d, c, b, a = g, f, e, np.uint32(d + t1), c, b, a, np.uint32(t1 + t2)
    for i, added in enumerate((f, e, b, a, h, g, d, c)):
        state[i] += added


compress = _compress_by_instructions if _HAS_SHA else compress_plainly


@_njit
def add_hashes(message, ends, count, sums):
    """Adds the SHA-256 of the padded messages message[ends[i]:ends[i + 1]] to sums (4,), 64 bits each."""
    state = np.empty(8, np.uint32)
    for i in range(count):
        state[:] = INITIAL_STATE
        for at in range(ends[i], ends[i + 1], 64):
            compress(state, message, at)  # pyright: ignore[reportCallIssue]
        for lane, high in enumerate((3, 7, 1, 5)):  # A and B, C and D, ...
            sums[lane] += (np.uint64(state[high]) << np.uint64(32)) | np.uint64(state[high - 1])


@_njit
def pad(message, begin, end):
    """Pads message[begin:end] to whole blocks of 64 bytes as SHA-256 does; returns the new end.

    Up to _WIDE bytes after the new end are cleared too.
    """
    length = end - begin
    padded = begin + ((length + 8) // 64 + 1) * 64
    message[end] = 0x80
    for at in range(end + 1, padded, _WIDE):
        _clear_wide(message, at)  # pyright: ignore[reportCallIssue]
    bits = np.uint64(length) * np.uint64(8)
    for i in range(8):
        message[padded - 1 - i] = np.uint8((bits >> np.uint64(8 * i)) & np.uint64(0xFF))
    return padded


@_inline
def _put_decimal(message, at, value):
    """Writes an integer >= 0 in decimal digits and a colon; returns the position after it."""
    if value < 100:  # nearly every length
        tens = np.uint32(value) // np.uint32(10)
        message[at] = np.uint8(48 + tens)
        at += np.int64(tens > 0)
        message[at] = np.uint8(48 + value - 10 * tens)
        message[at + 1] = _COLON
        return at + 2
    digits = 1
    rest = value
    while rest >= 10:
        rest //= 10
        digits += 1
    for i in range(digits):
        message[at + digits - 1 - i] = np.uint8(48 + value % 10)
        value //= 10
    message[at + digits] = _COLON
    return at + digits + 1


@_inline
def _put_bytes(message, at, data, begin, end):
    """Writes data[begin:end], and up to _WIDE bytes after it; returns the position after it."""
    after = at + (end - begin)
    while begin < end and begin + _WIDE <= data.shape[0]:
        _copy_wide(message, at, data, begin)  # pyright: ignore[reportCallIssue]
        at += _WIDE
        begin += _WIDE
    for i in range(begin, end):
        message[at + i - begin] = data[i]
    return after


@_njit
def hash_rows(prefix, numbers, ids, rows, begin, end):
    """Sums SHA-256 of "prefix n1: n2: … id", without spaces, over entries begin..end.

    numbers (entries, columns) int64; ids: Texts; rows (entries,): which id; returns (4,) uint64.
    """
    sums = np.zeros(4, np.uint64)
    message, ends = np.empty(0, np.uint8), np.zeros(_ROWS_TOGETHER + 1, np.int64)
    for first in range(begin, end, _ROWS_TOGETHER):
        count = min(_ROWS_TOGETHER, end - first)
        needed = count * (prefix.shape[0] + _NUMBER * numbers.shape[1] + _PADDING)
        for i in range(first, first + count):
            needed += ids.offsets[rows[i] + 1] - ids.offsets[rows[i]]
        if needed > message.shape[0]:
            message = np.empty(2 * needed // 64 * 64, np.uint8)
        for i in range(count):
            entry = first + i
            at = _put_bytes(message, ends[i], prefix, 0, prefix.shape[0])
            for column in range(numbers.shape[1]):
                at = _put_decimal(message, at, numbers[entry, column])
            at = _put_bytes(message, at, ids.data, ids.offsets[rows[entry]], ids.offsets[rows[entry] + 1])
            ends[i + 1] = pad(message, ends[i], at)
        add_hashes(message, ends, count, sums)
    return sums


@_inline
def _head(data, begin, end):
    """Returns the first eight bytes of data[begin:end] as a big-endian number; a shorter text is padded with zeros."""
    if end - begin >= 8:
        return _eight_bytes(data, begin)  # pyright: ignore[reportCallIssue]
    head = np.uint64(0)
    for i in range(end - begin):
        head |= np.uint64(data[begin + i]) << np.uint64(56 - 8 * i)
    return head


@_njit
def _bytes_before(data, begin, end, other_begin, other_end):
    """Returns whether data[begin:end] comes before data[other_begin:other_end] in byte order."""
    for i in range(min(end - begin, other_end - other_begin)):
        a, b = data[begin + i], data[other_begin + i]
        if a != b:
            return a < b
    return end - begin < other_end - other_begin


@_njit
def _sort_texts(data, begins, ends, heads, low, high):
    """Sorts the texts data[begins[i]:ends[i]] for i in low..high by Shell sort, since most rows are short."""
    gap = 1
    while gap < (high - low) // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for i in range(low + gap, high):
            begin, end, head = begins[i], ends[i], heads[i]
            j = i
            while j >= low + gap:
                k = j - gap
                if head > heads[k] or (head == heads[k] and not _bytes_before(data, begin, end, begins[k], ends[k])):
                    break
                begins[j], ends[j], heads[j] = begins[k], ends[k], heads[k]
                j = k
            begins[j], ends[j], heads[j] = begin, end, head
        gap //= 3


@_njit
def hash_examples(prefix, indptr, users, ids, keys, begin, end):
    """Sums SHA-256 of "prefix length: id length: key length: key …", without spaces, over examples begin..end.

    ids, keys: Texts; the keys of an example are in byte order; returns (4,) uint64. Keys are fetched for many examples
    at once, so that the processor waits for many of them together.
    """
    sums = np.zeros(4, np.uint64)
    message, ends = np.empty(0, np.uint8), np.zeros(_ROWS_TOGETHER + 1, np.int64)
    key_begins, key_ends, key_heads = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint64)
    for first in range(begin, end, _ROWS_TOGETHER):
        count = min(_ROWS_TOGETHER, end - first)
        base = indptr[first]
        pairs = indptr[first + count] - base
        if pairs > key_begins.shape[0]:
            key_begins, key_ends = np.empty(2 * pairs, np.int64), np.empty(2 * pairs, np.int64)
            key_heads = np.empty(2 * pairs, np.uint64)
        needed = count * (prefix.shape[0] + _NUMBER + _PADDING) + ids.offsets[first + count] - ids.offsets[first]
        for p in range(pairs):
            user = users[base + p]
            key_begins[p], key_ends[p] = keys.offsets[user], keys.offsets[user + 1]
            needed += _NUMBER + key_ends[p] - key_begins[p]
        for p in range(pairs):
            key_heads[p] = _head(keys.data, key_begins[p], key_ends[p])
        if needed > message.shape[0]:
            message = np.empty(2 * needed // 64 * 64, np.uint8)
        for i in range(count):
            low, high = indptr[first + i] - base, indptr[first + i + 1] - base
            _sort_texts(keys.data, key_begins, key_ends, key_heads, low, high)
            id_begin, id_end = ids.offsets[first + i], ids.offsets[first + i + 1]
            at = _put_bytes(message, ends[i], prefix, 0, prefix.shape[0])
            at = _put_decimal(message, at, id_end - id_begin)
            at = _put_bytes(message, at, ids.data, id_begin, id_end)
            for p in range(low, high):
                at = _put_decimal(message, at, key_ends[p] - key_begins[p])
                at = _put_bytes(message, at, keys.data, key_begins[p], key_ends[p])
            ends[i + 1] = pad(message, ends[i], at)
        add_hashes(message, ends, count, sums)
    return sums


VERSION = 2  # 1 hashed every pair in a row of its own
_ROWS_PER_TASK = 1 << 16


@dataclasses.dataclass(frozen=True)
class RowSums:
    """A sum of row hashes, and the number of rows.

    Guarantees:
      - Merging the sums of any partition of a set gives the sums of the set.   (test_digest_can_be_merged)

    Example:
      >>> a, b = RowSums(1, (1, 0, 0, 0)), RowSums(2, (2**64 - 1, 5, 0, 0))
      >>> a.merge(b)
      RowSums(count=3, lanes=(0, 5, 0, 0))
    """

    count: int = 0
    lanes: tuple[int, ...] = (0, 0, 0, 0)

    def merge(self, other: "RowSums") -> "RowSums":
        lanes = tuple((mine + theirs) % 2**64 for mine, theirs in zip(self.lanes, other.lanes, strict=True))
        return RowSums(self.count + other.count, lanes)


def finish(kind: str, *parts: RowSums) -> str:
    """Returns the digest (64 hexadecimal digits) of an object of this kind made of these sets of rows."""
    lines = [f"coowned {kind} {VERSION}"]
    lines += [f"{part.count} {' '.join(str(lane) for lane in part.lanes)}" for part in parts]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def sum_rows(word: str, numbers: np.ndarray, rows: np.ndarray, ids: Texts) -> RowSums:
    """Sums the hashes of rows "word: n1: n2: … id"; numbers (entries, columns) int64, rows (entries,) indexes ids."""
    prefix = np.frombuffer(f"{word}:".encode(), dtype=np.uint8)
    return _sum_in_parallel(lambda begin, end: hash_rows(prefix, numbers, ids, rows, begin, end), len(rows))


def sum_examples(indptr: np.ndarray, users: np.ndarray, ids: Texts, keys: Texts) -> RowSums:
    """Sums the hashes of rows "example: length: id length: key …", one per example of a graph in compressed rows."""
    prefix = np.frombuffer(b"example:", dtype=np.uint8)
    return _sum_in_parallel(
        lambda begin, end: hash_examples(prefix, indptr, users, ids, keys, begin, end), len(indptr) - 1
    )


def _sum_in_parallel(hash_range: Callable[[int, int], np.ndarray], count: int) -> RowSums:
    lanes = over_ranges(hash_range, count, parts=-(-count // _ROWS_PER_TASK) or 1)  # of (4,) uint64
    return RowSums(count, tuple(np.stack(lanes).sum(axis=0, dtype=np.uint64).tolist()))
