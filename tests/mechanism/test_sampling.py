"""Mechanisms refuse what their accounting does not cover, when they are made."""

import dataclasses
import subprocess
import sys

import pytest

from coowned.errors import InputError
from coowned.mechanism.sampling import CyclicPoisson, MinSeparation, PoissonSampling


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


def test_mechanisms_are_frozen_and_hashable():
    m = PoissonSampling(contribution_bound=3, sampling_probability=0.1, iterations=10)
    with pytest.raises(dataclasses.FrozenInstanceError):
        m.iterations = 20  # pyright: ignore[reportAttributeAccessIssue]
    assert len({m, dataclasses.replace(m), m.for_copies(1)}) == 2
    with pytest.raises(InputError, match="copies"):
        m.for_copies(4)


def test_accounting_needs_no_jax():
    code = (
        "import sys; import coowned.mechanism.sampling, coowned.accounting.calculators;"
        "sys.exit(any(name.split('.')[0] in ('jax', 'jax_privacy') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
