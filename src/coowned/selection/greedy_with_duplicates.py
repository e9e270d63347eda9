"""Greedy contribution bounding that may repeat examples."""

import dataclasses
from typing import ClassVar

from coowned import validate
from coowned.attribution.graph import AttributionGraph
from coowned.selection.order import ordered_rows, part
from coowned.selection.passes import MOST_COPIES, run_passes
from coowned.selection.selector import OrderedSelector, Progress, Selection


@dataclasses.dataclass(frozen=True, kw_only=True)
class GreedyWithDuplicates(OrderedSelector[Selection]):
    """Takes examples with the fewest users first, pass after pass, until a pass adds nothing.

    The first pass is `Greedy`; every later one adds a second, third, ... copy of what the pass before it took,
    where every user still has room. Every copy counts toward the bound.

    Guarantees:
      - No user is in more than `contribution_bound` selected copies.   (test_check_suite)
      - No copy of any example could be added without breaking that.   (test_check_suite)
      - Exactly the paper's sequential result in the shared order.   (test_equals_the_paper)
      - An example without users is never repeated.   (test_unattributed)

    Cost: O(pairs * contribution_bound) time at most, each pass over what the last one took; O(pairs)
    memory besides the graph.
    Not to be confused with `GreedyMinSeparation`, which orders batches for DP-MF.

    Example:
      >>> graph = AttributionGraph.from_users_per_example([[0], [1, 2], [0, 2]])
      >>> GreedyWithDuplicates(contribution_bound=3).select(graph, seed=0).copies
      array([2, 2, 1], dtype=int32)

    References: Ganesh et al. (2025), Algorithm 3, https://arxiv.org/abs/2503.03622
    """

    contribution_bound: int

    name: ClassVar[str] = "greedy-with-duplicates"

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.integer(at_least=1, at_most=MOST_COPIES, contribution_bound=self.contribution_bound)

    def _select(self, graph: AttributionGraph, seed: int, progress: Progress) -> Selection:
        rows = ordered_rows(graph, seed=seed, ties=self.ties, progress=part(progress, 0.0, 0.5))
        copies = run_passes(
            rows,
            None,
            graph.num_users,
            contribution_bound=self.contribution_bound,
            allow_duplicates=True,
            progress=part(progress, 0.5, 1.0),
        )
        if self.unattributed == "keep":
            copies[rows.unattributed] = 1
        return Selection(graph=graph, copies=copies, selector=self.settings(), seed=seed)
