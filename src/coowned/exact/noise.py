"""Makes Gaussian noise in integers: the ideal normal rounded to the grid, independent (DP-SGD) or correlated (DP-MF).

With Z ideal normals, s the deviation in grid units and c the strategy's coefficients, a row is

    n_t = floor((s Z_t - sum_(j >= 1) c_j n_(t-j)) / c_0 + 1/2)

(docs/mechanism.md has the proof). A float64 value with a proven error bound decides nearly every number; where an
integer boundary lies within the bound, the normal is compared with it to as many digits as it takes.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from coowned import validate
from coowned.errors import InputError
from coowned.exact.compiled import compiled
from coowned.exact.keys import WORD_STREAM, WORDS, Purpose, RunKey, fill_words_of_keys, word_at
from coowned.exact.normals import ABSOLUTE_ERROR, RELATIVE_ERROR, Digits, approximate, reaches, read_on, tail_table

Rows = dict[str, npt.NDArray[np.int64]]

_PART = 128 * WORDS  # numbers that are made together, so that they stay in the cache
_BLOCK = 8  # rows of correlated noise that are made together, each column's earlier rows being read once
_LARGE = 2**22  # numbers that a block has at most, unless it is one row
_LARGEST_DEVIATION = 2.0**57  # of a number: 32 of them stay below 2^62, and a sum of gradients can be added in 64 bits

_njit = compiled()


class NoiseStream:
    """Rows of integer noise, one a step, for one model or for all of a sweep.

    Guarantees:
      - Every number is the exact rounding of the ideal one, whatever the error bound is.   (test_rows_are_exact,
        test_rows_of_extreme_words_are_exact, test_a_worse_error_bound_changes_nothing)
      - Z is a pure function of (run key, purpose, configuration, step, tensor, index); configurations and purposes
        share nothing.   (test_rows_follow_from_the_key, test_configurations_are_uncorrelated)
      - A stream that starts at any step goes on bit by bit as the uninterrupted one.   (test_resume_is_bit_identical)
      - C times the rows is s Z but for the rounding of each number.   (test_strategy_undoes_the_noise)
      - A step is given out once, so it never serves two different gradients.   (test_a_stream_never_goes_back)
      - Coefficients under which numbers would outgrow 64 bits by the last step are refused.
        (test_noise_that_outgrows_64_bits_is_refused)
    Cost: O(num_bands * parameters) a step; memory num_bands * parameters * 8 bytes, and at most 32 MB more for rows
    made ahead, whatever `iterations` is. Python's lock is released, so a device can compute meanwhile.

    References: Mironov (2012), "On significance of the least significant bits for differential privacy";
      Choquette-Choo et al. (2023), https://arxiv.org/abs/2306.08153, Algorithm 9; Wichura (1988), AS 241.
    """

    def __init__(
        self,
        run_key: RunKey,
        *,
        deviations: Sequence[float],  # in grid units, of each configuration (`Grid.noise_deviation`)
        coefficients: Sequence[float] | npt.NDArray[np.float64],  # of the strategy; (1.0,) for independent noise
        shapes: Mapping[str, tuple[int, ...]],  # of every tensor, by name
        iterations: int,  # number of rows there are
        configurations: Sequence[str] = ("",),  # names of the models; every array has a leading axis for them
        start: int = 0,  # the first step to be given out; earlier rows are replayed
        purpose: Purpose = Purpose.NOISE,  # what the rows are added to; two purposes share nothing
    ):
        validate.positive(iterations=iterations)
        validate.integer(at_least=0, at_most=iterations, start=start)
        if not configurations or len(set(configurations)) != len(configurations):
            raise InputError("configurations must be one or more different names: two equal ones would share noise")
        validate.same_length(len(configurations), deviations=deviations)
        self._rounding = Rounding.of(np.array(deviations, np.float64), np.array(coefficients, np.float64))
        self._run_key, self._shapes, self._iterations = run_key, dict(shapes), int(iterations)
        self._configurations, self._purpose = tuple(configurations), purpose
        self._kept = len(self._rounding.coefficients) - 1
        if self._kept:
            _check_growth(self._rounding, self._iterations)
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
                self._run_key.derive_many(self._purpose, configurations=self._configurations, step=step, tensor=name)
                for step in steps
            ]
            while (largest := self._fill(np.stack(keys), steps[0], self._rings[name])) > self._rounding.largest:
                self._rounding = self._rounding.up_to(largest * 5 // 4)
        self._ready = steps.stop

    def _fill(self, keys: npt.NDArray[np.uint32], step: int, ring: npt.NDArray[np.int64]) -> int:
        """Fills the ring's rows from `step` on; returns their largest absolute value, 0 where nothing is fed back."""
        models, _, columns = ring.shape
        size = max(WORDS, _PART // (models * len(keys)) // WORDS * WORDS)
        parts = (Part(keys, begin, min(begin + size, columns), ring, step) for begin in range(0, columns, size))
        largest = max((_fill_part(part, self._rounding) for part in parts), default=0)
        return largest if self._kept else 0


def _check_growth(rounding: "Rounding", iterations: int) -> None:
    """Refuses coefficients whose inverse grows so fast that numbers would leave 64 bits."""
    from scipy.signal import lfilter  # slow to import

    with np.errstate(over="ignore", invalid="ignore"):
        inverse = lfilter([1.0], rounding.coefficients, np.eye(1, iterations)[0])  # (iterations,) first column of C^-1
        # A row is C^-1 times the normals and the roundings so far, each below 1.
        deviation = np.linalg.norm(inverse) * (rounding.deviations.max() + math.sqrt(iterations))
    if not deviation <= _LARGEST_DEVIATION:
        raise InputError(
            f"noise with the coefficients {np.array2string(rounding.coefficients, precision=4, threshold=6)} outgrows "
            f"64 bits within {iterations} steps, because the inverse of their strategy grows without bound; leave the "
            "coefficients out (the best strategy is then found) or use fewer iterations"
        )


def release(sums: Rows, noise: Rows | None, units: npt.NDArray[np.float64], batch_size: int) -> dict[str, Any]:
    """By tensor: (models, *shape) float32, what a step releases: sum plus noise, over the public batch size.

    Guarantees:
      - Sum and noise meet as integers; all that follows sees these alone.   (test_sum_and_noise_meet_as_integers)

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


@_njit
def _release(sums, noise, out, scales, noisy):
    for i in range(sums.shape[0]):
        for j in range(sums.shape[1]):
            value = sums[i, j] + noise[i, j] if noisy else sums[i, j]
            out[i, j] = np.float32(np.float64(value) * scales[i])


# ---- rows: normals from words, what earlier rows feed back, and the rounding of both ---------------------------------


class Part(NamedTuple):
    """Some columns of the rows of one step or several."""

    keys: npt.NDArray[np.uint32]  # (steps, configurations, 8)
    begin: int  # the first column, a multiple of WORDS
    end: int
    ring: npt.NDArray[np.int64]  # (configurations, slots, size) rows before, and room for those to be made
    step: int  # the first; row t is in slot t mod slots


class Rounding(NamedTuple):
    """How values become integers: v = (deviation z - sum_j coefficients[j] n_j) / coefficients[0] + 1/2, rounded down.

    A coefficient is split into a + b, an earlier number into m + r with m a multiple of `step`. Products a m, and their
    sums, are exact in float64; what is left, a r + b n, is small: its sum is off by at most of_sum. So v is off by at
    most per_normal |z| + fixed + 2^-50 |v|.
    """

    deviations: npt.NDArray[np.float64]  # (configurations,)
    coefficients: npt.NDArray[np.float64]  # (num_bands,)
    parts: npt.NDArray[np.float64]  # (2, num_bands - 1) a and b, whose sum is coefficients[1:]
    step: float  # a power of two
    per_normal: npt.NDArray[np.float64]  # (configurations,)
    fixed: npt.NDArray[np.float64]  # (configurations,)
    of_sum: float
    largest: int  # absolute value of an earlier number for which this holds
    table: tuple[Any, ...]  # `tail_table()`

    @classmethod
    def of(cls, deviations: npt.NDArray[np.float64], coefficients: npt.NDArray[np.float64]) -> "Rounding":
        if not len(coefficients) or coefficients[0] <= 0 or not np.isfinite(coefficients).all():
            raise InputError("coefficients must be finite numbers, the first above 0")
        if not ((deviations >= 0) & (deviations / coefficients[0] < 2.0**48)).all():
            raise InputError("deviations must be between 0 and 2^48 grid units")
        per_normal = deviations * (RELATIVE_ERROR + 4 * 2.0**-53) / coefficients[0] * (1 + 2.0**-20)
        parts, fixed = np.zeros((2, len(coefficients) - 1)), np.zeros_like(deviations)
        rounding = cls(deviations, coefficients, parts, 1.0, per_normal, fixed, 0.0, 0, tail_table())
        return rounding.up_to(1 + int(4 * deviations.max() / coefficients[0]))

    def up_to(self, largest: int) -> "Rounding":
        """With the error of the sum over earlier rows, none of whose numbers is larger than this."""
        others = self.coefficients[1:]
        total, size = float(np.abs(others).sum()) + 1, largest.bit_length()
        step = 2.0 ** (size // 2)
        # Multiples of 2^-bits, times multiples m of `step`, |m| <= 2 largest, add up to less than 2^53 step 2^-bits.
        bits = 52 + size // 2 - size - math.ceil(math.log2(total))
        whole = np.ldexp(np.rint(np.ldexp(others, bits)), -bits)
        rest = others - whole  # exact
        of_sum = (2 * len(others) + 6) * 2.0**-53 * (total * step + float(np.abs(rest).sum()) * largest)
        if largest >= 2**52 or float(np.abs(whole).sum()) > total:  # beyond what was proven
            of_sum = math.inf
        fixed = (self.deviations * ABSOLUTE_ERROR + of_sum) / self.coefficients[0] * (1 + 2.0**-20) + 2.0**-60
        return self._replace(parts=np.stack([whole, rest]), step=step, fixed=fixed, of_sum=of_sum, largest=largest)


def _fill_part(part: Part, rounding: Rounding) -> int:
    """Fills the part's rows and columns of the ring with the exact integers; returns their largest absolute value."""
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
    """One number of the part's `step`-th row: the largest n with Z >= (c_0 (n - 1/2) + sum_j c_j n_(t-j)) / s."""
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


class _Room(NamedTuple):
    """Work space of `_round_row`: a row's values before rounding, the feedback, and indices of doubtful values."""

    values: npt.NDArray[np.float64]  # (WORDS,)
    sums: npt.NDArray[np.float64]  # (2, WORDS)
    indices: npt.NDArray[np.int64]  # (WORDS,)


@_njit
def round_normals(part, rounding, doubtful):
    """Fills the ring; returns (how many may be wrong, the largest absolute value).

    The first rows of `doubtful` become (step, model, column) of those that may be wrong.
    """
    steps, models, _ = part.keys.shape
    columns = part.end - part.begin
    together = max(1, 4 * WORDS // columns) if columns <= WORDS else 1  # short rows are made side by side
    room = together * min(columns, WORDS)
    words, normals = np.empty(room, np.uint64), np.empty(room)
    own_room = _Room(np.empty(WORDS), np.zeros((2, WORDS)), np.empty(WORDS, np.int64))
    count, largest = 0, np.int64(0)
    for first in range(0, models, together):
        number = min(together, models - first)
        for begin in range(part.begin, part.end, WORDS):
            length = min(WORDS, part.end - begin)
            own_words = words[: number * length].reshape(number, length)
            own_normals = normals[: number * length].reshape(number, length)
            for step in range(steps):
                keys = part.keys[step, first : first + number]
                fill_words_of_keys(keys, WORD_STREAM, begin // 8, own_words)
                scarce = approximate(own_words.reshape(-1), own_normals.reshape(-1))
                for i in range(number if scarce else 0):
                    read_on(own_words[i], keys[i], begin // WORDS, own_normals[i])
                for i in range(number):
                    where = step, first + i, begin
                    found, most = _round_row(
                        part, rounding, where, own_words[i], own_normals[i], own_room, doubtful[count:]
                    )
                    count += found
                    largest = max(largest, most)
    return count, largest


@compiled(inline="always")  # a call for every row would cost a tenth of the time of short ones
def _round_row(part, rounding, where, words, normals, room, doubtful):
    """Rounds some columns of one model's row; returns (how many may be wrong, the largest absolute value)."""
    step, model, begin = where
    _feed_back(normals, model, rounding, part, part.step + step, begin, room.values, room.sums)
    errors = rounding.per_normal[model], rounding.fixed[model]
    out = part.ring[model, (part.step + step) % part.ring.shape[1]][begin : begin + normals.size]
    found = round_exactly(normals, room.values, errors, out, room.indices)
    if found:
        made = words, normals, room.values, room.sums
        found = _settle(made, errors, model, rounding, out, room.indices[:found])
    for i in range(found):
        doubtful[i, 0], doubtful[i, 1], doubtful[i, 2] = step, model, begin + room.indices[i]
    largest = np.int64(0)
    for j in range(out.size):
        largest = max(largest, abs(out[j]))
    return found, largest


@_njit
def _feed_back(normals, model, rounding, part, step, begin, values, sums):
    """values = (deviation normals - sum of earlier rows times their coefficients) / coefficients[0] + 1/2."""
    deviation, first, slots = rounding.deviations[model], rounding.coefficients[0], part.ring.shape[1]
    if rounding.coefficients.size == 1:
        for j in range(normals.size):
            values[j] = deviation * normals[j] / first + 0.5
        return
    sums[:] = 0
    exact, small = sums[0], sums[1]  # unpacked, they would not be known to be contiguous
    shift = 1.5 * 2.0**52 * rounding.step  # added and subtracted again, it rounds to a multiple of `step`
    for lag in range(rounding.coefficients.size - 1):
        earlier = part.ring[model, (step - 1 - lag) % slots][begin : begin + normals.size]
        whole, rest = rounding.parts[0, lag], rounding.parts[1, lag]
        for j in range(normals.size):
            n = np.float64(earlier[j])
            rounded = (n + shift) - shift
            exact[j] += whole * rounded
            small[j] += whole * (n - rounded) + rest * n
    for j in range(normals.size):
        values[j] = ((deviation * normals[j] - exact[j]) - small[j]) / first + 0.5


@_njit
def round_exactly(normals, values, errors, out, doubtful):
    """out = floor(values); returns how many have an integer within their error, their indices in `doubtful`."""
    count = 0
    for j in range(normals.size):  # without a branch, so that it becomes vector code
        out[j] = np.int64(np.floor(values[j]))
        count += not _is_certain(normals[j], values[j], errors)
    if count:
        count = 0
        for j in range(normals.size):
            doubtful[count] = j  # overwritten by the next, unless it is doubtful
            count += not _is_certain(normals[j], values[j], errors)
    return count


@_njit
def _is_certain(normal, value, errors):
    """Returns whether no integer is within the error of the value; false for what is not a number."""
    return abs(value - np.floor(value) - 0.5) < 0.5 - _error(normal, value, errors)


@_njit
def _error(normal, value, errors):
    return errors[0] * abs(normal) + errors[1] + 2.0**-50 * abs(value)


@_njit
def _settle(made, errors, model, rounding, out, doubtful):
    """Writes those of the doubtful numbers that their words decide; returns how many are left in `doubtful`."""
    words, normals, values, sums = made
    deviation, first = rounding.deviations[model], rounding.coefficients[0]
    inverse = 1 / deviation
    left = 0
    for j in doubtful:
        # The number is at least low and at most high.
        error = _error(normals[j], values[j], errors) + 2.0**-50 * abs(values[j])
        answer = np.int64(abs(values[j]) + error < 2.0**50)
        low, high = np.int64(np.floor(values[j] - error)), np.int64(np.floor(values[j] + error))
        sum_and_error = sums[0, j], sums[1, j], rounding.of_sum
        while answer != 0 and low < high:
            middle = high - (high - low) // 2
            answer = reaches(words[j], middle, deviation, inverse, first, sum_and_error, rounding.table)
            low, high = (middle, high) if answer > 0 else (low, middle - 1)
        out[j] = low if answer != 0 else 0
        doubtful[left] = j
        left += answer == 0
    return left
