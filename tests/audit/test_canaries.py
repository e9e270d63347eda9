import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax_privacy.auditing import CanaryScoreAuditor, Explicit
from scipy.special import expit

from coowned import AttributionGraph, Greedy, PoissonSampling, certify, guarantee
from coowned.accounting.gaussian import gaussian_epsilon
from coowned.audit import canaries
from coowned.audit.canaries import (
    DataWithCanaries,
    area_under_curve,
    audit_with_canaries,
    epsilon_lower_bound,
    gaussian_lower_bound,
    graph_with_canaries,
)
from coowned.content.data import FeatureTable
from coowned.content.example_table import ExampleTable
from coowned.content.hashed_text import SparseTable, hash_texts
from coowned.errors import InputError
from coowned.exact.grid import Grid
from coowned.exact.keys import RunKey
from coowned.exact.linear_sums import norms_of
from coowned.models.jax_model import JaxModel
from coowned.models.linear_regression import LinearRegression
from coowned.models.logistic_regression import LogisticRegression
from coowned.models.probes import feature_canaries, token_canaries
from coowned.models.text_classifier import TextClassifier
from coowned.synthetic.logistic_data import LogisticData, WorldData
from coowned.training.loop import Trainer
from coowned.training.plan import TrainingPlan

BOUND, NUM_FEATURES, CANARIES = 2, 2, 200


@pytest.fixture(scope="module")
def data():
    graph = AttributionGraph.from_users_per_example([[user, (user + 1) % 150] for user in range(150)])
    return WorldData.part(LogisticData(num_features=NUM_FEATURES).attach(graph, seed=0))


def make_plan(graph, *, epsilon=1.0, learning_rate=0.1, iterations=20):
    selection = Greedy(contribution_bound=BOUND).select(graph)
    certificate = certify(graph, selection)
    mechanism = PoissonSampling.from_certificate(certificate, batch_size=60, iterations=iterations)
    made = guarantee(certificate, mechanism, epsilon=epsilon, delta=1e-5, adjacency="zero-out", test_run=True)
    return TrainingPlan(
        certificate=certificate,
        selected=selection,
        mechanism=mechanism,
        guarantee=made,
        clip_norm=1.0,
        optimizer="sgd",
        learning_rate=learning_rate,
        run_key=RunKey.from_seed(5),
    )


def content(users=CANARIES):
    return feature_canaries(users, BOUND, num_features=NUM_FEATURES, length=4.0)


def audit(data, seed=0, make=make_plan, users=CANARIES, **changes):
    settings = {"per_user": BOUND, "coins": RunKey.from_seed(seed)} | changes
    model = LogisticRegression(num_features=NUM_FEATURES + users)
    return audit_with_canaries(model, data, make, content(users), **settings)


@pytest.fixture(params=[0.0, 0.01])
def little_noise(request, monkeypatch):
    """The bug: the claim is made, and no noise, or a hundredth of it, is added."""
    honest = Grid.noise_deviation
    monkeypatch.setattr(Grid, "noise_deviation", lambda grid, sigma: request.param * honest(grid, sigma))


def test_an_honest_run_passes(data, monkeypatch):
    read = []
    run = Trainer.run
    monkeypatch.setattr(
        Trainer, "run", lambda self, given, *rest, **more: read.append(given) or run(self, given, *rest, **more)
    )
    found = audit(data)  # accused with probability at most alpha = 1e-3 over seeds
    assert "norms" in read[0].shapes()  # clipped by the code that clips in `train`
    assert found.claim_holds
    assert found.epsilon_lower_bound <= found.claimed_epsilon <= 1.0
    assert found.canaries == CANARIES
    assert 60 < found.included < 140


@pytest.mark.usefixtures("little_noise")
def test_a_run_without_noise_is_caught(data):
    """With two features: every canary has a column of their own."""
    longer = functools.partial(make_plan, iterations=60)  # every canary is drawn a few times
    found = audit(data, make=longer)
    assert not found.claim_holds
    assert found.claimed_epsilon <= 1.0
    assert found.epsilon_lower_bound > 1.5
    assert found.gaussian_lower_bound > 2.5
    assert found.area_under_curve > 0.98
    assert found.gaussian_lower_bound <= found.largest_bound < 4.5


