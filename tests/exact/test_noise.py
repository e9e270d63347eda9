"""Rows of integer noise: exact roundings of the ideal normals, that follow from the key."""

import math
import random
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats
from tests.exact.test_normals import exact_normal, to_fraction

from coowned.errors import InputError
from coowned.exact import noise as noise_module
from coowned.exact import normals
from coowned.exact.keys import WORDS, Purpose, RunKey, fill_words
from coowned.exact.noise import NoiseStream, Part, Rounding, exact_number
from coowned.exact.normals import TAIL_ERROR, Digits, tail_table, upper_tail
from coowned.mechanism.banded_strategy import BandedStrategy

KEY = RunKey.from_seed(0)
STRATEGY = BandedStrategy(num_bands=5, iterations=40)
SHAPES = {"weights": (7, 3), "intercept": ()}
DEVIATION = 1.3 * 2.0**24


def stream(**changes) -> NoiseStream:
    settings = {
        "deviations": [DEVIATION],
        "coefficients": STRATEGY.coefficients,
        "shapes": SHAPES,
        "iterations": 40,
    }
    return NoiseStream(KEY, **(settings | changes))


def ideal_normals(key: RunKey, count: int, step: int, tensor: str = "w", configuration: str = "") -> list[Fraction]:
    """Z to 60 digits, from 256 bits each, by mpmath."""
    own = key.derive(Purpose.NOISE, configuration=configuration, step=step, tensor=tensor)
    words = np.empty((4, count), np.uint64)
    for nonce in range(4):
        fill_words(own, np.uint64(nonce), 0, words[nonce])
    found = []
    for first, *others in words.T.tolist():
        tail = first % 2**63
        for more in others:
            tail = tail << 64 | more
        found.append(to_fraction(exact_normal(Fraction(tail, 2**256), first >= 2**63, 60)))
    return found


# ---- exactness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deviation", [0.3, 1000.0, DEVIATION, 1.7 * 2.0**37, 1.1 * 2.0**46])
@pytest.mark.parametrize("num_bands", [1, 4])
def test_rows_are_exact(deviation, num_bands):
    """Against the definition in fractions, with normals of mpmath's; at 2^46 nearly every number is refined."""
    coefficients = BandedStrategy(num_bands=num_bands, iterations=40).coefficients
    ours = stream(deviations=[deviation], coefficients=coefficients, shapes={"w": (6,)})
    c = [Fraction(value) for value in coefficients.tolist()]
    rows: list[list[int]] = []
    for step in range(5):
        row = []
        for index, z in enumerate(ideal_normals(KEY, 6, step)):
            fed_back = sum(c[lag] * rows[step - lag][index] for lag in range(1, min(num_bands, step + 1)))
            row.append(math.floor((Fraction(deviation) * z - fed_back) / c[0] + Fraction(1, 2)))
        rows.append(row)
        assert ours.next()["w"][0].tolist() == row


@pytest.mark.parametrize("word", [0, 2**63, 1, 2**63 + 1, 2**63 - 1, 2**64 - 1, 2**40, 2**63 + 2**28])
def test_rows_of_extreme_words_are_exact(monkeypatch, word):
    """Words of zeros have no bound in float64; the further words here are zeros too, then ones."""
    words = [word, 0, 0, *[2**64 - 1] * 20]
    monkeypatch.setattr(noise_module, "word_at", lambda key, nonce, chunk, at: words[int(nonce)])
    part = Part(np.zeros((1, 1, 8), np.uint32), 0, 1, np.zeros((1, 1, 1), np.int64), 0)
    tail = word % 2**63
    for more in words[1:]:
        tail = tail << 64 | more
    z = to_fraction(exact_normal(Fraction(tail, 2 ** (64 * len(words))), word >= 2**63, 60))
    expected = math.floor(Fraction(DEVIATION) * z + Fraction(1, 2))
    assert exact_number(part, 0, 0, 0, Rounding.of(np.array([DEVIATION]), np.ones(1))) == expected
    assert (expected > 0) == (word >= 2**63) or abs(expected) <= 1


