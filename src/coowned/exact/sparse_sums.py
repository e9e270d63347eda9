"""Sums clipped gradients of linear models on sparse integer rows exactly on the host.

A row is given as integers X, a few of them not zero, in units of 1 / ONE; the intercept's feature is ONE. The gradient
of a copy is its residual, or one for each class, times the row. What a model adds is the integer matrix A X^T, where A
are the residuals in grid units, rounded and clipped to integers with |A| <= radius / |X|; |X|^2 is an exact integer.
Sums are int64. Nothing of the size of batch times features is ever made.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from coowned import threads, validate
from coowned.errors import InputError
from coowned.exact.compiled import atomic_add, compiled, in_parts, parts_left
from coowned.exact.grid import Grid
from coowned.exact.linear_kernels import clip_to_integers, fill_residuals
from coowned.exact.linear_sums import checked_coefficients

ONE = 2**14  # stands for 1
LARGEST = 2**24  # of a number of a row
LONGEST = 2**62  # of the square of a row: a sum that must not pass 2^63
MANY = 2**14  # numbers of a row: fewer than that cannot pass LONGEST
MOST_COPIES = 2**28  # times the radius is below 2^63
_PARTS = 16  # of a batch, taken by whichever thread is free
_FEW = 32  # copies that are not worth a part of their own

_njit = compiled()


class SparseRows(NamedTuple):
    """Rows of a compressed sparse matrix: copy i of the batch is row r = rows[i], which is zero but for
    values[offsets[r]:offsets[r + 1]] / ONE at the increasing indices[offsets[r]:offsets[r + 1]].
    """

    indices: npt.NDArray[Any]  # (total,) integers
    values: npt.NDArray[Any]  # (total,) integers
    offsets: npt.NDArray[np.int64]  # (n + 1,)
    rows: npt.NDArray[np.int64]  # (batch,)
    width: int  # of `arrays`: at least the length of any row
    names = ("indices", "values")

    @classmethod
    def from_padded(cls, indices: npt.NDArray[Any], values: npt.NDArray[Any]) -> "SparseRows":
        """From (batch, width) arrays whose zeros are padding."""
        kept = values != 0
        offsets = np.append(0, np.cumsum(np.count_nonzero(kept, axis=1)))
        return cls(indices[kept], values[kept], offsets, np.arange(len(values)), values.shape[1])

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """(batch, width) indices and values, zeros behind."""
        shape = len(self.rows), self.width
        indices, values = np.zeros(shape, self.indices.dtype), np.zeros(shape, self.values.dtype)
        _pad(self, indices, values)
        return {"indices": indices, "values": values}


class _Copies(NamedTuple):
    """A batch as the compiled loop reads it."""

    features: SparseRows
    labels: npt.NDArray[np.float32]  # (batch,)
    mask: npt.NDArray[np.bool_]  # (batch,)


class _Models(NamedTuple):
    """The models of a batch as the compiled loop reads them."""

    loss: int
    scores: int  # of each model
    weights: npt.NDArray[np.float32]  # (models * scores, width)
    scales: npt.NDArray[np.float64]  # (models,) grid units of 1 / ONE
    radii: npt.NDArray[np.float64]  # (models,)


def clipped_sparse_sums(
    coefficients: npt.ArrayLike, features: SparseRows, labels: npt.ArrayLike, mask: npt.ArrayLike, grids: Sequence[Grid]
) -> tuple[npt.NDArray[np.int64], int]:
    """Sums over a batch the clipped gradients of the logistic loss, or of softmax's, in units of each model's grid.

    Guarantees:
      - What a copy adds is an integer matrix no longer than the radius.   (test_no_copy_adds_more)
      - It depends on that copy and that model alone: not on its position, on other copies or models, on padding or on
        threads.   (test_a_copy_adds_the_same_in_any_company, test_a_model_alone_has_the_same_sum,
        test_order_threads_and_padding_change_nothing)
      - The sum is the sum of what each copy adds, exactly.   (test_the_sum_is_that_of_the_copies)
      - A copy with a label or gradient that is not finite, with indices that do not increase or lie outside, with a
        number beyond 2^24 or longer than 2^31 adds exactly zero, and so does padding.   (test_unusable_rows_add_zero,
        test_no_long_row_of_large_numbers_adds_more, test_padding_adds_zero)
      - It is close to the clipped gradient of Algorithm 1.   (test_is_close_to_the_reference)
    Cost: two passes over the numbers that are not zero for every score; a sum of the size of the model for each thread.

    Args:
      features: the rows. Those that the mask leaves out are not read.
      coefficients, labels, mask, grids: as for `coowned.exact.linear_sums.clipped_linear_sums`, whose result this
        gives, too.

    Example:
      >>> rows = SparseRows.from_padded(np.array([[0, 2]]), np.array([[3 * ONE, 4 * ONE]]))
      >>> grid = Grid.for_linear(10.0)
      >>> sums, _ = clipped_sparse_sums(np.zeros((1, 4)), rows, [1.0], [True], [grid])
      >>> (sums * grid.unit).round(4)
      array([[-1.5,  0. , -2. , -0.5]])
    """
    array, loss = checked_coefficients(coefficients, grids)
    labels, mask = np.ascontiguousarray(labels, np.float32), np.ascontiguousarray(mask, np.bool_)
    features = _checked(features)
    validate.same_length(mask.size, rows=features.rows, labels=labels)
    models, scores, width = array.shape
    radii = np.array([grid.radius for grid in grids])
    if mask.size > MOST_COPIES or not (radii < 2.0**34).all():
        raise InputError("a sparse sum needs Grid.for_linear and at most 2^28 copies")
    scales = np.array([1 / (ONE * grid.unit) for grid in grids])
    parts = max(1, min(_PARTS, mask.size // _FEW))
    weights = array.reshape(-1, width)  # (models * scores, width)
    sums = np.zeros((min(parts, threads.cores()), *weights.shape), np.int64)  # one for each thread
    clipped, slots = np.zeros(parts, np.int64), np.zeros(1, np.int64)
    given = _Models(loss, scores, weights, scales, radii)
    in_parts(_add_parts, (given, _Copies(features, labels, mask), sums, clipped, slots), parts)
    totals = sums.sum(axis=0).reshape(np.shape(coefficients))
    return totals, int(clipped.sum()) if models == 1 else 0


def _checked(features: SparseRows) -> SparseRows:
    """Contiguous, of types the loop knows; refuses what it, which checks no bounds of rows, would misread."""
    indices, values = (np.ascontiguousarray(array) for array in features[:2])
    offsets, rows = (np.ascontiguousarray(array, np.int64) for array in features[2:4])
    if indices.dtype.kind not in "iu" or values.dtype.kind != "i" or indices.size != values.size or not offsets.size:
        raise InputError("sparse rows need integers, one index for each value, and offsets")
    if rows.size and (rows.min() < 0 or rows.max() >= offsets.size - 1):
        raise InputError(f"rows must be in [0, {offsets.size - 1}): the index of each copy's features")
    ends = np.stack([offsets[rows], offsets[rows + 1]])
    if rows.size and (ends.min() < 0 or ends.max() > indices.size):
        raise InputError("offsets of sparse rows must be within their numbers")
    return SparseRows(indices, values, offsets, rows, features.width)


@_njit
def _pad(rows, indices, values):
    for i in range(rows.rows.size):
        begin = rows.offsets[rows.rows[i]]
        for t in range(min(values.shape[1], rows.offsets[rows.rows[i] + 1] - begin)):
            indices[i, t], values[i, t] = rows.indices[begin + t], rows.values[begin + t]


@_njit
def _add_parts(models, copies, sums, clipped, slots, counters):
    """Adds up parts, each taken by whichever thread is free, until there are none left; a thread has its own sum."""
    loss, scores, weights, scales, radii = models
    size, parts = copies.mask.size, clipped.size
    products, factors = np.empty(len(weights), np.float32), np.empty(len(weights))
    slot = -1
    for part in parts_left(parts, counters):
        if slot < 0:
            slot = atomic_add(slots, 0, 1)  # pyright: ignore[reportCallIssue]
        for i in range(size * part // parts, size * (part + 1) // parts):
            row, label = copies.features.rows[i], copies.labels[i]
            begin, end = copies.features.offsets[row], copies.features.offsets[row + 1]
            indices, values = copies.features.indices[begin:end], copies.features.values[begin:end]
            if not copies.mask[i] or label - label != 0:
                continue
            square = _square(indices, values, weights.shape[1] - 1)
            if square < 0:
                continue
            for k in range(products.size):
                products[k] = _product(indices, values, weights[k])
            for model in range(scales.size):
                these = slice(model * scores, (model + 1) * scores)
                fill_residuals(loss, products[these], label, factors[these])
                longest = radii[model] / np.sqrt(np.float64(square)) * (1 - 2.0**-50)
                clipped[part] += clip_to_integers(factors[these], scales[model], longest)
            for k in range(products.size):
                if factors[k]:
                    _add(indices, values, np.int64(factors[k]), sums[slot, k])


@_njit
def _square(indices, values, width):
    """|X|^2 with the intercept's feature; -1 for a row that is not one."""
    square, previous, good = np.int64(ONE * ONE), np.int64(-1), indices.size <= width
    for t in range(indices.size):
        index, value = np.int64(indices[t]), np.int64(values[t])
        good &= previous < index and -LARGEST <= value <= LARGEST
        previous = index
        square += value * value
    if good and indices.size >= MANY:
        good = _is_short(values)
    return square if good and previous < width else np.int64(-1)


