"""Gradients of embeddings: rounded to the nearest integers, whichever way they are made."""

import numpy as np
import pytest
from tests.exact.test_gradient_sums import built, gradients

from coowned.models.embedding_gradients import Embedding


@pytest.mark.parametrize("power", [-3, 0, 10, 15, 17, 18, 21, 22, 23, 30])
def test_integers_of_an_embedding_are_the_nearest(power):
    """Whether they are rounded in float32 or in float64, and their squares are no more than is said."""
    given = gradients(3, seed=power + 9)["words"]
    given.residuals[:, 1:], given.looked_up[:] = 0, 0
    scaled = built(given) * 2.0**power
    totals = np.zeros(scaled[0].size)
    squares = Embedding(given).add(np.float64([0, 2.0**power, 0]), totals)
    np.testing.assert_allclose(totals, scaled[1].ravel(), rtol=1e-6, atol=0.5 + 2.0 ** (power - 21))
    assert np.array_equal(totals, np.rint(totals))
    exact = sum(int(number) ** 2 for number in totals)
    assert exact <= squares[1] * (1 + 1e-12) <= exact * (1 + 1e-5)
    Embedding(given).add(np.float64([0, -(2.0**power), 0]), totals)
    assert not totals.any()
