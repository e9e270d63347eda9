"""Curves, Gaussian DP and membership inference."""

import math

import numpy as np
import pytest
from scipy.stats import binom, norm

from coowned import CyclicPoisson, MinSeparation, PoissonSampling
from coowned.accounting.calculators import calibrate, epsilon, epsilon_curve, gaussian_dp, true_positive_rate_bound
from coowned.accounting.gaussian import gaussian_epsilon, gaussian_log_delta
from coowned.errors import InputError, UncertifiableError

SAMPLED = PoissonSampling(contribution_bound=2, sampling_probability=0.05, iterations=100)
SCHEDULED = MinSeparation(contribution_bound=4, min_separation=8, num_bands=8, iterations=100)
adjacencies = pytest.mark.parametrize("adjacency", ["zero-out", "replace"])


@adjacencies
def test_curve_agrees_with_epsilon(adjacency):
    deltas = (1e-3, 1e-6, 1e-10)
    found = [epsilon(SAMPLED, noise_multiplier=1.5, delta=delta, adjacency=adjacency) for delta in deltas]
    curve = epsilon_curve(SAMPLED, noise_multiplier=1.5, adjacency=adjacency, epsilons=found)
    np.testing.assert_allclose(curve, deltas, rtol=5e-3)


def test_curve_falls_and_stays_positive():
    points = [0.0, 0.1, 1.0, 3.0, 10.0, 40.0]
    curve = epsilon_curve(SAMPLED, noise_multiplier=1.5, adjacency="zero-out", epsilons=points)
    assert np.all(np.diff(curve) < 0)
    assert np.all(curve > 0)
    shuffled = epsilon_curve(SAMPLED, noise_multiplier=1.5, adjacency="zero-out", epsilons=points[::-1])
    np.testing.assert_allclose(shuffled[::-1], curve)


def test_curve_of_groups_is_the_largest():
    cyclic = CyclicPoisson(
        contribution_bound=2,
        iterations=100,
        num_groups=2,
        num_bands=2,
        group_probabilities=(0.2, 0.1),
        group_bounds=(1, 2),
    )
    each = [
        PoissonSampling(contribution_bound=bound, sampling_probability=probability, iterations=50)
        for bound, probability in ((1, 0.2), (2, 0.1))
    ]
    question = {"noise_multiplier": 2.0, "adjacency": "zero-out", "epsilons": [0.5, 2.0]}
    largest = np.maximum(epsilon_curve(each[0], **question), epsilon_curve(each[1], **question))
    np.testing.assert_array_equal(epsilon_curve(cyclic, **question), largest)


def test_negative_epsilons_are_refused():
    with pytest.raises(InputError, match="epsilons"):
        epsilon_curve(SAMPLED, noise_multiplier=1.5, adjacency="zero-out", epsilons=[-0.1])


def test_gaussian_dp_is_exact_without_coins():
    assert gaussian_dp(SCHEDULED, noise_multiplier=2.0, adjacency="zero-out").mu == 1.0
    both = gaussian_dp(SCHEDULED, noise_multiplier=2.0, adjacency="replace")
    assert (both.mu, both.exact, both.largest_epsilon) == (2.0, True, math.inf)


@adjacencies
def test_gaussian_dp_curve_lies_above(adjacency):
    found = gaussian_dp(SAMPLED, noise_multiplier=1.5, adjacency=adjacency, smallest_delta=1e-8)
    assert not found.exact
    points = np.random.default_rng(0).uniform(0, found.largest_epsilon, 40)
    curve = epsilon_curve(SAMPLED, noise_multiplier=1.5, adjacency=adjacency, epsilons=list(points))
    gaussian = np.exp([gaussian_log_delta(found.mu, point) for point in points])
    assert np.all(gaussian >= curve * (1 - 2e-3))
    smaller = np.exp(
        [gaussian_log_delta(found.mu * 0.97, point) for point in np.linspace(0, found.largest_epsilon, 40)]
    )
    whole = epsilon_curve(
        SAMPLED, noise_multiplier=1.5, adjacency=adjacency, epsilons=list(np.linspace(0, found.largest_epsilon, 40))
    )
    assert np.any(smaller < whole)  # and it is not much too large


def test_true_positive_rate_of_a_gaussian():
    rate = true_positive_rate_bound(SCHEDULED, noise_multiplier=2.0, adjacency="zero-out", false_positive_rate=0.01)
    assert rate == pytest.approx(norm.cdf(norm.ppf(0.01) + 1.0))


@pytest.mark.parametrize("rate", [0.0, 1e-3, 0.1, 0.5, 1.0])
def test_true_positive_rate_is_not_beaten(rate):
    # One step: the best test is a threshold on the output, whose rates are known exactly, in both directions.
    m = PoissonSampling(contribution_bound=2, sampling_probability=0.4, iterations=1)
    bound = true_positive_rate_bound(m, noise_multiplier=0.7, adjacency="zero-out", false_positive_rate=rate)
    weights = binom.pmf(range(3), 2, 0.4)
    threshold = norm.ppf(1 - rate, 0, 0.7)
    forward = weights @ norm.sf(threshold, range(3), 0.7)
    x = np.linspace(-12, 10, 40001)
    backward_rate = weights @ norm.cdf(x[None, :], np.arange(3)[:, None], 0.7)
    backward = np.interp(rate, backward_rate, norm.cdf(x, 0, 0.7))
    assert max(forward, backward) <= bound + 1e-9
    assert bound <= max(forward, backward) + 0.02


def test_rates_outside_are_refused():
    with pytest.raises(InputError, match="false_positive_rate"):
        true_positive_rate_bound(SAMPLED, noise_multiplier=1.0, adjacency="zero-out", false_positive_rate=1.5)


@pytest.mark.parametrize(("copies", "probability"), [(10, 0.128), (100, 0.0128)])
def test_curve_where_delta_is_all_but_one(copies, probability):
    m = PoissonSampling(contribution_bound=copies, sampling_probability=probability, iterations=100)
    noise = calibrate(m, epsilon=64.0, delta=1e-6, adjacency="zero-out")
    claim = {"noise_multiplier": noise, "adjacency": "replace"}
    deltas = epsilon_curve(m, epsilons=[0.0, 1.0, 20.0, 64.0, 130.0], **claim)
    assert (np.diff(deltas) <= 0).all()
    assert deltas[0] == 1.0
    assert deltas[-1] < 1e-6
    assert true_positive_rate_bound(m, false_positive_rate=0.01, **claim) <= 1.0
    assert gaussian_dp(m, **claim).mu == math.inf
    with pytest.raises(UncertifiableError, match="protects nobody"):
        gaussian_epsilon(math.inf, 1e-6)


def test_uncertified_points_take_their_neighbours():
    m = PoissonSampling(contribution_bound=1, sampling_probability=1e-9, iterations=10**6)
    curve = {"noise_multiplier": 0.5, "adjacency": "zero-out"}
    deltas = epsilon_curve(m, epsilons=[50.0, 0.0, 5.0, 1.0], **curve)
    assert deltas[1] > deltas[3] == deltas[2] > deltas[0] > 0  # 5 cannot be certified: 1 can
    assert epsilon_curve(m, epsilons=[5.0], **curve).tolist() == [1.0]
