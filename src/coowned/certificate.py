"""The contribution certificate: what a selection really contains, recounted independently.

Selectors use compiled kernels; this file counts with numpy alone, so that a bug of theirs cannot hide here.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np

import coowned
from coowned import codec
from coowned.attribution import digest as digests
from coowned.attribution.graph import AttributionGraph
from coowned.attribution.identifiers import is_text, utf8_buffers
from coowned.errors import CertificateMismatchError, InputError, UncertifiableError
from coowned.progress import counted
from coowned.selection.selector import Schedule, Selection

FORMAT = "coowned-certificate-2"  # 1 had digests of version 1
_PAIRS_AT_ONCE = 1 << 24
MOST_COPIES = 1 << 24  # of one user; the histogram lists every number up to the largest
_REMEDY = "certify the selection again"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CountedGraph:
    """The graph that a selection was counted on."""

    graph_digest: str
    num_examples: int
    num_users: int
    num_unprotected_users: int  # users excluded from the attribution, for whom nothing is promised
    columns_read: tuple[str, ...]  # what ids and attribution were derived from; the selection saw nothing else


@dataclasses.dataclass(frozen=True, kw_only=True)
class CountedCopies:
    """What was counted of a set or a schedule."""

    contribution_bound: int  # the most selected copies that contain one user (for a schedule, their participations)
    size: int  # copies in S
    num_distinct: int  # examples that have at least one
    most_copies_of_one_example: int  # what bounds the example-level guarantee
    num_copies_without_users: int  # selected copies that no protected user is part of
    copies_per_user: tuple[int, ...]  # how many users are in 0, 1, … copies: a statistic of the graph
    selection_digest: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class CountedSchedule:
    """What was counted of a schedule; None for a set."""

    # The most batches b such that any b consecutive ones together hold at most one copy that contains a given user; 0
    # if one batch contains two; the number of batches if no user takes part twice.
    min_separation: int | None
    iterations: int | None
    batch_size: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CountedGroups:
    """What was counted of a set divided into groups, no user being in two; None if there are none."""

    groups: tuple[int, ...] | None = dataclasses.field(repr=False)  # one group per selected example in input order
    group_sizes: tuple[int, ...] | None  # copies in each group
    group_bounds: tuple[int, ...] | None  # the most copies of one user in each group
    # `copies_per_user` of each group's users, contribution_bound + 1 for each group, end to end.
    group_copies_per_user: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectionOrigin:
    """Where the selection came from, for the record: a recount cannot see it."""

    selector: dict[str, Any]
    seed: int | None
    upper_bound: int | None
    proven_optimal: bool
    version: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContributionCertificate(SelectionOrigin, CountedGraph, CountedGroups, CountedSchedule, CountedCopies):
    """What was counted of one selection on one graph, and the digests that bind it to both.

    Guarantees:
      - Every count equals a recount in plain Python.                       (test_counts_equal_a_plain_recount)
      - A changed file, another graph or another selection is refused.      (test_tampering_is_refused)

    Example:
      >>> graph = AttributionGraph.from_users_per_example([[0, 1], [0, 1, 2], [1, 3], [2, 1], [3, 2]])
      >>> certificate = certify(graph, Selection.from_copies(graph, [1, 0, 0, 1, 1]))
      >>> certificate.contribution_bound, certificate.size, certificate.copies_per_user
      (2, 3, (0, 2, 2))
    """

    def __post_init__(self) -> None:
        """Refuses counts that contradict each other: such a certificate does not come from a recount."""
        levels = self.copies_per_user
        agree = [
            sum(levels) == self.num_users,
            len(levels) - 1 == self.contribution_bound if levels else self.contribution_bound == 0,
            not levels or levels[-1] > 0 or self.contribution_bound == 0,
            self.num_distinct <= self.size,
            self.num_copies_without_users <= self.size,
            self.group_sizes is None or sum(self.group_sizes) == self.size,
            self.group_bounds is None or max(self.group_bounds, default=0) == self.contribution_bound,
            (self.min_separation is None) == (self.iterations is None) == (self.batch_size is None),
            self.iterations is None or self.batch_size is None or self.iterations * self.batch_size == self.size,
        ]
        if not all(agree):
            raise CertificateMismatchError(f"the certificate's counts contradict each other; {_REMEDY}")

    def to_json(self) -> str:
        """One JSON object, with a checksum over all of it."""
        fields = codec.to_plain(self)
        return codec.encode_json({**fields, "checksum": codec.checksum(fields)}, indent=2, format=FORMAT)

    @classmethod
    def from_json(cls, text: str | bytes, *, name: str = "certificate") -> "ContributionCertificate":
        """Reads `to_json()` back; a file that was changed is refused. Errors call it `name`."""
        stored = codec.decode_json(_StoredCertificate, text, name=name, format=FORMAT, remedy=_REMEDY)
        fields = {field.name: getattr(stored, field.name) for field in dataclasses.fields(cls)}
        if stored.checksum != codec.checksum(fields):
            raise CertificateMismatchError(
                f"{name}: the certificate was changed after it was written (its checksum is wrong); {_REMEDY}"
            )
        return cls(**fields)

    def check(self, graph: AttributionGraph, selected: Selection | Schedule) -> None:
        """Recounts, and raises CertificateMismatchError if this certificate differs."""
        self.check_graph(graph.digest)
        self.check_recount(certify(graph, selected))

    def check_graph(self, digest: str) -> None:
        """Refuses another graph with CertificateMismatchError."""
        if self.graph_digest != digest:
            raise CertificateMismatchError(
                f"the certificate is for another graph (digest {self.graph_digest[:12]}…, not {digest[:12]}…); "
                "read the same data with the same users, aliases and unprotected users, or certify again"
            )

    def check_recount(self, recount: "ContributionCertificate") -> None:
        """Raises CertificateMismatchError if this certificate differs from a recount.

        Guarantees:
          - Every field but those that travel with the selection is compared.   (test_every_counted_field_is_compared)
        """
        self.check_graph(recount.graph_digest)
        not_counted = {"columns_read"} | {field.name for field in dataclasses.fields(SelectionOrigin)}
        for field in dataclasses.fields(self):
            claimed, found = getattr(self, field.name), getattr(recount, field.name)
            if field.name not in not_counted and claimed != found:
                said = f"the certificate says {field.name} = {codec.shortened(claimed)}"
                raise CertificateMismatchError(f"{said}, a recount gives {codec.shortened(found)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _StoredCertificate(ContributionCertificate):
    checksum: str

    def __post_init__(self) -> None:
        """The checksum is checked first."""


def certificate_for(selection: str) -> str:
    """The path or URL of the certificate of S."""
    if "://" not in selection:
        return str(certificate_path_of(Path(selection)))
    if not re.fullmatch(r"[^:/]+://[^/]*/.*[^/]/*", selection):
        raise InputError(f"{selection}: not the URL of a selection; give one such as hdfs://head/S.parquet")
    return f"{selection.rstrip('/').removesuffix('.parquet')}.certificate.json"


def certificate_path_of(selection: Path) -> Path:
    """S.parquet has its certificate in S.certificate.json."""
    if not selection.name:
        raise InputError(f"{selection}: a folder, not a selection; give a file such as S.parquet")
    return selection.with_name(f"{selection.stem}.certificate.json")


def separation_in_words(min_separation: int) -> str:
    """What a min separation of at least 1 says of a schedule.

    >>> separation_in_words(1)
    'every batch holds at most one copy of each user'
    >>> separation_in_words(3)
    'any 3 consecutive batches hold at most one copy of each user'
    """
    batches = "every batch holds" if min_separation == 1 else f"any {min_separation:,} consecutive batches hold"
    return f"{batches} at most one copy of each user"


def certify(graph: AttributionGraph, selected: Selection | Schedule) -> ContributionCertificate:
    """Recounts a selection or a schedule on its graph.

    Cost: O(pairs) for a selection, O(participations·log) for a schedule, and hashing every example once.
    What it is not: a promise about how S was chosen. That S does not depend on content is the caller's to keep; the
    certificate says which columns were read.
    """
    if not isinstance(graph, AttributionGraph):
        raise InputError(f"graph must be an AttributionGraph, not {type(graph).__name__}")
    if not isinstance(selected, (Selection, Schedule)):
        raise InputError(
            f"selected must be a Selection or a Schedule, not {type(selected).__name__}; create one with from_copies"
        )
    selected.check_graph(graph)
    copies = np.asarray(selected.copies)  # (num_examples,) int32
    per_user = _copies_per_user(graph, copies)  # (num_users,)
    if per_user.max(initial=0) > MOST_COPIES:
        raise UncertifiableError(
            f"user {per_user.argmax()} is in more than {MOST_COPIES:,} copies; select with a contribution bound"
        )
    return ContributionCertificate(
        contribution_bound=int(per_user.max(initial=0)),
        size=int(copies.sum(dtype=np.int64)),
        num_distinct=int(np.count_nonzero(copies)),
        most_copies_of_one_example=int(copies.max(initial=0)),
        num_copies_without_users=int(copies[graph.users_per_example == 0].sum(dtype=np.int64)),
        copies_per_user=tuple(np.bincount(per_user).tolist()),
        num_examples=graph.num_examples,
        num_users=graph.num_users,
        num_unprotected_users=graph.num_unprotected_users,
        columns_read=graph.columns_read,
        graph_digest=graph.digest,
        selection_digest=_selection_digest(graph, selected),
        selector=dict(selected.selector),
        seed=selected.seed,
        upper_bound=selected.upper_bound if isinstance(selected, Selection) else None,
        proven_optimal=selected.proven_optimal,
        version=coowned.__version__,
        **_count_schedule(graph, selected),
        **_count_groups(graph, selected, per_user),
    )


def not_counted(*kinds: type) -> dict[str, None]:
    """None for every field of these parts of a certificate."""
    return {field.name: None for kind in kinds for field in dataclasses.fields(kind)}


def _copies_per_user(graph: AttributionGraph, copies: np.ndarray) -> np.ndarray:
    """(num_users,) int64: the number of copies each user is in."""
    total = np.zeros(graph.num_users, dtype=np.int64)
    several = copies.max(initial=0) > 1
    for begin, end in _slices(graph.indptr):
        pairs = slice(graph.indptr[begin], graph.indptr[end])
        weight = np.repeat(copies[begin:end], graph.users_per_example[begin:end])  # (pairs,) copies of its example
        chosen = weight > 0
        # Weights below 2^31 in sums below 2^53 are exact in float64.
        weights = weight[chosen] if several else None
        total += np.bincount(graph.users[pairs][chosen], weights, minlength=graph.num_users).astype(np.int64)
    return total


def _count_schedule(graph: AttributionGraph, selected: Selection | Schedule) -> dict[str, Any]:
    """The fields of `CountedSchedule`."""
    if not isinstance(selected, Schedule):
        return not_counted(CountedSchedule)
    iterations, batch_size = selected.batches.shape
    slots = selected.batches.ravel()
    counts = graph.users_per_example[slots]  # (slots,)
    starts = np.repeat(graph.indptr[slots], counts)
    within = np.arange(counts.sum(dtype=np.int64)) - np.repeat(np.cumsum(counts, dtype=np.int64) - counts, counts)
    users = graph.users[starts + within]  # (participations,) in order of time
    batch = np.repeat(np.repeat(np.arange(iterations, dtype=np.int32), batch_size), counts)
    order = np.argsort(users, kind="stable")  # by user, then by time
    same_user = users[order][1:] == users[order][:-1]
    gaps = np.diff(batch[order])[same_user]
    return {"min_separation": int(gaps.min(initial=iterations)), "iterations": iterations, "batch_size": batch_size}


def _count_groups(graph: AttributionGraph, selected: Selection | Schedule, per_user: np.ndarray) -> dict[str, Any]:
    """The fields of `CountedGroups`; refuses a user in two groups."""
    if isinstance(selected, Schedule) or selected.groups is None:
        return not_counted(CountedGroups)
    copies, groups = np.asarray(selected.copies), np.asarray(selected.groups)
    num_groups = int(groups.max(initial=-1)) + 1
    group_of_pair = np.repeat(groups, graph.users_per_example)  # (num_pairs,) -1 where not selected
    taken = group_of_pair >= 0
    lowest = np.full(graph.num_users, num_groups, dtype=np.int64)
    highest = np.full(graph.num_users, -1, dtype=np.int64)
    np.minimum.at(lowest, graph.users[taken], group_of_pair[taken])
    np.maximum.at(highest, graph.users[taken], group_of_pair[taken])
    divided = np.flatnonzero((highest >= 0) & (lowest != highest))
    if len(divided):
        user = int(divided[0])
        raise UncertifiableError(
            f"{counted(len(divided), 'user is', 'users are')} in more than one group (user {user} in groups "
            f"{lowest[user]} and {highest[user]}); an example may be in a group only if all its users are"
        )
    sizes = np.bincount(groups[groups >= 0], weights=copies[groups >= 0], minlength=num_groups).astype(np.int64)
    inside = highest >= 0
    bounds = np.zeros(num_groups, dtype=np.int64)
    np.maximum.at(bounds, highest[inside], per_user[inside])
    levels = int(per_user.max(initial=0)) + 1
    users = np.bincount(highest[inside] * levels + per_user[inside], minlength=num_groups * levels)
    return {
        "groups": tuple(groups[copies > 0].tolist()),
        "group_sizes": tuple(sizes.tolist()),
        "group_bounds": tuple(bounds.tolist()),
        "group_copies_per_user": tuple(users.tolist()),
    }


def _selection_digest(graph: AttributionGraph, selected: Selection | Schedule) -> str:
    if isinstance(selected, Schedule):
        batch, position = np.indices(selected.batches.shape).reshape(2, -1)
        slots = np.stack([batch, position], axis=1).astype(np.int64)  # (slots, 2)
        rows, slot_row = np.unique(selected.batches, return_inverse=True)
        ids, which = _texts(graph, rows)
        return digests.finish("schedule", digests.sum_rows("slot", slots, which[slot_row.ravel()], ids))
    rows = np.flatnonzero(np.asarray(selected.copies) > 0)  # booleans are found faster
    ids, which = _texts(graph, rows)
    parts = [digests.sum_rows("copies", selected.copies[rows, None].astype(np.int64), which, ids)]
    if selected.groups is not None:
        parts.append(digests.sum_rows("group", selected.groups[rows, None].astype(np.int64), which, ids))
    return digests.finish("selection", *parts)


def _texts(graph: AttributionGraph, rows: np.ndarray) -> tuple[digests.Texts, np.ndarray]:
    """Ids as text, and (rows,) the index among them of each of these examples' ids."""
    if graph.example_ids is not None and is_text(graph.example_ids.type):  # as stored in memory
        return digests.Texts(*utf8_buffers(graph.example_ids, length=graph.num_examples)), rows
    return digests.Texts(*utf8_buffers(graph.ids_of(rows), length=len(rows))), np.arange(len(rows))


def _slices(indptr: np.ndarray) -> list[tuple[int, int]]:
    """Runs of examples of about _PAIRS_AT_ONCE pairs, so that what is counted at once stays small."""
    cuts = np.searchsorted(indptr, np.arange(0, indptr[-1], _PAIRS_AT_ONCE), side="left")
    cuts = np.unique(np.concatenate([cuts, [0, len(indptr) - 1]]))
    return list(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True))
