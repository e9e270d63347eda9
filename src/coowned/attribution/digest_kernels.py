"""The compiled inner loops of the digests: rows of text are hashed with SHA-256, sixteen at a time, and summed.

SHA-256 has no loop a compiler can vectorize; sixteen messages side by side, word by word, give it one.
"""

from typing import NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16  # messages hashed side by side

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
_INITIAL_STATE = np.array(
    [0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19], dtype=np.uint32
)
# Offsets into the one array of all words of sixteen messages; one array, so that the compiler sees no aliases.
_A, _B, _C, _D, _E, _F, _G, _H = ((64 + i) * LANES for i in range(8))  # working variables, after the 64 words
_STATE = 72 * LANES  # the hashes so far
NUM_WORDS = 80 * LANES
_COLON = 58
_NUMBER = 20  # most bytes of a number and its colon
_WIDE = 32  # bytes copied or cleared at once
_PADDING = 128  # most bytes that padding adds, and what wide copies write after a text
_ROWS_TOGETHER = 256  # rows that are fetched, written and then hashed together

_njit = numba.njit(cache=True, nogil=True)
_inline = numba.njit(inline="always")


class Texts(NamedTuple):
    """UTF-8 texts end to end: text i is data[offsets[i]:offsets[i + 1]]."""

    offsets: np.ndarray  # (texts + 1,) int64
    data: np.ndarray  # (bytes,) uint8


def _address(context, builder, item, kind, array, index):
    """Where array[index], an array of this kind, is, as a pointer to an item of that LLVM type."""
    view = context.make_array(kind)(context, builder, array)
    return builder.bitcast(cgutils.get_item_pointer(context, builder, kind, view, [index]), item.as_pointer())


@intrinsic
def _copy_wide(typing_context, target, at, source, begin):
    """target[at:at + _WIDE] = source[begin:begin + _WIDE], of bytes; both arrays must reach so far."""
    line = ir.VectorType(ir.IntType(8), _WIDE)

    def generate(context, builder, signature, arguments):
        to = _address(context, builder, line, signature.args[0], *arguments[:2])
        given = _address(context, builder, line, signature.args[2], *arguments[2:])
        builder.store(builder.load(given, align=1), to, align=1)
        return context.get_dummy_value()

    return types.none(target, types.intp, source, types.intp), generate


@intrinsic
def _clear_wide(typing_context, target, at):
    """target[at:at + _WIDE] = 0, of bytes; the array must reach so far."""
    line = ir.VectorType(ir.IntType(8), _WIDE)

    def generate(context, builder, signature, arguments):
        to = _address(context, builder, line, signature.args[0], *arguments)
        builder.store(ir.Constant(line, None), to, align=1)
        return context.get_dummy_value()

    return types.none(target, types.intp), generate


@intrinsic
def _eight_bytes(typing_context, source, begin):
    """source[begin:begin + 8], of bytes, as a number in byte order; the array must reach so far."""
    word = ir.IntType(64)

    def generate(context, builder, signature, arguments):
        return builder.bswap(builder.load(_address(context, builder, word, signature.args[0], *arguments), align=1))

    return types.uint64(source, types.intp), generate


@_inline
def _rotate(x, n):
    return (x >> np.uint32(n)) | (x << np.uint32(32 - n))


@_inline
def _round(x, a, b, c, d, e, f, g, h, i):
    constant = _ROUND_CONSTANTS[i]
    word = i * LANES
    for lane in range(LANES):
        va, vb, vc = x[a + lane], x[b + lane], x[c + lane]
        ve = x[e + lane]
        choice = (ve & x[f + lane]) ^ (~ve & x[g + lane])
        majority = (va & vb) ^ (va & vc) ^ (vb & vc)
        t1 = x[h + lane] + (_rotate(ve, 6) ^ _rotate(ve, 11) ^ _rotate(ve, 25)) + choice + constant + x[word + lane]
        x[d + lane] += t1
        x[h + lane] = t1 + (_rotate(va, 2) ^ _rotate(va, 13) ^ _rotate(va, 22)) + majority


