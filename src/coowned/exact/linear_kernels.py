"""Compiled loops of linear models' sums: rows become integers, scores become factors, both are multiplied.

A gradient is the residual (the derivative of the loss by the score) times the row: clipping it is clipping residuals.
"""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from coowned.exact.compiled import compiled, parts_left
from coowned.exact.matrix_tiles import COLUMNS, LINE, ROWS, STRIDE, SUM_ROWS, multiply_four, multiply_tile, prefetch

LOGISTIC, SQUARED, SOFTMAX = range(3)

_ROUNDER = np.float32(3 * 2**22)  # adding and subtracting it rounds a float32 below 2^21 to an integer
_LOG2_E, _LN_2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)
_EXPONENT, _BIAS = np.uint32(23), np.uint32(127 << 23)
_SERIES = tuple(np.float32(1 / math.factorial(n)) for n in range(7, -1, -1))  # of e^r, the highest power first
_LARGEST = np.float32(80)  # where a sigmoid is 1e-35 from 0 or 1
TILE = 64  # rows that are worked on together, at most
_POWER = np.uint64(2047 << 52)  # the bits of a float64 that hold its power of two
_LINES = 8  # cache lines of a row that are prefetched; the processor then goes on by itself
_AHEAD = 1024  # about a quarter of the numbers by which one model's rows are prefetched ahead

_njit = compiled()


class Copies(NamedTuple):
    """A batch as the compiled loops read it."""

    source: npt.NDArray[np.float32]  # (n, num_features)
    rows: npt.NDArray[np.int64]  # (batch,) where in source
    labels: npt.NDArray[np.float32]  # (batch,)
    mask: npt.NDArray[np.bool_]  # (batch,) whether it is real
    norms: npt.NDArray[np.float32]  # (batch,) at least |x|


@_njit
def row_facts(copies, begin, end, scales, inverses, labels):
    """Writes of rows begin to end: 2^-e, at most 1 / |X| by a margin for a few roundings, and the label.

    2^-e |(x, 1)| is in [2^19, 2^20). A row that adds nothing (padding, a label or norm that is not finite) has an
    inverse of 0, which makes its factor 0.
    """
    rounded_by = 0.5 * np.sqrt(np.float64(copies.source.shape[1] + 1))
    for i in range(end - begin):  # without a branch, so that it becomes vector code
        norm, label = copies.norms[begin + i], copies.labels[begin + i]
        counts = copies.mask[begin + i] and label - label == 0 and norm - norm == 0  # finite
        norm = np.float64(norm) if counts else 0.0
        length = np.sqrt(norm * norm + 1.0)
        power = np.uint64(np.float64(length).view(np.uint64) & _POWER).view(np.float64)  # length / 2 < power <= length
        scale = 2.0**19 / power
        scales[i] = scale
        inverses[i] = (1 - 2.0**-20) / ((length * scale + rounded_by) * (1 + 2.0**-50)) if counts else 0.0
        labels[i] = label if counts else np.float32(0)


@_njit
def fill_norms(features, rows, out):
    """out (n,) float32: at least the norm of features[rows[i]]; infinite where that is not finite or beyond float32.

    Sums of squares in float64, four at a time (which needs no other order than written), raised by what they may have
    lost.
    """
    width = features.shape[1]
    whole = width - width % 4
    raised = 1.0 + width * 2.0**-52
    for i in range(rows.size):
        row = rows[i]
        a = b = c = d = 0.0
        for j in range(0, whole, 4):
            p, q = np.float64(features[row, j]), np.float64(features[row, j + 1])
            r, s = np.float64(features[row, j + 2]), np.float64(features[row, j + 3])
            a += p * p
            b += q * q
            c += r * r
            d += s * s
        for j in range(whole, width):
            p = np.float64(features[row, j])
            a += p * p
        norm = np.float32(np.sqrt(((a + b) + (c + d)) * raised))
        # The next number up, by its bits: square root and cast may have rounded down. NaN becomes infinite.
        out[i] = np.uint32(norm.view(np.uint32) + np.uint32(1)).view(np.float32) if norm < np.inf else np.inf


# ---- losses: residuals of a copy, and the integers they become when clipped ------------------------------------------


