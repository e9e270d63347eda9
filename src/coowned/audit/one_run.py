"""Lower bounds on epsilon from one training run, in which each canary was included by a fair coin.

The auditor ranks all canaries by a score and says "in" of the first n. A private mechanism limits how many of these
guesses are right; more than it allows, at level alpha, refutes the claim. The n are fixed beforehand, and alpha is
divided among them.

References: Steinke et al. (2023), https://arxiv.org/abs/2305.08846 (epsilon and delta); Mahloujifar et al. (2024),
  https://arxiv.org/abs/2410.22235 (a Gaussian trade-off curve).
"""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy.special import expit, ndtr, ndtri
from scipy.stats import binom

from coowned import validate
from coowned.accounting.gaussian import gaussian_epsilon

_GUESSED = ((0.4, 0.7), (0.2, 0.15), (0.1, 0.15))  # (share of the canaries, share of alpha); about half are in
_TOLERANCE = 1e-6  # of a bound, on the side of the lower one


def epsilon_lower_bound(scores: npt.ArrayLike, included: npt.ArrayLike, *, delta: float, alpha: float) -> float:
    """Computes a bound that exceeds the true epsilon, for this delta, with probability at most alpha.

    Guarantees:
      - An honest guesser is accused with probability at most alpha.   (test_honest_guesses_are_not_accused)
      - Nowhere above jax_privacy's bound for the same guesses.        (test_no_more_than_jax_privacy)

    Args:
      scores: (m,) how well the model knows each canary.
      included: (m,) whether it was in.

    Example:
      >>> included = np.arange(1000) < 500
      >>> round(epsilon_lower_bound(included, included, delta=1e-5, alpha=0.01), 2)
      4.3
    """

    def refutes(epsilon: float, m: int, n: int, right: int, level: float) -> bool:
        return _p_value(epsilon, delta, m, n, right) <= level

    return _best(scores, included, delta, alpha, refutes)


def gaussian_lower_bound(scores: npt.ArrayLike, included: npt.ArrayLike, *, delta: float, alpha: float) -> float:
    """Bounds a mechanism with the trade-off curve of a Gaussian: the epsilon of the largest refuted mu.

    Example:
      >>> included = np.arange(1000) < 500
      >>> round(gaussian_lower_bound(included, included, delta=1e-5, alpha=0.01), 2)
      7.14
    """
    mu = _best(scores, included, delta, alpha, _refutes_gaussian)
    return gaussian_epsilon(mu, delta) if mu else 0.0


def _best(
    scores: npt.ArrayLike, included: npt.ArrayLike, delta: float, alpha: float, refutes: Callable[..., bool]
) -> float:
    """Returns the largest value that some guesses refute: refutes(value, canaries, guesses, right ones, level)."""
    known, inside = np.asarray(scores, np.float64), np.asarray(included, bool)
    validate.same_length(len(known), included=inside)
    validate.in_range(0, 1, open_low=True, open_high=True, alpha=alpha, delta=delta)
    m = len(known)
    right = np.cumsum(inside[np.argsort(-known, kind="stable")])  # (m,) right ones among the first 1, 2, ... guesses
    counts = [(math.ceil(share * m), part * alpha) for share, part in _GUESSED]
    return max(_largest(refutes, m, n, int(right[n - 1]), level) for n, level in counts)


def _largest(refutes: Callable[..., bool], *seen: float) -> float:
    """Returns the largest value that what was seen refutes, all smaller ones being refuted too; 0 if none is."""
    if not refutes(0.0, *seen):
        return 0.0
    low, high = 0.0, 1.0
    while refutes(high, *seen):
        low, high = high, 2 * high
    while high - low > _TOLERANCE:
        middle = (low + high) / 2
        low, high = (middle, high) if refutes(middle, *seen) else (low, middle)
    return low


def _p_value(epsilon: float, delta: float, m: int, n: int, right: int) -> float:
    """Bounds the probability of so many right guesses under (epsilon, delta) from above (Steinke et al., Thm 5.2)."""
    pure = binom.sf(right - 1, n, expit(epsilon))  # each guess is right with probability e^epsilon / (1 + e^epsilon)
    fewer = np.arange(1, right + 1)  # guesses that a failure of probability delta may have turned right
    gained = (binom.sf(right - fewer - 1, n, expit(epsilon)) - pure) / fewer
    return float(pure + 2 * m * delta * gained.max(initial=0.0))


def _refutes_gaussian(mu: float, m: int, n: int, right: int, level: float) -> bool:
    """Returns whether so many right guesses refute mu-Gaussian privacy (Mahloujifar et al., Algorithm 3)."""
    hit, miss = level * right / m, level * (n - right) / m
    for count in range(right - 1, -1, -1):
        raised = max(miss, float(ndtr(ndtri(hit) - mu)))
        if raised == miss:  # neither changes any more
            break
        hit, miss = min(1.0, hit + count / (n - count) * (raised - miss)), raised
    return hit + miss > n / m
