"""The law of the skewed graph, against exact enumeration and dense coins.

Every statistical test has false-alarm probability 1e-6 and fixed seeds. The same tests are shown to reject worlds
with a planted bug, at the same sample size.
"""

import collections
import itertools

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.synthetic.digests import content_hash

from coowned.errors import InputError
from coowned.synthetic.kernels import stream_key
from coowned.synthetic.skewed_graph import COIN_THRESHOLD, SkewedGraph, hit_probability, sample_skewed

FALSE_ALARM = 1e-6
NUM_GRAPHS = 20_000
# num_users, num_examples, mean users per example, skew
SMALL_WORLDS = [(5, 5, 1.5, 1.5), (4, 6, 3.0, 1.5), (6, 5, 0.6, 1.5), (5, 4, 1.0, 0.0), (4, 5, 1.0, 3.0)]


def probabilities(counts, mean, skew):
    weights = (1.0 + np.asarray(counts)) ** skew
    return np.minimum(1.0, mean * weights / weights.sum(axis=-1, keepdims=True))


def law_of_final_counts(num_users, num_examples, mean, skew):
    """Probability of each sorted tuple of examples per user, by enumeration of every set at every step."""
    law = {(0,) * num_users: 1.0}
    for _ in range(num_examples):
        following = collections.defaultdict(float)
        for counts, probability in law.items():
            p = probabilities(counts, mean, skew)
            for coins in itertools.product((0, 1), repeat=num_users):
                chance = np.prod(np.where(coins, p, 1.0 - p))
                if chance > 0:
                    following[tuple(sorted(np.add(counts, coins).tolist()))] += probability * chance
        law = following
    return law


def dense_simulation(num_graphs, num_users, num_examples, mean, skew, *, seed, bug=None):
    """(num_graphs, num_users) examples per user, one coin for every user and example; `bug` plants a mistake."""
    rng = np.random.default_rng(seed)
    counts = np.zeros((num_graphs, num_users), dtype=int)
    for _ in range(num_examples):
        p = probabilities(np.zeros_like(counts) if bug == "weights never updated" else counts, mean, skew)
        if bug == "no thinning":  # the points of the Poisson process as they are
            p = 1.0 - np.exp(-p * (1.0 + p))
        if bug == "weight of the class":  # everyone as heavy as the heaviest of her class may be
            classes = 2.0 ** np.floor(np.log2(1 + counts) + 1) - 1
            p = np.minimum(1.0, mean * classes**skew / ((1.0 + counts) ** skew).sum(axis=1, keepdims=True))
        if bug == "with replacement":  # Poisson many users by weight, repeated ones collapsed
            p = 1.0 - np.exp(-p)
        if bug == "updated inside an example":
            for user in range(num_users):
                chance = probabilities(counts, mean, skew)[:, user]
                counts[:, user] += rng.random(num_graphs) < chance
            continue
        counts += rng.random(counts.shape) < p
    return counts


def kernel_simulation(num_graphs, num_users, num_examples, mean, skew, *, seed, threshold=COIN_THRESHOLD):
    counts = np.empty((num_graphs, num_users), dtype=int)
    for graph in range(num_graphs):
        key = stream_key(seed * 1_000_003 + graph, 2)
        _, users = sample_skewed(num_examples, num_users, mean, skew, key, threshold)
        counts[graph] = np.bincount(users, minlength=num_users)
    return counts


def p_value(counts, law):
    """Chi-square of the sorted rows of counts against a law, rare outcomes pooled."""
    observed = collections.Counter(tuple(row) for row in np.sort(counts, axis=1).tolist())
    assert set(observed) <= set(law), "an outcome of probability 0 occurred"
    expected = {outcome: len(counts) * probability for outcome, probability in law.items()}
    common = [outcome for outcome, number in expected.items() if number >= 10]
    seen = [observed[outcome] for outcome in common]
    wanted = [expected[outcome] for outcome in common]
    rest = len(counts) - sum(wanted)
    if rest >= 10:
        seen, wanted = [*seen, len(counts) - sum(seen)], [*wanted, rest]
    wanted = np.array(wanted) * sum(seen) / sum(wanted)
    return scipy.stats.chisquare(seen, wanted).pvalue


