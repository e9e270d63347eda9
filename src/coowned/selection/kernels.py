"""The compiled inner loops of the greedy selectors (those of the order are in `order_kernels`).

Every loop works on a range, so that the caller can report progress and be interrupted between two ranges, and none
allocates a large array: numpy allocates large arrays on huge pages, which scattered access needs.
"""

from typing import NamedTuple

import numba
import numpy as np

_njit = numba.njit(cache=True, nogil=True)

# ---- walks that respect a contribution bound -------------------------------------------------------------------------


@numba.njit(inline="always")
def _take(users, first, last, room):
    """Selects one copy of a row, users[first:last], if all of them have room; returns whether they had."""
    for p in range(first, last):
        if room[users[p]] == 0:
            return False
    for p in range(first, last):
        room[users[p]] -= 1
    return True


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
            if _take(users, pair, pair + size, room):
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
        if _take(users, indptr[row], indptr[row + 1], room):
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
                if latest > t:
                    continue
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


# ---- groups of users -------------------------------------------------------------------------------------------------


@numba.njit(inline="always")
def _root_of(parent, a):
    """The root of a in a forest of parents, whose paths are halved on the way."""
    while parent[a] != a:
        parent[a] = parent[parent[a]]
        a = parent[a]
    return a


@_njit
def join_users(indptr, users, weights, most):
    """(num_users,) clusters: the users of each row, in order, are joined unless that would weigh more than `most`."""
    parent, total = np.arange(weights.shape[0]), weights.copy()
    for row in range(indptr.shape[0] - 1):
        for p in range(indptr[row] + 1, indptr[row + 1]):
            a, b = _root_of(parent, users[indptr[row]]), _root_of(parent, users[p])
            if a != b and total[a] + total[b] <= most:
                parent[max(a, b)] = min(a, b)
                total[min(a, b)] = total[a] + total[b]
    for u in range(parent.shape[0]):
        parent[u] = _root_of(parent, u)
    return parent


@_njit
def assign_rest(indptr, users, groups):
    """Gives each user without a group (-1) that of the first row whose other users are all in one group."""
    for row in range(indptr.shape[0] - 1):
        group = -1
        for p in range(indptr[row], indptr[row + 1]):
            found = groups[users[p]]
            if found >= 0:
                group = found if group in (-1, found) else -2
        if group >= 0:
            for p in range(indptr[row], indptr[row + 1]):
                groups[users[p]] = group


@_njit
def fill_lightest(order, weights, held, groups):
    """Puts each of `order` in the group of which held (groups,) is least so far."""
    for i in order:
        lightest = np.argmin(held)
        groups[i] = lightest
        held[lightest] += weights[i]


@_njit
def move_users(indptr, users, user_indptr, rows, weights, most, groups, held):
    """Moves each user, in turn, to the group that most of their rows would be whole in, while it weighs at most `most`.

    user_indptr, rows: the rows of each user. Returns how many users were moved; groups and held are changed.
    """
    moved = 0
    whole = np.zeros(held.shape[0], np.int64)  # rows of the user whose other users are all in this group
    for u in range(weights.shape[0]):
        for j in range(user_indptr[u], user_indptr[u + 1]):
            group = _group_of_others(indptr, users, rows[j], u, groups)
            if group >= 0:
                whole[group] += 1
        own, best = groups[u], groups[u]
        for j in range(user_indptr[u], user_indptr[u + 1]):
            group = _group_of_others(indptr, users, rows[j], u, groups)
            if group >= 0 and whole[group] > whole[best] and held[group] + weights[u] <= most:
                best = group
        for j in range(user_indptr[u], user_indptr[u + 1]):
            group = _group_of_others(indptr, users, rows[j], u, groups)
            if group >= 0:
                whole[group] = 0
        if best != own:
            groups[u] = best
            held[own] -= weights[u]
            held[best] += weights[u]
            moved += 1
    return moved


@_njit
def _group_of_others(indptr, users, row, u, groups):
    """The group of all users of a row but u; -1 if they are in several or there are none."""
    group = -1
    for p in range(indptr[row], indptr[row + 1]):
        if users[p] != u:
            if group >= 0 and groups[users[p]] != group:
                return -1
            group = groups[users[p]]
    return group
