"""Clipped gradients on sparse rows as integer vectors, added up exactly."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.exact.lengths import squared_lengths, squared_radius

from coowned.errors import InputError
from coowned.exact import sparse_sums
from coowned.exact.grid import Grid
from coowned.exact.linear_sums import clipped_linear_sums
from coowned.exact.sparse_sums import ONE, SparseRows, clipped_sparse_sums

CLIP_NORMS = (0.7, 0.02, 30.0)
SHAPES = [(1,), (3,), (1, 3), (2, 5)]  # models, and classes where there are more than two


def world(batch: int, num_features: int, shape: tuple[int, ...], seed: int = 0, size: float = 0.3, nonzero: int = 12):
    generator = np.random.default_rng(seed)
    indices, values, offsets = [], [], [0]
    for _ in range(batch):
        count = int(generator.integers(0, min(nonzero, num_features) + 1))
        indices += sorted(generator.choice(num_features, count, replace=False).tolist())
        values += np.rint(size * ONE * generator.standard_normal(count)).astype(int).tolist()
        offsets.append(len(indices))
    rows = SparseRows(np.int32(indices), np.int32(values), np.array(offsets), np.arange(batch), 20)
    labels = generator.integers(0, shape[1] if len(shape) > 1 else 2, batch).astype(np.float32)
    coefficients = (0.5 * generator.standard_normal((*shape, num_features + 1))).astype(np.float32)
    grids = [Grid.for_linear(CLIP_NORMS[m % 3]) for m in range(shape[0])]
    return coefficients, rows, labels, np.ones(batch, bool), grids


def sums(*given):
    return clipped_sparse_sums(*given)[0]


def some(rows: SparseRows, chosen) -> SparseRows:
    return rows._replace(rows=rows.rows[chosen])


def contributions(coefficients, rows, labels, mask, grids):
    """(batch, *shape of the coefficients) what each copy adds when it is alone."""
    each = [np.array([i]) for i in range(len(labels))]
    return np.array([sums(coefficients, some(rows, i), labels[i], mask[i], grids) for i in each])


def dense(rows: SparseRows, num_features: int) -> np.ndarray:
    """(batch, num_features) float32: exactly the rows, since their numbers are integers over a power of two."""
    matrix = np.zeros((len(rows.rows), num_features), np.float32)
    for i, r in enumerate(rows.rows):
        own = slice(rows.offsets[r], rows.offsets[r + 1])
        matrix[i, rows.indices[own]] = rows.values[own] / ONE
    return matrix


@pytest.mark.parametrize("shape", SHAPES)
def test_is_close_to_the_reference(shape):
    """The dense sums are tested against Algorithm 1 in float64."""
    coefficients, rows, labels, mask, grids = world(60, 40, shape)
    units = np.array([grid.unit for grid in grids]).reshape(-1, *(1,) * len(shape))
    found = contributions(coefficients, rows, labels, mask, grids) * units
    features = dense(rows, 40)
    for i in range(60):
        expected = clipped_linear_sums(coefficients, features[i : i + 1], labels[i : i + 1], mask[:1], grids)[0] * units
        error = np.linalg.norm((found[i] - expected).reshape(shape[0], -1), axis=1)
        assert (error < 4e-4 * np.array([grid.clip_norm for grid in grids])).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_what_a_copy_adds_is_an_integer_times_its_row(shape):
    """In Python's integers, by other code."""
    coefficients, rows, labels, mask, grids = world(40, 30, shape)
    features = np.append(dense(rows, 30), np.ones((40, 1)), axis=1)
    for x, added in zip(features, contributions(coefficients, rows, labels, mask, grids), strict=True):
        row = [int(value * ONE) for value in x]
        for own in added.reshape(-1, 31):
            factor, rest = divmod(int(own[-1]), ONE)
            assert rest == 0
            assert own.tolist() == [factor * value for value in row]


@settings(deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([1e-4, 0.01, 1.0, 30.0, 150.0]),
    st.sampled_from([1, 2, 33, 700]),
    st.sampled_from([1e-25, 1e-3, 0.9999999, 1.0, 7.3, 1e20]),
    st.sampled_from(SHAPES),
)
def test_no_copy_adds_more(seed, size, num_features, clip_norm, shape):
    coefficients, rows, labels, mask, _ = world(5, num_features, shape, seed=seed, size=size, nonzero=100)
    coefficients[:] = 0
    grids = [Grid.for_linear(clip_norm)] * shape[0]
    found = squared_lengths(contributions(coefficients, rows, labels, mask, grids))
    assert max(found) <= squared_radius(grids[0])
    assert min(found) > 0 or clip_norm == 1e20


