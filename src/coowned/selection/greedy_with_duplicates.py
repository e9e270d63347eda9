"""Greedy contribution bounding that may repeat examples."""

import dataclasses
from typing import ClassVar

from coowned.selection.greedy import PassSelector


@dataclasses.dataclass(frozen=True, kw_only=True)
class GreedyWithDuplicates(PassSelector):
    """Takes examples with the fewest users first, pass after pass, until a pass adds nothing.

    The first pass is `Greedy`; every later one adds a second, third, ... copy of what the pass before it took,
    where every user still has room. Every copy counts toward the bound.

    Guarantees:
      - No user is in more than `contribution_bound` selected copies.   (test_check_suite)
      - No copy of any example could be added without breaking that.   (test_check_suite)
      - Exactly the paper's sequential result in the shared order.   (test_equals_the_paper)
      - An example without users is never repeated.   (test_unattributed)

    Cost: O(pairs * contribution_bound) time at most, each pass over what the last one took; O(pairs)
    memory in addition to the graph.
    Not to be confused with `GreedyMinSeparation`, which orders batches for DP-MF.

    Example:
      >>> from coowned import AttributionGraph
      >>> graph = AttributionGraph.from_users_per_example([[0], [1, 2], [0, 2]])
      >>> GreedyWithDuplicates(contribution_bound=3).select(graph, seed=0).copies
      array([2, 2, 1], dtype=int32)

    References: Ganesh et al. (2025), Algorithm 3, https://arxiv.org/abs/2503.03622
    """

    name: ClassVar[str] = "greedy-with-duplicates"
    bound_is_enough: ClassVar[bool] = True
    _repeats: ClassVar[bool] = True
