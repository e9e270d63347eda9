"""Linear regression of a target with a public bound."""

import dataclasses

import jax
import numpy as np
import pytest

from coowned import InputError
from coowned.exact.linear_sums import clipped_linear_sums
from coowned.models.linear_regression import LinearRegression

MODEL = LinearRegression(num_features=3, target_bound=100.0)
GENERATOR = np.random.default_rng(0)
BATCH = {
    "features": GENERATOR.standard_normal((20, 3)).astype(np.float32),
    "labels": np.float32(80 * GENERATOR.standard_normal(20)),
}
MASK = np.arange(20) < 15
PARAMETERS = {"coefficients": np.array([0.5, -1, 2, 0.25], np.float32)}


def test_gradient_is_that_of_the_mechanism():
    """Of targets over the power of two at or above the bound, clipped to it."""
    assert (np.abs(BATCH["labels"]) > 100).any()
    targets = np.clip(BATCH["labels"], -100, 100) / 128
    grids, both = [MODEL.grid(0.5), MODEL.grid(2.0)], np.stack([PARAMETERS["coefficients"], np.zeros(4, np.float32)])
    for count in (1, 2):
        ours, clipped = MODEL.clipped_sum({"coefficients": both[:count]}, BATCH, MASK, grids[:count])
        expected = clipped_linear_sums(both[:count], BATCH["features"], targets, MASK, grids[:count], squared_loss=True)
        assert np.array_equal(ours["coefficients"], expected[0])
        assert clipped == expected[1]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_targets_that_are_not_finite_add_nothing(bad):
    labels = BATCH["labels"].copy()
    labels[3] = bad
    alone = {"coefficients": PARAMETERS["coefficients"][None]}
    without = MODEL.clipped_sum(alone, BATCH, MASK & (np.arange(20) != 3), [MODEL.grid(1.0)])[0]
    found = MODEL.clipped_sum(alone, {**BATCH, "labels": labels}, MASK, [MODEL.grid(1.0)])[0]
    assert np.array_equal(found["coefficients"], without["coefficients"])


def test_plain_gradient():
    """Against gradients that are rounded, and hardly clipped, one by one."""
    grid = MODEL.grid(100.0)
    alone = {"coefficients": PARAMETERS["coefficients"][None]}
    unclipped, clipped = MODEL.clipped_sum(alone, BATCH, MASK, [grid])
    assert clipped == 0
    plain = MODEL.gradient_sum(PARAMETERS, BATCH, MASK)
    np.testing.assert_allclose(plain["coefficients"], unclipped["coefficients"][0] * grid.unit, atol=0.05)


def test_losses_and_predictions_are_in_the_unit_of_the_target():
    loss, _ = MODEL.losses(PARAMETERS, BATCH)
    values = 128 * (BATCH["features"] @ PARAMETERS["coefficients"][:3] + 0.25)
    errors = values - np.clip(BATCH["labels"], -100, 100)
    np.testing.assert_allclose(loss, errors**2, rtol=1e-4)
    np.testing.assert_allclose(MODEL.labels_of(BATCH), np.clip(BATCH["labels"], -100, 100), rtol=1e-6)
    found, probability = jax.jit(MODEL.predict)(PARAMETERS, BATCH)
    np.testing.assert_allclose(found, np.clip(values, -100, 100), rtol=1e-5)
    assert np.isnan(probability).all()
    several, _ = MODEL.losses({"coefficients": np.stack([PARAMETERS["coefficients"]] * 2)}, BATCH)
    np.testing.assert_allclose(several, np.stack([loss, loss], axis=1), rtol=1e-6)


def test_arrays_round_trip():
    arrays = MODEL.to_arrays(PARAMETERS)
    np.testing.assert_array_equal(arrays["weights"], 128 * PARAMETERS["coefficients"][:3])
    assert np.array_equal(MODEL.from_arrays(arrays)["coefficients"], PARAMETERS["coefficients"])
    with pytest.raises(InputError):
        dataclasses.replace(MODEL, num_features=4).from_arrays(arrays)


@pytest.mark.parametrize("bound", [0, -1, np.inf, np.nan, 1e31])
def test_bad_bounds(bound):
    with pytest.raises(InputError, match="target_bound"):
        LinearRegression(num_features=3, target_bound=bound)
