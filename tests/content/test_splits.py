"""Splits by a hash of the id."""

import numpy as np
import pytest

from coowned import AttributionGraph, InputError
from coowned.content.splits import split_examples


def test_split_depends_on_the_id_alone():
    ids = [f"m{number}" for number in range(500)]
    graph = AttributionGraph.from_users_per_example([[0]] * 500, example_ids=ids)
    order = np.random.default_rng(0).permutation(500)
    shuffled = graph.subgraph(order)
    for name, rows in split_examples(graph).items():
        moved = {ids[order[row]] for row in split_examples(shuffled)[name]}
        assert moved == {ids[row] for row in rows}
    part = graph.subgraph(np.arange(250))
    assert set(split_examples(part)["test"]) <= set(split_examples(graph)["test"])


def test_numbers_and_text_are_the_same_id():
    numbers = AttributionGraph.from_users_per_example([[0]] * 300)
    text = AttributionGraph.from_users_per_example([[0]] * 300, example_ids=[str(number) for number in range(300)])
    for name, rows in split_examples(numbers).items():
        assert np.array_equal(rows, split_examples(text)[name])


@pytest.mark.parametrize("fractions", [(0.8, 0.1, 0.1), (1.0, 0.0, 0.0), (0.5, 0.5, 0.0), (0.3, 0.2, 0.5)])
def test_split_sizes(fractions):
    """Six standard deviations of a binomial of 20000: false alarm below 1e-8 for each."""
    graph = AttributionGraph.from_users_per_example([[0]] * 20_000)
    parts = split_examples(graph, fractions)
    assert np.array_equal(np.sort(np.concatenate(list(parts.values()))), np.arange(20_000))
    for rows, fraction in zip(parts.values(), fractions, strict=True):
        spread = (20_000 * fraction * (1 - fraction)) ** 0.5
        assert abs(len(rows) - 20_000 * fraction) <= 6 * spread


@pytest.mark.parametrize("wrong", [(0.8, 0.2), (0.8, 0.1, 0.2), (0.0, 0.5, 0.5), (1.2, -0.1, -0.1), ("a", 0, 0)])
def test_bad_fractions(wrong):
    graph = AttributionGraph.from_users_per_example([[0]])
    with pytest.raises(InputError, match="splits"):
        split_examples(graph, wrong)
