"""Certificates of a selection: an independent recount of how often each user is in it.

Selectors use compiled kernels; this file counts with numpy alone, so that a bug of theirs cannot hide here.
"""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import coowned
from coowned import codec
from coowned.attribution import digest as digests
from coowned.attribution.graph import AttributionGraph
from coowned.attribution.identifiers import is_text, utf8_buffers
from coowned.errors import CertificateMismatchError, InputError, UncertifiableError
from coowned.progress import counted
from coowned.selection.selector import Schedule, Selection
from coowned.tier_counts import CertifiedTiers, count_tiers

FORMAT = "coowned-certificate-3"
_TIERS_FORMAT = "coowned-certificate-4"  # with tiers; without any, a certificate is what it always was
_FLAT_FORMAT = "coowned-certificate-2"  # written by 0.1.0, without parts; 1 had other digests
_PAIRS_AT_ONCE = 1 << 24
MOST_COPIES = 1 << 24  # of one user; the histogram lists every number up to the largest
_REMEDY = "certify the selection again"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CertifiedSchedule:
    """Counts of a schedule's batches."""

    # The most batches b such that any b consecutive ones together hold at most one copy that contains a given user; 0
    # if one batch contains two; the number of batches if no user takes part twice.
    min_separation: int
    iterations: int
    batch_size: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CertifiedGroups(Sequence[int]):
    """Counts of a set divided into groups, no user being in two of them.

    As a sequence it holds the group of each selected example in input order, and it equals a tuple of these.
    """

    of_examples: tuple[int, ...] = dataclasses.field(repr=False)  # the group of each selected example in input order
    sizes: tuple[int, ...]  # copies in each group
    bounds: tuple[int, ...]  # the most copies of one user in each group
    # The certificate's `copies_per_user` for each group's users, contribution_bound + 1 per group, end to end.
    copies_per_user: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.of_examples)

    def __getitem__(self, index: Any) -> Any:
        return self.of_examples[index]

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if isinstance(other, CertifiedGroups) else self.of_examples == other

    def __hash__(self) -> int:
        return hash(self.of_examples)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectionOrigin:
    """Records where the selection came from, which a recount cannot see."""

    selector: dict[str, Any]
    seed: int | None
    upper_bound: int | None  # on the size of any S, proven by the selector
    proven_optimal: bool
    version: str  # of coowned


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContributionCertificate:
    """Counts of one selection on one graph, with the digests that bind them to both.

    Attributes:
      contribution_bound: the most selected copies that contain one user (for a schedule, their participations).
      size: copies in S.
      num_distinct: examples that have at least one copy.
      most_copies_of_one_example: bounds the example-level guarantee.
      num_copies_without_users: selected copies that no protected user is part of.
      copies_per_user: how many users are in 0, 1, … copies: a statistic of the graph.
      num_unprotected_users: users excluded from the attribution, for whom nothing is promised.
      columns_read: what ids and attribution were derived from; the selection saw nothing else.
      schedule: None for a set.
      groups: None if there are none.
      origin: where the selection came from.
      tiers: None where one bound is for everybody.

    Guarantees:
      - Every user is recounted against their own bound.   (test_every_user_is_recounted_against_their_own_bound)
      - Every count equals a recount in plain Python.                       (test_counts_equal_a_plain_recount)
      - A changed file, another graph or another selection is refused.      (test_tampering_is_refused)
      - A file of format version 2 is read, and has the digest that guarantees of its time name.
        (test_version_2_is_read)

    Example:
      >>> graph = AttributionGraph.from_users_per_example([[0, 1], [0, 1, 2], [1, 3], [2, 1], [3, 2]])
      >>> certificate = certify(graph, Selection.from_copies(graph, [1, 0, 0, 1, 1]))
      >>> certificate.contribution_bound, certificate.size, certificate.copies_per_user
      (2, 3, (0, 2, 2))
    """

    contribution_bound: int
    size: int
    num_distinct: int
    most_copies_of_one_example: int
    num_copies_without_users: int
    copies_per_user: tuple[int, ...]
    selection_digest: str
    graph_digest: str
    num_examples: int
    num_users: int
    num_unprotected_users: int
    columns_read: tuple[str, ...]
    schedule: CertifiedSchedule | None
    groups: CertifiedGroups | None
    origin: SelectionOrigin
    tiers: CertifiedTiers | None = None

    def __post_init__(self) -> None:
        """Raises an error for counts that contradict each other: no recount gives them."""
        levels, schedule, groups = self.copies_per_user, self.schedule, self.groups
        agree = [
            sum(levels) == self.num_users,
            len(levels) - 1 == self.contribution_bound if levels else self.contribution_bound == 0,
            not levels or levels[-1] > 0 or self.contribution_bound == 0,
            self.num_distinct <= self.size,
            self.num_copies_without_users <= self.size,
            groups is None or sum(groups.sizes) == self.size,
            groups is None or max(groups.bounds, default=0) == self.contribution_bound,
            schedule is None or schedule.iterations * schedule.batch_size == self.size,
            self.tiers is None or self.tiers.check(levels),
        ]
        if not all(agree):
            raise CertificateMismatchError(f"the certificate's counts contradict each other; {_REMEDY}")

    @property
    def min_separation(self) -> int | None:
        """Min separation of the schedule; None for a set."""
        return None if self.schedule is None else self.schedule.min_separation

    def to_json(self) -> str:
        """Returns one JSON object with a checksum over all of it."""
        return codec.encode_json(_sealed(_plain(self)), indent=2, format=_format_of(self))

    @classmethod
    def from_json(cls, text: str | bytes, *, name: str = "certificate") -> "ContributionCertificate":
        """Reads `to_json()` back, also of older formats; refuses a file that was changed. Errors call it `name`."""
        kinds = {FORMAT: _StoredCertificate, _TIERS_FORMAT: _TieredCertificate, _FLAT_FORMAT: _FlatCertificate}
        stored: Any = codec.decode_versions(kinds, text, name=name, remedy=_REMEDY)
        fields = _plain(stored)
        if fields.pop("checksum") != codec.checksum(fields):
            raise CertificateMismatchError(
                f"{name}: the certificate was changed after it was written (its checksum is wrong); {_REMEDY}"
            )
        if isinstance(stored, _FlatCertificate):
            return cls(**_parts(stored))
        return cls(**{field.name: getattr(stored, field.name) for field in dataclasses.fields(cls)})

    def digests(self) -> tuple[str, str]:
        """Returns the digests of the stored certificate in this format and in version 2, which older runs name."""
        current, flat = (
            codec.checksum({"format": format, **_sealed(fields)})
            for format, fields in ((_format_of(self), _plain(self)), (_FLAT_FORMAT, _flat(self)))
        )
        return current, flat

    def check(self, graph: AttributionGraph, selected: Selection | Schedule) -> None:
        """Recounts, and raises CertificateMismatchError if this certificate differs."""
        self.check_graph(graph.digest)
        self.check_recount(certify(graph, selected))

    def check_graph(self, digest: str) -> None:
        """Raises CertificateMismatchError for another graph."""
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
        claimed, found = self._counts(), recount._counts()
        for name in {**claimed, **found}:
            if claimed.get(name) != found.get(name):
                said = f"the certificate says {name} = {codec.shortened(claimed.get(name))}"
                raise CertificateMismatchError(f"{said}, a recount gives {codec.shortened(found.get(name))}")

    def _counts(self) -> dict[str, Any]:
        """Returns everything that a recount finds, with entries such as "schedule.min_separation"."""
        counts = dict(vars(self))
        for name in ("origin", "columns_read"):
            del counts[name]
        for name in ("schedule", "groups", "tiers"):
            part = counts.pop(name)
            counts |= {} if part is None else {f"{name}.{key}": value for key, value in vars(part).items()}
        return counts


