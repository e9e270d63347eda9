"""The strategies reach the odd graphs that they promise."""

import pytest
from hypothesis import find, given

from coowned.attribution.graph import AttributionGraph
from coowned.testing.strategies import attribution_graphs


@given(attribution_graphs(max_examples=5, max_users=3, min_users_per_example=1, max_users_per_example=2))
def test_limits_are_kept(graph):
    assert isinstance(graph, AttributionGraph)
    assert graph.num_users <= 3
    assert graph.num_examples <= 5 + 3  # repeated hyperedges come on top
    assert graph.num_examples == 0 or 1 <= graph.users_per_example.min() <= graph.users_per_example.max() <= 2


@pytest.mark.parametrize(
    "odd",
    [
        lambda graph: graph.num_examples == 0,
        lambda graph: graph.num_examples > 1 and graph.users_per_example.min() == 0,
        lambda graph: graph.num_users > 0 and graph.examples_per_user.min() == 0,
        lambda graph: graph.example_ids is None and graph.num_pairs > 1,
        lambda graph: graph.example_ids is not None and str(graph.example_ids.type) == "int64",
        lambda graph: graph.example_ids is not None and str(graph.example_ids.type) == "large_string",
    ],
)
def test_odd_graphs_are_reached(odd):
    assert odd(find(attribution_graphs(), odd))
