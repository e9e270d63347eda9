"""The held-out part: from the graph alone, nobody in it too often."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coowned import AttributionGraph, Greedy, certify
from coowned.errors import InputError
from coowned.selection.held_out import KEPT, select_held_out
from coowned.selection.user_bounds import UserBounds

graphs = st.lists(st.lists(st.integers(0, 9), max_size=3, unique=True), min_size=1, max_size=40)


@given(graphs, st.integers(0, 3))
def test_the_default_bound_keeps_enough(rows, seed):
    graph = AttributionGraph.from_users_per_example(rows, num_users=10)
    kept = [Greedy(contribution_bound=bound).select(graph, seed=seed).size for bound in range(1, 42)]
    found = select_held_out(graph, seed=seed)
    bound = certify(graph, found).contribution_bound
    assert found.size >= KEPT * kept[-1]
    if bound > 1 and found.size < kept[-1]:
        assert kept[bound - 2] < KEPT * kept[-1]


@given(graphs, st.integers(1, 4))
def test_nobody_is_in_more_copies_than_asked_for(rows, bound):
    graph = AttributionGraph.from_users_per_example(rows, num_users=10)
    assert certify(graph, select_held_out(graph, contribution_bound=bound)).contribution_bound <= bound


@given(graphs, st.integers(0, 4) | st.none(), st.dictionaries(st.integers(0, 9), st.integers(0, 4)), st.integers(1, 3))
def test_nobody_is_in_more_copies_than_their_own_bound(rows, bound, own, others):
    graph = AttributionGraph.from_users_per_example(rows, num_users=10)
    bounds = UserBounds.of(own, others=others)
    found = select_held_out(graph, contribution_bound=bound or None, user_bounds=bounds)
    certificate = certify(graph, found)  # refuses a user above their own bound
    assert certificate.contribution_bound <= max(bounds.tiers.values())
    assert not bound or certificate.contribution_bound <= bound
    assert certificate.tiers.digest == bounds.digest
    for user in range(10):
        copies = sum(int(copies) for copies, row in zip(found.copies, rows, strict=True) if user in row)
        assert copies <= min(own.get(user, others), bound or len(rows))
    kept = Greedy(contribution_bound=others, contribution_bounds=own).select(graph).size
    assert bound or found.size >= KEPT * kept


def test_an_impossible_bound_is_refused():
    with pytest.raises(InputError):
        select_held_out(AttributionGraph.from_users_per_example([[0]]), contribution_bound=0)