def audit_own(make):
    """Of a model of one's own, on random canaries of 4000 features."""
    graph = AttributionGraph.from_users_per_example([[user, (user + 1) % 150] for user in range(150)])
    x = np.random.default_rng(0).normal(size=(150, 4000))
    data = ExampleTable(graph=graph, arrays={"x": x, "label": (x[:, 0] > 0).astype(np.int32)})

    def loss(parameters, example, key):
        score = example["x"] @ parameters["w"]
        return jnp.logaddexp(0.0, score) - example["label"] * score

    def predict(parameters, example):
        return jax.nn.sigmoid(example["x"] @ parameters["w"])

    model = JaxModel(loss=loss, parameters={"w": np.zeros(4000)}, predict=predict, classes=2)
    own = model.for_schema(pa.schema({"x": pa.list_(pa.float32(), 4000), "label": pa.int32()}))
    model, content = own.with_canaries(CANARIES, BOUND, 1.0)
    return audit_with_canaries(model, data, make, content, per_user=BOUND, coins=RunKey.from_seed(0))


@pytest.mark.full
def test_an_honest_model_of_ones_own_passes():
    assert audit_own(make_plan).claim_holds


@pytest.mark.usefixtures("little_noise")
def test_a_model_of_ones_own_without_noise_is_caught():
    found = audit_own(functools.partial(make_plan, iterations=60))
    assert not found.claim_holds
    assert found.area_under_curve > 0.8


def test_canaries_fill_their_bound(data):
    graph = graph_with_canaries(data.graph, num_users=30, per_user=BOUND)
    selection = Greedy(contribution_bound=BOUND).select(graph)
    assert selection.copies[data.graph.num_examples :].tolist() == [1] * 60
    assert certify(graph, selection).contribution_bound == BOUND


def test_graph_is_the_same_for_all(data):
    graphs = [
        DataWithCanaries.around(data, content(30), per_user=BOUND, included=included)
        for included in (np.zeros(30, bool), np.arange(30) % 2 == 0)
    ]
    assert graphs[0].graph.digest == graphs[1].graph.digest
    out, also = ({"features": np.ones((3, width), np.float32), "labels": np.zeros(3, np.float32)} for width in (32, 2))
    graphs[0].fill(np.array([149, 0, 7]), out)
    data.fill(np.array([149, 0, 7]), also)
    np.testing.assert_array_equal(out["features"][:, :2], also["features"])
    assert (out["features"][:, 2:] == 0).all()


@pytest.mark.parametrize("kind", ["text", "int", "none"])
def test_names_of_every_type(kind):
    ids = {"text": ["a", "b"], "int": [7, 9], "none": None}[kind]
    graph = AttributionGraph.from_users_per_example([[0, 1], [1]], example_ids=ids, user_keys=ids)
    grown = graph_with_canaries(graph, num_users=2, per_user=2)
    assert grown.num_examples == 6
    assert len(set(grown.user_keys.to_pylist() if kind != "none" else range(4))) == 4
    assert grown.digest != graph.digest


def test_a_canary_who_is_out_is_silent(data):
    model = LogisticRegression(num_features=NUM_FEATURES + 2)
    mixed = DataWithCanaries.around(data, content(2), per_user=2, included=np.array([True, False]))
    out = {"features": np.zeros((4, NUM_FEATURES + 2), np.float32), "labels": np.zeros(4, np.float32)}
    mixed.fill(np.arange(150, 154), out)
    parameters = {name: array[None] for name, array in model.initial().items()}
    one, grids = {name: array[:2] for name, array in out.items()}, [model.grid(1.0)]
    both, _ = model.clipped_sum(parameters, out, np.ones(4, bool), grids)
    alone, _ = model.clipped_sum(parameters, one, np.ones(2, bool), grids)
    assert np.array_equal(both["coefficients"], alone["coefficients"])
    assert np.abs(alone["coefficients"] * grids[0].unit).max() > 0.01


def test_canaries_have_their_norms(data):
    mixed = DataWithCanaries.around(data, content(2), per_user=2, included=np.array([True, False])).with_norms()
    out = {name: np.zeros((5, *shape), np.float32) for name, shape in mixed.shapes().items()}
    mixed.fill(np.array([151, 3, 153, 149, 150]), out)
    np.testing.assert_array_equal(out["norms"], norms_of(out["features"]))
    assert np.isfinite(out["norms"]).tolist() == [True, True, False, True, True]


def test_texts_have_no_norms(texts):
    data = texts["masked"][1]
    made = token_canaries(2, 2, vocabulary_size=2000, sequence_length=12, seed=3)
    mixed = DataWithCanaries.around(data, made, per_user=2, included=np.array([True, False]))
    assert mixed.with_norms().shapes() == mixed.shapes()


