"""Logistic regression in one row of coefficients."""

import numpy as np
import pytest

from coowned import InputError
from coowned.mechanism.clipping import clipped_logistic_gradient_sum
from coowned.training.models.logistic_regression import LogisticRegression

MODEL = LogisticRegression(num_features=3)
GENERATOR = np.random.default_rng(0)
BATCH = {
    "features": GENERATOR.standard_normal((20, 3)).astype(np.float32),
    "labels": (GENERATOR.random(20) < 0.5).astype(np.float32),
}
MASK = np.arange(20) < 15
PARAMETERS = {"coefficients": np.array([0.5, -1, 2, 0.25], np.float32)}


def test_gradient_is_that_of_the_mechanism():
    ours, clipped = MODEL.gradient_sum(PARAMETERS, BATCH, MASK, np.float32(0.5))
    coefficients = PARAMETERS["coefficients"]
    (weights, intercept), count = clipped_logistic_gradient_sum(
        coefficients[:-1], coefficients[-1], BATCH["features"], BATCH["labels"], MASK, 0.5
    )
    np.testing.assert_allclose(ours["coefficients"], np.append(weights, intercept), rtol=3e-6)
    assert int(clipped) == int(count) > 0


def test_plain_gradient():
    plain, _ = MODEL.gradient_sum(PARAMETERS, BATCH, MASK, None)
    unclipped, _ = MODEL.gradient_sum(PARAMETERS, BATCH, MASK, np.float32(np.inf))
    np.testing.assert_allclose(plain["coefficients"], unclipped["coefficients"], rtol=1e-5, atol=1e-6)
    both = {"coefficients": np.stack([PARAMETERS["coefficients"], np.zeros(4, np.float32)])}
    many, _ = MODEL.gradient_sum(both, BATCH, MASK, None)
    np.testing.assert_allclose(many["coefficients"][0], plain["coefficients"], rtol=1e-5, atol=1e-6)


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
