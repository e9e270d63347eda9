"""Computes normals as exact real numbers: in float64 with a proven error, and by exact comparisons where that is short.

A normal Z is defined by an endless string of random bits: a sign, then the binary digits of a tail probability p < 1/2;
Z = ±Q^-1(p), where Q is the upper tail of the standard normal distribution. A 64-bit word holds the sign and digits 2
to 64 of p (the first is 0); further digits come from further streams under the same key.

Only integers, and IEEE additions, multiplications, divisions and square roots in a fixed order are used, so the same
words give the same bits on every platform. Nothing here is compiled with fast-math.
"""

import functools
import math
from collections.abc import Callable
from decimal import ROUND_HALF_EVEN, Context, Decimal, localcontext
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from coowned.exact.compiled import compiled
from coowned.exact.keys import TAIL_STREAM, word_at

# |z - Z| <= RELATIVE_ERROR |z| + ABSOLUTE_ERROR for every z that `approximate` gives, certified by
# tests/exact/normal_certificate.py.
RELATIVE_ERROR = 2.0**-46
ABSOLUTE_ERROR = 2.0**-60

SIGN = np.uint64(1 << 63)
MAGNITUDE = np.uint64((1 << 63) - 1)
CENTRAL = np.uint64(round(0.425 * 2**64))  # distance from the median, in units of 2^-64, of the central formula
SCARCE = np.uint64(1 << 47)  # a tail probability with fewer leading bits than this needs the second word
LARGEST_ROOT = 5.0  # sqrt(-log p) up to which the tail formula holds: one word in 2^35 is beyond
_TWO_M64 = 2.0**-64
LN2_HIGH, LN2_LOW = 0.693147180369123816490, 1.90821492927058770002e-10  # the first has 32 bits: products are exact
_MANTISSA, _ONE, _S52 = np.uint64((1 << 52) - 1), np.uint64(1023 << 52), np.uint64(52)

# Wichura (1988), AS 241: numerators and denominators, the highest power first.
_CENTRAL_TOP = (
    2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4, 4.5921953931549871457e4,
    1.3731693765509461125e4, 1.9715909503065514427e3, 1.3314166789178437745e2, 3.3871328727963666080e0,
)  # fmt: skip
_CENTRAL_LOW = (
    5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4,
    5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0,
)  # fmt: skip
_TAIL_TOP = (
    7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258e0,
    3.64784832476320460504e0, 5.76949722146069140550e0, 4.63033784615654529590e0, 1.42343711074968357734e0,
)  # fmt: skip
_TAIL_LOW = (
    1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2, 1.48103976427480074590e-1,
    6.89767334985100004550e-1, 1.67638483018380384940e0, 2.05319162663775882187e0, 1.0,
)  # fmt: skip

_njit = compiled()


@_njit
def log_of(m, exponent):
    """log(m 2^exponent), 1/2 < m^2 <= 2."""
    s = (m - 1.0) / (m + 1.0)  # log(m) = 2 artanh(s), |s| <= 0.172
    z = s * s
    series = 1.0 / 25.0
    for odd in (23.0, 21.0, 19.0, 17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0):
        series = series * z + 1.0 / odd
    return exponent * LN2_HIGH + (exponent * LN2_LOW + 2.0 * s * series)


@_njit
def _log(x):
    """Returns the natural logarithm of a positive normal number."""
    bits = np.float64(x).view(np.uint64)
    exponent = np.int64(bits >> _S52) - 1023
    m = np.uint64((bits & _MANTISSA) | _ONE).view(np.float64)  # in [1, 2)
    if m > 1.4142135623730951:
        m *= 0.5
        exponent += 1
    return log_of(m, exponent)


@_njit
def central_normal(q):
    """Returns the normal at probability 1/2 + q, 0 <= q <= 0.425 (Wichura 1988, AS 241)."""
    r = 0.180625 - q * q
    top, low = _CENTRAL_TOP[0], _CENTRAL_LOW[0]
    for i in range(1, 8):
        top = top * r + _CENTRAL_TOP[i]
        low = low * r + _CENTRAL_LOW[i]
    return q * top / low


