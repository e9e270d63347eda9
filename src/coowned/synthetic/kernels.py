"""Random numbers for synthetic worlds: compiled, counter-based, with the same bits on every platform.

SplitMix64 because stored worlds and figures were made with it, and numpy's generators are not counter-based inside of a
compiled loop. The i-th draw of a stream is `mix(key + i * GAMMA)` (SplitMix64), so that a draw is a pure function of
its index. Logarithm, exponential and power are built from IEEE additions, multiplications and divisions alone: the C
libraries of two platforms may differ in the last bit of `pow`, and one such bit can turn one coin and with it all later
ones. Not for noise or coins that a privacy claim rests on: those come from the mechanism.

References: Steele, Lea, Flood (2014), "Fast splittable pseudorandom number generators".
"""

import math

import numba
import numpy as np

_njit = numba.njit(cache=True, nogil=True, error_model="numpy")
_inlined = numba.njit(cache=True, nogil=True, error_model="numpy", inline="always")

GAMMA = np.uint64(0x9E3779B97F4A7C15)
MIX_FIRST = np.uint64(0xBF58476D1CE4E5B9)
MIX_SECOND = np.uint64(0x94D049BB133111EB)
S11, S27, S30, S31, S32, S52 = (np.uint64(shift) for shift in (11, 27, 30, 31, 32, 52))
LOW_32 = np.uint64(0xFFFFFFFF)
MANTISSA = np.uint64(0x000FFFFFFFFFFFFF)
ONE_BITS = np.uint64(0x3FF0000000000000)  # the bits of 1.0
LN2_HIGH, LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10  # their sum is ln 2 to 86 bits
INVERSE_LN2 = 1.44269504088896338700


@_inlined
def mix(state):
    """SplitMix64's output function: a bijection of 64 bits in which every bit of the input reaches every bit."""
    state = (state ^ (state >> S30)) * MIX_FIRST
    state = (state ^ (state >> S27)) * MIX_SECOND
    return state ^ (state >> S31)


def stream_key(seed: int, tag: int) -> np.uint64:
    """Returns the key of one stream; streams of different (seed, tag) are unrelated.

    >>> hex(stream_key(0, 1))
    '0x2a98f501af37e97f'
    """
    mask, state = 2**64 - 1, 0
    for word in (seed, tag):
        state = python_mix((state + word + int(GAMMA)) & mask)
    return np.uint64(state)


def python_mix(state: int) -> int:
    """Computes `mix` on Python integers, for worlds generated without a kernel."""
    mask = 2**64 - 1
    state = (state ^ (state >> 30)) * int(MIX_FIRST) & mask
    state = (state ^ (state >> 27)) * int(MIX_SECOND) & mask
    return state ^ (state >> 31)


@_inlined
def unit(bits):
    """Returns a number in [0, 1) from the upper 53 bits."""
    return np.float64(bits >> S11) * 1.1102230246251565e-16  # 2^-53


@_inlined
def below(bits, count):
    """Returns an integer in [0, count) for count < 2^32; each has probability 1/count to within 2^-64."""
    size = np.uint64(count)
    return np.int64(((bits >> S32) * size + (((bits & LOW_32) * size) >> S32)) >> S32)


@_njit
def log(x):
    """Natural logarithm of a normal positive number, to a few units in the last place."""
    bits = np.float64(x).view(np.uint64)
    exponent = np.int64(bits >> S52) - 1023
    m = np.uint64((bits & MANTISSA) | ONE_BITS).view(np.float64)  # in [1, 2)
    if m > 1.4142135623730951:
        m *= 0.5
        exponent += 1
    s = (m - 1.0) / (m + 1.0)  # log(m) = 2 artanh(s), |s| <= 0.172
    z = s * s
    series = 1.0 / 23.0
    for odd in (21.0, 19.0, 17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0):
        series = series * z + 1.0 / odd
    return exponent * LN2_HIGH + (exponent * LN2_LOW + 2.0 * s * series)


@_njit
def exp(x):
    """e^x to a few units in the last place; 0 below -700, infinite above 709."""
    if x < -700.0:
        return 0.0
    if x > 709.0:
        return np.inf
    k = np.floor(x * INVERSE_LN2 + 0.5)
    r = (x - k * LN2_HIGH) - k * LN2_LOW  # |r| <= 0.347
    series = 1.0
    for term in (14.0, 13.0, 12.0, 11.0, 10.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0):
        series = 1.0 + series * r / term
    return series * np.uint64(np.uint64(np.int64(k) + 1023) << S52).view(np.float64)


