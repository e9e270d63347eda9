"""The compiled inner loops of the greedy selectors (those of the order are in `order_kernels`).

Every loop works on a range, so that the caller can report progress and be interrupted between two ranges, and none
allocates a large array: numpy's own large arrays lie on huge pages, which scattered access needs.
"""

from typing import NamedTuple

import numba
import numpy as np

_njit = numba.njit(cache=True, nogil=True)

# ---- walks that respect a contribution bound -------------------------------------------------------------------------


@_njit
def first_pass(counts, users, state, end, room, taken):
    """Takes each row up to `end` all of whose users have room: the first pass over rows that lie in walking order.

    counts (sizes,): how many rows have 0, 1, 2, ... users; users (pairs,) end to end. state (4,) is [next row, its
    size, its first pair, rows taken]; the rows taken go to taken. room (num_users,) unsigned: copies each user may
    still be in.
    """
    row, size, pair, kept = state
    before = 0
    for s in range(size):
        before += counts[s]
    while row < end:
        stop = min(before + counts[size], end)
        for r in range(row, stop):
            fits = True
            for p in range(pair, pair + size):
                if room[users[p]] == 0:
                    fits = False
                    break
            if fits:
                for p in range(pair, pair + size):
                    room[users[p]] -= 1
                taken[kept] = r
                kept += 1
            pair += size
        row = stop
        if row == before + counts[size] and row < end:
            before += counts[size]
            size += 1
    state[0], state[1], state[2], state[3] = row, size, pair, kept


@_njit
def greedy_pass(walk, indptr, users, begin, end, kept, room):
    """Takes each row of walk[begin:end] all of whose users have room, and moves those taken to walk[kept:].

    room (num_users,) unsigned: copies each user may still be in. Returns how many rows are kept now, so that the next
    pass, which can only take what this one took, walks those alone. Since kept <= begin, nothing unread is lost.
    """
    for i in range(begin, end):
        row = walk[i]
        first, last = indptr[row], indptr[row + 1]
        fits = True
        for p in range(first, last):
            if room[users[p]] == 0:
                fits = False
                break
        if fits:
            for p in range(first, last):
                room[users[p]] -= 1
            walk[kept] = row
            kept += 1
    return kept


@_njit
def interleave(few, many, few_run, many_run, walk):
    """Fills walk with few_run of few, many_run of many, and so on; what is left of the longer one follows."""
    i = j = at = 0
    while at < walk.shape[0]:
        for _ in range(min(few_run, few.shape[0] - i)):
            walk[at] = few[i]
            i += 1
            at += 1
        for _ in range(min(many_run, many.shape[0] - j)):
            walk[at] = many[j]
            j += 1
            at += 1


# ---- Algorithm 4 -----------------------------------------------------------------------------------------------------

ROWS_TOGETHER = 64
"""Rows of which `fill_batches` remembers the first batch that any of them may enter."""


class Batches(NamedTuple):
    """Algorithm 4 under way: rows in walking order, the shape of the batches, and what is filled so far.

    A row that cannot enter batch t cannot before the largest free_from of its users, because free_from never falls:
    `due` remembers that batch, so that a row is examined again only then, at most once for each participation of one
    of its users. Most groups of rows none of which is due are passed in one step.
    """

    indptr: np.ndarray  # (rows + 1,)
    users: np.ndarray  # (pairs,)
    batch_size: int
    iterations: int
    min_separation: int
    free_from: np.ndarray  # (num_users,) int32 the first batch each user may be in again
    due: np.ndarray  # (rows,) int32 the first batch each row may enter
    first_due: np.ndarray  # (groups of ROWS_TOGETHER rows,) int32 no more than the least due of each group
    slots: np.ndarray  # (iterations * batch_size,) row in each slot
    state: np.ndarray  # (4,) int64 slots filled, batch, next row, rows passed in vain


@_njit
def fill_batches(batches, budget):
    """Runs Algorithm 4 until about `budget` rows were passed. A row without users enters once.

    Returns 0: budget used up; 1: all slots filled; 2: stuck, no row can enter the current batch.
    """
    indptr, users, due, first_due = batches.indptr, batches.users, batches.due, batches.first_due
    free_from, slots, state = batches.free_from, batches.slots, batches.state
    B, T, b = batches.batch_size, batches.iterations, batches.min_separation
    filled, t, row, in_vain = state
    rows = due.shape[0]
    candidates = np.empty(ROWS_TOGETHER, np.int64)
    verdict = 2 if rows == 0 else 0
    while verdict == 0 and budget > 0:
        group = row // ROWS_TOGETHER
        end = min((group + 1) * ROWS_TOGETHER, rows)
        if first_due[group] > t:
            budget -= 1
            in_vain += end - row
            row = end
        else:
            budget -= ROWS_TOGETHER
            count = 0
            for r in range(row, end):  # without a branch
                candidates[count] = r
                count += due[r] <= t
            in_vain -= row  # counts from the row after the one that entered last
            row = end
            for c in range(count):
                r = candidates[c]
                latest = np.int32(0)
                for i in range(indptr[r], indptr[r + 1]):
                    latest = max(latest, free_from[users[i]])
                due[r] = latest
                if latest <= t:
                    due[r] = t + b if indptr[r] < indptr[r + 1] else 2 * T
                    for i in range(indptr[r], indptr[r + 1]):
                        free_from[users[i]] = t + b
                    slots[filled] = r
                    filled += 1
                    in_vain = -(r + 1)
                    if filled == (t + 1) * B:  # rows that were not due in this batch may be in the next
                        t += 1
                        row = r + 1
                        break
            in_vain += row
            least = due[group * ROWS_TOGETHER]
            for r in range(group * ROWS_TOGETHER, end):
                least = min(least, due[r])
            first_due[group] = least
        if row == rows:
            row = 0
        if t == T:
            verdict = 1
        elif in_vain >= rows:
            verdict = 2
    state[0], state[1], state[2], state[3] = filled, t, row, in_vain
    return verdict
