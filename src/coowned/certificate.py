"""The contribution certificate: what a selection really holds, recounted by code of its own.

Selectors walk compiled kernels; this file counts with numpy alone, so that a fault of theirs cannot hide here.
"""

import dataclasses
import hashlib
import json
import types
import typing
from typing import Any

import numpy as np

import coowned
from coowned.attribution import digest as digests
from coowned.attribution.graph import AttributionGraph
from coowned.attribution.identifiers import utf8_buffers
from coowned.errors import CertificateMismatchError, InputError, UncertifiableError
from coowned.selection.selector import Schedule, Selection

FORMAT = "coowned-certificate-2"
_PAIRS_AT_ONCE = 1 << 24
_MOST_COPIES = 1 << 24  # of one user; the histogram lists every number up to the largest


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContributionCertificate:
    """What was counted of one selection on one graph, and the digests that bind it to both.

    Attributes:
      contribution_bound: the most selected copies that contain one user (for a schedule, her participations).
      min_separation: for a schedule, the most batches b such that any b consecutive ones together hold at most one copy
        that contains a given user; 0 where one batch holds two; the number of batches where nobody takes part twice.
      size, num_distinct: copies in S, and examples that have at least one.
      most_copies_of_one_example: what bounds the example-level guarantee.
      num_copies_without_users: selected copies that no protected user is part of.
      copies_per_user: how many users are in 0, 1, … copies: a statistic of the graph.
      groups: one group per selected example in input order, no user being in two; None where there are none.
      group_sizes, group_bounds: copies, and the most copies of one user, in each group.
      group_copies_per_user: `copies_per_user` of each group's users, contribution_bound + 1 for each group, end to end.
      columns_read: what ids and attribution were made from; the selection saw nothing else.

    Guarantees:
      - Every count equals a recount in plain Python.                       (test_counts_equal_a_plain_recount)
      - A changed file, another graph or another selection is refused.      (test_tampering_is_refused)

    Example:
      >>> graph = AttributionGraph.from_users_per_example([[0, 1], [0, 1, 2], [1, 3], [2, 1], [3, 2]])
      >>> certificate = certify(graph, Selection.from_copies(graph, [1, 0, 0, 1, 1]))
      >>> certificate.contribution_bound, certificate.size, certificate.copies_per_user
      (2, 3, (0, 2, 2))
    """

    contribution_bound: int
    min_separation: int | None
    size: int
    num_distinct: int
    most_copies_of_one_example: int
    num_copies_without_users: int
    copies_per_user: tuple[int, ...]
    iterations: int | None
    batch_size: int | None
    groups: tuple[int, ...] | None = dataclasses.field(repr=False)
    group_sizes: tuple[int, ...] | None
    group_bounds: tuple[int, ...] | None
    group_copies_per_user: tuple[int, ...] | None
    num_examples: int
    num_users: int
    num_unprotected_users: int
    columns_read: tuple[str, ...]
    graph_digest: str
    selection_digest: str
    selector: dict[str, Any]
    seed: int | None
    upper_bound: int | None
    proven_optimal: bool
    version: str

    def __post_init__(self) -> None:
        """Refuses counts that contradict each other: such a certificate was not made by a recount."""
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
            raise CertificateMismatchError(
                "the certificate's counts contradict each other; certify the selection again"
            )

    def to_json(self) -> str:
        """One JSON object, with a checksum over all of it."""
        fields = dataclasses.asdict(self)
        return json.dumps({"format": FORMAT, **fields, "checksum": _checksum(fields)}, indent=2, sort_keys=False)

    @classmethod
    def from_json(cls, text: str) -> "ContributionCertificate":
        """Reads `to_json()` back; a file that was changed is refused."""
        try:
            stored = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"the certificate is not JSON ({error}); certify the selection again") from None
        if not isinstance(stored, dict) or stored.get("format") != FORMAT:
            found = stored.get("format") if isinstance(stored, dict) else type(stored).__name__
            raise InputError(
                f"a certificate of the format {FORMAT!r} was expected, not {found!r}; certify the selection again"
            )
        names = {field.name for field in dataclasses.fields(cls)}
        fields = {name: value for name, value in stored.items() if name not in ("format", "checksum")}
        if set(fields) != names:
            odd = ", ".join(sorted(set(fields) ^ names))
            raise CertificateMismatchError(
                f"the certificate has missing or unknown entries ({odd}); certify the selection again"
            )
        if stored.get("checksum") != _checksum(fields):
            raise CertificateMismatchError(
                "the certificate was changed after it was written (its checksum is wrong); certify the selection again"
            )
        for field in dataclasses.fields(cls):
            value = fields[field.name] = _thawed(fields[field.name])
            if not _is_of(value, field.type):
                raise CertificateMismatchError(
                    f"the certificate says {field.name} = {_short(value)}, which is not {field.type}; "
                    "certify the selection again"
                )
        return cls(**fields)

    def check(self, graph: AttributionGraph, selected: Selection | Schedule) -> None:
        """Recounts, and refuses with CertificateMismatchError whatever this certificate says otherwise."""
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
        """Refuses with CertificateMismatchError whatever this certificate says otherwise than a recount.

        Guarantees:
          - Every field but those that travel with the selection is compared.   (test_every_counted_field_is_compared)
        """
        self.check_graph(recount.graph_digest)
        counted = [field.name for field in dataclasses.fields(self) if field.name not in _NOT_COUNTED]
        for name in counted:
            claimed, found = getattr(self, name), getattr(recount, name)
            if claimed != found:
                raise CertificateMismatchError(
                    f"the certificate says {name} = {_short(claimed)}, a recount gives {_short(found)}; certify again"
                )


