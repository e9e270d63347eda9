"""Sums that keep what rounding takes."""

import math

import jax
import numpy as np
import pytest

from coowned.mechanism.compensated import CompensatedSum, add_up, two_sum, with_noise


def exact(summed: CompensatedSum) -> np.ndarray:
    return np.float64(summed.total) + np.float64(summed.rest)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 100, 4097, 1 << 16])
@pytest.mark.parametrize("kind", ["random", "equal", "far apart"])
def test_sums_of_many(count, kind):
    generator = np.random.default_rng(count)
    values = generator.standard_normal((count, 3)).astype(np.float32)
    if kind == "equal":
        values[:] = np.float32(0.1)
    if kind == "far apart":
        values *= np.float32(10.0) ** generator.integers(-6, 6, (count, 1))
    found = jax.jit(add_up)(values)
    for column in range(3):
        wanted = math.fsum(values[:, column].tolist())
        assert abs(exact(found)[column] - wanted) <= 2.0**-40 * np.abs(np.float64(values[:, column])).sum()


def test_one_number_would_not_do():
    """The comparison can fail: rounded to float32, 2^16 equal numbers are off by more."""
    values = np.full((1 << 16) - 1, 0.1, np.float32)
    wanted = math.fsum(values.tolist())
    assert abs(float(jax.jit(add_up)(values).rounded) - wanted) > 2.0**-30 * wanted


def test_two_sum_is_exact():
    generator = np.random.default_rng(1)
    a, b = (generator.standard_normal(1000) * 10.0 ** generator.integers(-8, 8, 1000) for _ in range(2))
    a, b = a.astype(np.float32), b.astype(np.float32)
    total, lost = jax.jit(two_sum)(a, b)
    for i in range(1000):
        assert math.fsum([float(total[i]), float(lost[i])]) == math.fsum([float(a[i]), float(b[i])])


def test_noise_before_rounding():
    """A sum of 2^20 and a bit, noise of 1: the last digits of the sum are still in what is released."""
    generator = np.random.default_rng(2)
    size = 2000
    total = np.float32(2.0**20) + np.float32(generator.integers(-8, 8, size)) / 8
    rest = np.float32(generator.uniform(-0.05, 0.05, size))
    noise = np.float32(-(2.0**20)) + np.float32(generator.standard_normal(size))
    found = np.float64(jax.jit(with_noise)(CompensatedSum(total, rest), noise))
    wanted = np.float64(total) + np.float64(rest) + np.float64(noise)
    assert np.abs(found - wanted).max() <= 2.0**-22 * np.abs(wanted).max()
    rounded_first = np.float64(np.float32(total + rest) + noise)
    assert np.abs(rounded_first - wanted).max() > 1e-2  # what it would have been
