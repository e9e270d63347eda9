"""The clipped gradients of one logistic model, summed in a single pass over the rows, on the host.

A compiled step needs two passes, one for the logits and one for the sum, over rows that were gathered before, and a
batch is larger than the caches. Here each row is read where it lies, and clipped and added while it is near.

What a copy moves the sum by is proven, roundings included. A norm is raised by 2^-20, so that a copy adds at most
1 - 2^-21 clip norms. It also moves the copies behind it by a place, and so regroups all additions that follow: their
roundings must be small with the copy and without it. All are of float64. With B copies in P parts, the B / P rows of a
part are added one by one to at most B / P clip norms, and P parts to at most B: with the split into two float32 numbers
that is E = 2^-53 (B^2 / P + P B) + 2^-48 B, B with padding. Twice E is below 2^-21 up to B = 2^15 in one part and 2^17
in 16: there one copy more or less moves the sum by less than a clip norm, and training sums no more than that here.
"""

import concurrent.futures
import functools
import os
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from coowned import validate
from coowned.errors import InputError
from coowned.mechanism.compensated import CompensatedSum
from coowned.mechanism.intrinsics import LINE, ask_for, take_next
from coowned.mechanism.kernels import squared_norms as fill_squared_norms
from coowned.synthetic.logistic_data import usable_cores

_NUMBERS_A_PART = 2**18  # parts are summed apart, and their number follows from the shape alone: so do the bits
_MOST_PARTS = 16
MOST_COPIES = 2**17  # for which the proof above holds in 16 parts, padding by a quarter more included
_AHEAD = 4  # rows: what lies scattered in memory is asked for before it is needed,
_LINES = 4  # no more than its first lines: the processor then knows what comes
RAISED = 1 + 2.0**-20

