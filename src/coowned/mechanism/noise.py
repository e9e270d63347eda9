"""Gaussian noise as integers: the ideal normal rounded to the grid, independent (DP-SGD) or correlated (DP-MF).

With Z ideal normals and deviation s in grid units, a row of independent noise is n = floor(s Z + 1/2). Correlated noise
of a banded strategy C feeds back the integers of earlier rows,

    n_t = floor((s Z_t - sum_(j >= 1) c_j n_(t-j)) / c_0 + 1/2),

so that X + n, for integer sums X, is a rounding of what the ideal mechanism C X + s Z releases and of earlier releases
(docs/mechanism.md has the proof). A float64 value with a proven error bound decides nearly every number; where an
integer boundary lies within the bound, the normal is compared with it to as many digits as it takes.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from coowned import threads, validate
from coowned.errors import InputError
from coowned.mechanism.compiled import compiled
from coowned.mechanism.keys import WORDS, Purpose, RunKey, word_at
from coowned.mechanism.noise_kernels import Part, Rounding, round_normals
from coowned.mechanism.normals import Digits

Rows = dict[str, npt.NDArray[np.int64]]

_PART = 128 * WORDS  # numbers one thread makes before it takes the next part
_BLOCK = 8  # rows of correlated noise that are made together, each column's earlier rows being read once
_LARGE = 2**22  # numbers that a block has at most, unless it is one row


class NoiseStream:
    """Rows of integer noise, one a step, for one model or for all of a sweep.

    Guarantees:
      - Every number is the exact rounding of the ideal one, whatever the error bound is.   (test_rows_are_exact,
        test_rows_of_extreme_words_are_exact, test_a_worse_error_bound_changes_nothing)
      - Z is a pure function of (run key, configuration, step, tensor, index); configurations share nothing.
        (test_rows_follow_from_the_key, test_configurations_are_uncorrelated)
      - A stream that starts at any step goes on bit by bit as the uninterrupted one.   (test_resume_is_bit_identical)
      - C times the rows is s Z but for the rounding of each number.   (test_strategy_undoes_the_noise)
      - A step is given out once: a stream cannot go back, so it never serves two different gradients.
        (test_a_stream_never_goes_back)
      - The number of threads changes nothing.   (test_threads_change_nothing)
    Cost: O(num_bands * parameters) a step; memory num_bands * parameters * 8 bytes, and at most 32 MB more for rows
    made ahead, whatever `iterations` is. The work is done without Python's lock, so that the next row can be made while
    a device computes.

    Args:
      run_key: where the normals come from.
      deviations: standard deviation in grid units, for each configuration (`Grid.noise_deviation`).
      coefficients: of the strategy (`BandedStrategy.coefficients`), or (1.0,) for independent noise.
      shapes: name and shape of every tensor.
      iterations: number of rows there are.
      configurations: the names of the models; every array has a leading axis for them.
      start: the first step to be given out; earlier rows are replayed.
      threads: among which the work is split.

    Example:
      >>> stream = NoiseStream(RunKey.from_seed(0), deviations=[100.0], coefficients=(1.0,), shapes={"w": (3,)},
      ...                      iterations=2)
      >>> stream.next()
      {'w': array([[..., ..., ...]])}
      >>> stream.step
      1

    References: Mironov (2012), "On significance of the least significant bits for differential privacy";
      Choquette-Choo et al. (2023), https://arxiv.org/abs/2306.08153, Algorithm 9; Wichura (1988), AS 241.
    """

    def __init__(
        self,
        run_key: RunKey,
        *,
        deviations: Sequence[float],
        coefficients: Sequence[float] | npt.NDArray[np.float64],
        shapes: Mapping[str, tuple[int, ...]],
        iterations: int,
        configurations: Sequence[str] = ("",),
        start: int = 0,
        threads: int = 1,
    ):
        validate.positive(iterations=iterations, threads=threads)
        validate.integer(at_least=0, at_most=iterations, start=start)
        if not configurations or len(set(configurations)) != len(configurations):
            raise InputError("configurations must be one or more different names: two equal ones would share noise")
        validate.same_length(len(configurations), deviations=deviations)
        self._rounding = Rounding.of(np.array(deviations, np.float64), np.array(coefficients, np.float64))
        self._run_key, self._shapes, self._iterations = run_key, dict(shapes), int(iterations)
        self._configurations, self._threads = tuple(configurations), int(threads)
        self._kept = len(self._rounding.coefficients) - 1
        sizes, models = {name: math.prod(shape) for name, shape in shapes.items()}, len(self._configurations)
        self._ahead = max(1, min(_BLOCK, _LARGE // max(1, models * sum(sizes.values())))) if self._kept else 1
        # (configurations, slots, size): row t is in slot t mod slots
        self._rings = {name: np.zeros((models, self._kept + self._ahead, n), np.int64) for name, n in sizes.items()}
        self._step = self._ready = 0  # rows before `ready` have been made
        while self._kept and self._ready < start:
            self._make_rows()
        self._step, self._ready = int(start), max(self._ready, int(start))

    @property
    def step(self) -> int:
        """The step whose row `next()` gives."""
        return self._step

    def next(self) -> Rows:
        """By tensor: (configurations, *shape) the row of this step."""
        if self._step >= self._iterations:
            raise InputError(f"all {self._iterations} rows of noise were used; the run has no further step")
        if self._step == self._ready:
            self._make_rows()
        step, self._step = self._step, self._step + 1
        found = {}
        for name, shape in self._shapes.items():
            ring = self._rings[name]
            row = ring[:, step % ring.shape[1]]
            found[name] = (row.copy() if self._kept else row).reshape(-1, *shape)
        return found

    def _make_rows(self) -> None:
        """Makes the next block of rows."""
        steps = range(self._ready, min(self._ready + self._ahead, self._iterations))
        for name in self._shapes:
            if not self._kept:
                self._rings[name] = np.empty_like(self._rings[name])  # the caller has the one before
            keys = [
                self._run_key.derive_many(Purpose.NOISE, configurations=self._configurations, step=step, tensor=name)
                for step in steps
            ]
            while (largest := self._fill(np.stack(keys), steps[0], self._rings[name])) > self._rounding.largest:
                self._rounding = self._rounding.up_to(largest * 5 // 4)
        self._ready = steps.stop

    def _fill(self, keys: npt.NDArray[np.uint32], step: int, ring: npt.NDArray[np.int64]) -> int:
        """Fills the ring's rows from `step` on; gives their largest absolute value, 0 where nothing is fed back."""
        models, _, columns = ring.shape
        size = max(WORDS, _PART // (models * len(keys)) // WORDS * WORDS)
        parts = [Part(keys, begin, min(begin + size, columns), ring, step) for begin in range(0, columns, size)]
        fills = [functools.partial(_fill_part, part, self._rounding) for part in parts]
        largest = max(threads.run_all(fills, threads=self._threads), default=0)
        return largest if self._kept else 0


def release(sums: Rows, noise: Rows | None, units: npt.NDArray[np.float64], batch_size: int) -> dict[str, Any]:
    """By tensor: (models, *shape) float32, what a step releases: sum plus noise, over the public batch size.

    Sum and noise are added as integers; all that follows sees nothing but that integer and public numbers.

    Guarantees:
      - Sum and noise meet as integers, whatever their size.   (test_sum_and_noise_meet_as_integers)

    >>> release({"w": np.array([[3, 4]])}, {"w": np.array([[1, -1]])}, np.array([0.5]), 2)
    {'w': array([[1.  , 0.75]], dtype=float32)}
    """
    released = {}
    for name, total in sums.items():
        out = np.empty(total.shape, np.float32)
        rows = (array.reshape(len(units), -1) for array in (total, total if noise is None else noise[name], out))
        _release(*rows, units / batch_size, noise is not None)
        released[name] = out
    return released


@compiled()
def _release(sums, noise, out, scales, noisy):
    for i in range(sums.shape[0]):
        for j in range(sums.shape[1]):
            value = sums[i, j] + noise[i, j] if noisy else sums[i, j]
            out[i, j] = np.float32(np.float64(value) * scales[i])


def _fill_part(part: Part, rounding: Rounding) -> int:
    """Fills the part's rows and columns of the ring with the exact integers; gives their largest absolute value."""
    steps, models, _ = part.keys.shape
    doubtful = np.empty((steps * models * (part.end - part.begin), 3), np.int64)
    count, largest = round_normals(part, rounding, doubtful)
    # What follows in a doubtful number's column was made from it.
    first: dict[tuple[int, int], int] = {}
    for step, model, column in doubtful[:count].tolist():
        first[model, column] = min(step, first.get((model, column), step))
    for (model, column), begin in first.items():
        for step in range(begin, steps):
            number = exact_number(part, step, model, column, rounding)
            part.ring[model, (part.step + step) % part.ring.shape[1], column] = number
            largest = max(largest, abs(number))
    return largest


def exact_number(part: Part, step: int, model: int, column: int, rounding: Rounding) -> int:
    """One number, of the part's `step`-th row, in exact arithmetic.

    It is the largest whole n with Z >= (c_0 (n - 1/2) + sum_(j >= 1) c_j n_(t-j)) / s.
    """
    ring, now = part.ring[model, :, column], part.step + step
    deviation = float(rounding.deviations[model])
    if not deviation:
        return 0
    # All coefficients as integers over one power of two.
    ratios = [c.as_integer_ratio() for c in rounding.coefficients.tolist()]
    scale = max(denominator for _, denominator in ratios)
    first, *others = (numerator * (scale // denominator) for numerator, denominator in ratios)
    fed_back = sum(c * int(ring[(now - lag) % ring.size]) for lag, c in enumerate(others, start=1))
    top, bottom = deviation.as_integer_ratio()
    chunk, at = divmod(column, WORDS)
    digits = Digits(lambda number: int(word_at(part.keys[step, model], np.uint64(number), chunk, at)))

    def reaches(n: int) -> bool:
        return digits.exceeds((first * (2 * n - 1) + 2 * fed_back) * bottom, 2 * scale * top)

    low, away = math.floor((deviation * digits.estimate() - fed_back / scale) / (first / scale) + 0.5), 1
    while not reaches(low):
        low, away = low - away, 2 * away
    high, away = low + 1, 1
    while reaches(high):
        low, high, away = high, high + away, 2 * away
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if reaches(middle) else (low, middle)
    return low
