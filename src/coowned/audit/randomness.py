"""Tests of the randomness of a run: every copy has an independent coin, and keys and normals are what they should be.

The whole-curve audit sees too much participation of one user. It hardly sees sampling that is not Poisson at all but
has the right rates, such as shuffling (each copy once an epoch) or batches cut to a size; here they show at once:
counts are exactly binomial, or the sampler is not what was accounted for.

No number of trials reaches the tail of the noise, and none sees that two keys are alike: random bits are looked at
directly, at their sources.
"""

import itertools
import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri_exp
from scipy.stats import binom

from coowned import validate
from coowned.audit.checks import Check, CheckedLaw, any_of, binomial_check, certain_check, share_check
from coowned.errors import InputError
from coowned.exact import normals
from coowned.exact.coins import PoissonCoins
from coowned.exact.keys import RunKey
from coowned.mechanism.batching import Batches
from coowned.selection.selector import Selection

_BATCH_QUANTILES = (0.02, 0.25, 0.75, 0.98)
_MOST_COPIES = 50_000  # whose participations are kept: the first and the last ones
_KEPT = 50_000_000  # participations in all, of random allocation
_ROUNDS = 1000  # in which copies can be drawn


def audit_participation(
    samplers: Iterable[Batches],
    selection: Selection,
    *,
    probability: float,
    alpha: float = 1e-3,
    num_groups: int = 1,
    group: int = 0,
    rounds: int = _ROUNDS,
) -> CheckedLaw:
    """Draws batches and compares what took part in them with independent coins of the given probability.

    Counted are all participations; coincidences of neighbouring copies in a step, of a copy in steps 1, 2 and about
    1/p apart, and of three copies in a row; copies that took part more or less often than most; batches larger or
    smaller than most. Each count is binomial, exactly, where coins are independent.

    Guarantees:
      - The probability of an alarm is at most alpha where coins are independent and of this probability.
        (test_honest_samplers_pass)
      - Shuffling, batches cut to a size, joint coins of neighbours, a copy drawn out of turn, and a probability that is
        too large are caught.   (test_wrong_samplers_are_caught)
      - Memory stays below 200 MB, however many copies there are.   (test_many_copies_need_little_memory)
    Cost: per step, one call of the sampler and O(copies).
    What it is not: a test of what happens less often than about once in rounds times copies; the coins' words are
    tested exactly (`audit_coin_words`).

    Args:
      samplers: of one plan with several keys; as many are used as are needed.
      selection: what they draw from.
      probability: of each copy, in each step in which it can be drawn.
      alpha: probability of a false alarm.
      num_groups, group: for cyclic sampling: copies of this group are looked at, in its steps.
      rounds: maximum number of its steps to look at.

    Example:
      >>> from coowned.attribution.graph import AttributionGraph
      >>> from coowned.mechanism.batching import PoissonBatches
      >>> from coowned.exact.keys import RunKey
      >>> graph = AttributionGraph.from_users_per_example([[user] for user in range(200)])
      >>> selection = Selection.from_copies(graph, np.ones(200, int))
      >>> batches = PoissonBatches(selection=selection, sampling_probability=0.1, batch_size=20, iterations=500,
      ...                          run_key=RunKey.from_seed(3))
      >>> audit_participation([batches], selection, probability=0.1).holds
      True
    """
    validate.in_range(0, 1, open_low=True, open_high=True, probability=probability)
    drawn, sizes, outsiders, copies = _draw(samplers, selection, num_groups, group, rounds)
    if min(drawn.shape) < 8:
        raise InputError(f"{len(drawn)} steps with {copies} copies are too few to count; give at least 8 of both")
    p = float(probability)
    checks = [
        certain_check("copies drawn out of turn", outsiders == 0, observed=outsiders),
        binomial_check("participations", int(sizes.sum()), len(sizes) * copies, p),
        *_coincidences(drawn, p),
        *_extremes("copies", drawn.sum(axis=0), len(drawn), p),
        *_extremes("batches", sizes, copies, p),
    ]
    return CheckedLaw("participation", checks, alpha)


