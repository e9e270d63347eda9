"""Loss and accuracy with intervals."""

import math

import numpy as np
import pytest
from tests.training.conftest import NUM_FEATURES, part_of

from coowned import InputError
from coowned.training.data import FeatureTable
from coowned.training.evaluate import evaluate, wilson_interval
from coowned.training.models.logistic_regression import LogisticRegression

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
