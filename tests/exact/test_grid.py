"""The public grid."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coowned.errors import InputError
from coowned.exact.grid import Grid

CLIP_NORMS = st.floats(1e-28, 1e28)


@given(CLIP_NORMS, st.integers(1, 40))
def test_unit_is_a_power_of_two(clip_norm, bits):
    grid = Grid(clip_norm, bits)
    mantissa, _ = math.frexp(grid.unit)
    assert mantissa == 0.5
    assert Fraction(grid.radius) * Fraction(grid.unit) == Fraction(clip_norm)
    assert 2**bits <= grid.radius < 2 ** (bits + 1)


@given(CLIP_NORMS, st.floats(0, 1000))
def test_deviation_is_rounded_up(clip_norm, noise_multiplier):
    grid = Grid.for_linear(clip_norm)
    exact = Fraction(noise_multiplier) * Fraction(clip_norm) / Fraction(grid.unit)
    found = grid.noise_deviation(noise_multiplier)
    assert exact <= Fraction(found)
    assert found == 0 or Fraction(math.nextafter(found, 0)) < exact


def test_what_cannot_be_held_is_refused():
    with pytest.raises(InputError, match="must be at most"):
        Grid.for_linear(1.0).noise_deviation(2.0**20)
    for clip_norm in (0.0, -1.0, math.nan, math.inf, 1e-300):
        for grid in (Grid.for_gradients, Grid.for_linear):
            with pytest.raises(InputError):
                grid(clip_norm)
