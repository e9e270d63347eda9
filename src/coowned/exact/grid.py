"""Defines the public grid that clipped gradients and noise are rounded to, so that both are integers."""

import dataclasses
import math
from fractions import Fraction
from typing import Self

from coowned import validate
from coowned.errors import InputError

CLIP_NORMS = (1e-20, 1e20)  # smallest and largest with noise: sums of integers need room
LARGEST_NOISE = 2.0**47  # noise deviation in grid units; further deviations and sums then stay below 2^53


@dataclasses.dataclass(frozen=True)
class Grid:
    """Multiples of `unit`, a power of two, with 2^bits <= clip_norm / unit < 2^(bits + 1).

    Guarantees:
      - `unit` is a power of two and clip_norm / unit is exact.   (test_unit_is_a_power_of_two)
      - `noise_deviation` is never below clip_norm * noise_multiplier / unit.   (test_deviation_is_rounded_up)

    Example:
      >>> grid = Grid(clip_norm=1.0, bits=24)
      >>> grid.unit == 2.0**-24, grid.radius == 2**24
      (True, True)
    """

    clip_norm: float
    bits: int

    def __post_init__(self) -> None:
        validate.positive_number(clip_norm=self.clip_norm)
        validate.integer(at_least=1, at_most=40, bits=self.bits)
        if not 2.0**-500 <= self.clip_norm <= 2.0**500:
            raise InputError(f"clip_norm ({self.clip_norm:g}) must be between 2^-500 and 2^500")

    @property
    def unit(self) -> float:
        """The distance between neighbours."""
        _, exponent = math.frexp(self.clip_norm)  # clip_norm = m 2^exponent with m in [1/2, 1)
        return math.ldexp(1.0, exponent - 1 - self.bits)

    @property
    def radius(self) -> float:
        """clip_norm / unit: the largest length of one copy's integer vector."""
        return self.clip_norm / self.unit

    def noise_deviation(self, noise_multiplier: float) -> float:
        """Returns the standard deviation of the noise in grid units, at least clip_norm * noise_multiplier / unit."""
        validate.in_range(0, math.inf, open_high=True, noise_multiplier=noise_multiplier)
        exact = Fraction(self.radius) * Fraction(noise_multiplier)
        rounded = float(exact)
        if Fraction(rounded) < exact:
            rounded = math.nextafter(rounded, math.inf)
        if rounded > LARGEST_NOISE:
            raise InputError(f"noise_multiplier ({noise_multiplier:g}) must be at most {2.0 ** (46 - self.bits):g}")
        return rounded

    @classmethod
    def for_gradients(cls, clip_norm: float) -> Self:
        """Returns the grid of models whose gradients are rounded number by number."""
        return cls(float(clip_norm), 24)

    @classmethod
    def for_linear(cls, clip_norm: float) -> Self:
        """Returns the grid of linear models, finer because their gradients are an integer times an integer row."""
        if not 1e-28 <= clip_norm <= 1e28:  # factors are float32
            raise InputError(f"clip_norm ({clip_norm:g}) of a linear model must be between 1e-28 and 1e28")
        return cls(float(clip_norm), 33)
