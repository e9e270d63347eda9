"""Gaussian noise as integers: the ideal normal rounded to the grid, independent (DP-SGD) or correlated (DP-MF).

With Z ideal normals and deviation s in grid units, a row of independent noise is n = floor(s Z + 1/2). Correlated noise
of a banded strategy C feeds back the integers of earlier rows,

    n_t = floor((s Z_t - sum_(j >= 1) c_j n_(t-j)) / c_0 + 1/2),

so that X + n, for integer sums X, is a rounding of what the ideal mechanism C X + s Z releases and of earlier releases
(docs/mechanism.md has the proof). Nothing accumulates: each row is rounded exactly.

Exactly: every value is computed in float64 with a proven error bound. Where an integer boundary lies within the bound,
the normal is compared with that boundary, first by its 64-bit word and a table of the tail in compiled code, then to as
many digits as it takes (`coowned.mechanism.normals`).
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from coowned import threads, validate
from coowned.errors import InputError
from coowned.mechanism.compiled import compiled
from coowned.mechanism.kernels import TAIL_STREAM, WORD_STREAM, WORDS, fill_words_of_keys, word_at
from coowned.mechanism.keys import Purpose, RunKey
from coowned.mechanism.normals import (
    ABSOLUTE_ERROR,
    MAGNITUDE,
    RELATIVE_ERROR,
    SCARCE,
    SIGN,
    TAIL_END,
    Digits,
    TailTable,
    approximate,
    approximate_with,
    tail_difference,
    tail_table,
)

Rows = dict[str, npt.NDArray[np.int64]]

_PART = 128 * WORDS  # numbers one thread makes before it takes the next part
_njit = compiled()


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
    Cost: O(num_bands * parameters) a step; memory num_bands * parameters * 8 bytes, whatever `iterations` is. The work
    is done without Python's lock, so that the next row can be made while a device computes.

    Args:
      run_key: where the normals come from.
      deviations: standard deviation in grid units, for each configuration (`Grid.noise_deviation`).
      coefficients: of the strategy (`BandedStrategy.coefficients`), or (1.0,) for independent noise.
      shapes: name and shape of every tensor.
      iterations: number of rows there are.
      configurations: the names of the models; every array has a leading axis for them.
      start: the first step to be given out; earlier rows are replayed.
      rows: the result of `rows()` at that step, in place of replaying.
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
        rows: Mapping[str, npt.NDArray[np.int64]] | None = None,
        threads: int = 1,
    ):
        validate.positive(iterations=iterations, threads=threads)
        validate.integer(at_least=0, at_most=iterations, start=start)
        if not configurations or len(set(configurations)) != len(configurations):
            raise InputError("configurations must be one or more different names: two of the same would share noise")
        validate.same_length(len(configurations), deviations=deviations)
        self._rounding = _Rounding.of(np.array(deviations, np.float64), np.array(coefficients, np.float64))
        self._run_key, self._shapes, self._iterations = run_key, dict(shapes), int(iterations)
        self._configurations, self._threads = tuple(configurations), int(threads)
        self._kept = len(self._rounding.coefficients) - 1
        self._rings = {
            name: np.zeros((len(self._configurations), self._kept, math.prod(shape)), np.int64)
            for name, shape in self._shapes.items()
        }  # (configurations, num_bands - 1, size): row t is in slot t mod (num_bands - 1)
        self._largest = {name: np.zeros(self._kept, np.int64) for name in self._shapes}  # of each slot
        self._step = 0
        if rows is not None:
            self._restore(rows)
        elif self._kept:
            while self._step < start:
                self.next()
        self._step = int(start)

    @property
    def step(self) -> int:
        """The step whose row `next()` gives."""
        return self._step

    def next(self) -> Rows:
        """By tensor: (configurations, *shape) the row of this step."""
        if self._step >= self._iterations:
            raise InputError(f"all {self._iterations} rows of noise were given out; a run has no further step")
        step, self._step = self._step, self._step + 1
        return {name: self._row(name, step).reshape(-1, *shape) for name, shape in self._shapes.items()}

    def rows(self) -> Rows:
        """The last num_bands - 1 rows of every tensor, for a checkpoint that must not replay. As secret as the key."""
        return {name: ring.copy() for name, ring in self._rings.items()}

    def _row(self, name: str, step: int) -> npt.NDArray[np.int64]:
        keys = self._run_key.derive_many(Purpose.NOISE, configurations=self._configurations, step=step, tensor=name)
        ring = self._rings[name]
        row = np.empty((len(keys), ring.shape[2]), np.int64)
        rounding = self._rounding.after(int(self._largest[name].max(initial=0)))
        newest = (step - 1) % self._kept if self._kept else 0

        def fill(begin: int) -> None:
            _fill_part(Part(keys, begin, min(begin + size, row.shape[1]), ring, newest), rounding, row)

        size = max(WORDS, _PART // len(keys) // WORDS * WORDS)
        parts = [functools.partial(fill, begin) for begin in range(0, row.shape[1], size)]
        threads.run_all(parts, threads=self._threads)
        if self._kept:
            ring[:, step % self._kept] = row
            self._largest[name][step % self._kept] = max(row.max(), -row.min())
        return row

    def _restore(self, rows: Mapping[str, npt.NDArray[np.int64]]) -> None:
        if rows.keys() != self._rings.keys():
            raise InputError(f"stored rows are of {sorted(rows)}, but the tensors are {sorted(self._rings)}")
        for name, ring in self._rings.items():
            if rows[name].shape != ring.shape or rows[name].dtype != np.int64:
                found = f"{rows[name].dtype} of shape {rows[name].shape}"
                raise InputError(f"stored rows of {name} are {found}, not int64 of shape {ring.shape}")
            ring[...] = rows[name]
            self._largest[name][:] = np.abs(ring).max(axis=(0, 2))


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


@_njit
def _release(sums, noise, out, scales, noisy):
    for i in range(sums.shape[0]):
        for j in range(sums.shape[1]):
            value = sums[i, j] + noise[i, j] if noisy else sums[i, j]
            out[i, j] = np.float32(np.float64(value) * scales[i])


class Part(NamedTuple):
    """Some columns of the row of one step."""

    keys: npt.NDArray[np.uint32]  # (configurations, 8)
    begin: int  # the first column, a multiple of WORDS
    end: int
    ring: npt.NDArray[np.int64]  # (configurations, num_bands - 1, size) the earlier rows
    newest: int  # slot of the latest of them; the one before is in the slot before, cyclically


class _Rounding(NamedTuple):
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
    table: TailTable

    @classmethod
    def of(cls, deviations: npt.NDArray[np.float64], coefficients: npt.NDArray[np.float64]) -> "_Rounding":
        if not len(coefficients) or coefficients[0] <= 0 or not np.isfinite(coefficients).all():
            raise InputError("coefficients must be finite numbers, the first above 0")
        if not ((deviations >= 0) & (deviations / coefficients[0] < 2.0**48)).all():
            raise InputError("deviations must be between 0 and 2^48 grid units")
        per_normal = deviations * (RELATIVE_ERROR + 4 * 2.0**-53) / coefficients[0] * (1 + 2.0**-20)
        parts, fixed = np.zeros((2, len(coefficients) - 1)), np.zeros_like(deviations)
        return cls(deviations, coefficients, parts, 1.0, per_normal, fixed, 0.0, tail_table()).after(0)

    def after(self, largest: int) -> "_Rounding":
        """With the error of the sum over earlier rows, none of whose numbers is larger than this."""
        others = self.coefficients[1:]
        total, size = float(np.abs(others).sum()) + 1, max(1, largest).bit_length()
        step = 2.0 ** (size // 2)
        # Multiples of 2^-bits, times multiples m of `step`, |m| <= 2 largest, add up to less than 2^53 step 2^-bits.
        bits = 52 + size // 2 - size - math.ceil(math.log2(total))
        whole = np.ldexp(np.rint(np.ldexp(others, bits)), -bits)
        rest = others - whole  # exact
        of_sum = (2 * len(others) + 6) * 2.0**-53 * (total * step + float(np.abs(rest).sum()) * largest)
        if largest >= 2**52 or float(np.abs(whole).sum()) > total:  # beyond what was proven
            of_sum = math.inf
        fixed = (self.deviations * ABSOLUTE_ERROR + of_sum) / self.coefficients[0] * (1 + 2.0**-20) + 2.0**-60
        return self._replace(parts=np.stack([whole, rest]), step=step, fixed=fixed, of_sum=of_sum)


def _fill_part(part: Part, rounding: _Rounding, out: npt.NDArray[np.int64]) -> None:
    """out (configurations, size): the exact integers, in the part's columns."""
    doubtful = np.empty(len(out) * (part.end - part.begin), np.int64)
    count = round_normals(part, rounding, out, doubtful)
    for index in doubtful[:count].tolist():
        configuration, column = divmod(index, out.shape[1])
        deviation = float(rounding.deviations[configuration])
        out[configuration, column] = exact_number(part, configuration, column, deviation, rounding.coefficients)


