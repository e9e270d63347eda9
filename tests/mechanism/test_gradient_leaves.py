"""Gradients in factors: rounded to the nearest integers, whichever way they are made."""

import numpy as np
import pytest
from tests.mechanism.test_gradient_sums import SHAPES, built, gradients

from coowned.mechanism import gradient_leaves
from coowned.mechanism.outer_gradients import OuterGradients


@pytest.mark.parametrize("power", [-3, 0, 10, 15, 17, 18, 21, 22, 23, 30])
def test_integers_of_an_embedding_are_the_nearest(power):
    """Whether they are rounded in float32 or in float64, and their squares are no more than is said."""
    given = gradients(3, seed=power + 9)["words"]
    given.residuals[:, 1:], given.looked_up[:] = 0, 0
    scaled = built(given) * 2.0**power
    totals = np.zeros(scaled[0].size)
    squares = gradient_leaves.Embedding(given).add(np.float64([0, 2.0**power, 0]), totals)
    np.testing.assert_allclose(totals, scaled[1].ravel(), rtol=1e-6, atol=0.5 + 2.0 ** (power - 21))
    assert np.array_equal(totals, np.rint(totals))
    exact = sum(int(number) ** 2 for number in totals)
    assert exact <= squares[1] * (1 + 1e-12) <= exact * (1 + 1e-5)
    gradient_leaves.Embedding(given).add(np.float64([0, -(2.0**power), 0]), totals)
    assert not totals.any()


def test_scaled_factors_are_the_scaled_gradient():
    given, generator = gradients(3), np.random.default_rng(1)
    scales = {name: generator.uniform(0.1, 10, (*shape[:-1], 1) if shape else ()) for name, shape in SHAPES.items()}
    found = gradient_leaves.scaled(given, {name: np.float32(scale) for name, scale in scales.items()})
    for name in ("words", "types"):
        np.testing.assert_allclose(built(found[name]), built(given[name]) * scales[name], rtol=1e-5, atol=1e-5)
    for name in ("w", "b"):
        np.testing.assert_allclose(found[name], given[name] * scales[name], rtol=1e-6)


def test_scaled_rows_and_products():
    generator = np.random.default_rng(0)
    scale = generator.uniform(0.1, 10, (5, 1))
    rows = gradient_leaves.FirstRowsGradients(generator.standard_normal((3, 2, 4)))
    np.testing.assert_allclose(rows.scaled(scale).rows, rows.rows * scale[:2])
    outer = OuterGradients(generator.standard_normal((3, 5)), generator.standard_normal((3, 4)))
    found = np.einsum("co,ci->coi", *outer.scaled(scale))
    np.testing.assert_allclose(found, np.einsum("co,ci->coi", *outer) * scale)
