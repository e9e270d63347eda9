"""The clipped gradients of one logistic model, summed in a single pass over the rows, on the host.

A compiled step needs two passes, one for the logits and one for the sum, over rows that were gathered before, and a
batch is larger than the caches. Here each row is read where it lies, and clipped and added while it is near.

What a copy moves the sum by is proven, roundings included. A norm is raised by 2^-20, so that a copy adds at most
1 - 2^-21 clip norms. It also moves the copies behind it by a place, and so regroups all additions that follow: their
roundings must be small with the copy and without it. All are of float64. With B copies in P parts, the B / P rows of a
part are added one by one to at most B / P clip norms, and P parts to at most B: with the split into two float32 numbers
that is E = 2^-53 (B^2 / P + P B) + 2^-48 B, B with padding. No part has more than 2^11 copies: up to B = 2^19, and a
quarter more of padding, twice E is below 2^-21, and one copy more or less moves the sum by less than a clip norm.
Training sums no more than that here.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from coowned import validate
from coowned.errors import InputError
from coowned.mechanism.compensated import CompensatedSum
from coowned.mechanism.compiled import compiled
from coowned.mechanism.intrinsics import count_up
from coowned.mechanism.kernels import squared_norms as fill_squared_norms
from coowned.mechanism.matrix_tiles import STRIDE, add_four, multiply_four
from coowned.mechanism.shared_parts import in_parts

_NUMBERS_A_PART = 2**18  # parts are summed apart, and their number follows from the shape alone: so do the bits;
_ENOUGH_PARTS = 16  # these are for threads,
_COPIES_A_PART = 2**11  # and these for the proof
MOST_COPIES = 2**19  # for which it holds
RAISED = 1 + 2.0**-20

_njit = compiled()


class RowsInPlace(NamedTuple):
    """Rows of a larger array: row i of the batch is source[rows[i]]."""

    source: npt.NDArray[np.float32]  # (n, num_features), its rows contiguous
    rows: npt.NDArray[np.int64]  # (batch,)

    def gathered(self) -> npt.NDArray[np.float32]:
        """(batch, num_features): a copy of them."""
        return self.source[self.rows]


def fused_clipped_logistic_sum(
    weights: npt.ArrayLike,
    intercept: npt.ArrayLike,
    features: npt.ArrayLike | RowsInPlace,
    labels: npt.ArrayLike,
    mask: npt.ArrayLike,
    clip_norm: Any,
    squared_norms: npt.ArrayLike | None = None,
) -> tuple[tuple[CompensatedSum, CompensatedSum], int]:
    """What `clipping.clipped_logistic_gradient_sum` is, of the host's arrays and read once.

    Guarantees:
      - No copy adds more than clip_norm, from denormal to 1e38 large features.   (test_no_copy_adds_more)
      - One copy more or less moves the sum by at most a clip norm, wherever the copies behind it move, among 2^19.
        (test_one_copy_of_many_moves_the_sum_by_itself, test_copies_that_move_up_change_nothing)
      - A copy with a feature, label or gradient that is not finite adds exactly zero, and so does padding.
        (test_not_finite_adds_zero, test_padding_adds_zero)
      - What a copy adds does not depend on what other copies hold.   (test_a_bad_row_changes_no_other,
        test_a_bad_row_changes_no_logit)
      - Nor on its place, or on how many others there are.   (test_a_row_adds_the_same_in_every_place)
      - The sum is that of Algorithm 1, and that of the compiled function.   (test_equals_the_reference)
      - Neither the number of threads nor where rows lie in memory changes a bit.
        (test_threads_and_places_change_nothing)
    Cost: one pass over the rows, or two without their norms; a row of float64 sums for each part of a large batch.

    Args:
      weights: (num_features,) float32.
      intercept: () float32; clipped together with the weights.
      features: (batch, num_features) float32, or where such rows lie. Rows that the mask leaves out are not read, but
        must lie there.
      labels: (batch,) 0 or 1 (any finite number is clipped soundly).
      mask: (batch,) True where the row is real.
      clip_norm: above 0, a float32.
      squared_norms: (batch,) `clipping.squared_norms_of` these very rows. Norms of other rows would void the bound.

    Returns:
      ((weights' sum (num_features,), intercept's sum ()), number of copies that were clipped: private).

    Example:
      >>> features, mask = np.float32([[3.0, 4.0], [np.inf, 0.0]]), np.array([True, True])
      >>> (slope, intercept), clipped = fused_clipped_logistic_sum(
      ...     np.zeros(2, np.float32), 0.0, features, np.ones(2, np.float32), mask, 0.1)
      >>> [round(float(value), 4) for value in slope.rounded], clipped
      ([-0.0588, -0.0784], 1)
    """
    weights, labels = np.ascontiguousarray(weights, np.float32), np.ascontiguousarray(labels, np.float32)
    mask = np.ascontiguousarray(mask, np.bool_)
    source, rows = checked_rows(features, labels, mask, weights.size)
    if not clip_norm > 0:
        raise InputError(f"clip_norm must be above 0, not {clip_norm}")
    if squared_norms is None:
        squared_norms = norms_of(source, rows, mask)
    norms = np.ascontiguousarray(squared_norms, np.float32)
    validate.same_length(mask.size, squared_norms=norms)
    clip_norm, intercept = float(np.float32(clip_norm)), np.float32(intercept)  # pyright: ignore[reportArgumentType]
    parts = min(_ENOUGH_PARTS, -(-mask.size * weights.size // _NUMBERS_A_PART))
    parts = max(1, parts, -(-mask.size // _COPIES_A_PART))
    sums, clipped = np.empty((parts, weights.size + 1)), np.empty(parts, np.int64)
    given = weights, intercept, source, rows, labels, mask, clip_norm, norms, sums, clipped
    in_parts(_add_parts, given, parts)
    high, low = np.empty(weights.size + 1, np.float32), np.empty(weights.size + 1, np.float32)
    _join(sums, high, low)
    return (CompensatedSum(high[:-1], low[:-1]), CompensatedSum(high[-1], low[-1])), int(clipped.sum())


def checked_rows(
    features: npt.ArrayLike | RowsInPlace, labels: npt.NDArray[np.float32], mask: npt.NDArray[np.bool_], width: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """(source, rows) of the batch's features; refuses what a compiled loop, which looks at no bounds, would misread."""
    if isinstance(features, RowsInPlace):
        source, rows = features
        if rows.dtype.kind not in "iu" or (rows.size and (rows.min() < 0 or rows.max() >= len(source))):
            raise InputError(f"rows must be whole numbers in [0, {len(source)}): where the features of each copy lie")
    else:
        source, rows = np.ascontiguousarray(features, np.float32), np.arange(len(mask))
        validate.same_length(mask.size, features=source)
    validate.same_length(mask.size, rows=rows, labels=labels)
    if source.ndim != 2 or source.dtype != np.float32 or source.shape[1] != width:
        raise InputError(f"features must be float32 of shape (rows, {width}), not {source.dtype} {source.shape}")
    if not rows_are_contiguous(source):
        raise InputError("the numbers of a row of features must lie side by side in memory; use np.ascontiguousarray")
    return source, rows


