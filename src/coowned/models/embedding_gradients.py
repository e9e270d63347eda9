"""Norms and rounded sums of an embedding's gradients, computed from factors without building them.

Built, the gradients of 64 copies for the word embedding of BERT-Tiny alone would be 1 GB of float32.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from coowned.exact.compiled import compiled, in_parts, parts_left
from coowned.exact.gradient_sums import Leaf, add_rounded, square_of
from coowned.exact.matrix_tiles import COLUMNS, ROWS, multiply_tile

_ROUNDER = np.float32(1.5 * 2.0**23)  # adding and subtracting it rounds a float32 below 2^22 to an integer
_SMALL = 2.0**18  # integers that are made and added in float32 are smaller
_SMALL_COPIES = 64  # so many of them add up to less than 2^24, exactly
_BLOCK = 4096  # words whose residuals are multiplied together, so that all rows stay in a near cache
_PARTS = 16  # of an embedding's rows, taken by whichever thread is free
_njit = compiled()


class EmbeddingGradients(NamedTuple):
    """Gradients of an embedding that is looked up and also used as the projection.

    Row w of copy i's gradient is sum_m residuals[i, m, w] projected[i, m] + the looked_up[i, t] with tokens[i, t] = w.
    """

    residuals: Any  # (copies, m, words) float32
    projected: Any  # (copies, m, width) float32
    tokens: Any  # (copies, t) int32
    looked_up: Any  # (copies, t, width) float32

    def leaf(self) -> Leaf:
        return Embedding(self)

    def scaled(self, scale: Any) -> "EmbeddingGradients":
        return self._replace(residuals=self.residuals * scale[:, 0], looked_up=self.looked_up * scale[self.tokens])


class LookupGradients(NamedTuple):
    """Gradients of an embedding that is only looked up: row w of copy i's sums the entries with tokens[i, t] = w."""

    tokens: Any  # (copies, t) int32
    looked_up: Any  # (copies, t, width) float32

    def leaf(self) -> Leaf:
        return Lookup(self)

    def scaled(self, scale: Any) -> "LookupGradients":
        return self._replace(looked_up=self.looked_up * scale[self.tokens])


# ---- embeddings that are looked up -----------------------------------------------------------------------------------


