"""Gradients of a layer that sees one row of each example: the product of two vectors, never built for an example."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from coowned.mechanism.compiled import compiled
from coowned.mechanism.gradient_leaves import Leaf, Rows, add_rounded
from coowned.mechanism.intrinsics import atomic_add
from coowned.mechanism.shared_parts import in_parts

_njit = compiled()


class OuterGradients(NamedTuple):
    """Number (o, i) of a copy's gradient is left[o] right[i]."""

    left: Any  # (copies, outputs) float32
    right: Any  # (copies, inputs) float32

    def leaf(self) -> Leaf:
        return Outer(np.ascontiguousarray(self.left), np.ascontiguousarray(self.right))

    def scaled(self, scale: Any) -> "OuterGradients":
        return self._replace(left=self.left * scale[:, 0])


class Outer:
    """The leaf of `OuterGradients`: products are taken in float64, so none of them overflows."""

    def __init__(self, left: npt.NDArray[np.float32], right: npt.NDArray[np.float32]):
        self._left, self._right = left, right

    def squares(self) -> npt.NDArray[np.float64]:
        return Rows(self._left).squares() * Rows(self._right).squares()

    def add(self, factors: npt.NDArray[np.float64], totals: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        outputs = self._left.shape[1]
        squares = np.zeros((outputs, factors.size))
        in_parts(_add_outputs, (self._left, self._right, factors, totals, squares), outputs)
        return squares.sum(axis=0)


@_njit
def _add_outputs(left, right, factors, totals, squares, taken, done):
    """squares (outputs, copies): of what was added at each output, of which each is one part."""
    copies, inputs = right.shape
    room = np.empty(inputs)
    while True:
        o = atomic_add(taken, 1)  # pyright: ignore[reportCallIssue]
        if o >= left.shape[1]:
            return
        for i in range(copies):
            if factors[i]:  # what is not finite has a factor of 0 and is not read
                factor = factors[i] * np.float64(left[i, o])
                squares[o, i] = add_rounded(right[i], factor, room, totals[o * inputs : (o + 1) * inputs])
        atomic_add(done, 1)  # pyright: ignore[reportCallIssue]
