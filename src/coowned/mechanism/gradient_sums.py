"""Clipped gradients of any model, summed exactly: each copy's gradient is rounded to integers by itself.

XLA gives the gradient of every copy of a microbatch; the host scales, rounds and adds them. With d parameters and the
radius R of the grid, a gradient v is multiplied by min(1 / unit, (R - sqrt(d) / 2) / |v|), and every number is rounded
to the nearest integer: rounding makes a vector longer by at most sqrt(d) / 2, so that what a copy adds is an integer
vector no longer than R. |v| is a sum of squares in float64, raised by more than its rounding error in whatever
order it is added. Integers add up exactly in float64 below 2^53, that is for 2^28 copies.
"""

import collections
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from coowned.errors import InputError
from coowned.mechanism.compiled import compiled
from coowned.mechanism.grid import Grid
from coowned.mechanism.intrinsics import count_up
from coowned.mechanism.matrix_tiles import COLUMNS, ROWS, multiply_tile
from coowned.mechanism.shared_parts import in_parts

_ROUNDER = 1.5 * 2.0**52  # adding and subtracting it rounds a float64 below 2^51 to an integer
_BLOCK = 4096  # numbers of a gradient that are summed over all copies before the next
_PARTS = 16  # of an embedding's rows; fixed, so that the order of a sum of squares is
_njit = compiled()


class EmbeddingGradients(NamedTuple):
    """Gradients of an embedding that is looked up and also projects: never built for a whole example.

    Row w of copy i's gradient is sum_m residuals[i, m, w] projected[i, m] + the looked_up[i, t] with tokens[i, t] = w.
    """

    residuals: Any  # (copies, m, words) float32
    projected: Any  # (copies, m, width) float32
    tokens: Any  # (copies, t) int32
    looked_up: Any  # (copies, t, width) float32


Gradients = Mapping[str, Any]
"""By parameter: (copies, ...) float32, or `EmbeddingGradients`."""


class GradientSum:
    """A sum of copies' clipped gradients, in units of a grid.

    Guarantees:
      - What a copy adds is an integer vector no longer than the radius.   (test_no_copy_adds_more)
      - It depends on that copy's gradient alone: not on its position, other copies, padding or threads.
        (test_a_copy_adds_the_same_in_any_company, test_threads_change_nothing)
      - The sum is the sum of what each copy adds, exactly.   (test_the_sum_is_that_of_the_copies)
      - A copy whose gradient is not finite adds exactly zero, and so does padding.   (test_not_finite_adds_zero,
        test_padding_adds_zero)
    Cost: two passes over the gradients; of an embedding two products instead, without building it.

    Example:
      >>> total = GradientSum({"w": (2,)}, Grid.for_gradients(1.0))
      >>> total.add({"w": np.float32([[3.0, 4.0], [0.1, 0.0], [np.nan, 0.0]])}, np.ones(3, bool))
      >>> (total.integers()["w"] * total.grid.unit).round(4), total.clipped
      (array([0.7, 0.8]), 1)
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], grid: Grid):
        self.grid, self.clipped, self._copies = grid, 0, 0
        self._shapes = dict(shapes)
        size = sum(math.prod(shape) for shape in shapes.values())
        self._longest = (grid.radius - math.sqrt(size) / 2) * (1 - 2.0**-40)  # before rounding, in grid units
        self._raise = 1 + (size + 16) * 2.0**-52  # more than the rounding error of a sum of so many squares
        if self._longest < grid.radius / 2:
            raise InputError(f"a model of {size} parameters needs a finer grid")
        self._totals = {name: np.zeros(math.prod(shape)) for name, shape in shapes.items()}

    def add(self, gradients: Gradients, mask: npt.ArrayLike) -> None:
        """Adds the clipped gradients of the copies that the mask leaves in; counts those that were clipped."""
        mask = np.ascontiguousarray(mask, np.bool_)
        if self._copies + mask.size > 2**27:
            raise InputError("a sum of more than 2^27 copies")
        self._copies += mask.size
        leaves = {name: _leaf(gradients[name], mask.size) for name in self._totals}
        squares = np.zeros(mask.size)
        for leaf in leaves.values():
            squares += leaf.squares()
        kept = mask & np.isfinite(squares)
        lengths = np.sqrt(np.where(kept, squares, 1.0) * self._raise)
        with np.errstate(divide="ignore", over="ignore"):
            clipped = kept & (lengths > self._longest * self.grid.unit)
            factors = np.where(clipped, self._longest / lengths, 1 / self.grid.unit)
        self.clipped += int(np.count_nonzero(clipped))
        factors[~kept] = 0
        for name, leaf in leaves.items():
            leaf.add(factors, self._totals[name])

    def integers(self) -> dict[str, npt.NDArray[np.int64]]:
        """The sum so far, by parameter."""
        return {name: total.astype(np.int64).reshape(self._shapes[name]) for name, total in self._totals.items()}


def clipped_gradient_sums(
    gradients: Callable[[Any, Any], Gradients],
    parameters: Mapping[str, Any],
    batch: Mapping[str, Any],
    mask: npt.ArrayLike,
    grid: Grid,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    microbatch: int,
    devices: Sequence[Any] = (),
) -> tuple[dict[str, npt.NDArray[np.int64]], int]:
    """The sum over a batch, microbatch by microbatch, all of one shape: one program, whatever the batch is.

    Guarantees:
      - The size of the batch and of its padding change nothing, nor does the number of devices.
        (test_padding_of_a_batch_changes_nothing, test_two_devices_give_the_same_integers)

    Args:
      gradients: (parameters, rows of the batch) -> each row's gradients; compiled by the caller.
      parameters: what `gradients` takes.
      batch: arrays with a leading axis for the copies.
      mask: (batch,) True where the row is real.
      grid: `Grid.for_gradients` of the clip norm.
      shapes: of every parameter.
      microbatch: rows that a device works on together.
      devices: that take microbatches in turn, the same program each; none: where the parameters are.

    Returns:
      ({name: int64 sums}, number of copies that were clipped: private).
    """
    import jax

    mask = np.asarray(mask, bool)
    total = GradientSum(shapes, grid)
    own = [jax.device_put(parameters, device) for device in devices] or [parameters]
    waiting: collections.deque[tuple[Gradients, npt.NDArray[np.bool_]]] = collections.deque()
    end = int(np.flatnonzero(mask)[-1]) + 1 if mask.any() else 0  # padding at the end is not worked on
    for number, begin in enumerate(range(0, end, microbatch)):
        real = np.zeros(microbatch, bool)
        count = min(microbatch, mask.size - begin)
        real[:count] = mask[begin : begin + count]
        rows = {name: _padded(np.asarray(array)[begin : begin + count], real) for name, array in batch.items()}
        if devices:
            rows = jax.device_put(rows, devices[number % len(devices)])
        waiting.append((gradients(own[number % len(own)], rows), real))
        if len(waiting) >= len(own):
            total.add(*waiting.popleft())
    for given in waiting:
        total.add(*given)
    return total.integers(), total.clipped


@functools.lru_cache(maxsize=32)
def gradients_of(loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Gradients]:
    """(parameters, rows) -> every row's gradient of loss(parameters, row), compiled."""
    import jax

    return jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0)))


