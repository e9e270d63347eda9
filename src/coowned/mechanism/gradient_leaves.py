"""The gradients of one parameter, of every copy: their norms, and their sum once each is rounded to integers.

A gradient is there as a whole, or in factors that are far smaller than what they make.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from coowned.mechanism.compiled import compiled, in_parts, parts_left

_ROUNDER = 1.5 * 2.0**52  # adding and subtracting it rounds a float64 below 2^51 to an integer
_BLOCK = 4096  # numbers of a gradient that are summed over all copies before the next
_njit = compiled()


class Leaf(Protocol):
    """One parameter's gradients."""

    def squares(self) -> npt.NDArray[np.float64]:
        """(copies,) the squared norms, about."""
        ...

    def add(self, factors: npt.NDArray[np.float64], totals: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Adds each copy's gradient times its factor, rounded, to totals; nothing of a copy with the factor 0 is read.

        Returns:
          (copies,) at least the sums of squares of the integers that were added.
        """
        ...


def leaf_of(gradients: Any, copies: int) -> Leaf:
    """The leaf of (copies, ...) gradients, or of a form that makes its own."""
    if hasattr(gradients, "leaf"):
        return gradients.leaf()
    rows = np.ascontiguousarray(gradients, np.float32).reshape(copies, -1)
    return Product(np.ones((copies, 1), np.float32), rows)


def scaled(gradients: Mapping[str, Any], scales: Mapping[str, Any]) -> dict[str, Any]:
    """Every parameter's gradients times a public scale for each of its rows, to be compiled.

    Guarantees:
      - It is the product with what factors make.   (test_scaled_factors_are_the_scaled_gradient,
        test_scaled_rows_and_products)

    Args:
      gradients: as `leaf_of` takes them.
      scales: of each parameter: its shape, but 1 in the last axis.
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
def _square_products(left, right, squares, taken, done):
    for i in parts_left(squares.size, taken, done):
        squares[i] = square_of(left[i]) * square_of(right[i])


@_njit
def _add_products(left, right, factors, totals, squares, taken, done):
    """squares (parts, copies): of what was added to a block of one output's numbers, of which each is one part."""
    copies, inputs = right.shape
    blocks, room = -(-inputs // _BLOCK), np.empty(_BLOCK)
    for part in parts_left(squares.shape[0], taken, done):
        o, begin = part // blocks, part % blocks * _BLOCK
        end = min(begin + _BLOCK, inputs)
        own = totals[o * inputs + begin : o * inputs + end]
        for i in range(copies):
            if factors[i]:  # what is not finite has a factor of 0 and is not read
                squares[part, i] = add_rounded(right[i, begin:end], factors[i] * np.float64(left[i, o]), room, own)


@_njit
def add_rounded(row, factor, room, totals):
    """totals += rint(factor row), every number by itself; gives the sum of squares of what was added."""
    for j in range(row.size):
        room[j] = (np.float64(row[j]) * factor + _ROUNDER) - _ROUNDER
        totals[j] += room[j]
    return square_of(room[: row.size])


# Any order of the additions will do.
@compiled(fastmath={"reassoc", "contract"})
def square_of(row):
    """The sum of squares in float64."""
    total = 0.0
    for j in range(row.size):
        total += np.float64(row[j]) * np.float64(row[j])
    return total
