"""The bound that prices prove: true for any prices, and exact."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coowned.attribution.graph import AttributionGraph
from coowned.errors import InputError
from coowned.selection.greedy_with_duplicates import GreedyWithDuplicates
from coowned.selection.integer_program import IntegerProgram
from coowned.selection.price_bound import PRICE_BITS, price_bound
from coowned.testing.strategies import attribution_graphs


@settings(max_examples=60, deadline=None)
@given(graph=attribution_graphs(max_examples=12, max_users=8), bound=st.integers(1, 3), data=st.data())
def test_any_prices_bound_every_set(graph, bound, data):
    prices = data.draw(st.lists(st.floats(-0.5, 2), min_size=graph.num_users, max_size=graph.num_users))
    optimum = IntegerProgram(contribution_bound=bound, time_limit=3600).select(graph)  # till it is proven
    assert optimum.proven_optimal
    assert price_bound(graph, prices, contribution_bound=bound) >= optimum.size
    repeated = GreedyWithDuplicates(contribution_bound=bound, unattributed="keep").select(graph)
    proven = price_bound(graph, prices, contribution_bound=bound, max_copies=bound, unattributed="keep")
    assert proven >= repeated.size


@settings(max_examples=60, deadline=None)
@given(
    graph=attribution_graphs(max_examples=20),
    bound=st.integers(1, 2**31 - 1),
    max_copies=st.integers(1, 2**31 - 1),
    data=st.data(),
)
def test_bound_is_exact(graph, bound, max_copies, data):
    prices = data.draw(st.lists(st.floats(0, 1), min_size=graph.num_users, max_size=graph.num_users))
    whole = [Fraction(round(Fraction(price) * 2**PRICE_BITS), 2**PRICE_BITS) for price in prices]
    expected = bound * sum(whole, Fraction(0))
    for example in range(graph.num_examples):
        users = graph.users[graph.indptr[example] : graph.indptr[example + 1]]
        if len(users):
            expected += min(bound, max_copies) * max(Fraction(0), 1 - sum(whole[user] for user in users))
    assert price_bound(graph, prices, contribution_bound=bound, max_copies=max_copies) == expected // 1


def test_a_float_sum_would_be_cut_below_the_optimum():
    """Ten users at a tenth each: the exact sum of rounded prices decides, not 0.9999999999999999."""
    graph = AttributionGraph.from_users_per_example([list(range(10))])
    assert sum([0.1] * 10) < 1
    assert price_bound(graph, [0.1] * 10, contribution_bound=1) == 1


def test_several_blocks_of_rows():
    num_examples = 200_000
    graph = AttributionGraph.from_csr(
        np.arange(num_examples + 1), np.zeros(num_examples, np.int32), num_users=1, example_ids=None
    )
    assert price_bound(graph, [0.0], contribution_bound=7) == num_examples
    assert price_bound(graph, [1.0], contribution_bound=7) == 7
    assert price_bound(graph, [0.5], contribution_bound=7) == (7 + num_examples) // 2


def test_bad_prices():
    graph = AttributionGraph.from_users_per_example([[0, 1]])
    with pytest.raises(InputError, match="prices must have 2 entries"):
        price_bound(graph, [0.5], contribution_bound=1)
    with pytest.raises(InputError, match="prices must be finite"):
        price_bound(graph, [0.5, np.nan], contribution_bound=1)