@pytest.mark.parametrize("length", [2**14, 2**14 + 1, 2**15 - 1, 2**15, 2**16 - 1, 2**16, 2**16 + 5, 2**17])
def test_no_long_row_of_large_numbers_adds_more(length):
    """Its square does not fit in 64 bits from 2^15 numbers on, and would be small again at 2^16."""
    indices, values = np.arange(length, dtype=np.int32), np.full(length, 2**24, np.int32)
    rows, grid = SparseRows(indices, values, np.array([0, length]), np.array([0]), length), Grid.for_linear(1.0)
    (found,) = squared_lengths(sums(np.zeros((1, length + 1)), rows, [1.0], [True], [grid])[None])
    assert found <= squared_radius(grid)
    assert found == 0
    ordinary = rows._replace(values=np.full(length, ONE, np.int32))
    assert sums(np.zeros((1, length + 1)), ordinary, [1.0], [True], [grid]).any()


@pytest.mark.parametrize("shape", SHAPES)
def test_longest_copies_use_nearly_all_of_the_radius(shape):
    coefficients, rows, labels, mask, grids = world(9, 300, shape, size=60.0)
    coefficients[:] = 0
    full = np.diff(rows.offsets).argmax()[None]
    found = squared_lengths(contributions(coefficients, some(rows, full), labels[full], mask[:1], grids))
    for length, grid in zip(found, grids, strict=True):
        assert 0.99 * grid.radius < math.sqrt(length) <= grid.radius


@pytest.mark.parametrize("shape", SHAPES)
def test_the_sum_is_that_of_the_copies(shape):
    given = world(150, 37, shape)
    assert np.array_equal(sums(*given), contributions(*given).sum(axis=0))


