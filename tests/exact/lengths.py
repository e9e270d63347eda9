"""Squared lengths of integer vectors, computed without rounding."""

import math
from fractions import Fraction

import numpy as np

from coowned.exact.grid import Grid


def squared_radius(grid: Grid) -> int:
    """Returns the largest integer that the squared length of one copy's integer vector may be."""
    return math.floor(Fraction(grid.radius) ** 2)


def squared_lengths(integers: np.ndarray) -> list[int]:
    """Returns the squared length of each vector of (batch, models, ...)."""
    return [sum(int(value) ** 2 for value in own.flat) for row in integers for own in row]
