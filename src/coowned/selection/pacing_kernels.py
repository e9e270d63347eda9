"""The compiled inner loop of `PricedMinSeparation`."""

from typing import NamedTuple

import numba
import numpy as np


class Pacing(NamedTuple):
    """A schedule under way: the copies that are not in a batch yet, and what their users still have before them."""

    indptr: np.ndarray  # (copies + 1,)
    users: np.ndarray  # (pairs,) users of each copy
    left: np.ndarray  # (copies,) int64 the first ones are not placed yet, in the order in which ties are broken
    remaining: np.ndarray  # (num_users,) int32 copies of each user that are not placed yet
    free_from: np.ndarray  # (num_users,) int32 the first batch each user may be in again
    urgency: np.ndarray  # (copies,) int32 of each copy left, in the current batch
    order: np.ndarray  # (copies,) int64 the copies left that may enter the current batch, most urgent first


@numba.njit(cache=True, nogil=True)
def fill_batch(pacing, num_left, step, min_separation, batch):
    """Fills a batch with the copies whose users have most of theirs still to come; returns (filled, copies left).

    A copy may enter if all its users are free. Its urgency is the most copies that one of its users has left.
    """
    indptr, users, left, remaining, free_from, urgency, order = pacing
    most = 0
    for i in range(num_left):
        urgency[i] = _urgency(indptr, users, left[i], remaining, free_from, step)
        most = max(most, urgency[i])
    first = np.zeros(most + 2, np.int64)  # where each urgency begins in the order, the largest first
    for i in range(num_left):
        if urgency[i] >= 0:
            first[most - urgency[i] + 1] += 1
    for level in range(most + 1):
        first[level + 1] += first[level]
    can_enter = first[most + 1]
    for i in range(num_left):
        if urgency[i] >= 0:
            level = most - urgency[i]
            order[first[level]] = i
            first[level] += 1
    filled = 0
    for position in range(can_enter):
        if filled == batch.shape[0]:
            break
        i = order[position]
        copy = left[i]
        if _urgency(indptr, users, copy, remaining, free_from, step) < 0:  # a user has entered meanwhile
            continue
        for pair in range(indptr[copy], indptr[copy + 1]):
            free_from[users[pair]] = step + min_separation
            remaining[users[pair]] -= 1
        batch[filled] = copy
        filled += 1
        left[i] = -1
    kept = 0
    for i in range(num_left):
        if left[i] >= 0:
            left[kept] = left[i]
            kept += 1
    return filled, kept


@numba.njit(inline="always")
def _urgency(indptr, users, copy, remaining, free_from, step):
    """The most copies that one of the users has left; -1 if one of them is not free."""
    most = 0
    for pair in range(indptr[copy], indptr[copy + 1]):
        if free_from[users[pair]] > step:
            return -1
        most = max(most, remaining[users[pair]])
    return most