@pytest.mark.parametrize("num_bands", [1, 5])
def test_a_worse_error_bound_changes_nothing(monkeypatch, num_bands):
    """Numbers decided in float64, by their words, or in exact arithmetic, all of a row or a few: the same integers."""
    coefficients = BandedStrategy(num_bands=num_bands, iterations=40).coefficients
    refined = []
    exact = noise_module.exact_number
    monkeypatch.setattr(noise_module, "exact_number", lambda *given: refined.append(1) or exact(*given))

    def rows(bound, of_words):
        monkeypatch.setattr(noise_module, "RELATIVE_ERROR", bound)
        monkeypatch.setattr(noise_module, "tail_table", lambda: tail_table()._replace(error=of_words))
        refined.clear()
        made = stream(coefficients=coefficients, shapes={"w": (400,)}, iterations=3)
        return [made.next()["w"][0].tolist() for _ in range(3)], len(refined)

    fast, none = rows(2.0**-46, math.inf)
    for bound, of_words, least, most in [
        (2.0**-29, TAIL_ERROR, 0, 0),  # dozens of the 1200 are doubtful
        (1.0, TAIL_ERROR, 0, 5),  # all are, among 2^24 candidates each
        (1.0, 2.0**18, 0, 400),
        (2.0**-29, math.inf, 6, 400),
        (1.0, math.inf, 1200, 1200),
    ]:
        found, count = rows(bound, of_words)
        assert found == fast
        assert least <= count <= most
    assert none < 5


@pytest.mark.parametrize("num_bands", [1, 64])
def test_large_noise_is_exact(monkeypatch, num_bands):
    """A noise multiplier of 200 on the finest grid, where one number in 23 is doubtful: as in exact arithmetic."""
    coefficients = BandedStrategy(num_bands=num_bands, iterations=100).coefficients
    settings = {"deviations": [200 * 2.0**33], "coefficients": coefficients, "shapes": {"w": (20,)}, "iterations": 100}
    fast = stream(**settings)
    monkeypatch.setattr(noise_module, "RELATIVE_ERROR", 2.0**-36)  # all are doubtful
    by_words = stream(**settings)
    monkeypatch.setattr(noise_module, "tail_table", lambda: tail_table()._replace(error=math.inf))
    exact = stream(**settings)
    for _ in range(70):
        row = exact.next()["w"]
        assert np.array_equal(fast.next()["w"], row)
        assert np.array_equal(by_words.next()["w"], row)


@pytest.mark.parametrize("coefficients", [(1.0, -1.0), (0.5, -0.75, -0.75)])
def test_noise_that_grows_is_exact(coefficients):
    """Numbers larger than was foreseen make the error bound of the sum over earlier rows anew."""
    own = stream(deviations=[1e9], coefficients=coefficients, shapes={"w": (3,)}, iterations=20)
    foreseen = own._rounding.largest
    c = [Fraction(value) for value in coefficients]
    rows: list[list[int]] = []
    for step in range(20):
        found = own.next()["w"][0].tolist()
        for index, z in enumerate(ideal_normals(KEY, 3, step)):
            fed_back = sum(c[lag] * rows[step - lag][index] for lag in range(1, min(len(c), step + 1)))
            assert found[index] == math.floor((10**9 * z - fed_back) / c[0] + Fraction(1, 2))
        rows.append(found)
    assert abs(np.array(rows)).max() > foreseen
    assert own._rounding.largest > foreseen


def test_noise_that_outgrows_64_bits_is_refused():
    """The inverse of this strategy grows by 2.19 a step, to 10^13 after 40; of (1, -1) by its root alone."""
    with pytest.raises(InputError, match=r"coefficients \[ 0.5  -0.75 -0.75\] outgrows 64 bits within 40 steps"):
        stream(coefficients=(0.5, -0.75, -0.75))
    with pytest.raises(InputError, match="outgrows 64 bits within 9000 steps"):
        stream(coefficients=(0.5, -0.75, -0.75), iterations=9000)
    assert stream(coefficients=(1.0, -1.0), deviations=[1.1 * 2.0**46], iterations=10_000).next()


