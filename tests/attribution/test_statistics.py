"""What `coowned inspect` prints, against plain recounts."""

import itertools
import statistics as plain

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from coowned import AttributionGraph, GraphStatistics
from coowned.attribution.statistics import HeavyUsers, heavy_users_advice

graphs = st.lists(st.lists(st.integers(0, 12), max_size=20), max_size=12)


def classes(values):
    """Counts by the classes 0, 1, 2, 3, 4, 5-8, 9-16, …"""
    counts = {}
    for value in values:
        begin = value
        if value > 4:
            begin = 5
            while value > 2 * begin - 2:
                begin = 2 * begin - 1
        counts[begin] = counts.get(begin, 0) + 1
    return sorted(counts.items())


def components(rows, num_users):
    groups = [{user} for user in range(num_users)]
    for row in rows:
        joined = set().union(*[group for group in groups if group & set(row)]) if row else set()
        groups = [group for group in groups if not group & joined] + ([joined] if joined else [])
    return groups


@given(graphs)
def test_counts_equal_a_recount(rows):
    rows = [sorted(set(row)) for row in rows]
    found = GraphStatistics.of(AttributionGraph.from_users_per_example(rows, num_users=13))
    held = [sum(user in row for row in rows) for user in range(13)]
    sizes = [len(row) for row in rows]
    assert (found.num_examples, found.num_users, found.num_pairs) == (len(rows), 13, sum(sizes))
    assert found.num_examples_without_users == sizes.count(0)
    assert found.num_users_without_examples == held.count(0)
    assert found.mean_users_per_example == pytest.approx(plain.fmean(sizes) if sizes else 0)
    assert found.median_users_per_example == (plain.median(sizes) if sizes else 0)
    assert found.max_users_per_example == max(sizes, default=0)
    assert found.mean_examples_per_user == pytest.approx(plain.fmean(held))
    assert (found.median_examples_per_user, found.max_examples_per_user) == (plain.median(held), max(held))
    assert found.users_per_example_histogram == classes(sizes)
    assert found.examples_per_user_histogram == classes(held)
    ranked = sorted(range(13), key=lambda user: (-held[user], user))[:10]
    assert found.heaviest_users == [(user, held[user]) for user in ranked if held[user]]
    groups = components(rows, 13)
    assert found.num_components == len(groups)
    assert found.largest_component_users == max(map(len, groups))
    assert found.largest_component_examples == max(sum(bool(set(row) & group) for row in rows) for group in groups)
    assert set(found.to_dict()) >= {"num_examples", "blocked"}


@given(st.lists(st.sets(st.integers(0, 3), max_size=3), max_size=8), st.integers(1, 3))
def test_blocked_is_a_lower_bound(rows, bound):
    graph = AttributionGraph.from_users_per_example(rows, num_users=4)
    largest = 0
    for chosen in itertools.product([False, True], repeat=len(rows)):
        picked = [row for row, taken in zip(rows, chosen, strict=True) if taken]
        if all(sum(user in row for row in picked) <= bound for user in range(4)):
            largest = max(largest, len(picked))
    for users in ([0], [1, 3], [0, 1, 2, 3], []):
        blocked = HeavyUsers.of(graph, np.array(users, dtype=int)).blocked(bound)
        assert len(blocked) == len(users)
        assert all(0 <= out <= len(rows) - largest for out in blocked)


def test_blocked_by_one_heavy_user():
    rows = [[0, user] for user in range(1, 101)] + [[]]
    found = GraphStatistics.of(AttributionGraph.from_users_per_example(rows))
    # Light users at the end of the list of ten must not weaken the bound.
    assert found.blocked == {1: 99, 3: 97, 10: 90}


def test_empty_graph():
    found = GraphStatistics.of(AttributionGraph.from_users_per_example([]))
    assert (found.num_components, found.largest_component_examples, found.blocked) == (0, 0, {1: 0, 3: 0, 10: 0})
    assert (found.heaviest_users, found.users_per_example_histogram, found.mean_users_per_example) == ([], [], 0.0)


def test_unprotected_users_are_counted():
    graph = AttributionGraph.from_users_per_example([[0, 1], [1]]).without_users([1])
    assert GraphStatistics.of(graph).num_unprotected_users == 1
    assert GraphStatistics.of(graph).num_examples_without_users == 1


def test_advice_on_heavy_users():
    owner = [[0, 1 + i % 50] for i in range(100)]  # one user in everything
    advice = heavy_users_advice(AttributionGraph.from_users_per_example(owner), 3)
    assert advice.startswith("1 user keeps 97 of 100 examples out at a contribution bound of 3. ")
    assert "--unprotected FILE" in advice
    assert "--attribute-to" in advice
    assert "raise" not in advice
    two = [[i % 2, 2 + i] for i in range(100)]
    assert heavy_users_advice(AttributionGraph.from_users_per_example(two), 1).startswith("2 users keep 98 of 100 ")
    assert heavy_users_advice(AttributionGraph.from_users_per_example(two), 30) is None
    assert heavy_users_advice(AttributionGraph.from_users_per_example([[i] for i in range(100)]), 1) is None
    assert heavy_users_advice(AttributionGraph.from_users_per_example([]), 1) is None