def _padded(rows: npt.NDArray[Any], real: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
    """(microbatch, ...) with zeros for what is not real: a gradient of padding must be finite to be quick."""
    out = np.zeros((real.size, *rows.shape[1:]), rows.dtype)
    out[: len(rows)][real[: len(rows)]] = rows[real[: len(rows)]]
    return out


# ---- gradients that are there ----------------------------------------------------------------------------------------


def _leaf(gradients: Any, copies: int) -> "_Rows | _Embedding":
    if isinstance(gradients, EmbeddingGradients):
        return _Embedding(gradients)
    return _Rows(np.ascontiguousarray(gradients, np.float32).reshape(copies, -1))


class _Rows:
    """(copies, size) gradients."""

    def __init__(self, rows: npt.NDArray[np.float32]):
        self._rows = rows

    def squares(self) -> npt.NDArray[np.float64]:
        squares = np.empty(len(self._rows))
        in_parts(_square_rows, (self._rows, squares), len(self._rows))
        return squares

    def add(self, factors: npt.NDArray[np.float64], totals: npt.NDArray[np.float64]) -> None:
        in_parts(_add_blocks, (self._rows, factors, totals), -(-totals.size // _BLOCK))


@_njit
def _square_rows(rows, squares, taken, done):
    while True:
        i = count_up(taken, 1)  # pyright: ignore[reportCallIssue]
        if i >= rows.shape[0]:
            return
        squares[i] = square_of(rows[i])
        count_up(done, 1)  # pyright: ignore[reportCallIssue]


# Any order of the additions will do: the bound on the rounding error holds for all.
@compiled(fastmath={"reassoc", "contract"})
def square_of(row):
    """The sum of squares, in float64."""
    total = 0.0
    for j in range(row.size):
        total += np.float64(row[j]) * np.float64(row[j])
    return total


@_njit
def _add_blocks(rows, factors, totals, taken, done):
    while True:
        begin = count_up(taken, 1) * _BLOCK  # pyright: ignore[reportCallIssue]
        if begin >= totals.size:
            return
        end = min(begin + _BLOCK, totals.size)
        for i in range(rows.shape[0]):
            if factors[i]:  # what is not finite has a factor of 0 and is not read
                add_rounded(rows[i, begin:end], factors[i], totals[begin:end])
        count_up(done, 1)  # pyright: ignore[reportCallIssue]


@_njit
def add_rounded(row, factor, totals):
    """totals += rint(factor row), every number by itself."""
    for j in range(row.size):
        totals[j] += (np.float64(row[j]) * factor + _ROUNDER) - _ROUNDER


# ---- embeddings, a few words at a time -------------------------------------------------------------------------------


class _Lookups(NamedTuple):
    """The arrays of `EmbeddingGradients` as the compiled loops read them."""

    residuals: npt.NDArray[np.float32]  # (copies, m, words)
    panels: npt.NDArray[np.float32]  # (copies, panels, m, COLUMNS) projected, its width in panels filled up by zeros
    tokens: npt.NDArray[np.int64]  # (copies, t) in increasing order
    order: npt.NDArray[np.int64]  # (copies, t) where each was
    looked_up: npt.NDArray[np.float32]  # (copies, t, width)


class _Embedding:
    def __init__(self, given: EmbeddingGradients):
        projected, tokens = np.asarray(given.projected), np.asarray(given.tokens).astype(np.int64)
        copies, rows, width = projected.shape
        panels = -(-width // COLUMNS)
        filled = np.zeros((copies, rows, panels * COLUMNS), np.float32)
        filled[:, :, :width] = projected
        order = np.argsort(tokens, axis=1, kind="stable")
        self._given = _Lookups(
            np.ascontiguousarray(given.residuals),
            np.ascontiguousarray(filled.reshape(copies, rows, panels, COLUMNS).transpose(0, 2, 1, 3)),
            np.take_along_axis(tokens, order, axis=1),
            order,
            np.ascontiguousarray(given.looked_up),
        )
        self._copies = copies

    def squares(self) -> npt.NDArray[np.float64]:
        squares = np.zeros((_PARTS, self._copies))
        nothing = np.empty(0)
        in_parts(_over_words, (self._given, nothing, nothing, squares), _PARTS)
        return squares.sum(axis=0)

    def add(self, factors: npt.NDArray[np.float64], totals: npt.NDArray[np.float64]) -> None:
        in_parts(_over_words, (self._given, factors, totals, np.empty((0, 0))), _PARTS)


@_njit
def _over_words(given, factors, totals, squares, taken, done):
    """Adds rounded gradients to totals; or, where there are no totals, their squares to squares (parts, copies)."""
    copies, width = given.residuals.shape[0], given.looked_up.shape[2]
    words = given.residuals.shape[2]
    blocks = -(-words // ROWS)
    tile, row = np.empty((ROWS, COLUMNS), np.float32), np.empty((ROWS, width), np.float32)
    last = np.empty((given.residuals.shape[1], ROWS), np.float32)
    while True:
        part = count_up(taken, 1)  # pyright: ignore[reportCallIssue]
        if part >= _PARTS:
            return
        begin, end = blocks * part // _PARTS * ROWS, min(words, blocks * (part + 1) // _PARTS * ROWS)
        for i in range(copies):
            if totals.size and not factors[i]:
                continue
            following = np.searchsorted(given.tokens[i], begin)
            for first in range(begin, end, ROWS):
                count = min(ROWS, end - first)
                following = _gradients_of_words(given, i, first, count, following, (tile, last), row)
                if totals.size:
                    for j in range(count):
                        at = (first + j) * width
                        add_rounded(row[j], factors[i], totals[at : at + width])
                else:
                    for j in range(count):
                        squares[part, i] += square_of(row[j])
        count_up(done, 1)  # pyright: ignore[reportCallIssue]


@_njit
def _gradients_of_words(given, copy, first, count, following, room, row):
    """row (ROWS, width): the gradient at words first to first + count; gives the next lookup that is beyond them."""
    tile, last = room
    words, width = given.residuals.shape[2], row.shape[1]
    source, column, stride = given.residuals[copy], first, words
    if count < ROWS:  # the last words: a product reads ROWS of them
        last[:, :] = 0
        for m in range(last.shape[0]):
            for j in range(count):
                last[m, j] = source[m, first + j]
        source, column, stride = last, 0, ROWS
    for panel in range(given.panels.shape[1]):
        right = given.panels[copy, panel]
        multiply_tile(source, 0, column, 1, stride, len(source), right, tile, 0)  # pyright: ignore[reportCallIssue]
        begin = panel * COLUMNS
        for j in range(count):
            for h in range(begin, min(begin + COLUMNS, width)):
                row[j, h] = tile[j, h - begin]
    while following < given.tokens.shape[1] and given.tokens[copy, following] < first + count:
        own, added = row[given.tokens[copy, following] - first], given.looked_up[copy, given.order[copy, following]]
        for h in range(width):
            own[h] += added[h]
        following += 1
    return following
