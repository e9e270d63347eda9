"""Computes epsilons and curves of a hypothetical mechanism. These are numbers, not claims: a claim needs a certificate.

Every epsilon here is of one user (or one example) under a fixed, public attribution graph; `adjacency` says what may
change: "zero-out" (all their examples become blank) or "replace" (they become anything else).
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from coowned import validate
from coowned.accounting.calibrate import calibrate
from coowned.accounting.composition import Answer, Composition, ZeroOutTwice, compose_steps
from coowned.accounting.gaussian import gaussian_mu, gaussian_true_positive_rate
from coowned.accounting.terms import check_terms
from coowned.errors import UncertifiableError
from coowned.mechanism.mechanism import Mechanism, Steps

__all__ = [
    "Answer",
    "calibrate",
    "composed_epsilon",
    "epsilon",
    "epsilon_curve",
    "epsilon_details",
    "epsilon_of_copies",
    "gaussian_dp",
    "release_epsilon",
    "sweep_noise_multiplier",
    "true_positive_rate_bound",
]


_GRID_POINTS = 160
Compositions = list[Composition | ZeroOutTwice]  # of every kind of user that could be the worst off


@dataclasses.dataclass(frozen=True, kw_only=True)
class GaussianDp:
    """Describes a Gaussian mechanism that is no more private than the one asked about."""

    mu: float  # its mean in units of its noise; infinite where delta at small epsilons is indistinguishable from 1
    # The mechanism IS this Gaussian. Otherwise mu is an upper bound for epsilons up to `largest_epsilon` only
    # (subsampled mechanisms have tails no smaller Gaussian covers) and must be called an estimate.
    exact: bool
    largest_epsilon: float  # where the comparison ends; infinite if exact


def epsilon(
    mechanism: Mechanism, *, noise_multiplier: float, delta: float, adjacency: str, also: Sequence[Steps] = ()
) -> float:
    """Returns the smallest epsilon that is proven for one user at `delta`.

    Guarantees:
      - Never below the true epsilon.   (test_never_below_the_closed_form, test_never_below_quadrature,
        test_never_below_the_lower_estimate)
      - About 0.01% above it where the grid allows.   (test_close_to_dp_accounting)
      - Falls with the noise, rises with copies, probability and iterations.   (test_laws_of_epsilon)

    Args:
      also: what the same user's data go through besides, such as a covered evaluation.

    Raises UncertifiableError where numerical errors would take more than 1% of delta.
    Cost: 0.05 to 0.5 s; a few seconds at a million iterations with tiny probabilities. `MinSeparation` is immediate.

    Example:
      >>> from coowned import PoissonSampling
      >>> m = PoissonSampling(contribution_bound=3, sampling_probability=0.01, iterations=2500)
      >>> round(epsilon(m, noise_multiplier=2.0, delta=1e-10, adjacency="zero-out"), 2)
      5.32

    References: Charles et al. (2024), https://arxiv.org/abs/2407.07737
    """
    claim = {"noise_multiplier": noise_multiplier, "delta": delta}
    return epsilon_details(mechanism, **claim, adjacency=adjacency, also=also).epsilon


def epsilon_details(
    mechanism: Mechanism, *, noise_multiplier: float, delta: float, adjacency: str, also: Sequence[Steps] = ()
) -> Answer:
    """Returns `epsilon` with the grid it was computed on and the numerical errors that were charged."""
    check_terms(delta=delta, adjacency=adjacency, noise_multiplier=noise_multiplier)
    return _worst([[steps, *also] for steps in mechanism.user_steps(noise_multiplier)], delta, adjacency)


def release_epsilon(steps: Steps, *, delta: float, adjacency: str) -> float:
    """Returns the epsilon of someone whose data go through these steps alone, such as a covered evaluation.

    >>> from coowned.mechanism.mechanism import Steps
    >>> round(release_epsilon(Steps(copies=2, probability=1.0, noise_multiplier=4.0, repetitions=1), delta=1e-6,
    ...                       adjacency="zero-out"), 3)
    2.254
    """
    check_terms(delta=delta, adjacency=adjacency)
    return compose_steps([steps], adjacency).epsilon(delta).epsilon


def epsilon_of_copies(
    mechanism: Mechanism,
    *,
    copies: int,
    noise_multiplier: float,
    delta: float,
    adjacency: str,
    group: int | None = None,
    also: Sequence[Steps] = (),
) -> float:
    """Returns the epsilon of a user who is in `copies` copies (participations for `MinSeparation`), not in all allowed.

    `group` narrows `CyclicPoisson` to that group of users. 0 copies are refused: such a user has no part in training.
    With the copies of one example in place of a user's it is the example-level (edge-data) epsilon.

    Example:
      >>> from coowned import MinSeparation
      >>> m = MinSeparation(contribution_bound=9, min_separation=16, num_bands=16, iterations=2500)
      >>> round(epsilon_of_copies(m, copies=1, noise_multiplier=2.0, delta=1e-6, adjacency="zero-out"), 3)
      2.254
    """
    fewer, claim = mechanism.for_copies(copies, group=group), {"noise_multiplier": noise_multiplier, "delta": delta}
    return epsilon(fewer, **claim, adjacency=adjacency, also=also)


def composed_epsilon(
    runs: Sequence[tuple[Mechanism, float]], *, delta: float, adjacency: str, also: Sequence[Steps] = ()
) -> float:
    """Returns the epsilon of several runs, given as (mechanism, noise multiplier), on the same people.

    Coins and noise of the runs are independent, and those of what comes `also` (as for `epsilon`).

    NOT for models of one sweep that share their batches: see `sweep_noise_multiplier`.

    Guarantees:
      - A run composed with itself is one run of twice the iterations.   (test_composition_of_a_run_with_itself)

    Example:
      >>> from coowned import MinSeparation
      >>> m = MinSeparation(contribution_bound=1, min_separation=8, num_bands=8, iterations=100)
      >>> round(composed_epsilon([(m, 2.0), (m, 2.0)], delta=1e-6, adjacency="zero-out"), 3)
      3.308
    """
    validate.positive(number_of_runs=len(runs))
    for _, noise_multiplier in runs:
        check_terms(delta=delta, adjacency=adjacency, noise_multiplier=noise_multiplier)
    choices = [mechanism.user_steps(noise_multiplier) for mechanism, noise_multiplier in runs]
    return _worst([[*choice, *also] for choice in itertools.product(*choices)], delta, adjacency).epsilon


def sweep_noise_multiplier(noise_multipliers: Sequence[float]) -> float:
    """Returns the noise multiplier of ONE mechanism as strong as several models trained on the same batches.

    Models of one sweep share their coins and have noise of their own: together they are a single release with noise
    (sum of sigma_i^-2)^(-1/2). Composing them as independent runs would promise too much.

    >>> sweep_noise_multiplier([1.0, 1.0, 1.0, 1.0])
    0.4999...
    """
    validate.positive(number_of_models=len(noise_multipliers))
    for noise_multiplier in noise_multipliers:
        validate.positive_number(noise_multiplier=noise_multiplier)
    return math.fsum(sigma**-2 for sigma in noise_multipliers) ** -0.5 * (1 - 2.0**-50)


def epsilon_curve(
    mechanism: Mechanism,
    *,
    noise_multiplier: float,
    adjacency: str,
    epsilons: Sequence[float],
    also: Sequence[Steps] = (),
) -> np.ndarray:
    """Returns an upper bound on delta at each of `epsilons`, (len(epsilons),), the largest over directions and groups.

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
    compositions = _compositions(mechanism, noise_multiplier, adjacency, also)
    for value in epsilons:
        validate.in_range(0, math.inf, open_high=True, epsilons=value)
    return _deltas(compositions, [float(value) for value in epsilons])


