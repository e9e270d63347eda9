"""Selections cached on disk, so that the same selection on the same graph is computed once."""

import hashlib

from coowned.attribution.graph import AttributionGraph
from coowned.cache import cache_folder, cached
from coowned.selection.selector import Selection, Selector


def select_once(graph: AttributionGraph, selector: Selector[Selection], *, seed: int = 0) -> Selection:
    """Like `selector.select`, but reads back an earlier selection for this graph, these settings and this seed.

    Guarantees:
      - A cached selection equals a fresh one; a damaged file is recomputed.   (test_kept_selection_equals_a_fresh_one)
    What it is not: a proof. A selection read back is certified like any other.
    """
    if cache_folder() is None:  # a graph's digest takes long
        return selector.select(graph, seed=seed)
    # The digest does not depend on the order of rows, the stored indices do: the ids in row order are part of the key.
    order = hashlib.sha256()
    if graph.example_ids is not None:
        for value in graph.example_ids.buffers():
            order.update(b"none" if value is None else memoryview(value))
    return cached(
        "selections",
        {"graph": graph.digest, "order": order.hexdigest(), "seed": seed, **selector.settings()},
        lambda: selector.select(graph, seed=seed),
        encode=Selection.to_json,
        decode=lambda text: Selection.from_json(text, graph),
    )
