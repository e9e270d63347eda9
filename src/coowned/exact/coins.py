"""Draws copies by coins of an exact probability, at the cost of those that are drawn.

Instead of one coin a copy, one 64-bit word says how many copies in a row are *not* drawn. The law is made of whole
numbers: thresholds T_0 = 2^64 > T_1 > ... > T_K with

    T_(g+1) = T_g - floor(T_g P / 2^64),     P = floor(p 2^64) - 2^6,

and a word w skips g copies if T_(g+1) <= w < T_g; it skips K copies and draws none if w < T_K. After g skipped copies
the next is therefore drawn with probability (T_g - T_(g+1)) / T_g <= P / 2^64 < p, exactly, by whole-number division:
no logarithm is taken, nothing is rounded up, and the same words give the same coins on every platform.

What a copy's coin is *given all other copies' coins*, before and after it, is what the accounting needs (it gives the
adversary the others' coins). The thresholds of two neighbouring starting points differ from an exact geometric law by
the floor alone: T_g = 2^64 (1 - P/2^64)^g (1 + d_g) with 0 <= d_g <= d = K 2^-61, since T_g >= 2^62 for g < K and
p <= 1/2, K <= 1/p + 1. Full blocks cancel, so the likelihood of what follows differs by a factor of at most (1 + d)^2
for the copies that are not drawn and 1 / (1 - 2^-62 / p) for the next that is: together at most 1 + 2^-59 / p. The
conditional probability is at most P/2^64 + 2^-59 < p, which is what the 2^6 is for, and at least p - 2^-57. Where
p > 1/2 (or p < 2^-40) every copy has a word of its own, K = 1, and coins are exactly independent. p = 1 draws all.
"""

import dataclasses
import functools
import math

import numpy as np
import numpy.typing as npt

from coowned import validate
from coowned.exact.compiled import compiled
from coowned.exact.keys import WORD_STREAM, WORDS, StreamKey, fill_words

MARGIN = 2**6  # in units of 2^-64: what p is lowered by
LONGEST_SKIP = 2**16  # copies one word can pass over

_njit = compiled()


@dataclasses.dataclass(frozen=True)
class PoissonCoins:
    """Independent coins, one a copy, of a probability that is never above the one given.

    Guarantees:
      - Given all other coins, a copy is drawn with a probability in [p - 2^-57, p].   (test_every_hazard_is_at_most_p,
        test_conditional_probability_is_at_most_p)
      - No word, all zeros and all ones included, draws what it should not.   (test_extreme_words)
      - The same key draws the same copies everywhere.   (test_coins_are_those_of_the_words)
    Cost: O(copies drawn + copies / 65536) for a draw, O(min(1 / p, 65536)) to set up.
    What it is not: a shuffle, or a draw of fixed size.

    Example:
      >>> from coowned.exact.keys import Purpose, RunKey
      >>> key = RunKey.from_seed(0).derive(Purpose.COINS, step=0)
      >>> PoissonCoins(0.05).draw(key, 100)
      array([36, 59, 73, 76])
    """

    probability: float

    def __post_init__(self) -> None:
        validate.in_range(0, 1, probability=self.probability)

    @functools.cached_property
    def thresholds(self) -> npt.NDArray[np.uint64]:
        """(K,) uint64: T_1 > ... > T_K; a word skips as many copies as thresholds are above it."""
        p = float(self.probability)
        numerator = int(p * 2.0**64) - MARGIN  # a product with a power of two is exact, and int() rounds down
        if numerator <= 0:
            return np.empty(0, np.uint64)
        length = 1 if p > 0.5 or p < 2.0**-40 else min(LONGEST_SKIP, math.ceil(1 / p))
        remaining, above = 2**64, []
        for _ in range(length):
            remaining -= (remaining * numerator) >> 64
            above.append(remaining)
        return np.array(above, np.uint64)

    @functools.cached_property
    def _ended(self) -> npt.NDArray[np.uint64]:
        """(K + 1,) the thresholds and 0, below which no word is: the search ends there."""
        return np.append(self.thresholds, np.uint64(0))

    @functools.cached_property
    def guide(self) -> tuple[npt.NDArray[np.int32], int]:
        """Where to begin looking among the thresholds: by the upper bits of a word, and how far to shift for them."""
        bits = min(14, len(self.thresholds).bit_length() + 4)  # most then begin where they end
        shift = 64 - bits
        # The last word of each bucket, that of the very last being 2^64 - 1 by wrapping around.
        last = ((np.arange(1 << bits, dtype=np.uint64) + np.uint64(1)) << np.uint64(shift)) - np.uint64(1)
        # Thresholds decrease: how many are above it.
        above = len(self.thresholds) - np.searchsorted(self.thresholds[::-1], last, side="right")
        return above.astype(np.int32), shift

    def draw(self, key: StreamKey, size: int) -> npt.NDArray[np.int64]:
        """Returns the drawn positions among `size` copies, increasing."""
        validate.integer(at_least=0, size=size)
        if self.probability == 1:
            return np.arange(size)
        if not len(self.thresholds) or not size:
            return np.empty(0, np.int64)
        guide, shift = self.guide
        expected = size * self.probability
        capacity = int(expected + 8 * math.sqrt(expected)) + 64 + WORDS
        while True:
            drawn = np.empty(capacity, np.int64)
            count = draw_positions(key, size, self._ended, guide, shift, drawn)
            if count >= 0:
                return drawn[:count]
            capacity *= 2  # nothing is dropped: the same coins into a longer array

    def skips(self, words: npt.ArrayLike) -> list[int]:
        """Returns how many copies each word skips; len(thresholds): none is drawn. For tests and audits."""
        guide, shift = self.guide
        return [int(skip_of_word(word, self._ended, guide, shift)) for word in np.asarray(words, np.uint64)]


@_njit
def skip_of_word(word, thresholds, guide, shift):
    """Returns how many copies a word skips: the thresholds above it, the last of which must be 0."""
    skip = np.uint64(guide[word >> np.uint64(shift)])  # unsigned: no index is looked at for its sign
    while word < thresholds[skip]:
        skip += np.uint64(1)
    return np.int64(skip)


@_njit
def draw_positions(key, size, thresholds, guide, shift, out):
    """Fills out with the drawn positions in [0, size), increasing; returns how many, or -1 if out may be too short.

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
