"""Algorithm 4 and the sweep over min_separation, against plain transcriptions, and the check-suite."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coowned.attribution.graph import AttributionGraph
from coowned.errors import InfeasibleScheduleError, InputError
from coowned.selection.greedy_min_separation import GreedyMinSeparation, max_min_separation
from coowned.selection.order import ordered_rows
from coowned.testing.selector_checks import check_schedule_selector, check_separation
from coowned.testing.strategies import attribution_graphs


def plain_min_separation(graph, walk, batch_size, iterations, separation, keep=False):
    """Algorithm 4 of the paper: the batches (None where it fails) and how many slots were filled."""
    users_of = [graph.users[graph.indptr[i] : graph.indptr[i + 1]].tolist() for i in range(graph.num_examples)]
    walk = [example for example in walk if users_of[example] or keep]
    last_batch = {}
    chosen = []
    since_added = 0
    place = 0
    while len(chosen) < iterations * batch_size:
        if since_added == len(walk):
            return None, len(chosen)
        example = walk[place % len(walk)]
        place += 1
        since_added += 1
        batch = len(chosen) // batch_size
        free = all(batch - last_batch.get(user, -separation) >= separation for user in users_of[example])
        if free and (users_of[example] or example not in chosen):
            for user in users_of[example]:
                last_batch[user] = batch
            chosen.append(example)
            since_added = 0
    return np.reshape(chosen, (iterations, batch_size)).tolist(), len(chosen)


def plain_sweep(graph, walk, batch_size, iterations):
    """The smallest value at which Algorithm 4 fails, minus one; beyond `iterations` nothing changes."""
    for separation in range(1, iterations + 1):
        if plain_min_separation(graph, walk, batch_size, iterations, separation)[0] is None:
            return separation - 1
    return iterations


def walk_of(graph, ties="hash", seed=0):
    return ordered_rows(graph, seed=seed, ties=ties, progress=lambda done, message: None).examples.tolist()


@settings(max_examples=400)
@given(
    graph=attribution_graphs(max_examples=20, max_users=15),
    batch_size=st.integers(1, 4),
    iterations=st.integers(1, 12),
    separation=st.integers(1, 14),
    ties=st.sampled_from(["hash", "input"]),
    unattributed=st.sampled_from(["drop", "keep"]),
)
def test_equals_the_paper(graph, batch_size, iterations, separation, ties, unattributed):
    keep = unattributed == "keep"
    expected, filled = plain_min_separation(graph, walk_of(graph, ties), batch_size, iterations, separation, keep)
    selector = GreedyMinSeparation(
        batch_size=batch_size,
        iterations=iterations,
        min_separation=separation,
        ties=ties,
        unattributed=unattributed,
    )
    if expected is None:
        with pytest.raises(InfeasibleScheduleError, match="reduce") as caught:
            selector.select(graph)
        assert caught.value.needed == batch_size * iterations
        at_once = "consecutive batches" in str(caught.value)  # refused before anything was tried
        assert caught.value.filled == (0 if at_once else filled)
    else:
        schedule = selector.select(graph)
        assert schedule.batches.tolist() == expected
        assert schedule.min_separation == separation


@pytest.mark.parametrize(("batch_size", "separation"), [(1, 1), (7, 3), (16, 9), (30, 5), (5, 31)])
def test_equals_the_paper_on_a_larger_graph(batch_size, separation):
    """Many groups of rows, many passes; the last settings are close to the largest that succeed."""
    rng = np.random.default_rng(8)
    rows = [rng.choice(400, size=1 + rng.integers(0, 3), replace=False).tolist() for _ in range(900)]
    graph = AttributionGraph.from_users_per_example(rows, num_users=400)
    expected, _ = plain_min_separation(graph, walk_of(graph), batch_size, 300, separation)
    schedule = GreedyMinSeparation(batch_size=batch_size, iterations=300, min_separation=separation).select(graph)
    assert schedule.batches.tolist() == expected


def test_a_stuck_run_fills_as_much_as_the_paper():
    rng = np.random.default_rng(8)
    rows = [rng.choice(400, size=1 + rng.integers(0, 3), replace=False).tolist() for _ in range(900)]
    graph = AttributionGraph.from_users_per_example(rows, num_users=400)
    batches, filled = plain_min_separation(graph, walk_of(graph), 30, 300, 12)
    assert batches is None
    assert filled > 0
    with pytest.raises(InfeasibleScheduleError, match=f"filled {filled} of 9000 slots") as caught:
        GreedyMinSeparation(batch_size=30, iterations=300, min_separation=12).select(graph)
    assert (caught.value.filled, caught.value.needed) == (filled, 9000)


@settings(max_examples=200)
@given(
    graph=attribution_graphs(max_examples=30, max_users=20, min_users_per_example=1, with_ids=False),
    batch_size=st.integers(1, 2),
    iterations=st.integers(1, 10),
    separation=st.integers(1, 4),
)
def test_separation_is_held(graph, batch_size, iterations, separation):
    try:
        schedule = GreedyMinSeparation(batch_size=batch_size, iterations=iterations, min_separation=separation).select(
            graph
        )
    except InfeasibleScheduleError:
        return  # how far it got is compared in test_equals_the_paper
    check_separation(graph, schedule, min_separation=separation)  # also that k <= ceil(T / b)


def test_check_suite():
    check_schedule_selector(
        lambda batch_size, iterations, separation: GreedyMinSeparation(
            batch_size=batch_size, iterations=iterations, min_separation=separation
        )
    )


def test_kept_examples_without_users_appear_once():
    graph = AttributionGraph.from_users_per_example([[], [0], [1], []])
    selector = GreedyMinSeparation(batch_size=1, iterations=8, min_separation=2, ties="input", unattributed="keep")
    assert selector.select(graph).batches.ravel().tolist() == [0, 3, 1, 2, 1, 2, 1, 2]
    with pytest.raises(InputError, match="2 examples have no users"):
        GreedyMinSeparation(batch_size=1, iterations=8, min_separation=2, unattributed="error").select(graph)


def test_what_the_graph_can_never_give_is_refused_at_once():
    graph = AttributionGraph.from_users_per_example([[0], [1], [2], [0, 1]])
    calls = []
    with pytest.raises(InfeasibleScheduleError, match=r"at most 3; reduce batch_size \(2\)") as caught:
        GreedyMinSeparation(batch_size=2, iterations=10**6, min_separation=2).select(
            graph, progress=lambda done, message: calls.append(done)
        )
    assert (caught.value.filled, caught.value.needed, calls) == (0, 2 * 10**6, [])


def test_interrupts_come_out():
    graph = AttributionGraph.from_users_per_example([[i] for i in range(2000)])
    calls = []

    def interrupt(done, message):
        calls.append(done)
        if "slots filled" in message and done > 0.3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        GreedyMinSeparation(batch_size=1000, iterations=40_000, min_separation=2).select(graph, progress=interrupt)
    assert max(calls) < 1


@settings(max_examples=300)
@given(
    graph=attribution_graphs(max_examples=20, max_users=15),
    batch_size=st.integers(1, 3),
    iterations=st.integers(1, 12),
)
def test_max_min_separation_is_the_sweep(graph, batch_size, iterations):
    expected = plain_sweep(graph, walk_of(graph), batch_size, iterations)
    if expected == 0:
        with pytest.raises(InfeasibleScheduleError, match="reduce batch_size"):
            max_min_separation(graph, batch_size=batch_size, iterations=iterations)
    else:
        assert max_min_separation(graph, batch_size=batch_size, iterations=iterations) == expected


@settings(max_examples=300)
@given(
    graph=attribution_graphs(max_examples=20, max_users=15),
    batch_size=st.integers(1, 3),
    iterations=st.integers(1, 12),
)
def test_bisection_ends_between_success_and_failure(graph, batch_size, iterations):
    def succeeds(separation: int) -> bool:
        selector = GreedyMinSeparation(batch_size=batch_size, iterations=iterations, min_separation=separation)
        try:
            selector.select(graph)
        except InfeasibleScheduleError:
            return False
        return True

    try:
        found = max_min_separation(graph, batch_size=batch_size, iterations=iterations, search="bisection")
    except InfeasibleScheduleError:
        assert not succeeds(1)
        return
    assert succeeds(found)
    assert found == iterations or not succeeds(found + 1)


def test_success_at_three_does_not_prove_success_at_two():
    """The walk decides: with 2 it fails, with 3 it does not. The sweep stops before 2."""
    rows = [[9], [8], [2], [5], [1], [1], [4], [5, 2], [0, 9], [2, 5, 1], [4, 8, 1], [8, 3, 6]]
    graph = AttributionGraph.from_users_per_example(rows)
    for separation, succeeds in [(1, True), (2, False), (3, True), (4, False)]:
        selector = GreedyMinSeparation(batch_size=2, iterations=7, min_separation=separation, ties="input")
        if succeeds:
            check_separation(graph, selector.select(graph), min_separation=separation)
        else:
            with pytest.raises(InfeasibleScheduleError):
                selector.select(graph)
    assert max_min_separation(graph, batch_size=2, iterations=7, ties="input") == 1
    assert max_min_separation(graph, batch_size=2, iterations=7, ties="input", search="bisection") in (1, 3)


def test_max_min_separation_on_a_larger_graph():
    rng = np.random.default_rng(8)
    rows = [rng.choice(300, size=1 + rng.integers(0, 3), replace=False).tolist() for _ in range(400)]
    graph = AttributionGraph.from_users_per_example(rows, num_users=300)
    expected = plain_sweep(graph, walk_of(graph), 12, 60)
    assert 5 < expected < 60
    assert max_min_separation(graph, batch_size=12, iterations=60) == expected


def test_max_min_separation_bad_input():
    graph = AttributionGraph.from_users_per_example([[0], [1]])
    with pytest.raises(InputError, match="batch_size"):
        max_min_separation(graph, batch_size=0, iterations=1)
    with pytest.raises(InputError, match="AttributionGraph"):
        max_min_separation([[0]], batch_size=1, iterations=1)
    with pytest.raises(InputError, match="seed"):
        max_min_separation(graph, batch_size=1, iterations=1, seed=-1)
    with pytest.raises(InputError, match="search"):
        max_min_separation(graph, batch_size=1, iterations=1, search="guess")


@pytest.mark.parametrize("field", ["batch_size", "iterations", "min_separation"])
def test_bad_settings(field):
    values = {"batch_size": 1, "iterations": 1, "min_separation": 1} | {field: 0}
    with pytest.raises(InputError, match=f"{field} must be an integer of at least 1"):
        GreedyMinSeparation(**values)
