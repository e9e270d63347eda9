"""Where every user is in one copy, cyclic DP-MF is jax_privacy's amplified BandMF: the same event, the same noise."""

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

from coowned import AttributionGraph, CyclicGroups, CyclicPoisson, certify
from coowned.accounting.calculators import epsilon

CASES = [  # noise multiplier, sampling probability, iterations, groups, delta
    (1.0, 0.08, 1000, 8, 1e-6),
    (2.0, 0.3, 503, 16, 1e-8),
    (0.8, 0.02, 300, 3, 1e-6),
]


@pytest.mark.peers
@pytest.mark.parametrize(("noise", "probability", "iterations", "groups", "delta"), CASES)
def test_one_copy_is_amplified_banded_matrix_factorization(noise, probability, iterations, groups, delta):
    from jax_privacy.experimental.accounting import amplified_bandmf_event

    event = amplified_bandmf_event(noise, iterations, num_bands=groups, sampling_prob=probability)
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, 1e-4)
    theirs = accountant.compose(event).get_epsilon(delta)
    ours = epsilon(
        CyclicPoisson(
            contribution_bound=1,
            sampling_probability=probability,
            iterations=iterations,
            num_groups=groups,
            num_bands=groups,
        ),
        noise_multiplier=noise,
        delta=delta,
        adjacency="zero-out",
    )
    assert ours == pytest.approx(theirs, rel=2e-3)


@pytest.mark.peers
def test_groups_of_single_users_have_the_same_event():
    """From a graph: 4 groups of 25 users with an example each, batches of 5, so that p = 1/5 in every 4th step."""
    from jax_privacy.experimental.accounting import amplified_bandmf_event

    graph = AttributionGraph.from_users_per_example([[user] for user in range(100)])
    certificate = certify(graph, CyclicGroups(num_groups=4, contribution_bound=1).select(graph))
    mechanism = CyclicPoisson.from_certificate(certificate, batch_size=5, iterations=50)
    event = amplified_bandmf_event(1.5, 50, num_bands=4, sampling_prob=0.2)
    (steps,) = mechanism.user_steps(1.5)
    assert event == dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(steps.probability, dp_accounting.GaussianDpEvent(steps.noise_multiplier)),
        steps.repetitions,
    )
    assert steps.copies == 1
