"""Sums clipped gradients of any model exactly: each copy's gradient is rounded to integers by itself.

With d parameters and the grid's radius R, a gradient v is multiplied by min(1 / unit, (1 - 2^-16) (R - sqrt(d) / 2) /
|v|) and rounded number by number. Nothing is assumed of how well |v| was computed: the sum of squares of the integers
is compared with R^2, and a copy that is longer is taken out again, exactly, and added with a smaller factor. Integers
add up exactly in float64 below 2^53, that is for 2^28 copies.
"""

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from coowned.errors import InputError
from coowned.exact.compiled import compiled, in_parts, parts_left
from coowned.exact.grid import Grid

_MARGIN = 1 - 2.0**-16  # of the radius that a clipped copy is scaled to: its norm is computed in float32
_ROUNDER = 1.5 * 2.0**52  # adding and subtracting it rounds a float64 below 2^51 to an integer
_BLOCK = 4096  # numbers of a gradient that are summed over all copies before the next

_njit = compiled()

Gradients = Mapping[str, Any]  # by parameter: (copies, ...) float32, or a form that has `leaf` and `scaled`


class Leaf(Protocol):
    """The gradients of one parameter, of every copy."""

    def squares(self) -> npt.NDArray[np.float64]:
        """(copies,) the squared norms, about."""
        ...

    def add(self, factors: npt.NDArray[np.float64], totals: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Adds each copy's gradient times its factor, rounded, to totals; returns at least their squared norms.

        Nothing of a copy with the factor 0 is read.
        """
        ...


class GradientSum:
    """A sum of copies' clipped gradients, in units of a grid.

    Guarantees:
      - What a copy adds is an integer vector no longer than the radius, however badly its norm was computed.
        (test_no_copy_adds_more, test_a_wrong_norm_is_found_out)
      - It depends on that copy's gradient alone: not on its position, other copies, padding or threads.
        (test_a_copy_adds_the_same_in_any_company, test_threads_change_nothing)
      - The sum is the sum of what each copy adds, exactly.   (test_the_sum_is_that_of_the_copies,
        test_many_copies_are_added_exactly)
      - What is not finite adds exactly zero, as padding does.   (test_not_finite_adds_zero, test_padding_adds_zero)
    Cost: two passes over the gradients; of an embedding two products instead, without building it.

    Example:
      >>> total = GradientSum({"w": (2,)}, Grid.for_gradients(1.0))
      >>> total.add({"w": np.float32([[3.0, 4.0], [0.1, 0.0], [np.nan, 0.0]])}, np.ones(3, bool))
      >>> (total.integers()["w"] * total.grid.unit).round(4), total.clipped
      (array([0.7, 0.8]), 1)
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], grid: Grid):
        self.grid, self.clipped, self._copies = grid, 0, 0
        self._shapes = dict(shapes)
        size = sum(math.prod(shape) for shape in shapes.values())
        self._longest = grid.radius - math.sqrt(size) / 2  # before rounding, in grid units
        # Integers' squares are exact, and their sum is off by less than this in whatever order it is made.
        self._largest_square = grid.radius**2 * (1 - (size + 4) * 2.0**-52)
        if self._longest < grid.radius / 2:
            raise InputError(f"a model of {size} parameters needs a finer grid")
        self._totals = {name: np.zeros(math.prod(shape)) for name, shape in shapes.items()}

    def add(self, gradients: Gradients, mask: npt.ArrayLike) -> None:
        """Adds the clipped gradients of the copies that the mask leaves in; counts those that were clipped."""
        mask = np.ascontiguousarray(mask, np.bool_)
        if self._copies + mask.size > 2**27:
            raise InputError("a sum of more than 2^27 copies")
        self._copies += mask.size
        leaves = {name: leaf_of(gradients[name], mask.size) for name in self._totals}
        with np.errstate(all="ignore"):
            lengths = np.sqrt(sum(leaf.squares() for leaf in leaves.values())) / self.grid.unit
            kept = mask & np.isfinite(lengths)
            clipped = kept & (lengths > self._longest)
            factors = np.where(clipped, self._longest * _MARGIN / lengths, 1.0) / self.grid.unit
        self.clipped += int(np.count_nonzero(clipped))
        factors[~kept] = 0
        squares = self._add(leaves, factors)
        while (too_long := squares > self._largest_square).any():
            self._add(leaves, np.where(too_long, -factors, 0))  # takes the same integers out again
            factors = np.where(too_long, factors * (self._longest * _MARGIN / np.sqrt(squares)), 0)
            squares = self._add(leaves, factors)

    def _add(self, leaves: Mapping[str, Leaf], factors: npt.NDArray[np.float64]) -> Any:
        """(copies,) the sums of squares of the integers that were added."""
        return sum(leaf.add(factors, self._totals[name]) for name, leaf in leaves.items())

    def integers(self) -> dict[str, npt.NDArray[np.int64]]:
        """Returns the sum so far, by parameter."""
        return {name: total.astype(np.int64).reshape(self._shapes[name]) for name, total in self._totals.items()}


