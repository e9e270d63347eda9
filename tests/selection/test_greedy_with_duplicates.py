"""Algorithm 3 against its transcription, and the check-suite."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coowned.attribution.graph import AttributionGraph
from coowned.errors import InputError
from coowned.selection.greedy import Greedy
from coowned.selection.greedy_with_duplicates import GreedyWithDuplicates
from coowned.selection.order import ordered_rows
from coowned.testing.selector_checks import check_selector
from coowned.testing.strategies import attribution_graphs


def plain_greedy_with_duplicates(graph, walk, bound):
    """Algorithm 3 of the paper: round and round, until nothing was added since x was last processed."""
    users_of = [graph.users[graph.indptr[i] : graph.indptr[i + 1]].tolist() for i in range(graph.num_examples)]
    walk = [example for example in walk if users_of[example]]
    copies = [0] * graph.num_examples
    count = [0] * graph.num_users
    since_added = 0
    place = 0
    while walk and since_added < len(walk):
        example = walk[place % len(walk)]
        place += 1
        since_added += 1
        if all(count[user] < bound for user in users_of[example]):
            copies[example] += 1
            since_added = 0
            for user in users_of[example]:
                count[user] += 1
    return copies


@settings(max_examples=200)
@given(
    graph=attribution_graphs(max_examples=30),
    bound=st.integers(1, 5) | st.just(300),
    seed=st.integers(0, 3),
    ties=st.sampled_from(["hash", "input"]),
)
def test_equals_the_paper(graph, bound, seed, ties):
    order = ordered_rows(graph, seed=seed, ties=ties, progress=lambda done, message: None)
    selection = GreedyWithDuplicates(contribution_bound=bound, ties=ties).select(graph, seed=seed)
    assert selection.copies.tolist() == plain_greedy_with_duplicates(graph, order.examples.tolist(), bound)


@pytest.mark.parametrize("ties", ["hash", "input"])
def test_check_suite(ties):
    check_selector(
        lambda bound: GreedyWithDuplicates(contribution_bound=bound, ties=ties), duplicates=True, maximal=True
    )


@given(graph=attribution_graphs(max_examples=30), bound=st.integers(1, 5))
def test_contains_greedy(graph, bound):
    once = Greedy(contribution_bound=bound).select(graph)
    often = GreedyWithDuplicates(contribution_bound=bound).select(graph)
    assert ((often.copies > 0) == (once.copies > 0)).all()


def test_equals_the_paper_on_a_larger_graph():
    rng = np.random.default_rng(0)
    rows = [rng.choice(700, size=1 + rng.integers(0, 4), replace=False).tolist() for _ in range(2000)]
    graph = AttributionGraph.from_users_per_example(rows, num_users=700)
    walk = ordered_rows(graph, seed=1, ties="hash", progress=lambda done, message: None).examples.tolist()
    for bound in (1, 3, 10):
        selection = GreedyWithDuplicates(contribution_bound=bound).select(graph, seed=1)
        assert selection.copies.tolist() == plain_greedy_with_duplicates(graph, walk, bound)


def test_unattributed():
    graph = AttributionGraph.from_users_per_example([[0], [], [1, 2], []])
    assert GreedyWithDuplicates(contribution_bound=3).select(graph).copies.tolist() == [3, 0, 3, 0]
    kept = GreedyWithDuplicates(contribution_bound=3, unattributed="keep").select(graph)
    assert kept.copies.tolist() == [3, 1, 3, 1]


def test_bad_bound():
    with pytest.raises(InputError, match="contribution_bound"):
        GreedyWithDuplicates(contribution_bound=0)
