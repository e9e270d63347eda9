"""The compiled inner loops of `packing`, nothing else. None allocates a large array."""

import numba
import numpy as np

_njit = numba.njit(cache=True, nogil=True)


@_njit
def user_keys(user_indptr, items, capacity, keys):
    """keys[u]: the first item of u in the upper half, a hash of all her items and her capacity in the lower.

    Users with equal keys have the same items and capacity (but for a collision): their order changes nothing.
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
def _throw_out(u, indptr, users, user_indptr, items, num_first, first_limit, limit,
               taken, decided, room, demand, user_state, user_stack, waiting):  # fmt: skip
    """Marks u as full and her undecided items as out; users this sets free are put on the stack."""
    user_state[u] = 2
    for j in range(user_indptr[u], user_indptr[u + 1]):
        item = items[j]
        if decided[item]:
            continue
        decided[item] = 1
        left = (first_limit if item < num_first else limit) - taken[item]
        for p in range(indptr[item], indptr[item + 1]):
            v = users[p]
            if user_state[v] == 0:
                demand[v] -= left
                if demand[v] <= room[v]:
                    user_state[v] = 1
                    user_stack[waiting] = v
                    waiting += 1
    return waiting


@_njit
def peel(indptr, users, user_indptr, items, num_first, first_limit, limit, order, wanted,
         taken, decided, open_users, room, demand, user_state, user_stack, single):  # fmt: skip
    """Runs the two rules to the end; where they are stuck, decides by `order`; stops where that is empty.

    Items for the second rule wait in single[front:back]; those found while a batch of them is worked off,
    single[back:found], are sorted before they are the next batch, so that nothing depends on the order in which users
    are visited. Users on their stack are free already (state 1) but still counted in open_users; they are handled
    first, so that the counts are right whenever an item is looked at.
    """
    num_items, num_users = indptr.shape[0] - 1, user_indptr.shape[0] - 1
    waiting = 0  # users on their stack
    front = back = found = 0
    for item in range(num_items):
        open_users[item] = indptr[item + 1] - indptr[item]
        if open_users[item] == 0:
            decided[item] = 1
        elif open_users[item] == 1 and item < num_first:
            single[found] = item
            found += 1
    for u in range(num_users):
        total = np.int64(0)
        for j in range(user_indptr[u], user_indptr[u + 1]):
            total += first_limit if items[j] < num_first else limit
        demand[u] = total
        if total <= room[u]:
            user_state[u] = 1
            user_stack[waiting] = u
            waiting += 1
    walk, at = 0, 0
    while True:
        if waiting > 0:  # the first rule
            waiting -= 1
            u = user_stack[waiting]
            for j in range(user_indptr[u], user_indptr[u + 1]):
                item = items[j]
                if decided[item]:
                    continue
                open_users[item] -= 1
                if open_users[item] == 0:
                    taken[item] = first_limit if item < num_first else limit
                    decided[item] = 1
                elif open_users[item] == 1 and item < num_first:
                    single[found] = item
                    found += 1
            continue
        if front == back and back < found:
            back = found
            single[front:back].sort()
        if front < back:  # the second rule
            item = single[front]
            front += 1
            if decided[item]:
                continue
            count = first_limit - taken[item]
        else:
            front = back = found = 0
            while at < order.shape[0] and decided[order[at]]:
                at += 1
            if at == order.shape[0]:
                walk += 1
                at = 0
                if walk == 3 or order.shape[0] == 0:
                    break
                continue
            item = order[at]
            at += 1
            most = first_limit if item < num_first else limit
            count = wanted[item] if walk == 0 else (1 if walk == 1 else most)
            count = min(count, most - taken[item])
        for p in range(indptr[item], indptr[item + 1]):
            if user_state[users[p]] == 0:
                count = min(count, room[users[p]])
        if count <= 0:
            continue
        taken[item] += count
        if taken[item] == (first_limit if item < num_first else limit):
            decided[item] = 1
        for p in range(indptr[item], indptr[item + 1]):
            u = users[p]
            if user_state[u] == 0:
                room[u] -= count
                demand[u] -= count
        for p in range(indptr[item], indptr[item + 1]):
            u = users[p]
            if user_state[u] == 0 and room[u] == 0:
                waiting = _throw_out(
                    u, indptr, users, user_indptr, items, num_first, first_limit, limit,
                    taken, decided, room, demand, user_state, user_stack, waiting,
                )  # fmt: skip
