"""Tests that the sampler draws every copy by an independent coin: counts are then exactly binomial.

The whole-curve audit sees too much participation of one user. It hardly sees sampling that is not Poisson at all but
has the right rates, such as shuffling (each copy once an epoch) or batches cut to a size; here they show at once.
"""

import itertools
import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from scipy.stats import binom

from coowned import validate
from coowned.audit.checks import Check, CheckedLaw, binomial_check, certain_check, share_check
from coowned.errors import InputError
from coowned.exact.coins import PoissonCoins
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
