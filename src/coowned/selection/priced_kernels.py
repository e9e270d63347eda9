"""The compiled inner loops of `Priced`.

Those of the linear program work on a range of rows and add up each row in its own order, so that the result does not
depend on how the rows are divided among threads. No fastmath: sums must not be reordered. Arrays are float32 to halve
what is moved through memory; what is proven is summed in integers.
Index arrays of the linear program come as unsigned views: a signed index costs a test for "from the end" every time.
"""

from typing import NamedTuple

import numba
import numpy as np

_njit = numba.njit(cache=True, nogil=True)

_ONE, _TWO = np.uint64(1), np.uint64(2)
ROWS_PER_SUM = 1 << 16  # rows added up into one partial sum, whatever the number of threads


class Items(NamedTuple):
    """The items of the linear program; copies are counted in parts of the largest limit."""

    indptr: np.ndarray  # (num_items + 1,) uint64
    users: np.ndarray  # (num_pairs,) unsigned
    num_first: np.uint64  # items that are first copies
    first_profit: np.float32
    first_limit: np.float32
    profit: np.float32  # of the other items
    limit: np.float32
    steps: np.ndarray  # (most users + 1,) float32 the step of an item by its number of users


class Users(NamedTuple):
    indptr: np.ndarray  # (num_users + 1,) uint64
    items: np.ndarray  # (num_pairs,) unsigned
    capacity: np.ndarray  # (num_users,) int32
    scale: np.float32  # a copy as a part of the largest limit
    steps: np.ndarray  # (most items + 1,) float32 the step of a user by the number of items


# ---- the linear program ----------------------------------------------------------------------------------------------


@_njit
def move_items(begin, end, items, weight, prices, anchor, values, reflected):
    """One step of the items: up by what they are worth above their users' prices, back into [0, limit].

    reflected: twice the point reached less the point left. values: the mean of that and the anchor, by weight.
    """
    nothing, two, rest = np.float32(0.0), np.float32(2.0), np.float32(1.0) - weight
    start = items.indptr[begin]
    for item in range(np.uint64(begin), np.uint64(end)):
        stop = items.indptr[item + _ONE]
        worth = items.first_profit if item < items.num_first else items.profit
        most = items.first_limit if item < items.num_first else items.limit
        if stop - start == _TWO:  # most rows, and two reads at once are faster than a loop
            worth -= prices[items.users[start]] + prices[items.users[start + _ONE]]
        else:
            for p in range(start, stop):
                worth -= prices[items.users[p]]
        value = values[item]
        reached = min(max(value + items.steps[stop - start] * worth, nothing), most)
        reflection = two * reached - value
        reflected[item] = reflection
        values[item] = weight * reflection + rest * anchor[item]
        start = stop


@_njit
def move_users(begin, end, users, weight, reflected, anchor, prices, reached_prices):
    """One step of the users: prices go up where demand exceeds the capacity, and never below 0."""
    nothing, two, rest = np.float32(0.0), np.float32(2.0), np.float32(1.0) - weight
    start = users.indptr[begin]
    for u in range(np.uint64(begin), np.uint64(end)):
        stop = users.indptr[u + _ONE]
        excess = -users.scale * np.float32(users.capacity[u])
        for j in range(start, stop):
            excess += reflected[users.items[j]]
        price = prices[u]
        reached = max(price + users.steps[stop - start] * excess, nothing)
        reached_prices[u] = reached
        prices[u] = weight * (two * reached - price) + rest * anchor[u]
        start = stop


@_njit
def reduced_profits(begin, end, items, prices, reduced):
    """reduced[item]: its profit less its users' prices."""
    for item in range(np.uint64(begin), np.uint64(end)):
        worth = items.first_profit if item < items.num_first else items.profit
        for p in range(items.indptr[item], items.indptr[item + _ONE]):
            worth -= prices[items.users[p]]
        reduced[item] = worth


# ---- the exact bound -------------------------------------------------------------------------------------------------


@_njit
def exact_item_sums(indptr, users, prices, one, sums):
    """sums[i]: the sum of max(0, one - prices of its users) over the i-th block's rows that have users, exactly.

    Prices are in [0, one] and one is 2^30, so a row of up to 2^32 users and a block of 2^16 rows stay below 2^63.
    """
    for block in range(sums.shape[0]):
        total = np.int64(0)
        for item in range(block * ROWS_PER_SUM, min((block + 1) * ROWS_PER_SUM, indptr.shape[0] - 1)):
            if indptr[item] == indptr[item + 1]:
                continue
            worth = np.int64(one)
            for p in range(indptr[item], indptr[item + 1]):
                worth -= prices[users[p]]
            if worth > 0:
                total += worth
        sums[block] = total


# ---- swaps -----------------------------------------------------------------------------------------------------------


@_njit
def loads(indptr, users, copies, room):
    """Takes the copies of every item off its users' room, which starts as their capacity."""
    for item in range(copies.shape[0]):
        if copies[item]:
            for p in range(indptr[item], indptr[item + 1]):
                room[users[p]] -= copies[item]