class Microbatches(NamedTuple):
    """How a batch is divided into rows that a device works on together."""

    shapes: Mapping[str, tuple[int, ...]]  # of every parameter
    microbatch: int  # rows
    devices: Sequence[Any] = ()  # that take microbatches in turn, the same program each; none: where parameters are
    ahead: int = 0  # microbatches computed while an earlier one is added; each keeps its gradients in memory


def clipped_gradient_sums(
    gradients: Callable[[Any, Any], Gradients],  # (parameters, rows of the batch) -> each row's; compiled by the caller
    parameters: Mapping[str, Any],
    batch: Mapping[str, Any],  # arrays with a leading axis for the copies
    mask: npt.ArrayLike,  # (batch,) True where the row is real
    grid: Grid,  # `Grid.for_gradients` of the clip norm
    division: Microbatches,
    *,
    scales: Mapping[str, Any] | None = None,  # for `scaled`, before clipping: of public and released numbers alone
) -> tuple[dict[str, npt.NDArray[np.int64]], int]:
    """Sums a batch's clipped gradients, microbatch by microbatch, all of one shape: one program, whatever the batch is.

    Guarantees:
      - The size of the batch and of its padding change nothing, nor does the number of devices.
        (test_padding_of_a_batch_changes_nothing, test_two_devices_give_the_same_integers)
      - Whatever the scales are, a copy adds no more than the radius.   (test_scales_cannot_lengthen_a_copy)

    Returns:
      ({name: int64 sums}, number of copies that were clipped: private).
    """
    import jax

    shapes, microbatch, devices, ahead = division
    mask, rescale = np.asarray(mask, bool), jax.jit(scaled)
    mask = np.pad(mask, (0, -mask.size % microbatch))
    total = GradientSum(shapes, grid)
    own = [jax.device_put((parameters, scales), device) for device in devices] or [(parameters, scales)]
    waiting: collections.deque[tuple[Gradients, npt.NDArray[np.bool_]]] = collections.deque()
    end = int(np.flatnonzero(mask)[-1]) + 1 if mask.any() else 0  # padding at the end is not worked on
    for number, begin in enumerate(range(0, end, microbatch)):
        some = slice(begin, begin + microbatch)
        rows = {name: _padded(np.asarray(array)[some], mask[some]) for name, array in batch.items()}
        if devices:
            rows = jax.device_put(rows, devices[number % len(devices)])
        given, factors = own[number % len(own)]
        found = gradients(given, rows)
        waiting.append((found if factors is None else rescale(found, factors), mask[some]))
        if len(waiting) >= len(own) + ahead:
            total.add(*waiting.popleft())
    for left in waiting:
        total.add(*left)
    return total.integers(), total.clipped


