"""Inputs of a run: data or shards, ids and users first; S, chosen now or earlier; and shards to write."""

import contextlib
import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from coowned import codec
from coowned.attribution.examples import AttributedExamples
from coowned.attribution.graph import AttributionGraph
from coowned.attribution.tables import types_are_inferred
from coowned.attribution.user_keys import UserKeyRules, UserMapping
from coowned.certificate import ContributionCertificate, certificate_for
from coowned.content.derived import KeptArrays
from coowned.content.splits import graphs_of_splits, split_examples, train_graph
from coowned.errors import CertificateMismatchError, ConfigError, InputError
from coowned.files import cache_folder
from coowned.mechanism.registry import mechanism_class, training_kind_for
from coowned.models.model import Task
from coowned.models.registry import IN_FILES
from coowned.runs.config import GIVEN, TrainConfig
from coowned.runs.records import GraphSummary
from coowned.runs.run_folder import code_digest
from coowned.selection import selection_files, shards
from coowned.selection.registry import selector_class
from coowned.selection.selection_files import write_selection
from coowned.selection.selector import Schedule, Selection
from coowned.selection.shards import CERTIFICATE, SUMMARY, Manifest, check_splits, read_shards


def read_examples(config: TrainConfig) -> AttributedExamples:
    """Reads ids and users; content stays in its files where they are Parquet.

    Guarantees:
      - Shards give the run that the data give, bit for bit.   (test_shards_train_the_same_bits)
    """
    folder = shards_folder(config)
    if folder is None:
        return config.source().read(content=False)
    rows = read_shards(folder)
    check_splits(rows.manifest, config.splits)
    text = (folder / CERTIFICATE).read_bytes()
    certificate = ContributionCertificate.from_json(text, name=str(folder / CERTIFICATE))
    rows.manifest.check_certificate(certificate.graph_digest, certificate.selection_digest)
    about = {"columns_read": certificate.columns_read, "num_unprotected_users": certificate.num_unprotected_users}
    graph = dataclasses.replace(rows.graph, **about)
    keys = graph.user_keys
    assert keys is not None
    numbers = np.arange(len(keys) + 1)
    return AttributedExamples(
        graph=graph,
        payload=pa.table({}),
        user_mapping=UserMapping(keys, numbers, numbers[:-1], keys),
        key_rules=UserKeyRules(),
        content=rows.content,
    )


def shards_folder(config: TrainConfig) -> Path | None:
    """Returns the folder of shards to train on, if there is one."""
    return None if config.data.shards is None else config.folder / config.data.shards


def summary_of(
    config: TrainConfig,
    graph: AttributionGraph,
    selected: Selection | Schedule,
    certificate: ContributionCertificate,
) -> GraphSummary | None:
    """Returns counts of the whole graph, which shards bring along; None where they do not."""
    folder = shards_folder(config)
    if folder is None:
        return GraphSummary.of(graph, selected)
    with contextlib.suppress(FileNotFoundError):
        found = codec.decode_json(GraphSummary, (folder / SUMMARY).read_bytes(), name=str(folder / SUMMARY))
        if not found.agrees_with(certificate):
            raise CertificateMismatchError(
                f"{folder / SUMMARY}: counts of another S than that of the shards; remove it"
            )
        return found
    return None


def kept_arrays(config: TrainConfig, task: Task) -> KeptArrays | None:
    """Returns the cache of arrays derived from shards; None if caching is off, or for custom code."""
    folder, cache = shards_folder(config), cache_folder()
    if folder is None or cache is None or config.model.kind in IN_FILES:
        return None
    files = {name: hashlib.sha256(content).hexdigest() for name, content in task.files.items()}
    made_from = [Manifest.read(folder).digest, config.model.settings(), files, code_digest()]
    return KeptArrays(cache / "derived", codec.checksum(made_from))


Select = Callable[[AttributionGraph], Selection | Schedule]


def read_selection(
    path: str | os.PathLike[str],
    graph: AttributionGraph,
    *,
    splits: Sequence[float] | None = None,
    certificate: str | os.PathLike[str] | None = None,
) -> Selection | Schedule:
    """Reads the S that `coowned select` wrote, here or on Spark, and checks its certificate: for `co.fit(selector=)`.

    Guarantees:
      - S and its claim come back as they were written.   (test_read_selection)
      - An S or a graph that its certificate does not describe is refused.   (test_read_selection_refuses)

    Args:
      path: S.parquet, a file or a folder.
      graph: of the data that S was selected from.
      splits: of `coowned select --splits`, where S was selected from the train split alone.
      certificate: of S; by default S.certificate.json next to it.
    """
    if splits is not None:
        graph = train_graph(graph, splits)
    claim = _certificate(path, certificate)
    claim.check_graph(graph.digest)
    return _read(path, graph, claim)


def select_for(config: TrainConfig, everybody: AttributionGraph) -> Select | None:
    """Returns a function that reads the S a configuration names; None if the configuration chooses one."""
    if config.selection.path is None:
        return None
    return functools.partial(_from_file, config.folder / config.selection.path, everybody, config.splits)


