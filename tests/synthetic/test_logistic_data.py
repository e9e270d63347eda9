import concurrent.futures
import hashlib

import numpy as np
import pytest
import scipy.special
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from coowned import threads
from coowned.attribution.graph import AttributionGraph
from coowned.errors import InputError
from coowned.synthetic import logistic_data
from coowned.synthetic.logistic_data import LogisticData
from coowned.synthetic.regular_graph import RegularGraph

GRAPH = RegularGraph(num_examples=5000).generate(seed=0)


@settings(max_examples=40, deadline=None)
@given(
    examples=st.lists(st.integers(0, GRAPH.num_examples - 1), max_size=40),
    cut=st.integers(0, 40),
    num_features=st.integers(1, 33),
    seed=st.integers(0, 2**63 - 1),
)
def test_batching_changes_nothing(examples, cut, num_features, seed):
    world = LogisticData(num_features=num_features).attach(GRAPH, seed=seed)
    features, labels = world.batch(examples)
    assert features.shape == (len(examples), num_features)
    halves = [world.batch(examples[:cut]), world.batch(examples[cut:])]
    assert np.array_equal(features, np.concatenate([half[0] for half in halves]))
    assert np.array_equal(labels, np.concatenate([half[1] for half in halves]))
    assert np.array_equal(features, world.features(examples))
    assert np.array_equal(labels, world.labels(examples))
    for place, example in enumerate(examples[:3]):
        assert np.array_equal(features[place], world.features([example])[0])
        assert world.split([example])[0] == world.split(examples)[place]


def test_threads_change_nothing(monkeypatch):
    world = LogisticData(num_features=100).attach(GRAPH, seed=1)
    everyone = np.arange(GRAPH.num_examples)[::-1]
    monkeypatch.setattr(threads, "cores", lambda: 1)
    alone = world.batch(everyone)
    monkeypatch.setattr(threads, "cores", lambda: 5)
    monkeypatch.setattr(logistic_data, "NUMBERS_A_THREAD", 1000)
    together = world.batch(everyone)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        asked_at_once = list(pool.map(lambda _: world.batch(everyone), range(3)))
    for features, labels in [together, *asked_at_once]:
        assert np.array_equal(features, alone[0])
        assert np.array_equal(labels, alone[1])


def test_features_are_gaussian():
    d = 40
    features = LogisticData(num_features=d).attach(GRAPH, seed=2).features(np.arange(5000)) * np.sqrt(d)
    # False-alarm probability 1e-6 each, fixed seed.
    assert scipy.stats.kstest(features.ravel(), "norm").pvalue > 1e-6
    squared_norms = (features.astype(float) ** 2).sum(axis=1)
    assert scipy.stats.kstest(squared_norms, "chi2", args=(d,)).pvalue > 1e-6
    # All 780 pairs of columns, and each row with the next: 6 standard deviations, 2e-9 a pair.
    correlations = np.corrcoef(features.T)[np.triu_indices(d, 1)]
    assert np.abs(correlations).max() < 6 / np.sqrt(5000)
    assert abs((features[1:] * features[:-1]).mean()) < 6 / np.sqrt(features[1:].size)


def test_mean_squared_norms_are_one():
    # Not sqrt(d), as a covariance of 1/sqrt(d) would give. Standard deviation sqrt(2/d) = 0.014 for one vector.
    world = LogisticData(num_features=10_000).attach(GRAPH, seed=3)
    assert (world.base_vector**2).sum() == pytest.approx(1.0, abs=6 * 0.0142)
    assert (world.bias_vector**2).sum() == pytest.approx(1.0, abs=6 * 0.0142)
    assert (world.features([0]) ** 2).sum() == pytest.approx(1.0, abs=6 * 0.0142)
    assert abs(world.base_vector @ world.bias_vector) < 6 / np.sqrt(10_000)


@pytest.mark.parametrize(("beta", "steepness", "d"), [(1.0, 20.0, 50), (0.0, 20.0, 7), (3.0, 5.0, 1)])
def test_probabilities_are_the_papers_formula(beta, steepness, d):
    world = LogisticData(num_features=d, steepness=steepness, bias_strength=beta).attach(GRAPH, seed=4)
    examples = np.arange(0, 5000, 3)
    z = world.features(examples).astype(float)
    truth = world.base_vector + beta * GRAPH.users_per_example[examples][:, None] * world.bias_vector
    expected = scipy.special.expit(steepness * (2 / (1 + beta) * truth * z).sum(axis=1))
    assert world.probabilities(examples) == pytest.approx(expected, rel=1e-9)


def test_number_of_users_matters_only_with_bias():
    crowded = AttributionGraph.from_users_per_example([list(range(9))] * 50)
    alone = AttributionGraph.from_users_per_example([[0]] * 50)
    for beta, equal in ((0.0, True), (1.0, False)):
        settings_ = LogisticData(num_features=10, bias_strength=beta)
        first, second = (settings_.attach(graph, seed=0).probabilities(np.arange(50)) for graph in (crowded, alone))
        assert np.array_equal(first, second) == equal


