"""Clipped gradients of any model, summed exactly: each copy's gradient is rounded to integers by itself.

XLA gives the gradient of every copy of a microbatch; the host scales, rounds and adds them. With d parameters and the
radius R of the grid, a gradient v is multiplied by min(1 / unit, (1 - 2^-16) (R - sqrt(d) / 2) / |v|), and every number
is rounded to the nearest integer. Nothing is assumed of how well |v| was computed: the sum of squares of the integers
themselves is compared with R^2, and a copy that is longer is taken out again, exactly, and added with a smaller factor.
Integers add up exactly in float64 below 2^53, that is for 2^28 copies.
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
from coowned.mechanism.intrinsics import atomic_add
from coowned.mechanism.matrix_tiles import COLUMNS, ROWS, multiply_tile
from coowned.mechanism.shared_parts import in_parts

_ROUNDER = 1.5 * 2.0**52  # adding and subtracting it rounds a float64 below 2^51 to an integer
_ROUNDER_32 = np.float32(1.5 * 2.0**23)  # the same for a float32 below 2^22
_SMALL = 2.0**18  # integers that are made and added in float32 are smaller
_SMALL_COPIES = 64  # so many of them add up to less than 2^24, exactly
_MARGIN = 1 - 2.0**-16  # of the radius that a clipped copy is scaled to: its norm is computed in float32
_BLOCK = 4096  # numbers of a gradient that are summed over all copies before the next
_PARTS = 16  # of an embedding's rows, taken by whichever thread is free
_njit = compiled()


class EmbeddingGradients(NamedTuple):
    """Gradients of an embedding that is looked up and also projects: never built for a whole example.

    Row w of copy i's gradient is sum_m residuals[i, m, w] projected[i, m] + the looked_up[i, t] with tokens[i, t] = w.
    """

    residuals: Any  # (copies, m, words) float32
    projected: Any  # (copies, m, width) float32
    tokens: Any  # (copies, t) int32
    looked_up: Any  # (copies, t, width) float32


class LookupGradients(NamedTuple):
    """Gradients of an embedding that is only looked up: row w of copy i's is the sum of those with tokens[i, t] = w."""

    tokens: Any  # (copies, t) int32
    looked_up: Any  # (copies, t, width) float32


Gradients = Mapping[str, Any]
"""By parameter: (copies, ...) float32, `EmbeddingGradients` or `LookupGradients`."""