def audit_allocation(
    samplers: Iterable[Batches],
    selection: Selection,
    *,
    rounds_per_epoch: int,
    alpha: float = 1e-3,
    num_groups: int = 1,
    group: int = 0,
    rounds: int = _ROUNDS,
) -> CheckedLaw:
    """Draws batches of random allocation and tests that each copy's round in an epoch is uniform and independent.

    That a copy is in exactly one round is certain, and is checked for every copy that is kept. The test counts copies
    in the first and in the last round, neighbouring and distant copies in one round, copies in the same round as in
    the previous epoch, and sizes of first rounds. All of these are exactly binomial if rounds are uniform and
    independent.

    Guarantees:
      - The probability of an alarm is at most alpha where they are.   (test_honest_allocation_passes)
      - Two rounds in an epoch, none, rounds repeated in the next epoch, rounds that copies share, and rounds that are
        not uniform are caught.   (test_wrong_allocations_are_caught)

    Args:
      samplers, selection, alpha, num_groups, group, rounds: as for `audit_participation`.
      rounds_per_epoch: among which one is drawn.
    """
    validate.integer(at_least=2, rounds_per_epoch=rounds_per_epoch)
    t, epochs, rest, again, outsiders, copies = rounds_per_epoch, [], [], [], 0, 0
    for batches in samplers:
        most = max(rounds, t)
        drawn, _, out, copies = _draw([batches], selection, num_groups, group, most, most=_KEPT // most)
        *whole, last = np.split(drawn, range(t, len(drawn) + 1, t))
        again += [(one & two).any(axis=0) for one, two in itertools.pairwise(whole)]
        epochs += whole
        rest += [last] if len(last) else []
        outsiders += out
        if len(epochs) * t + sum(map(len, rest)) >= rounds:
            break
    parts = epochs + rest
    if not parts or parts[0].shape[1] < 8:
        raise InputError(f"{len(parts)} epochs with {copies} copies are too few to count; give at least 8 copies")
    wrong = sum(int(np.count_nonzero(part.sum(axis=0) != 1)) for part in epochs)
    wrong += sum(int(np.count_nonzero(part.sum(axis=0) > 1)) for part in rest)
    checks = [
        certain_check("copies drawn out of turn", outsiders == 0, observed=outsiders),
        certain_check("copies not in exactly one round of an epoch", wrong == 0, observed=wrong),
    ]
    if rest:  # all of one length: samplers are of one plan
        late = [part.any(axis=0) for part in rest]
        checks.append(share_check("copies in the last epoch", late, len(rest[0]) / t))
    started = np.array([part[0] for part in parts])  # (epochs, kept copies) in the first round
    checks.append(share_check("copies in the first round", started, 1 / t))
    checks += _extremes("first rounds", started.sum(axis=1), started.shape[1], 1 / t)
    if epochs:
        checks.append(share_check("copies in the last round", [part[-1] for part in epochs], 1 / t))
        half = epochs[0].shape[1] // 2
        for name, one, two in (
            ("neighbouring copies together", np.s_[: 2 * half : 2], np.s_[1 : 2 * half : 2]),
            ("distant copies together", np.s_[:half], np.s_[half : 2 * half]),
        ):
            together = [(part[:, one] & part[:, two]).any(axis=0) for part in epochs]
            checks.append(share_check(name, together, 1 / t))
    if again:  # each epoch's rounds are independent of those before, so equal rounds are independent coins
        checks.append(share_check("the same round as an epoch before", again, 1 / t))
    return CheckedLaw("participation", checks, alpha)


def audit_coin_words(coins: PoissonCoins) -> CheckedLaw:
    """Looks at the words themselves: after any number of skipped copies the next is drawn with at most p, in integers.

    Guarantees:
      - Coins whose probability was rounded up are caught.   (test_coins_that_were_rounded_up_are_caught)

    >>> audit_coin_words(PoissonCoins(0.01)).holds
    True
    """
    before, worst = 2**64, 0.0
    p_times = int(coins.probability * 2.0**64)  # exact: a product with a power of two
    holds = True
    for threshold in coins.thresholds.tolist():
        drawn = before - threshold  # words that draw the next copy, of `before` that get so far
        holds &= drawn * 2**64 <= p_times * before
        worst = max(worst, drawn / before)
        before = threshold
    skips = coins.skips([0, 2**64 - 1]) if len(coins.thresholds) else [0, 0]
    extreme = skips == [len(coins.thresholds), 0]
    checks = [
        certain_check("largest probability after any skip", holds, observed=worst, expected=coins.probability),
        certain_check(
            "copies skipped by the smallest word", extreme, observed=skips[0], expected=len(coins.thresholds)
        ),
    ]
    return CheckedLaw("coin words", checks, 1e-3)  # certain


def _draw(
    samplers: Iterable[Batches],
    selection: Selection,
    num_groups: int,
    group: int,
    rounds: int,
    most: int = _MOST_COPIES,
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64], int, int]:
    """Returns (rounds, kept copies) participations; (rounds,) counts; the count out of turn or twice; all copies."""
    inside = selection.copies > 0 if selection.groups is None else selection.groups == group
    counts = np.where(inside, selection.copies, 0)
    first = np.cumsum(counts) - counts  # number of an example's first copy among those of the group
    copies = int(counts.sum())
    kept = np.full(copies, -1)
    ends = np.unique(np.r_[: min(copies, most // 2), max(0, copies - most // 2) : copies])
    kept[ends] = np.arange(len(ends))
    drawn, sizes, outsiders = [], [], 0
    for batches in samplers:
        for step in range(batches.iterations):
            batch = batches.batch(step)
            examples, numbers = batch.examples[batch.mask], batch.copy_numbers[batch.mask]
            known, turn = inside[examples], step % num_groups == group
            outsiders += int(np.count_nonzero(known != turn))
            if not turn:
                continue
            numbers = first[examples[known]] + numbers[known]
            outsiders += len(numbers) - len(np.unique(numbers))
            row = np.zeros(len(ends), bool)
            row[kept[numbers][kept[numbers] >= 0]] = True
            drawn.append(row)
            sizes.append(len(numbers))
            if len(drawn) == rounds:
                return np.array(drawn), np.array(sizes), outsiders, copies
    return np.array(drawn), np.array(sizes), outsiders, copies


def _coincidences(drawn: npt.NDArray[np.bool_], p: float) -> list[Check]:
    """Tests disjoint pairs, so that every pair has its own coins."""
    rounds, copies = drawn.shape
    half = copies // 2
    pairs, triples = drawn[:, : half * 2].reshape(rounds, -1, 2), drawn[:, : copies // 3 * 3].reshape(rounds, -1, 3)
    checks = [
        share_check("neighbouring copies together", pairs.all(axis=2), p * p),
        share_check("three copies in a row together", triples.all(axis=2), p**3),
        share_check("distant copies together", drawn[:, :half] & drawn[:, half : 2 * half], p * p),
    ]
    for lag in sorted({1, 2, min(rounds // 2, max(1, round(1 / p)))}):
        first = np.flatnonzero(np.arange(rounds - lag) // lag % 2 == 0)  # blocks of `lag` steps, each with the next
        checks.append(share_check(f"a copy again {lag} steps later", drawn[first] & drawn[first + lag], p * p))
    return checks


def _extremes(what: str, counts: npt.NDArray[np.int64], trials: int, p: float) -> list[Check]:
    """Tests how many of the sums lie beyond extreme quantiles of a binomial, above and below."""
    checks = []
    for quantile in _BATCH_QUANTILES:
        limit = int(binom.ppf(quantile, trials, p))
        if quantile > 0.5:
            found, chance, word = np.count_nonzero(counts > limit), binom.sf(limit, trials, p), "more than"
        else:
            found, chance, word = np.count_nonzero(counts < limit), binom.cdf(limit - 1, trials, p), "less than"
        if not math.isclose(chance, 0.0, abs_tol=1e-300):
            checks.append(binomial_check(f"{what} with {word} {limit}", int(found), len(counts), float(chance)))
    return checks


_LARGEST_NORMAL = 13.0  # beyond it there is 6e-39 of a normal
_KEYS = 2**18  # of 32 random bits, so many would hold 8 equal pairs on average
_LAGS = (1, 7, 8, 31, 32, 63, 64, 128)  # bits


def audit_key_source(*, alpha: float = 1e-3, keys: int = _KEYS) -> CheckedLaw:
    """Draws many keys as a run does, and tests that all differ and their bits are independent.

    Guarantees:
      - The probability of an alarm is at most alpha where keys are independent random bits.   (test_keys_pass)
      - Constant, biased or repeated bits are caught, and keys that have 32 random bits (with probability 0.9996).
        (test_wrong_key_sources_are_caught)
    What it is not: able to detect a predictable generator with good statistics.
    """
    drawn = b"".join(RunKey.from_operating_system().secret for _ in range(keys))
    words = np.frombuffer(drawn, np.uint32).reshape(keys, 8)
    bits = np.unpackbits(np.frombuffer(drawn, np.uint8)).reshape(keys, 256)
    equal = keys - len(np.unique(np.frombuffer(drawn, np.uint64)[::4]))
    ordered = np.sort(words, axis=1)
    alike = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
    flat = bits.ravel()
    checks = [
        certain_check("keys whose first 64 bits are equal", equal == 0, observed=equal),  # 2^-29
        share_check("keys with two equal 32-bit words", alike, 28 / 2**32),  # at most, by the union bound
        any_of(
            "set bits at one position",
            [binomial_check("", int(count), keys, 0.5) for count in bits.sum(axis=0, dtype=np.int64)],
        ),
        any_of("bits that equal a later one", [share_check("", flat[lag:] == flat[:-lag], 0.5) for lag in _LAGS]),
    ]
    return CheckedLaw("key source", checks, alpha)


def audit_noise_tail() -> CheckedLaw:
    """Checks the normals of extreme words, where a float32 generator ends at 5.42.

    Guarantees:
      - A tail that ends early is caught.   (test_a_short_tail_is_caught)

    >>> audit_noise_tail().holds
    True
    """
    # m, the lower 63 bits of a word, and 64 further bits stand for the tail probability (m + more / 2^64) / 2^64.
    exponents = np.arange(2, 121)
    bits = [1 << (128 - int(exponent)) for exponent in exponents]
    words = np.array([value >> 64 for value in bits], np.uint64)
    more = np.array([value & (2**64 - 1) for value in bits], np.uint64)
    expected = -ndtri_exp(-exponents * np.log(2.0))  # (119,) the normal exceeded with probability 2^-exponent
    sign = np.uint64(1 << 63)
    high, low = _normals(words | sign, more), _normals(words, more)
    # A word stands for the middle of an interval: half a unit of the last of its 64 (in the tail 128) bits.
    middle = 2.0 ** (exponents - np.where(exponents <= 17, 65.0, 129.0)) / np.minimum(expected, expected**2)
    error = float(np.max(np.abs(high - expected) / expected - 2 * middle))
    checks = [certain_check("relative error down to 2^-120", error <= 1e-9, observed=max(error, 0.0))]
    mirrored = float(np.max(np.abs(high + low)))
    ends = _normals(np.array([0, sign], np.uint64), np.zeros(2, np.uint64))
    checks += [
        certain_check("difference of the two tails", mirrored <= 2.0**-39, observed=mirrored),
        certain_check(
            "largest value",
            bool(np.isfinite(ends).all()) and -ends[0] >= _LARGEST_NORMAL <= ends[1],
            observed=float(min(-ends[0], ends[1])),
            expected=_LARGEST_NORMAL,
        ),
    ]
    return CheckedLaw("noise tail", checks, 0.5)  # certain


def _normals(words: npt.NDArray[np.uint64], more: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Returns the normals that noise is rounded from, each by the first of three ways that is precise enough."""
    found = np.empty(len(words))
    normals.approximate(words, found)
    for i in np.flatnonzero(np.isnan(found)):
        found[i] = normals.approximate_with(words[i], more[i])
    for i in np.flatnonzero(np.isnan(found)):
        known = {0: int(words[i]), 1: int(more[i]), 2: 2**63}  # in the middle of what the first two leave open
        digits = normals.Digits(lambda number, known=known: known.get(number, 0))
        low, high = -(2**45), 2**45  # in units of 2^-40
        near = round(digits.estimate() * 2**40)
        while high - low > 1:
            # First just below and just above the estimate, which leaves little to halve where it is right.
            middle = next((near + step for step in (-128, 128) if low < near + step < high), (low + high) // 2)
            low, high = (middle, high) if digits.exceeds(middle, 2**40) else (low, middle)
        found[i] = low * 2.0**-40
    return found
