"""The compiled inner loops of `packing`. None allocates a large array.

`packing` is a `packing.Packing`, whose fields the kernels read.
"""

from typing import NamedTuple

import numba
import numpy as np

_njit = numba.njit(cache=True, nogil=True)

UNDECIDED, FREE, FULL = 0, 1, 2
"""States of a user: constrains; all undecided copies fit; no capacity is left."""


class State(NamedTuple):
    """What has been decided of a packing problem so far; `room` starts as the capacity, the others are filled in."""

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
def core_rows(indptr, users, core_items, label, core_users):
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
def peel(packing, state, order, wanted):
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
