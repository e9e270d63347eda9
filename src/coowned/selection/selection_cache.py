"""Selections kept on disk, so that the same choice on the same graph is made once."""

import contextlib
import hashlib
import json

import coowned
from coowned.attribution.graph import AttributionGraph
from coowned.cache import cache_folder, keep
from coowned.errors import CoownedError
from coowned.selection.selector import Progress, Selection, Selector


def select_once(
    graph: AttributionGraph, selector: Selector[Selection], *, seed: int = 0, progress: Progress | None = None
) -> Selection:
    """Like `selector.select`, but a selection made before for this graph, these settings and this seed is read back.

    Guarantees:
      - A kept selection equals a fresh one; a spoilt file is made anew.   (test_kept_selection_equals_a_fresh_one)
    What it is not: a proof. A selection read back is certified like any other.
    """
    folder = cache_folder()
    if folder is None:
        return selector.select(graph, seed=seed, progress=progress)
    file = folder / "selections" / f"{_key(graph, selector, seed)}.json"
    with contextlib.suppress(CoownedError, OSError, UnicodeDecodeError):
        return Selection.from_json(file.read_text(encoding="utf-8"), graph)
    selection = selector.select(graph, seed=seed, progress=progress)
    keep(file, selection.to_json())
    return selection


def _key(graph: AttributionGraph, selector: Selector[Selection], seed: int) -> str:
    # The digest does not depend on the order of rows, the stored indices do: the ids in row order are part of the key.
    order = hashlib.sha256()
    if graph.example_ids is not None:
        for value in graph.example_ids.buffers():
            order.update(b"none" if value is None else memoryview(value))
    settings = {
        "graph": graph.digest,
        "order": order.hexdigest(),
        "seed": seed,
        "version": coowned.__version__,
        **selector.settings(),
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]