def rows_are_contiguous(source: npt.NDArray[np.float32]) -> bool:
    """Whether each row is one piece of memory, wherever the rows lie."""
    return source.flags.aligned and (source.shape[1] == 1 or source.strides[1] == source.itemsize)


def norms_of(
    source: npt.NDArray[np.float32], rows: npt.NDArray[np.int64], mask: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float32]:
    """(batch,) squared norms of the rows that are real; others are not read."""
    real = np.ascontiguousarray(rows[mask])
    own, norms = np.empty(real.size, np.float32), np.zeros(mask.size, np.float32)
    fill_squared_norms(source, real, own)
    norms[mask] = own
    return norms


@_njit
def _join(sums, high, low):
    """high + low (num_features + 1,): the parts' sums, as two float32 numbers; infinite beyond them."""
    total = np.zeros(high.size)
    for part in range(sums.shape[0]):
        for j in range(high.size):
            total[j] += sums[part, j]
    for j in range(high.size):
        high[j] = np.float32(total[j])
        low[j] = total[j] - np.float64(high[j]) if np.isfinite(high[j]) else 0.0


@_njit
def _add_parts(weights, intercept, source, rows, labels, mask, clip_norm, norms, sums, clipped, taken, done):
    """Adds up parts, each taken by whichever thread is free, until there are none left."""
    size, parts = mask.size, clipped.size
    while True:
        part = count_up(taken, 1)  # pyright: ignore[reportCallIssue]
        if part >= parts:
            return
        begin = size * part // parts // 4 * 4  # rows are added by fours
        end = size * (part + 1) // parts // 4 * 4 if part + 1 < parts else size
        own = sums[part]
        own[:] = 0
        clipped[part] = _add_rows(weights, intercept, source, rows, labels, mask, clip_norm, norms, begin, end, own)
        count_up(done, 1)  # pyright: ignore[reportCallIssue]