class Lookup:
    def __init__(self, given: LookupGradients):
        self._tokens, order = _in_order(given.tokens)
        self._rows = np.take_along_axis(np.asarray(given.looked_up), order[:, :, None], axis=1)

    def squares(self) -> npt.NDArray[np.float64]:
        return self.add(np.ones(len(self._tokens)), np.empty(0))

    def add(self, factors: npt.NDArray[np.float64], totals: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        squares = np.zeros((_PARTS, factors.size))
        words = totals.size // self._rows.shape[2] or int(self._tokens[:, -1].max()) + 1
        in_parts(_add_lookups, (self._tokens, self._rows, words, factors, totals, squares), _PARTS)
        return squares.sum(axis=0)


@_njit
def _add_lookups(tokens, rows, words, factors, totals, squares, counters):
    """Adds rounded gradients to totals, if given, and the squares of the rows to squares (parts, copies)."""
    copies, length, width = rows.shape
    same, room = np.empty(width, np.float32), np.empty(width)
    for part in parts_left(_PARTS, counters):
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
                    squares[part, i] += square_of(same)
                same[:] = 0


def _in_order(tokens: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns ((copies, t) tokens in increasing order, the position of each before sorting)."""
    tokens = np.asarray(tokens).astype(np.int64)
    order = np.argsort(tokens, axis=1, kind="stable")
    return np.take_along_axis(tokens, order, axis=1), order


# ---- embeddings that also project, a few words at a time -------------------------------------------------------------


class _Factors(NamedTuple):
    """The arrays of `EmbeddingGradients` as the compiled loops read them."""

    residuals: npt.NDArray[np.float32]  # (copies, m, words)
    projected: npt.NDArray[np.float32]  # (copies, m, width)
    panels: npt.NDArray[np.float32]  # (copies, panels, m, COLUMNS) projected, its width in panels filled up by zeros
    tokens: npt.NDArray[np.int64]  # (copies, t) in increasing order
    order: npt.NDArray[np.int64]  # (copies, t) where each was
    looked_up: npt.NDArray[np.float32]  # (copies, t, width)


class Embedding:
    def __init__(self, given: EmbeddingGradients):
        projected = np.ascontiguousarray(given.projected)
        copies, rows, width = projected.shape
        panels = -(-width // COLUMNS)
        filled = np.zeros((copies, rows, panels * COLUMNS), np.float32)
        filled[:, :, :width] = projected
        self._given = _Factors(
            np.ascontiguousarray(given.residuals),
            projected,
            np.ascontiguousarray(filled.reshape(copies, rows, panels, COLUMNS).transpose(0, 2, 1, 3)),
            *_in_order(given.tokens),
            np.ascontiguousarray(given.looked_up),
        )

    def squares(self) -> npt.NDArray[np.float64]:
        """Computes the (copies,) squared norms from inner products of the rows."""
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
def _square_embeddings(given, squares, counters):
    """Computes the squares sum_mn (r_m.r_n)(h_m.h_n) + 2 sum_mt r_m[token_t] (h_m.e_t) + that of the lookups alone.

    Where terms cancel, it is not below 2^-30 of the square of sum_m |r_m||h_m| + sum_t |e_t|: no integer is then so
    large that it could not be taken out again exactly.
    """
    copies, rows, words = given.residuals.shape
    length, width = given.looked_up.shape[1:]
    same, among, own = np.empty(width, np.float32), np.empty((rows, rows)), np.empty(rows)
    for i in parts_left(copies, counters):
        projected = given.projected[i]
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


@compiled(fastmath={"reassoc", "contract"})
def _dot(one, other):
    total = np.float32(0)
    for j in range(one.size):
        total += one[j] * other[j]
    return np.float64(total)


@_njit
def _add_words(given, factors, totals, squares, counters):
    """Adds rounded gradients to totals, and their squares to squares (parts, copies).

    A few words at a time, and all copies of them. A copy's tile of integers below _SMALL is made and added in float32,
    exactly for as many copies as there are here; any other tile in float64.
    """
    copies, words = given.residuals.shape[0], given.residuals.shape[2]
    width, panels, blocks = given.looked_up.shape[2], given.panels.shape[1], -(-words // ROWS)
    tiles, small = np.empty((panels, ROWS, COLUMNS), np.float32), np.empty((panels, ROWS, COLUMNS), np.float32)
    rooms = np.empty(COLUMNS), np.empty(ROWS * COLUMNS, np.float32)
    last, following = np.empty((given.residuals.shape[1], ROWS), np.float32), np.empty(copies, np.int64)
    for part in parts_left(_PARTS, counters):
        begin, end = blocks * part // _PARTS * ROWS, min(words, blocks * (part + 1) // _PARTS * ROWS)
        for i in range(copies):
            following[i] = np.searchsorted(given.tokens[i], begin)
        for first in range(begin, end, ROWS):
            count = min(ROWS, end - first)
            own_totals = totals[first * width : (first + count) * width].reshape(count, width)
            small[:] = 0
            for i in range(copies):
                if not factors[i]:
                    continue
                following[i] = _gradients_of_words(given, i, first, count, following[i], last, tiles)
                for panel in range(panels):
                    squares[part, i] += _add_panel(tiles[panel], small[panel], panel, factors[i], rooms, own_totals)
            _add_tiles(small, own_totals)


@compiled(inline="always")
def _add_panel(tile, small, panel, factor, rooms, totals):
    """Adds the rounded tile to small if all of it is small, else to totals; returns at least its sum of squares."""
    room, room_32 = rooms
    square = _add_small(tile.reshape(-1), np.float32(factor), room_32, small.reshape(-1))
    if square < 0:
        square = 0.0
        begin, end = panel * COLUMNS, min((panel + 1) * COLUMNS, totals.shape[1])
        for j in range(totals.shape[0]):
            square += add_rounded(tile[j, : end - begin], factor, room, totals[j, begin:end])
    return square


@_njit
def _add_tiles(tiles, totals):
    """Adds the first rows of tiles (panels, ROWS, COLUMNS) to totals (words, width)."""
    width = totals.shape[1]
    for panel in range(tiles.shape[0]):
        for j in range(totals.shape[0]):
            own = totals[j, panel * COLUMNS : min((panel + 1) * COLUMNS, width)]
            for h in range(own.size):
                own[h] += np.float64(tiles[panel, j, h])


@_njit
def _add_small(row, factor, room, totals):
    """Adds rint(factor row) to totals if all of it is below _SMALL; returns at least its sum of squares, else -1.

    What is not below 2^22, and so perhaps not rounded to an integer, has a square above the limit too.
    """
    for j in range(row.size):
        room[j] = (row[j] * factor + _ROUNDER) - _ROUNDER
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
    """Fills tiles (panels, ROWS, COLUMNS) with the gradient at words from `first` on; returns the lookup after them."""
    source, column, stride = given.residuals[copy], first, given.residuals.shape[2]
    if count < ROWS:  # the last words: a product reads ROWS of them
        last[:, :] = 0
        for m in range(last.shape[0]):
            for j in range(count):
                last[m, j] = source[m, first + j]
        source, column, stride = last, 0, ROWS
    for panel in range(given.panels.shape[1]):
        right = given.panels[copy, panel]
        multiply_tile(source[:, column:], 1, stride, len(source), right, tiles[panel])  # pyright: ignore[reportCallIssue]
    while following < given.tokens.shape[1] and given.tokens[copy, following] < first + count:
        j, added = given.tokens[copy, following] - first, given.looked_up[copy, given.order[copy, following]]
        for h in range(added.size):
            tiles[h // COLUMNS, j, h % COLUMNS] += added[h]
        following += 1
    return following
