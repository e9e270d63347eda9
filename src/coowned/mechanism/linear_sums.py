"""Clipped gradients of logistic models, summed exactly on the host, for one model and for many on one batch.

The gradient of a copy is its residual times the row (x, 1). The row is rounded first, by itself, to integers

    X = rint((x, 1) 2^-e),   e such that |X| is about 2^20,

and a model's contribution is the integer vector A X, where A is the residual in grid units, rounded and clipped to the
largest integer that is at most radius / |X|. So a contribution is a function of that copy and the model alone, and its
length is at most the grid's radius. Sums are float64: |A X| <= radius < 2^34, and integers below 2^53 add up exactly:
no order, grouping, thread or padding changes a bit of the sum.

|X| is bounded without looking at it: |x|^2 is known, rounded up (`squared_norms_of`), and rounding d + 1 numbers by at
most 1/2 each makes a vector longer by at most sqrt(d + 1) / 2.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from coowned import threads, validate
from coowned.errors import InputError
from coowned.mechanism.compiled import compiled
from coowned.mechanism.grid import Grid
from coowned.mechanism.intrinsics import LINE, atomic_add, prefetch
from coowned.mechanism.kernels import squared_norms as fill_squared_norms
from coowned.mechanism.matrix_tiles import COLUMNS, ROWS, STRIDE, SUM_ROWS, multiply_four, multiply_tile
from coowned.mechanism.shared_parts import in_parts

MOST_COPIES_OF_A_PART = 2**19  # times the radius is below 2^53
TILE = 64  # rows that are worked on together, at most
_PARTS = 16  # of a large batch, summed apart by whichever thread is free
_ENOUGH = 2**17  # numbers for which a part of its own is worth it
_POWER = np.uint64(2047 << 52)  # the bits of a float64 that hold its power of two
_LINES = 8  # cache lines of a row that are prefetched; the processor then goes on by itself
_AHEAD = 1024  # about a quarter of the numbers by which one model's rows are prefetched ahead

_njit = compiled()


class RowsInPlace(NamedTuple):
    """Rows of a larger array: row i of the batch is source[rows[i]]."""

    source: npt.NDArray[np.float32]  # (n, num_features), its rows contiguous
    rows: npt.NDArray[np.int64]  # (batch,)

    def gathered(self) -> npt.NDArray[np.float32]:
        """(batch, num_features): a copy of them."""
        return self.source[self.rows]


class Copies(NamedTuple):
    """A batch as the compiled loops read it."""

    source: npt.NDArray[np.float32]  # (n, num_features)
    rows: npt.NDArray[np.int64]  # (batch,) where in source
    labels: npt.NDArray[np.float32]  # (batch,)
    mask: npt.NDArray[np.bool_]  # (batch,) whether it is real
    norms: npt.NDArray[np.float32]  # (batch,) at least |x|^2


def clipped_linear_sums(
    coefficients: npt.ArrayLike,
    features: npt.ArrayLike | RowsInPlace,
    labels: npt.ArrayLike,
    mask: npt.ArrayLike,
    grids: Sequence[Grid],
    squared_norms: npt.ArrayLike | None = None,
) -> tuple[npt.NDArray[np.int64], int]:
    """The sum over a batch of clipped gradients of the logistic loss, in units of each model's grid.

    Guarantees:
      - What a copy adds is an integer vector no longer than the radius, from denormal to 1e38 large features.
        (test_no_copy_adds_more)
      - It depends on that copy and that model alone: not on its position, on other copies or models, on padding or on
        threads.   (test_a_copy_adds_the_same_in_any_company, test_a_model_alone_has_the_same_sum,
        test_order_threads_and_padding_change_nothing)
      - The sum is the sum of what each copy adds, exactly.   (test_the_sum_is_that_of_the_copies)
      - A copy with a feature, label or gradient that is not finite adds exactly zero, and so does padding.
        (test_not_finite_adds_zero, test_padding_adds_zero)
      - It is close to the clipped gradient of Algorithm 1.   (test_is_close_to_the_reference)
    Cost: one pass over the rows for one model; for many two products, the second in float64.

    Args:
      coefficients: (models, num_features + 1) float32: weights, and the intercept last.
      features: (batch, num_features) float32, or where such rows are. Rows that the mask leaves out are not read.
      labels: (batch,) 0 or 1 (any finite number is clipped soundly).
      mask: (batch,) True where the row is real.
      grids: `Grid.for_linear` of each model's clip norm.
      squared_norms: (batch,) `squared_norms_of` these very rows. Norms of other rows would void the bound.

    Returns:
      ((models, num_features + 1) int64 sums; of one model the number of copies that were clipped, else 0: private).

    Example:
      >>> features, mask = np.float32([[3.0, 4.0], [np.inf, 0.0]]), np.array([True, True])
      >>> grids = [Grid.for_linear(0.1), Grid.for_linear(10.0)]
      >>> sums, _ = clipped_linear_sums(np.zeros((2, 3)), features, np.ones(2), mask, grids)
      >>> (sums * [[grid.unit] for grid in grids]).round(4)
      array([[-0.0588, -0.0784, -0.0196],
             [-1.5   , -2.    , -0.5   ]])
    """
    coefficients = np.ascontiguousarray(coefficients, np.float32)
    if coefficients.ndim != 2 or coefficients.shape[1] < 2:
        raise InputError(f"coefficients must be of shape (models, num_features + 1), not {coefficients.shape}")
    validate.same_length(len(coefficients), grids=grids)
    labels, mask = np.ascontiguousarray(labels, np.float32), np.ascontiguousarray(mask, np.bool_)
    source, rows = _checked_rows(features, labels, mask, coefficients.shape[1] - 1)
    norms = _norms(source, rows, mask) if squared_norms is None else np.ascontiguousarray(squared_norms, np.float32)
    validate.same_length(mask.size, squared_norms=norms)
    units, radii = _units_and_radii(tuple(grids))
    copies = Copies(source, rows, labels, mask, norms)
    sum_models = _sum_one_model if len(coefficients) == 1 else _sum_many_models
    totals, clipped = sum_models(coefficients, copies, units, radii)
    if np.isinf(norms).any():
        _add_wide_rows(coefficients, copies, grids, totals)
    return totals, clipped


def squared_norms_of(features: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """(rows,) squared norms of the rows, in float64 and rounded up to float32; infinite where one is not finite.

    >>> squared_norms_of([[3.0, 4.0], [np.nan, 0.0]])
    array([25.000002, inf], dtype=float32)
    """
    features = np.ascontiguousarray(features, np.float32)
    squares = np.empty(len(features), np.float32)
    fill_squared_norms(features, np.arange(len(features)), squares)
    return squares


def rows_are_contiguous(source: npt.NDArray[np.float32]) -> bool:
    """Whether each row is one piece of memory, wherever the rows are."""
    return source.flags.aligned and (source.shape[1] == 1 or source.strides[1] == source.itemsize)


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


def _norms(
    source: npt.NDArray[np.float32], rows: npt.NDArray[np.int64], mask: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float32]:
    """(batch,) squared norms of the rows that are real; others are not read."""
    real = np.ascontiguousarray(rows[mask])
    own, norms = np.empty(real.size, np.float32), np.zeros(mask.size, np.float32)
    fill_squared_norms(source, real, own)
    norms[mask] = own
    return norms


@functools.lru_cache(maxsize=16)  # the same in every step
def _units_and_radii(grids: tuple[Grid, ...]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """(models,) 1 / unit and the radius, not rounded up."""
    radii = np.array([grid.radius for grid in grids])
    if not (radii < 2.0**34).all():
        raise InputError("a linear model's sums need Grid.for_linear")
    units = np.array([1 / grid.unit for grid in grids], np.float32)
    return units, np.nextafter(radii.astype(np.float32), np.float32(0))


@_njit
def scale_and_length(square, width):
    """(2^-e, at least |X|) of a row of `width` numbers, the last 1, whose first have at most this squared norm.

    2^-e |(x, 1)| is in [2^19, 2^20); the margin is for the roundings of a few float64 operations.
    """
    length = np.sqrt(square + 1.0)
    power = np.uint64(np.float64(length).view(np.uint64) & _POWER).view(np.float64)  # length / 2 < power <= length
    scale = 2.0**19 / power
    return scale, (length * scale + 0.5 * np.sqrt(np.float64(width))) * (1 + 2.0**-50)


@_njit
def row_facts(copies, begin, end, scales, inverses, labels):
    """Of rows begin to end: 2^-e, at most 1 / |X| by a margin for two float32 roundings, and the label.

    A row that adds nothing (padding, a label or norm that is not finite) has an inverse of 0, which makes its factor 0.
    """
    width = copies.source.shape[1] + 1
    for i in range(end - begin):  # without a branch, so that it becomes vector code
        norm, label = copies.norms[begin + i], copies.labels[begin + i]
        counts = copies.mask[begin + i] and label - label == 0 and norm - norm == 0  # finite
        scale, length = scale_and_length(np.float64(norm) if counts else 0.0, width)
        scales[i] = scale
        inverses[i] = (1 - 2.0**-20) / length if counts else 0.0
        labels[i] = label if counts else np.float32(0)


# ---- rounding and residuals ------------------------------------------------------------------------------------------

_ROUNDER = np.float32(3 * 2**22)  # adding and subtracting it rounds a float32 below 2^21 to an integer
_LOG2_E, _LN_2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)
_EXPONENT, _BIAS = np.uint32(23), np.uint32(127 << 23)
_LARGEST = np.float32(80)  # where a sigmoid is 1e-35 from 0 or 1


# A product that is added without being rounded first only makes a residual better.
@compiled(fastmath={"contract"})
def sigmoid(x):
    """1 / (1 + e^-x) in float32, to a few units in the last place; without a branch, so that loops become vector code.

    What is not a number stays so.
    """
    x = _LARGEST if x > _LARGEST else x
    x = -_LARGEST if x < -_LARGEST else x
    # e^-x = 2^n e^r: n in the last bits of a sum, e^r by its series, below 1e-8 from it
    moved = x * -_LOG2_E + _ROUNDER
    r = -x - (moved - _ROUNDER) * _LN_2
    series = np.float32(1 / 5040)
    series = series * r + np.float32(1 / 720)
    series = series * r + np.float32(1 / 120)
    series = series * r + np.float32(1 / 24)
    series = series * r + np.float32(1 / 6)
    series = series * r + np.float32(1 / 2)
    series = series * r + np.float32(1)
    series = series * r + np.float32(1)
    power = np.uint32((np.float32(moved).view(np.uint32) << _EXPONENT) + _BIAS).view(np.float32)
    return np.float32(1) / (np.float32(1) + series * power)


@_njit
def longest_factor(inverse, radius):
    """Below radius / |X| - 1/2, so that what is at most that large may be rounded to an integer; below 0 for no row."""
    return radius * inverse - np.float32(0.5)


@_njit
def factor_of(residual, inverse_scale, longest, unit):
    """A: the residual in grid units, over the row's scale, clipped and rounded; 0 if it is not a number."""
    factor = residual * inverse_scale * unit
    factor = longest if factor > longest else factor
    factor = -longest if factor < -longest else factor
    factor = (factor + _ROUNDER) - _ROUNDER
    return factor if factor == factor and longest > 0 else np.float32(0)


