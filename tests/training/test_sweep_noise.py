"""The noise of a sweep is that of the stream."""

import numpy as np
import pytest

from coowned import InputError
from coowned.mechanism.keys import RunKey
from coowned.mechanism.noise import NoiseStream
from coowned.training.sweep_noise import SweepNoise

SHAPES = {"w": (700,), "b": (2, 3)}  # more than one block of random words, and less


@pytest.mark.parametrize("coefficients", [(1.0,), (0.9, 0.3, 0.1)])
@pytest.mark.parametrize("start", [0, 4])
def test_rows_are_those_of_the_stream(coefficients, start):
    for key in (RunKey.from_seed(3), RunKey.from_operating_system()):
        given = {
            "coefficients": np.array(coefficients),
            "shapes": SHAPES,
            "iterations": 7,
            "configurations": ["a", "", "learning_rate=0.1", "ä"],
        }
        whole, ours = NoiseStream(key, **given), SweepNoise(key, **given, start=start)
        rows = [whole.next() for _ in range(7)]
        for step in range(start, 7):
            row = ours.next()
            for name in SHAPES:
                assert np.array_equal(row[name], rows[step][name])


def test_a_sweep_never_goes_back():
    noise = SweepNoise(
        RunKey.from_seed(0), coefficients=np.ones(1), shapes=SHAPES, iterations=1, configurations=["a", "b"]
    )
    noise.next()
    with pytest.raises(InputError, match="given out"):
        noise.next()
    with pytest.raises(InputError, match="share noise"):
        SweepNoise(RunKey.from_seed(0), coefficients=np.ones(1), shapes={}, iterations=1, configurations=["a", "a"])