@_njit
def tail_normal(r):
    """Returns the z > 0 that a normal exceeds with probability e^(-r^2), 1.6 < r <= 5 (AS 241)."""
    r = r - 1.6
    top, low = _TAIL_TOP[0], _TAIL_LOW[0]
    for i in range(1, 8):
        top = top * r + _TAIL_TOP[i]
        low = low * r + _TAIL_LOW[i]
    return top / low


@_njit
def approximate(words, out):
    """out (n,) float64: the normals of the words; returns how many are NaN because they need a second word."""
    for i in range(words.size):  # without a branch, so that it becomes vector code; wrong in the tails
        q = np.float64(MAGNITUDE - (words[i] & MAGNITUDE)) * _TWO_M64 + 0.5 * _TWO_M64
        z = central_normal(q)
        out[i] = z if words[i] & SIGN else -z
    index, roots, tails = np.empty(words.size, np.int64), np.empty(words.size), np.empty(words.size)
    count = 0
    for i in range(words.size):
        index[count] = i  # overwritten by the next, unless it is in a tail
        count += MAGNITUDE - (words[i] & MAGNITUDE) > CENTRAL
    for j in range(count):  # again without a branch
        p = (np.float64(words[index[j]] & MAGNITUDE) + 0.5) * _TWO_M64
        roots[j] = np.sqrt(-_log(p))
        tails[j] = tail_normal(roots[j])
    scarce = 0
    for j in range(count):
        word = words[index[j]]
        z = tails[j] if (word & MAGNITUDE) >= SCARCE else np.nan
        scarce += (word & MAGNITUDE) < SCARCE  # one of 65536
        out[index[j]] = z if word & SIGN else -z
    return scarce


@_njit
def approximate_with(word, more):
    """Returns the normal of a word in the tail and of the word that carries on its digits; NaN beyond LARGEST_ROOT."""
    p = (np.float64(word & MAGNITUDE) + (np.float64(more) + 0.5) * _TWO_M64) * _TWO_M64
    r = np.sqrt(-_log(p))
    z = tail_normal(r) if r <= LARGEST_ROOT else np.nan
    return z if word & SIGN else -z


@_njit
def read_on(words, key, chunk, normals):
    """Normals of one chunk whose tail probability needs the digits of a second word."""
    for j in range(words.size):
        if (words[j] & MAGNITUDE) < SCARCE:
            normals[j] = approximate_with(words[j], word_at(key, TAIL_STREAM, chunk, j))


# ---- comparisons with the first word ---------------------------------------------------------------------------------

TAIL_ERROR = 1 / 8  # of `tail_difference`
TAIL_END = 6.0  # up to which the table goes
_CELLS = 128  # of the table to a unit


class TailTable(NamedTuple):
    """The upper tail Q and its derivatives at z = i / 128, in units of 2^-64: what `tail_difference` reads."""

    whole: npt.NDArray[np.int64]  # (cells, 2) ceil(Q) - 1, less than 2^63; and phi in units of 2^-28, rounded
    parts: npt.NDArray[np.float64]  # (cells, 9) what that left of Q and of phi, phi, then Q^(n) / n! for n = 2 to 7
    error: float


