"""A claim is made only where the certificate covers the mechanism."""

import dataclasses

import pytest

from coowned.accounting.agreement import check_agreement
from coowned.attribution.graph import AttributionGraph
from coowned.certificate import certify
from coowned.errors import InputError, UncertifiableError
from coowned.mechanism.sampling import CyclicPoisson, MinSeparation, PoissonSampling
from coowned.selection.selector import Schedule, Selection


def test_every_disagreement_is_refused(greedy_certificate, schedule_certificate, group_certificate):
    poisson = PoissonSampling.from_certificate(greedy_certificate, batch_size=64, iterations=10)
    separated = MinSeparation.from_certificate(schedule_certificate)
    cyclic = CyclicPoisson.from_certificate(group_certificate, batch_size=1, iterations=8)
    for certificate, mechanism in (
        (greedy_certificate, poisson),
        (schedule_certificate, separated),
        (group_certificate, cyclic),
    ):
        check_agreement(certificate, mechanism)
    wrong = [
        (greedy_certificate, dataclasses.replace(poisson, contribution_bound=2)),  # a user in 3 copies
        (schedule_certificate, poisson),  # a schedule has no coins
        (greedy_certificate, MinSeparation(contribution_bound=3, min_separation=2, num_bands=2, iterations=10)),
        (schedule_certificate, dataclasses.replace(separated, min_separation=4)),
        (schedule_certificate, dataclasses.replace(separated, min_separation=4, num_bands=4)),
        (schedule_certificate, dataclasses.replace(separated, iterations=7)),
        (schedule_certificate, dataclasses.replace(separated, contribution_bound=1)),
        (greedy_certificate, dataclasses.replace(cyclic, contribution_bound=3, group_bounds=None)),  # no groups proven
        (
            group_certificate,
            CyclicPoisson(contribution_bound=2, sampling_probability=0.5, iterations=8, num_groups=1, num_bands=1),
        ),
        (group_certificate, dataclasses.replace(cyclic, group_bounds=(1, 2))),  # group 0 has a user in 2 copies
    ]
    for certificate, mechanism in wrong:
        with pytest.raises(UncertifiableError):
            check_agreement(certificate, mechanism)


def test_more_than_needed_is_allowed(greedy_certificate):
    mechanism = PoissonSampling.from_certificate(greedy_certificate, batch_size=64, iterations=10)
    check_agreement(greedy_certificate, dataclasses.replace(mechanism, contribution_bound=5))


def test_two_copies_of_a_user_in_one_batch():
    graph = AttributionGraph.from_users_per_example([[0], [0], [1]])
    certificate = certify(graph, Schedule.from_batches(graph, [[0, 1], [2, 2]]))
    with pytest.raises(UncertifiableError, match="two copies of one user"):
        MinSeparation.from_certificate(certificate)
    with pytest.raises(UncertifiableError, match="two copies of one user"):
        check_agreement(certificate, MinSeparation(contribution_bound=2, min_separation=1, num_bands=1, iterations=2))


def test_nobody_to_protect():
    graph = AttributionGraph.from_users_per_example([[], []], num_users=1)
    certificate = certify(graph, Selection.from_copies(graph, [1, 1]))
    with pytest.raises(UncertifiableError, match="nobody"):
        PoissonSampling.from_certificate(certificate, batch_size=1, iterations=1)
    with pytest.raises(UncertifiableError, match="nobody"):
        check_agreement(certificate, PoissonSampling(contribution_bound=1, sampling_probability=0.5, iterations=1))


def test_probability_counts_copies():
    graph = AttributionGraph.from_users_per_example([[0], [1]])
    certificate = certify(graph, Selection.from_copies(graph, [3, 1]))
    mechanism = PoissonSampling.from_certificate(certificate, batch_size=2, iterations=5)
    assert (mechanism.contribution_bound, mechanism.sampling_probability, mechanism.batch_size) == (3, 0.5, 2)
    with pytest.raises(InputError, match="at most the size of S"):
        PoissonSampling.from_certificate(certificate, batch_size=5, iterations=5)


def test_groups_have_their_own_probabilities(group_certificate):
    mechanism = CyclicPoisson.from_certificate(group_certificate, batch_size=1, iterations=8)
    assert mechanism.group_probabilities == (0.5, 1.0)
    assert mechanism.group_bounds == (2, 1)


def test_what_is_not_a_mechanism(greedy_certificate):
    with pytest.raises(InputError, match="not a mechanism"):
        check_agreement(greedy_certificate, "poisson")  # type: ignore[arg-type]