@pytest.mark.parametrize(
    ("inside", "outside", "pairs"),
    [
        ([1, 4], [2, 3, 5], 2 / 6),
        ([1, 2, 2], [2, 0], 4 / 6),
        ([1, 1], [1], 0.5),
        ([0], [1, 2], 0.0),
        ([3], [1, 2], 1.0),
    ],
)
def test_area_counts_pairs(inside, outside, pairs):
    assert area_under_curve(inside, outside) == pytest.approx(pairs)
    assert area_under_curve(outside, inside) == pytest.approx(1 - pairs)


def test_text_canaries_are_sentences():
    made = token_canaries(5, 1, vocabulary_size=40, sequence_length=20, seed=0)
    assert made.arrays["tokens"].shape == (5, 20)
    assert made.arrays["positions"].shape == (5, 3)
    assert made.arrays["weights"].sum(axis=1).tolist() == pytest.approx([1.0] * 5)
    assert all(len(set(row)) == 3 for row in made.arrays["positions"].tolist())
    assert len(np.unique(made.arrays["targets"])) == 5  # a word of their own each


LINEAR = {
    "softmax": LogisticRegression(num_features=NUM_FEATURES, classes=3),
    "regression": LinearRegression(num_features=NUM_FEATURES, target_bound=7.0),
    "text": TextClassifier(num_features=32),
    "text of three classes": TextClassifier(num_features=32, classes=3),
}


def linear_data(name, graph):
    generator = np.random.default_rng(0)
    if name.startswith("text"):
        words = pa.array([" ".join(generator.choice(["ham", "eggs", "spam", "tea"], 6)) for _ in range(150)])
        hashed = hash_texts(words, num_features=32)
        labels = generator.integers(0, 2, 150).astype(np.float32)
        return SparseTable(graph=graph, labels=labels, **dict(list(hashed._asdict().items())[:3]))
    features = generator.normal(size=(150, NUM_FEATURES))
    return FeatureTable(graph=graph, features=features, labels=generator.integers(0, 3, 150))


@pytest.mark.parametrize("name", LINEAR)
def test_honest_linear_models_pass(data, name):
    model, own = LINEAR[name].with_canaries(CANARIES, BOUND, 1.0)
    found = audit_with_canaries(
        model, linear_data(name, data.graph), make_plan, own, per_user=BOUND, coins=RunKey.from_seed(0)
    )
    assert found.claim_holds


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("little_noise", [0.0], indirect=True)
def test_linear_models_without_noise_are_caught(data, name, little_noise):
    model, own = LINEAR[name].with_canaries(CANARIES, BOUND, 1.0)
    longer = functools.partial(make_plan, iterations=60)
    found = audit_with_canaries(
        model, linear_data(name, data.graph), longer, own, per_user=BOUND, coins=RunKey.from_seed(0)
    )
    assert not found.claim_holds
    assert found.area_under_curve > 0.95


def test_too_few_canaries(data):
    with pytest.raises(InputError, match="canaries"):
        audit(data, users=3)
    with pytest.raises(InputError, match="need 60 examples"):
        DataWithCanaries.around(data, content(29), per_user=2, included=np.ones(30, bool))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """{kind: (model, data)}: 150 short texts of two people each, and small BERTs that could learn them."""
    from coowned import from_table
    from coowned.content.columns import read_labels
    from coowned.content.text import Vocabulary
    from coowned.content.token_table import LabelledTokenTable, TokenTable
    from coowned.models.bert_files import BertConfig
    from coowned.models.bert_model import BertModel

    file = tmp_path_factory.mktemp("words") / "vocab.txt"
    words = [f"word{number}" for number in range(1995)]
    file.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n", encoding="utf-8")
    table = {
        "users": [[str(number), str((number + 1) % 150)] for number in range(150)],
        "text": [" ".join(words[(31 * number + place) % 400] for place in range(8)) for number in range(150)],
        "label": [number % 2 for number in range(150)],
    }
    config = BertConfig(
        vocab_size=2000, hidden_size=16, num_hidden_layers=1, intermediate_size=16, max_position_embeddings=12
    )
    vocabulary = Vocabulary.read(file)
    read = {"text": "text", "vocabulary": vocabulary, "sequence_length": 12}
    sizes = {"config": config, "sequence_length": 12, "microbatch": 64}
    examples = from_table(table)
    masked = TokenTable.from_examples(examples, **read)
    labelled = LabelledTokenTable.from_examples(examples, labels=read_labels(examples.payload, "label", (0, 1)), **read)
    return {
        "masked": (BertModel.masked_lm(**sizes), masked),
        "classifier": (BertModel.classifier(classes=2, **sizes), labelled),
    }