@dataclasses.dataclass(frozen=True, kw_only=True)
class _StoredCertificate(ContributionCertificate):
    checksum: str

    def __post_init__(self) -> None:
        """Leaves the counts unchecked: the checksum comes first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TieredCertificate(_StoredCertificate):
    """The stored form of version 4: version 3 with tiers."""

    tiers: CertifiedTiers  # pyright: ignore[reportGeneralTypeIssues, reportIncompatibleVariableOverride]


def _format_of(certificate: ContributionCertificate) -> str:
    return FORMAT if certificate.tiers is None else _TIERS_FORMAT


def _plain(certificate: Any) -> dict[str, Any]:
    """Returns the plain fields, without tiers where there are none."""
    fields = codec.to_plain(certificate)
    return {name: value for name, value in fields.items() if name != "tiers" or value is not None}


_GROUP_KEYS = {  # of version 2
    "groups": "of_examples",
    "group_sizes": "sizes",
    "group_bounds": "bounds",
    "group_copies_per_user": "copies_per_user",
}


def _names(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _types(kind: type) -> dict[str, Any]:
    return {field.name: field.type for field in dataclasses.fields(kind)}


PARTS = ("schedule", "groups", "origin", "tiers")
_WHOLE = {name: kind for name, kind in _types(ContributionCertificate).items() if name not in PARTS}
_FlatCertificate = msgspec.defstruct(
    "Certificate",
    [
        *_WHOLE.items(),
        *((name, int | None) for name in _names(CertifiedSchedule)),
        *((name, tuple[int, ...] | None) for name in _GROUP_KEYS),
        *_types(SelectionOrigin).items(),
        ("checksum", str),
    ],
    kw_only=True,
    frozen=True,
)


def _sealed(fields: dict[str, Any]) -> dict[str, Any]:
    return {**fields, "checksum": codec.checksum(fields)}


def _flat(certificate: ContributionCertificate) -> dict[str, Any]:
    """Returns the plain fields of version 2."""
    plain = codec.to_plain(certificate)
    schedule, groups = plain["schedule"] or {}, plain["groups"] or {}
    return {
        **{name: plain[name] for name in _WHOLE},
        **{name: schedule.get(name) for name in _names(CertifiedSchedule)},
        **{name: groups.get(part) for name, part in _GROUP_KEYS.items()},
        **plain["origin"],
    }


def _parts(flat: Any) -> dict[str, Any]:
    """Returns a certificate's fields from those of version 2."""

    def part(kind: type, keys: dict[str, str]) -> Any:
        values = {new: getattr(flat, old) for old, new in keys.items()}
        missing = [value is None for value in values.values()]
        if any(missing) and not all(missing):
            raise CertificateMismatchError(f"the certificate's counts contradict each other; {_REMEDY}")
        return None if all(missing) else kind(**values)

    return {
        **{name: getattr(flat, name) for name in _WHOLE},
        "schedule": part(CertifiedSchedule, {name: name for name in _names(CertifiedSchedule)}),
        "groups": part(CertifiedGroups, _GROUP_KEYS),
        "origin": SelectionOrigin(**{name: getattr(flat, name) for name in _names(SelectionOrigin)}),
    }