class GradientSum:
    """A sum of copies' clipped gradients, in units of a grid.

    Guarantees:
      - What a copy adds is an integer vector no longer than the radius, however badly its norm was computed.
        (test_no_copy_adds_more, test_a_wrong_norm_is_found_out)
      - It depends on that copy's gradient alone: not on its position, other copies, padding or threads.
        (test_a_copy_adds_the_same_in_any_company, test_threads_change_nothing)
      - The sum is the sum of what each copy adds, exactly.   (test_the_sum_is_that_of_the_copies,
        test_many_copies_are_added_exactly)
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
        self._longest = grid.radius - math.sqrt(size) / 2  # before rounding, in grid units
        # Integers' squares are exact, and their sum is off by less than this in whatever order it is made.
        self._largest_square = grid.radius**2 * (1 - (size + 4) * 2.0**-52)
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
        with np.errstate(all="ignore"):
            lengths = np.sqrt(sum(leaf.squares() for leaf in leaves.values())) / self.grid.unit
            kept = mask & np.isfinite(lengths)
            clipped = kept & (lengths > self._longest)
            factors = np.where(clipped, self._longest * _MARGIN / lengths, 1.0) / self.grid.unit
        self.clipped += int(np.count_nonzero(clipped))
        factors[~kept] = 0
        squares = self._add(leaves, factors)
        while (too_long := squares > self._largest_square).any():
            self._add(leaves, np.where(too_long, -factors, 0))  # takes the same integers out again
            factors = np.where(too_long, factors * (self._longest * _MARGIN / np.sqrt(squares)), 0)
            squares = self._add(leaves, factors)

    def _add(self, leaves: Mapping[str, "_Rows | _Lookup | _Embedding"], factors: npt.NDArray[np.float64]) -> Any:
        """(copies,) the sums of squares of the integers that were added."""
        return sum(leaf.add(factors, self._totals[name]) for name, leaf in leaves.items())

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


def _leaf(gradients: Any, copies: int) -> "_Rows | _Lookup | _Embedding":
    if isinstance(gradients, EmbeddingGradients):
        return _Embedding(gradients)
    if isinstance(gradients, LookupGradients):
        return _Lookup(gradients)
    return _Rows(np.ascontiguousarray(gradients, np.float32).reshape(copies, -1))


class _Rows:
    """(copies, size) gradients."""

    def __init__(self, rows: npt.NDArray[np.float32]):
        self._rows = rows

    def squares(self) -> npt.NDArray[np.float64]:
        """(copies,) the squared norms."""
        squares = np.empty(len(self._rows))
        in_parts(_square_rows, (self._rows, squares), len(self._rows))
        return squares

    def add(self, factors: npt.NDArray[np.float64], totals: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """(copies,) the sums of squares of the integers that were added."""
        blocks = -(-totals.size // _BLOCK)
        squares = np.zeros((blocks, factors.size))
        in_parts(_add_blocks, (self._rows, factors, totals, squares), blocks)
        return squares.sum(axis=0)


@_njit
def _square_rows(rows, squares, taken, done):
    while True:
        i = atomic_add(taken, 1)  # pyright: ignore[reportCallIssue]
        if i >= rows.shape[0]:
            return
        squares[i] = _square_of(rows[i])
        atomic_add(done, 1)  # pyright: ignore[reportCallIssue]


# Any order of the additions will do.
@compiled(fastmath={"reassoc", "contract"})
def _square_of(row):
    total = 0.0
    for j in range(row.size):
        total += np.float64(row[j]) * np.float64(row[j])
    return total


@_njit
def _add_blocks(rows, factors, totals, squares, taken, done):
    room = np.empty(_BLOCK)
    while True:
        block = atomic_add(taken, 1)  # pyright: ignore[reportCallIssue]
        begin = block * _BLOCK
        if begin >= totals.size:
            return
        end = min(begin + _BLOCK, totals.size)
        for i in range(rows.shape[0]):
            if factors[i]:  # what is not finite has a factor of 0 and is not read
                squares[block, i] = add_rounded(rows[i, begin:end], factors[i], room, totals[begin:end])
        atomic_add(done, 1)  # pyright: ignore[reportCallIssue]


@_njit
def add_rounded(row, factor, room, totals):
    """totals += rint(factor row), every number by itself; gives the sum of squares of what was added."""
    for j in range(row.size):
        room[j] = (np.float64(row[j]) * factor + _ROUNDER) - _ROUNDER
        totals[j] += room[j]
    return _square_of(room[: row.size])


# ---- embeddings that are looked up -----------------------------------------------------------------------------------


class _Lookup:
    def __init__(self, given: LookupGradients):
        self._tokens, order = _in_order(given.tokens)
        self._rows = np.take_along_axis(np.asarray(given.looked_up), order[:, :, None], axis=1)

    def squares(self) -> npt.NDArray[np.float64]:
        squares = np.zeros((_PARTS, len(self._tokens)))
        self._sum(np.ones(len(self._tokens)), np.empty(0), squares)
        return squares.sum(axis=0)

    def add(self, factors: npt.NDArray[np.float64], totals: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        squares = np.zeros((_PARTS, factors.size))
        self._sum(factors, totals, squares)
        return squares.sum(axis=0)

    def _sum(self, factors: Any, totals: Any, squares: Any) -> None:
        words = totals.size // self._rows.shape[2] or int(self._tokens[:, -1].max()) + 1
        in_parts(_add_lookups, (self._tokens, self._rows, words, factors, totals, squares), _PARTS)


@_njit
def _add_lookups(tokens, rows, words, factors, totals, squares, taken, done):
    """Adds rounded gradients to totals, if there are any, and the squares of the rows to squares (parts, copies)."""
    copies, length, width = rows.shape
    same, room = np.empty(width, np.float32), np.empty(width)
    while True:
        part = atomic_add(taken, 1)  # pyright: ignore[reportCallIssue]
        if part >= _PARTS:
            return
        begin, end = words * part // _PARTS, words * (part + 1) // _PARTS
        for i in range(copies):
            if not factors[i]:
                continue
            same[:] = 0
            for t in range(np.searchsorted(tokens[i], begin), np.searchsorted(tokens[i], end)):
                same += rows[i, t]
                if t + 1 < length and tokens[i, t + 1] == tokens[i, t]:
                    continue
                at = tokens[i, t] * width
                if totals.size:
                    squares[part, i] += add_rounded(same, factors[i], room, totals[at : at + width])
                else:
                    squares[part, i] += _square_of(same)
                same[:] = 0
        atomic_add(done, 1)  # pyright: ignore[reportCallIssue]


def _in_order(tokens: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """((copies, t) tokens in increasing order, where each was)."""
    tokens = np.asarray(tokens).astype(np.int64)
    order = np.argsort(tokens, axis=1, kind="stable")
    return np.take_along_axis(tokens, order, axis=1), order


# ---- embeddings that also project, a few words at a time -------------------------------------------------------------


class _Factors(NamedTuple):
    """The arrays of `EmbeddingGradients` as the compiled loops read them."""

    residuals: npt.NDArray[np.float32]  # (copies, m, words)
    panels: npt.NDArray[np.float32]  # (copies, panels, m, COLUMNS) projected, its width in panels filled up by zeros
    tokens: npt.NDArray[np.int64]  # (copies, t) in increasing order
    order: npt.NDArray[np.int64]  # (copies, t) where each was
    looked_up: npt.NDArray[np.float32]  # (copies, t, width)


class _Embedding:
    def __init__(self, given: EmbeddingGradients):
        projected = np.asarray(given.projected)
        copies, rows, width = projected.shape
        panels = -(-width // COLUMNS)
        filled = np.zeros((copies, rows, panels * COLUMNS), np.float32)
        filled[:, :, :width] = projected
        self._given = _Factors(
            np.ascontiguousarray(given.residuals),
            np.ascontiguousarray(filled.reshape(copies, rows, panels, COLUMNS).transpose(0, 2, 1, 3)),
            *_in_order(given.tokens),
            np.ascontiguousarray(given.looked_up),
        )

    def squares(self) -> npt.NDArray[np.float64]:
        """(copies,) the squared norms, from the products of the rows among themselves."""
        squares = np.zeros(len(self._given.residuals))
        in_parts(_square_embeddings, (self._given, squares), squares.size)
        return squares

    def add(self, factors: npt.NDArray[np.float64], totals: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        squares = np.zeros((_PARTS, factors.size))
        for begin in range(0, factors.size, _SMALL_COPIES):
            some = np.zeros_like(factors)
            some[begin : begin + _SMALL_COPIES] = factors[begin : begin + _SMALL_COPIES]
            in_parts(_add_words, (self._given, some, totals, squares), _PARTS)
        return squares.sum(axis=0)


@_njit
def _square_embeddings(given, squares, taken, done):
    """|sum_m r_m h_m' + sum_t e_t|^2 = sum_mn (r_m.r_n)(h_m.h_n) + 2 sum_mt r_m[token_t] (h_m.e_t) + what e adds.

    Where terms cancel, it is not below 2^-30 of the square of sum_m |r_m||h_m| + sum_t |e_t|: no integer is then so
    large that it could not be taken out again exactly.
    """
    copies, rows, words = given.residuals.shape
    length, width = given.looked_up.shape[1:]
    same, projected, among = np.empty(width, np.float32), np.empty((rows, width), np.float32), np.empty((rows, rows))
    own = np.empty(rows)
    while True:
        i = atomic_add(taken, 1)  # pyright: ignore[reportCallIssue]
        if i >= copies:
            return
        for m in range(rows):
            for h in range(width):
                projected[m, h] = given.panels[i, h // COLUMNS, m, h % COLUMNS]
        for m in range(rows):
            for n in range(m + 1):
                among[m, n] = _dot(projected[m], projected[n]) * (1 if m == n else 2)
        total = 0.0
        own[:] = 0
        for begin in range(0, words, _BLOCK):  # so that all rows stay in a near cache
            end = min(begin + _BLOCK, words)
            for m in range(rows):
                for n in range(m + 1):
                    product = _dot(given.residuals[i, m, begin:end], given.residuals[i, n, begin:end])
                    total += product * among[m, n]
                    own[m] += product if m == n else 0.0
        longest = 0.0
        for m in range(rows):
            longest += np.sqrt(own[m] * among[m, m])
        same[:] = 0
        for t in range(length):
            token, looked_up = given.tokens[i, t], given.looked_up[i, given.order[i, t]]
            longest += np.sqrt(_dot(looked_up, looked_up))
            for m in range(rows):
                total += 2 * given.residuals[i, m, token] * _dot(projected[m], looked_up)
            same += looked_up
            if t + 1 == length or given.tokens[i, t + 1] != token:  # the last of those with this token
                total += _dot(same, same)
                same[:] = 0
        squares[i] = max(total, 2.0**-30 * longest * longest)
        atomic_add(done, 1)  # pyright: ignore[reportCallIssue]


@compiled(fastmath={"reassoc", "contract"})
def _dot(one, other):
    total = np.float32(0)
    for j in range(one.size):
        total += one[j] * other[j]
    return np.float64(total)


@_njit
def _add_words(given, factors, totals, squares, taken, done):
    """Adds rounded gradients to totals, and their squares to squares (parts, copies).

    A few words at a time, and all copies of them. A copy's tile of integers below _SMALL is made and added in float32,
    exactly for as many copies as there are here; any other tile in float64.
    """
    copies, words = given.residuals.shape[0], given.residuals.shape[2]
    width, panels, blocks = given.looked_up.shape[2], given.panels.shape[1], -(-words // ROWS)
    tiles, small = np.empty((panels, ROWS, COLUMNS), np.float32), np.empty((panels, ROWS, COLUMNS), np.float32)
    room, room_32 = np.empty(COLUMNS), np.empty(ROWS * COLUMNS, np.float32)
    last, following = np.empty((given.residuals.shape[1], ROWS), np.float32), np.empty(copies, np.int64)
    while True:
        part = atomic_add(taken, 1)  # pyright: ignore[reportCallIssue]
        if part >= _PARTS:
            return
        begin, end = blocks * part // _PARTS * ROWS, min(words, blocks * (part + 1) // _PARTS * ROWS)
        for i in range(copies):
            following[i] = np.searchsorted(given.tokens[i], begin)
        for first in range(begin, end, ROWS):
            count = min(ROWS, end - first)
            small[:] = 0
            for i in range(copies):
                if not factors[i]:
                    continue
                following[i] = _gradients_of_words(given, i, first, count, following[i], last, tiles)
                factor = np.float32(factors[i])
                for panel in range(panels):
                    square = _add_small(tiles[panel].reshape(-1), factor, room_32, small[panel].reshape(-1))
                    squares[part, i] += max(square, 0.0)
                    for j in range(count if square < 0 else 0):
                        at = (first + j) * width + panel * COLUMNS
                        own = tiles[panel, j, : min(COLUMNS, width - panel * COLUMNS)]
                        squares[part, i] += add_rounded(own, factors[i], room, totals[at : at + own.size])
            for panel in range(panels):
                for j in range(count):
                    at = (first + j) * width + panel * COLUMNS
                    for h in range(min(COLUMNS, width - panel * COLUMNS)):
                        totals[at + h] += np.float64(small[panel, j, h])
        atomic_add(done, 1)  # pyright: ignore[reportCallIssue]


@_njit
def _add_small(row, factor, room, totals):
    """totals += rint(factor row), if all of these are below _SMALL; gives at least their sum of squares, else -1.

    What is not below 2^22, and so perhaps not rounded to an integer, has a square above the limit too.
    """
    for j in range(row.size):
        room[j] = (row[j] * factor + _ROUNDER_32) - _ROUNDER_32
    square = 0.0
    for begin in range(0, row.size, 2 * COLUMNS):
        square += _square_32(room[begin : begin + 2 * COLUMNS])
    square *= 1 + (2 * COLUMNS + 1) * 2.0**-24
    if not square < _SMALL * _SMALL:  # or it is not a number
        return -1.0
    for j in range(row.size):
        totals[j] += room[j]
    return square


# In whatever order: a product and row.size additions lose at most 2^-24 of it each.
@compiled(fastmath={"reassoc", "contract"})
def _square_32(row):
    total = np.float32(0)
    for j in range(row.size):
        total += row[j] * row[j]
    return np.float64(total)


@_njit
def _gradients_of_words(given, copy, first, count, following, last, tiles):
    """tiles (panels, ROWS, COLUMNS): the gradient at words from `first` on; gives the next lookup beyond them."""
    source, column, stride = given.residuals[copy], first, given.residuals.shape[2]
    if count < ROWS:  # the last words: a product reads ROWS of them
        last[:, :] = 0
        for m in range(last.shape[0]):
            for j in range(count):
                last[m, j] = source[m, first + j]
        source, column, stride = last, 0, ROWS
    for panel in range(given.panels.shape[1]):
        right = given.panels[copy, panel]
        multiply_tile(source, 0, column, 1, stride, len(source), right, tiles[panel], 0)  # pyright: ignore[reportCallIssue]
    while following < given.tokens.shape[1] and given.tokens[copy, following] < first + count:
        j, added = given.tokens[copy, following] - first, given.looked_up[copy, given.order[copy, following]]
        for h in range(added.size):
            tiles[h // COLUMNS, j, h % COLUMNS] += added[h]
        following += 1
    return following
