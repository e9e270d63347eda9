"""The closed form against 60 digits."""

import math

import mpmath
import pytest

from coowned.accounting.gaussian import gaussian_epsilon, gaussian_log_delta, gaussian_mu, gaussian_true_positive_rate
from coowned.errors import UncertifiableError


def exact_log_delta(mu, epsilon):
    with mpmath.workdps(60):
        mu, epsilon = mpmath.mpf(mu), mpmath.mpf(epsilon)
        delta = mpmath.ncdf(mu / 2 - epsilon / mu) - mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)
        return mpmath.log(delta)


@pytest.mark.parametrize("mu", [1e-6, 1e-3, 0.1, 1.0, 7.0, 40.0, 1000.0])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0, 3.0])
def test_delta_is_an_upper_bound_and_tight(mu, share):
    epsilon = share * (mu * mu / 2 + 6 * mu)
    found, exact = gaussian_log_delta(mu, epsilon), exact_log_delta(mu, epsilon)
    assert exact <= found <= exact + 1e-6


@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-12])
@pytest.mark.parametrize("mu", [0.02, 0.5, 5.0, 60.0])
def test_epsilon_and_mu_are_on_the_private_side(mu, delta):
    epsilon = gaussian_epsilon(mu, delta)
    assert exact_log_delta(mu, epsilon) <= math.log(delta)
    assert exact_log_delta(mu, epsilon * (1 - 1e-7)) > math.log(delta)
    largest = gaussian_mu(epsilon, delta)
    assert exact_log_delta(largest, epsilon) <= math.log(delta)
    assert largest == pytest.approx(mu, rel=1e-8)


def test_epsilon_is_zero_where_delta_allows():
    assert gaussian_epsilon(1e-5, 1e-3) == 0.0
    assert gaussian_log_delta(0.0, 1.0) == -math.inf


def test_absurd_targets_are_refused():
    with pytest.raises(UncertifiableError, match="noise multiplier"):
        gaussian_epsilon(1e12, 1e-6)


def test_true_positive_rate_is_the_trade_off_curve():
    assert gaussian_true_positive_rate(0.0, 0.05) == pytest.approx(0.05)
    assert gaussian_true_positive_rate(1.0, 0.5) == pytest.approx(float(mpmath.ncdf(1)))


def test_targets_below_every_mu_are_refused():
    with pytest.raises(UncertifiableError, match="no noise multiplier is found for epsilon = 1e-12"):
        gaussian_mu(1e-12, 1e-15)
