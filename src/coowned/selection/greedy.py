"""Greedy contribution bounding, every example at most once."""

import dataclasses
from typing import ClassVar

from coowned.selection.passes import PassSelector


@dataclasses.dataclass(frozen=True, kw_only=True)
class Greedy(PassSelector):
    """Takes examples with the fewest users first, each once, where every user of it still has room.

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
