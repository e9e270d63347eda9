"""Splits by a hash of the id."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coowned import AttributionGraph, Greedy, certify
from coowned.content.splits import KEPT, select_held_out, split_examples
from coowned.errors import InputError
from coowned.selection.user_bounds import UserBounds


def test_split_depends_on_the_id_alone():
    ids = [f"m{number}" for number in range(500)]
    graph = AttributionGraph.from_users_per_example([[0]] * 500, example_ids=ids)
    order = np.random.default_rng(0).permutation(500)
    shuffled = graph.subgraph(order)
    for name, rows in split_examples(graph).items():
        moved = {ids[order[row]] for row in split_examples(shuffled)[name]}
        assert moved == {ids[row] for row in rows}
    part = graph.subgraph(np.arange(250))
    assert set(split_examples(part)["test"]) <= set(split_examples(graph)["test"])


def test_numbers_and_text_are_the_same_id():
    numbers = AttributionGraph.from_users_per_example([[0]] * 300)
    text = AttributionGraph.from_users_per_example([[0]] * 300, example_ids=[str(number) for number in range(300)])
    for name, rows in split_examples(numbers).items():
        assert np.array_equal(rows, split_examples(text)[name])


@pytest.mark.parametrize("fractions", [(0.8, 0.1, 0.1), (1.0, 0.0, 0.0), (0.5, 0.5, 0.0), (0.3, 0.2, 0.5)])
def test_split_sizes(fractions):
    """Six standard deviations of a binomial of 20000: false alarm below 1e-8 for each."""
    graph = AttributionGraph.from_users_per_example([[0]] * 20_000)
    parts = split_examples(graph, fractions)
    assert np.array_equal(np.sort(np.concatenate(list(parts.values()))), np.arange(20_000))
    for rows, fraction in zip(parts.values(), fractions, strict=True):
        spread = (20_000 * fraction * (1 - fraction)) ** 0.5
        assert abs(len(rows) - 20_000 * fraction) <= 6 * spread


@pytest.mark.parametrize("wrong", [(0.8, 0.2), (0.8, 0.1, 0.2), (0.0, 0.5, 0.5), (1.2, -0.1, -0.1), ("a", 0, 0)])
def test_bad_fractions(wrong):
    graph = AttributionGraph.from_users_per_example([[0]])
    with pytest.raises(InputError, match="splits"):
        split_examples(graph, wrong)


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
