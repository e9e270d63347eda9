"""What changes in S when one person leaves: for every person, by following the changes along a fixed order.

The order of the examples that stay must not depend on who leaves. That of greedy does not; that of `BiasMitigating`
does, since its two lists alternate by position.
"""

import heapq
from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

import coowned as co


class Walk(NamedTuple):
    """A graph whose examples lie in the order in which they are visited."""

    indptr: np.ndarray  # (examples + 1,)
    users: np.ndarray  # (pairs,) of each example
    user_indptr: np.ndarray  # (users + 1,)
    examples: np.ndarray  # (pairs,) of each user, in order


class Chosen(NamedTuple):
    """S, and how full everybody was at each visit."""

    taken: np.ndarray  # (examples,) bool
    before: np.ndarray  # (pairs,) of the user's examples that counted before this one
    slot: np.ndarray  # (pairs,) where the pair is in `Walk.examples`


class Left(NamedTuple):
    """What one person's leaving does, for each person who was asked about."""

    own: npt.NDArray[np.int64]  # copies that leave with them
    changed: npt.NDArray[np.int64]  # copies of others that come or go
    gained: npt.NDArray[np.int64]  # those that come, less those that go


def walk_of(graph: co.AttributionGraph, order: npt.ArrayLike) -> Walk:
    """Returns the walk over these examples in this order."""
    walked = graph.subgraph(order)
    return Walk(walked.indptr, walked.users, *walked.by_user)


def leave(walk: Walk, bound: int, people: npt.NDArray[np.int64], *, first_ones: bool = False) -> tuple[Chosen, Left]:
    """Selects, and returns what changes when each of these people leaves with their examples.

    first_ones: take an example if it is among the first `bound` of each of its users, whatever else is taken. By
    default it is taken if nobody in it has `bound` examples that were taken before: greedy.

    Cost: what changes, and what has to be asked about it; seconds for a million people.
    """
    chosen = Chosen(
        np.zeros(len(walk.indptr) - 1, np.bool_),
        np.zeros(len(walk.users), np.int64),
        np.zeros(len(walk.users), np.int64),
    )
    _select(walk, bound, first_ones, chosen)
    left = Left(*(np.zeros(len(people), np.int64) for _ in Left._fields))
    _leave(walk, chosen, bound, first_ones, people, left)
    return chosen, left


@numba.njit(cache=True)
def _select(walk, bound, first_ones, chosen):
    """Fills `chosen`."""
    seen = np.zeros(walk.user_indptr.shape[0] - 1, np.int64)
    counted = np.zeros_like(seen)
    for example in range(walk.indptr.shape[0] - 1):
        fits = True
        for p in range(walk.indptr[example], walk.indptr[example + 1]):
            user = walk.users[p]
            chosen.before[p] = counted[user]
            chosen.slot[p] = walk.user_indptr[user] + seen[user]
            seen[user] += 1
            fits &= counted[user] < bound
        chosen.taken[example] = fits
        if fits or first_ones:
            for p in range(walk.indptr[example], walk.indptr[example + 1]):
                counted[walk.users[p]] += 1


@numba.njit(cache=True)
def _leave(walk, chosen, bound, first_ones, people, left):
    """Fills `left`: visits in order whatever a change can reach."""
    num_examples = walk.indptr.shape[0] - 1
    gone, queued = np.full(num_examples, -1, np.int64), np.full(num_examples, -1, np.int64)
    shift = np.zeros(walk.user_indptr.shape[0] - 1, np.int64)  # of each user's count, up to the example in hand
    for number in range(people.shape[0]):
        person = people[number]
        waiting, touched = [np.int64(0)], [np.int64(0)]
        waiting.pop()
        for s in range(walk.user_indptr[person], walk.user_indptr[person + 1]):
            example = np.int64(walk.examples[s])
            gone[example] = number
            if chosen.taken[example] or first_ones:
                queued[example] = number
                waiting.append(example)  # increasing: a heap
        while waiting:
            example = heapq.heappop(waiting)
            leaves = gone[example] == number
            taken = not leaves
            for p in range(walk.indptr[example], walk.indptr[example + 1]):
                taken &= chosen.before[p] + shift[walk.users[p]] < bound
            change = np.int64(taken) - np.int64(chosen.taken[example])
            if leaves:
                left.own[number] -= change
            else:
                left.changed[number] += abs(change)
                left.gained[number] += change
            counts = -np.int64(leaves) if first_ones else change
            for p in range(walk.indptr[example], walk.indptr[example + 1]):
                user = np.int64(walk.users[p])
                if counts != 0:
                    shift[user] += counts
                    touched.append(user)
                following = chosen.slot[p] + 1
                if user == person or shift[user] == 0 or following == walk.user_indptr[user + 1]:
                    continue
                if first_ones and chosen.before[p] + shift[user] >= bound:
                    continue  # neither was nor is any later one among the first
                later = np.int64(walk.examples[following])
                if queued[later] != number:
                    queued[later] = number
                    heapq.heappush(waiting, later)
        for user in touched:
            shift[user] = 0
