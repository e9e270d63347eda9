"""Greedy passes over a graph's examples: what `Greedy`, `GreedyWithDuplicates` and `BiasMitigating` share."""

import dataclasses
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from coowned.attribution.graph import AttributionGraph
from coowned.progress import Progress
from coowned.selection import kernels
from coowned.selection.order import OrderedRows, in_ranges, ordered_rows, part
from coowned.selection.selector import BoundedSelector, Selection


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassSelector(BoundedSelector):
    """Base class of selectors that pass over the examples in some order and select what fits."""

    _repeats: ClassVar[bool] = False  # whether further passes add further copies

    def _walk(self, rows: OrderedRows) -> npt.NDArray[Any] | None:
        """All rows with users in the order in which a pass visits them, to be overwritten; None for their own order."""
        return None

    def _select(self, graph: AttributionGraph, seed: int, progress: Progress) -> Selection:
        rows = ordered_rows(graph, seed=seed, ties=self.ties, progress=part(progress, 0.0, 0.5))
        return self._selection(graph, seed, self.run_passes(rows, graph.num_users, part(progress, 0.5, 1.0)))

    def run_passes(self, rows: OrderedRows, num_users: int, progress: Progress) -> npt.NDArray[np.int32]:
        """(num_examples,) copies of each example after one pass, or after passes until one adds nothing.

        A row that a pass leaves out has a user without room, and room never grows: the next pass visits only what this
        one took.
        """
        walk = self._walk(rows)
        copies = np.zeros(len(rows.examples), np.int32)
        narrow = np.min_scalar_type(self.contribution_bound)  # a small array stays in the cache
        room = np.full(num_users, self.contribution_bound, narrow)  # (num_users,) copies each user may still be in
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
                    kernels.first_pass(rows.counts, rows.users, state, first + end, room, walk)
                kept = int(state[3])
            else:
                for begin, end in in_ranges(remaining, report, message):
                    kept = kernels.greedy_pass(walk, rows.indptr, rows.users, begin, end, kept, room)
            copies[rows.examples[walk[:kept]]] = number  # every pass before this one took these too
            remaining = kept
        return copies