@_njit
def power(base, exponent):
    """base^exponent for base >= 1, relative error about 1e-16 times the logarithm of the result."""
    return exp(exponent * log(base))


def poisson_cumulative(mean: float) -> np.ndarray:
    """Computes P(N <= n) for n = 0, 1, …, from sums and products alone; beyond the last entry is less than 2^-60.

    >>> poisson_cumulative(2.0)[:3].round(6)
    array([0.135335, 0.406006, 0.676676])
    """
    mode = int(mean)
    down, up = [1.0], [1.0]  # relative to the mode, so that no large mean underflows
    for n in range(mode, 0, -1):
        down.append(down[-1] * n / mean)
    while up[-1] > 1e-20:
        up.append(up[-1] * mean / (mode + len(up)))
    cumulative = np.cumsum(down[:0:-1] + up)  # (largest count + 1,) float64, added one by one
    return cumulative / cumulative[-1]


@_njit
def draw_at(key, indices):
    """(n,) uint64: the draws of a stream at these indices."""
    drawn = np.empty(indices.size, dtype=np.uint64)
    for i in range(indices.size):
        drawn[i] = mix(key + np.uint64(indices[i] + 1) * GAMMA)
    return drawn


@_njit
def fill_gaussian_rows(key, rows, scale, out):
    """Writes row rows[i] of an endless matrix of independent N(0, scale²) numbers to out[i]; out (n, columns) float32.

    Box-Muller: one draw makes two numbers, the cosines in the left half and the sines in the right. Free of branches
    and calls, so that it compiles to vector instructions; error_model="numpy" is needed for that too.
    """
    half = (out.shape[1] + 1) // 2  # draws a row
    for i in range(rows.size):
        base = key + np.uint64(rows[i]) * np.uint64(half) * GAMMA
        left, right = out[i, :half], out[i, half:]
        for j in range(right.size):
            left[j], right[j] = gaussian_pair(mix(base + np.uint64(j + 1) * GAMMA), scale)
        if left.size > right.size:
            left[half - 1] = gaussian_pair(mix(base + np.uint64(half) * GAMMA), scale)[0]


@_inlined
def gaussian_pair(bits, scale):
    """Two independent N(0, scale²) numbers, float32, from 64 random bits; no more than 6.7 scales from 0."""
    # radius sqrt(-2 ln u): u = m·2^e with m in [sqrt(1/2), sqrt 2), ln m = 2 artanh((m - 1)/(m + 1))
    u = (np.float32(np.int32(bits >> np.uint64(33))) + np.float32(0.5)) * np.float32(2.0**-31)
    raw = np.float32(u).view(np.int32)
    e = np.int32(np.int32(raw - np.int32(0x3F3504F3)) >> np.int32(23))
    m = np.int32(raw - np.int32(e << np.int32(23))).view(np.float32)
    s = (m - np.float32(1.0)) / (m + np.float32(1.0))
    z = s * s
    p = np.float32(1 / 9)
    for coefficient in (np.float32(1 / 7), np.float32(1 / 5), np.float32(1 / 3), np.float32(1.0)):
        p = p * z + coefficient
    logarithm = np.float32(e) * np.float32(0.6931471805599453) + np.float32(2.0) * s * p
    radius = np.float32(math.sqrt(max(np.float32(-2.0) * logarithm, np.float32(0.0)))) * scale
    # direction: an angle in [0, pi/4) from 29 bits, then three bits for its eight mirror images
    angle = np.float32(np.int32((bits & LOW_32) >> np.uint64(3))) * np.float32(0.7853981633974483 * 2.0**-29)
    q = angle * angle
    sine = np.float32(-1 / 5040)
    for coefficient in (np.float32(1 / 120), np.float32(-1 / 6), np.float32(1.0)):
        sine = coefficient + q * sine
    sine *= angle
    cosine = np.float32(1 / 40320)
    for coefficient in (np.float32(-1 / 720), np.float32(1 / 24), np.float32(-1 / 2), np.float32(1.0)):
        cosine = coefficient + q * cosine
    swapped = (bits & np.uint64(1)) != np.uint64(0)
    first = sine if swapped else cosine
    second = cosine if swapped else sine
    first = -first if (bits & np.uint64(2)) != np.uint64(0) else first
    second = -second if (bits & np.uint64(4)) != np.uint64(0) else second
    return radius * first, radius * second
