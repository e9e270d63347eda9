"""The compiled inner loops of the mechanism: random words, normals, skips, correlated rows, a user's columns.

Integers, and IEEE additions, multiplications, divisions and square roots in a fixed order, are all that is used (the
logarithm is built from them): the same key gives the same bits on every platform, which a C library's `log` would not.
No function here is compiled with fast-math.
"""

import numba
import numpy as np

_njit = numba.njit(cache=True, nogil=True, error_model="numpy")

LANES = 64  # ChaCha20 blocks that are computed side by side
WORDS = 8 * LANES  # 64-bit words of one chunk

WORD_STREAM = np.uint64(0)  # nonces: the words themselves,
TAIL_STREAM = np.uint64(1)  # and the further bits of normals in the tail

_LOW_32 = np.uint64(0xFFFFFFFF)
_S32, _S52 = np.uint64(32), np.uint64(52)
_CONSTANTS = (np.uint32(0x61707865), np.uint32(0x3320646E), np.uint32(0x79622D32), np.uint32(0x6B206574))

# ---- ChaCha20 (Bernstein 2008: 256-bit key, 64-bit block counter, 64-bit nonce, 20 rounds) ---------------------------


@_njit
def _prepare(key, nonce):
    """The (16, LANES) words every block of a stream starts from, but for the counter."""
    start = np.empty((16, LANES), np.uint32)
    for i in range(4):
        start[i] = _CONSTANTS[i]
    for i in range(8):
        start[4 + i] = key[i]
    start[14] = np.uint32(nonce & _LOW_32)
    start[15] = np.uint32(nonce >> _S32)
    return start


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
def _chunk(start, number, state, out, needed):
    """out (WORDS,): the first `needed` words or more of chunk `number`; the words of a stream are in ChaCha20's order.

    A short one costs less: only the blocks that hold those words are made, sixteen at a time.
    """
    lanes = min(LANES, (needed + 127) // 128 * 16)
    for lane in range(lanes):
        block = np.uint64(number) * np.uint64(LANES) + np.uint64(lane)
        start[12, lane] = np.uint32(block & _LOW_32)
        start[13, lane] = np.uint32(block >> _S32)
    for i in range(16):
        for lane in range(lanes):
            state[i, lane] = start[i, lane]
    _rounds(state, lanes)
    for i in range(8):
        for lane in range(lanes):
            low = np.uint32(state[2 * i, lane] + start[2 * i, lane])
            high = np.uint32(state[2 * i + 1, lane] + start[2 * i + 1, lane])
            out[8 * lane + i] = np.uint64(low) | (np.uint64(high) << _S32)


@_njit
def fill_words(key, nonce, first_chunk, out):
    """out (n,) uint64: the words of a stream from the beginning of chunk `first_chunk` on."""
    start = _prepare(key, nonce)
    state = np.empty((16, LANES), np.uint32)
    chunk = np.empty(WORDS, np.uint64)
    for at in range(0, out.size, WORDS):
        length = min(WORDS, out.size - at)
        _chunk(start, first_chunk + at // WORDS, state, chunk, length)
        for j in range(length):
            out[at + j] = chunk[j]


@_njit
def fill_words_of_keys(keys, nonce, first_block, out):
    """out (n, size): words of n streams from a block (8 words) on, as `fill_words` gives them, made side by side."""
    size = out.shape[1]
    each = (size + 7) // 8  # blocks of a stream
    start, state = np.empty((16, LANES), np.uint32), np.empty((16, LANES), np.uint32)
    for i in range(4):
        start[i] = _CONSTANTS[i]
    start[14] = np.uint32(nonce & _LOW_32)
    start[15] = np.uint32(nonce >> _S32)
    for first in range(0, keys.shape[0] * each, LANES):
        lanes = min(LANES, keys.shape[0] * each - first)
        for lane in range(lanes):
            row, block = divmod(first + lane, each)
            for i in range(8):
                start[4 + i, lane] = keys[row, i]
            start[12, lane] = np.uint32((first_block + block) & _LOW_32)
            start[13, lane] = np.uint32(np.uint64(first_block + block) >> _S32)
        for i in range(16):
            for lane in range(lanes):
                state[i, lane] = start[i, lane]
        _rounds(state, lanes)
        for lane in range(lanes):
            row, block = divmod(first + lane, each)
            for i in range(min(8, size - 8 * block)):
                low = np.uint32(state[2 * i, lane] + start[2 * i, lane])
                high = np.uint32(state[2 * i + 1, lane] + start[2 * i + 1, lane])
                out[row, 8 * block + i] = np.uint64(low) | (np.uint64(high) << _S32)


@_njit
def word_at(key, nonce, number, at):
    """Word `at` of one chunk, alone."""
    words = np.empty(WORDS, np.uint64)
    _chunk(_prepare(key, nonce), number, np.empty((16, LANES), np.uint32), words, WORDS)
    return words[at]


# ---- normals: the inverse of the distribution function (Wichura 1988, AS 241) ----------------------------------------

_SIGN = np.uint64(1 << 63)
_MAGNITUDE = np.uint64((1 << 63) - 1)
_CENTRAL = np.uint64(round(0.425 * 2**64))  # distance from the median, in units of 2^-64, up to which one formula holds
_SCARCE = np.uint64(1 << 47)  # a tail probability with fewer leading bits than this gets 64 bits more
_TWO_M64 = 2.0**-64
_LN2_HIGH, _LN2_LOW = 0.693147180369123816490, 1.90821492927058770002e-10  # the first has 32 bits: products are exact
_MANTISSA, _ONE = np.uint64((1 << 52) - 1), np.uint64(1023 << 52)


@_njit
def log(x):
    """The natural logarithm of a positive normal number, to a few units in the last place."""
    bits = np.float64(x).view(np.uint64)
    exponent = np.int64(bits >> _S52) - 1023
    m = np.uint64((bits & _MANTISSA) | _ONE).view(np.float64)  # in [1, 2)
    if m > 1.4142135623730951:
        m *= 0.5
        exponent += 1
    s = (m - 1.0) / (m + 1.0)  # log(m) = 2 artanh(s), |s| <= 0.172
    z = s * s
    series = 1.0 / 25.0
    for odd in (23.0, 21.0, 19.0, 17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0):
        series = series * z + 1.0 / odd
    return exponent * _LN2_HIGH + (exponent * _LN2_LOW + 2.0 * s * series)


@_njit
def _central_normal(q):
    """The normal at probability 1/2 + q, 0 <= q <= 0.425."""
    r = 0.180625 - q * q
    top = 2.5090809287301226727e3
    top = top * r + 3.3430575583588128105e4
    top = top * r + 6.7265770927008700853e4
    top = top * r + 4.5921953931549871457e4
    top = top * r + 1.3731693765509461125e4
    top = top * r + 1.9715909503065514427e3
    top = top * r + 1.3314166789178437745e2
    top = top * r + 3.3871328727963666080e0
    low = 5.2264952788528545610e3
    low = low * r + 2.8729085735721942674e4
    low = low * r + 3.9307895800092710610e4
    low = low * r + 2.1213794301586595867e4
    low = low * r + 5.3941960214247511077e3
    low = low * r + 6.8718700749205790830e2
    low = low * r + 4.2313330701600911252e1
    low = low * r + 1.0
    return q * top / low


@_njit
def _near_tail(r):
    """The z > 0 that a normal exceeds with probability e^(-r^2), sqrt(-log 0.075) <= r <= 5."""
    r -= 1.6
    top = 7.74545014278341407640e-4
    top = top * r + 2.27238449892691845833e-2
    top = top * r + 2.41780725177450611770e-1
    top = top * r + 1.27045825245236838258e0
    top = top * r + 3.64784832476320460504e0
    top = top * r + 5.76949722146069140550e0
    top = top * r + 4.63033784615654529590e0
    top = top * r + 1.42343711074968357734e0
    low = 1.05075007164441684324e-9
    low = low * r + 5.47593808499534494600e-4
    low = low * r + 1.51986665636164571966e-2
    low = low * r + 1.48103976427480074590e-1
    low = low * r + 6.89767334985100004550e-1
    low = low * r + 1.67638483018380384940e0
    low = low * r + 2.05319162663775882187e0
    low = low * r + 1.0
    return top / low


@_njit
def _far_tail(r):
    """The same for 5 < r < 27."""
    r -= 5.0
    top = 2.01033439929228813265e-7
    top = top * r + 2.71155556874348757815e-5
    top = top * r + 1.24266094738807843860e-3
    top = top * r + 2.65321895265761230930e-2
    top = top * r + 2.96560571828504891230e-1
    top = top * r + 1.78482653991729133580e0
    top = top * r + 5.46378491116411436990e0
    top = top * r + 6.65790464350110377720e0
    low = 2.04426310338993978564e-15
    low = low * r + 1.42151175831644588870e-7
    low = low * r + 1.84631831751005468180e-5
    low = low * r + 7.86869131145613259100e-4
    low = low * r + 1.48753612908506148525e-2
    low = low * r + 1.36929880922735805310e-1
    low = low * r + 5.99832206555887937690e-1
    low = low * r + 1.0
    return top / low


@_njit
def _tail_normal(p):
    """The z > 0 that a normal exceeds with probability p, 1e-300 < p <= 0.075."""
    r = np.sqrt(-log(p))
    return _near_tail(r) if r <= 5.0 else _far_tail(r)


@_njit
def needs_more_bits(word):
    """Whether the tail probability of this word has so few bits that a second word must follow."""
    return (word & _MAGNITUDE) < _SCARCE


@_njit
def tail_normal(word, more):
    """The normal of a word, its tail probability carried on by the 64 bits of `more`."""
    m = word & _MAGNITUDE
    p = (np.float64(m) + (np.float64(more) + 0.5) * _TWO_M64) * _TWO_M64
    z = _tail_normal(p)
    return z if word & _SIGN else -z


@_njit
def normals_of_words(words, out):
    """out (n,) float64: one normal a word; where `needs_more_bits`, the caller overwrites it with `tail_normal`.

    The upper bit is the sign. The other 63, m, are the tail probability (m + 1/2) / 2^64 < 1/2.
    """
    for i in range(words.size):  # without a branch, so that it becomes vector code; wrong in the tails
        q = np.float64(_MAGNITUDE - (words[i] & _MAGNITUDE)) * _TWO_M64 + 0.5 * _TWO_M64
        z = _central_normal(q)
        out[i] = z if words[i] & _SIGN else -z
    places, roots, tails = np.empty(words.size, np.int64), np.empty(words.size), np.empty(words.size)
    count = 0
    for i in range(words.size):
        places[count] = i  # written over by the next, unless it is in a tail
        count += _MAGNITUDE - (words[i] & _MAGNITUDE) > _CENTRAL
    for j in range(count):  # again without a branch
        p = (np.float64(words[places[j]] & _MAGNITUDE) + 0.5) * _TWO_M64
        roots[j] = np.sqrt(-log(p))
        tails[j] = _near_tail(roots[j])
    for j in range(count):
        z = tails[j] if roots[j] <= 5.0 else _far_tail(roots[j])
        out[places[j]] = z if words[places[j]] & _SIGN else -z


@_njit
def normals_with_tails(words, more, out):
    """out (n,) float64: the normals of the words, with `more` for those that need it."""
    normals_of_words(words, out)
    for i in range(words.size):
        if needs_more_bits(words[i]):
            out[i] = tail_normal(words[i], more[i])


@_njit
def correlated_row(key, begin, coefficients, ring, head, out):
    """out (n,) float32: the entries from `begin` on (a multiple of WORDS) of one row of C^-1 z.

    coefficients (num_bands,) float64: C_ij = coefficients[i - j]. ring (num_bands - 1, size) float32: earlier rows as
    they were given out, the latest in row `head`. Solves sum_r coefficients[r] row[t - r] = z_t in float64 and rounds
    the row once, so that C times what was given out differs from z by that one rounding: nothing accumulates.
    Overwrites the oldest row of the ring by `out`; the caller moves `head` there.
    """
    start = _prepare(key, WORD_STREAM)
    state = np.empty((16, LANES), np.uint32)
    words = np.empty(WORDS, np.uint64)
    row = np.empty(WORDS, np.float64)
    for at in range(0, out.size, WORDS):
        chunk = (begin + at) // WORDS
        length = min(WORDS, out.size - at)
        _chunk(start, chunk, state, words, length)
        normals_of_words(words[:length], row[:length])
        _carry_tails(key, chunk, words[:length], row)
        _correlate(coefficients, ring[:, begin + at : begin + at + length], head, row, out[at : at + length])


@_njit
def correlated_rows(keys, coefficients, rings, head, out):
    """out (n, size): a whole row for each of n keys; rings (n, num_bands - 1, size)."""
    size = out.shape[1]
    if size > WORDS:
        for i in range(keys.shape[0]):
            correlated_row(keys[i], 0, coefficients, rings[i], head, out[i])
        return
    together = max(1, 8 * WORDS // size)  # rows, so that they stay near
    words, rows = np.empty((together, size), np.uint64), np.empty((together, size), np.float64)
    for first in range(0, keys.shape[0], together):
        count = min(together, keys.shape[0] - first)
        fill_words_of_keys(keys[first : first + count], WORD_STREAM, 0, words[:count])
        normals_of_words(words[:count].reshape(-1), rows[:count].reshape(-1))
        for i in range(count):
            _carry_tails(keys[first + i], 0, words[i], rows[i])
            _correlate(coefficients, rings[first + i], head, rows[i], out[first + i])


@_njit
def _carry_tails(key, chunk, words, row):
    """Normals of one chunk whose word has too few bits get those of a second."""
    for j in range(words.size):
        if needs_more_bits(words[j]):  # one of 65536
            row[j] = tail_normal(words[j], word_at(key, TAIL_STREAM, chunk, j))


@_njit
def _correlate(coefficients, ring, head, row, out):
    """out = row minus what earlier rows carry into it, over the first coefficient; it takes the oldest one's place."""
    kept = ring.shape[0]
    for lag in range(1, kept + 1):
        earlier = ring[(head - lag + 1) % kept]
        c = coefficients[lag]
        for j in range(out.size):
            row[j] -= c * np.float64(earlier[j])
    first = coefficients[0]
    for j in range(out.size):
        out[j] = np.float32(row[j] / first)
    if kept:
        oldest = ring[(head + 1) % kept]
        for j in range(out.size):
            oldest[j] = out[j]


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
    start = _prepare(key, WORD_STREAM)
    state = np.empty((16, LANES), np.uint32)
    words = np.empty(WORDS, np.uint64)
    skips = np.empty(WORDS, np.int64)
    most = thresholds.size - 1
    position = chunk = drawn = 0
    while drawn + WORDS <= out.size:
        _chunk(start, chunk, state, words, WORDS)
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


@_njit
def pad_copies(places, examples, numbers, out_examples, out_numbers, mask):
    """The copies at these places of two lists, then zeros; an empty list of numbers stands for zeros."""
    count = places.size
    for i in range(count):
        out_examples[i] = examples[places[i]]
    out_examples[count:] = 0
    out_numbers[:] = 0
    if numbers.size:
        for i in range(count):
            out_numbers[i] = numbers[places[i]]
    mask[:count] = True
    mask[count:] = False


# ---- norms -----------------------------------------------------------------------------------------------------------


@_njit
def squared_norms(features, rows, out):
    """out (n,) float32: at least the squared norm of features[rows[i]]; infinite where that is not finite.

    Sums in float64 and four at a time (which needs no other order than written), raised by what they may have lost.
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
        total = np.float32(((a + b) + (c + d)) * raised)
        # The next number up, by its bits: the cast may have rounded down. NaN and what is too large become infinite.
        out[i] = np.uint32(total.view(np.uint32) + np.uint32(1)).view(np.float32) if total < np.inf else np.inf


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