@pytest.mark.parametrize("threshold", [1e-9, COIN_THRESHOLD, 0.49])  # coins for all, as shipped, coins for few
@pytest.mark.parametrize("world", SMALL_WORLDS)
def test_final_counts_follow_the_exact_law(world, threshold):
    counts = kernel_simulation(NUM_GRAPHS, *world, seed=1, threshold=threshold)
    assert p_value(counts, law_of_final_counts(*world)) > FALSE_ALARM


@pytest.mark.parametrize("world", SMALL_WORLDS)
def test_dense_coins_follow_the_exact_law(world):
    assert p_value(dense_simulation(NUM_GRAPHS, *world, seed=2), law_of_final_counts(*world)) > FALSE_ALARM


@pytest.mark.parametrize(
    "bug",
    [
        "weights never updated",
        "no thinning",
        "weight of the class",
        "with replacement",
        "updated inside an example",
    ],
)
def test_planted_bugs_are_caught(bug):
    world = SMALL_WORLDS[0]
    counts = dense_simulation(NUM_GRAPHS, *world, seed=3, bug=bug)
    assert p_value(counts, law_of_final_counts(*world)) < FALSE_ALARM


@pytest.mark.parametrize("threshold", [1e-9, 0.49])
def test_whole_labelled_graphs_follow_the_exact_law(threshold):
    num_users, num_examples, mean, skew = 3, 2, 1.2, 1.5
    law = np.zeros((8, 8))
    masks = list(itertools.product((0, 1), repeat=num_users))
    for first, second in itertools.product(range(8), repeat=2):
        p = probabilities(np.zeros(num_users), mean, skew)
        q = probabilities(np.array(masks[first]), mean, skew)
        law[first, second] = np.prod(np.where(masks[first], p, 1 - p)) * np.prod(np.where(masks[second], q, 1 - q))
    observed = np.zeros((8, 8))
    for graph in range(NUM_GRAPHS):
        indptr, users = sample_skewed(num_examples, num_users, mean, skew, stream_key(graph, 3), threshold)
        sets = [sum(4 >> user for user in users[indptr[i] : indptr[i + 1]]) for i in range(2)]
        observed[sets[0], sets[1]] += 1
    expected = law.ravel() * NUM_GRAPHS
    assert expected.min() > 10
    assert scipy.stats.chisquare(observed.ravel(), expected).pvalue > FALSE_ALARM


def features_of(counts):
    ordered = np.sort(counts, axis=1)
    return {
        "heaviest": ordered[:, -1],
        "second": ordered[:, -2],
        "unused": (counts == 0).sum(axis=1),
        "pairs": counts.sum(axis=1),
        "squares": (counts**2).sum(axis=1),
    }


@pytest.mark.parametrize("world", [(30, 80, 2.0, 1.5), (60, 40, 2.0, 1.5), (25, 60, 6.0, 1.0)])
def test_agrees_with_dense_coins_on_larger_graphs(world):
    ours = features_of(kernel_simulation(4000, *world, seed=4))
    dense = features_of(dense_simulation(4000, *world, seed=5))
    for name in ours:  # five tests of 2e-7 each; on integers Kolmogorov-Smirnov errs to the safe side
        assert scipy.stats.ks_2samp(ours[name], dense[name]).pvalue > 2e-7, name


def test_larger_graphs_catch_weights_that_are_never_updated():
    world = (60, 40, 2.0, 1.5)
    ours = features_of(kernel_simulation(4000, *world, seed=4))
    wrong = features_of(dense_simulation(4000, *world, seed=5, bug="weights never updated"))
    assert scipy.stats.ks_2samp(ours["heaviest"], wrong["heaviest"]).pvalue < 2e-7


