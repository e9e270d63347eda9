"""The clipped gradients of many logistic models on one batch, summed tile by tile, on the host.

Two products with a matrix of all models' factors between them are what a compiled step is: it writes that matrix to
memory and reads it again, and so it does the sums of its blocks. Here the logits of up to 64 rows and some models are
made, clipped and multiplied back while they are in the nearest cache, and are added to float64.

What a copy moves the sum by is proven, roundings included. Its logits are sums in one order, wherever it stands, and so
are its factors. The n rows of a tile are added one by one in float32, to at most n clip norms: they are off by less
than n (n + 2) / 2 · 2^-24. A copy moves the copies behind it by a place; but a tile holds copies of one stretch of S
alone (`coowned.mechanism.batching.Batch.stretches`), so that only the tiles of its own stretch become others. At most
112 of a stretch are drawn: they are off by less than 112 · 33 · 2^-24 with the copy and by as much without it, together
by less than 2^-11 - 2^-15. All further additions are of float64, as in `coowned.mechanism.fused_clipping`; with and
without the copy they are off by less than 2^-16 for 2^19 copies. A norm is raised by 2^-11, so that a copy adds at most
1 - 2^-11 + 2^-20 clip norms: it moves the sum by less than one.
"""

import numpy as np
import numpy.typing as npt

from coowned import validate
from coowned.errors import InputError
from coowned.mechanism.compensated import CompensatedSum
from coowned.mechanism.compiled import compiled
from coowned.mechanism.fused_clipping import (
    RowsInPlace,
    add_wide_row,
    checked_rows,
    norms_of,
    sigmoid,
)
from coowned.mechanism.intrinsics import LINE, ask_for, count_up
from coowned.mechanism.matrix_tiles import COLUMNS, ROWS, multiply_tile
from coowned.mechanism.shared_parts import in_parts

TILE = 64  # rows that are added in float32, at most
RAISED = 1 + 2.0**-11
_MOST_PARTS = 8  # of a batch, summed apart; their number follows from its size alone: so do the bits
_LINES = 4  # of each row of the next tile that are asked for ahead of time

_njit = compiled()


