"""Products in registers: those of plain loops, to the bit."""

import numba
import numpy as np
import pytest

from coowned.exact.matrix_tiles import COLUMNS, ROWS, STRIDE, SUM_ROWS, multiply_four, multiply_tile


@numba.njit
def rows_times(left, right, out):
    for i in range(0, left.shape[0], ROWS):
        multiply_tile(left[i:], left.shape[1], 1, left.shape[1], right, out[i:])


@numba.njit
def columns_times(left, right, out):
    for j in range(0, left.shape[1], SUM_ROWS):
        multiply_tile(left[:, j:], 1, left.shape[1], left.shape[0], right, out[j:])


def chain(left, right):
    """Sums in the order of the inner index: a product of two float32 is exact in float64, and rounded when added."""
    total = np.zeros((len(left), right.shape[1]), np.float32)
    for k in range(left.shape[1]):
        total = (np.float64(left[:, k, None]) * np.float64(right[k]) + total).astype(np.float32)
    return total


@pytest.mark.parametrize("length", [1, 2, 7, 104])
def test_equals_a_plain_loop(length):
    generator = np.random.default_rng(length)
    left = generator.standard_normal((3 * ROWS, length)).astype(np.float32)
    right = generator.standard_normal((length, COLUMNS)).astype(np.float32)
    out = np.full((3 * ROWS, COLUMNS), np.nan, np.float32)
    rows_times(left, right, out)
    # float64 rounds the sum of product and total once more before float32 does: in few cases a last digit differs.
    assert np.mean(out == chain(left, right)) > 0.999
    np.testing.assert_allclose(out, np.float64(left) @ np.float64(right), rtol=1e-4, atol=1e-4)


def test_float64_products_are_added():
    """Of integers, whose products and sums are exact."""
    generator = np.random.default_rng(3)
    left = generator.integers(-(2**19), 2**19, (50, 3 * ROWS)).astype(np.float32)
    right = generator.integers(-(2**15), 2**15, (50, COLUMNS)).astype(np.float64)
    sums = np.ones((3 * ROWS, COLUMNS))
    columns_times(left, right, sums)
    assert np.array_equal(sums, 1.0 + np.float64(left).T @ right)


def test_a_sum_does_not_depend_on_its_position():
    generator = np.random.default_rng(0)
    left, right = np.empty((4 * ROWS, 90), np.float32), np.empty((90, COLUMNS), np.float32)
    left[:], right[:] = generator.standard_normal(90), generator.standard_normal((90, 1))
    out = np.empty((4 * ROWS, COLUMNS), np.float32)
    rows_times(left, right, out)
    assert len(np.unique(out)) == 1


def test_what_is_not_a_number_stays_where_it_is():
    left, right = np.ones((2 * ROWS, 5), np.float32), np.ones((5, COLUMNS), np.float32)
    left[3, 2], right[1, 4] = np.nan, np.inf
    out = np.empty((2 * ROWS, COLUMNS), np.float32)
    rows_times(left, right, out)
    expected = np.full((2 * ROWS, COLUMNS), 5, np.float32)
    expected[:, 4] = np.inf
    expected[3] = np.nan
    np.testing.assert_array_equal(out, expected)


@numba.njit
def four_products(source, indices, weights, out):
    multiply_four(source, np.zeros(source.shape[1], np.float32), indices, weights, weights.size, out)


def with_few_bits(generator, *shape):
    """Numbers whose products, and sums of these, are exact in float64, but not in float32."""
    return (generator.integers(-(2**15), 2**15, shape) / 2**12).astype(np.float32)


def test_four_products():
    generator = np.random.default_rng(1)
    source, weights = with_few_bits(generator, 9, 5 * STRIDE), with_few_bits(generator, 5 * STRIDE)

    def in_order(row, *, fused=True):
        lanes = np.zeros(STRIDE, np.float32)
        for x, w in zip(row.reshape(-1, STRIDE), weights.reshape(-1, STRIDE), strict=True):
            product = np.float64(x) * np.float64(w)
            lanes = ((product if fused else np.float32(product)) + np.float64(lanes)).astype(np.float32)
        while len(lanes) > 1:
            lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
        return lanes[0]

    assert [in_order(row) for row in source] != [in_order(row, fused=False) for row in source]
    wanted = [in_order(row) for row in source] + [np.float32(0)]  # the last is that of no row
    source[3] = np.nan  # nobody reads it
    out = np.empty(4, np.float32)
    for places in ([0, 8, 2, 5], [5, 5, -1, 0], [-1, -1, -1, -1], [7, 6, 4, 1]):
        four_products(source, np.array(places), weights, out)
        assert out.tolist() == [wanted[place] for place in places]
