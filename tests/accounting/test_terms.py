"""What a claim may be asked for, and what is said of a delta that is too large."""

import pytest

from coowned.accounting.terms import ADJACENCIES, OTHER_ADJACENCY, check_terms, delta_warnings, refuse_large_delta
from coowned.errors import InputError


def test_every_adjacency_has_another():
    assert {OTHER_ADJACENCY[OTHER_ADJACENCY[name]] for name in ADJACENCIES} == set(ADJACENCIES) == set(OTHER_ADJACENCY)


@pytest.mark.parametrize(
    "wrong",
    [
        {"adjacency": "add-remove"},
        {"adjacency": "zero-out", "delta": 0.0},
        {"adjacency": "zero-out", "delta": 1.0},
        {"adjacency": "zero-out", "epsilon": 0.0},
        {"adjacency": "zero-out", "noise_multiplier": float("inf")},
    ],
)
def test_impossible_terms_are_refused(wrong):
    with pytest.raises(InputError):
        check_terms(**wrong)


def test_one_warning_at_most():
    assert delta_warnings(1e-5, num_users=100_000) == ()
    (by_users,) = delta_warnings(1.01e-5, num_users=100_000)
    assert "above 1 / (users" in by_users
    (by_size,) = delta_warnings(1.01e-5, num_users=10)
    assert "above 1e-05" in by_size


def test_refusal_begins_at_a_tenth():
    refuse_large_delta(0.0999, allow_large_delta=False)
    refuse_large_delta(0.1, allow_large_delta=True)
    with pytest.raises(InputError, match="1 person in 10"):
        refuse_large_delta(0.1, allow_large_delta=False)