_LOG2_E, _LN_2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)
_ROUNDER = np.float32(3 * 2**22)  # a number below 2^21 that it is added to is rounded to a whole one, in its last bits
_EXPONENT, _BIAS = np.uint32(23), np.uint32(127 << 23)
_LARGEST = np.float32(80)  # where a sigmoid is 1e-35 from 0 or 1


# A product that is added without being rounded first only makes it better.
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
def _add_rows(weights, intercept, source, rows, labels, mask, clip_norm, squared_norms, begin, end, sums):
    """Adds the clipped gradients of rows `begin` to `end` of the batch to sums (num_features + 1,) float64.

    Four rows at once, which with the next four are in the nearest cache: their logits, their factors, their sums.
    """
    width = weights.size
    whole = width // STRIDE * STRIDE
    nothing = np.zeros(width, np.float32)  # in the place of a row that adds nothing, whatever that row holds
    places, following = np.empty(4, np.int64), np.empty(4, np.int64)
    products, targets, squares = np.zeros(4, np.float32), np.zeros(4, np.float32), np.zeros(4, np.float32)
    factors, longest = np.zeros(4, np.float64), np.zeros(4, np.float64)
    clipped = 0
    for first in range(begin, end, 4):
        for i in range(4):
            at = first + i
            counts = at < end and mask[at] and np.isfinite(labels[at])
            places[i] = rows[at] if counts else -1
            targets[i] = labels[at] if counts else np.float32(0)
            squares[i] = squared_norms[at] if counts else np.float32(0)
        products[:] = 0
        if whole:
            multiply_four(source, nothing, places, weights, whole, products)  # pyright: ignore[reportCallIssue]
        if whole < width:
            _multiply_rest(source, places, weights, whole, products)
        for i in range(4):
            longest[i] = clip_norm / (np.sqrt(np.float64(squares[i]) + 1.0) * RAISED)
            factors[i] = np.float64(sigmoid(products[i] + intercept) - targets[i])
        for i in range(4):
            residual, bound = factors[i], longest[i]
            if places[i] < 0:
                factors[i] = 0.0
            elif squares[i] < np.inf and np.isfinite(residual):
                clipped += abs(residual) > bound
                factors[i] = min(max(residual, -bound), bound)
                sums[width] += factors[i]
            else:
                row = source[places[i]]
                clipped += add_wide_row(weights, intercept, row, targets[i], clip_norm, RAISED, sums)
                places[i], factors[i] = -1, 0.0
        for i in range(4):
            following[i] = rows[min(first + 4 + i, end - 1)]
        add_four(source, nothing, places, factors, following, whole, sums)  # pyright: ignore[reportCallIssue]
        if whole < width:
            _add_rest(source, places, factors, whole, sums)
    return clipped


@compiled(fastmath={"contract"})
def _multiply_rest(source, places, weights, begin, products):
    """What `multiply_four` leaves, from `begin` on; of a place below 0, whose product nobody looks at, anything."""
    p0, p1, p2, p3 = max(places[0], 0), max(places[1], 0), max(places[2], 0), max(places[3], 0)
    s0, s1, s2, s3 = products[0], products[1], products[2], products[3]
    for j in range(begin, weights.size):
        s0 += source[p0, j] * weights[j]
        s1 += source[p1, j] * weights[j]
        s2 += source[p2, j] * weights[j]
        s3 += source[p3, j] * weights[j]
    products[0], products[1], products[2], products[3] = s0, s1, s2, s3


@compiled(fastmath={"contract"})
def _add_rest(source, places, factors, begin, sums):
    """What `add_four` leaves, from `begin` on."""
    for i in range(places.size):
        if places[i] >= 0:
            for j in range(begin, source.shape[1]):
                sums[j] += factors[i] * np.float64(source[places[i], j])


@_njit
def add_wide_row(weights, intercept, row, label, clip_norm, raised, sums):
    """A row with numbers beyond float32 on the way, all in float64; nothing where its gradient is not finite."""
    logit, square = np.float64(intercept), 1.0
    for j in range(row.size):
        x = np.float64(row[j])
        logit += x * np.float64(weights[j])
        square += x * x
    residual = 1.0 / (1.0 + np.exp(-logit)) - np.float64(label)
    length = np.sqrt(square) * raised
    too_long = abs(residual) * length > clip_norm
    factor = np.copysign(clip_norm / length, residual) if too_long else residual
    if not (np.isfinite(square) and np.isfinite(factor)):
        return 0
    for j in range(row.size):
        sums[j] += factor * np.float64(row[j])
    sums[row.size] += factor
    return 1 if too_long else 0