# Where x is an exact product, as a row's number times a power of two, it may be fused with the addition.
@compiled(fastmath={"contract"})
def rounded(x):
    """Returns the integer nearest to a float32 below 2^21; without a branch, so that loops become vector code."""
    return (x + _ROUNDER) - _ROUNDER


# A product that is added without being rounded first only makes a residual better.
@compiled(fastmath={"contract"})
def sigmoid(x):
    """1 / (1 + e^-x) in float32, to a few units in the last place; without a branch. What is not a number stays so."""
    x = _LARGEST if x > _LARGEST else x
    x = -_LARGEST if x < -_LARGEST else x
    # e^-x = 2^n e^r: n in the last bits of a sum, e^r by its series, below 1e-8 from it
    moved = x * -_LOG2_E + _ROUNDER
    r = -x - (moved - _ROUNDER) * _LN_2
    series = _SERIES[0]
    for i in range(1, 8):
        series = series * r + _SERIES[i]
    power = np.uint32((np.float32(moved).view(np.uint32) << _EXPONENT) + _BIAS).view(np.float32)
    return np.float32(1) / (np.float32(1) + series * power)


@_njit
def residual(loss, score, label):
    """Computes the residual of a model with one score, in float32."""
    return (sigmoid(score) if loss == LOGISTIC else score) - label


@_njit
def longest_factor(inverse, radius):
    """Below radius / |X| - 1/2, so that what is at most that large may be rounded to an integer; below 0 for no row."""
    return radius * inverse - np.float32(0.5)


@_njit
def factor_of(residual, inverse_scale, longest, unit):
    """Computes A: the residual in grid units, over the row's scale, clipped and rounded; 0 if it is not a number."""
    factor = residual * inverse_scale * unit
    factor = longest if factor > longest else factor
    factor = -longest if factor < -longest else factor
    factor = rounded(factor)
    return factor if factor == factor and longest > 0 else np.float32(0)


@_njit
def fill_residuals(loss, scores, label, out):
    """out (scores,) float64: the residual of each score; NaN where the label is not finite or none of the classes."""
    if loss != SOFTMAX:
        out[0] = (1 / (1 + math.exp(-scores[0])) if loss == LOGISTIC else scores[0]) - label
        return
    classes, largest, total = scores.size, scores[0], 0.0
    for k in range(classes):
        largest = max(largest, scores[k])
    for k in range(classes):
        out[k] = math.exp(scores[k] - largest)
        total += out[k]
    if not (0 <= label < classes and label == np.floor(label)):
        total = np.nan
    for k in range(classes):
        out[k] = out[k] / total - (k == label)


@_njit
def clip_to_integers(residuals, scale, longest):
    """Turns residuals (float64) into integers A with |A| <= longest; returns whether they had to be shortened.

    They are multiplied by `scale`, shortened so that rounding cannot exceed the bound, and rounded. The squares of the
    integers themselves, exact below 2^53, are compared with the bound: whatever was computed before, what is longer or
    not a number becomes 0.
    """
    square = 0.0
    for k in range(residuals.size):
        square += (residuals[k] * scale) ** 2
    length, allowed = math.sqrt(square), longest - 0.5 * math.sqrt(residuals.size)
    clipped = length > allowed
    if clipped:
        scale *= allowed / length
    square = 0.0
    for k in range(residuals.size):
        residuals[k] = np.rint(residuals[k] * scale)
        square += residuals[k] ** 2
    if not (square <= longest * longest * (1 - 2.0**-50) and allowed > 0):
        residuals[:] = 0
        return False
    return clipped


# ---- one model with one score: each row is read once, four at a time ------------------------------------------------


