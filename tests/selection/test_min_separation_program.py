"""The paper's integer program for batches against brute force and the check-suite."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coowned.attribution.graph import AttributionGraph
from coowned.errors import InfeasibleScheduleError, InputError
from coowned.selection.greedy_min_separation import GreedyMinSeparation
from coowned.selection.min_separation_program import MinSeparationProgram
from coowned.testing.selector_checks import check_schedule_selector, check_separation, copies_per_user
from coowned.testing.strategies import attribution_graphs

ENDLESS = 3600  # seconds: what ends is a proof, on any machine; the default would count the compiling of kernels


def smallest_bound(graph, batch_size, iterations, min_separation, keep=False):
    """The smallest contribution bound of any schedule, by trying every schedule; None where there is none."""
    users = [frozenset(graph.users[graph.indptr[i] : graph.indptr[i + 1]].tolist()) for i in range(graph.num_examples)]
    allowed = [i for i in range(graph.num_examples) if users[i] or keep]
    best = None
    for batches in itertools.product(itertools.combinations(allowed, batch_size), repeat=iterations):
        flat = [(t, i) for t, batch in enumerate(batches) for i in batch]
        fits = all(
            not (users[i] & users[j]) or abs(s - t) >= min_separation
            for (s, i), (t, j) in itertools.combinations(flat, 2)
        )
        kept = [i for _, i in flat if not users[i]]
        if fits and len(kept) == len(set(kept)):
            bound = max((sum(user in users[i] for _, i in flat) for user in range(graph.num_users)), default=0)
            best = bound if best is None else min(best, bound)
    return best


@settings(max_examples=60, deadline=None)
@given(
    graph=attribution_graphs(max_examples=5, max_users=5),
    batch_size=st.integers(1, 2),
    iterations=st.integers(1, 3),
    min_separation=st.integers(1, 4),
    unattributed=st.sampled_from(["drop", "keep"]),
)
def test_equals_brute_force(graph, batch_size, iterations, min_separation, unattributed):
    program = MinSeparationProgram(
        batch_size=batch_size,
        iterations=iterations,
        min_separation=min_separation,
        unattributed=unattributed,
        time_limit=ENDLESS,
    )
    expected = smallest_bound(graph, batch_size, iterations, min_separation, keep=unattributed == "keep")
    if expected is None:
        with pytest.raises(InfeasibleScheduleError):
            program.select(graph)
        return
    schedule = program.select(graph)
    check_separation(graph, schedule, min_separation=min_separation)
    assert copies_per_user(graph, schedule.copies).max(initial=0) == schedule.lower_bound == expected
    assert schedule.proven_optimal
    assert schedule.copies[graph.users_per_example == 0].max(initial=0) <= 1


def test_better_than_greedy():
    """Greedy goes round the examples with one user and uses user 0 twice; the optimum needs her once."""
    graph = AttributionGraph.from_users_per_example([[0], [0], [1, 2], [3, 4]])
    settings = {"batch_size": 1, "iterations": 3, "min_separation": 1}
    greedy = GreedyMinSeparation(**settings, ties="input").select(graph)
    optimal = MinSeparationProgram(**settings, ties="input", time_limit=ENDLESS).select(graph)
    assert copies_per_user(graph, greedy.copies).max() == 2
    assert copies_per_user(graph, optimal.copies).max() == optimal.lower_bound == 1
    assert optimal.proven_optimal


def test_separation_is_held():
    check_schedule_selector(
        lambda size, number, separation: MinSeparationProgram(
            batch_size=size, iterations=number, min_separation=separation, time_limit=ENDLESS
        ),
        graphs={
            "star and path": AttributionGraph.from_users_per_example(
                [[0, i] for i in range(1, 6)] + [[i, i + 1] for i in range(7, 14)]
            ),
            "without users among others": AttributionGraph.from_users_per_example([[], [0], [], [0, 1], [2], [3]]),
            "empty": AttributionGraph.from_users_per_example([]),
        },
    )


def test_finds_what_greedy_misses():
    """Greedy puts [0] and [1] first and is then stuck with the pair; the program begins with the pair."""
    graph = AttributionGraph.from_users_per_example([[0], [1], [2], [3], [0, 1], [2, 3]])
    settings = {"batch_size": 2, "iterations": 3, "min_separation": 2}
    assert smallest_bound(graph, **settings) == 2
    schedule = MinSeparationProgram(**settings, time_limit=ENDLESS).select(graph)
    check_separation(graph, schedule, min_separation=2)
    assert (schedule.lower_bound, schedule.proven_optimal) == (2, True)


def test_infeasible():
    graph = AttributionGraph.from_users_per_example([[0, 1], [0, 2], [1, 2], [3]])
    with pytest.raises(InfeasibleScheduleError, match=r"no schedule .* exists; reduce min_separation") as caught:
        MinSeparationProgram(batch_size=2, iterations=2, min_separation=2, time_limit=ENDLESS).select(graph)
    assert caught.value.needed == 4
    assert caught.value.filled < 4


def test_interrupt_comes_out():
    def interrupt(done, message):
        if message.startswith("integer program"):
            raise KeyboardInterrupt

    graph = AttributionGraph.from_users_per_example([[i % 7, 7 + i % 5] for i in range(30)])
    with pytest.raises(KeyboardInterrupt):
        MinSeparationProgram(batch_size=3, iterations=6, min_separation=1).select(graph, progress=interrupt)


def test_too_large():
    graph = AttributionGraph.from_users_per_example([[i] for i in range(30_000)])
    with pytest.raises(InputError, match="use GreedyMinSeparation"):
        MinSeparationProgram(batch_size=1, iterations=1000, min_separation=10).select(graph)


def test_bad_settings():
    for wrong in ("batch_size", "iterations", "min_separation"):
        with pytest.raises(InputError, match=wrong):
            MinSeparationProgram(**{"batch_size": 1, "iterations": 1, "min_separation": 1, wrong: 0})
    with pytest.raises(InputError, match="time_limit"):
        MinSeparationProgram(batch_size=1, iterations=1, min_separation=1, time_limit=0)
