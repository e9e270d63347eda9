"""The whole privacy curve of a mechanism, and what it says about Gaussian DP and membership inference."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from coowned import validate
from coowned.accounting.gaussian import gaussian_mu, gaussian_true_positive_rate
from coowned.accounting.numerical import Composition
from coowned.accounting.terms import check_terms
from coowned.accounting.zero_out_twice import ZeroOutTwice, compose_steps
from coowned.mechanism.mechanism import Mechanism

_GRID_POINTS = 160
Compositions = list[Composition | ZeroOutTwice]  # of every kind of user that could be the worst off


@dataclasses.dataclass(frozen=True, kw_only=True)
class GaussianDp:
    """A Gaussian mechanism that is no more private than the one asked about."""

    mu: float  # its mean in units of its noise; infinite where delta at small epsilons cannot be told from 1
    # The mechanism IS this Gaussian. Otherwise mu is an upper bound for epsilons up to `largest_epsilon` only
    # (subsampled mechanisms have tails no smaller Gaussian covers) and must be called an estimate.
    exact: bool
    largest_epsilon: float  # where the comparison ends; infinite if exact


def epsilon_curve(
    mechanism: Mechanism, *, noise_multiplier: float, adjacency: str, epsilons: Sequence[float]
) -> np.ndarray:
    """delta at each of `epsilons`: upper bounds, largest over directions and groups, (len(epsilons),).

    Guarantees:
      - Agrees with `epsilon`: delta at its answer is at most the delta asked for, up to the grid's
        0.1%.   (test_curve_agrees_with_epsilon)
      - Where no delta can be certified, what is proven for a smaller epsilon stands, or 1, which always holds.
        (test_uncertified_points_take_their_neighbours, test_curve_where_delta_is_all_but_one)

    Values below exp(-500) are not followed further down.

    Example:
      >>> from coowned import MinSeparation
      >>> m = MinSeparation(contribution_bound=4, min_separation=8, num_bands=8, iterations=100)
      >>> epsilon_curve(m, noise_multiplier=2.0, adjacency="zero-out", epsilons=[0.0, 1.0]).round(4)
      array([0.3829, 0.1269])
    """
    compositions = _compositions(mechanism, noise_multiplier, adjacency)
    for value in epsilons:
        validate.in_range(0, math.inf, open_high=True, epsilons=value)
    return _deltas(compositions, [float(value) for value in epsilons])


def gaussian_dp(
    mechanism: Mechanism, *, noise_multiplier: float, adjacency: str, smallest_delta: float = 1e-12
) -> GaussianDp:
    """mu of Gaussian DP: exact without coins, elsewhere the smallest mu whose curve lies above this mechanism's.

    "Above" holds at every epsilon from 0 to the one at `smallest_delta`, not just on the grid: the
    Gaussian at each grid point is compared with this mechanism at the point before it.
    (test_gaussian_dp_curve_lies_above)

    Example:
      >>> from coowned import MinSeparation
      >>> m = MinSeparation(contribution_bound=4, min_separation=8, num_bands=8, iterations=100)
      >>> gaussian_dp(m, noise_multiplier=4.0, adjacency="replace")
      GaussianDp(mu=1.0, exact=True, largest_epsilon=inf)

    References: Dong, Roth & Su (2022), https://arxiv.org/abs/1905.02383
    """
    validate.in_range(0, 1, open_low=True, open_high=True, smallest_delta=smallest_delta)
    compositions = _compositions(mechanism, noise_multiplier, adjacency)
    mu = _exact_mu(compositions)
    if mu is not None:
        return GaussianDp(mu=mu, exact=True, largest_epsilon=math.inf)
    points, deltas = _sampled_curve(compositions, smallest_delta)
    if deltas.max() >= 1:
        return GaussianDp(mu=math.inf, exact=False, largest_epsilon=float(points[-1]))
    needed = [
        gaussian_mu(later, delta) * (1 + 1e-9)
        for later, delta in zip(points[1:].tolist(), deltas[:-1].tolist(), strict=True)
        if delta > 0
    ]
    return GaussianDp(mu=max(needed), exact=False, largest_epsilon=float(points[-1]))


def true_positive_rate_bound(
    mechanism: Mechanism, *, noise_multiplier: float, adjacency: str, false_positive_rate: float
) -> float:
    """The largest true-positive rate any membership test with that false-positive rate can have.

    Every point of the curve gives two bounds, TPR <= exp(eps) FPR + delta and 1 - TPR >= exp(-eps) (1 - delta - FPR);
    the best of a grid of them is taken, so it is an upper bound whatever the grid. Exact without coins.

    Guarantees:
      - Equals the Gaussian trade-off without coins, and is never below a test that is carried out.
        (test_true_positive_rate_of_a_gaussian, test_true_positive_rate_is_not_beaten)

    Example:
      >>> from coowned import MinSeparation
      >>> m = MinSeparation(contribution_bound=4, min_separation=8, num_bands=8, iterations=100)
      >>> rate = true_positive_rate_bound(m, noise_multiplier=2.0, adjacency="zero-out", false_positive_rate=0.05)
      >>> round(rate, 4)
      0.2595
    """
    validate.in_range(0, 1, false_positive_rate=false_positive_rate)
    compositions = _compositions(mechanism, noise_multiplier, adjacency)
    mu = _exact_mu(compositions)
    if mu is not None:
        return gaussian_true_positive_rate(mu, false_positive_rate)
    smallest = min(max(1e-3 * false_positive_rate, 1e-12), 1e-3)
    points, deltas = _sampled_curve(compositions, smallest)
    factor = np.exp(np.minimum(points, 700.0))
    by_rate = factor * false_positive_rate + deltas
    by_miss = 1 - (1 - deltas - false_positive_rate) / factor
    return float(min(1.0, by_rate.min(), by_miss.min()))


def _compositions(mechanism: Mechanism, noise_multiplier: float, adjacency: str) -> Compositions:
    check_terms(adjacency=adjacency, noise_multiplier=noise_multiplier)
    return [compose_steps([steps], adjacency) for steps in mechanism.user_steps(noise_multiplier)]


def _exact_mu(compositions: Compositions) -> float | None:
    mus = [composition.gaussian_mu for composition in compositions]
    return None if any(mu is None for mu in mus) else max(mu for mu in mus if mu is not None)


def _deltas(compositions: Compositions, points: Sequence[float]) -> np.ndarray:
    """(num_points,) the largest delta at each epsilon."""
    deltas = np.zeros(len(points))
    for composition in compositions:
        answers = composition.deltas(points, refuse=False)
        found = [answer.delta if answer.is_precise else 1.0 for answer in answers]
        deltas = np.maximum(deltas, found)
    # delta never rises with epsilon: what is proven for a smaller one holds for the next.
    order = np.argsort(points, kind="stable")
    deltas[order] = np.minimum.accumulate(deltas[order])
    return deltas


def _sampled_curve(compositions: Compositions, smallest_delta: float) -> tuple[np.ndarray, np.ndarray]:
    """Grid of epsilons from 0 to the one at smallest_delta, and the deltas there."""
    largest = max(composition.epsilon(smallest_delta).epsilon for composition in compositions)
    points = np.linspace(0.0, max(largest, 1e-9), _GRID_POINTS)
    return points, _deltas(compositions, points.tolist())