def test_labels_follow_probabilities():
    world = LogisticData(num_features=50).attach(GRAPH, seed=5)
    examples = np.arange(5000)
    p, labels = world.probabilities(examples), world.labels(examples)
    assert set(labels.tolist()) == {0, 1}
    # Ten equal groups by probability; each sum is within 6 standard deviations: false alarms below 10 · 2e-9 or so.
    for group in np.array_split(np.argsort(p), 10):
        deviation = labels[group].sum() - p[group].sum()
        assert abs(deviation) <= 6 * np.sqrt((p[group] * (1 - p[group])).sum()) + 1


def test_split_is_80_10_10_and_complete():
    world = LogisticData(num_features=1).attach(RegularGraph(num_examples=100_000).generate(seed=0), seed=6)
    codes = world.split(np.arange(100_000))
    # False-alarm probability 1e-6, fixed seed.
    assert scipy.stats.chisquare(np.bincount(codes, minlength=3), [80_000, 10_000, 10_000]).pvalue > 1e-6
    parts = [world.examples_in(name) for name in ("train", "validation", "test")]
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(100_000))
    for code, part in enumerate(parts):
        assert (codes[part] == code).all()
    with pytest.raises(InputError, match="split"):
        world.examples_in("dev")


def test_split_tells_nothing_about_the_label():
    world = LogisticData(num_features=10).attach(GRAPH, seed=7)
    table = np.zeros((2, 3))
    np.add.at(table, (world.labels(np.arange(5000)), world.split(np.arange(5000))), 1)
    # False-alarm probability 1e-6, fixed seed.
    assert scipy.stats.chi2_contingency(table).pvalue > 1e-6


def test_materialized_world_is_the_same_world():
    world = LogisticData(num_features=12).attach(GRAPH, seed=8)
    stored = world.materialize()
    examples = np.array([7, 7, 4999, 0])
    assert stored.stored is not None
    assert np.array_equal(stored.features(examples), world.features(examples))
    assert np.array_equal(stored.labels(examples), world.labels(examples))
    assert all(np.array_equal(a, b) for a, b in zip(stored.batch(examples), world.batch(examples), strict=True))
    assert np.array_equal(stored.split(examples), world.split(examples))


def test_too_large_to_materialize():
    world = LogisticData(num_features=1000).attach(GRAPH, seed=0)
    with pytest.raises(InputError, match="batch"):
        world.materialize(limit_gigabytes=0.01)
    with pytest.raises(InputError, match="limit_gigabytes"):
        world.to_table(limit_gigabytes=0.0)


def test_table_holds_the_world():
    world = LogisticData(num_features=3).attach(GRAPH, seed=9)
    table = world.to_table()
    everyone = np.arange(GRAPH.num_examples)
    assert table.column("example_id").to_pylist() == everyone.tolist()
    assert np.array_equal(np.array(table.column("features").to_pylist(), dtype=np.float32), world.features(everyone))
    assert table.column("label").to_pylist() == world.labels(everyone).tolist()
    assert table.column("users").to_pylist()[:50] == [
        GRAPH.users[GRAPH.indptr[i] : GRAPH.indptr[i + 1]].tolist() for i in range(50)
    ]
    assert table.column("split").to_pylist().count("test") == len(world.examples_in("test"))


def test_seeds_make_different_worlds():
    first, second = (LogisticData(num_features=6).attach(GRAPH, seed=seed) for seed in (0, 1))
    assert not np.isin(first.features(np.arange(50)), second.features(np.arange(50))).any()
    assert not np.array_equal(first.split(np.arange(500)), second.split(np.arange(500)))


def test_same_bits_everywhere():
    world = LogisticData(num_features=33).attach(GRAPH, seed=7)
    features, labels = world.batch(np.arange(2000))
    content = features.astype("<f4").tobytes() + labels.tobytes() + world.split(np.arange(2000)).tobytes()
    assert hashlib.sha256(content).hexdigest() == GOLDEN_HASH


@pytest.mark.parametrize("examples", [[5000], [-1], [0.5], [[1, 2]], ["a"], [True]])
def test_bad_examples_are_refused(examples):
    world = LogisticData(num_features=2).attach(GRAPH, seed=0)
    for ask in (world.features, world.labels, world.batch, world.probabilities, world.split):
        with pytest.raises(InputError, match="examples"):
            ask(examples)


@pytest.mark.parametrize("wrong", [{"num_features": 0}, {"steepness": -1.0}, {"bias_strength": -0.1}])
def test_bad_settings_are_refused(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        LogisticData(**wrong)


def test_bad_seed_is_refused():
    with pytest.raises(InputError, match="seed"):
        LogisticData().attach(GRAPH, seed=1.5)  # pyright: ignore[reportArgumentType]


GOLDEN_HASH = "eeb331393ceda55fd985d1cd8668579d25afecf1d3a2756abf8f4c83b065e565"
