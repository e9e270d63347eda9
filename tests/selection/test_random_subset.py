"""Random subsets: the right pool, the right size, decided by the seed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coowned.attribution.graph import AttributionGraph
from coowned.errors import InputError
from coowned.selection.random_subset import RandomSubset
from coowned.testing.selector_checks import relabelled
from coowned.testing.strategies import attribution_graphs


@given(graph=attribution_graphs(max_examples=30), seed=st.integers(0, 5), data=st.data())
def test_pool(graph, seed, data):
    sizes = graph.users_per_example
    median = np.median(sizes[sizes > 0]) if sizes.any() else 0
    pools = {"all": sizes > 0, "few-users": (sizes > 0) & (sizes <= median), "many-users": sizes > median}
    for among, pool in pools.items():
        if pool.any():
            size = data.draw(st.integers(1, int(pool.sum())))
            selection = RandomSubset(size=size, among=among).select(graph, seed=seed)
            assert selection.size == selection.num_distinct == size
            assert not selection.copies[~pool].any()
        with pytest.raises(InputError, match=f"there are only {pool.sum()} examples"):
            RandomSubset(size=int(pool.sum()) + 1, among=among).select(graph)


def test_nested():
    graph = AttributionGraph.from_users_per_example([[i % 7] for i in range(200)])
    small = RandomSubset(size=40).select(graph, seed=2).copies
    large = RandomSubset(size=90).select(graph, seed=2).copies
    assert (small <= large).all()


def test_seed_decides():
    graph = AttributionGraph.from_users_per_example([[i % 7] for i in range(200)])
    a = RandomSubset(size=50).select(graph, seed=2)
    assert a == RandomSubset(size=50).select(graph, seed=2)
    assert a.copies.tolist() == RandomSubset(size=50).select(relabelled(graph), seed=2).copies.tolist()
    assert a != RandomSubset(size=50).select(graph, seed=3)


def test_every_example_is_equally_likely():
    """Each of 40 examples is in 1000 subsets of 10 about 250 times.

    The sum of squared deviations over the variance is chi-squared with 39 degrees of freedom (times 40 / 39); above
    90 with probability below 1e-5. The seeds are fixed.
    """
    graph = AttributionGraph.from_users_per_example([[0]] * 40)
    counts = sum(RandomSubset(size=10).select(graph, seed=seed).copies for seed in range(1000))
    assert ((counts - 250.0) ** 2 / (1000 * 0.25 * 0.75)).sum() < 90


def test_bad_settings():
    with pytest.raises(InputError, match="size must be an integer"):
        RandomSubset(size=0)
    with pytest.raises(InputError, match="among must be one of 'all', 'few-users', 'many-users'"):
        RandomSubset(size=1, among="most-users")
