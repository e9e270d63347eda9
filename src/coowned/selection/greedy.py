"""Greedy contribution bounding, every example at most once, and the passes shared with other selectors."""

import dataclasses
from typing import Any, ClassVar

import numba
import numpy as np
import numpy.typing as npt

from coowned.attribution.graph import AttributionGraph
from coowned.progress import Progress
from coowned.selection.order import OrderedRows, in_ranges, ordered_rows, part
from coowned.selection.selector import BoundedSelector, Selection

_njit = numba.njit(cache=True, nogil=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassSelector(BoundedSelector):
    """Base class of selectors that pass over the examples in some order and select what fits."""

    _repeats: ClassVar[bool] = False  # whether further passes add further copies

    def _walk(self, rows: OrderedRows) -> npt.NDArray[Any] | None:
        """Returns the rows with users in the order of a pass, to be overwritten; None for their own order."""
        return None

    def _select(self, graph: AttributionGraph, seed: int, progress: Progress) -> Selection:
        rows = ordered_rows(graph, seed=seed, ties=self.ties, progress=part(progress, 0.0, 0.5))
        return self._selection(graph, seed, self.run_passes(rows, self.capacities(graph), part(progress, 0.5, 1.0)))

    def run_passes(
        self, rows: OrderedRows, capacities: npt.NDArray[np.int32], progress: Progress
    ) -> npt.NDArray[np.int32]:
        """Returns the (num_examples,) copies of each example after one pass, or after passes until one adds nothing.

        capacities (num_users,): the most copies that each user may be in.

        A row that a pass leaves out has a user without room, and room never grows: the next pass visits only what this
        one took.
        """
        walk = self._walk(rows)
        copies = np.zeros(len(rows.examples), np.int32)
        narrow = np.min_scalar_type(capacities.max(initial=0))  # a small array stays in the cache
        room = capacities.astype(narrow)  # (num_users,) copies each user may still be in
        number = 0
        remaining = len(rows.attributed)
        while remaining and (self._repeats or number == 0):
            number += 1
            kept = 0
            message = f"pass {number} over {remaining} examples"
            report = part(progress, 1 - 0.5 ** (number - 1), 1 - 0.5**number)  # the number of passes is not known
            if walk is None:
                walk = np.empty(remaining, rows.examples.dtype)
                first = rows.num_unattributed
                state = np.array([first, 1, 0, 0])  # next row, its size, its first pair, rows selected
                for _, end in in_ranges(remaining, report, message):
                    _first_pass(rows.counts, rows.users, state, first + end, room, walk)
                kept = int(state[3])
            else:
                for begin, end in in_ranges(remaining, report, message):
                    kept = greedy_pass(walk, rows.indptr, rows.users, begin, end, kept, room)
            copies[rows.examples[walk[:kept]]] = number  # every pass before this one took these too
            remaining = kept
        return copies


@dataclasses.dataclass(frozen=True, kw_only=True)
class Greedy(PassSelector):
    """Selects examples with the fewest users first, each once, if all of its users have room.

    Guarantees:
      - No user is in more than `contribution_bound` selected examples.   (test_check_suite)
      - No example could be added without breaking that.   (test_check_suite)
      - Exactly the paper's sequential result in the shared order.   (test_equals_the_paper)

    Cost: O(pairs) time, O(pairs) memory in addition to the graph.
    What it is not: the largest such set; `Priced` comes nearer and proves how near. It prefers examples with few
    users; `BiasMitigating` trades size for more users per example.

    Example:
      >>> from coowned import AttributionGraph
      >>> graph = AttributionGraph.from_users_per_example([[0, 1], [0], [1], [2, 3]])
      >>> Greedy(contribution_bound=1).select(graph, seed=0).copies
      array([0, 1, 1, 1], dtype=int32)

    References: Ganesh et al. (2025), Algorithm 2, https://arxiv.org/abs/2503.03622
    """

    name: ClassVar[str] = "greedy"
    bound_is_enough: ClassVar[bool] = True


# ---- compiled passes -------------------------------------------------------------------------------------------------


# Each works on a range, so that the caller can report progress and be interrupted between two ranges. None allocates
# a large array: numpy allocates large arrays on huge pages, which scattered access needs.


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
def _first_pass(counts, users, state, end, room, taken):
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
    """Takes each row of walk[begin:end] whose users all have room, and compacts the others to walk[kept:].

    room (num_users,) unsigned: copies each user may still be in. Returns how many rows are kept now, so that the next
    pass, which can only take what this one took, walks those alone. Since kept <= begin, nothing unread is lost.
    """
    for i in range(begin, end):
        row = walk[i]
        if _take(users, indptr[row], indptr[row + 1], room):
            walk[kept] = row
            kept += 1
    return kept