@functools.cache
def tail_table() -> TailTable:
    whole, parts = [], []
    for cell in range(round(TAIL_END * _CELLS) + 1):
        low, high, unit = upper_tail(cell, _CELLS, 25) if cell else (1, 1, 2)
        with localcontext(Context(prec=45)):
            tail = Decimal(low + high) / (2 * unit) * 2**64
            density = (-((Decimal(cell) / _CELLS) ** 2) / 2).exp() / _root_of_two_pi(45)
            slope = round(density * 2**28)
            hermite = [1, cell]  # times _CELLS^n
            for n in range(1, 6):
                hermite.append(cell * hermite[n] - n * _CELLS**2 * hermite[n - 1])
            scaled = [(-1) ** n * hermite[n - 1] / Decimal(_CELLS ** (n - 1) * math.factorial(n)) for n in range(2, 8)]
            left = tail - math.ceil(tail) + 1, density * 2**64 - slope * 2**36, density * 2**64
            parts.append([float(value) for value in (*left, *(density * 2**64 * factor for factor in scaled))])
        whole.append((math.ceil(tail) - 1, slope))
    return TailTable(np.array(whole, np.int64), np.array(parts), TAIL_ERROR)


@_njit
def tail_difference(table, high, low, word):
    """2^64 Q(x) less the tail of the word, for x = high + low, 0 <= high < TAIL_END, |low| <= 2^-48.

    Q at the nearest cell less phi h, in integers up to 2^-34 for h and 2^-28 for phi; all else is below 2^46 units and
    needs no more than float64 gives. The error, in units of 2^-64: 6 roundings of the quadratic term (2^45) make 0.05,
    the two last additions 0.02, and the eighth derivative, below 31 by Cramer's inequality, 31 / 8! 2^-64 or 0.001.
    """
    cell = np.int64(np.rint(high * _CELLS))
    whole, parts = table.whole, table.parts
    h = high - cell / _CELLS  # exact, as is what is left below
    steps = np.rint(h * 2.0**34)
    linear = parts[cell, 2] * ((h - steps * 2.0**-34) + low) + parts[cell, 1] * (steps * 2.0**-34)
    h += low
    curved = parts[cell, 8]
    for n in (7, 6, 5, 4, 3):
        curved = curved * h + parts[cell, n]
    difference = whole[cell, 0] - np.int64(word & MAGNITUDE) - 4 * whole[cell, 1] * np.int64(steps)
    return np.float64(difference) + (h * h * curved - linear + parts[cell, 0])


@_njit
def reaches(word, number, deviation, inverse, first, sum_and_error, table):
    """1 or -1: whether deviation Z is at least the boundary first (number - 1/2) + sum over earlier rows; 0: unknown.

    The boundary over the deviation is computed as high + low, off by at most `error`: sums and products are kept with
    what they were rounded by (Dekker 1971); only `small`, the sum of these, and the inexact part are rounded.
    """
    exact, inexact, of_sum = sum_and_error
    product, lost = _two_product(first, number - 0.5)
    boundary, more = _two_sum(product, exact)
    boundary, small = _two_sum(boundary, (lost + more) + inexact)
    high = boundary * inverse
    product, lost = _two_product(high, deviation)
    low = (((boundary - product) - lost) + small) * inverse
    error = (of_sum + 2.0**-50 * (1 + abs(inexact) + 2.0**-50 * (abs(boundary) + abs(exact)))) * inverse
    slack = table.error + 2.0**63 * error  # Q' is above -1/2
    if not (error < abs(high) < TAIL_END and slack < 2.0**20):
        return 0
    sign = 1 if word >= SIGN else -1
    if sign * high < 0:
        return sign
    difference = tail_difference(table, sign * high, sign * low, word)
    # Q(x) >= p means |Z| >= x, where p is at most one unit above the word's tail. A branch could not be predicted.
    return sign * (np.int64(difference >= 1 + slack) - np.int64(difference < -slack))


@_njit
def _two_sum(a, b):
    """(a + b rounded, what that lost), exactly."""
    total = a + b
    other = total - a
    return total, (a - (total - other)) + (b - other)


@_njit
def _two_product(a, b):
    """(a b rounded, what that lost), exactly."""
    product = a * b
    high_a, high_b = 134217729.0 * a, 134217729.0 * b  # 2^27 + 1
    high_a, high_b = high_a - (high_a - a), high_b - (high_b - b)
    low_a, low_b = a - high_a, b - high_b
    return product, ((high_a * high_b - product) + high_a * low_b + low_a * high_b) + low_a * low_b


