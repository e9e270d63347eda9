"""Logistic regression in one row of coefficients."""

import jax
import numpy as np
import pytest

from coowned import InputError
from coowned.exact.linear_sums import clipped_linear_sums
from coowned.models.logistic_regression import LogisticRegression

MODEL = LogisticRegression(num_features=3)
GENERATOR = np.random.default_rng(0)
BATCH = {
    "features": GENERATOR.standard_normal((20, 3)).astype(np.float32),
    "labels": (GENERATOR.random(20) < 0.5).astype(np.float32),
}
MASK = np.arange(20) < 15
PARAMETERS = {"coefficients": np.array([0.5, -1, 2, 0.25], np.float32)}


def test_gradient_is_that_of_the_mechanism():
    grids = [MODEL.grid(0.5), MODEL.grid(2.0)]
    both = {"coefficients": np.stack([PARAMETERS["coefficients"], np.zeros(4, np.float32)])}
    for count in (1, 2):
        ours, clipped = MODEL.clipped_sum({"coefficients": both["coefficients"][:count]}, BATCH, MASK, grids[:count])
        expected = clipped_linear_sums(both["coefficients"][:count], *BATCH.values(), MASK, grids[:count])
        assert np.array_equal(ours["coefficients"], expected[0])
        assert clipped == expected[1]


SOFTMAX = LogisticRegression(num_features=3, classes=["a", "b", "c", "d"])
SOFTMAX_BATCH = {**BATCH, "labels": GENERATOR.integers(0, 4, 20).astype(np.float32)}
SOFTMAX_PARAMETERS = {"coefficients": GENERATOR.standard_normal((4, 4)).astype(np.float32)}


def test_softmax_is_that_of_the_mechanism():
    own, grid = SOFTMAX_PARAMETERS["coefficients"][None], SOFTMAX.grid(0.5)
    ours, clipped = SOFTMAX.clipped_sum({"coefficients": own}, SOFTMAX_BATCH, MASK, [grid])
    expected = clipped_linear_sums(own, *SOFTMAX_BATCH.values(), MASK, [grid])
    assert ours["coefficients"].shape == (1, 4, 4)
    assert np.array_equal(ours["coefficients"], expected[0])
    assert clipped == expected[1] > 0


def test_plain_softmax():
    """Against JAX's own gradient of the loss, and against exact sums that are not clipped."""
    labels = np.where(np.arange(20) == 2, np.nan, SOFTMAX_BATCH["labels"])
    labels[4] = 9
    batch = {**SOFTMAX_BATCH, "labels": labels.astype(np.float32)}
    mask = MASK & ~np.isin(np.arange(20), [2, 4])
    clean = {**SOFTMAX_BATCH, "labels": np.where(mask, SOFTMAX_BATCH["labels"], 0)}

    def total(own):
        return (SOFTMAX.losses(own, clean)[0] * mask).sum()

    found = SOFTMAX.gradient_sum(SOFTMAX_PARAMETERS, batch, MASK)["coefficients"]
    np.testing.assert_allclose(found, jax.grad(total)(SOFTMAX_PARAMETERS)["coefficients"], rtol=1e-4, atol=1e-5)
    grid = SOFTMAX.grid(100.0)
    exact, _ = SOFTMAX.clipped_sum({"coefficients": SOFTMAX_PARAMETERS["coefficients"][None]}, batch, MASK, [grid])
    np.testing.assert_allclose(found, exact["coefficients"][0] * grid.unit, atol=0.02)


def test_predictions_of_softmax():
    scores = SOFTMAX_BATCH["features"] @ SOFTMAX_PARAMETERS["coefficients"][:, :3].T
    scores = scores + SOFTMAX_PARAMETERS["coefficients"][:, 3]
    chances = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    found, probability = jax.jit(SOFTMAX.predict)(SOFTMAX_PARAMETERS, SOFTMAX_BATCH)
    np.testing.assert_array_equal(found, chances.argmax(axis=1))
    np.testing.assert_allclose(probability, chances.max(axis=1), rtol=1e-5)
    np.testing.assert_allclose(SOFTMAX.probabilities(SOFTMAX_PARAMETERS, SOFTMAX_BATCH), chances, rtol=1e-4)
    loss, right = SOFTMAX.losses(SOFTMAX_PARAMETERS, SOFTMAX_BATCH)
    own = chances[np.arange(20), SOFTMAX_BATCH["labels"].astype(int)]
    np.testing.assert_allclose(loss, -np.log(own), rtol=1e-4)
    assert np.array_equal(right, chances.argmax(axis=1) == SOFTMAX_BATCH["labels"])
    arrays = SOFTMAX.to_arrays(SOFTMAX_PARAMETERS)
    assert arrays["weights"].shape == (4, 3)
    assert np.array_equal(SOFTMAX.from_arrays(arrays)["coefficients"], SOFTMAX_PARAMETERS["coefficients"])


def test_plain_gradient():
    """Against gradients that are rounded, and hardly clipped, one by one."""
    plain = MODEL.gradient_sum(PARAMETERS, BATCH, MASK)
    grid = MODEL.grid(100.0)
    alone = {"coefficients": PARAMETERS["coefficients"][None]}
    unclipped, clipped = MODEL.clipped_sum(alone, BATCH, MASK, [grid])
    assert clipped == 0
    np.testing.assert_allclose(plain["coefficients"], unclipped["coefficients"][0] * grid.unit, atol=0.02)


def test_losses():
    loss, right = MODEL.losses(PARAMETERS, BATCH)
    logits = BATCH["features"] @ PARAMETERS["coefficients"][:-1] + 0.25
    np.testing.assert_allclose(loss, np.log1p(np.exp(logits)) - BATCH["labels"] * logits, rtol=1e-5, atol=1e-6)
    assert np.array_equal(right, (logits > 0) == (BATCH["labels"] == 1))


def test_arrays_round_trip():
    arrays = MODEL.to_arrays(PARAMETERS)
    assert arrays["weights"].shape == (3,)
    assert arrays["intercept"].shape == ()
    assert np.array_equal(MODEL.from_arrays(arrays)["coefficients"], PARAMETERS["coefficients"])
    with pytest.raises(InputError):
        LogisticRegression(num_features=4).from_arrays(arrays)


def test_bad_models():
    with pytest.raises(InputError, match="num_features"):
        LogisticRegression(num_features=0)
    with pytest.raises(InputError, match="3 features"):
        MODEL.check_data({"features": (4,), "labels": ()})
    with pytest.raises(InputError):
        MODEL.check_data({"labels": ()})


def test_predictions_are_those_of_numpy():
    random = np.random.default_rng(0)
    features, coefficients = random.normal(size=(50, 3)).astype(np.float32), random.normal(size=4).astype(np.float32)
    features[7, 1], features[8, 2] = np.nan, np.inf
    batch = {"features": features, "labels": np.full(50, np.nan, np.float32)}
    found, probability = jax.jit(LogisticRegression(num_features=3).predict)({"coefficients": coefficients}, batch)
    logits = features.astype(float) @ coefficients[:3] + coefficients[3]
    usable = np.arange(50)[~np.isin(np.arange(50), [7, 8])]
    np.testing.assert_array_equal(np.asarray(found)[usable], logits[usable] > 0)
    np.testing.assert_allclose(np.asarray(probability)[usable], 1 / (1 + np.exp(-abs(logits[usable]))), rtol=1e-5)
    assert np.isnan(np.asarray(probability)[[7, 8]]).all()