@pytest.mark.parametrize("deviation", [2.0**20, 1.7 * 2.0**41, 1.1 * 2.0**46])
@pytest.mark.parametrize("first", [1.0, 0.37])
def test_words_decide_rightly_or_not_at_all(deviation, first):
    """Words at, and next to, the tail probability of a boundary; the answer is that of exact arithmetic, or none."""
    generator = random.Random(0)
    answers = []
    for z in [
        *(generator.uniform(0, 4.6) for _ in range(60)),
        0.0,
        1 / 256,
        4.5 - 2**-30,
        *(2.0**-k for k in range(60)),
    ]:
        size = 2.0**44 * generator.uniform(-1, 1)
        exact, inexact = float(round(size)), generator.uniform(-1, 1) * 2.0**20
        sign = generator.choice([-1, 1])
        number = round((sign * z * deviation - exact - inexact) / first + 0.5)
        boundary = Fraction(first) * (number - Fraction(1, 2)) + Fraction(exact) + Fraction(inexact)
        threshold = boundary / Fraction(deviation)
        if not threshold or abs(threshold) > 5:
            continue
        low, _, unit = upper_tail(abs(threshold).numerator, threshold.denominator, 40)
        for away in (-(2**30), -3, -2, -1, 0, 1, 2, 3, 2**30):
            tail = min(max(low * 2**64 // unit + away, 0), 2**63 - 1)
            for word in (tail, tail + 2**63):
                digits = Digits([word, 2**63, *[0] * 9].__getitem__)
                right = 1 if digits.exceeds(threshold.numerator, threshold.denominator) else -1
                given = np.uint64(word), number, deviation, 1 / deviation, first, (exact, inexact, 0.0)
                found = normals.reaches(*given, tail_table())
                assert found in (0, right)
                answers.append((abs(away) < 2, abs(threshold) < 6 and deviation > 2**40, found != 0))
    assert all(known for near, inside, known in answers if inside and not near)
    assert not all(known for near, inside, known in answers if near)


class Rational:
    """Stands for the digits of a normal that is a given rational number."""

    z = Fraction(0)

    def __init__(self, word):
        pass

    def estimate(self):
        return float(self.z)

    def exceeds(self, numerator, denominator):
        return self.z >= Fraction(numerator, denominator)


def half_to_even(part, step, model, column, rounding):
    """The planted rounding rule."""
    return round(Fraction(rounding.deviations[0]) * Rational.z - int(part.ring[0, 0, 0]))


@pytest.mark.parametrize(("rule", "equivariant"), [(exact_number, True), (half_to_even, False)])
def test_ties_are_rounded_alike_wherever_they_are(monkeypatch, rule, equivariant):
    """Rounding must commute with adding an integer: an exact tie to even does not."""
    monkeypatch.setattr(noise_module, "Digits", Rational)
    monkeypatch.setattr(Rational, "z", Fraction(5, 2))
    found = []
    for moved in range(4):
        part = Part(np.zeros((1, 1, 8), np.uint32), 0, 1, np.full((1, 1, 1), moved), 0)
        found.append(rule(part, 0, 0, 0, Rounding.of(np.ones(1), np.ones(2))) + moved)
    assert (len(set(found)) == 1) == equivariant


def test_values_at_a_boundary_are_refined():
    normals = np.array([0.5, -0.5, 1.0, np.nan, 0.3])
    values = normals * 1.0 + 0.5
    out, doubtful = np.empty(5, np.int64), np.empty(5, np.int64)
    count = noise_module.round_exactly(normals, values, (2.0**-46, 2.0**-60), out, doubtful)
    assert doubtful[:count].tolist() == [0, 1, 3]
    assert out[[2, 4]].tolist() == [1, 0]


# ---- laws ------------------------------------------------------------------------------------------------------------


def test_distribution():
    """Kolmogorov-Smirnov on 200,000 rounded normals; false alarm 1e-6."""
    row = stream(coefficients=(1.0,), shapes={"w": (200_000,)}).next()["w"][0] / DEVIATION
    assert stats.kstest(row, "norm").pvalue > 1e-6
    assert abs(row).max() > 4


def test_small_noise_has_the_law_of_a_rounded_normal():
    """Chi-square on the integers themselves; false alarm 1e-6."""
    deviation, size = 0.8, 100_000
    row = stream(deviations=[deviation], coefficients=(1.0,), shapes={"w": (size,)}).next()["w"][0]
    values = np.arange(-2, 3)
    law = stats.norm.cdf((values + 0.5) / deviation) - stats.norm.cdf((values - 0.5) / deviation)
    observed = [(row == value).sum() for value in values]
    observed, law = [*observed, size - sum(observed)], [*law, 1 - law.sum()]
    assert stats.chisquare(observed, np.array(law) * size).pvalue > 1e-6


def test_strategy_undoes_the_noise():
    size = 50
    own = stream(shapes={"w": (size,)})
    rows = np.array([own.next()["w"][0] for _ in range(40)], np.float64)
    unit = (
        np.array(
            [
                stream(deviations=[2.0**40], coefficients=(1.0,), shapes={"w": (size,)}, start=step).next()["w"][0]
                for step in range(40)
            ]
        )
        / 2.0**40
    )
    np.testing.assert_allclose(STRATEGY.matrix() @ rows, DEVIATION * unit, atol=0.51 * STRATEGY.coefficients[0])


def test_covariance_is_that_of_the_matrix():
    """Sample covariance of 20,000 columns; each entry within 6 standard errors."""
    size, steps = 20_000, 8
    own = stream(shapes={"w": (size,)})
    rows = np.array([own.next()["w"][0] for _ in range(steps)]) / DEVIATION
    inverse = np.linalg.inv(STRATEGY.matrix()[:steps, :steps])
    expected = inverse @ inverse.T
    deviation = np.sqrt((expected**2 + np.outer(np.diag(expected), np.diag(expected))) / size)
    assert (abs(rows @ rows.T / size - expected) < 6 * deviation).all()


# ---- keys, resuming, threads -----------------------------------------------------------------------------------------


def test_rows_follow_from_the_key():
    first, second = stream().next(), stream().next()
    assert all(np.array_equal(first[name], second[name]) for name in SHAPES)
    other = NoiseStream(RunKey.from_seed(1), deviations=[DEVIATION], coefficients=(1.0,), shapes=SHAPES, iterations=1)
    assert not np.array_equal(other.next()["weights"], first["weights"])
    assert not np.array_equal(first["weights"].ravel()[:1], first["intercept"].ravel())


def test_one_band_is_independent_noise():
    one = BandedStrategy(num_bands=1, iterations=40).coefficients
    a, b = stream(coefficients=one), stream(coefficients=(1.0,), start=0)
    for _ in range(3):
        assert np.array_equal(a.next()["weights"], b.next()["weights"])


@pytest.mark.parametrize("start", [0, 1, 3, 17])
def test_resume_is_bit_identical(start):
    whole = stream()
    for _ in range(start):
        whole.next()
    replayed = stream(start=start)
    for _ in range(10):
        again, expected = replayed.next(), whole.next()
        assert all(np.array_equal(again[name], expected[name]) for name in SHAPES)


def test_a_stream_never_goes_back():
    own = stream(iterations=2)
    own.next()
    own.next()
    with pytest.raises(InputError, match="were used"):
        own.next()
    assert not hasattr(own, "seek")


def test_configurations_are_uncorrelated():
    """Correlation of 50,000 pairs; false alarm below 1e-6."""
    names = ["a", "b"]
    rows = stream(deviations=[DEVIATION] * 2, shapes={"w": (50_000,)}, configurations=names).next()["w"]
    assert abs(np.corrcoef(rows)[0, 1]) < 5 / math.sqrt(50_000)


@pytest.mark.parametrize("size", [1, 5, WORDS - 1, WORDS, 3 * WORDS + 7])
def test_rows_of_many_are_those_of_each(size):
    names, deviations = ["a", "b", "c", ""], [1.0, DEVIATION, 2.0**33, 0.0]
    together = stream(deviations=deviations, shapes={"w": (size,)}, configurations=names)
    alone = [
        stream(deviations=[deviation], shapes={"w": (size,)}, configurations=[name])
        for name, deviation in zip(names, deviations, strict=True)
    ]
    for _ in range(7):
        assert np.array_equal(together.next()["w"], [one.next()["w"][0] for one in alone])


def test_parts_of_a_row_are_those_of_a_short_one():
    long, short = (stream(shapes={"w": (size,)}) for size in (3 * 128 * WORDS + 777, WORDS + 5))
    for _ in range(3):
        assert np.array_equal(long.next()["w"][0, : WORDS + 5], short.next()["w"][0])


def test_memory_does_not_grow_with_iterations():
    own = stream(iterations=10**6)
    assert sum(ring.nbytes for ring in own._rings.values()) == (STRATEGY.num_bands - 1 + 8) * 22 * 8


@pytest.mark.parametrize("changes", [
    {"coefficients": ()},
    {"coefficients": (0.0, 1.0)},
    {"coefficients": (1.0, math.inf)},
    {"deviations": [-1.0]},
    {"deviations": [math.nan]},
    {"deviations": [2.0**49]},
    {"configurations": ["a", "a"], "deviations": [1.0, 1.0]},
])  # fmt: skip
def test_other_settings_are_refused(changes):
    with pytest.raises(InputError):
        stream(**changes)