# ---- exact comparisons -----------------------------------------------------------------------------------------------


class Digits:
    """The digits of one normal: `word(0)` is its first word, `word(j)` the j-th further one.

    Guarantees:
      - What `exceeds` answers depends on the words alone, not on the precision it took.
        (test_exceeds_is_that_of_mpmath)
    """

    def __init__(self, word: Callable[[int], int]):
        self._word = word
        first = word(0)
        self.positive = first >= 2**63
        self._tail, self._length = first % 2**63, 64  # p is in [tail, tail + 1] / 2^length

    def read_more(self) -> None:
        """Reads 64 further digits of p."""
        self._tail = self._tail << 64 | self._word(self._length // 64)
        self._length += 64

    def estimate(self) -> float:
        """Z to a few digits, at least: where to begin a search."""
        while self._tail.bit_length() < 53:
            self.read_more()
        size = -NormalDist().inv_cdf(max(self._tail / 2**self._length, 1e-300))
        return size if self.positive else -size

    def exceeds(self, numerator: int, denominator: int) -> bool:
        """Returns whether Z >= numerator / denominator, exactly; denominator > 0."""
        if self.positive != (numerator > 0) or numerator == 0:
            return self.positive
        digits = 22
        while True:
            low, high, unit = upper_tail(abs(numerator), denominator, digits)
            below = (self._tail + 1) * unit <= low << self._length  # p <= Q(threshold), so |Z| >= |threshold|
            above = self._tail * unit >= high << self._length
            if below or above:
                return below == self.positive
            self.read_more()
            digits += 20


def upper_tail(numerator: int, denominator: int, digits: int) -> tuple[int, int, int]:
    """(low, high, unit) with low / unit <= Q(z) <= high / unit for z = numerator / denominator > 0, unit = 10^digits.

    Q(z) = 1/2 - exp(-z^2/2) / sqrt(2 pi) * (z + z^3/3 + z^5/(3·5) + ...): all terms of the series are positive, so that
    relative errors do not grow. `Decimal` rounds every operation, `exp` and `sqrt` included, correctly: each is off by
    at most u = 10^(-9 - digits) of its result. With N terms the product is off by less than (6 N + 2 z^2 + 22) u of
    itself, and it is below 1/2: by less than 10^-digits / 10 for z < 1000, beyond which no normal is in practice.

    >>> low, high, unit = upper_tail(2, 1, 30)
    >>> low / unit, high - low
    (0.02275013194817921, 2)
    """
    precision = digits + 10
    with localcontext(Context(prec=precision, rounding=ROUND_HALF_EVEN)):
        x = Decimal(numerator) / Decimal(denominator)
        square = x * x
        term = total = x
        count = 1
        while True:
            term = term * square / (2 * count + 1)
            total += term
            count += 1
            if 2 * square < 2 * count + 1 and term.adjusted() < total.adjusted() - precision:
                break  # the next terms are less than half of the one before: together less than the last
        value = (-square / 2).exp() / _root_of_two_pi(precision) * total
        middle = int((Decimal("0.5") - value).scaleb(digits).to_integral_value())
    return middle - 1, middle + 1, 10**digits


@functools.lru_cache(maxsize=64)
def _root_of_two_pi(precision: int) -> Decimal:
    """sqrt(2 pi), by Machin's formula in integers with ten digits to spare."""
    one = 10 ** (precision + 10)

    def arctangent(inverse: int) -> int:
        power, total, odd = one // inverse, 0, 1
        while power:
            total += power // odd if odd % 4 == 1 else -(power // odd)
            power //= inverse * inverse
            odd += 2
        return total

    two_pi = 2 * 4 * (4 * arctangent(5) - arctangent(239))
    with localcontext(Context(prec=precision + 5)):
        return (Decimal(two_pi) / Decimal(one)).sqrt()
