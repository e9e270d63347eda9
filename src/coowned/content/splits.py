"""The split into train, validation and test by a hash of the example's id, before anything is selected.

The hash reads the id alone, so the split is the same whatever the order of the rows; it is sound as long as ids are not
made from content. Only the train part's graph is selected from: validation and test examples are outside S and outside
every guarantee.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from coowned.attribution.graph import AttributionGraph
from coowned.attribution.identifiers import utf8_buffers
from coowned.selection.shards import SPLIT_SEED, SPLITS, hash_ids, split_ends

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