def exact_number(
    part: Part, configuration: int, column: int, deviation: float, coefficients: npt.NDArray[np.float64]
) -> int:
    """One number of the row in exact arithmetic."""
    chunk, at = divmod(column, WORDS)
    digits = Digits(lambda number: int(word_at(part.keys[configuration], np.uint64(number), chunk, at)))
    kept = len(coefficients) - 1
    earlier = [int(part.ring[configuration, (part.newest - lag) % kept, column]) for lag in range(kept)]
    return exact_rounding(digits, deviation, coefficients.tolist(), earlier)


def exact_rounding(digits: Digits, deviation: float, coefficients: Sequence[float], earlier: Sequence[int]) -> int:
    """The largest whole n with (deviation Z - sum_j coefficients[j] earlier[j - 1]) / coefficients[0] + 1/2 >= n.

    >>> words = [2**63 + 2**62, 0, 0]  # Z = Q^-1(1/4) = 0.6744897501960817
    >>> exact_rounding(Digits(words.__getitem__), 1e6, [1.0], [])
    674490
    """
    if not deviation:
        return 0
    # All coefficients as whole numbers over one power of two.
    ratios = [c.as_integer_ratio() for c in coefficients]
    scale = max(denominator for _, denominator in ratios)
    first, *others = (numerator * (scale // denominator) for numerator, denominator in ratios)
    top, bottom = deviation.as_integer_ratio()
    fed_back = sum(c * n for c, n in zip(others, earlier, strict=True))

    def reaches(n: int) -> bool:
        # Z >= (c_0 (n - 1/2) + sum) / s
        return digits.exceeds((first * (2 * n - 1) + 2 * fed_back) * bottom, 2 * scale * top)

    low = math.floor((deviation * digits.estimate() - fed_back / scale) / (first / scale) + 0.5)
    step = 1
    while not reaches(low):
        low, step = low - step, 2 * step
    high, step = low + 1, 1
    while reaches(high):
        low, high, step = high, high + step, 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if reaches(middle) else (low, middle)
    return low


@_njit
def round_normals(part, rounding, out, doubtful):
    """out (configurations, size): rounded values; gives how many may be wrong, their flat indices in `doubtful`."""
    rows, columns = len(out), part.end - part.begin
    together = max(1, 8 * WORDS // columns) if columns <= WORDS else 1  # short rows are made side by side
    room = together * min(columns, WORDS)
    words, normals = np.empty(room, np.uint64), np.empty(room)
    values, sums = np.empty(WORDS), np.zeros((2, WORDS))
    count = 0
    for first in range(0, rows, together):
        number = min(together, rows - first)
        for begin in range(part.begin, part.end, WORDS):
            end = min(begin + WORDS, part.end)
            length = end - begin
            own_words = words[: number * length].reshape(number, length)
            own_normals = normals[: number * length].reshape(number, length)
            fill_words_of_keys(part.keys[first : first + number], WORD_STREAM, begin // 8, own_words)
            scarce = approximate(own_words.reshape(-1), own_normals.reshape(-1))
            for i in range(number):
                row = first + i
                if scarce:
                    _read_on(own_words[i], part.keys[row], begin // WORDS, own_normals[i])
                _feed_back(own_normals[i], row, rounding, part, begin, values, sums)
                errors = rounding.per_normal[row], rounding.fixed[row]
                own, unsettled = out[row, begin:end], doubtful[count:]
                found = _round(own_normals[i], values, errors, own, unsettled)
                if found:
                    found = _settle(
                        own_words[i], own_normals[i], values, errors, row, rounding, sums, own, unsettled[:found]
                    )
                for j in range(found):
                    unsettled[j] += row * out.shape[1] + begin
                count += found
    return count


@_njit
def _read_on(words, key, chunk, normals):
    """Normals of one chunk whose tail probability needs the digits of a second word."""
    for j in range(words.size):
        if (words[j] & MAGNITUDE) < SCARCE:
            normals[j] = approximate_with(words[j], word_at(key, TAIL_STREAM, chunk, j))


@_njit
def _feed_back(normals, row, rounding, part, begin, values, sums):
    """values = (deviation normals - sum of earlier rows times their coefficients) / coefficients[0] + 1/2."""
    deviation, first, kept = rounding.deviations[row], rounding.coefficients[0], part.ring.shape[1]
    if not kept:
        for j in range(normals.size):
            values[j] = deviation * normals[j] / first + 0.5
        return
    sums[:] = 0
    exact, small = sums
    shift = 1.5 * 2.0**52 * rounding.step  # added and subtracted again, it rounds to a multiple of `step`
    for lag in range(kept):
        earlier = part.ring[row, (part.newest - lag) % kept][begin : begin + normals.size]  # contiguous: vector code
        whole, rest = rounding.parts[0, lag], rounding.parts[1, lag]
        for j in range(normals.size):
            n = np.float64(earlier[j])
            rounded = (n + shift) - shift
            exact[j] += whole * rounded
            small[j] += whole * (n - rounded) + rest * n
    for j in range(normals.size):
        values[j] = ((deviation * normals[j] - exact[j]) - small[j]) / first + 0.5


@_njit
def _round(normals, values, errors, out, doubtful):
    """out = floor(values); gives how many have a whole number within their error, their indices in `doubtful`."""
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
    """Whether no whole number is within the error of the value; false for what is not a number."""
    return abs(value - np.floor(value) - 0.5) < 0.5 - _error(normal, value, errors)


@_njit
def _error(normal, value, errors):
    return errors[0] * abs(normal) + errors[1] + 2.0**-50 * abs(value)


@_njit
def _settle(words, normals, values, errors, row, rounding, sums, out, doubtful):
    """Writes those of the doubtful numbers that their words alone decide; gives how many are left in `doubtful`."""
    deviation, first = rounding.deviations[row], rounding.coefficients[0]
    left = 0
    for j in doubtful:
        error = _error(normals[j], values[j], errors) + 2.0**-50 * abs(values[j])
        settled = abs(values[j]) + error < 2.0**50
        # The number is at least low and at most high.
        low, high = np.int64(0), np.int64(0)
        if settled:
            low, high = np.int64(np.floor(values[j] - error)), np.int64(np.floor(values[j] + error))
        while low < high and settled:
            middle = high - (high - low) // 2
            answer = _reaches(
                words[j],
                middle,
                deviation,
                1 / deviation,
                first,
                sums[0, j],
                sums[1, j],
                rounding.of_sum,
                rounding.table,
            )
            settled = answer != 0
            low, high = (middle, high) if answer > 0 else (low, middle - 1)
        out[j] = low
        doubtful[left] = j
        left += not settled
    return left


@_njit
def _reaches(word, number, deviation, inverse, first, exact, inexact, of_sum, table):
    """1 or -1: whether deviation Z is at least the boundary first (number - 1/2) + sum over earlier rows; 0: unknown.

    The boundary over the deviation is computed as high + low, off by at most `error`: sums and products are kept with
    what they were rounded by (Dekker 1971), which is below 8 as |number| is below 2^51; only `small`, and the inexact
    part of the sum, are rounded.
    """
    product, lost = _two_product(first, number - 0.5)
    boundary, more = _two_sum(product, exact)
    boundary, small = _two_sum(boundary, (lost + more) + inexact)
    high = boundary * inverse
    product, lost = _two_product(high, deviation)
    low = (((boundary - product) - lost) + small) * inverse
    error = (of_sum + 2.0**-50 * (8 + abs(inexact))) * inverse
    slack = table.error + 2.0**63 * error  # Q' is above -1/2
    if not (error < abs(high) < TAIL_END and slack < 2.0**20):
        return 0
    sign = 1 if word >= SIGN else -1
    if sign * high < 0:
        return sign
    difference = tail_difference(table, sign * high, sign * low, word)
    # At least 1: Q(x) >= p and so |Z| >= x. Below 0: |Z| < x. A branch on it could not be predicted.
    return sign * (np.int64(difference >= 1 + slack) - np.int64(difference < -slack))


@_njit
def _two_sum(a, b):
    """(a + b rounded, what that lost), exactly."""
    total = a + b
    other = total - a
    return total, (a - (total - other)) + (b - other)


@_njit
def _two_product(a, b):
    """(a b rounded, what that lost), exactly."""
    product = a * b
    high_a, high_b = 134217729.0 * a, 134217729.0 * b  # 2^27 + 1
    high_a, high_b = high_a - (high_a - a), high_b - (high_b - b)
    low_a, low_b = a - high_a, b - high_b
    return product, ((high_a * high_b - product) + high_a * low_b + low_a * high_b) + low_a * low_b
