"""Per-copy clipping: the sum of gradients none of which is longer than `clip_norm`, whatever the examples hold.

Norms and clip factors are float32; a norm is raised by a bound on its own rounding error before it is compared, so a
clipped gradient is never longer than clip_norm. Padding and examples whose gradient is not finite are replaced before
any product: zero times infinity is not a number, and one such term would make the released sum an unbounded function of
one example. How many were clipped is private.

Rounding is of three kinds. What a copy adds is rounded by itself, by at most 1e-6 of clip_norm. Blocks of 8 rows (64
for many models) are float32 products, in an order that is the machine's: a block's sum is off by at most its rows times
2^-24 of the sum of its lengths. Blocks are added with their rounding kept (`coowned.mechanism.compensated`), whatever
the size of the batch. Of equal gradients, one of 65536 that becomes zero in its place moved the sum by less than 1 +
5e-6 clip norms, for one model and for many: the noise's factor 1 + 1e-5 is for that. One that is not drawn moves those
behind it into other blocks: `coowned.mechanism.noise.regrouping_factor` is for that. It takes for granted that a copy's
own factor does not depend on its place: in batches of a multiple of 128 rows, which training makes, XLA multiplies all
rows in one order (test_a_row_is_clipped_alike_in_every_place); for few rows it may choose another.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from coowned.mechanism.compensated import CompensatedSum, add_up
from coowned.mechanism.kernels import squared_norms as fill_squared_norms

BLOCK = 8  # rows summed by one float32 product,
WIDE_BLOCK = 64  # and where there are many models, since each block has a result for every model
_LONGEST_SUM = 2048  # squares of a row that are added up without blocks
_EPSILON = 2.0**-24  # rounding error of one float32 operation


@functools.partial(jax.jit, static_argnames="compensated")
def clipped_logistic_gradient_sum(
    weights: jax.Array,
    intercept: jax.Array,
    features: jax.Array,
    labels: jax.Array,
    mask: jax.Array,
    clip_norm: jax.Array | float,
    squared_norms: jax.Array | None = None,
    *,
    compensated: bool = False,
) -> tuple[tuple[Any, Any], jax.Array]:
    """The sum over a batch of clipped gradients of the logistic loss, without building any of them.

    The gradient of one copy is its residual times (features, 1), so that its norm is |residual| sqrt(|features|^2 + 1).

    Guarantees:
      - No copy adds more than clip_norm (1 + 1e-6), from denormal to 1e38 large features.   (test_no_copy_adds_more)
      - A copy with a feature, label or gradient that is not finite adds exactly zero, and so does padding.
                                                                (test_not_finite_adds_zero, test_padding_adds_zero)
      - What a copy adds does not depend on what other copies hold.   (test_a_bad_row_changes_no_other,
        test_a_bad_row_changes_no_logit)
      - The sum is that of the copies' own gradients, in any order to within rounding.
        (test_equals_the_reference, test_order_does_not_matter, test_rounding_of_the_sum)
      - A copy that becomes zero in its place moves a compensated sum by at most 1 + 1e-5 clip norms, also among 2^16
        equal ones.   (test_one_copy_of_many_moves_the_sum_by_itself)
      - Where copies behind it move up, that is covered by the noise.   (test_regrouped_blocks_are_covered)
      - A copy adds the same in every place of every batch of a multiple of 128 rows.
        (test_a_row_is_clipped_alike_in_every_place)
    Cost: three passes over the features; two, as many as the plain gradient, where `squared_norms` are given.

    Args:
      weights: (num_features,) float32.
      intercept: () float32; clipped together with the weights.
      features: (batch, num_features) float32.
      labels: (batch,) 0 or 1 (any finite number is clipped soundly).
      mask: (batch,) True where the row is real.
      clip_norm: () above 0.
      squared_norms: (batch,) `squared_norms_of` these very rows, made once for the whole data set and fetched like
        them. Norms of other rows would void the bound.
      compensated: gives every sum as a `CompensatedSum`, for noise to be added to it.

    Returns:
      ((weights' sum (num_features,), intercept's sum ()), number of copies that were clipped: private).

    Example:
      >>> features, mask = jnp.array([[3.0, 4.0], [jnp.inf, 0.0]]), jnp.array([True, True])
      >>> gradient, clipped = clipped_logistic_gradient_sum(
      ...     jnp.zeros(2), jnp.zeros(()), features, jnp.ones(2), mask, 0.1)
      >>> [round(float(g), 4) for g in gradient[0]], int(clipped)
      ([-0.0588, -0.0784], 1)
    """
    summed, clipped = _logistic_sums(weights, intercept, features, labels, mask, jnp.asarray(clip_norm), squared_norms)
    return (summed if compensated else tuple(part.rounded for part in summed)), clipped


@functools.partial(jax.jit, static_argnames="compensated")
def clipped_logistic_gradient_sums(
    weights: jax.Array,
    intercepts: jax.Array,
    features: jax.Array,
    labels: jax.Array,
    mask: jax.Array,
    clip_norms: jax.Array,
    squared_norms: jax.Array | None = None,
    *,
    compensated: bool = False,
) -> tuple[tuple[Any, Any], jax.Array]:
    """The same for many models on one batch: two matrix products for all of them.

    Args:
      weights: (models, num_features) float32.
      intercepts: (models,) float32.
      features: (batch, num_features) float32.
      labels: (batch,).
      mask: (batch,) True where the row is real.
      clip_norms: (models,) above 0.
      squared_norms, compensated: as above; squared_norms (batch,).

    Returns:
      (((models, num_features) sums, (models,) sums of the intercepts), (models,) numbers of clipped copies: private).

    Guarantees:
      - Each model's sum is what it is alone, to within rounding.   (test_many_models_equal_each_alone)
    """
    summed, clipped = _logistic_sums(weights, intercepts, features, labels, mask, clip_norms, squared_norms)
    return (summed if compensated else tuple(part.rounded for part in summed)), clipped


def _logistic_sums(weights, intercepts, features, labels, mask, clip_norms, squared_norms):
    features = jnp.asarray(features, jnp.float32)
    if weights.ndim == 2:  # a column for every model
        per_row, sum_rows, product = (lambda a: a[:, None]), _sum_for_models, (lambda rows: rows @ weights.T)
    else:
        per_row, sum_rows, product = (lambda a: a), _sum_for_model, (lambda rows: rows @ weights)
    squares = _row_squares(features) if squared_norms is None else squared_norms  # (batch,) |features|^2
    labels = jnp.where(mask & jnp.isfinite(labels), labels, jnp.nan).astype(jnp.float32)
    own_raise = np.float32(1 + _norm_margin(features.shape[1]))
    raised = own_raise if squared_norms is None else np.float32(1 + _norm_margin(0))

    def clip_and_sum(rows, squares, scale, keep, raised):
        """rows = scale * features, so that the gradient is residual * (rows / scale, 1); scale is a power of two."""
        logits = product(rows) / per_row(scale) + intercepts  # (batch[, models])
        residuals = 0.5 * jnp.tanh(0.5 * logits) + per_row(0.5 - labels)  # sigmoid(logits) - labels, in half the time
        residuals = residuals / per_row(scale)
        lengths = jnp.sqrt(squares + scale * scale) * raised  # |(features, 1)| times scale
        longest = clip_norms * per_row(1 / lengths)  # what a factor may be
        too_long = jnp.abs(residuals) > longest
        factors = jnp.clip(residuals, -longest, longest)
        factors = jnp.where(jnp.isfinite(factors) & per_row(keep), factors, 0.0)
        factors = jax.lax.optimization_barrier(factors)  # made once: XLA would make them again for each of two sums
        block = BLOCK if factors.ndim == 1 else _wide_block(factors.shape[0])
        intercept_sum = add_up(_blocks(factors * per_row(scale), block).sum(axis=1))
        return (sum_rows(rows, factors), intercept_sum), jnp.sum(too_long & per_row(keep), axis=0)

    def plain():
        # Ones that XLA cannot know to be ones: it must do the same with a row here as below. Without the division it
        # would add intercepts and single features' products in one operation, rounded once and not twice.
        return clip_and_sum(features, squares, jnp.where(squares >= 0, 1.0, 0.5), mask, raised)

    def guarded():
        # Rows too large to be squared are scaled down; those that are not finite become zero, and so do their factors.
        # All others are clipped by the very numbers they have without such a row in the batch: what one example holds
        # must not change what others add.
        # Entry by entry: XLA's maximum of a long row leaves out what is not a number.
        finite, known = jnp.isfinite(features).all(axis=1), jnp.isfinite(squares)
        largest = jnp.max(jnp.abs(features), axis=1, initial=0.0)
        _, exponent = jnp.frexp(jnp.where(finite, largest, 1.0))
        scale = jnp.where(finite & ~known, jnp.exp2(40.0 - exponent), 1.0)
        rows = jnp.where(finite[:, None], features * scale[:, None], 0.0)
        lengths = jnp.where(known, squares, _row_squares(rows))
        return clip_and_sum(rows, lengths, scale, mask & finite, jnp.where(known, raised, own_raise))

    # One look at the norms tells whether any row needs that: the usual batch is read no more often for it.
    return jax.lax.cond(jnp.isfinite(squares).all(), plain, guarded)


def clipped_gradient_sum(
    loss: Callable[[Any, Any], jax.Array], parameters: Any, examples: Any, mask: jax.Array, clip_norm: jax.Array | float
) -> tuple[Any, jax.Array]:
    """The sum of clipped gradients of any loss of one example, by building each: a reference, and for small models.

    Guarantees:
      - As above: at most clip_norm (1 + 1e-6) a copy, zero where not finite or padding.  (test_generic_overshoot,
        test_generic_not_finite_adds_zero)
    Cost: batch times parameters of memory.

    Args:
      loss: loss(parameters, example) of one example, a number.
      parameters: tree of arrays.
      examples: tree of arrays with a leading batch axis.
      mask: (batch,) True where the row is real.
      clip_norm: above 0.

    Returns:
      (tree like parameters, float32 at least; number of copies that were clipped: private).

    Example:
      >>> total, clipped = clipped_gradient_sum(lambda w, x: w @ x, jnp.zeros(2), jnp.array([[3.0, 4.0], [0.1, 0.0]]),
      ...                                       jnp.array([True, True]), 1.0)
      >>> [round(float(value), 4) for value in total], int(clipped)
      ([0.7, 0.8], 1)
    """
    gradients = jax.vmap(jax.grad(loss), in_axes=(None, 0))(parameters, replace_rows(examples, mask))
    leaves, structure = jax.tree.flatten(gradients)
    rows = [leaf.reshape(leaf.shape[0], -1).astype(jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in leaves]
    largest = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(row), axis=1, initial=0.0) for row in rows])
    # Entry by entry: XLA's maximum of a long row leaves out what is not a number.
    keep = functools.reduce(jnp.logical_and, [jnp.isfinite(row).all(axis=1) for row in rows], mask)
    _, exponent = jnp.frexp(jnp.where(keep, largest, 1.0))
    # In two steps, since one power of two cannot undo the smallest or largest exponent of float32.
    half = jnp.exp2(-(exponent // 2).astype(jnp.float32))
    rest = jnp.exp2(-(exponent - exponent // 2).astype(jnp.float32))
    rows = [jnp.where(keep[:, None], row, 0.0) * half[:, None] * rest[:, None] for row in rows]  # entries at most 1
    size = sum(row.shape[1] for row in rows)
    squares = functools.reduce(jnp.add, [_row_squares(row) for row in rows])
    lengths = jnp.sqrt(squares) * (1 + _norm_margin(size) + len(rows) * _EPSILON)
    bound = clip_norm * half * rest  # clip norm in the units of the scaled rows; infinite where that is beyond float32
    too_long = lengths > bound
    factors = jnp.where(too_long, clip_norm / jnp.where(lengths > 0, lengths, 1.0), 1 / half)
    last = jnp.where(too_long, 1.0, 1 / rest)
    summed = [
        add_up(row * factors[:, None] * last[:, None]).rounded.reshape(leaf.shape[1:])
        for row, leaf in zip(rows, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, summed), jnp.sum(too_long & keep)


def squared_norms_of(features: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """(rows,) squared norms of the rows, in float64 and rounded up to float32; infinite where one is not finite.

    >>> squared_norms_of([[3.0, 4.0], [np.nan, 0.0]])
    array([25.000002, inf], dtype=float32)
    """
    features = np.ascontiguousarray(features, np.float32)
    squares = np.empty(len(features), np.float32)
    fill_squared_norms(features, np.arange(len(features)), squares)
    return squares


def replace_rows(examples: Any, keep: jax.Array) -> Any:
    """The examples with zeros in every row that is not kept: what padding must become before a gradient is taken.

    >>> replace_rows(jnp.array([1.0, jnp.nan]), jnp.array([True, False])).tolist()
    [1.0, 0.0]
    """

    def replace(leaf: jax.Array) -> jax.Array:
        return jnp.where(keep.reshape((-1,) + (1,) * (leaf.ndim - 1)), leaf, jnp.zeros_like(leaf))

    return jax.tree.map(replace, examples)


def _block_width(size: int) -> int:
    """How many squares are added up in a row: all up to 2048, else the largest divisor below that, else all."""
    return (
        max((w for w in range(1, _LONGEST_SUM + 1) if size % w == 0), default=1)
        if size > _LONGEST_SUM
        else max(size, 1)
    )


def _norm_margin(size: int) -> float:
    """A bound on the relative error of a norm from `_row_squares`, in whatever order its terms are added, and of the
    few operations on it that follow: 3e-5 at 1000 entries, by which a gradient may be clipped too much, never too
    little."""
    width = _block_width(size)
    return ((width + size // width) / 2 + 10) * _EPSILON


def _row_squares(rows: jax.Array) -> jax.Array:
    """(batch,) squared norms; long rows in blocks, so that the rounding error stays small."""
    width = _block_width(rows.shape[1])
    if width >= rows.shape[1]:
        return jnp.einsum("nd,nd->n", rows, rows, precision="highest")
    blocks = rows.reshape(rows.shape[0], -1, width)
    return jnp.einsum("nbw,nbw->nb", blocks, blocks, precision="highest").sum(axis=1)


def _blocks(values: jax.Array, size: int) -> jax.Array:
    """(blocks, size or less, ...): the first axis in blocks, padded with zeros where it does not come out even."""
    size = max(1, min(size, values.shape[0]))
    missing = -values.shape[0] % size
    if missing:
        values = jnp.pad(values, ((0, missing),) + ((0, 0),) * (values.ndim - 1))
    return values.reshape(-1, size, *values.shape[1:])


def _sum_for_model(rows: jax.Array, factors: jax.Array) -> CompensatedSum:
    """(num_features,): the rows times their factors, added up."""
    partial = jnp.einsum("cbd,cb->cd", _blocks(rows, BLOCK), _blocks(factors, BLOCK), precision="highest")
    return add_up(partial)


def _sum_for_models(rows: jax.Array, factors: jax.Array) -> CompensatedSum:
    """(models, num_features): the same for every column of factors."""
    size = _wide_block(rows.shape[0])
    # Features first: XLA is faster with the longer rows last.
    partial = jnp.einsum("cbm,cbd->cdm", _blocks(factors, size), _blocks(rows, size), precision="highest")
    return CompensatedSum(*(part.T for part in add_up(partial)))


def _wide_block(length: int) -> int:
    """The largest block up to WIDE_BLOCK that comes out even (padding copies all factors), if it is not too small."""
    even = [size for size in range(WIDE_BLOCK // 4, WIDE_BLOCK + 1) if length % size == 0]
    return max(even, default=WIDE_BLOCK)