def tiled_clipped_logistic_sums(
    coefficients: npt.ArrayLike,
    features: npt.ArrayLike | RowsInPlace,
    labels: npt.ArrayLike,
    mask: npt.ArrayLike,
    clip_norms: npt.ArrayLike,
    squared_norms: npt.ArrayLike | None = None,
    stretches: npt.ArrayLike | None = None,
) -> CompensatedSum:
    """What `clipping.clipped_logistic_gradient_sums` is, of the host's arrays; how many were clipped is not counted.

    Guarantees:
      - No copy adds more than clip_norm, from denormal to 1e38 large features.   (test_no_copy_adds_more)
      - A copy with a feature, label or gradient that is not finite adds exactly zero, and so does padding.
        (test_not_finite_adds_zero, test_padding_adds_zero)
      - What a copy adds does not depend on what other copies hold.   (test_a_bad_row_changes_no_other,
        test_a_bad_row_changes_no_logit)
      - Nor on its place, or on how many others there are.   (test_a_row_adds_the_same_in_every_place)
      - One copy more or less moves a sum by at most a clip norm where `stretches` are given and hold at most 112 each,
        wherever it moves those behind it, among 2^19.   (test_copies_that_move_up_change_nothing)
      - A sum is that of Algorithm 1, and that of the compiled function.   (test_equals_the_reference)
      - A model's sum does not depend on the other models.   (test_a_model_alone_has_the_same_sum)
      - Neither the number of threads nor where rows lie in memory changes a bit.
        (test_threads_and_places_change_nothing)
    Cost: two products of float32, and one pass over the rows; float64 sums for each part of a large batch.

    Args:
      coefficients: (models, num_features + 1) float32: weights, and the intercept last.
      features: (batch, num_features) float32, or where such rows lie. Rows that the mask leaves out are not read, but
        must lie there.
      labels: (batch,) 0 or 1 (any finite number is clipped soundly).
      mask: (batch,) True where the row is real.
      clip_norms: (models,) above 0, float32.
      squared_norms: (batch,) `clipping.squared_norms_of` these very rows. Norms of other rows would void the bound.
      stretches: (batch,) `Batch.stretches()`: rows of different ones are not added in float32. None: all are of one.

    Returns:
      (models, num_features + 1) sums.

    Example:
      >>> features, mask = np.float32([[3.0, 4.0], [np.inf, 0.0]]), np.array([True, True])
      >>> tiled_clipped_logistic_sums(
      ...     np.zeros((2, 3)), features, np.ones(2), mask, np.float32([0.1, 10.0])).rounded.round(4)
      array([[-0.0588, -0.0784, -0.0196],
             [-1.5   , -2.    , -0.5   ]], dtype=float32)
    """
    coefficients = np.ascontiguousarray(coefficients, np.float32)
    labels, mask = np.ascontiguousarray(labels, np.float32), np.ascontiguousarray(mask, np.bool_)
    clip_norms = np.ascontiguousarray(clip_norms, np.float32)
    if coefficients.ndim != 2 or coefficients.shape[1] < 2:
        raise InputError(f"coefficients must be of shape (models, num_features + 1), not {coefficients.shape}")
    models, num_features = len(coefficients), coefficients.shape[1] - 1
    validate.same_length(models, clip_norms=clip_norms)
    if not (clip_norms > 0).all():
        raise InputError("clip_norms must be above 0")
    source, rows = checked_rows(features, labels, mask, num_features)
    if squared_norms is None:
        squared_norms = norms_of(source, rows, mask)
    norms = np.ascontiguousarray(squared_norms, np.float32)
    validate.same_length(mask.size, squared_norms=norms)
    of = np.zeros(mask.size, np.int64) if stretches is None else np.ascontiguousarray(stretches, np.int64)
    validate.same_length(mask.size, stretches=of)

    width = -(-(num_features + 1) // ROWS) * ROWS  # weights, the intercept, and zeros until it comes out even
    panels = -(-models // COLUMNS)
    columns = np.zeros((panels, width, COLUMNS), np.float32)
    _spread(coefficients, columns)
    bounds = np.ones(panels * COLUMNS, np.float32)
    bounds[:models] = clip_norms

    tiles = np.empty(mask.size + 1, np.int64)
    tiles = tiles[: _cut_tiles(of, mask, tiles) + 1]
    parts = min(_MOST_PARTS, max(1, tiles.size // 4))
    sums = np.empty((parts, panels, width, COLUMNS))
    in_parts(_add_parts, (columns, bounds, num_features, source, rows, labels, mask, norms, tiles, sums), parts)
    high, low = np.empty_like(coefficients), np.empty_like(coefficients)
    _join(sums, high, low)
    return CompensatedSum(high, low)


@_njit
def _cut_tiles(stretches, mask, tiles):
    """tiles[t] to tiles[t + 1]: rows of one stretch, TILE at most; gives how many tiles there are.

    What the mask leaves out is of no stretch, and no tile where it is at the end.
    """
    count = 0
    end = mask.size
    while end and not mask[end - 1]:
        end -= 1
    begin, own = 0, np.int64(0)
    for i in range(end):
        if i == begin or (mask[i] and stretches[i] != own) or i - begin == TILE:
            tiles[count] = begin = i
            own = stretches[i]
            count += 1
    tiles[count] = end
    return count


@_njit
def _add_parts(columns, bounds, num_features, source, rows, labels, mask, squared_norms, tiles, sums, taken, done):
    """Adds up parts, each taken by whichever thread is free, until there are none left."""
    panels, width, _ = columns.shape
    parts, count = sums.shape[0], tiles.size - 1
    tile, factors = np.zeros((TILE, width), np.float32), np.empty((TILE, COLUMNS), np.float32)
    targets, inverses = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    while True:
        part = count_up(taken, 1)  # pyright: ignore[reportCallIssue]
        if part >= parts:
            return
        sums[part] = 0
        for number in range(count * part // parts, count * (part + 1) // parts):
            first, end = tiles[number], tiles[number + 1]
            length = end - first
            filled = (length + ROWS - 1) // ROWS * ROWS  # with rows of zeros until it comes out even
            for i in range(filled):
                _fill_row(source, rows, labels, mask, squared_norms, first + i, end, num_features, tile[i])
                at = first + i
                square = squared_norms[at] if tile[i, num_features] else np.float32(0)
                inverses[i] = 1.0 / (np.sqrt(np.float64(square) + 1.0) * RAISED)
                targets[i] = labels[at] if tile[i, num_features] else np.float32(0.5)  # that of a logit of 0
            for panel in range(panels):
                for i in range(0, filled, ROWS):
                    multiply_tile(tile, i, 0, width, 1, width, columns[panel], factors, i)
                _clip(factors, filled, targets, inverses, bounds[panel * COLUMNS : (panel + 1) * COLUMNS])
                for j in range(0, width, ROWS):
                    multiply_tile(tile, 0, j, 1, width, length, factors, sums[part, panel], j)
            for i in range(first, end):  # beyond float32 on the way: rare, and all in float64
                if mask[i] and np.isfinite(labels[i]) and not squared_norms[i] < np.inf:
                    _add_wide(columns, bounds, num_features, source[rows[i]], labels[i], sums[part])
        count_up(done, 1)  # pyright: ignore[reportCallIssue]


@_njit
def _fill_row(source, rows, labels, mask, squared_norms, at, end, num_features, row):
    """A row of the tile: features and a one, or zeros where it adds nothing to the tile, whatever it holds."""
    following = at + TILE
    if following < mask.size:
        for j in range(0, min(num_features, _LINES * LINE), LINE):
            ask_for(source, rows[following], j)  # pyright: ignore[reportCallIssue]
    if at < end and mask[at] and np.isfinite(labels[at]) and squared_norms[at] < np.inf:
        place = rows[at]
        for j in range(num_features):
            row[j] = source[place, j]
        row[num_features] = 1
    else:
        row[:] = 0


_SMALLEST = np.float32(2.0**-116)  # a factor below it is 0: its products could be so small that float32 rounds them up


# A product that is added without being rounded first only makes a residual better.
@compiled(fastmath={"contract"})
def _clip(factors, length, targets, inverses, bounds):
    """Logits become sigmoid(logit) - target, at most bound * inverse; what is not a number becomes zero."""
    for i in range(length):
        target, inverse = targets[i], inverses[i]
        row = factors[i]
        for j in range(COLUMNS):
            residual = sigmoid(row[j]) - target
            longest = bounds[j] * inverse
            longest = longest if longest >= _SMALLEST else np.float32(0)
            factor = longest if residual > longest else residual
            factor = -longest if factor < -longest else factor
            row[j] = factor if factor == factor else np.float32(0)


@_njit
def _add_wide(columns, bounds, num_features, row, label, sums):
    """A row that float32 cannot hold on the way, for every model."""
    weights, added = np.empty(num_features, np.float32), np.empty(num_features + 1)
    for panel in range(columns.shape[0]):
        for j in range(COLUMNS):
            weights[:] = columns[panel, :num_features, j]
            added[:] = 0
            intercept, clip_norm = columns[panel, num_features, j], np.float64(bounds[panel * COLUMNS + j])
            add_wide_row(weights, intercept, row, label, clip_norm, RAISED, added)
            sums[panel, : num_features + 1, j] += added


@_njit
def _spread(coefficients, columns):
    """columns (panels, width, COLUMNS): the models' coefficients, a column each."""
    for m in range(coefficients.shape[0]):
        panel, column = columns[m // COLUMNS], m % COLUMNS
        for j in range(coefficients.shape[1]):
            panel[j, column] = coefficients[m, j]


@_njit
def _join(sums, high, low):
    """high + low (models, num_features + 1): the parts' sums, as two float32 numbers; infinite beyond them."""
    parts, panels = sums.shape[0], sums.shape[1]
    models, width = high.shape
    total = np.empty((width, COLUMNS))
    for panel in range(panels):
        total[:] = 0.0
        for part in range(parts):
            for j in range(width):
                for column in range(COLUMNS):
                    total[j, column] += sums[part, panel, j, column]
        for column in range(min(COLUMNS, models - panel * COLUMNS)):
            m = panel * COLUMNS + column
            for j in range(width):
                rounded = np.float32(total[j, column])
                high[m, j] = rounded
                low[m, j] = total[j, column] - np.float64(rounded) if np.isfinite(rounded) else 0.0
