"""Selection of the held-out part for a covered evaluation: from the graph alone, with few examples per user."""

import bisect

from coowned.attribution.graph import AttributionGraph
from coowned.selection.greedy import Greedy
from coowned.selection.selector import Selection

KEPT = 0.9  # of what the best bound keeps


def select_held_out(graph: AttributionGraph, *, contribution_bound: int | None = None, seed: int = 0) -> Selection:
    """Returns a set in which nobody is in more than `contribution_bound` copies.

    By default the bound is the smallest that keeps 90% of what the best one keeps: the next smaller one keeps less.
    More copies of a user need more noise, fewer leave fewer examples to count on.

    Guarantees:
      - The default keeps 90%, and the next smaller bound does not.   (test_the_default_bound_keeps_enough)

    Args:
      graph: of the test split.
      seed: public; breaks ties in the order.

    Example:
      >>> graph = AttributionGraph.from_users_per_example([[0], [0], [0], [1], [2], [3]])
      >>> select_held_out(graph, contribution_bound=1).size, select_held_out(graph).size
      (4, 6)
    """
    if contribution_bound is not None:
        return Greedy(contribution_bound=contribution_bound).select(graph, seed=seed)
    most = int(graph.examples_per_user.max(initial=1))
    everything = Greedy(contribution_bound=most).select(graph, seed=seed).size
    bounds = range(1, most + 1)
    found = bisect.bisect_left(
        bounds,
        True,
        key=lambda bound: Greedy(contribution_bound=bound).select(graph, seed=seed).size >= KEPT * everything,
    )
    return Greedy(contribution_bound=bounds[min(found, len(bounds) - 1)]).select(graph, seed=seed)