# ---- one model: each row is read once, four at a time ----------------------------------------------------------------


def _sum_one_model(
    coefficients: npt.NDArray[np.float32],
    copies: Copies,
    units: npt.NDArray[np.float32],
    radii: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.int64], int]:
    size, width = copies.mask.size, coefficients.shape[1]
    parts = max(1, min(_PARTS, size * width // _ENOUGH), -(-size // MOST_COPIES_OF_A_PART))
    sums, clipped = np.zeros((parts, width)), np.zeros(parts, np.int64)
    in_parts(_add_parts, (coefficients[0], copies, units[0], radii[0], sums, clipped), parts)
    return sums.astype(np.int64).sum(axis=0, keepdims=True), int(clipped.sum())


@_njit
def _add_parts(coefficients, copies, unit, radius, sums, clipped, taken, done):
    """Adds up parts, each taken by whichever thread is free, until there are none left."""
    size, parts = copies.mask.size, clipped.size
    while True:
        part = atomic_add(taken, 1)  # pyright: ignore[reportCallIssue]
        if part >= parts:
            return
        begin, end = size * part // parts, size * (part + 1) // parts
        clipped[part] = _add_rows(coefficients, copies, unit, radius, begin, end, sums[part])
        atomic_add(done, 1)  # pyright: ignore[reportCallIssue]


@_njit
def _add_rows(coefficients, copies, unit, radius, begin, end, sums):
    """Adds A X of rows `begin` to `end` to sums (num_features + 1,) float64; gives how many were clipped.

    Four rows at once, which stay in the nearest cache: their logits, their factors, their sums.
    """
    width = coefficients.size - 1
    whole = width // STRIDE * STRIDE
    weights, intercept = coefficients[:width], coefficients[width]
    nothing = np.zeros(width, np.float32)  # stands for a row that adds nothing, whatever that row holds
    rows, products, factors = np.empty(4, np.int64), np.zeros(4, np.float32), np.zeros(4, np.float32)
    scales, inverses, labels = np.ones(TILE, np.float32), np.zeros(TILE, np.float32), np.zeros(TILE, np.float32)
    ahead = 4 * max(1, _AHEAD // width)
    clipped = 0
    for first in range(begin, end, 4):
        at = (first - begin) % TILE
        if not at:
            inverses[:] = 0
            row_facts(copies, first, min(first + TILE, end), scales, inverses, labels)
        for i in range(4):
            rows[i] = copies.rows[first + i] if inverses[at + i] > 0 else -1
            if first + i + ahead < end:
                for j in range(0, min(width, _LINES * LINE), LINE):
                    prefetch(copies.source, copies.rows[first + i + ahead], j)  # pyright: ignore[reportCallIssue]
        products[:] = 0
        if whole:
            multiply_four(copies.source, nothing, rows, weights, whole, products)  # pyright: ignore[reportCallIssue]
        if whole < width:
            _multiply_rest(copies.source, rows, weights, whole, products)
        for i in range(4):
            longest = longest_factor(inverses[at + i], radius)
            residual = sigmoid(products[i] + intercept) - labels[at + i]
            factors[i] = factor_of(residual, np.float32(1) / scales[at + i], longest, unit)
            clipped += abs(factors[i]) + 1 > longest and longest > 0
            sums[width] += np.float64(factors[i]) * np.float64((scales[at + i] + _ROUNDER) - _ROUNDER)
        _add_four(copies.source, nothing, rows, scales[at : at + 4], factors, sums)
    return clipped


@_njit
def _multiply_rest(source, rows, weights, begin, products):
    """What `multiply_four` leaves, from `begin` on; of a row below 0, whose product nobody looks at, anything."""
    r0, r1, r2, r3 = max(rows[0], 0), max(rows[1], 0), max(rows[2], 0), max(rows[3], 0)
    for j in range(begin, weights.size):
        products[0] += source[r0, j] * weights[j]
        products[1] += source[r1, j] * weights[j]
        products[2] += source[r2, j] * weights[j]
        products[3] += source[r3, j] * weights[j]


# x s is exact, s being a power of two, so it does not matter whether it is rounded before _ROUNDER is added.
@compiled(fastmath={"contract"})
def _add_four(source, nothing, rows, scales, factors, sums):
    """sums[:width] += A X of four rows."""
    x0 = source[rows[0]] if rows[0] >= 0 else nothing
    x1 = source[rows[1]] if rows[1] >= 0 else nothing
    x2 = source[rows[2]] if rows[2] >= 0 else nothing
    x3 = source[rows[3]] if rows[3] >= 0 else nothing
    s0, s1, s2, s3 = scales[0], scales[1], scales[2], scales[3]
    a0, a1, a2, a3 = np.float64(factors[0]), np.float64(factors[1]), np.float64(factors[2]), np.float64(factors[3])
    for j in range(source.shape[1]):
        total = a0 * np.float64((x0[j] * s0 + _ROUNDER) - _ROUNDER)
        total += a1 * np.float64((x1[j] * s1 + _ROUNDER) - _ROUNDER)
        total += a2 * np.float64((x2[j] * s2 + _ROUNDER) - _ROUNDER)
        total += a3 * np.float64((x3[j] * s3 + _ROUNDER) - _ROUNDER)
        sums[j] += total


# ---- many models: tiles of rows and panels of models that stay in the nearest caches -------------------------------


class Panels(NamedTuple):
    """Models in panels of COLUMNS, the last filled up with models of weight 0."""

    columns: npt.NDArray[np.float32]  # (panels, width, COLUMNS) coefficients, a column each
    units: npt.NDArray[np.float32]  # (panels, COLUMNS)
    radii: npt.NDArray[np.float32]  # (panels, COLUMNS)


def _sum_many_models(
    coefficients: npt.NDArray[np.float32],
    copies: Copies,
    units: npt.NDArray[np.float32],
    radii: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.int64], int]:
    models, own_width = coefficients.shape
    panels, width = -(-models // COLUMNS), -(-own_width // ROWS) * ROWS
    filled = np.zeros((panels * COLUMNS, width), np.float32)
    filled[:models, :own_width] = coefficients
    given = Panels(
        np.ascontiguousarray(filled.reshape(panels, COLUMNS, width).transpose(0, 2, 1)),
        np.resize(units, (panels, COLUMNS)),
        np.resize(radii, (panels, COLUMNS)),
    )
    size = copies.mask.size
    parts = max(1, min(threads.cores(), size // (4 * TILE)), -(-size // MOST_COPIES_OF_A_PART))
    sums = np.zeros((parts, panels, width, COLUMNS))
    in_parts(_add_tiles, (given, copies, sums), parts)
    totals = np.zeros(coefficients.shape, np.int64)
    _join(sums, totals)
    return totals, 0


@_njit
def _join(sums, totals):
    """totals (models, num_features + 1) int64 += the parts' sums."""
    for part in range(sums.shape[0]):
        for model in range(totals.shape[0]):
            panel, column = divmod(model, COLUMNS)
            for j in range(totals.shape[1]):
                totals[model, j] += np.int64(sums[part, panel, j, column])


@_njit
def _add_tiles(given, copies, sums, taken, done):
    """Adds up parts, each taken by whichever thread is free, until there are none left."""
    panels, width, _ = given.columns.shape
    parts, size = sums.shape[0], copies.mask.size
    tile = np.zeros((TILE, width), np.float32)
    logits, factors = np.empty((TILE, COLUMNS), np.float32), np.empty((TILE, COLUMNS))
    scales, inverses, labels = np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    while True:
        part = atomic_add(taken, 1)  # pyright: ignore[reportCallIssue]
        if part >= parts:
            return
        for first in range(size * part // parts, size * (part + 1) // parts, TILE):
            end = min(first + TILE, size * (part + 1) // parts)
            filled = (end - first + ROWS - 1) // ROWS * ROWS  # with rows of zeros up to a whole number of blocks
            row_facts(copies, first, end, scales, inverses, labels)
            for i in range(filled):
                _fill_row(copies, first + i, i < end - first and inverses[i] > 0, scales[i], tile[i])
            for panel in range(panels):
                for i in range(0, filled, ROWS):
                    multiply_tile(tile, i, 0, width, 1, width, given.columns[panel], logits, i)
                for i in range(end - first):
                    facts = labels[i], np.float32(1) / scales[i], inverses[i]
                    _clip(logits[i], facts, given.units[panel], given.radii[panel], factors[i])
                for j in range(0, width, SUM_ROWS):
                    multiply_tile(tile, 0, j, 1, width, end - first, factors, sums[part, panel], j)
        atomic_add(done, 1)  # pyright: ignore[reportCallIssue]


@_njit
def _fill_row(copies, at, counts, scale, row):
    """A row of the tile: X, or zeros where it adds nothing, whatever it holds."""
    width = copies.source.shape[1]
    if at + TILE < copies.rows.size:
        for j in range(0, min(width, _LINES * LINE), LINE):
            prefetch(copies.source, copies.rows[at + TILE], j)  # pyright: ignore[reportCallIssue]
    if not counts:
        row[:] = 0
        return
    own = copies.rows[at]
    for j in range(width):
        row[j] = (copies.source[own, j] * scale + _ROUNDER) - _ROUNDER
    row[width] = (scale + _ROUNDER) - _ROUNDER


@_njit
def _clip(logits, facts, units, radii, factors):
    """The factors A of one row for the models of a panel."""
    label, inverse_scale, inverse = facts
    for j in range(COLUMNS):
        residual = sigmoid(logits[j] * inverse_scale) - label
        longest = longest_factor(inverse, radii[j])
        factors[j] = factor_of(residual, inverse_scale, longest, units[j])


# ---- rows whose squared norm is beyond float32 -----------------------------------------------------------------------


def _add_wide_rows(
    coefficients: npt.NDArray[np.float32], copies: Copies, grids: Sequence[Grid], totals: npt.NDArray[np.int64]
) -> None:
    """Adds what these rows add, in float64 and integers: nothing where a feature is not finite."""
    for i in np.flatnonzero(copies.mask & np.isfinite(copies.labels) & np.isinf(copies.norms)):
        x = np.append(copies.source[copies.rows[i]].astype(np.float64), 1.0)
        if not np.isfinite(x).all():
            continue
        scale, length = scale_and_length(float(x[:-1] @ x[:-1]) * (1 + x.size * 2.0**-52), x.size)
        row = np.rint(x * scale).astype(np.int64)
        with np.errstate(over="ignore", invalid="ignore"):
            residuals = 1 / (1 + np.exp(-(coefficients.astype(np.float64) @ x))) - copies.labels[i]
        for total, residual, grid in zip(totals, residuals, grids, strict=True):
            if np.isfinite(residual):
                longest = math.floor(grid.radius / length * (1 - 2.0**-50))
                total += row * round(max(-longest, min(longest, residual / scale / grid.unit)))
