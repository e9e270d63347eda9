"""PoissonSampling refuses what its accounting does not cover."""

import dataclasses

import pytest

from coowned import AttributionGraph, Greedy, PoissonSampling, Selection, certify
from coowned.errors import InputError, UncertifiableError


@pytest.mark.parametrize(
    "fields",
    [
        {"contribution_bound": 0},
        {"contribution_bound": 2.5},
        {"sampling_probability": 0.0},
        {"sampling_probability": 1.0001},
        {"sampling_probability": float("nan")},
        {"iterations": 0},
        {"iterations": True},
    ],
)
def test_poisson_refuses_bad_fields(fields):
    good = {"contribution_bound": 3, "sampling_probability": 0.1, "iterations": 10}
    with pytest.raises(InputError, match=next(iter(fields))):
        PoissonSampling(**{**good, **fields})


def test_mechanisms_are_frozen_and_hashable():
    m = PoissonSampling(contribution_bound=3, sampling_probability=0.1, iterations=10)
    with pytest.raises(dataclasses.FrozenInstanceError):
        m.iterations = 20  # pyright: ignore[reportAttributeAccessIssue]
    assert len({m, dataclasses.replace(m), m.for_copies(1)}) == 2
    with pytest.raises(InputError, match="copies"):
        m.for_copies(4)


def test_probability_counts_copies():
    graph = AttributionGraph.from_users_per_example([[0], [1]])
    certificate = certify(graph, Selection.from_copies(graph, [3, 1]))
    mechanism = PoissonSampling.from_certificate(certificate, batch_size=2, iterations=5)
    assert (mechanism.contribution_bound, mechanism.sampling_probability, mechanism.batch_size) == (3, 0.5, 2)
    with pytest.raises(InputError, match="at most the size of S"):
        PoissonSampling.from_certificate(certificate, batch_size=5, iterations=5)


def test_more_than_needed_is_allowed(greedy_certificate):
    mechanism = PoissonSampling.from_certificate(greedy_certificate, batch_size=64, iterations=10)
    dataclasses.replace(mechanism, contribution_bound=5).check_certificate(greedy_certificate)


def test_nobody_to_protect():
    graph = AttributionGraph.from_users_per_example([[], []], num_users=1)
    certificate = certify(graph, Selection.from_copies(graph, [1, 1]))
    with pytest.raises(UncertifiableError, match="nobody"):
        PoissonSampling.from_certificate(certificate, batch_size=1, iterations=1)
    with pytest.raises(UncertifiableError, match="nobody"):
        PoissonSampling(contribution_bound=1, sampling_probability=0.5, iterations=1).check_certificate(certificate)
    unprotected = PoissonSampling.from_certificate(certificate, batch_size=1, iterations=1, protects=False)
    assert unprotected.contribution_bound == 1


def test_a_batch_larger_than_s_names_what_helps():
    """A bound higher by one adds at most a copy for each user at the bound, which is little where one is in all."""
    alone = AttributionGraph.from_users_per_example([[i // 4] for i in range(100)])
    spread = certify(alone, Greedy(contribution_bound=1).select(alone))
    with pytest.raises(InputError, match=r"\(25 copies\), not 50; reduce it, or raise the bound$"):
        PoissonSampling.from_certificate(spread, batch_size=50, iterations=10)
    owner = AttributionGraph.from_users_per_example([[0, 1 + i] for i in range(100)])
    hub = certify(owner, Greedy(contribution_bound=1).select(owner))
    with pytest.raises(InputError, match=r"reduce it, or exclude users who are in most examples .*--unprotected FILE"):
        PoissonSampling.from_certificate(hub, batch_size=50, iterations=10)
