"""Does the sampler draw every copy by a coin of its own? Counts whose law is then exactly binomial.

The whole-curve audit sees too much participation of one user. It hardly sees sampling that is not Poisson at all but
has the right rates, such as shuffling (each copy once an epoch) or batches cut to a size; here they show at once.
"""

import math

import numpy as np
import numpy.typing as npt
from scipy.stats import binom

from coowned import validate
from coowned.attribution.graph import AttributionGraph
from coowned.audit.audited_parts import AuditedParts
from coowned.audit.checks import Check, CheckedLaw, binomial_check, certain_check, checked_law
from coowned.errors import InputError
from coowned.mechanism.batching import Batches
from coowned.mechanism.coins import PoissonCoins
from coowned.mechanism.keys import RunKey
from coowned.mechanism.mechanism import Mechanism
from coowned.selection.selector import Selection

_BATCH_QUANTILES = (0.02, 0.25, 0.75, 0.98)
_COPIES = 1000  # that `audit_sampler` draws from, or as many more as draw one a step,
_MOST_COPIES = 50_000  # but not more: with all steps, and what is computed from them, below 200 MB
_STEPS = 1000  # of the group that is looked at


def audit_participation(
    batches: Batches,
    selection: Selection,
    *,
    probability: float,
    alpha: float = 1e-3,
    num_groups: int = 1,
    group: int = 0,
    steps: int | None = None,
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
    Cost: a call of the sampler a step, and O(copies) a step.
    What it is not: a test of what happens less often than about once in steps times copies; the coins' words are
    tested exactly (`audit_coin_words`).

    Args:
      batches: the sampler.
      selection: what it draws from.
      probability: of each copy, in each step in which it can be drawn.
      alpha: probability of a false alarm.
      num_groups, group: for cyclic sampling: copies of this group are looked at, in its steps.
      steps: how many of the sampler's steps (default: all).

    Example:
      >>> from coowned.attribution.graph import AttributionGraph
      >>> from coowned.mechanism.batching import PoissonBatches
      >>> from coowned.mechanism.keys import RunKey
      >>> graph = AttributionGraph.from_users_per_example([[user] for user in range(200)])
      >>> selection = Selection.from_copies(graph, np.ones(200, int))
      >>> batches = PoissonBatches(selection=selection, sampling_probability=0.1, batch_size=20, iterations=500,
      ...                          run_key=RunKey.from_seed(3))
      >>> audit_participation(batches, selection, probability=0.1).holds
      True
    """
    validate.in_range(0, 1, open_low=True, open_high=True, probability=probability)
    if steps is not None:
        validate.integer(at_least=1, at_most=batches.iterations, steps=steps)
    if selection.copies.max(initial=0) > 1:
        raise InputError("the participation audit needs a selection with each example once; give it such a one")
    drawn, strangers = _draw(batches, selection, num_groups, group, steps or batches.iterations)
    rounds, copies = drawn.shape
    if rounds < 8 or copies < 8:
        raise InputError(f"{rounds} steps with {copies} copies are too few to count; give at least 8 of both")
    p = float(probability)
    checks = [
        certain_check("copies drawn out of turn", strangers == 0, observed=strangers, expected=0),
        binomial_check("participations", int(drawn.sum()), drawn.size, p),
        *_coincidences(drawn, p),
        *_extremes("copies", drawn.sum(axis=0), rounds, p),
        *_extremes("batches", drawn.sum(axis=1), copies, p),
    ]
    return checked_law("participation", checks, alpha)


def audit_coin_words(coins: PoissonCoins, *, alpha: float = 1e-3) -> CheckedLaw:
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
            "copies passed over by the smallest word", extreme, observed=skips[0], expected=len(coins.thresholds)
        ),
    ]
    return checked_law("coin words", checks, alpha)


def audit_sampler(
    mechanism: Mechanism,
    *,
    run_key: RunKey,
    alpha: float = 1e-3,
    parts: AuditedParts | None = None,
) -> list[CheckedLaw]:
    """The words of a mechanism's coins, and what its sampler draws from a world of a size that shows it.

    Below a probability of 1 / 50,000 that world has 50,000 copies, and most batches are empty: counts then still tell
    how often copies are drawn, but hardly whether they are drawn together. A cyclic sampler, which makes its
    probability of batch size and copies, is counted at 1 / 50,000. The coins' words are those of the claim's
    probability, whatever it is.

    Guarantees:
      - Memory stays below 200 MB, however small the probability.   (test_small_probabilities_need_little_memory)

    >>> from coowned import PoissonSampling
    >>> mechanism = PoissonSampling(contribution_bound=2, sampling_probability=0.1, iterations=10, batch_size=8)
    >>> [law.holds for law in audit_sampler(mechanism, run_key=RunKey.from_seed(1))]
    [True, True]
    """
    parts = parts or AuditedParts()
    groups = mechanism.cycle_length
    user = mechanism.worst_user(None)
    group, probability = user.group, user.probability
    words = audit_coin_words(PoissonCoins(probability), alpha=alpha)
    if probability == 1:
        return [words]
    batch_size = max(1, round(probability * _COPIES))
    copies = min(_MOST_COPIES, max(8, math.floor(batch_size / probability)))
    graph = AttributionGraph.from_csr(np.arange(copies + 1), np.arange(copies, dtype=np.int32), num_users=copies)
    selection = Selection.from_copies(graph, np.ones(copies, np.int64))
    if mechanism.needs_groups:
        selection = parts.group(graph, selection, group=group)
        probability = min(1.0, batch_size / copies)  # which is how its sampler makes it
    steps = _STEPS * groups if groups <= 32 else 32_000 // groups * groups
    batches = parts.batches(selection, mechanism, batch_size=batch_size, iterations=steps, run_key=run_key)
    found = audit_participation(
        batches, selection, probability=probability, alpha=alpha, num_groups=groups, group=group
    )
    return [words, found]


def _draw(
    batches: Batches, selection: Selection, num_groups: int, group: int, steps: int
) -> tuple[npt.NDArray[np.bool_], int]:
    """(rounds, copies) what took part, of the group in its rounds; and how many took part that should not."""
    inside = selection.copies > 0 if selection.groups is None else selection.groups == group
    column = np.cumsum(inside) - 1
    mine = range(group, steps, num_groups)
    drawn, strangers = np.zeros((len(mine), int(inside.sum())), bool), 0
    for step in range(steps):
        batch = batches.batch(step)
        examples = batch.examples[batch.mask]
        if step % num_groups != group:
            strangers += int(np.count_nonzero(inside[examples]))
            continue
        known = inside[examples]
        strangers += int(np.count_nonzero(~known)) + len(examples) - len(np.unique(examples))
        drawn[step // num_groups, column[examples[known]]] = True
    return drawn, strangers


def _coincidences(drawn: npt.NDArray[np.bool_], p: float) -> list[Check]:
    """Disjoint pairs, so that every pair has coins of its own."""
    rounds, copies = drawn.shape
    checks = []
    pairs = drawn[:, : copies // 2 * 2].reshape(rounds, -1, 2).all(axis=2)
    checks.append(binomial_check("neighbouring copies together", int(pairs.sum()), pairs.size, p * p))
    triples = drawn[:, : copies // 3 * 3].reshape(rounds, -1, 3).all(axis=2)
    checks.append(binomial_check("three copies in a row together", int(triples.sum()), triples.size, p**3))
    half = copies // 2
    far = drawn[:, :half] & drawn[:, half : 2 * half]
    checks.append(binomial_check("distant copies together", int(far.sum()), far.size, p * p))
    for lag in sorted({1, 2, min(rounds // 2, max(1, round(1 / p)))}):
        first = np.flatnonzero(np.arange(rounds - lag) // lag % 2 == 0)  # blocks of `lag` steps, each with the next
        again = drawn[first] & drawn[first + lag]
        checks.append(binomial_check(f"a copy again {lag} steps later", int(again.sum()), again.size, p * p))
    return checks


def _extremes(what: str, counts: npt.NDArray[np.int64], trials: int, p: float) -> list[Check]:
    """How many of the sums are above what a binomial seldom is, and how many below."""
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
