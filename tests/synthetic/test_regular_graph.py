import itertools

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.synthetic.digests import content_hash

from coowned.errors import InputError
from coowned.synthetic.regular_graph import LARGEST_SCAN, RegularGraph


def test_number_of_users_is_the_papers():
    assert RegularGraph(num_examples=1000).num_users == 250
    assert RegularGraph(num_examples=125_000, mean_examples_per_user=2.0).num_users == 125_000
    assert RegularGraph(num_examples=1).num_users == 1
    assert RegularGraph(num_examples=0).num_users == 0


def test_arity_is_poisson():
    graph = RegularGraph(num_examples=100_000).generate(seed=1)
    observed = np.bincount(np.minimum(graph.users_per_example, 8), minlength=9)
    expected = scipy.stats.poisson.pmf(np.arange(9), 2.0)
    expected[8] = scipy.stats.poisson.sf(7, 2.0)
    # False-alarm probability 1e-6, fixed seed.
    assert scipy.stats.chisquare(observed, expected * graph.num_examples).pvalue > 1e-6
    assert observed[0] / graph.num_examples == pytest.approx(np.exp(-2), abs=0.006)


@pytest.mark.parametrize("mean_users", [2.0, 24.0])  # both ways of telling repeated users
def test_every_set_is_equally_likely(mean_users):
    num_users = round(mean_users) + 3
    settings_ = RegularGraph(
        num_examples=60_000, mean_users_per_example=mean_users, mean_examples_per_user=60_000 * mean_users / num_users
    )
    assert settings_.num_users == num_users
    graph = settings_.generate(seed=2)
    size = num_users - 2
    assert (size > LARGEST_SCAN) == (mean_users > LARGEST_SCAN)
    sets = {chosen: place for place, chosen in enumerate(itertools.combinations(range(num_users), size))}
    observed = np.zeros(len(sets))
    for example in np.flatnonzero(graph.users_per_example == size):
        observed[sets[tuple(graph.users[graph.indptr[example] : graph.indptr[example + 1]])]] += 1
    assert observed.mean() > 10
    # False-alarm probability 1e-6, fixed seed.
    assert scipy.stats.chisquare(observed).pvalue > 1e-6


def test_arity_is_capped_by_the_number_of_users():
    graph = RegularGraph(num_examples=50, mean_users_per_example=30.0, mean_examples_per_user=500.0).generate(seed=0)
    assert graph.num_users == 3
    assert (graph.users_per_example == 3).all()


@settings(max_examples=50, deadline=None)
@given(
    num_examples=st.integers(0, 60),
    mean_users=st.floats(0.01, 40.0),
    mean_examples=st.floats(0.5, 50.0),
    seed=st.integers(0, 2**63 - 1),
)
def test_users_are_distinct_and_in_range(num_examples, mean_users, mean_examples, seed):
    world = RegularGraph(
        num_examples=num_examples, mean_users_per_example=mean_users, mean_examples_per_user=mean_examples
    )
    graph = world.generate(seed=seed)
    assert (graph.num_examples, graph.num_users) == (num_examples, world.num_users)
    for example in range(num_examples):
        users = graph.users[graph.indptr[example] : graph.indptr[example + 1]]
        assert (np.diff(users) > 0).all()
        assert ((users >= 0) & (users < graph.num_users)).all()


def test_same_bits_everywhere():
    world = RegularGraph(num_examples=20_000)
    assert content_hash(world.generate(seed=7)) == GOLDEN_HASH
    assert content_hash(world.generate(seed=8)) != GOLDEN_HASH


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_examples": -1},
        {"num_examples": 2.5},
        {"num_examples": 10, "mean_users_per_example": 0.0},
        {"num_examples": 10, "mean_examples_per_user": float("nan")},
        {"num_examples": 2**31},
        {"num_examples": 10**9, "mean_examples_per_user": 0.5},
    ],
)
def test_bad_settings_are_refused(wrong):
    with pytest.raises(InputError):
        RegularGraph(**wrong)


def test_bad_seed_is_refused():
    with pytest.raises(InputError, match="seed"):
        RegularGraph(num_examples=10).generate(seed=-1)


GOLDEN_HASH = "13bfa6b78a46cef81ea7b89cf2a29c4b1b933075700f1f6056dad9a4ca89f7d3"