def text_audit(texts, kind):
    model, data = texts[kind]
    model, content = model.with_canaries(60, BOUND, 1.0)
    return audit_with_canaries(
        model,
        data,
        lambda graph: make_plan(graph, learning_rate=2.0),
        content,
        per_user=BOUND,
        coins=RunKey.from_seed(4),
    )


@pytest.mark.full
@pytest.mark.usefixtures("little_noise")
def test_text_without_noise_is_caught(texts):
    found = text_audit(texts, "masked")
    assert not found.claim_holds
    assert found.area_under_curve > 0.8


@pytest.mark.full
def test_a_text_classifier_without_noise_is_caught(texts, monkeypatch):
    """Of a hundredth of the noise too little is learned: each canary's words are spread over all parameters."""
    monkeypatch.setattr(Grid, "noise_deviation", lambda grid, sigma: 0.0)
    found = text_audit(texts, "classifier")
    assert not found.claim_holds
    assert found.area_under_curve > 0.8


@pytest.mark.full
@pytest.mark.parametrize("kind", ["masked", "classifier"])
def test_honest_text_passes(texts, kind):
    found = text_audit(texts, kind)  # accused with probability at most alpha = 1e-3 over seeds
    assert found.claim_holds


def test_honest_guesses_are_not_accused():
    """Randomized response with epsilon 1 and a Gaussian release with mu 1, 200 runs each at alpha 0.05.

    More than 22 accusations have probability below 1e-4 under an honest bound.
    """
    rng = np.random.default_rng(5)
    accused = {"pure": 0, "gaussian": 0}
    for _ in range(200):
        included = rng.random(200) < 0.5
        answer = np.where(rng.random(200) < expit(1.0), included, ~included)
        order = answer + 0.1 * rng.random(200)
        accused["pure"] += epsilon_lower_bound(order, included, delta=1e-9, alpha=0.05) > 1.0
        noisy = included + rng.normal(size=200)
        accused["gaussian"] += gaussian_lower_bound(noisy, included, delta=1e-3, alpha=0.05) > gaussian_epsilon(1, 1e-3)
    assert max(accused.values()) <= 22


@given(
    m=st.integers(10, 400),
    share=st.floats(0.05, 1.0),
    precision=st.floats(0.0, 1.0),
    delta=st.sampled_from([1e-3, 1e-6]),
    level=st.sampled_from([0.05, 1e-4]),
)
@pytest.mark.full
def test_no_more_than_jax_privacy(m, share, precision, delta, level):
    """n guesses of which so many are right, at one threshold: both methods to 1e-5, never above."""
    n = math.ceil(share * m)
    right = max(1, round(precision * n))
    inside = np.concatenate([np.full(right, 1.0), np.full(m - n, 0.0)])  # the rest of the canaries was in too
    theirs = CanaryScoreAuditor(inside, np.full(n - right, 1.0)) if n > right else CanaryScoreAuditor(inside, [-1.0])
    m = m if n > right else m + 1
    strategy = Explicit(0.5)
    wanted = theirs.epsilon_one_run(level, delta, threshold_strategy=strategy)
    found = canaries.largest_refuted(lambda epsilon: canaries.p_value(epsilon, delta, m, n, right) <= level)
    assert wanted - 1e-5 <= found <= wanted + 1e-6
    wanted = theirs.epsilon_one_run_fdp(level, delta, threshold_strategy=strategy)
    mu = canaries.largest_refuted(lambda mu: canaries.refutes_gaussian(mu, m, n, right, level))
    found = gaussian_epsilon(mu, delta) if mu else 0.0
    assert wanted - 2e-5 * (1 + wanted) <= found <= wanted + 2e-6 * (1 + wanted)


def test_order_of_scores_alone_matters():
    rng = np.random.default_rng(1)
    included = rng.random(200) < 0.5
    scores = included + rng.normal(size=200)
    for bound in (epsilon_lower_bound, gaussian_lower_bound):
        found = bound(scores, included, delta=1e-5, alpha=0.01)
        assert found > 0
        assert bound(np.exp(3 * scores), included, delta=1e-5, alpha=0.01) == found
        assert bound(-scores, included, delta=1e-5, alpha=0.01) == 0.0


def test_bad_arguments():
    with pytest.raises(InputError, match="included must have 3 entries"):
        epsilon_lower_bound([1, 2, 3], [True], delta=1e-5, alpha=0.1)
    with pytest.raises(InputError, match="alpha"):
        gaussian_lower_bound([1, 2], [True, False], delta=1e-5, alpha=0.0)
