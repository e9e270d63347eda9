"""The noise of a whole sweep: the rows of `NoiseStream`, bit by bit, in one compiled call a step.

With hundreds of small models the keys and the calls cost more than the normals, so that both are made in bulk here.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from coowned.errors import InputError
from coowned.mechanism.kernels import correlated_rows
from coowned.mechanism.keys import Purpose, RunKey


class SweepNoise:
    """Rows of unit noise C^-1 z for many configurations, as `NoiseStream` gives them.

    Guarantees:
      - Every row is that of a `NoiseStream` with the same run key and configurations, to the bit, from any step on.
                                                                                   (test_rows_are_those_of_the_stream)
      - A step is given out once.                                                  (test_a_sweep_never_goes_back)
    Cost: O(num_bands * parameters * configurations) a step, without Python's lock but for the keys.

    Example:
      >>> noise = SweepNoise(RunKey.from_seed(0), coefficients=np.ones(1), shapes={"w": (3,)}, iterations=2,
      ...                    configurations=["a", "b"])
      >>> noise.next()["w"].shape
      (2, 3)
    """

    def __init__(
        self,
        run_key: RunKey,
        *,
        coefficients: npt.NDArray[np.float64],
        shapes: Mapping[str, tuple[int, ...]],
        iterations: int,
        configurations: Sequence[str],
        start: int = 0,
    ):
        if len(set(configurations)) != len(configurations):
            raise InputError("configurations must be different names: two of the same would share noise")
        self._coefficients = np.array(coefficients, np.float64)
        self._shapes, self._iterations, self._count = dict(shapes), int(iterations), len(configurations)
        self._kept = len(self._coefficients) - 1
        self._rings = {
            name: np.zeros((self._count, self._kept, math.prod(shape)), np.float32) for name, shape in shapes.items()
        }  # (configurations, num_bands - 1, size): row t is in place t mod (num_bands - 1)
        self._run_key, self._configurations = run_key, tuple(configurations)
        self._step = 0
        if self._kept:
            while self._step < start:
                self.next()
        self._step = int(start)

    def next(self) -> dict[str, npt.NDArray[np.float32]]:
        """The row of this step for every tensor, with a leading axis for the configurations."""
        if self._step >= self._iterations:
            raise InputError(f"all {self._iterations} rows of noise were given out; a run has no further step")
        step, self._step = self._step, self._step + 1
        rows = {}
        for name, shape in self._shapes.items():
            keys = self._run_key.derive_many(Purpose.NOISE, configurations=self._configurations, step=step, tensor=name)
            rows[name] = np.empty((self._count, math.prod(shape)), np.float32)
            head = (step - 1) % self._kept if self._kept else 0
            correlated_rows(keys, self._coefficients, self._rings[name], head, rows[name])
        return {name: row.reshape((self._count, *self._shapes[name])) for name, row in rows.items()}
