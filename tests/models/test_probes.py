"""What the examples of an audit hold: their clipped gradients are what is said of them."""

import numpy as np
import pytest

from coowned import AttributionGraph
from coowned.content.data import rows_in_place, with_norms
from coowned.models.linear_regression import LinearRegression
from coowned.models.logistic_regression import LogisticRegression
from coowned.models.probes import BLANK, HUGE, IN, INFINITE, NOT_A_NUMBER, OPPOSITE, QUIET, sparse_canaries
from coowned.models.text_classifier import TextClassifier

MODELS = {
    "two classes": LogisticRegression(num_features=5),
    "four classes": LogisticRegression(num_features=5, classes=4),
    "regression": LinearRegression(num_features=5, target_bound=3.0),
    "text": TextClassifier(num_features=30),
    "text of four classes": TextClassifier(num_features=30, classes=4),
}


def filled(content, coordinate, held):
    out = {name: np.empty((len(held), *np.shape(value)), value.dtype) for name, value in content.example().items()}
    content.fill(out, np.array(coordinate), np.array(held))
    return out


def clipped(model, batch, count):
    parameters = {name: array[None] for name, array in model.initial().items()}
    sums, _ = model.clipped_sum(parameters, batch, np.ones(count, bool), [model.grid(0.7)])
    return sums["coefficients"][0].reshape(-1) * model.grid(0.7).unit / 0.7


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("held", [BLANK, IN, NOT_A_NUMBER, INFINITE, HUGE, QUIET, OPPOSITE])
def test_clipped_gradients_are_those_that_are_said(name, held):
    """Of three copies along one coordinate and one along another, from arrays and in place."""
    model = MODELS[name]
    content = model.worst_case()
    batch = filled(content, [1, 1, 0, 1], [held] * 4)
    expected = content.released(np.array([[1.0, 3.0]]), held)[0]
    found = clipped(model, batch, 4)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=0.01)
    assert (np.abs(found).max() > 0.3) == (held in (IN, HUGE, OPPOSITE))
    table = content.table(AttributionGraph.from_users_per_example([[0], [1], [2], [3]]), batch)
    place = rows_in_place(with_norms(table), np.arange(4))
    assert np.array_equal(clipped(model, {"features": place, "labels": batch["labels"]}, 4), found)


@pytest.mark.parametrize("name", MODELS)
def test_the_crowd_has_a_coordinate_of_its_own(name):
    content = MODELS[name].worst_case()
    both = filled(content, [-1, content.users - 1], [IN, IN])
    first, second = (clipped(MODELS[name], {key: array[i : i + 1] for key, array in both.items()}, 1) for i in (0, 1))
    assert np.abs(first - second).max() > 0.3


@pytest.mark.parametrize("name", MODELS)
def test_an_ordinary_example_has_a_long_gradient(name):
    batch = {key: np.asarray(value)[None] for key, value in MODELS[name].worst_case().example().items()}
    assert np.linalg.norm(clipped(MODELS[name], batch, 1)) == pytest.approx(1, abs=0.01)


def test_canaries_have_features_of_their_own():
    model, content = MODELS["text"].with_canaries(4, 2, 1.0)
    assert model.num_features == 34
    assert content.arrays["indices"].ravel().tolist() == [30, 30, 31, 31, 32, 32, 33, 33]
    assert len(sparse_canaries(3, 2, num_features=5)) == 6
    for name in ("two classes", "four classes", "regression"):
        model, content = MODELS[name].with_canaries(4, 2, 0.5)
        assert model.num_features == 9
        assert (content.arrays["features"] != 0).sum(axis=1).tolist() == [1] * 8