@_njit
def _next(state):
    """Returns the next number of a xorshift generator: three shifts for a choice that only has to be repeatable."""
    state ^= state << np.uint64(13)
    state ^= state >> np.uint64(7)
    state ^= state << np.uint64(17)
    return state


@_njit
def _pick(state, count):
    """True with probability 1 / count: keeping the last of which it is true draws one of count evenly."""
    return (state >> np.uint64(33)) % np.uint64(count) == 0


@_njit
def _limit(packing, item):
    return packing.first_limit if item < packing.num_first else packing.limit


@_njit
def _add_at(packing, u, room, copies):
    """Adds every copy of an item of u that fits; returns how many."""
    added = 0
    for j in range(packing.user_indptr[u], packing.user_indptr[u + 1]):
        if room[u] == 0:
            break
        item = packing.items[j]
        count = _limit(packing, item) - copies[item]
        if count <= 0:
            continue
        for p in range(packing.indptr[item], packing.indptr[item + 1]):
            count = min(count, room[packing.users[p]])
            if count == 0:
                break
        if count > 0:
            copies[item] += count
            added += count
            for p in range(packing.indptr[item], packing.indptr[item + 1]):
                room[packing.users[p]] -= count
    return added


@_njit
def _only_full_user(packing, item, room):
    """The only user of an item who has no room; -1 if there is none or more than one."""
    full = -1
    for p in range(packing.indptr[item], packing.indptr[item + 1]):
        if room[packing.users[p]] == 0:
            if full >= 0:
                return -1
            full = packing.users[p]
    return full


@_njit
def swap_round(packing, reduced, prices, margin, steps, state, room, copies):
    """One round of swaps from every user who has room although their price is above `margin`; returns copies gained.

    A swap adds an item of a user with room, whose other users have room but one, and drops an item of that one: the
    size is the same, and the users of what was dropped have room. Where another item now fits it is added: one was
    dropped, two were added. Otherwise the walk continues from one of those users, up to `steps` swaps. Items whose
    reduced profit is beyond the margin are surely out (or in) and are left so. `packing` is a `packing.Packing`.
    """
    gained = 0
    for start in range(packing.user_indptr.shape[0] - 1):
        if room[start] == 0 or prices[start] <= margin:
            continue
        u = start
        dropped = -1
        for _ in range(steps):
            add, full, state = _item_to_add(packing, u, dropped, reduced, margin, state, room, copies)
            if add < 0:
                break
            dropped, state = _item_to_drop(packing, full, add, reduced, margin, state, copies)
            if dropped < 0 or dropped == add:
                break
            added = _exchange(packing, add, dropped, room, copies)
            gained += added
            if added:
                break
            u, state = _next_user(packing, dropped, prices, margin, state, room)
            if u < 0:
                break
    return gained


@_njit
def _item_to_add(packing, u, dropped, reduced, margin, state, room, copies):
    """Draws an item of u with one full user; returns (item or -1, that user, the generator's state)."""
    choices = 0
    add, full = -1, -1
    for j in range(packing.user_indptr[u], packing.user_indptr[u + 1]):
        item = packing.items[j]
        if copies[item] >= _limit(packing, item) or item == dropped or reduced[item] < -margin:
            continue
        other = _only_full_user(packing, item, room)
        if other >= 0:
            choices += 1
            state = _next(state)
            if _pick(state, choices):
                add, full = item, other
    return add, full, state


@_njit
def _item_to_drop(packing, u, add, reduced, margin, state, copies):
    """Draws an item of u that may be given for `add`; returns (item or -1, the generator's state)."""
    choices = 0
    drop = -1
    for j in range(packing.user_indptr[u], packing.user_indptr[u + 1]):
        item = packing.items[j]
        # A first copy is never given for a further one: it may be worth more.
        worth_more = item < packing.num_first and add >= packing.num_first
        if copies[item] == 0 or reduced[item] > margin or worth_more:
            continue
        choices += 1
        state = _next(state)
        if _pick(state, choices):
            drop = item
    return drop, state


@_njit
def _exchange(packing, add, drop, room, copies):
    """Adds one item, drops the other, and adds what then fits; returns how many copies that was."""
    indptr, users = packing.indptr, packing.users
    copies[add] += 1
    copies[drop] -= 1
    for p in range(indptr[add], indptr[add + 1]):
        room[users[p]] -= 1
    for p in range(indptr[drop], indptr[drop + 1]):
        room[users[p]] += 1
    added = 0
    for p in range(indptr[drop], indptr[drop + 1]):
        if room[users[p]] > 0:
            added += _add_at(packing, users[p], room, copies)
    return added


@_njit
def _next_user(packing, dropped, prices, margin, state, room):
    """Draws a user of what was dropped who has room and a price; returns (user or -1, the generator's state)."""
    choices = 0
    u = -1
    for p in range(packing.indptr[dropped], packing.indptr[dropped + 1]):
        other = packing.users[p]
        if room[other] > 0 and prices[other] > margin:
            choices += 1
            state = _next(state)
            if _pick(state, choices):
                u = other
    return u, state