@pytest.mark.parametrize("shape", SHAPES)
def test_order_threads_and_padding_change_nothing(shape, monkeypatch):
    coefficients, rows, labels, mask, grids = world(2000, 90, shape)
    expected = sums(coefficients, rows, labels, mask, grids)
    order = np.random.default_rng(1).permutation(2000)
    assert np.array_equal(sums(coefficients, some(rows, order), labels[order], mask, grids), expected)
    for cores in (1, 5):
        monkeypatch.setattr(sparse_sums.threads, "cores", lambda cores=cores: cores)
        assert np.array_equal(sums(coefficients, rows, labels, mask, grids), expected)
    more = rows._replace(rows=np.append(rows.rows, np.full(200, 7)))
    more_labels, more_mask = np.append(labels, np.full(200, np.nan)), np.append(mask, np.zeros(200, bool))
    assert np.array_equal(sums(coefficients, more, more_labels, more_mask, grids), expected)
    padded = SparseRows.from_padded(**rows.arrays())
    assert np.array_equal(sums(coefficients, padded, labels, mask, grids), expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_copy_adds_the_same_in_any_company(shape):
    """Its neighbours are replaced by what adds nothing, and by each other; one batch is shorter than the other."""
    coefficients, rows, labels, mask, grids = world(70, 33, shape)
    own = contributions(coefficients, rows, labels, mask, grids)
    kept = np.arange(70) % 3 != 0
    for others in (np.where(kept, labels, np.nan), np.where(kept, labels, np.inf)):
        assert np.array_equal(sums(coefficients, rows, others, mask, grids), own[kept].sum(axis=0))
    for number in (1, 34, 69):
        for begin in (0, number // 2, number):
            less = sums(coefficients, some(rows, slice(begin, number)), labels[begin:number], mask[begin:number], grids)
            seen = mask[begin:] & (np.arange(70)[begin:] <= number)
            more = sums(coefficients, some(rows, slice(begin, None)), labels[begin:], seen, grids)
            assert np.array_equal(more - less, own[number])


@pytest.mark.parametrize("shape", [(3,), (2, 5)])
def test_a_model_alone_has_the_same_sum(shape):
    coefficients, rows, labels, mask, grids = world(200, 50, shape)
    together = sums(coefficients, rows, labels, mask, grids)
    for model in range(shape[0]):
        alone = sums(coefficients[model : model + 1], rows, labels, mask, grids[model : model + 1])
        assert np.array_equal(together[model], alone[0])


@pytest.mark.parametrize("shape", SHAPES)
def test_unusable_rows_add_zero(shape):
    """An index twice in a row would make it longer than its squares say: that is found, and adds nothing."""
    coefficients, _, _, _, grids = world(1, 20, shape)
    coefficients[:] = 0
    indices = [[0, 19], [4, 4], [5, 3], [3, 20], [0, 1], [0, 1], [0, 1]]
    values = [[1, 2], [1, 1], [1, 1], [1, 1], [1, 2**24 + 1], [1, 1], [1, -(2**24)]]
    offsets = np.arange(0, 15, 2)
    rows = SparseRows(np.int32(indices).ravel(), np.int32(values).ravel(), offsets, np.arange(7), 2)
    labels = np.float32([0, 0, 0, 0, 0, np.nan, 0])
    found = contributions(coefficients, rows, labels, np.ones(7, bool), grids)
    assert [bool(own.any()) for own in found] == [True, False, False, False, False, False, True]
    negative = SparseRows(np.int32([-1, 2]), np.int32([1, 1]), np.array([0, 2]), np.array([0]), 2)
    assert not sums(coefficients, negative, [0], [True], grids).any()
    coefficients[..., 0] = np.nan
    assert not sums(coefficients, some(rows, np.array([0])), [0], [True], grids).any()


def test_labels_that_are_no_class_add_zero():
    coefficients, rows, _, mask, grids = world(4, 20, (1, 3))
    found = contributions(coefficients, rows, np.float32([-1, 3, 1.5, 2]), mask, grids)
    assert [bool(own.any()) for own in found] == [False, False, False, True]


@pytest.mark.parametrize("shape", SHAPES)
def test_padding_adds_zero(shape):
    coefficients, rows, labels, mask, grids = world(9, 20, shape)
    assert not sums(coefficients, rows, labels, ~mask, grids).any()
    assert sums(coefficients, some(rows, slice(0)), labels[:0], mask[:0], grids).shape == coefficients.shape


@pytest.mark.parametrize("shape", [(1,), (1, 3)])
def test_clipped_copies_are_counted(shape):
    coefficients, rows, labels, mask, _ = world(300, 20, shape)
    lengths = [
        math.sqrt(square) * Grid.for_linear(100.0).unit
        for square in squared_lengths(contributions(coefficients, rows, labels, mask, [Grid.for_linear(100.0)]))
    ]
    for clip_norm in (0.3, 0.6, 1.2):
        clipped = clipped_sparse_sums(coefficients, rows, labels, mask, [Grid.for_linear(clip_norm)])[1]
        assert abs(clipped - (np.array(lengths) > clip_norm).sum()) <= 3


def test_sums_of_the_most_copies_fit():
    longest = Grid.for_linear(math.nextafter(1.0, 0)).radius
    assert sparse_sums.MOST_COPIES * longest < 2.0**63
    assert sparse_sums.LONGEST + sparse_sums.LARGEST**2 < 2**63
    assert (sparse_sums.MANY - 1) * sparse_sums.LARGEST**2 + ONE**2 <= sparse_sums.LONGEST


def test_bad_arguments_are_refused():
    coefficients, rows, labels, mask, grids = world(4, 3, (1,))
    for changed in (
        (coefficients[0], rows, labels, mask, grids),
        (coefficients, rows, labels[:2], mask, grids),
        (coefficients, rows, labels, mask, grids * 2),
        (coefficients, rows, labels, mask, [Grid(1.0, 40)]),
        (coefficients, rows._replace(rows=np.array([0, 1, 2, 4])), labels, mask, grids),
        (coefficients, rows._replace(rows=np.array([0, 1, 2, -1])), labels, mask, grids),
        (coefficients, rows._replace(values=rows.values / 2), labels, mask, grids),
        (coefficients, rows._replace(offsets=rows.offsets + 5), labels, mask, grids),
        (coefficients, rows._replace(indices=rows.indices[:-1]), labels, mask, grids),
    ):
        with pytest.raises(InputError):
            clipped_sparse_sums(*changed)
