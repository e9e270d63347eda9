"""Loss and accuracy with intervals."""

import math

import jax.numpy as jnp
import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal
from scipy.stats import binomtest
from tests.small_world import NUM_FEATURES, part_of

from coowned import InputError
from coowned.content.data import FeatureTable
from coowned.models.linear_regression import LinearRegression
from coowned.models.logistic_regression import LogisticRegression
from coowned.training.evaluate import check_labels, evaluate, predictions, wilson_interval

MODEL = LogisticRegression(num_features=NUM_FEATURES)
PARAMETERS = {"coefficients": np.array([3, -2, 1, 0.5, 0, 2, 0.1], np.float32)}


def test_equals_a_plain_loop(small):
    table = evaluate(MODEL, PARAMETERS, small.data, split="test")
    losses, right = [], []
    for example in range(300):
        x, y = small.world.features([example])[0].astype(float), int(small.world.labels([example])[0])
        logit = float(x @ PARAMETERS["coefficients"][:-1] + PARAMETERS["coefficients"][-1])
        losses.append(math.log1p(math.exp(logit)) - y * logit)
        right.append((logit > 0) == (y == 1))
    losses, right, users = np.array(losses), np.array(right), small.graph.users_per_example
    assert table["users_per_example"].to_list() == ["all", "1", "2"]
    for row, members in zip(table.iter_rows(named=True), [users > 0, users == 1, users == 2], strict=True):
        assert row["split"] == "test"
        assert row["examples"] == members.sum()
        assert row["loss"] == pytest.approx(losses[members].mean(), rel=1e-5)
        assert row["accuracy"] == pytest.approx(right[members].mean())
        half = 1.959964 * losses[members].std(ddof=1) / math.sqrt(members.sum())
        assert row["loss_high"] - row["loss"] == pytest.approx(half, rel=1e-4)
        assert row["accuracy_low"] < row["accuracy"] < row["accuracy_high"]
        assert row["covered_by_guarantee"] is False


def test_trivial_and_baseline_stand_beside(small):
    zero = {"coefficients": np.zeros(7, np.float32)}
    table = evaluate(MODEL, PARAMETERS, small.data, split="test", baseline=zero)
    alone = evaluate(MODEL, zero, small.data, split="test")
    for column in ("loss", "loss_low", "loss_high", "accuracy", "accuracy_low", "accuracy_high"):
        assert table[f"baseline_{column}"].equals(alone[column])
    labels, users = small.world.labels(np.arange(300)), small.graph.users_per_example
    frequent = labels == (labels.mean() > 0.5)
    shares = np.where(labels == 1, labels.mean(), 1 - labels.mean())
    for row, members in zip(table.iter_rows(named=True), [users > 0, users == 1, users == 2], strict=True):
        assert row["trivial_accuracy"] == pytest.approx(frequent[members].mean())
        assert row["trivial_loss"] == pytest.approx(-np.log(shares[members]).mean())
    assert table["trivial"][0] == "the most frequent class"
    assert (table["measure"] == "accuracy").all()


def test_numbers_are_not_right_or_wrong(small):
    """A regression has a squared error, beside that of the mean; targets beyond the bound count as the bound."""
    features, _ = small.world.batch(np.arange(300))
    targets = 3.0 * features[:, 0] + 1.0
    targets[7] = 1e6
    data = FeatureTable(graph=small.graph, features=features, labels=targets)
    model = LinearRegression(num_features=NUM_FEATURES, target_bound=10.0)
    table = evaluate(model, model.initial(), data, split="test")
    bounded = np.clip(targets, -10, 10)
    assert table["loss"][0] == pytest.approx((bounded**2).mean(), rel=1e-5)
    assert table["trivial_loss"][0] == pytest.approx(bounded.var(), rel=1e-5)
    assert (table["trivial"][0], table["measure"][0]) == ("the mean of the targets", "loss")
    assert table["accuracy"].null_count() == table["trivial_accuracy"].null_count() == len(table)


def test_largest_group(small):
    table = evaluate(MODEL, PARAMETERS, small.data, split="test", largest_group=1)
    assert table["users_per_example"].to_list() == ["all", "1+"]
    with pytest.raises(InputError):
        evaluate(MODEL, PARAMETERS, small.data, split="test", largest_group=0)
    with pytest.raises(InputError, match="features"):
        evaluate(LogisticRegression(num_features=3), PARAMETERS, small.data, split="test")


def test_intervals_cover():
    """Coverage of 2000 draws is Binomial(2000, c), c at least 0.93: below 0.90 with probability < 1e-6."""
    generator = np.random.default_rng(0)
    for share in (0.5, 0.8, 0.97):
        ends = np.array([wilson_interval(int(k), 100) for k in generator.binomial(100, share, 2000)])
        assert ((ends[:, 0] <= share) & (share <= ends[:, 1])).mean() > 0.90
    assert wilson_interval(0, 5)[0] == 0.0
    with pytest.raises(InputError):
        wilson_interval(6, 5)


@pytest.mark.parametrize(("successes", "trials"), [(0, 5), (5, 5), (1, 1), (8, 10), (1, 10**6), (123_456, 10**6)])
def test_intervals_are_those_of_scipy(successes, trials):
    expected = binomtest(successes, trials).proportion_ci(method="wilson")
    assert wilson_interval(successes, trials) == pytest.approx((expected.low, expected.high), rel=1e-9, abs=1e-15)


