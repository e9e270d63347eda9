"""An S chosen earlier: read from a file, checked, and cut to the train split that a run selects from."""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from coowned.attribution.graph import AttributionGraph
from coowned.certificate import ContributionCertificate, certificate_for
from coowned.content.splits import split_examples, train_graph
from coowned.errors import CertificateMismatchError, InputError
from coowned.mechanism.registry import training_kind_for
from coowned.runs.config import TrainConfig
from coowned.selection import selection_files
from coowned.selection.selector import Schedule, Selection

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
