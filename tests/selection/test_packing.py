"""Peeling loses no optimum, and its prices carry over."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.selection.brute_force import largest

from coowned.attribution.graph import AttributionGraph
from coowned.progress import silent
from coowned.selection.order import ordered_rows
from coowned.selection.packing import FREE, FULL, fill, pack, peel
from coowned.testing.selector_checks import copies_per_user
from coowned.testing.strategies import attribution_graphs


def packed(graph, bound, limit):
    rows = ordered_rows(graph, seed=0, ties="input", progress=silent)
    packing = pack(rows, graph.num_users, contribution_bound=bound, limit=limit)
    return rows.examples, packing, peel(packing, silent)


@settings(max_examples=100, deadline=None)
@given(graph=attribution_graphs(max_examples=7, max_users=6), bound=st.integers(1, 3), duplicates=st.booleans())
def test_no_optimum_is_lost(graph, bound, duplicates):
    limit = bound if duplicates else 1
    examples, _, peeled = packed(graph, bound, limit)
    core = peeled.core
    shape = [limit + 1] * core.num_items
    counts = np.array(list(np.ndindex(*shape)), np.int64).reshape(math.prod(shape), -1)  # (ways, items of the core)
    users = np.zeros((core.num_items, core.num_users), np.int64)
    np.add.at(users, (np.repeat(np.arange(core.num_items), np.diff(core.indptr)), core.users), 1)
    counts = counts[(counts @ users <= core.capacity).all(axis=1)]
    taken = np.repeat(peeled.taken[None].astype(np.int64), len(counts), axis=0)
    taken[:, peeled.core_items] += counts
    copies = np.empty_like(taken)  # (ways, examples)
    copies[:, examples] = taken
    whole = np.zeros((graph.num_examples, graph.num_users), np.int64)
    np.add.at(whole, (np.repeat(np.arange(graph.num_examples), graph.users_per_example), graph.users), 1)
    assert (copies @ whole).max(initial=0) <= bound
    best = int(copies.sum(axis=1).max())
    assert best == largest(graph, bound, limit)


@settings(max_examples=100, deadline=None)
@given(graph=attribution_graphs(max_examples=30), bound=st.integers(1, 3))
def test_the_core_is_stuck(graph, bound):
    """Every user left has more items than capacity, every item left two users; rows are sorted by length."""
    _, _, peeled = packed(graph, bound, 1)
    core = peeled.core
    assert (np.diff(core.user_indptr) > core.capacity).all()
    assert (core.capacity >= 1).all()
    assert (np.diff(core.indptr) >= 2).all()
    assert (np.diff(np.diff(core.indptr)) >= 0).all()
    assert (np.diff(np.diff(core.user_indptr)) >= 0).all()
    assert set(peeled.user_state.tolist()) <= {0, FREE, FULL}


def test_a_tree_is_peeled_to_the_end():
    graph = AttributionGraph.from_users_per_example([[i, i + 1] for i in range(2001)])
    _, _, peeled = packed(graph, 1, 1)
    assert (peeled.core.num_items, int(peeled.taken.sum())) == (0, 1001)


@settings(max_examples=60, deadline=None)
@given(graph=attribution_graphs(max_examples=30), bound=st.integers(1, 4), seed=st.integers(0, 5))
def test_fill_is_feasible_in_any_order(graph, bound, seed):
    random = np.random.default_rng(seed)
    examples, packing, _ = packed(graph, bound, bound)
    order = random.permutation(graph.num_examples).astype(np.int32)
    copies = np.empty(graph.num_examples, np.int32)
    copies[examples] = fill(packing, order, random.integers(0, bound + 1, graph.num_examples).astype(np.int32))
    assert copies_per_user(graph, copies).max(initial=0) <= bound
    full = copies_per_user(graph, copies) >= bound
    for example in np.flatnonzero(graph.users_per_example):
        assert full[graph.users[graph.indptr[example] : graph.indptr[example + 1]]].any()


@settings(max_examples=40, deadline=None)
@given(graph=attribution_graphs(max_examples=25), seed=st.integers(0, 5))
def test_labels_of_users_do_not_matter(graph, seed):
    label = np.random.default_rng(seed).permutation(graph.num_users)
    other = AttributionGraph.from_csr(graph.indptr, label[graph.users], num_users=graph.num_users)
    one, two = (packed(each, 2, 1)[2] for each in (graph, other))
    assert np.array_equal(one.taken, two.taken)
    for field in ("indptr", "users", "user_indptr", "items", "capacity"):
        assert np.array_equal(getattr(one.core, field), getattr(two.core, field))
    assert np.array_equal(one.core_items, two.core_items)