@_njit
def add_rows(loss, coefficients, copies, unit, radius, sums, clipped, counters):
    """Adds A X of each part's rows to sums (parts, num_features + 1) float64; clipped (parts,): how many were.

    Four rows at once, which stay in the nearest cache: their scores, their factors, their sums.
    """
    source, size, parts, width = copies.source, copies.mask.size, clipped.size, coefficients.size - 1
    whole = width // STRIDE * STRIDE
    weights, intercept = coefficients[:width], coefficients[width]
    nothing = np.zeros(width, np.float32)  # stands for a row that adds nothing, whatever that row holds
    rows, products, factors = np.empty(4, np.int64), np.zeros(4, np.float32), np.zeros(4, np.float32)
    scales, inverses, labels = np.ones(TILE, np.float32), np.zeros(TILE, np.float32), np.zeros(TILE, np.float32)
    ahead = 4 * max(1, _AHEAD // width)
    for part in parts_left(parts, counters):
        begin, end, own_sums = size * part // parts, size * (part + 1) // parts, sums[part]
        for first in range(begin, end, 4):
            at = (first - begin) % TILE
            if not at:
                inverses[:] = 0
                row_facts(copies, first, min(first + TILE, end), scales, inverses, labels)
            for i in range(4):
                rows[i] = copies.rows[first + i] if inverses[at + i] > 0 else -1
                if first + i + ahead < end:
                    _prefetch_row(source, copies.rows[first + i + ahead])
            products[:] = 0
            if whole:
                multiply_four(source, nothing, rows, weights, whole, products)  # pyright: ignore[reportCallIssue]
            if whole < width:
                _multiply_rest(source, rows, weights, whole, products)
            for i in range(4):
                longest = longest_factor(inverses[at + i], radius)
                own = residual(loss, products[i] + intercept, labels[at + i])
                factors[i] = factor_of(own, np.float32(1) / scales[at + i], longest, unit)
                clipped[part] += abs(factors[i]) + 1 > longest and longest > 0
                own_sums[width] += np.float64(factors[i]) * np.float64(rounded(scales[at + i]))
            _add_four(source, nothing, rows, scales[at : at + 4], factors, own_sums)


@_njit
def _prefetch_row(source, row):
    """Fetches the beginning of a row without waiting for it."""
    for j in range(0, min(source.shape[1], _LINES * LINE), LINE):
        prefetch(source, row, j)  # pyright: ignore[reportCallIssue]


@_njit
def _multiply_rest(source, rows, weights, begin, products):
    """Adds what `multiply_four` leaves, from `begin` on; of a row below 0, whose product is not used, anything."""
    r0, r1, r2, r3 = max(rows[0], 0), max(rows[1], 0), max(rows[2], 0), max(rows[3], 0)
    for j in range(begin, weights.size):
        products[0] += source[r0, j] * weights[j]
        products[1] += source[r1, j] * weights[j]
        products[2] += source[r2, j] * weights[j]
        products[3] += source[r3, j] * weights[j]


# x s is exact, s being a power of two, so it does not matter whether it is rounded before it is added to.
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
        total = a0 * np.float64(rounded(x0[j] * s0))
        total += a1 * np.float64(rounded(x1[j] * s1))
        total += a2 * np.float64(rounded(x2[j] * s2))
        total += a3 * np.float64(rounded(x3[j] * s3))
        sums[j] += total


# ---- many scores: tiles of rows and blocks of models that stay in the nearest caches ---------------------------------


class Blocks(NamedTuple):
    """Models in blocks of one panel of COLUMNS scores, or of as many panels as the scores of one model need.

    Score k of model i of a block is in column i scores + k. What is left of a block has weights of 0.
    """

    columns: npt.NDArray[np.float32]  # (blocks, panels, width, COLUMNS) coefficients, a column each
    units: npt.NDArray[np.float32]  # (blocks, models of a block)
    radii: npt.NDArray[np.float32]  # (blocks, models of a block)


class _Facts(NamedTuple):
    """The result of `row_facts` for the rows of a tile."""

    scales: npt.NDArray[np.float32]  # (TILE,)
    inverses: npt.NDArray[np.float32]  # (TILE,)
    labels: npt.NDArray[np.float32]  # (TILE,)


@_njit
def add_tiles(loss, models, scores, given, copies, sums, clipped, counters):
    """Adds A X of each part's rows to sums (parts, blocks, panels, width, COLUMNS); clipped (parts,): how many were."""
    blocks, panels, width, _ = given.columns.shape
    each = given.units.shape[1]
    parts, size = sums.shape[0], copies.mask.size
    tile = np.zeros((TILE, width), np.float32)
    products, factors = np.empty((panels, TILE, COLUMNS), np.float32), np.zeros((panels, TILE, COLUMNS))
    facts = _Facts(np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.empty(TILE, np.float32))
    room = np.empty(scores), np.empty(scores)
    for part in parts_left(parts, counters):
        for first in range(size * part // parts, size * (part + 1) // parts, TILE):
            end = min(first + TILE, size * (part + 1) // parts)
            filled = (end - first + ROWS - 1) // ROWS * ROWS  # with rows of zeros up to a whole number of tiles
            row_facts(copies, first, end, facts.scales, facts.inverses, facts.labels)
            for i in range(filled):
                _fill_row(copies, first + i, i < end - first and facts.inverses[i] > 0, facts.scales[i], tile[i])
            for block in range(blocks):
                _multiply_rows(tile[:filled], given.columns[block], products)
                if loss == SOFTMAX:
                    own = given.units[block, : models - block * each], given.radii[block]
                    clipped[part] += _clip_all_classes(products, end - first, facts, own, room, factors)
                else:
                    own = given.units[block], given.radii[block]
                    _clip_all(loss, products[0], end - first, facts, own, factors[0])
                _add_products(tile[: end - first], factors, sums[part, block])


@_njit
def _multiply_rows(tile, columns, products):
    """products (panels, rows, COLUMNS) = tile (rows, width) times columns (panels, width, COLUMNS)."""
    rows, width = tile.shape
    for panel in range(columns.shape[0]):
        for i in range(0, rows, ROWS):
            multiply_tile(tile[i:], width, 1, width, columns[panel], products[panel, i:])  # pyright: ignore[reportCallIssue]


@_njit
def _add_products(tile, factors, sums):
    """sums (panels, width, COLUMNS) += transposed tile (rows, width) times factors (panels, rows, COLUMNS)."""
    rows, width = tile.shape
    for panel in range(factors.shape[0]):
        for j in range(0, width, SUM_ROWS):
            multiply_tile(tile[:, j:], 1, width, rows, factors[panel], sums[panel, j:])  # pyright: ignore[reportCallIssue]


@_njit
def _fill_row(copies, at, counts, scale, row):
    """Fills a row of the tile: X, or zeros where it adds nothing, whatever it holds."""
    width = copies.source.shape[1]
    if at + TILE < copies.rows.size:
        _prefetch_row(copies.source, copies.rows[at + TILE])
    if not counts:
        row[:] = 0
        return
    own = copies.rows[at]
    for j in range(width):
        row[j] = rounded(copies.source[own, j] * scale)
    row[width] = rounded(scale)


@_njit
def _clip_all(loss, products, rows, facts, units_and_radii, factors):
    """Computes the factors A of some rows for the models of a panel, each with one score."""
    units, radii = units_and_radii
    for i in range(rows):
        label, inverse_scale, inverse = facts.labels[i], np.float32(1) / facts.scales[i], facts.inverses[i]
        for j in range(COLUMNS):
            own = residual(loss, products[i, j] * inverse_scale, label)
            factors[i, j] = factor_of(own, inverse_scale, longest_factor(inverse, radii[j]), units[j])


@_njit
def _clip_all_classes(products, rows, facts, units_and_radii, room, factors):
    """Computes the factors A of some rows for the models of a block; returns how often one of them had to clip one."""
    clipped = 0
    for i in range(rows):
        own = facts.labels[i], np.float32(1) / facts.scales[i], facts.inverses[i]
        clipped += _clip_classes(products[:, i], own, units_and_radii, room, factors[:, i])
    return clipped


@_njit
def _clip_classes(products, facts, units_and_radii, room, factors):
    """Computes the factors A of one row for the models of a block; returns how many of them had to clip it."""
    label, inverse_scale, inverse = facts
    units, radii = units_and_radii
    scores, own = room
    clipped = 0
    for model in range(units.size):
        for k in range(scores.size):
            panel, column = divmod(model * scores.size + k, COLUMNS)
            scores[k] = products[panel, column] * inverse_scale
        fill_residuals(SOFTMAX, scores, label, own)
        longest = np.float64(radii[model]) * np.float64(inverse)
        clipped += clip_to_integers(own, np.float64(inverse_scale) * np.float64(units[model]), longest)
        for k in range(scores.size):
            panel, column = divmod(model * scores.size + k, COLUMNS)
            factors[panel, column] = own[k]
    return clipped
