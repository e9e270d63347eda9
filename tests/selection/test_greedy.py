"""Algorithm 2 against its transcription, and the check-suite."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coowned.attribution.graph import AttributionGraph
from coowned.errors import InputError
from coowned.selection.greedy import Greedy
from coowned.selection.order import ordered_rows
from coowned.testing.selector_checks import check_selector
from coowned.testing.strategies import attribution_graphs


def plain_greedy(graph, walk, bound):
    """Algorithm 2 of the paper."""
    chosen = []
    count = dict.fromkeys(range(graph.num_users), 0)
    for example in walk:
        users = graph.users[graph.indptr[example] : graph.indptr[example + 1]].tolist()
        if users and all(count[user] < bound for user in users):
            chosen.append(example)
            for user in users:
                count[user] += 1
    return np.bincount(np.array(chosen, int), minlength=graph.num_examples).tolist()


@settings(max_examples=200)
@given(
    graph=attribution_graphs(max_examples=30),
    bound=st.integers(1, 4) | st.sampled_from([255, 256, 65536]),
    seed=st.integers(0, 3),
    ties=st.sampled_from(["hash", "input"]),
)
def test_equals_the_paper(graph, bound, seed, ties):
    order = ordered_rows(graph, seed=seed, ties=ties, progress=lambda done, message: None)
    selection = Greedy(contribution_bound=bound, ties=ties).select(graph, seed=seed)
    assert selection.copies.tolist() == plain_greedy(graph, order.examples.tolist(), bound)


def test_equals_the_paper_on_a_larger_graph():
    """Several blocks of the kernel, and examples with more users than a block has room for."""
    rng = np.random.default_rng(0)
    rows = [rng.choice(500, size=1 + rng.integers(0, 4), replace=False).tolist() for _ in range(2000)]
    rows += [rng.choice(3000, size=2500, replace=False).tolist() for _ in range(3)]
    graph = AttributionGraph.from_users_per_example(rows, num_users=3000)
    walk = ordered_rows(graph, seed=1, ties="hash", progress=lambda done, message: None).examples.tolist()
    for bound in (1, 3, 10):
        selection = Greedy(contribution_bound=bound).select(graph, seed=1)
        assert selection.copies.tolist() == plain_greedy(graph, walk, bound)


@pytest.mark.parametrize("ties", ["hash", "input"])
def test_check_suite(ties):
    check_selector(lambda bound: Greedy(contribution_bound=bound, ties=ties), maximal=True)


def test_seed_breaks_ties():
    graph = AttributionGraph.from_users_per_example([[0]] * 100)
    taken = {int(Greedy(contribution_bound=1).select(graph, seed=seed).copies.argmax()) for seed in range(20)}
    assert len(taken) > 10
    assert Greedy(contribution_bound=1, ties="input").select(graph, seed=5).copies.argmax() == 0


def test_unattributed():
    graph = AttributionGraph.from_users_per_example([[0], [], [0, 1], []])
    assert Greedy(contribution_bound=1).select(graph).copies.tolist() == [1, 0, 0, 0]
    assert Greedy(contribution_bound=1, unattributed="keep").select(graph).copies.tolist() == [1, 1, 0, 1]
    with pytest.raises(InputError, match="2 examples have no users"):
        Greedy(contribution_bound=1, unattributed="error").select(graph)
    with pytest.raises(InputError, match=r"1 example has no users \(the first at index 1\)"):
        Greedy(contribution_bound=1, unattributed="error").select(graph.subgraph([0, 1]))
    attributed = AttributionGraph.from_users_per_example([[0], [0, 1]])
    assert Greedy(contribution_bound=1, unattributed="error").select(attributed).size == 1


def test_users_beyond_32_bits_of_labels():
    graph = AttributionGraph(
        np.array([0, 1, 2]), np.array([0, 1], np.int64), num_users=2, example_ids=None, user_keys=None
    )
    assert Greedy(contribution_bound=1).select(graph).size == 2


@pytest.mark.parametrize("bound", [0, -1, 1.5, True, None, "3", 2**31])
def test_bad_bound(bound):
    with pytest.raises(InputError, match="contribution_bound must be an integer of at least 1"):
        Greedy(contribution_bound=bound)


def test_bad_settings():
    with pytest.raises(InputError, match="ties must be one of 'hash', 'input'"):
        Greedy(contribution_bound=1, ties="random")
    with pytest.raises(InputError, match="unattributed must be one of"):
        Greedy(contribution_bound=1, unattributed="take")
