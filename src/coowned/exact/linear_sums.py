"""Sums clipped gradients of linear models exactly on the host, for one model and for many on one batch.

The gradient of a copy is its residual, or one for each class, times the row (x, 1). The row is rounded first, by
itself, to integers

    X = rint((x, 1) 2^-e),   e such that |X| is about 2^20,

and a model adds the integer matrix A X^T, where A are the residuals in grid units, rounded and clipped to integers with
|A| <= radius / |X|. |X| is at most |x|, known and rounded up (`norms_of`), and sqrt(d + 1) / 2 for the rounding. Sums
are float64: |A X| <= radius < 2^34, and integers below 2^53 add up exactly.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from coowned import threads, validate
from coowned.errors import InputError
from coowned.exact.compiled import in_parts
from coowned.exact.grid import Grid
from coowned.exact.linear_kernels import LOGISTIC, SOFTMAX, SQUARED, Blocks, Copies, add_rows, add_tiles, fill_norms
from coowned.exact.matrix_tiles import COLUMNS, ROWS

MOST_COPIES_OF_A_PART = 2**19  # times the radius is below 2^53
_PARTS = 16  # of a large batch, summed apart by whichever thread is free
_NUMBERS_OF_A_PART = 2**17  # at least, where there is one score
_COPIES_OF_A_PART = 256  # at least, where there are many scores

_Numbers = npt.NDArray[np.float32]


class RowsInPlace(NamedTuple):
    """Rows of a larger array: row i of the batch is source[rows[i]]."""

    source: npt.NDArray[np.float32]  # (n, num_features), its rows contiguous
    rows: npt.NDArray[np.int64]  # (batch,)
    names = ("features",)

    def arrays(self) -> dict[str, npt.NDArray[np.float32]]:
        """Returns a copy of them, (batch, num_features)."""
        return {"features": self.source[self.rows]}


def clipped_linear_sums(
    coefficients: npt.ArrayLike,  # (models[, classes], num_features + 1) float32: weights, and the intercept last
    features: npt.ArrayLike | RowsInPlace,  # (batch, num_features) float32, or where such rows are
    labels: npt.ArrayLike,  # (batch,) 0 or 1, the index of the class, or the target
    mask: npt.ArrayLike,  # (batch,) True where the row is real
    grids: Sequence[Grid],  # `Grid.for_linear` of each model's clip norm
    norms: npt.ArrayLike | None = None,  # (batch,) `norms_of` these very rows; those of others would void the bound
    *,
    squared_loss: bool = False,
) -> tuple[npt.NDArray[np.int64], int]:
    """Returns the sum over a batch of clipped gradients of linear models, in units of each model's grid.

    The loss is logistic; with an axis for classes it is softmax's cross-entropy; with `squared_loss` half the squared
    difference of score and label. Any number as a label is clipped soundly; one that is no class adds zero.

    Guarantees:
      - A copy adds an integer matrix no longer than the radius, whatever its features.   (test_no_copy_adds_more)
      - It depends on that copy and that model alone.   (test_a_copy_adds_the_same_in_any_company,
        test_a_model_alone_has_the_same_sum, test_order_threads_and_padding_change_nothing)
      - The sum is the sum of what each copy adds, exactly.   (test_the_sum_is_that_of_the_copies)
      - What is not finite adds exactly zero, as padding does.   (test_not_finite_adds_zero, test_padding_adds_zero)
      - It is close to the clipped gradient of Algorithm 1.   (test_is_close_to_the_reference)
    Cost: one pass over the rows for one model with one score; else two products, the second in float64.

    Returns:
      (int64 sums of the coefficients' shape; of one model the number of copies that were clipped, else 0: private).

    Example:
      >>> features, mask = np.float32([[3.0, 4.0], [np.inf, 0.0]]), np.array([True, True])
      >>> grids = [Grid.for_linear(0.1), Grid.for_linear(10.0)]
      >>> sums, _ = clipped_linear_sums(np.zeros((2, 3)), features, np.ones(2), mask, grids)
      >>> (sums * [[grid.unit] for grid in grids]).round(4)
      array([[-0.0588, -0.0784, -0.0196],
             [-1.5   , -2.    , -0.5   ]])
    """
    coefficients, loss = checked_coefficients(coefficients, grids, squared_loss=squared_loss)
    labels, mask = np.ascontiguousarray(labels, np.float32), np.ascontiguousarray(mask, np.bool_)
    source, rows = _checked_rows(features, labels, mask, coefficients.shape[2] - 1)
    norms = _norms(source, rows) if norms is None else np.ascontiguousarray(norms, np.float32)
    validate.same_length(mask.size, norms=norms)
    sum_models = _sum_one_score if len(coefficients) == 1 and loss != SOFTMAX else _sum_many_scores
    totals, clipped = sum_models(
        loss, coefficients, Copies(source, rows, labels, mask, norms), *_units_and_radii(tuple(grids))
    )
    return totals if loss == SOFTMAX else totals[:, 0], clipped if len(coefficients) == 1 else 0


def norms_of(features: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """(rows,) norms of the rows, computed in float64 and rounded up to float32; infinite where one is not finite.

    >>> norms_of([[3.0, 4.0], [np.nan, 0.0]])
    array([5.0000005,       inf], dtype=float32)
    """
    features = np.ascontiguousarray(features, np.float32)
    return _norms(features, np.arange(len(features)))


def rows_are_contiguous(source: npt.NDArray[np.float32]) -> bool:
    """Returns whether each row is one piece of memory, wherever the rows are."""
    return source.flags.aligned and (source.shape[1] == 1 or source.strides[1] == source.itemsize)


def checked_coefficients(
    coefficients: npt.ArrayLike, grids: Sequence[Grid], *, squared_loss: bool = False
) -> tuple[npt.NDArray[np.float32], int]:
    """((models, scores, num_features + 1) float32, contiguous; the loss that their number of axes stands for)."""
    array = np.ascontiguousarray(coefficients, np.float32)
    if array.ndim not in (2, 3) or array.shape[-1] < 2 or (array.ndim == 3 and (array.shape[1] < 2 or squared_loss)):
        raise InputError(
            f"coefficients must be of shape (models[, classes], num_features + 1), not {array.shape}, with two classes "
            "or more and none for a squared loss"
        )
    validate.same_length(len(array), grids=grids)
    loss = SOFTMAX if array.ndim == 3 else SQUARED if squared_loss else LOGISTIC
    return (array if loss == SOFTMAX else array[:, None]), loss


def _checked_rows(
    features: npt.ArrayLike | RowsInPlace, labels: npt.NDArray[np.float32], mask: npt.NDArray[np.bool_], width: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """(source, rows) of the batch's features; refuses what a compiled loop, which checks no bounds, would misread."""
    if isinstance(features, RowsInPlace):
        source, rows = features
        if rows.dtype.kind not in "iu" or (rows.size and (rows.min() < 0 or rows.max() >= len(source))):
            raise InputError(f"rows must be integers in [0, {len(source)}): the index of each copy's features")
        rows = np.ascontiguousarray(rows, np.int64)
    else:
        source, rows = np.ascontiguousarray(features, np.float32), np.arange(mask.size)
        validate.same_length(mask.size, features=source)
    validate.same_length(mask.size, rows=rows, labels=labels)
    if source.ndim != 2 or source.dtype != np.float32 or source.shape[1] != width:
        raise InputError(f"features must be float32 of shape (rows, {width}), not {source.dtype} {source.shape}")
    if not rows_are_contiguous(source):
        raise InputError("the numbers of a row of features must be contiguous in memory; use np.ascontiguousarray")
    return source, rows


def _norms(source: npt.NDArray[np.float32], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    norms = np.empty(rows.size, np.float32)
    fill_norms(source, rows, norms)
    return norms


@functools.lru_cache(maxsize=16)  # the same in every step
def _units_and_radii(grids: tuple[Grid, ...]) -> tuple[_Numbers, _Numbers]:
    """(models,) 1 / unit and the radius, not rounded up."""
    radii = np.array([grid.radius for grid in grids])
    if not (radii < 2.0**34).all():
        raise InputError("a linear model's sums need Grid.for_linear")
    units = np.array([1 / grid.unit for grid in grids], np.float32)
    return units, np.nextafter(radii.astype(np.float32), np.float32(0))


def _sum_one_score(
    loss: int, coefficients: _Numbers, copies: Copies, units: _Numbers, radii: _Numbers
) -> tuple[npt.NDArray[np.int64], int]:
    size, width = copies.mask.size, coefficients.shape[2]
    parts = max(1, min(_PARTS, size * width // _NUMBERS_OF_A_PART), -(-size // MOST_COPIES_OF_A_PART))
    sums, clipped = np.zeros((parts, width)), np.zeros(parts, np.int64)
    in_parts(add_rows, (loss, coefficients[0, 0], copies, units[0], radii[0], sums, clipped), parts)
    return sums.astype(np.int64).sum(axis=0).reshape(coefficients.shape), int(clipped.sum())


def _sum_many_scores(
    loss: int, coefficients: _Numbers, copies: Copies, units: _Numbers, radii: _Numbers
) -> tuple[npt.NDArray[np.int64], int]:
    models, scores, own_width = coefficients.shape
    each = max(1, COLUMNS // scores)  # models of a block
    blocks, panels, width = -(-models // each), -(-each * scores // COLUMNS), -(-own_width // ROWS) * ROWS
    filled = np.zeros((blocks, each * scores, width), np.float32)
    filled.reshape(blocks * each, scores, width)[:models, :, :own_width] = coefficients
    filled = np.pad(filled, ((0, 0), (0, panels * COLUMNS - each * scores), (0, 0)))
    given = Blocks(
        np.ascontiguousarray(filled.reshape(blocks, panels, COLUMNS, width).transpose(0, 1, 3, 2)),
        np.resize(units, (blocks, each)),
        np.resize(radii, (blocks, each)),
    )
    size = copies.mask.size
    parts = max(1, min(threads.cores(), size // _COPIES_OF_A_PART), -(-size // MOST_COPIES_OF_A_PART))
    sums, clipped = np.zeros((parts, blocks, panels, width, COLUMNS)), np.zeros(parts, np.int64)
    in_parts(add_tiles, (loss, models, scores, given, copies, sums, clipped), parts)
    columns = sums.astype(np.int64).sum(axis=0).transpose(0, 1, 3, 2).reshape(blocks, panels * COLUMNS, width)
    totals = columns[:, : each * scores].reshape(blocks * each, scores, width)[:models, :, :own_width]
    return totals, int(clipped.sum())
