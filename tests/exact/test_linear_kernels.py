"""Residuals of linear models, and the integers they become."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coowned.exact.linear_kernels import (
    LOGISTIC,
    SOFTMAX,
    SQUARED,
    clip_to_integers,
    fill_residuals,
    residual,
    rounded,
    sigmoid,
)


@settings(deadline=None)
@given(
    st.lists(st.floats(-1e300, 1e300) | st.sampled_from([np.nan, np.inf]), min_size=1, max_size=20),
    st.floats(1e-300, 1e300),
    st.floats(0, 2.0**20),
)
def test_integers_are_never_longer_than_asked(residuals, scale, longest):
    """Whatever was computed before: squares of integers are compared, exactly."""
    found = np.array(residuals)
    clip_to_integers(found, scale, longest)
    assert sum(int(value) ** 2 for value in found) <= int(longest * 2**40) ** 2 / 2**80


def test_residuals_of_softmax_are_those_of_its_definition():
    found = np.empty(3)
    fill_residuals(SOFTMAX, np.log([1.0, 2.0, 5.0]), 1.0, found)
    np.testing.assert_allclose(found, [1 / 8, 2 / 8 - 1, 5 / 8])
    fill_residuals(SOFTMAX, np.array([-1e30, 0.0, 1e30]), 2.0, found)  # no overflow
    np.testing.assert_allclose(found, 0, atol=1e-12)


def test_short_residuals_are_only_rounded():
    found = np.array([0.2, -0.7, 0.5])
    assert not clip_to_integers(found, 1000.0, 2000.0)
    assert found.tolist() == [200, -700, 500]
    found = np.array([3.0, -4.0])
    assert clip_to_integers(found, 1000.0, 100.0)
    np.testing.assert_allclose(found, [60, -80], atol=1)


@pytest.mark.parametrize("bad", [-1.0, 3.0, 0.5, np.nan, np.inf])
def test_labels_of_no_class_have_no_residual(bad):
    found = np.zeros(3)
    fill_residuals(SOFTMAX, np.zeros(3), bad, found)
    assert np.isnan(found).all()


def test_one_score():
    scores = np.linspace(-100, 100, 501).astype(np.float32)
    exact = 1 / (1 + np.exp(-scores.astype(np.float64)))
    np.testing.assert_allclose([sigmoid(score) for score in scores], exact, rtol=1e-5, atol=2e-35)
    found = np.empty(1)
    for score in scores[::50]:
        fill_residuals(LOGISTIC, np.array([score]), 1.0, found)
        assert found[0] == pytest.approx(residual(LOGISTIC, score, np.float32(1)), abs=1e-6)
        assert residual(SQUARED, score, np.float32(1)) == score - 1
    assert np.isnan(sigmoid(np.float32(np.nan)))
    assert [rounded(np.float32(x)) for x in (0.5, 1.5, -2.4, 2.0**20 + 0.25)] == [0, 2, -2, 2.0**20]
