import numpy as np
import pytest
from scipy.stats import binom, norm

from coowned.accounting.calculators import epsilon_curve
from coowned.audit.claims import USERS, MechanismClaim
from coowned.errors import InputError
from coowned.mechanism.banded_strategy import BandedStrategy
from coowned.mechanism.cyclic_poisson import CyclicPoisson
from coowned.mechanism.min_separation import MinSeparation
from coowned.mechanism.poisson_sampling import PoissonSampling
from coowned.mechanism.random_allocation import RandomAllocation

POISSON = PoissonSampling(contribution_bound=2, sampling_probability=0.1, iterations=10, batch_size=8)
SCHEDULE = MinSeparation(contribution_bound=3, min_separation=3, num_bands=3, iterations=10, batch_size=4)
CYCLIC = CyclicPoisson(
    contribution_bound=2, iterations=10, num_groups=3, num_bands=3, group_probabilities=(0.25, 0.1, 0.5), batch_size=4
)
ALLOCATION = RandomAllocation(
    contribution_bound=1, rounds_per_epoch=3, iterations=10, num_groups=2, num_bands=2, batch_size=4
)
MECHANISMS = {"poisson": POISSON, "schedule": SCHEDULE, "cyclic": CYCLIC, "allocation": ALLOCATION}


@pytest.mark.parametrize("adjacency", ["zero-out", "replace"])
@pytest.mark.parametrize("noise_multiplier", [0.02, 1.3])  # the first needs logarithms: exp(1 / 0.02^2) is too large
def test_log_ratio_is_that_of_the_densities(adjacency, noise_multiplier):
    mechanism = PoissonSampling(contribution_bound=3, sampling_probability=0.2, iterations=2)
    claim = MechanismClaim(mechanism=mechanism, noise_multiplier=noise_multiplier, adjacency=adjacency)
    observed = np.random.default_rng(1).normal(1.0, 1.0, size=(2, 30))
    weights = binom.logpmf(np.arange(4), 3, 0.2)[:, None, None]
    centers = np.arange(4)[:, None, None]

    def density(sign):
        return np.logaddexp.reduce(weights + norm.logpdf(observed, sign * centers, noise_multiplier)).sum(axis=0)

    without = norm.logpdf(observed, 0, noise_multiplier).sum(axis=0) if adjacency == "zero-out" else density(-1)
    assert claim.log_ratio(observed, "steady") == pytest.approx(density(1) - without, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("adjacency", ["zero-out", "replace"])
@pytest.mark.parametrize("noise_multiplier", [0.02, 1.3])
def test_log_ratio_of_random_allocation(adjacency, noise_multiplier):
    """An epoch of three rounds and one that ends after two, all ways to draw a round written out."""
    mechanism = RandomAllocation(contribution_bound=1, rounds_per_epoch=3, iterations=5)
    claim = MechanismClaim(mechanism=mechanism, noise_multiplier=noise_multiplier, adjacency=adjacency)
    observed = np.random.default_rng(1).normal(0.5, 1.0, size=(5, 30))

    def density(sign):
        drawn = [np.eye(3)[i] for i in range(3)]
        ways = [np.concatenate([first, second[:2]]) for first in drawn for second in drawn]
        logs = [norm.logpdf(observed, sign * way[:, None], noise_multiplier).sum(axis=0) for way in ways]
        return np.logaddexp.reduce(logs) - np.log(9)

    without = norm.logpdf(observed, 0, noise_multiplier).sum(axis=0) if adjacency == "zero-out" else density(-1)
    assert claim.log_ratio(observed, "steady") == pytest.approx(density(1) - without, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("name", MECHANISMS)
def test_log_ratio_has_mean_one(name, user):
    """The expectation of exp(ratio) without the user is 1; 5 standard errors (P < 1e-6)."""
    claim = MechanismClaim(mechanism=MECHANISMS[name], noise_multiplier=3.0, adjacency="zero-out")
    white = 3.0 * np.random.default_rng(2).normal(size=(claim.iterations, 50_000))
    noise = np.linalg.solve(np.eye(claim.iterations) if claim.strategy is None else claim.strategy.matrix(), white)
    ratios = np.exp(claim.log_ratio(noise, user))
    assert abs(ratios.mean() - 1) < 5 * ratios.std() / np.sqrt(len(ratios))
    assert ratios.std() > 0.01


def test_deltas_are_upper_bounds():
    claim = MechanismClaim(mechanism=SCHEDULE, noise_multiplier=2.0, adjacency="replace")
    mu = 2 * np.sqrt(3) / 2.0
    points = np.array([0.0, 0.5, 2.0])
    exact = norm.cdf(mu / 2 - points / mu) - np.exp(points) * norm.cdf(-mu / 2 - points / mu)
    assert (claim.deltas(points) >= exact).all()
    assert claim.deltas(points) == pytest.approx(exact, rel=1e-6)
    own = epsilon_curve(SCHEDULE, noise_multiplier=2.0, adjacency="replace", epsilons=points.tolist())
    assert (claim.deltas(points) == own).all()


def test_participations_stay_within_what_was_accounted_for():
    strategy = BandedStrategy(num_bands=4, iterations=12)
    squares = strategy.column_norms() ** 2
    full = MinSeparation(contribution_bound=3, min_separation=4, num_bands=4, iterations=12)
    claim = MechanismClaim(mechanism=full, noise_multiplier=1.0, adjacency="zero-out")
    assert claim.worst_user.rounds.tolist() == [0, 4, 8]
    late = np.sqrt(2 + squares[10]) * (1 + 1e-12)
    for accounted, expected in [(late, [0, 4, 10]), (np.sqrt(2.0) + 1e-9, [0, 4]), (1.2, [0])]:
        mechanism = MinSeparation(
            contribution_bound=3, min_separation=4, num_bands=4, iterations=12, sensitivity=float(accounted)
        )
        rounds = MechanismClaim(mechanism=mechanism, noise_multiplier=1.0, adjacency="zero-out").worst_user.rounds
        assert len(rounds) == len(expected)
        assert np.sqrt(squares[rounds].sum()) <= accounted * (1 + 1e-9)
    tiny = MinSeparation(contribution_bound=1, min_separation=4, num_bands=4, iterations=12, sensitivity=0.01)
    with pytest.raises(InputError, match="sensitivity"):
        _ = MechanismClaim(mechanism=tiny, noise_multiplier=1.0, adjacency="zero-out").worst_user.rounds