_njit = numba.njit(cache=True, nogil=True, error_model="numpy")


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
      - One copy more or less moves the sum by at most a clip norm, wherever the copies behind it move: among 2^15, and
        2^17 of rows of 32 numbers and more.
        (test_one_copy_of_many_moves_the_sum_by_itself, test_copies_that_move_up_change_nothing)
      - A copy with a feature, label or gradient that is not finite adds exactly zero, and so does padding.
        (test_not_finite_adds_zero, test_padding_adds_zero)
      - What a copy adds does not depend on what other copies hold.   (test_a_bad_row_changes_no_other)
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
    parts = min(_MOST_PARTS, max(1, mask.size * weights.size // _NUMBERS_A_PART))
    cuts = [mask.size * part // parts // 4 * 4 for part in range(parts)] + [mask.size]
    sums, clipped = np.zeros((parts, weights.size + 1)), np.zeros(parts, np.int64)
    taken = np.zeros(1, np.int64)
    given = weights, intercept, source, rows, labels, mask, clip_norm, norms, np.array(cuts), taken, sums, clipped
    others = [workers(os.getpid()).submit(_add_parts, *given) for _ in range(1, min(parts, usable_cores()))]
    _add_parts(*given)
    for other in others:
        other.result()
    high, low = as_compensated(sums.sum(axis=0))
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
    return source, rows


def norms_of(
    source: npt.NDArray[np.float32], rows: npt.NDArray[np.int64], mask: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float32]:
    """(batch,) squared norms of the rows that are real; others are not read."""
    real = np.ascontiguousarray(rows[mask])
    own, norms = np.empty(real.size, np.float32), np.zeros(mask.size, np.float32)
    fill_squared_norms(source, real, own)
    norms[mask] = own
    return norms


def as_compensated(total: npt.NDArray[np.float64]) -> CompensatedSum:
    """A float64 sum as two float32 numbers."""
    with np.errstate(over="ignore"):  # beyond float32: infinite, as any sum would be
        high = total.astype(np.float32)
    return CompensatedSum(high, np.where(np.isfinite(high), total - high, 0.0).astype(np.float32))


@functools.cache
def workers(process: int) -> concurrent.futures.ThreadPoolExecutor:
    """Threads beside the caller's, one for each further core; a pool for each process: threads do not live on in one
    that was forked. Whatever the host does at the side of a step is given to them too: a thread more than there are
    cores would halt one that others wait for."""
    return concurrent.futures.ThreadPoolExecutor(max(1, usable_cores() - 1), thread_name_prefix="coowned-step")


@_njit
def _add_parts(weights, intercept, source, rows, labels, mask, clip_norm, squared_norms, cuts, taken, sums, clipped):
    """Adds up parts, each taken by whichever thread is free, until there are none left."""
    while True:
        part = take_next(taken)  # pyright: ignore[reportCallIssue]
        if part >= clipped.size:
            return
        begin, end, own = cuts[part], cuts[part + 1], sums[part]
        clipped[part] = _add_rows(
            weights, intercept, source, rows, labels, mask, clip_norm, squared_norms, begin, end, own
        )


# The order of a logit's additions is left to the compiler, so that it can use vector instructions: whatever a logit is
# rounded to, its row is clipped by what came out. Nothing else of fast-math is allowed, least of all that numbers are
# finite.
@numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "contract"})
def _four_products(x0, x1, x2, x3, weights, products):
    """products (4,): the rows times the weights."""
    s0 = s1 = s2 = s3 = np.float32(0)
    for j in range(weights.size):
        s0 += x0[j] * weights[j]
        s1 += x1[j] * weights[j]
        s2 += x2[j] * weights[j]
        s3 += x3[j] * weights[j]
    products[0], products[1], products[2], products[3] = s0, s1, s2, s3


@_njit
def _row(source, place, nothing):
    return source[place] if place >= 0 else nothing


@_njit
def _add_rows(weights, intercept, source, rows, labels, mask, clip_norm, squared_norms, begin, end, sums):
    """Adds the clipped gradients of rows `begin` to `end` of the batch to sums (num_features + 1,) float64."""
    width = weights.size
    nothing = np.zeros(width, np.float32)  # in the place of a row that adds nothing, whatever that row holds
    places, products, factors = np.empty(4, np.int64), np.empty(4, np.float32), np.empty(4, np.float64)
    clipped = 0
    for first in range(begin, end, 4):
        for i in range(4):
            counts = first + i < end and mask[first + i] and np.isfinite(labels[first + i])
            places[i] = rows[first + i] if counts else -1
        x0, x1 = _row(source, places[0], nothing), _row(source, places[1], nothing)
        x2, x3 = _row(source, places[2], nothing), _row(source, places[3], nothing)
        for i in range(first + _AHEAD, min(end, first + _AHEAD + 4)):
            for j in range(0, min(width, _LINES * LINE), LINE):
                ask_for(source, rows[i], j)  # pyright: ignore[reportCallIssue]
        _four_products(x0, x1, x2, x3, weights, products)
        taken_out = False
        for i in range(4):
            factors[i] = 0.0
            if places[i] < 0:
                continue
            label, square = labels[first + i], np.float64(squared_norms[first + i])
            residual = np.float64(np.float32(1) / (np.float32(1) + np.exp(-(products[i] + intercept))) - label)
            length = np.sqrt(square + 1.0) * RAISED
            norm = abs(residual) * length
            factor = np.copysign(clip_norm / length, residual) if norm > clip_norm else residual
            if square < np.inf and np.isfinite(factor):
                clipped += norm > clip_norm
                factors[i] = factor
                sums[width] += factor
            else:
                clipped += add_wide_row(weights, intercept, source[places[i]], label, clip_norm, sums)
                places[i], taken_out = -1, True
        if taken_out:
            x0, x1 = _row(source, places[0], nothing), _row(source, places[1], nothing)
            x2, x3 = _row(source, places[2], nothing), _row(source, places[3], nothing)
        _add_four(factors, x0, x1, x2, x3, sums)
    return clipped


# A product that is added without being rounded first only makes the sum better.
@numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
def _add_four(factors, x0, x1, x2, x3, sums):
    f0, f1, f2, f3 = factors[0], factors[1], factors[2], factors[3]
    for j in range(x0.size):
        added = f3 * np.float64(x3[j]) + sums[j]
        added = f2 * np.float64(x2[j]) + added
        added = f1 * np.float64(x1[j]) + added
        sums[j] = f0 * np.float64(x0[j]) + added


@_njit
def add_wide_row(weights, intercept, row, label, clip_norm, sums):
    """A row with numbers beyond float32 on the way, all in float64; nothing where its gradient is not finite."""
    logit, square = np.float64(intercept), 1.0
    for j in range(row.size):
        x = np.float64(row[j])
        logit += x * np.float64(weights[j])
        square += x * x
    residual = 1.0 / (1.0 + np.exp(-logit)) - np.float64(label)
    length = np.sqrt(square) * RAISED
    too_long = abs(residual) * length > clip_norm
    factor = np.copysign(clip_norm / length, residual) if too_long else residual
    if not (np.isfinite(square) and np.isfinite(factor)):
        return 0
    for j in range(row.size):
        sums[j] += factor * np.float64(row[j])
    sums[row.size] += factor
    return 1 if too_long else 0
