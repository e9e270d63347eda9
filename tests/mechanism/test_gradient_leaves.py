"""Gradients in factors, times scales."""

import numpy as np
from tests.mechanism.test_gradient_sums import SHAPES, built, gradients

from coowned.mechanism.gradient_leaves import FirstRowsGradients, OuterGradients, scaled


def test_scaled_factors_are_the_scaled_gradient():
    given, generator = gradients(3), np.random.default_rng(1)
    scales = {name: generator.uniform(0.1, 10, (*shape[:-1], 1) if shape else ()) for name, shape in SHAPES.items()}
    found = scaled(given, {name: np.float32(scale) for name, scale in scales.items()})
    for name in ("words", "types"):
        np.testing.assert_allclose(built(found[name]), built(given[name]) * scales[name], rtol=1e-5, atol=1e-5)
    for name in ("w", "b"):
        np.testing.assert_allclose(found[name], given[name] * scales[name], rtol=1e-6)


def test_scaled_rows_and_products():
    generator = np.random.default_rng(0)
    scale = generator.uniform(0.1, 10, (5, 1))
    rows = FirstRowsGradients(generator.standard_normal((3, 2, 4)))
    np.testing.assert_allclose(rows.scaled(scale).rows, rows.rows * scale[:2])
    outer = OuterGradients(generator.standard_normal((3, 5)), generator.standard_normal((3, 4)))
    found = np.einsum("co,ci->coi", *outer.scaled(scale))
    np.testing.assert_allclose(found, np.einsum("co,ci->coi", *outer) * scale)