def certificate_for(selection: str) -> str:
    """Returns the path or URL of the certificate of S."""
    if "://" not in selection:
        return str(certificate_path_of(Path(selection)))
    if not re.fullmatch(r"[^:/]+://[^/]*/.*[^/]/*", selection):
        raise InputError(f"{selection}: not the URL of a selection; give one such as hdfs://head/S.parquet")
    return f"{selection.rstrip('/').removesuffix('.parquet')}.certificate.json"


def certificate_path_of(selection: Path) -> Path:
    """Returns S.certificate.json for S.parquet."""
    if not selection.name:
        raise InputError(f"{selection}: a folder, not a selection; give a file such as S.parquet")
    return selection.with_name(f"{selection.stem}.certificate.json")


def separation_in_words(min_separation: int) -> str:
    """Explains a min separation of at least 1.

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
    bounds = selected.user_bounds if isinstance(selected, Selection) else None
    if bounds is None and "contribution_bounds" in selected.selector:
        raise UncertifiableError("bounds of single users were kept apart from this selection; pass it as it was made")
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
        copies_per_user=_levels(per_user, graph.absent.users),
        num_examples=graph.num_examples + graph.absent.examples.count,
        num_users=graph.num_users + graph.absent.users,
        num_unprotected_users=graph.num_unprotected_users,
        columns_read=graph.columns_read,
        graph_digest=graph.digest,
        selection_digest=_selection_digest(graph, selected),
        schedule=_count_schedule(graph, selected) if isinstance(selected, Schedule) else None,
        groups=_count_groups(graph, selected, per_user) if isinstance(selected, Selection) else None,
        origin=SelectionOrigin(
            selector=dict(selected.selector),
            seed=selected.seed,
            upper_bound=selected.upper_bound if isinstance(selected, Selection) else None,
            proven_optimal=selected.proven_optimal,
            version=coowned.__version__,
        ),
        tiers=None if bounds is None else count_tiers(graph, copies, per_user, bounds),
    )


def _levels(per_user: np.ndarray, absent: int) -> tuple[int, ...]:
    """Counts the users in 0, 1, … copies; `absent` users are in none."""
    levels = np.bincount(per_user, minlength=1 if absent else 0)
    levels[:1] += absent
    return tuple(levels.tolist())


def _copies_per_user(graph: AttributionGraph, copies: np.ndarray) -> np.ndarray:
    """Counts the copies that each user is in: (num_users,) int64."""
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


def _count_schedule(graph: AttributionGraph, selected: Schedule) -> CertifiedSchedule:
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
    return CertifiedSchedule(
        min_separation=int(gaps.min(initial=iterations)), iterations=iterations, batch_size=batch_size
    )


def _count_groups(graph: AttributionGraph, selected: Selection, per_user: np.ndarray) -> CertifiedGroups | None:
    """Counts each group, if there are any; refuses a user in two of them."""
    if selected.groups is None:
        return None
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
    return CertifiedGroups(
        of_examples=tuple(groups[copies > 0].tolist()),
        sizes=tuple(sizes.tolist()),
        bounds=tuple(bounds.tolist()),
        copies_per_user=tuple(users.tolist()),
    )


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
    """Returns ids as text, and the index among them of each of these examples' ids, (rows,)."""
    if graph.example_ids is not None and is_text(graph.example_ids.type):  # as stored in memory
        return digests.Texts(*utf8_buffers(graph.example_ids, length=graph.num_examples)), rows
    return digests.Texts(*utf8_buffers(graph.ids_of(rows), length=len(rows))), np.arange(len(rows))


def _slices(indptr: np.ndarray) -> list[tuple[int, int]]:
    """Divides the examples into runs of about _PAIRS_AT_ONCE pairs, so that what is counted at once stays small."""
    cuts = np.searchsorted(indptr, np.arange(0, indptr[-1], _PAIRS_AT_ONCE), side="left")
    cuts = np.unique(np.concatenate([cuts, [0, len(indptr) - 1]]))
    return list(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True))
