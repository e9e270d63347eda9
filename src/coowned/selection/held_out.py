"""Selection of the held-out part for a covered evaluation: from the graph alone, with few examples per user."""

import bisect
import dataclasses

from coowned.attribution.graph import AttributionGraph
from coowned.selection.greedy import Greedy
from coowned.selection.selector import Selection
from coowned.selection.user_bounds import UserBounds

KEPT = 0.9  # of what the best bound keeps


def select_held_out(
    graph: AttributionGraph,
    *,
    contribution_bound: int | None = None,
    user_bounds: UserBounds | None = None,
    seed: int = 0,
) -> Selection:
    """Returns a set in which nobody is in more than `contribution_bound` copies.

    By default the bound is the smallest that keeps 90% of what the best one keeps: the next smaller one keeps less.
    More copies of a user need more noise, fewer leave fewer examples to count on.

    Guarantees:
      - The default keeps 90%, and the next smaller bound does not.   (test_the_default_bound_keeps_enough)
      - Nobody is in more copies than their own bound allows, and nobody who opted out in any.
        (test_nobody_is_in_more_copies_than_their_own_bound)

    Args:
      graph: of the test split.
      user_bounds: those of the training set, where people have bounds of their own. `certify` recounts them.
      seed: public; breaks ties in the order.

    Example:
      >>> graph = AttributionGraph.from_users_per_example([[0], [0], [0], [1], [2], [3]])
      >>> select_held_out(graph, contribution_bound=1).size, select_held_out(graph).size
      (4, 6)
    """

    def held_to(bound: int) -> Selection:
        if user_bounds is None:
            return Greedy(contribution_bound=bound).select(graph, seed=seed)
        others = min(bound, user_bounds.others)
        greedy = Greedy(contribution_bound=others, contribution_bounds=user_bounds.at_most(bound))
        return dataclasses.replace(greedy.select(graph, seed=seed), user_bounds=user_bounds)

    if contribution_bound is not None:
        return held_to(contribution_bound)
    most = int(graph.examples_per_user.max(initial=1))
    everything = held_to(most).size
    bounds = range(1, most + 1)
    found = bisect.bisect_left(bounds, True, key=lambda bound: held_to(bound).size >= KEPT * everything)
    return held_to(bounds[min(found, len(bounds) - 1)])
