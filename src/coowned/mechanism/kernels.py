"""The compiled inner loops of the mechanism: random words, skips, norms, a user's columns.

Random words and skips are made of integers alone: the same key gives the same ones on every platform.
"""

import numba
import numpy as np

_njit = numba.njit(cache=True, nogil=True, error_model="numpy")

LANES = 64  # ChaCha20 blocks that are computed side by side
WORDS = 8 * LANES  # 64-bit words of one chunk

WORD_STREAM = np.uint64(0)  # nonces: the words themselves,
TAIL_STREAM = np.uint64(1)  # and the further bits of normals in the tail

_LOW_32 = np.uint64(0xFFFFFFFF)
_S32 = np.uint64(32)
_CONSTANTS = (np.uint32(0x61707865), np.uint32(0x3320646E), np.uint32(0x79622D32), np.uint32(0x6B206574))

# ---- ChaCha20 (Bernstein 2008: 256-bit key, 64-bit block counter, 64-bit nonce, 20 rounds) ---------------------------


@_njit
def _rounds(state, lanes):
    """The twenty rounds of the first `lanes` blocks."""
    for half in range(20):
        shift = half & 1  # columns, then diagonals
        for i in range(4):
            row_a = state[i]
            row_b = state[4 + (i + shift) % 4]
            row_c = state[8 + (i + 2 * shift) % 4]
            row_d = state[12 + (i + 3 * shift) % 4]
            for lane in range(lanes):
                a, b, c, d = row_a[lane], row_b[lane], row_c[lane], row_d[lane]
                a = np.uint32(a + b)
                d = d ^ a
                d = np.uint32(d << np.uint32(16)) | (d >> np.uint32(16))
                c = np.uint32(c + d)
                b = b ^ c
                b = np.uint32(b << np.uint32(12)) | (b >> np.uint32(20))
                a = np.uint32(a + b)
                d = d ^ a
                d = np.uint32(d << np.uint32(8)) | (d >> np.uint32(24))
                c = np.uint32(c + d)
                b = b ^ c
                b = np.uint32(b << np.uint32(7)) | (b >> np.uint32(25))
                row_a[lane], row_b[lane], row_c[lane], row_d[lane] = a, b, c, d


@_njit
def fill_words_of_keys(keys, nonce, first_block, out):
    """out (n, size) uint64: the words of n streams in ChaCha20's order, from block `first_block` (8 words) on."""
    size = out.shape[1]
    each = (size + 7) // 8  # blocks of a stream
    start, state = np.empty((16, LANES), np.uint32), np.empty((16, LANES), np.uint32)
    for i in range(4):
        start[i] = _CONSTANTS[i]
    start[14] = np.uint32(nonce & _LOW_32)
    start[15] = np.uint32(nonce >> _S32)
    for first in range(0, keys.shape[0] * each, LANES):
        lanes = min(LANES, keys.shape[0] * each - first)
        row, block = divmod(first, each)
        for lane in range(lanes):
            for i in range(8):
                start[4 + i, lane] = keys[row, i]
            start[12, lane] = np.uint32((first_block + block) & _LOW_32)
            start[13, lane] = np.uint32(np.uint64(first_block + block) >> _S32)
            block += 1
            if block == each:
                row, block = row + 1, 0
        for i in range(16):
            for lane in range(lanes):
                state[i, lane] = start[i, lane]
        _rounds(state, lanes)
        row, block = divmod(first, each)
        for lane in range(lanes):
            for i in range(min(8, size - 8 * block)):
                low = np.uint32(state[2 * i, lane] + start[2 * i, lane])
                high = np.uint32(state[2 * i + 1, lane] + start[2 * i + 1, lane])
                out[row, 8 * block + i] = np.uint64(low) | (np.uint64(high) << _S32)
            block += 1
            if block == each:
                row, block = row + 1, 0


@_njit
def fill_words(key, nonce, first_chunk, out):
    """out (n,) uint64: the words of one stream from the beginning of chunk `first_chunk` on."""
    fill_words_of_keys(key.reshape(1, 8), nonce, first_chunk * LANES, out.reshape(1, out.size))