# What a recount cannot see: it travels with the selection or names the software.
_NOT_COUNTED = {"selector", "seed", "upper_bound", "proven_optimal", "version", "columns_read"}


def certify(graph: AttributionGraph, selected: Selection | Schedule) -> ContributionCertificate:
    """Recounts a selection or a schedule on its graph.

    Cost: O(pairs) for a selection, O(participations·log) for a schedule, and hashing every pair once.
    What it is not: a promise about how S was chosen. That S does not depend on content is the caller's to keep; the
    certificate says which columns were read.
    """
    if not isinstance(graph, AttributionGraph):
        raise InputError(f"graph must be an AttributionGraph, not {type(graph).__name__}")
    if not isinstance(selected, (Selection, Schedule)):
        raise InputError(
            f"certify takes a Selection or a Schedule, not {type(selected).__name__}; make one with from_copies"
        )
    selected.check_graph(graph)
    copies = np.asarray(selected.copies, dtype=np.int64)  # (num_examples,)
    per_user = _copies_per_user(graph, copies)  # (num_users,)
    if per_user.max(initial=0) > _MOST_COPIES:
        raise UncertifiableError(
            f"user {per_user.argmax()} is in {per_user.max():,} copies, beyond the {_MOST_COPIES:,} that can be "
            "certified; select with a contribution bound"
        )
    groups = selected.groups if isinstance(selected, Selection) else None
    sizes, bounds, levels = (
        (None,) * 3 if groups is None else _count_groups(graph, copies, np.asarray(groups), per_user)
    )
    rows = np.flatnonzero(copies)
    return ContributionCertificate(
        contribution_bound=int(per_user.max(initial=0)),
        min_separation=_min_separation(graph, selected.batches) if isinstance(selected, Schedule) else None,
        size=int(copies.sum()),
        num_distinct=len(rows),
        most_copies_of_one_example=int(copies.max(initial=0)),
        num_copies_without_users=int(copies[graph.users_per_example == 0].sum()),
        copies_per_user=tuple(np.bincount(per_user).tolist()),
        iterations=selected.iterations if isinstance(selected, Schedule) else None,
        batch_size=selected.batch_size if isinstance(selected, Schedule) else None,
        groups=None if groups is None else tuple(np.asarray(groups)[rows].tolist()),
        group_sizes=sizes,
        group_bounds=bounds,
        group_copies_per_user=levels,
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
    )


def _copies_per_user(graph: AttributionGraph, copies: np.ndarray) -> np.ndarray:
    """(num_users,) int64: in how many copies each user is."""
    total = np.zeros(graph.num_users, dtype=np.int64)
    for begin, end in _slices(graph.indptr):
        pairs = slice(graph.indptr[begin], graph.indptr[end])
        weight = np.repeat(
            copies[begin:end], np.diff(graph.indptr[begin : end + 1])
        )  # (pairs,) copies of the pair's example
        chosen = weight > 0
        # Weights below 2^31 in sums below 2^53 are exact in float64.
        counted = np.bincount(graph.users[pairs][chosen], weights=weight[chosen], minlength=graph.num_users)
        total += counted.astype(np.int64)
    return total


