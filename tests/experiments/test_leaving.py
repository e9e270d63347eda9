"""What changes when one person leaves, against selecting again."""

import numpy as np
import pytest
from experiments.framework.leaving import leave, walk_of
from hypothesis import given, settings
from hypothesis import strategies as st

from coowned import Greedy
from coowned.progress import silent
from coowned.selection.order import ordered_rows
from coowned.testing.strategies import attribution_graphs

graphs = attribution_graphs(max_examples=12, max_users=6, with_ids=False)


def first_of_each(graph, order, bound):
    """Takes an example that is among the first of each of its users, by sorting every user's examples."""
    rank = np.empty(graph.num_examples, np.int64)
    rank[order] = np.arange(len(order))
    indptr, examples = graph.by_user
    late = np.zeros(graph.num_examples, bool)
    for user in range(graph.num_users):
        own = examples[indptr[user] : indptr[user + 1]]
        late[own[np.argsort(rank[own])[bound:]]] = True
    return (~late & (graph.users_per_example > 0)).astype(np.int64)


@pytest.mark.parametrize("first_ones", [False, True])
@settings(max_examples=100, deadline=None)
@given(graph=graphs, bound=st.integers(1, 3), ties=st.sampled_from(["hash", "input"]))
def test_leaving_equals_selecting_again(first_ones, graph, bound, ties):
    def select(graph):
        order = ordered_rows(graph, seed=0, ties=ties, progress=silent).attributed
        if first_ones:
            return first_of_each(graph, order, bound)
        return Greedy(contribution_bound=bound, ties=ties).select(graph).copies

    order = ordered_rows(graph, seed=0, ties=ties, progress=silent).attributed
    people = np.arange(graph.num_users)
    chosen, left = leave(walk_of(graph, order), bound, people, first_ones=first_ones)
    whole = select(graph)
    assert whole[order].tolist() == chosen.taken.astype(int).tolist()
    indptr, examples = graph.by_user
    for person in people:
        gone = examples[indptr[person] : indptr[person + 1]]
        rest = np.setdiff1d(np.arange(graph.num_examples), gone)
        difference = select(graph.subgraph(rest)) - whole[rest]
        assert left.own[person] == whole[gone].sum()
        assert left.changed[person] == np.abs(difference).sum()
        assert left.gained[person] == difference.sum()
