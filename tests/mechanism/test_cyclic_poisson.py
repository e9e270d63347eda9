"""CyclicPoisson refuses what its accounting does not cover."""

import dataclasses

import pytest

from coowned import CyclicPoisson
from coowned.errors import InputError


def test_more_bands_than_groups_is_refused():
    with pytest.raises(InputError, match="num_groups"):
        CyclicPoisson(contribution_bound=2, sampling_probability=0.1, iterations=10, num_groups=3, num_bands=4)


def test_rounds_of_all_groups_are_all_iterations():
    for iterations in (1, 5, 12, 13):
        m = CyclicPoisson(
            contribution_bound=1, sampling_probability=0.1, iterations=iterations, num_groups=4, num_bands=2
        )
        rounds = [m.rounds_of(group) for group in range(4)]
        assert rounds == [len(range(group, iterations, 4)) for group in range(4)]


def test_groups_have_their_own_numbers():
    m = CyclicPoisson(
        contribution_bound=3,
        iterations=10,
        num_groups=2,
        num_bands=2,
        group_probabilities=[0.1, 0.4],
        group_bounds=[3, 1],
    )
    assert (m.sampling_probability, m.probability_of(0), m.bound_of(1)) == (0.4, 0.1, 1)
    assert m.for_copies(2).group_bounds == (2, 1)
    assert m.for_copies(2, group=0).group_bounds == (2, 0)
    with pytest.raises(InputError, match="copies"):
        m.for_copies(2, group=1)
    for wrong in (
        {"group_probabilities": (0.1,)},
        {"group_probabilities": (0.1, 1.4)},
        {"sampling_probability": 0.5},
        {"group_bounds": (2, 1)},
        {"group_bounds": (4, 1)},
        {"group_probabilities": None, "sampling_probability": None},
    ):
        with pytest.raises(InputError):
            dataclasses.replace(m, **wrong)


def test_groups_have_their_own_probabilities(group_certificate):
    mechanism = CyclicPoisson.from_certificate(group_certificate, batch_size=1, iterations=8)
    assert mechanism.group_probabilities == (0.5, 1.0)
    assert mechanism.group_bounds == (2, 1)
