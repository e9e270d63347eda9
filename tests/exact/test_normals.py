"""Normals as exact real numbers: the certified approximation, and comparisons to any number of digits."""

import random
from fractions import Fraction
from statistics import NormalDist

import mpmath
import numpy as np
import pytest
from mpmath import iv
from tests.exact import normal_certificate as certificate

from coowned.exact import normals
from coowned.exact.normals import Digits, approximate, approximate_with, upper_tail

BOUND = normals.RELATIVE_ERROR
SIGN = 2**63
EXTREME = [0, 1, 2**46, 2**47 - 1, 2**47, 2**47 + 1, 2**62, 2**63 - 1, *(2**k + 5 for k in range(2, 63, 6))]
EDGE = 2**63 - 1 - int(normals.CENTRAL)  # the last tail word of the central formula
EXTREME += [EDGE - 1, EDGE, EDGE + 1]


def exact_normal(tail: Fraction, positive: bool, digits: int = 80) -> mpmath.mpf:
    """Z by mpmath, which shares no code with ours: Newton's method on its complementary error function."""
    z, precision = mpmath.mpf(-NormalDist().inv_cdf(max(1e-300, tail.numerator / tail.denominator))), 15
    while precision < 2 * digits:  # every step doubles the right digits
        precision *= 2
        with mpmath.workdps(precision + 20):
            p = mpmath.mpf(tail.numerator) / tail.denominator
            tail_at = mpmath.erfc(z / mpmath.sqrt(2)) / 2
            z += (mpmath.log(tail_at) - mpmath.log(p)) * tail_at / mpmath.npdf(z)
    with mpmath.workdps(precision + 20):
        return z if positive else -z


def to_fraction(x: mpmath.mpf) -> Fraction:
    numerator, denominator = mpmath.libmp.to_rational(x._mpf_)
    return Fraction(int(numerator), int(denominator))


def random_words(count: int) -> list[int]:
    generator = random.Random(0)
    return [generator.getrandbits(64) for _ in range(count)]


# ---- the approximation -----------------------------------------------------------------------------------------------


def test_approximation_is_certified_on_some_cells():
    iv.prec = 240
    of_log = 2.0**-52  # `log_error()` is 2^-52.2; the whole proof is below
    for low, high in [(0.001, 0.002), (0.2, 0.201), (0.424, 0.4251)]:
        error, z = certificate.central_error(low, high)
        assert error < BOUND * z
    for low, high in [(1.6093, 1.615), (3.0, 3.01), (4.99, 5.0001)]:
        error, z = certificate.tail_error(low, high, of_log)
        assert error < BOUND * z


@pytest.mark.full
def test_approximation_is_certified():
    found = certificate.certify()
    assert found["log"] < 2.0**-52
    assert max(found["central"], found["tail"]) < BOUND


def test_a_wrong_formula_is_not_certified(monkeypatch):
    def slightly_off(q):
        return right(q) * (1 + 2.0**-45)

    right = normals.central_normal.py_func
    monkeypatch.setattr(normals.central_normal, "py_func", slightly_off)
    iv.prec = 240
    error, z = certificate.central_error(0.2, 0.201)
    assert error > BOUND * z


def test_approximation_against_mpmath():
    words = np.array([*random_words(150), *EXTREME, *(word + SIGN for word in EXTREME)], np.uint64)
    found = np.empty(len(words))
    scarce = approximate(words, found)
    assert scarce == np.isnan(found).sum() == 2 * sum(word < 2**47 for word in EXTREME) < len(words) / 2
    for word, z in zip(words.tolist(), found.tolist(), strict=True):
        if np.isnan(z):
            more = 123456789 << 30
            z = float(approximate_with(np.uint64(word), np.uint64(more)))
            low, high = ((Fraction((word % SIGN << 64) + more + end, 2**128)) for end in (0, 1))
        else:
            low, high = (Fraction(word % SIGN + end, 2**64) for end in (0, 1))
        if np.isnan(z):
            assert high < Fraction(2, 10**11)  # beyond the formula
            continue
        for tail in {low, high} - {Fraction(0), Fraction(1, 2)}:
            error = abs(mpmath.mpf(z) - exact_normal(tail, word >= SIGN, 40))
            assert error <= BOUND * abs(z) + normals.ABSOLUTE_ERROR


