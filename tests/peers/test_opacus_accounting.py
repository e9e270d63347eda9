"""Where one user is in one copy, our epsilon is that of Opacus' accountants, up to their own slack."""

import pytest

from coowned import PoissonSampling
from coowned.accounting.calculators import epsilon

CASES = [  # noise multiplier, sampling probability, iterations, delta
    (1.0, 0.01, 1000, 1e-6),
    (0.8, 0.005, 2000, 1e-6),
    (2.0, 0.05, 300, 1e-7),
    (1.5, 0.02, 1500, 1e-6),
]


@pytest.mark.peers
@pytest.mark.parametrize(("noise", "probability", "iterations", "delta"), CASES)
def test_one_copy_agrees_with_the_prv_accountant(noise, probability, iterations, delta):
    from opacus.accountants import PRVAccountant

    peer = PRVAccountant()
    peer.history = [(noise, probability, iterations)]
    theirs = peer.get_epsilon(delta=delta, eps_error=0.01)  # an upper bound within 0.01 of their estimate
    mechanism = PoissonSampling(contribution_bound=1, sampling_probability=probability, iterations=iterations)
    ours = epsilon(mechanism, noise_multiplier=noise, delta=delta, adjacency="zero-out")
    assert ours == pytest.approx(theirs, abs=0.025)


@pytest.mark.peers
@pytest.mark.parametrize(("noise", "probability", "iterations", "delta"), CASES)
def test_never_above_the_renyi_accountant(noise, probability, iterations, delta):
    from opacus.accountants import RDPAccountant

    peer = RDPAccountant()
    peer.history = [(noise, probability, iterations)]
    mechanism = PoissonSampling(contribution_bound=1, sampling_probability=probability, iterations=iterations)
    ours = epsilon(mechanism, noise_multiplier=noise, delta=delta, adjacency="zero-out")
    assert ours <= peer.get_epsilon(delta=delta)