def _min_separation(graph: AttributionGraph, batches: np.ndarray) -> int:
    iterations, batch_size = batches.shape
    counts = graph.users_per_example[batches.ravel()]  # (slots,)
    starts = np.repeat(graph.indptr[batches.ravel()], counts)
    within = np.arange(counts.sum(dtype=np.int64)) - np.repeat(np.cumsum(counts, dtype=np.int64) - counts, counts)
    users = graph.users[starts + within]  # (participations,) in order of time
    batch = np.repeat(np.repeat(np.arange(iterations, dtype=np.int32), batch_size), counts)
    order = np.argsort(users, kind="stable")  # by user, then by time
    same_user = users[order][1:] == users[order][:-1]
    gaps = np.diff(batch[order])[same_user]
    return int(gaps.min(initial=iterations))


def _count_groups(
    graph: AttributionGraph, copies: np.ndarray, groups: np.ndarray, per_user: np.ndarray
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """(num_groups,) copies, most copies of one user, and users by group and copies; refuses a user in two groups."""
    num_groups = int(groups.max(initial=-1)) + 1
    group_of_pair = np.repeat(groups, graph.users_per_example)  # (num_pairs,) -1 where not selected
    selected = group_of_pair >= 0
    lowest = np.full(graph.num_users, num_groups, dtype=np.int64)
    highest = np.full(graph.num_users, -1, dtype=np.int64)
    np.minimum.at(lowest, graph.users[selected], group_of_pair[selected])
    np.maximum.at(highest, graph.users[selected], group_of_pair[selected])
    torn = np.flatnonzero((highest >= 0) & (lowest != highest))
    if len(torn):
        user = int(torn[0])
        raise UncertifiableError(
            f"{len(torn)} users are in two groups (user {user} in groups {lowest[user]} and {highest[user]}); "
            "an example may be in a group only if all its users are"
        )
    sizes = np.bincount(groups[groups >= 0], weights=copies[groups >= 0], minlength=num_groups).astype(np.int64)
    inside = highest >= 0
    bounds = np.zeros(num_groups, dtype=np.int64)
    np.maximum.at(bounds, highest[inside], per_user[inside])
    levels = int(per_user.max(initial=0)) + 1
    users = np.bincount(highest[inside] * levels + per_user[inside], minlength=num_groups * levels)
    return tuple(sizes.tolist()), tuple(bounds.tolist()), tuple(users.tolist())


def _selection_digest(graph: AttributionGraph, selected: Selection | Schedule) -> str:
    if isinstance(selected, Schedule):
        batch, position = np.indices(selected.batches.shape).reshape(2, -1)
        slots = np.stack([batch, position], axis=1).astype(np.int64)  # (slots, 2)
        rows, which = np.unique(selected.batches, return_inverse=True)
        return digests.finish("schedule", digests.sum_rows("slot", slots, which.ravel(), _texts(graph, rows)))
    rows = np.flatnonzero(selected.copies)
    ids, everyone = _texts(graph, rows), np.arange(len(rows))
    parts = [digests.sum_rows("copies", selected.copies[rows, None].astype(np.int64), everyone, ids)]
    if selected.groups is not None:
        parts.append(digests.sum_rows("group", selected.groups[rows, None].astype(np.int64), everyone, ids))
    return digests.finish("selection", *parts)


def _texts(graph: AttributionGraph, rows: np.ndarray) -> digests.Texts:
    """The ids of these examples as text."""
    return digests.Texts(*utf8_buffers(graph.ids_of(rows), length=len(rows)))


def _slices(indptr: np.ndarray) -> list[tuple[int, int]]:
    """Runs of examples of about _PAIRS_AT_ONCE pairs, so that what is counted at once stays small."""
    cuts = np.searchsorted(indptr, np.arange(0, indptr[-1], _PAIRS_AT_ONCE), side="left")
    cuts = np.unique(np.concatenate([cuts, [0, len(indptr) - 1]]))
    return list(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True))


def _thawed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _is_of(value: Any, kind: Any) -> bool:
    """Whether a value read from JSON is what a field's annotation says."""
    for choice in typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,):
        base = typing.get_origin(choice) or choice
        inside = typing.get_args(choice)[0] if base is tuple else None
        if type(value) is base and (inside is None or all(type(part) is inside for part in value)):
            return True
    return value is None and type(None) in typing.get_args(kind)


def _checksum(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