def _padded(rows: npt.NDArray[Any], real: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
    """(microbatch, ...) with zeros for what is not real: a gradient of padding must be finite to be quick."""
    out = np.zeros((real.size, *rows.shape[1:]), rows.dtype)
    out[: len(rows)][real[: len(rows)]] = rows[real[: len(rows)]]
    return out


# ---- the gradients of one parameter: as a whole, or in factors that are far smaller than what they make --------------


def leaf_of(gradients: Any, copies: int) -> Leaf:
    """Returns the leaf of (copies, ...) gradients, or of a form that makes its own."""
    if hasattr(gradients, "leaf"):
        return gradients.leaf()
    rows = np.ascontiguousarray(gradients, np.float32).reshape(copies, -1)
    return Product(np.ones((copies, 1), np.float32), rows)


def scaled(gradients: Mapping[str, Any], scales: Mapping[str, Any]) -> dict[str, Any]:
    """Every parameter's gradients times public scales, of its shape but 1 in the last axis; to be compiled.

    Guarantees:
      - It is the product with what factors make.   (test_scaled_factors_are_the_scaled_gradient,
        test_scaled_rows_and_products)
    """
    return {
        name: own.scaled(scales[name]) if hasattr(own, "scaled") else own * scales[name]
        for name, own in gradients.items()
    }


class FirstRowsGradients(NamedTuple):
    """Gradients of a parameter of which an example uses the first rows alone."""

    rows: Any  # (copies, t, width) float32

    def leaf(self) -> Leaf:
        return leaf_of(self.rows, len(self.rows))

    def scaled(self, scale: Any) -> "FirstRowsGradients":
        return self._replace(rows=self.rows * scale[: self.rows.shape[1]])


class OuterGradients(NamedTuple):
    """Gradients of a layer that sees one row of each example: number (o, i) of a copy's is left[o] right[i]."""

    left: Any  # (copies, outputs) float32
    right: Any  # (copies, inputs) float32

    def leaf(self) -> Leaf:
        return Product(np.ascontiguousarray(self.left), np.ascontiguousarray(self.right))

    def scaled(self, scale: Any) -> "OuterGradients":
        return self._replace(left=self.left * scale[:, 0])


class Product:
    """The leaf of `OuterGradients`, and of whole gradients, times 1: products are in float64, so none overflows."""

    def __init__(self, left: npt.NDArray[np.float32], right: npt.NDArray[np.float32]):
        self._left, self._right = left, right

    def squares(self) -> npt.NDArray[np.float64]:
        squares = np.empty(len(self._left))
        in_parts(_square_products, (self._left, self._right, squares), squares.size)
        return squares

    def add(self, factors: npt.NDArray[np.float64], totals: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        parts = self._left.shape[1] * -(-self._right.shape[1] // _BLOCK)
        squares = np.zeros((parts, factors.size))
        in_parts(_add_products, (self._left, self._right, factors, totals, squares), parts)
        return squares.sum(axis=0)


@_njit
def _square_products(left, right, squares, counters):
    for i in parts_left(squares.size, counters):
        squares[i] = square_of(left[i]) * square_of(right[i])


@_njit
def _add_products(left, right, factors, totals, squares, counters):
    """squares (parts, copies): of what was added to a block of one output's numbers, of which each is one part."""
    copies, inputs = right.shape
    blocks, room = -(-inputs // _BLOCK), np.empty(_BLOCK)
    for part in parts_left(squares.shape[0], counters):
        o, begin = part // blocks, part % blocks * _BLOCK
        end = min(begin + _BLOCK, inputs)
        own = totals[o * inputs + begin : o * inputs + end]
        for i in range(copies):
            if factors[i]:  # what is not finite has a factor of 0 and is not read
                squares[part, i] = add_rounded(right[i, begin:end], factors[i] * np.float64(left[i, o]), room, own)


@_njit
def add_rounded(row, factor, room, totals):
    """totals += rint(factor row), every number by itself; returns the sum of squares of what was added."""
    for j in range(row.size):
        room[j] = (np.float64(row[j]) * factor + _ROUNDER) - _ROUNDER
        totals[j] += room[j]
    return square_of(room[: row.size])


# Any order of the additions will do.
@compiled(fastmath={"reassoc", "contract"})
def square_of(row):
    """Returns the sum of squares in float64."""
    total = 0.0
    for j in range(row.size):
        total += np.float64(row[j]) * np.float64(row[j])
    return total