# ---- comparisons with the first word ---------------------------------------------------------------------------------


def test_tail_difference_is_as_close_as_it_says():
    """Against correctly rounded decimals: random points, cells' middles and edges, the smallest and largest."""
    generator, largest = random.Random(0), 0.0
    points = [generator.uniform(0, normals.TAIL_END) for _ in range(300)]
    points += [(cell + half) / 128 for cell in range(0, 768, 29) for half in (0, 0.5, 0.5 - 2**-40, 0.5 + 2**-40)]
    for high in [*points, 0.0, 2.0**-60, 1e-9, normals.TAIL_END - 2**-50]:
        low = generator.uniform(-1, 1) * 2.0**-52 * high
        x = Fraction(high) + Fraction(low)
        middle, _, unit = upper_tail(x.numerator, x.denominator, 40) if x else (1, 1, 2)
        word = min(max(middle * 2**64 // unit + generator.randrange(-(2**40), 2**40), 0), 2**63 - 1)
        found = normals.tail_difference(normals.tail_table(), high, low, np.uint64(word + generator.choice([0, SIGN])))
        largest = max(largest, abs(Fraction(found) - (Fraction(middle, unit) * 2**64 - word)))
    assert largest < normals.TAIL_ERROR / 2


# ---- exact comparisons -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("z", [Fraction(1, 10**9), Fraction(1, 3), Fraction(2), Fraction(13, 2), Fraction(14)])
@pytest.mark.parametrize("digits", [22, 42, 202])
def test_upper_tail_holds_the_tail(z, digits):
    low, high, unit = upper_tail(z.numerator, z.denominator, digits)
    with mpmath.workdps(digits + 100):
        exact = mpmath.erfc(mpmath.mpf(z.numerator) / z.denominator / mpmath.sqrt(2)) / 2 * unit
        assert low <= exact <= high
    assert high - low == 2


class Reader:
    """Words of one normal, and how many were read."""

    def __init__(self, *words):
        self.words, self.read = words, 0

    def __call__(self, number):
        self.read = max(self.read, number + 1)
        return self.words[number] if number < len(self.words) else 2**64 // 3

    def tail(self) -> Fraction:
        bits = self.words[0] % SIGN
        for number in range(1, 12):
            bits = bits << 64 | self(number)
        return Fraction(bits, 2 ** (64 * 12))


@pytest.mark.parametrize(
    "words", [(w, v) for w in (*random_words(6), *EXTREME[:8], SIGN, SIGN + 77) for v in (0, 5**27)]
)
def test_exceeds_is_that_of_mpmath(words):
    reader = Reader(*words)
    z = to_fraction(exact_normal(reader.tail(), words[0] >= SIGN, 120))
    for exponent in (1, 10, 17, 25, 40, 70):
        for sign in (-1, 1):
            threshold = z + sign * Fraction(1, 10**exponent)
            digits = Digits(Reader(*words))
            assert digits.exceeds(threshold.numerator, threshold.denominator) == (sign < 0)


def test_close_thresholds_read_more():
    reader = Reader(SIGN + 2**61)
    z = to_fraction(exact_normal(Reader(SIGN + 2**61).tail(), True, 120))
    near, far = z + Fraction(1, 10**50), z + Fraction(1, 100)
    assert not Digits(reader).exceeds(far.numerator, far.denominator)
    assert reader.read == 1
    assert not Digits(reader).exceeds(near.numerator, near.denominator)
    assert reader.read >= 3
    assert Digits(reader).exceeds(0, 1)
    assert not Digits(Reader(2**61)).exceeds(0, 1)
