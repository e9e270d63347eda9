"""Contribution bounding as a packing problem, with reductions that preserve the optimum.

    maximize the sum of profit * copies, with integers 0 <= copies <= limit for every item,
    and at most capacity[u] copies that contain user u, for every user.

An item is an example; where first copies are worth more than further ones, an example is two items with equal users.
Peeling repeats two rules until neither applies, as Karp and Sipser do for matchings:

  - A user all of whose undecided copies fit under the capacity left is free: no constraint any more.
  - An item with one user that is not free, and no less profit than any other item, is selected as often as it fits: any
    solution can give up another copy of that user for it. A user without capacity left is full: all other items of
    theirs are out.

What is left is the core. Users who were set free have price 0, full ones the highest profit, and prices of the core's
users make the dual bound of the whole problem equal to that of the core plus what was selected.
"""

import dataclasses
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from coowned.attribution.graph import take_rows, transpose
from coowned.progress import Progress
from coowned.selection.order import OrderedRows

_njit = numba.njit(cache=True, nogil=True)

UNDECIDED, FREE, FULL = 0, 1, 2
"""States of a user: constrains; all undecided copies fit; no capacity is left."""


class Packing(NamedTuple):
    """A packing problem; the first `num_first` items are first copies, of the highest profit.

    A named tuple, which compiled loops accept as one argument.
    """

    indptr: npt.NDArray[np.int64]  # (num_items + 1,)
    users: npt.NDArray[Any]  # (num_pairs,) users of each item, increasing
    user_indptr: npt.NDArray[np.int64]  # (num_users + 1,)
    items: npt.NDArray[Any]  # (num_pairs,) items of each user, increasing
    capacity: npt.NDArray[np.int32]  # (num_users,) most copies that contain each user
    num_first: int
    first_limit: int  # most copies of each of the first num_first items
    first_profit: float
    limit: int  # most copies of each of the others
    profit: float

    @property
    def num_items(self) -> int:
        return len(self.indptr) - 1

    @property
    def num_users(self) -> int:
        return len(self.user_indptr) - 1

    @property
    def num_pairs(self) -> int:
        return len(self.users)

    def limits(self) -> npt.NDArray[np.int32]:
        """Returns the most copies of each item, shape (num_items,)."""
        limits = np.full(self.num_items, self.limit, np.int32)
        limits[: self.num_first] = self.first_limit
        return limits

    def with_further_copies(self, *, distinct_weight: float) -> "Packing":
        """Returns a problem with two items per example: first copies are worth 1 + distinct_weight, further ones 1."""
        indptr = np.concatenate([self.indptr, self.indptr[1:] + self.num_pairs])
        users = np.concatenate([self.users, self.users])
        kind = np.int32 if 2 * self.num_items < 2**31 else np.int64
        items = np.empty(len(users), kind)
        return self._replace(
            indptr=indptr,
            users=users,
            user_indptr=transpose(indptr, users, self.num_users, items),
            items=items,
            num_first=self.num_items,
            first_limit=1,
            first_profit=1.0 + distinct_weight,
            limit=self.first_limit - 1,
            profit=1.0,
        )


