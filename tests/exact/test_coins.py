"""The law of the coins, in integers: never above p, given whatever the other coins show."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coowned.errors import InputError
from coowned.exact.coins import LONGEST_SKIP, PoissonCoins, draw_positions
from coowned.exact.keys import WORDS, Purpose, RunKey, random_words

SLACK = Fraction(1, 2**57)
KEY = RunKey.from_seed(0).derive(Purpose.COINS, step=0)


def hazards(coins: PoissonCoins) -> list[Fraction]:
    """The probability that the next copy is drawn after g were not, exactly."""
    steps = [2**64, *map(int, coins.thresholds)]
    return [Fraction(a - b, a) for a, b in itertools.pairwise(steps)]


@settings(max_examples=60)
@given(st.floats(2.0**-12, 1.0) | st.sampled_from([0.5, 1 - 2.0**-53, 1 / 3]))
@example(1e-5)
@example(1e-9)
@example(2.0**-40)
@example(2.0**-45)
@example(2.0**-63)
@example(5e-324)
def test_every_hazard_is_at_most_p(p):
    found = hazards(PoissonCoins(p))
    assert all(hazard <= Fraction(p) for hazard in found)
    assert all(hazard >= Fraction(p) - SLACK for hazard in found)


def joint_law(coins: PoissonCoins, size: int) -> dict[tuple[int, ...], Fraction]:
    """The probability of every outcome of `size` coins, exactly."""
    hazard = hazards(coins)
    law = {}
    for outcome in itertools.product((0, 1), repeat=size):
        probability, passed = Fraction(1), 0
        for coin in outcome:
            probability *= hazard[passed] if coin else 1 - hazard[passed]
            passed = 0 if coin else (passed + 1) % len(hazard)
        law[outcome] = probability
    return law


@pytest.mark.parametrize("p", [0.3, 0.5, 0.25, 0.123456789, 1 / 3, 0.01, 0.75])
def test_conditional_probability_is_at_most_p(p):
    size = 7
    law = joint_law(PoissonCoins(p), size)
    assert sum(law.values()) == 1
    for i in range(size):
        for others in itertools.product((0, 1), repeat=size - 1):
            drawn, left = (law[(*others[:i], coin, *others[i:])] for coin in (1, 0))
            conditional = drawn / (drawn + left)
            assert Fraction(p) - SLACK <= conditional <= Fraction(p)


def test_without_the_margin_it_would_not_be(monkeypatch):
    """The margin is needed: coins whose first hazard is rounded down but not lowered exceed p given the others."""
    monkeypatch.setattr("coowned.exact.coins.MARGIN", 0)
    p, size = 0.123456789, 7
    law = joint_law(PoissonCoins(p), size)
    worst = max(
        law[(*others[:i], 1, *others[i:])] / (law[(*others[:i], 1, *others[i:])] + law[(*others[:i], 0, *others[i:])])
        for i in range(size)
        for others in itertools.product((0, 1), repeat=size - 1)
    )
    assert worst > Fraction(p)


@settings(max_examples=50)
@given(st.floats(1e-3, 1.0), st.lists(st.integers(0, 2**64 - 1), max_size=20))
def test_skips_count_thresholds(p, words):
    coins = PoissonCoins(p)
    table = [int(t) for t in coins.thresholds]
    near = [t + d for t in table[:: max(1, len(table) // 8)] for d in (-1, 0, 1) if 0 <= t + d < 2**64]
    for word, skip in zip(words + near, coins.skips(words + near), strict=True):
        assert skip == sum(word < threshold for threshold in table)


@pytest.mark.parametrize("p", [1e-9, 1e-6, 1e-3, 0.05, 0.5, 0.9, 1 - 2.0**-53])
def test_extreme_words(p):
    coins = PoissonCoins(p)
    zeros, ones = coins.skips([0, 2**64 - 1])
    assert zeros == len(coins.thresholds) <= LONGEST_SKIP  # nothing of the block is drawn
    assert ones == 0  # the next copy is drawn
    assert all(np.diff(coins.thresholds.astype(object)) < 0)


def plain_draw(coins: PoissonCoins, size: int) -> list[int]:
    words = iter(random_words(KEY, 4 * size + 64).tolist())
    table = [int(t) for t in coins.thresholds]
    position, drawn = 0, []
    while position < size:
        word = next(words)
        skip = sum(word < threshold for threshold in table)
        position += skip
        if skip < len(table) and position < size:
            drawn.append(position)
            position += 1
    return drawn


@pytest.mark.parametrize("p", [0.001, 0.02, 0.3, 0.5, 0.6, 0.99])
def test_coins_are_those_of_the_words(p):
    coins = PoissonCoins(p)
    assert coins.draw(KEY, 2000).tolist() == plain_draw(coins, 2000)


def test_more_copies_keep_the_coins_of_the_first():
    coins = PoissonCoins(0.01)
    long = coins.draw(KEY, 100_000)
    assert np.array_equal(coins.draw(KEY, 30_000), long[long < 30_000])


def test_certain_and_impossible():
    assert PoissonCoins(1.0).draw(KEY, 5).tolist() == [0, 1, 2, 3, 4]
    assert PoissonCoins(0.0).draw(KEY, 10**6).size == 0
    assert PoissonCoins(2.0**-63).draw(KEY, 10**6).size == 0  # below the resolution: less, never more
    assert PoissonCoins(0.5).draw(KEY, 0).size == 0
    with pytest.raises(InputError):
        PoissonCoins(1.5)


def test_a_short_array_loses_nothing():
    coins = PoissonCoins(0.1)
    guide, shift = coins.guide
    expected = coins.draw(KEY, 1000)
    ended = np.append(coins.thresholds, np.uint64(0))
    for room in range(WORDS):
        assert draw_positions(KEY, 1000, ended, guide, shift, np.empty(room, np.int64)) == -1
    enough = np.empty(len(expected) + WORDS, np.int64)
    assert draw_positions(KEY, 1000, ended, guide, shift, enough) == len(expected)
    assert np.array_equal(enough[: len(expected)], expected)


def test_a_draw_of_more_than_there_is_room_for_is_made_again(monkeypatch):
    coins, rooms = PoissonCoins(0.1), []

    def with_less_room(key, size, thresholds, guide, shift, out):
        rooms.append(len(out))
        return -1 if len(rooms) < 3 else draw_positions(key, size, thresholds, guide, shift, out)

    expected = coins.draw(KEY, 10_000)
    monkeypatch.setattr("coowned.exact.coins.draw_positions", with_less_room)
    assert np.array_equal(coins.draw(KEY, 10_000), expected)
    assert rooms[1:] == [2 * room for room in rooms[:-1]]


@pytest.mark.parametrize("p", [1e-6, 1e-3, 0.2, 0.7])
def test_frequency(p):
    # Number drawn of n is binomial; normal approximation with np >= 100: |z| > 6 has probability 2e-9.
    size = max(10**6, int(100 / p))
    count = len(PoissonCoins(p).draw(KEY, size))
    assert abs(count - size * p) < 6 * np.sqrt(size * p * (1 - p))
