"""Writes the rows that training needs, with their content, as shards: locally, in one pass over the data."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from coowned.attribution.examples import AttributedExamples
from coowned.attribution.tables import types_are_inferred
from coowned.certificate import ContributionCertificate
from coowned.content.splits import graphs_of_splits, split_examples
from coowned.runs.records import GraphSummary
from coowned.selection import shards
from coowned.selection.selection_files import write_selection
from coowned.selection.selector import Schedule, Selection


def write_shards(
    folder: Path,
    examples: AttributedExamples,
    splits: Sequence[float],
    selected: Selection | Schedule,
    certificate: ContributionCertificate,
) -> shards.Manifest:
    """Writes S, its certificate, and the selected and held-out rows to a new folder; the manifest comes last.

    Guarantees:
      - Content of examples that are in no split but train and were not selected is not read.
        (test_unselected_content_is_not_read)
      - What is read back is what was written.   (test_shards_are_read_back)
      - An S with bounds of single users is refused.   (test_bounds_of_single_users_are_refused)
    Cost: one pass over the content; memory for ids, users and some rows.

    Args:
      folder: it does not exist.
      selected: from the train split's graph.
    """
    shards.refuse_bounds(individual=certificate.tiers is not None)
    parts = split_examples(examples.graph, splits)
    graph = graphs_of_splits(examples.graph, parts)["train"]
    chosen = np.flatnonzero(selected.copies)
    rows = np.sort(np.concatenate([parts["train"][chosen], parts["validation"], parts["test"]]))
    kept = examples.graph.subgraph(rows)
    folder.mkdir(mode=0o700)
    files, counts = shards.write_shards(folder, examples.pieces(rows), kept)
    write_selection(folder / shards.SELECTION, graph, selected)
    (folder / shards.CERTIFICATE).write_text(certificate.to_json() + "\n", encoding="utf-8")
    (folder / shards.SUMMARY).write_text(GraphSummary.of(graph, selected).to_json(), encoding="utf-8")
    train, validation, test = (float(share) for share in splits)
    manifest = shards.Manifest(
        graph_digest=certificate.graph_digest,
        selection_digest=certificate.selection_digest,
        splits=(train, validation, test),
        types_inferred=types_are_inferred(examples.schema),
        groups=shards.GROUPS,
        shard_rows=counts,
        absent=shards.absent_rows(graph, chosen, kept.num_users - len(np.unique(kept.users))),
        files=files,
    )
    (folder / shards.MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    return shards.Manifest.read(folder)