def pack(rows: OrderedRows, num_users: int, *, contribution_bound: int | npt.NDArray[np.int32], limit: int) -> Packing:
    """Builds the packing problem of a graph's rows, one item per row; rows without users are never selected.

    `contribution_bound` is one for all users, or (num_users,) one for each.
    """
    items = np.empty(len(rows.users), rows.examples.dtype)
    return Packing(
        indptr=rows.indptr,
        users=rows.users,
        user_indptr=transpose(rows.indptr, rows.users, num_users, items),
        items=items,
        capacity=np.broadcast_to(contribution_bound, num_users).astype(np.int32),
        num_first=len(rows.examples),
        first_limit=limit,
        first_profit=1.0,
        limit=limit,
        profit=1.0,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peeled:
    taken: npt.NDArray[np.int32]  # (num_items,) copies selected so far
    user_state: npt.NDArray[np.int8]  # (num_users,) UNDECIDED, FREE or FULL
    core: Packing
    core_items: npt.NDArray[Any]  # (core.num_items,) which items are in the core
    core_users: npt.NDArray[Any]  # (core.num_users,) which users are in the core


def peel(packing: Packing, progress: Progress) -> Peeled:
    """Takes and excludes all items that the two rules decide.

    If the second rule has a choice, the first item is selected. Items of the core are sorted by their number of users,
    users by their number of items and then by a hash of which items these are, so that the core, and everything
    computed from it, does not depend on the labels of users.
    """
    progress(0.0, "peeling")
    state = _peel(packing, np.empty(0, packing.items.dtype), np.empty(0, np.int32))
    progress(0.4, "building the core")
    undecided = np.flatnonzero(state.decided == 0).astype(packing.items.dtype)
    first, further = np.split(undecided, [np.searchsorted(undecided, packing.num_first)])
    # Rows of equal length are adjacent, so that branch prediction works in loops over them.
    core_items = np.concatenate([rows[_by_length(state.open_users[rows])] for rows in (first, further)])
    indptr = np.zeros(len(core_items) + 1, np.int64)
    np.cumsum(state.open_users[core_items], out=indptr[1:])
    core_users = np.flatnonzero(state.user_state == UNDECIDED).astype(packing.users.dtype)
    label = np.full(packing.num_users, -1, packing.users.dtype)
    label[core_users] = np.arange(len(core_users), dtype=label.dtype)
    users = np.empty(int(indptr[-1]), packing.users.dtype)
    _core_rows(packing.indptr, packing.users, core_items, label, users)
    progress(0.7, "grouping the core by user")
    items = np.empty(len(users), core_items.dtype)
    user_indptr = transpose(indptr, users, len(core_users), items)
    keys = np.empty(len(core_users), np.uint64)
    user_keys(user_indptr, items, state.room[core_users], keys)
    by_key = np.argsort(keys, kind="stable")
    rows = by_key[_by_length(np.diff(user_indptr)[by_key])]
    user_indptr, sorted_items = take_rows(user_indptr, items, rows)
    transpose(user_indptr, sorted_items, len(core_items), users)
    core_users = core_users[rows]
    core = packing._replace(
        indptr=indptr,
        users=users,
        user_indptr=user_indptr,
        items=sorted_items,
        capacity=state.room[core_users],
        num_first=len(first),
    )
    return Peeled(
        taken=state.taken, user_state=state.user_state, core=core, core_items=core_items, core_users=core_users
    )


def _by_length(lengths: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Sorts stably, in linear time since numpy sorts 16-bit integers by counting."""
    return np.argsort(np.minimum(lengths, 2**16 - 1).astype(np.uint16), kind="stable")


def fill(packing: Packing, order: npt.NDArray[Any], wanted: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Selects copies of each item greedily in this order, peeling after every selection.

    The first walk along the order takes wanted[item] copies where they fit, the second one, the third all that fit.
    Nothing can be added to the result.
    """
    return _peel(packing, order, wanted).taken


def _peel(packing: Packing, order: npt.NDArray[Any], wanted: npt.NDArray[np.int32]) -> "State":
    state = State(
        taken=np.zeros(packing.num_items, np.int32),
        decided=np.zeros(packing.num_items, np.int8),
        open_users=np.empty(packing.num_items, np.int32),
        room=packing.capacity.copy(),
        demand=np.empty(packing.num_users, np.int64),
        user_state=np.zeros(packing.num_users, np.int8),
        user_stack=np.empty(packing.num_users, packing.users.dtype),
        single=np.empty(packing.num_first, packing.items.dtype),
    )
    _apply_rules(packing, state, order, wanted)
    return state


# ---- compiled loops, none of which allocates a large array -----------------------------------------------------------


class State(NamedTuple):
    """The decisions on a packing problem so far; `room` starts as the capacity, the others are filled in."""

    taken: np.ndarray  # (num_items,) int32 copies selected
    decided: np.ndarray  # (num_items,) int8 whether the item is decided
    open_users: np.ndarray  # (num_items,) int32 users neither free nor full, for undecided items
    room: np.ndarray  # (num_users,) int32 capacity left
    demand: np.ndarray  # (num_users,) int64 undecided copies that contain each user
    user_state: np.ndarray  # (num_users,) int8
    user_stack: np.ndarray  # (num_users,) queue of freed users whose items are not updated yet
    single: np.ndarray  # (num_first,) items for the second rule


@_njit
def user_keys(user_indptr, items, capacity, keys):
    """Writes keys[u]: the first item of u in the upper half, a hash of all items and the capacity of u in the lower.

    SplitMix64's multiplier and a shift are hash enough to sort by; nothing is proven from it. Users with equal keys
    have the same items and capacity (but for a collision): their order changes nothing.
    """
    for u in range(keys.shape[0]):
        mixed = np.uint64(0x9E3779B97F4A7C15) ^ (np.uint64(capacity[u]) << np.uint64(32))
        for j in range(user_indptr[u], user_indptr[u + 1]):
            mixed = (mixed ^ np.uint64(items[j])) * np.uint64(0xBF58476D1CE4E5B9)
            mixed ^= mixed >> np.uint64(29)
        first = np.uint64(0)
        if user_indptr[u] < user_indptr[u + 1]:
            first = np.uint64(items[user_indptr[u]])
        keys[u] = (first << np.uint64(32)) | (mixed >> np.uint64(32))


@_njit
def _core_rows(indptr, users, core_items, label, core_users):
    """Copies the rows of the core, without users whose label is -1."""
    at = 0
    for row in range(core_items.shape[0]):
        item = core_items[row]
        for p in range(indptr[item], indptr[item + 1]):
            u = label[users[p]]
            if u >= 0:
                core_users[at] = u
                at += 1


@_njit
def _limit(packing, item):
    return packing.first_limit if item < packing.num_first else packing.limit


@_njit
def _exclude_items(packing, state, u, waiting):
    """Marks u as full and the undecided items of u as out; users this sets free go on the stack; returns its height."""
    state.user_state[u] = FULL
    for j in range(packing.user_indptr[u], packing.user_indptr[u + 1]):
        item = packing.items[j]
        if state.decided[item]:
            continue
        state.decided[item] = 1
        left = _limit(packing, item) - state.taken[item]
        for p in range(packing.indptr[item], packing.indptr[item + 1]):
            v = packing.users[p]
            if state.user_state[v] == UNDECIDED:
                state.demand[v] -= left
                if state.demand[v] <= state.room[v]:
                    state.user_state[v] = FREE
                    state.user_stack[waiting] = v
                    waiting += 1
    return waiting


@_njit
def _take(packing, state, item, count, waiting):
    """Takes up to `count` copies of an item, as many as fit; returns the height of the stack."""
    begin, end = packing.indptr[item], packing.indptr[item + 1]
    for p in range(begin, end):
        if state.user_state[packing.users[p]] == UNDECIDED:
            count = min(count, state.room[packing.users[p]])
    if count <= 0:
        return waiting
    state.taken[item] += count
    if state.taken[item] == _limit(packing, item):
        state.decided[item] = 1
    for p in range(begin, end):
        u = packing.users[p]
        if state.user_state[u] == UNDECIDED:
            state.room[u] -= count
            state.demand[u] -= count
    for p in range(begin, end):
        u = packing.users[p]
        if state.user_state[u] == UNDECIDED and state.room[u] == 0:
            waiting = _exclude_items(packing, state, u, waiting)
    return waiting


@_njit
def _apply_rules(packing, state, order, wanted):
    """Runs the two rules to the end; where they are stuck, decides by `order`; stops where that is empty.

    Items for the second rule wait in single[front:back]; those found while a batch of them is worked off,
    single[back:found], are sorted before they are the next batch, so that nothing depends on the order in which users
    are visited. Users on their stack are free already but still counted in open_users; they are handled first, so that
    the counts are right whenever an item is looked at.
    """
    waiting, found = _start(packing, state)  # users on their stack, items for the second rule
    front = back = walk = at = 0
    while True:
        if waiting > 0:  # the first rule
            waiting -= 1
            found = _leave_out(packing, state, state.user_stack[waiting], found)
            continue
        if front == back and back < found:
            back = found
            state.single[front:back].sort()
        if front < back:  # the second rule
            item = state.single[front]
            front += 1
            if not state.decided[item]:
                waiting = _take(packing, state, item, packing.first_limit - state.taken[item], waiting)
            continue
        front = back = found = 0
        while at < order.shape[0] and state.decided[order[at]]:
            at += 1
        if at < order.shape[0]:
            item = order[at]
            at += 1
            most = _limit(packing, item)
            count = wanted[item] if walk == 0 else (1 if walk == 1 else most)
            waiting = _take(packing, state, item, min(count, most - state.taken[item]), waiting)
        else:
            walk += 1
            at = 0
            if walk == 3 or order.shape[0] == 0:
                break


@_njit
def _start(packing, state):
    """Counts users and copies; returns (free users on their stack, items with one user that wait in `single`)."""
    waiting = found = 0
    for item in range(packing.indptr.shape[0] - 1):
        state.open_users[item] = packing.indptr[item + 1] - packing.indptr[item]
        if state.open_users[item] == 0:
            state.decided[item] = 1
        elif state.open_users[item] == 1 and item < packing.num_first:
            state.single[found] = item
            found += 1
    for u in range(packing.user_indptr.shape[0] - 1):
        total = np.int64(0)
        for j in range(packing.user_indptr[u], packing.user_indptr[u + 1]):
            total += _limit(packing, packing.items[j])
        state.demand[u] = total
        if total <= state.room[u]:
            state.user_state[u] = FREE
            state.user_stack[waiting] = u
            waiting += 1
    for u in range(packing.user_indptr.shape[0] - 1):
        if state.room[u] == 0 and state.user_state[u] == UNDECIDED:  # who may be in none has no room from the start
            waiting = _exclude_items(packing, state, u, waiting)
    return waiting, found


@_njit
def _leave_out(packing, state, u, found):
    """Counts a free user out of their undecided items; returns how many items wait in `single` now."""
    for j in range(packing.user_indptr[u], packing.user_indptr[u + 1]):
        item = packing.items[j]
        if state.decided[item]:
            continue
        state.open_users[item] -= 1
        if state.open_users[item] == 0:
            state.taken[item] = _limit(packing, item)
            state.decided[item] = 1
        elif state.open_users[item] == 1 and item < packing.num_first:
            state.single[found] = item
            found += 1
    return found