@_njit
def word_at(key, nonce, number, at):
    """Word `at` of chunk `number` of a stream, alone."""
    block = np.empty((1, 8), np.uint64)
    fill_words_of_keys(key.reshape(1, 8), nonce, number * LANES + at // 8, block)
    return block[0, at % 8]


# ---- coins -----------------------------------------------------------------------------------------------------------


@_njit
def skip_of_word(word, thresholds, guide, shift):
    """How many of the next copies are not drawn: the number of thresholds above the word; the last must be 0."""
    skip = np.uint64(guide[word >> np.uint64(shift)])  # unsigned: no index is looked at for its sign
    while word < thresholds[skip]:
        skip += np.uint64(1)
    return np.int64(skip)


@_njit
def draw_positions(key, size, thresholds, guide, shift, out):
    """Fills out with the drawn positions in [0, size), increasing; gives how many, or -1 where out might be too short.

    It needs room for WORDS more than are drawn. A word that draws none (one of e) writes too, and is written over: as a
    branch, nobody could foresee it.
    """
    words = np.empty(WORDS, np.uint64)
    skips = np.empty(WORDS, np.int64)
    most = thresholds.size - 1
    position = chunk = drawn = 0
    while drawn + WORDS <= out.size:
        fill_words(key, WORD_STREAM, chunk, words)
        chunk += 1
        for i in range(WORDS):
            skips[i] = skip_of_word(words[i], thresholds, guide, shift)
        for i in range(WORDS):
            position += skips[i]
            if position >= size:
                return drawn
            out[drawn] = position
            draws = np.int64(skips[i] < most)
            drawn += draws
            position += draws
    return -1


# ---- norms -----------------------------------------------------------------------------------------------------------


@_njit
def fill_norms(features, rows, out):
    """out (n,) float32: at least the norm of features[rows[i]]; infinite where that is not finite or beyond float32.

    Sums of squares in float64, four at a time (which needs no other order than written), raised by what they may have
    lost.
    """
    width = features.shape[1]
    whole = width - width % 4
    raised = 1.0 + width * 2.0**-52
    for i in range(rows.size):
        row = rows[i]
        a = b = c = d = 0.0
        for j in range(0, whole, 4):
            p, q = np.float64(features[row, j]), np.float64(features[row, j + 1])
            r, s = np.float64(features[row, j + 2]), np.float64(features[row, j + 3])
            a += p * p
            b += q * q
            c += r * r
            d += s * s
        for j in range(whole, width):
            p = np.float64(features[row, j])
            a += p * p
        norm = np.float32(np.sqrt(((a + b) + (c + d)) * raised))
        # The next number up, by its bits: square root and cast may have rounded down. NaN becomes infinite.
        out[i] = np.uint32(norm.view(np.uint32) + np.uint32(1)).view(np.float32) if norm < np.inf else np.inf


# ---- schedules -------------------------------------------------------------------------------------------------------


@_njit
def number_copies(batches, seen, out):
    """out (iterations, batch_size): how often the example of each slot was scheduled before it; seen starts at 0."""
    for t in range(batches.shape[0]):
        for j in range(batches.shape[1]):
            out[t, j] = seen[batches[t, j]]
            seen[batches[t, j]] += 1


@_njit
def sum_columns(batches, indptr, users, squared_norms, num_bands, last, total, count):
    """Adds up each user's squared column norms; gives the first (step, user) whose columns overlap, or (-1, -1).

    last (num_users,) starts at -num_bands; total (num_users,) float64 and count (num_users,) int64 start at 0.
    """
    for t in range(batches.shape[0]):
        for j in range(batches.shape[1]):
            e = batches[t, j]
            for i in range(indptr[e], indptr[e + 1]):
                u = users[i]
                if t - last[u] < num_bands:
                    return t, np.int64(u)
                last[u] = t
                total[u] += squared_norms[t]
                count[u] += 1
    return -1, np.int64(-1)