@_njit
def _is_short(values):
    """Returns whether |X|^2 is at most LONGEST, without overflow. A loop of its own: the usual one has no branch."""
    square = np.int64(ONE * ONE)
    for t in range(values.size):
        square += np.int64(values[t]) * np.int64(values[t])
        if square > LONGEST:
            return False
    return True


@_njit
def _product(indices, values, weights):
    """X weights / ONE and the intercept, float32: four sums at once, each waiting for its own last addition only."""
    a = b = c = d = np.float32(0)
    whole = indices.size // 4 * 4
    for t in range(0, whole, 4):
        a += np.float32(values[t]) * weights[indices[t]]
        b += np.float32(values[t + 1]) * weights[indices[t + 1]]
        c += np.float32(values[t + 2]) * weights[indices[t + 2]]
        d += np.float32(values[t + 3]) * weights[indices[t + 3]]
    for t in range(whole, indices.size):
        a += np.float32(values[t]) * weights[indices[t]]
    return ((a + b) + (c + d)) * np.float32(1 / ONE) + weights[weights.size - 1]


@_njit
def _add(indices, values, factor, sums):
    """sums (width,) int64 += factor X."""
    sums[sums.size - 1] += factor * ONE
    for t in range(indices.size):
        sums[indices[t]] += factor * np.int64(values[t])
