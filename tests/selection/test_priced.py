"""`Priced` against brute force, the check-suite, and its promises about threads and time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.selection.brute_force import every_selection, largest

from coowned import threads
from coowned.attribution.graph import AttributionGraph
from coowned.errors import InputError
from coowned.selection import price_search
from coowned.selection.greedy import Greedy
from coowned.selection.priced import Priced
from coowned.testing.selector_checks import check_selector, copies_per_user
from coowned.testing.strategies import attribution_graphs


def random_graph(num_examples, num_users, mean, seed):
    rng = np.random.default_rng(seed)
    sizes = np.minimum(1 + rng.poisson(mean - 1, num_examples), num_users)
    return AttributionGraph.from_users_per_example(
        [rng.choice(num_users, size, replace=False).tolist() for size in sizes], num_users=num_users
    )


@settings(max_examples=150, deadline=None)
@given(
    graph=attribution_graphs(max_examples=9, max_users=6),
    bound=st.integers(1, 3),
    unattributed=st.sampled_from(["drop", "keep"]),
    seed=st.integers(0, 3),
)
def test_bound_holds_for_every_set(graph, bound, unattributed, seed):
    selection = Priced(contribution_bound=bound, unattributed=unattributed).select(graph, seed=seed)
    kept = int((graph.users_per_example == 0).sum()) if unattributed == "keep" else 0
    optimum = largest(graph, bound, 1) + kept
    assert selection.size <= optimum <= selection.upper_bound
    assert selection.proven_optimal == (selection.size == selection.upper_bound)
    assert selection.size >= optimum - 1  # near-optimal; on graphs this small it may miss one at most


@settings(max_examples=60, deadline=None)
@given(
    graph=attribution_graphs(max_examples=5, max_users=5),
    bound=st.integers(1, 3),
    unattributed=st.sampled_from(["drop", "keep"]),
    distinct_weight=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_bound_holds_with_duplicates(graph, bound, unattributed, distinct_weight):
    selector = Priced(
        contribution_bound=bound, allow_duplicates=True, unattributed=unattributed, distinct_weight=distinct_weight
    )
    selection = selector.select(graph)
    kept = int((graph.users_per_example == 0).sum()) if unattributed == "keep" else 0
    found = [(int(copies.sum()), np.count_nonzero(copies)) for copies in every_selection(graph, bound, bound)]
    size, value = max(size for size, _ in found), max(size + distinct_weight * distinct for size, distinct in found)
    assert selection.size <= size + kept <= selection.upper_bound
    reached = selection.size - kept + distinct_weight * (selection.num_distinct - kept)
    assert value - 1 - distinct_weight <= reached <= value + 1e-9


def test_one_user_one_example_three_copies():
    """The bound with one copy an example would be 1 here, and false."""
    graph = AttributionGraph.from_users_per_example([[0]])
    selection = Priced(contribution_bound=3, allow_duplicates=True).select(graph)
    assert (selection.size, selection.upper_bound, selection.proven_optimal) == (3, 3, True)
    assert Priced(contribution_bound=3).select(graph).upper_bound == 1


@pytest.mark.parametrize("ties", ["hash", "input"])
def test_check_suite(ties):
    check_selector(lambda bound: Priced(contribution_bound=bound, ties=ties), maximal=True)


@pytest.mark.parametrize("distinct_weight", [0.0, 0.5])
def test_check_suite_with_duplicates(distinct_weight):
    check_selector(
        lambda bound: Priced(contribution_bound=bound, allow_duplicates=True, distinct_weight=distinct_weight),
        duplicates=True,
        maximal=True,
    )


@settings(max_examples=50, deadline=None)
@given(graph=attribution_graphs(max_examples=30), bound=st.integers(1, 4), duplicates=st.booleans())
def test_nothing_can_be_added(graph, bound, duplicates):
    selection = Priced(contribution_bound=bound, allow_duplicates=duplicates).select(graph)
    full = copies_per_user(graph, selection.copies) >= bound
    for example in range(graph.num_examples):
        users = graph.users[graph.indptr[example] : graph.indptr[example + 1]]
        if len(users) and (duplicates or not selection.copies[example]):
            assert full[users].any()


def test_beats_greedy_and_proves_it_is_near():
    graph = random_graph(6000, 1500, 2.3, seed=4)
    for bound in (1, 2, 3, 5):
        greedy = Greedy(contribution_bound=bound).select(graph)
        priced = Priced(contribution_bound=bound).select(graph)
        assert greedy.size < priced.size <= priced.upper_bound
        assert priced.size >= 0.998 * priced.upper_bound


@pytest.mark.parametrize("large_core", [1, 10**9])
def test_threads_do_not_matter(monkeypatch, large_core):
    graph = random_graph(4000, 900, 2.5, seed=1)
    monkeypatch.setattr(price_search, "_PAIRS_PER_THREAD", 1)
    monkeypatch.setattr(price_search, "_LARGE_CORE", large_core)
    selections = []
    for number in (1, 2, 5):
        monkeypatch.setattr(threads, "cores", lambda number=number: number)
        selections.append(Priced(contribution_bound=3).select(graph, seed=2))
    assert selections[0] == selections[1] == selections[2]
    assert selections[0].size > 0


@pytest.mark.parametrize("distinct_weight", [None, 0.0, 0.5])
def test_a_large_core_is_searched_as_well(monkeypatch, distinct_weight):
    """Leaving items alone that are clearly in or out changes little, and the bound stays one."""
    graph = random_graph(6000, 1500, 2.3, seed=4)
    duplicates = {} if distinct_weight is None else {"allow_duplicates": True, "distinct_weight": distinct_weight}
    selector = Priced(contribution_bound=3, **duplicates)
    plain = selector.select(graph)
    monkeypatch.setattr(price_search, "_LARGE_CORE", 1)
    shrunk = selector.select(graph)
    assert copies_per_user(graph, shrunk.copies).max() <= 3
    assert max(plain.size, shrunk.size) <= min(plain.upper_bound, shrunk.upper_bound)
    assert shrunk.upper_bound <= 1.001 * plain.upper_bound
    assert shrunk.size >= 0.998 * plain.size


def test_seed_matters_and_is_all_that_does():
    graph = random_graph(2000, 500, 2.5, seed=8)
    first, again, other = (Priced(contribution_bound=2).select(graph, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert not np.array_equal(first.copies, other.copies)


def test_row_order_does_not_matter_where_ids_stay():
    graph = random_graph(500, 150, 2.5, seed=3)
    rows = np.random.default_rng(0).permutation(500)
    shuffled = graph.subgraph(rows)
    selection = Priced(contribution_bound=2).select(graph)
    assert np.array_equal(Priced(contribution_bound=2).select(shuffled).copies, selection.copies[rows])


def test_distinct_weight_keeps_distinct_examples():
    graph = random_graph(3000, 800, 2.5, seed=5)
    plain, weighted, heavy = (
        Priced(contribution_bound=3, allow_duplicates=True, distinct_weight=weight).select(graph)
        for weight in (0.0, 0.5, 1.0)
    )
    assert plain.num_distinct < weighted.num_distinct <= heavy.num_distinct
    assert plain.size >= weighted.size >= heavy.size
    assert plain.upper_bound == weighted.upper_bound == heavy.upper_bound  # on the size, whatever the weight


def test_time_limit_gives_a_valid_selection():
    graph = random_graph(5000, 1200, 2.5, seed=6)
    selection = Priced(contribution_bound=3, time_limit=1e-6).select(graph)
    assert copies_per_user(graph, selection.copies).max() <= 3
    assert selection.size <= Priced(contribution_bound=3).select(graph).upper_bound <= selection.upper_bound


@pytest.mark.parametrize("moment", ["peeling", "prices", "filling", "swapping"])
def test_interrupt_comes_out(moment):
    def interrupt(done, message):
        if message.startswith(moment):
            raise KeyboardInterrupt

    graph = random_graph(6000, 1500, 2.3, seed=4)
    with pytest.raises(KeyboardInterrupt):
        Priced(contribution_bound=3).select(graph, progress=interrupt)


def test_unattributed():
    graph = AttributionGraph.from_users_per_example([[0], [], [0, 1], []])
    assert Priced(contribution_bound=1).select(graph).copies.tolist() == [1, 0, 0, 0]
    kept = Priced(contribution_bound=1, unattributed="keep", allow_duplicates=True).select(graph)
    assert (kept.copies.tolist(), kept.upper_bound) == ([1, 1, 0, 1], 3)
    with pytest.raises(InputError, match="2 examples have no users"):
        Priced(contribution_bound=1, unattributed="error").select(graph)


def test_largest_bound():
    graph = AttributionGraph.from_users_per_example([[0], [0, 1]])
    selection = Priced(contribution_bound=2**31 - 1).select(graph)
    assert (selection.size, selection.proven_optimal) == (2, True)
    repeated = Priced(contribution_bound=2**31 - 1, allow_duplicates=True).select(graph)
    assert (repeated.size, repeated.proven_optimal) == (2**31 - 1, True)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"contribution_bound": 0}, "contribution_bound must be an integer of at least 1"),
        ({"contribution_bound": 2**31}, "contribution_bound"),
        ({"contribution_bound": 1, "distinct_weight": 1.5}, "distinct_weight must be a number in"),
        ({"contribution_bound": 1, "time_limit": 0}, "time_limit must be a finite number above 0"),
        ({"contribution_bound": 1, "ties": "none"}, "ties must be one of"),
    ],
)
def test_bad_settings(wrong, message):
    with pytest.raises(InputError, match=message):
        Priced(**wrong)
