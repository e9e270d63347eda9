"""Computes epsilon and delta of the Gaussian mechanism in closed form: no grid, no transform.

A mechanism of sensitivity `mu` in units of its noise has, by Balle & Wang (2018),

    delta(eps) = Phi(mu / 2 - eps / mu) - exp(eps) Phi(-mu / 2 - eps / mu).

Both terms are far larger than their difference when mu is small, so it is written with Mills' ratio
R(x) = (1 - Phi(x)) / phi(x): exp(eps) phi(eps / mu + mu / 2) = phi(eps / mu - mu / 2), hence with x = eps / mu - mu / 2

    delta(eps) = phi(x) (R(x) - R(x + mu)),

and what the subtraction loses is added back.
"""

import math
from collections.abc import Callable

from scipy.optimize import brentq
from scipy.special import erfcx, ndtr, ndtri

from coowned.errors import UncertifiableError

UNIT_ROUNDOFF = 2.0**-53
_LARGEST_EPSILON = 1e12


def gaussian_log_delta(mu: float, epsilon: float) -> float:
    """Returns the log of an upper bound on delta(epsilon), tight to a few units in the last digit of float64.

    >>> round(math.exp(gaussian_log_delta(1.0, 1.0)), 4)
    0.1269
    """
    if mu <= 0:
        return -math.inf
    x = epsilon / mu - mu / 2
    unit = 16 * UNIT_ROUNDOFF
    density = -x * x / 2 - math.log(2 * math.pi) / 2 + unit * (1 + abs(x) * (epsilon / mu + mu))  # log, rounded up
    if x < -5:  # Phi(-x) is near 1: nothing is lost in the usual form, and Mills' ratio at x would overflow
        difference = float(ndtr(-x)) * (1 + unit) - math.exp(density) * _mills(x + mu) * (1 - unit * (2 + epsilon))
        return math.log(min(difference, 1.0))
    first, second = _mills(x), _mills(x + mu)
    return density + math.log(first - second + unit * first * (1 + epsilon / mu + mu))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Returns the smallest epsilon >= 0 with delta(epsilon) <= delta, from the private side.

    >>> round(gaussian_epsilon(1.0, 1e-5), 4)
    4.3772
    """
    log_delta = math.log(delta)
    if gaussian_log_delta(mu, 0.0) <= log_delta:
        return 0.0
    high = max(mu * mu, 1e-3)
    while high <= _LARGEST_EPSILON and gaussian_log_delta(mu, high) > log_delta:
        high *= 2
    if high > _LARGEST_EPSILON:
        raise UncertifiableError(
            f"epsilon would be about {mu * mu / 2:.3g}: that protects nobody; use a larger noise multiplier"
        )
    root = find_root(lambda e: gaussian_log_delta(mu, e) - log_delta, 0.0, high, absolute=1e-13 * high)
    nudge = 1e-13 * high
    while gaussian_log_delta(mu, root) > log_delta:
        root += nudge
        nudge *= 2
    return root


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Returns the largest mu with delta(epsilon) <= delta, from the private side.

    >>> round(gaussian_mu(4.3772, 1e-5), 4)
    1.0
    """
    log_delta = math.log(delta)
    low, high = 1e-12, 1.0
    if gaussian_log_delta(low, epsilon) > log_delta:
        raise UncertifiableError(f"no noise multiplier is found for epsilon = {epsilon:g} at delta = {delta:g}")
    while gaussian_log_delta(high, epsilon) <= log_delta:
        low, high = high, 2 * high
        if high > 1e9:
            raise UncertifiableError(f"no noise at all is needed for epsilon = {epsilon:g} at delta = {delta:g}")
    root = find_root(lambda m: gaussian_log_delta(m, epsilon) - log_delta, low, high, absolute=1e-15)
    nudge = 1e-14
    while gaussian_log_delta(root, epsilon) > log_delta:
        root *= 1 - nudge
        nudge *= 2
    return root


def gaussian_true_positive_rate(mu: float, false_positive_rate: float) -> float:
    """Returns the largest true-positive rate of any test of level `false_positive_rate` against a mu-GDP mechanism.

    >>> round(gaussian_true_positive_rate(1.0, 0.05), 4)
    0.2595
    """
    return float(ndtr(ndtri(false_positive_rate) + mu))


def _mills(x: float) -> float:
    return math.sqrt(math.pi / 2) * float(erfcx(x / math.sqrt(2)))


def find_root(
    function: Callable[[float], float], low: float, high: float, *, absolute: float, relative: float = 1e-13
) -> float:
    """Returns a root of a function with different signs at low and high, to about absolute + relative * |root|.

    >>> round(find_root(lambda x: x * x - 2, 0.0, 2.0, absolute=1e-12), 9)
    1.414213562
    """
    return brentq(function, low, high, xtol=absolute, rtol=relative)  # pyright: ignore[reportArgumentType,reportReturnType]
