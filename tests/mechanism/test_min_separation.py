"""MinSeparation refuses what its accounting does not cover."""

import dataclasses

import pytest

from coowned import AttributionGraph, MinSeparation, Schedule, certify
from coowned.errors import InputError, UncertifiableError


def test_more_bands_than_separation_is_refused():
    with pytest.raises(InputError, match="num_bands"):
        MinSeparation(contribution_bound=2, min_separation=3, num_bands=4, iterations=100)
    assert MinSeparation(contribution_bound=2, min_separation=4, num_bands=4, iterations=100).num_bands == 4


def test_sensitivity_is_the_root_of_the_participations():
    plain = MinSeparation(contribution_bound=9, min_separation=5, num_bands=5, iterations=100)
    assert [plain.sensitivity_of(k) for k in (1, 4, 9)] == [1.0, 2.0, 3.0]
    longer = dataclasses.replace(plain, max_column_norm=1.5)
    assert longer.sensitivity_of(4) == 3.0
    # Only the total is known: fewer participations cannot be promised less.
    total_only = dataclasses.replace(plain, sensitivity=4.0)
    assert [total_only.sensitivity_of(k) for k in (1, 9)] == [4.0, 4.0]
    both = dataclasses.replace(plain, sensitivity=2.9, max_column_norm=1.0)
    assert [both.sensitivity_of(k) for k in (1, 9)] == [1.0, 2.9]
    assert both.for_copies(4).sensitivity_of(4) == 2.0


def test_two_copies_of_a_user_in_one_batch():
    graph = AttributionGraph.from_users_per_example([[0], [0], [1]])
    certificate = certify(graph, Schedule.from_batches(graph, [[0, 1], [2, 2]]))
    with pytest.raises(UncertifiableError, match="two copies of one user"):
        MinSeparation.from_certificate(certificate)
    mechanism = MinSeparation(contribution_bound=2, min_separation=1, num_bands=1, iterations=2)
    with pytest.raises(UncertifiableError, match="two copies of one user"):
        mechanism.check_certificate(certificate)


def test_one_batch_and_one_band_in_words():
    settings = {"contribution_bound": 2, "iterations": 4, "num_bands": 1}
    one = MinSeparation(min_separation=1, **settings).describe()
    assert one.startswith("a fixed schedule in which every batch holds at most one copy of each user, with noise ")
    assert "correlated over 1 band (" in one
    three = dict(settings, num_bands=3)
    several = MinSeparation(min_separation=3, **three).describe()
    assert "any 3 consecutive batches hold at most one copy of each user" in several
    assert "over 3 bands (" in several
