"""The paper's integer program against brute force, its hardness proof, and the check-suite."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.selection.brute_force import largest

from coowned.attribution.graph import AttributionGraph
from coowned.errors import InputError
from coowned.selection.highs_program import distinct_rows
from coowned.selection.integer_program import IntegerProgram
from coowned.selection.order import ordered_rows
from coowned.selection.packing import pack, peel
from coowned.selection.priced import Priced
from coowned.selection.selector import Selection
from coowned.testing.selector_checks import check_selector, copies_per_user
from coowned.testing.strategies import attribution_graphs

ENDLESS = 3600  # seconds: what ends is a proof, on any machine; the default would count the compiling of kernels


def weak_start(monkeypatch):
    """Makes the program start from nothing, so that the solver does the work even on tiny graphs."""

    def nothing(self, graph, seed, progress):
        rows = ordered_rows(graph, seed=seed, ties=self.ties, progress=progress)
        limit = self.contribution_bound if self.allow_duplicates else 1
        packing = pack(rows, graph.num_users, contribution_bound=self.contribution_bound, limit=limit)
        copies = np.zeros(graph.num_examples, np.int32)
        copies[rows.examples] = peel(packing, progress).taken
        return Selection(graph=graph, copies=copies, upper_bound=10**6, selector={}, seed=seed)

    monkeypatch.setattr(Priced, "_select", nothing)


@settings(max_examples=80, deadline=None)
@given(
    graph=attribution_graphs(max_examples=9, max_users=6),
    bound=st.integers(1, 3),
    unattributed=st.sampled_from(["drop", "keep"]),
)
def test_equals_brute_force(graph, bound, unattributed):
    selection = IntegerProgram(contribution_bound=bound, unattributed=unattributed, time_limit=ENDLESS).select(graph)
    kept = int((graph.users_per_example == 0).sum()) if unattributed == "keep" else 0
    assert selection.size == selection.upper_bound == largest(graph, bound, 1) + kept
    assert selection.proven_optimal


@settings(max_examples=40, deadline=None)
@given(graph=attribution_graphs(max_examples=4, max_users=5), bound=st.integers(1, 3))
def test_equals_brute_force_with_duplicates(graph, bound):
    selection = IntegerProgram(contribution_bound=bound, allow_duplicates=True, time_limit=ENDLESS).select(graph)
    assert selection.size == selection.upper_bound == largest(graph, bound, bound)


@pytest.mark.parametrize("duplicates", [False, True])
def test_solver_alone_equals_brute_force(monkeypatch, duplicates):
    """With a start that took nothing but what is safe, everything else is the solver's."""
    weak_start(monkeypatch)
    rng = np.random.default_rng(3)
    solved = 0
    for _ in range(25):
        rows = [rng.choice(6, size=rng.integers(2, 4), replace=False).tolist() for _ in range(5 if duplicates else 9)]
        graph = AttributionGraph.from_users_per_example(rows, num_users=6)
        bound = int(rng.integers(1, 3))
        selector = IntegerProgram(contribution_bound=bound, allow_duplicates=duplicates, time_limit=ENDLESS)
        selection = selector.select(graph)
        assert selection.size == selection.upper_bound == largest(graph, bound, bound if duplicates else 1)
        solved += selection.proven_optimal
    assert solved == 25


@settings(max_examples=40, deadline=None)
@given(edges=st.sets(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=20))
def test_independent_set_reduction(edges):
    """Section 4 of the paper: an example for each vertex, a user for each edge, contribution bound 1."""
    edges = sorted({(a, b) for a, b in edges if a < b})
    rows = [[number for number, edge in enumerate(edges) if vertex in edge] for vertex in range(9)]
    graph = AttributionGraph.from_users_per_example(rows, num_users=len(edges))
    independence = max(
        sum(chosen)
        for chosen in itertools.product((0, 1), repeat=9)
        if not any(chosen[a] and chosen[b] for a, b in edges)
    )
    selection = IntegerProgram(contribution_bound=1, unattributed="keep", time_limit=ENDLESS).select(graph)
    assert selection.size == independence
    assert selection.proven_optimal


def test_never_below_its_start():
    rng = np.random.default_rng(2)
    rows = [rng.choice(400, size=1 + rng.poisson(1.5), replace=False).tolist() for _ in range(1500)]
    graph = AttributionGraph.from_users_per_example(rows, num_users=400)
    for time_limit in (0.05, ENDLESS):
        start = Priced(contribution_bound=2, time_limit=time_limit / 2).select(graph)
        selection = IntegerProgram(contribution_bound=2, time_limit=time_limit).select(graph)
        assert copies_per_user(graph, selection.copies).max() <= 2
        assert selection.upper_bound >= selection.size
        if time_limit == ENDLESS:
            assert selection.proven_optimal
            assert start.size <= selection.size == selection.upper_bound <= start.upper_bound


def test_check_suite():
    check_selector(lambda bound: IntegerProgram(contribution_bound=bound, time_limit=ENDLESS))


def test_check_suite_with_duplicates():
    check_selector(
        lambda bound: IntegerProgram(contribution_bound=bound, allow_duplicates=True, time_limit=ENDLESS),
        duplicates=True,
        contribution_bounds=(1, 2, 3),
    )


def test_interrupt_comes_out_of_the_solver(monkeypatch):
    weak_start(monkeypatch)

    def interrupt(done, message):
        if message.startswith("integer program"):
            raise KeyboardInterrupt

    rng = np.random.default_rng(2)
    rows = [rng.choice(300, size=3, replace=False).tolist() for _ in range(900)]
    graph = AttributionGraph.from_users_per_example(rows, num_users=300)
    with pytest.raises(KeyboardInterrupt):
        IntegerProgram(contribution_bound=1, time_limit=ENDLESS).select(graph, progress=interrupt)


def test_equal_rows_are_stated_once():
    first, which = distinct_rows(np.array([0, 2, 3, 5, 6]), np.array([4, 7, 1, 4, 7, 2]))
    assert first.tolist() == [0, 1, 3]
    assert which.tolist() == [0, 1, 0, 2]


def test_equal_rows_with_unequal_capacity(monkeypatch):
    """Users 0 and 1 share three examples, but user 0 has one of her own, which is taken first."""
    weak_start(monkeypatch)
    graph = AttributionGraph.from_users_per_example([[0], [0, 1, 2], [0, 1, 3], [0, 1, 2, 3]])
    selection = IntegerProgram(contribution_bound=2, time_limit=ENDLESS).select(graph)
    assert selection.size == largest(graph, 2, 1) == 2


def test_bad_settings():
    with pytest.raises(InputError, match="contribution_bound"):
        IntegerProgram(contribution_bound=0)
    with pytest.raises(InputError, match="time_limit must be a finite number above 0"):
        IntegerProgram(contribution_bound=1, time_limit=-1)
