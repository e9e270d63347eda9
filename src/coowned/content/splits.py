"""Train, validation and test: by a hash of the example's id, before anything is selected.

The hash reads the id alone, so the split is the same whatever the order of the rows; it is sound as long as ids are not
made from content. Only the train part's graph is selected from: validation and test examples are outside S and outside
every guarantee.
"""

from collections.abc import Sequence

import numba
import numpy as np
import numpy.typing as npt

from coowned import validate
from coowned.attribution.graph import AttributionGraph
from coowned.attribution.identifiers import utf8_buffers
from coowned.errors import InputError
from coowned.selection.order_kernels import hash_seed, hash_text

SPLITS = ("train", "validation", "test")
USUAL_FRACTIONS = (0.8, 0.1, 0.1)
TEXT_FRACTIONS = (0.9, 0.05, 0.05)
_SEED = 5_765_402_168_410_517  # a stream of its own: the split must not follow the selectors' order of ties


def split_examples(
    graph: AttributionGraph, fractions: Sequence[float] = USUAL_FRACTIONS
) -> dict[str, npt.NDArray[np.int64]]:
    """The examples of each part, increasing.

    Guarantees:
      - An example's part depends on its id and the fractions alone.   (test_split_depends_on_the_id_alone)
      - Every example is in exactly one part; the sizes are as asked, up to chance.   (test_split_sizes)

    Example:
      >>> graph = AttributionGraph.from_users_per_example([[0]] * 1000)
      >>> [len(part) for part in split_examples(graph).values()]
      [791, 111, 98]
    """
    if len(fractions) != len(SPLITS):
        raise InputError(f"splits must be three numbers, one each for {', '.join(SPLITS)}, not {len(fractions)}")
    for fraction in fractions:
        validate.in_range(0, 1, splits=fraction)
    if abs(sum(fractions) - 1) > 1e-9 or fractions[0] == 0:
        raise InputError(f"splits must add up to 1, the first above 0, not {list(fractions)}")
    ends = [min(2**64 - 1, int(2.0**53 * edge) << 11) for edge in np.cumsum(fractions)[:2]]
    offsets, data = utf8_buffers(graph.example_ids, length=graph.num_examples)
    hashes = hash_ids(offsets, data, graph.num_examples, _SEED)
    part = (hashes >= np.uint64(ends[0])).astype(np.uint8) + (hashes >= np.uint64(ends[1]))  # (num_examples,)
    return {name: np.flatnonzero(part == number) for number, name in enumerate(SPLITS)}


def hash_ids(
    offsets: npt.NDArray[np.int64], data: npt.NDArray[np.uint8], count: int, seed: int
) -> npt.NDArray[np.uint64]:
    """(count,) 64-bit hashes of texts in a buffer; every seed is a stream of its own."""
    return _hash_ids(offsets, data, count, hash_seed(np.int64(seed)))


@numba.njit(cache=True, nogil=True)
def _hash_ids(offsets, data, count, key):
    hashes = np.empty(count, np.uint64)
    for i in range(count):
        hashes[i] = hash_text(data, offsets[i], offsets[i + 1], key)
    return hashes
