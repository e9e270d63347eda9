"""Splits by a hash of the id, before anything is selected, and the held-out examples of a covered evaluation.

The hash reads the id alone, so the split is the same whatever the order of the rows; it is sound as long as ids are not
made from content. Only the train part's graph is selected from: validation and test examples are outside S and outside
every guarantee, except that of a covered evaluation, whose examples are selected from the graph alone.
"""

import bisect
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from coowned.attribution.graph import AttributionGraph
from coowned.attribution.identifiers import utf8_buffers
from coowned.selection.selector import Selection
from coowned.selection.shards import SPLIT_SEED, SPLITS, hash_ids, split_ends
from coowned.selection.user_bounds import UserBounds

USUAL_FRACTIONS = (0.8, 0.1, 0.1)
TEXT_FRACTIONS = (0.9, 0.05, 0.05)


def split_examples(
    graph: AttributionGraph, fractions: Sequence[float] = USUAL_FRACTIONS
) -> dict[str, npt.NDArray[np.int64]]:
    """Returns the examples of each part, increasing.

    Guarantees:
      - An example's part depends on its id and the fractions alone.   (test_split_depends_on_the_id_alone)
      - Every example is in exactly one part; the sizes are as asked, up to chance.   (test_split_sizes)

    Example:
      >>> graph = AttributionGraph.from_users_per_example([[0]] * 1000)
      >>> [len(part) for part in split_examples(graph).values()]
      [791, 111, 98]
    """
    ends = split_ends(fractions)
    offsets, data = utf8_buffers(graph.example_ids, length=graph.num_examples)
    hashes = hash_ids(offsets, data, graph.num_examples, SPLIT_SEED)
    part = (hashes >= np.uint64(ends[0])).astype(np.uint8) + (hashes >= np.uint64(ends[1]))  # (num_examples,)
    return {name: np.flatnonzero(part == number) for number, name in enumerate(SPLITS)}


def train_graph(graph: AttributionGraph, fractions: Sequence[float] = USUAL_FRACTIONS) -> AttributionGraph:
    """Returns the graph of the train part, from which S is selected."""
    return graph.subgraph(split_examples(graph, fractions)["train"])


def graphs_of_splits(
    graph: AttributionGraph, splits: Mapping[str, npt.NDArray[np.int64]]
) -> dict[str, AttributionGraph]:
    """Returns the graph of each split; examples that are not in memory belong to the train split."""
    parts = {name: graph.subgraph(part) for name, part in splits.items()}
    return parts | {"train": dataclasses.replace(parts["train"], absent=graph.absent)}


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
    from coowned.selection.greedy import Greedy

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