def test_labels_are_exchangeable():
    counts = kernel_simulation(8000, 20, 30, 2.0, 1.5, seed=6)
    ordered = np.sort(counts, axis=1)
    alone_at_the_top = ordered[:, -1] > ordered[:, -2]
    heaviest = np.bincount(counts[alone_at_the_top].argmax(axis=1), minlength=20)
    assert heaviest.sum() > 4000
    assert scipy.stats.chisquare(heaviest).pvalue > FALSE_ALARM


def test_mean_users_per_example_below_the_cap():
    # Probabilities sum to the mean while none is capped, so pairs - mean·examples is a martingale with variance at
    # most mean·examples; six standard deviations are passed with probability below 2e-9.
    graph = SkewedGraph(num_examples=50_000, skew=0.5).generate(seed=0)
    assert abs(graph.num_pairs - 2.0 * 50_000) < 6 * np.sqrt(2.0 * 50_000)


def test_cap_lowers_the_mean_and_is_kept():
    # One user's weight outgrows all others': she is on almost every later example, and the mean falls towards 1.
    graph = SkewedGraph(num_examples=50_000, skew=3.0).generate(seed=0)
    assert graph.examples_per_user.max() <= 50_000
    assert graph.num_pairs < 1.9 * 50_000


def test_skew_makes_heavier_users():
    heaviest = [
        SkewedGraph(num_examples=20_000, skew=skew).generate(seed=0).examples_per_user.max() for skew in (0.0, 1.0, 1.5)
    ]
    assert heaviest[0] < heaviest[1] < heaviest[2]


def test_hit_probability():
    rates = np.concatenate([[0.0], np.logspace(-12, np.log10(0.75), 200)])
    assert [hit_probability(rate) for rate in rates] == pytest.approx(-np.expm1(-rates), rel=1e-13)
    q = np.linspace(1e-6, 0.5, 1000)
    assert (-np.expm1(-q * (1 + q)) >= q).all()  # the bound that thinning rests on


@settings(max_examples=50, deadline=None)
@given(
    num_examples=st.integers(0, 80),
    mean_users=st.floats(0.01, 90.0),
    mean_examples=st.floats(0.5, 50.0),
    skew=st.floats(0.0, 10.0),
    seed=st.integers(0, 2**63 - 1),
)
def test_users_are_distinct_and_in_range(num_examples, mean_users, mean_examples, skew, seed):
    world = SkewedGraph(
        num_examples=num_examples, mean_users_per_example=mean_users, mean_examples_per_user=mean_examples, skew=skew
    )
    graph = world.generate(seed=seed)
    assert (graph.num_examples, graph.num_users) == (num_examples, world.num_users)
    for example in range(num_examples):
        users = graph.users[graph.indptr[example] : graph.indptr[example + 1]]
        assert (np.diff(users) > 0).all()
        assert ((users >= 0) & (users < graph.num_users)).all()


def test_kernel_never_repeats_a_user():
    # AttributionGraph would collapse repeated users, so the kernel's own rows are looked at.
    for seed in range(200):
        indptr, users = sample_skewed(40, 12, 5.0, 1.5, stream_key(seed, 2), 0.49)
        for example in range(40):
            own = users[indptr[example] : indptr[example + 1]]
            assert len(np.unique(own)) == len(own)


def test_same_bits_everywhere():
    world = SkewedGraph(num_examples=20_000)
    assert content_hash(world.generate(seed=7)) == GOLDEN_HASH
    assert content_hash(world.generate(seed=8)) != GOLDEN_HASH


@pytest.mark.parametrize("skew", [-0.1, 10.5, float("nan"), "1.5"])
def test_bad_skew_is_refused(skew):
    with pytest.raises(InputError, match="skew"):
        SkewedGraph(num_examples=10, skew=skew)


GOLDEN_HASH = "9c30999e91d676f989a7fda9de36896b87f2df114a8ff98c23e05ccc7fa0aa17"