@_njit
def _compress(x):
    """Adds one 64-byte block of each message, in the first 16 words, to the hashes at _STATE."""
    for i in range(16, 64):
        at = i * LANES
        for lane in range(at, at + LANES):
            p, q = x[lane - 15 * LANES], x[lane - 2 * LANES]
            s0 = _rotate(p, 7) ^ _rotate(p, 18) ^ (p >> np.uint32(3))
            s1 = _rotate(q, 17) ^ _rotate(q, 19) ^ (q >> np.uint32(10))
            x[lane] = x[lane - 16 * LANES] + s0 + x[lane - 7 * LANES] + s1
    for word in range(8 * LANES):
        x[_A + word] = x[_STATE + word]
    for i in range(0, 64, 8):
        _round(x, _A, _B, _C, _D, _E, _F, _G, _H, i)
        _round(x, _H, _A, _B, _C, _D, _E, _F, _G, i + 1)
        _round(x, _G, _H, _A, _B, _C, _D, _E, _F, i + 2)
        _round(x, _F, _G, _H, _A, _B, _C, _D, _E, i + 3)
        _round(x, _E, _F, _G, _H, _A, _B, _C, _D, i + 4)
        _round(x, _D, _E, _F, _G, _H, _A, _B, _C, i + 5)
        _round(x, _C, _D, _E, _F, _G, _H, _A, _B, i + 6)
        _round(x, _B, _C, _D, _E, _F, _G, _H, _A, i + 7)
    for word in range(8 * LANES):
        x[_STATE + word] += x[_A + word]


@_njit
def add_hashes(message, ends, count, x, sums):
    """Adds the SHA-256 of `count` padded messages to sums (4,), each of 64 bits, modulo 2^64.

    Message i is message[ends[i]:ends[i + 1]]; x (NUM_WORDS,) uint32 is scratch. A lane that has finished a message
    takes the next one, so that long messages keep no lane waiting.
    """
    words = message.view(np.uint32)
    position, stop = np.zeros(LANES, np.int64), np.zeros(LANES, np.int64)
    taken = done = 0
    while done < count:
        for lane in range(LANES):
            if position[lane] == stop[lane]:
                if taken == count:
                    continue
                position[lane], stop[lane] = ends[taken], ends[taken + 1]
                taken += 1
                for i in range(8):
                    x[_STATE + i * LANES + lane] = _INITIAL_STATE[i]
            for i in range(16):
                word = words[position[lane] // 4 + i]  # big-endian
                word = (_rotate(word, 8) & np.uint32(0xFF00FF00)) | (_rotate(word, 24) & np.uint32(0x00FF00FF))
                x[i * LANES + lane] = word
        _compress(x)
        for lane in range(LANES):
            if position[lane] < stop[lane]:
                position[lane] += 64
                if position[lane] == stop[lane]:
                    done += 1
                    for i in range(4):
                        high = np.uint64(x[_STATE + 2 * i * LANES + lane]) << np.uint64(32)
                        sums[i] += high | np.uint64(x[_STATE + (2 * i + 1) * LANES + lane])


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
    sums, x = np.zeros(4, np.uint64), np.empty(NUM_WORDS, np.uint32)
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
        add_hashes(message, ends, count, x, sums)
    return sums


@_inline
def _head(data, begin, end):
    """The first eight bytes of data[begin:end] as a number in byte order; zeros follow a shorter text."""
    if end - begin >= 8:
        return _eight_bytes(data, begin)  # pyright: ignore[reportCallIssue]
    head = np.uint64(0)
    for i in range(end - begin):
        head |= np.uint64(data[begin + i]) << np.uint64(56 - 8 * i)
    return head


@_njit
def _bytes_before(data, begin, end, other_begin, other_end):
    """Whether data[begin:end] comes before data[other_begin:other_end] in byte order."""
    for i in range(min(end - begin, other_end - other_begin)):
        a, b = data[begin + i], data[other_begin + i]
        if a != b:
            return a < b
    return end - begin < other_end - other_begin


@_njit
def _sort_texts(data, begins, ends, heads, low, high):
    """Sorts the texts data[begins[i]:ends[i]] for i in low..high: a Shell sort, since most rows are short."""
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
    sums, x = np.zeros(4, np.uint64), np.empty(NUM_WORDS, np.uint32)
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
        add_hashes(message, ends, count, x, sums)
    return sums