def test_not_finite_counts_as_wrong(small):
    features, labels = small.world.batch(np.arange(300))
    features[:10] = np.nan
    table = FeatureTable(graph=small.graph, features=features, labels=labels)
    clean = part_of(FeatureTable(graph=small.graph, features=features, labels=labels), np.arange(10, 300))
    spoiled, rest = (evaluate(MODEL, PARAMETERS, d, split="test").row(0, named=True) for d in (table, clean))
    assert spoiled["loss"] == pytest.approx(rest["loss"], rel=1e-5)
    assert spoiled["accuracy"] == pytest.approx(rest["accuracy"] * 290 / 300)
    assert (spoiled["examples"], spoiled["without_loss"], rest["without_loss"]) == (300, 10, 0)


def test_nothing_to_evaluate(small):
    nothing = FeatureTable(graph=small.graph.subgraph([]), features=np.zeros((0, 6)), labels=np.zeros(0))
    row = evaluate(MODEL, PARAMETERS, nothing, split="test").row(0, named=True)
    assert row["examples"] == 0
    assert row["accuracy"] is None


def test_labels_do_not_matter(small):
    features, labels = small.world.batch(np.arange(300))
    tables = [FeatureTable(graph=small.graph, features=features, labels=y) for y in (labels, np.full(300, np.nan))]
    one, other = (predictions(MODEL, PARAMETERS, table) for table in tables)
    assert_frame_equal(one, other)
    logits = features @ PARAMETERS["coefficients"][:-1] + PARAMETERS["coefficients"][-1]
    assert one["prediction"].to_list() == (logits > 0).astype(int).tolist()


@pytest.mark.parametrize("classes", [("spam", "ham"), (3, 5, 9)])
def test_probabilities_of_all_classes(small, classes):
    features, _ = small.world.batch(np.arange(300))
    features[7, 2] = np.nan
    table = FeatureTable(graph=small.graph, features=features, labels=np.full(300, np.nan))
    model = LogisticRegression(num_features=6, classes=classes)
    shape = model.shapes()["coefficients"]
    own = {"coefficients": np.random.default_rng(0).normal(size=shape).astype(np.float32)}
    found = predictions(model, own, table, probabilities=True)
    names = [f"probability_{name}" for name in classes]
    assert found.columns == ["prediction", "probability", *names]
    assert found.select("prediction", "probability").equals(predictions(model, own, table))
    assert found.row(7) == (None,) * found.width
    shares = np.delete(found.select(names).to_numpy(), 7, axis=0)
    np.testing.assert_allclose(shares.sum(axis=1), 1, rtol=1e-5)
    rows = found.drop_nulls()
    assert rows["prediction"].to_list() == [classes[place] for place in shares.argmax(axis=1)]
    np.testing.assert_allclose(rows["probability"], shares.max(axis=1), rtol=1e-6)


def test_a_number_has_no_probabilities(small):
    table = FeatureTable(graph=small.graph.subgraph([0]), features=np.ones((1, 1)), labels=np.zeros(1))
    with pytest.raises(InputError, match="there are no classes with probabilities"):
        predictions(Answers(None), {}, table, probabilities=True)


def test_classes_without_examples_are_named(small):
    features, labels = small.world.batch(np.arange(300))
    model = LogisticRegression(num_features=6, classes=["spam", "ham", "eggs"])
    shape = model.shapes()["coefficients"]
    for values, unmatched in ((labels, ["eggs"]), (np.full(300, np.nan), ["spam", "ham", "eggs"])):
        table = FeatureTable(graph=small.graph, features=features, labels=values)
        row = evaluate(model, {"coefficients": np.zeros(shape, np.float32)}, table, split="test").row(0, named=True)
        assert (row["classes"], row["unmatched_classes"]) == (["spam", "ham", "eggs"], unmatched)


def test_classes_that_match_nothing_are_refused():
    def split(unmatched, examples=40, classes=("a", "b")):
        return pl.DataFrame([{"examples": examples, "classes": classes, "unmatched_classes": unmatched}])

    with pytest.raises(InputError, match="none of the 80 held-out examples has a label among the classes 'a', 'b'"):
        check_labels({"validation": split(("a", "b")), "test": split(("a", "b"))})
    check_labels({"validation": split(("a", "b")), "test": split(("a",))})
    check_labels({"validation": split(("a", "b"), examples=0), "test": split(("a",))})
    check_labels({"test": split(("a", "b"), examples=0)})  # nothing was held out: nothing is known
    check_labels({"test": split(None, classes=None)})


class Answers:
    """Gives the first feature as the answer."""

    runs_in_jax = True

    def __init__(self, classes):
        self.classes = classes

    def check_data(self, shapes):
        pass

    def predict(self, parameters, batch):
        answer = batch["features"][:, 0]
        if self.classes is None:
            return answer, jnp.full_like(answer, jnp.nan)
        return answer.astype(jnp.int32), jnp.where(jnp.isfinite(answer), 0.75, jnp.nan)


@pytest.mark.parametrize("classes", [("spam", "ham", "news"), (3, 5, 9), None])
def test_predictions_are_spelled_as_the_labels_were(small, classes):
    answers = np.array([2, 0, 1, np.nan, 2], np.float32)
    table = FeatureTable(graph=small.graph.subgraph(np.arange(5)), features=answers[:, None], labels=np.zeros(5))
    found = predictions(Answers(classes), {}, table)
    spelled = [None if np.isnan(a) else (float(a) if classes is None else classes[int(a)]) for a in answers]
    assert found["prediction"].to_list() == spelled
    certain = [None] * 5 if classes is None else [0.75, 0.75, 0.75, None, 0.75]
    assert found["probability"].to_list() == certain