def gaussian_dp(
    mechanism: Mechanism, *, noise_multiplier: float, adjacency: str, smallest_delta: float = 1e-12
) -> GaussianDp:
    """Returns mu of Gaussian DP: exact without coins, else the smallest mu whose curve lies above this mechanism's.

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
    mechanism: Mechanism,
    *,
    noise_multiplier: float,
    adjacency: str,
    false_positive_rate: float,
    also: Sequence[Steps] = (),
) -> float:
    """Returns the largest true-positive rate that a membership test with this false-positive rate can have.

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
    compositions = _compositions(mechanism, noise_multiplier, adjacency, also)
    mu = _exact_mu(compositions)
    if mu is not None:
        return gaussian_true_positive_rate(mu, false_positive_rate)
    smallest = min(max(1e-3 * false_positive_rate, 1e-12), 1e-3)
    points, deltas = _sampled_curve(compositions, smallest)
    factor = np.exp(np.minimum(points, 700.0))
    by_rate = factor * false_positive_rate + deltas
    by_miss = 1 - (1 - deltas - false_positive_rate) / factor
    return float(min(1.0, by_rate.min(), by_miss.min()))


def _worst(candidates: Sequence[Sequence[Steps]], delta: float, adjacency: str) -> Answer:
    answers = [compose_steps(steps, adjacency).epsilon(delta) for steps in candidates]
    if not answers:
        raise UncertifiableError("no protected user is ever drawn: nothing to account for; run more iterations")
    return max(answers, key=lambda answer: answer.epsilon)


def _compositions(
    mechanism: Mechanism, noise_multiplier: float, adjacency: str, also: Sequence[Steps] = ()
) -> Compositions:
    check_terms(adjacency=adjacency, noise_multiplier=noise_multiplier)
    return [compose_steps([steps, *also], adjacency) for steps in mechanism.user_steps(noise_multiplier)]


def _exact_mu(compositions: Compositions) -> float | None:
    mus = [composition.gaussian_mu for composition in compositions]
    return None if any(mu is None for mu in mus) else max(mu for mu in mus if mu is not None)


def _deltas(compositions: Compositions, points: Sequence[float]) -> np.ndarray:
    """Returns the largest delta at each epsilon, (num_points,)."""
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
    """Returns a grid of epsilons from 0 to the one at smallest_delta, and the deltas there."""
    largest = max(composition.epsilon(smallest_delta).epsilon for composition in compositions)
    points = np.linspace(0.0, max(largest, 1e-9), _GRID_POINTS)
    return points, _deltas(compositions, points.tolist())