def of_train_split(
    selected: Selection | Schedule, everybody: AttributionGraph, splits: Sequence[float], graph: AttributionGraph
) -> Selection | Schedule:
    """Returns the part of S that is in the train split; raises an error for an S of another graph.

    Args:
      everybody: the graph of all examples.
      graph: of their train split.
    """
    if selected.graph_digest == graph.digest:
        return selected
    if isinstance(selected, Schedule) or selected.graph_digest != everybody.digest:
        raise InputError(
            "S was selected from another graph; pass a Selection from all examples, or a Selection or Schedule from "
            "the train split"
        )
    train, groups = split_examples(everybody, splits)["train"], selected.groups
    own = Selection.from_copies(graph, selected.copies[train], None if groups is None else groups[train])
    return dataclasses.replace(own, user_bounds=selected.user_bounds)


def with_shape(config: TrainConfig, selected: Selection | Schedule) -> TrainConfig:
    """Returns the configuration with the omitted keys of `[mechanism]` that a given S determines."""
    scheduled = isinstance(selected, Schedule)
    shape = {"kind": training_kind_for(schedules=scheduled, groups=not scheduled and selected.groups is not None)}
    shape |= {"batch_size": selected.batch_size, "iterations": selected.iterations} if scheduled else {}
    missing = config.left_out.get("mechanism", ())
    chosen = {key: value for key, value in shape.items() if key in missing}
    return config.with_keys({"mechanism": chosen}) if chosen else config


def _from_file(
    path: Path, everybody: AttributionGraph, splits: Sequence[float], graph: AttributionGraph
) -> Selection | Schedule:
    claim = _certificate(path)
    if claim.graph_digest == graph.digest:
        return _read(path, graph, claim)
    if claim.graph_digest != everybody.digest or claim.schedule is not None:
        listed = ",".join(f"{share:g}" for share in splits)
        raise CertificateMismatchError(
            f"{path}: S was selected from another graph than that of the train split; select it with `--splits "
            f"{listed}` from the same data, with the same users, aliases and unprotected users"
        )
    return of_train_split(_read(path, everybody, claim), everybody, splits, graph)


def _certificate(
    path: str | os.PathLike[str], certificate: str | os.PathLike[str] | None = None
) -> ContributionCertificate:
    if "://" in os.fspath(path):
        raise InputError(f"{path}: an S is read from files of this machine; copy it and its certificate here first")
    if not Path(path).exists():
        raise InputError(f"{path}: no such file or folder; give the S that `coowned select` wrote")
    file = Path(certificate_for(os.fspath(path)) if certificate is None else certificate)
    try:
        text = file.read_bytes()
    except OSError as error:
        raise InputError(
            f"{file}: the certificate of S cannot be read ({error.strerror}); keep it next to S"
        ) from error
    return ContributionCertificate.from_json(text, name=str(file))


def _read(
    path: str | os.PathLike[str], graph: AttributionGraph, claim: ContributionCertificate
) -> Selection | Schedule:
    """Reads S on the certificate's graph, and raises an error unless a recount confirms the certificate."""
    found, origin = selection_files.read_selection(path, graph), claim.origin
    made = {"selector": dict(origin.selector), "seed": origin.seed, "proven_optimal": origin.proven_optimal}
    if isinstance(found, Selection):
        made["upper_bound"] = origin.upper_bound
    found = dataclasses.replace(found, **made)
    claim.check(graph, found)
    return found


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


def choose(config: TrainConfig, graph: AttributionGraph) -> Selection | Schedule:
    """Selects from the train split's graph as the configuration says."""
    if config.selection.selector == GIVEN:
        raise ConfigError(
            "[selection] has no selector: S was passed to `fit`, or is in a file; give it again, or choose a selector"
        )
    assert config.selection.selector is not None
    kind, chosen = selector_class(config.selection.selector), config.selection
    settings = dict(chosen.settings)
    fields = {field.name for field in dataclasses.fields(kind)}
    schedules = "min_separation" in fields
    word = config.mechanism.kind or "dp-sgd"  # which is chosen for selectors that make no schedule
    mechanism = mechanism_class(word)
    if schedules != mechanism.needs_schedule or (mechanism.needs_groups and "num_groups" not in fields):
        wanted = "greedy-min-separation" if mechanism.needs_schedule else "greedy"
        wanted = "cyclic-groups" if mechanism.needs_groups else wanted
        raise ConfigError(
            f"[selection] selector {chosen.selector!r} does not work with [mechanism] kind {word!r}; use {wanted!r}"
        )
    if schedules:
        _, batch_size, iterations = config.mechanism.sizes
        separation = config.mechanism.min_separation
        if separation is None and "contribution_bound" in fields:
            raise ConfigError(f"[mechanism] min_separation is needed with [selection] selector {chosen.selector!r}")
        if separation is None:
            alike = {key: settings[key] for key in ("ties", "unattributed") if key in settings}
            from coowned.selection.greedy_min_separation import max_min_separation

            separation = max_min_separation(
                graph, batch_size=batch_size, iterations=iterations, seed=chosen.seed, **alike
            )
        settings |= {"batch_size": batch_size, "iterations": iterations, "min_separation": separation}
    if config.user_bounds is not None:
        settings["contribution_bounds"] = config.user_bounds
    return kind(**settings).select(graph, seed=chosen.seed)
