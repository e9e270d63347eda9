"""The certificate: every number is recounted here in plain Python, and nothing that was changed gets through."""

import contextlib
import copy
import dataclasses
import itertools
import json
import re
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import coowned
from coowned import (
    AttributionGraph,
    CertificateMismatchError,
    ContributionCertificate,
    Greedy,
    InputError,
    Schedule,
    Selection,
    UncertifiableError,
    certify,
    codec,
)
from coowned import certificate as module
from coowned.selection.selection_files import read_selection, write_selection
from coowned.selection.user_bounds import UserBounds

NUM_USERS = 5
rows_of_users = st.lists(st.sets(st.integers(0, NUM_USERS - 1), max_size=3), min_size=1, max_size=7)
FIXTURES = Path(__file__).parent / "fixtures" / "certificates"
FIVE_EMAILS = [[0, 1], [0, 1, 2], [1, 3], [2, 1], [3, 2]]


@pytest.fixture
def graph():
    return AttributionGraph.from_users_per_example(FIVE_EMAILS)


def in_copies(rows, copies):
    """How many copies contain each user."""
    return [sum(count for row, count in zip(rows, copies, strict=True) if user in row) for user in range(NUM_USERS)]


def histogram(values):
    return tuple(values.count(number) for number in range(max(values, default=-1) + 1))


def separation(rows, batches):
    """The largest b such that any b consecutive batches hold at most one copy of each user, tried one by one."""
    best = 0
    for b in range(1, len(batches) + 1):
        windows = [list(itertools.chain(*batches[t : t + b])) for t in range(len(batches) - b + 1)]
        if any(sum(user in rows[e] for e in window) > 1 for window in windows for user in range(NUM_USERS)):
            break
        best = b
    return best


@given(rows_of_users, st.data())
@settings(max_examples=80)
def test_counts_equal_a_plain_recount(rows, data):
    graph = AttributionGraph.from_users_per_example(rows, num_users=NUM_USERS)
    copies = data.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows)))
    found = certify(graph, Selection.from_copies(graph, copies))
    held = in_copies(rows, copies)
    assert found.contribution_bound == max(held)
    assert found.copies_per_user == histogram(held)
    assert (found.size, found.num_distinct) == (sum(copies), sum(count > 0 for count in copies))
    assert found.most_copies_of_one_example == max(copies)
    assert found.num_copies_without_users == sum(count for row, count in zip(rows, copies, strict=True) if not row)
    assert (found.num_examples, found.num_users) == (len(rows), NUM_USERS)
    assert (found.min_separation, found.schedule, found.groups) == (None, None, None)
    assert found.graph_digest == graph.digest


@given(rows_of_users, st.integers(1, 5), st.integers(1, 3), st.data())
@settings(max_examples=80)
def test_schedules_equal_a_plain_recount(rows, iterations, batch_size, data):
    graph = AttributionGraph.from_users_per_example(rows, num_users=NUM_USERS)
    slot = st.integers(0, len(rows) - 1)
    batches = [[data.draw(slot) for _ in range(batch_size)] for _ in range(iterations)]
    found = certify(graph, Schedule.from_batches(graph, batches))
    flat = list(itertools.chain(*batches))
    copies = [flat.count(e) for e in range(len(rows))]
    assert found.min_separation == separation(rows, batches)
    assert found.contribution_bound == max(in_copies(rows, copies))
    assert found.copies_per_user == histogram(in_copies(rows, copies))
    assert (found.schedule.iterations, found.schedule.batch_size) == (iterations, batch_size)
    assert (found.size, found.groups) == (iterations * batch_size, None)
    assert found.num_distinct == len(set(flat))


def test_min_separation_at_its_ends(graph):
    def of(batches):
        return certify(graph, Schedule.from_batches(graph, batches)).min_separation

    assert of([[0, 2], [4, 4]]) == 0  # user 1 twice in the first batch
    assert of([[2, 2]]) == 0  # one example twice in one batch
    assert of([[0], [4], [3]]) == 1  # users 2 and 3 in neighbouring batches
    assert of([[0], [4], [0]]) == 2
    assert of([[0], [4]]) == 2  # nobody twice: all batches
    empty = AttributionGraph.from_users_per_example([[], []])
    assert certify(empty, Schedule.from_batches(empty, [[0, 0], [1, 1], [0, 1]])).min_separation == 3


@given(rows_of_users, st.data())
@settings(max_examples=80)
def test_groups_equal_a_plain_recount(rows, data):
    graph = AttributionGraph.from_users_per_example(rows, num_users=NUM_USERS)
    copies = data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows)))
    groups = [data.draw(st.integers(0, 2)) if count else -1 for count in copies]
    selection = Selection.from_copies(graph, copies, groups=groups)
    chosen = [(row, count, group) for row, count, group in zip(rows, copies, groups, strict=True) if count]
    torn = any(len({group for row, _, group in chosen if user in row}) > 1 for user in range(NUM_USERS))
    if torn:
        found = r"^(1 user is|[2-9] users are) in more than one group \(user \d in groups \d and \d\); an example"
        with pytest.raises(UncertifiableError, match=found):
            certify(graph, selection)
        return
    found = certify(graph, selection)
    assert found.groups == tuple(group for _, _, group in chosen)
    num_groups = max(groups) + 1
    assert found.groups.sizes == tuple(
        sum(count for _, count, group in chosen if group == g) for g in range(num_groups)
    )
    per_group = [
        [sum(count for row, count, group in chosen if group == g and user in row) for user in range(NUM_USERS)]
        for g in range(num_groups)
    ]
    assert found.groups.bounds == tuple(max(counts) for counts in per_group)
    levels = [[counts.count(level) for level in range(found.contribution_bound + 1)] for counts in per_group]
    for level in levels:
        level[0] = 0  # a user without a copy is in no group
    assert found.groups.copies_per_user == tuple(users for level in levels for users in level)


def test_counting_in_parts(monkeypatch):
    rows = [[0, 1], [], [1, 2, 3], [0], [], [4, 0], [2]]
    graph = AttributionGraph.from_users_per_example(rows, num_users=NUM_USERS)
    selection = Selection.from_copies(graph, [1, 1, 3, 0, 2, 1, 1])
    whole = certify(graph, selection)
    for pairs in (1, 2, 3):
        monkeypatch.setattr(module, "_PAIRS_AT_ONCE", pairs)
        assert certify(graph, selection) == whole


def test_empty():
    graph = AttributionGraph.from_users_per_example([])
    found = certify(graph, Selection.from_copies(graph, []))
    assert (found.size, found.contribution_bound, found.copies_per_user) == (0, 0, ())
    assert ContributionCertificate.from_json(found.to_json()) == found


def chosen_examples(graph):
    grouped = Selection.from_copies(graph, [2, 0, 0, 0, 1], groups=[0, -1, -1, -1, 1])
    return [
        Selection.from_copies(graph, [1, 0, 0, 1, 1]),
        grouped,
        Schedule.from_batches(graph, [[0], [4], [0]]),
        tiered(graph),
        coowned.Greedy(contribution_bound=2).select(graph, seed=3),
    ]


def test_json_round_trip_of_certificates(graph):
    for chosen in chosen_examples(graph):
        made = certify(graph, chosen)
        again = ContributionCertificate.from_json(made.to_json())
        assert again == made
        assert type(again.copies_per_user) is tuple
        again.check(graph, chosen)
    assert made.origin.selector["name"] == "greedy"
    assert (made.origin.seed, made.origin.version) == (3, coowned.__version__)


@pytest.mark.parametrize("name", ["set", "schedule", "groups"])
def test_version_2_is_read(name):
    """Version 0.1.0 wrote the first file; a guarantee of its time names the digest of that very file."""
    old, new = ((FIXTURES / f"{name}-{version}.json").read_text(encoding="utf-8") for version in (2, 3))
    certificate = ContributionCertificate.from_json(old)
    assert certificate == ContributionCertificate.from_json(new)
    assert certificate.to_json() + "\n" == new
    assert certificate.digests() == (codec.checksum(json.loads(new)), codec.checksum(json.loads(old)))
    stored = json.loads(old)
    for key in stored:
        for wrong in (
            {**stored, key: changed(stored[key])},
            {other: stored[other] for other in stored if other != key},
        ):
            with pytest.raises((CertificateMismatchError, InputError), match="certify the selection again"):
                ContributionCertificate.from_json(json.dumps(wrong))


@pytest.mark.parametrize("key", ["iterations", "group_bounds"])
def test_half_a_part_of_version_2_is_refused(key):
    stored = json.loads((FIXTURES / "set-2.json").read_text(encoding="utf-8"))
    fields = {name: value for name, value in stored.items() if name not in ("format", "checksum")}
    fields[key] = [1] if key == "group_bounds" else 3
    text = json.dumps({"format": stored["format"], **fields, "checksum": codec.checksum(fields)})
    with pytest.raises(CertificateMismatchError, match="contradict each other"):
        ContributionCertificate.from_json(text)


def changed(value):
    """Another value of the same type."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return ("0" if value[:1] != "0" else "1") + value[1:]
    if isinstance(value, dict):
        return {**value, "more": 1}
    return [*value, 1]


def test_tampering_is_refused(graph):
    for chosen in chosen_examples(graph):
        text = certify(graph, chosen).to_json()
        stored = json.loads(text)
        for name in stored:
            tampered = json.dumps({**stored, name: changed(stored[name])})
            with pytest.raises((CertificateMismatchError, InputError), match=r"certify the selection|has no key"):
                ContributionCertificate.from_json(tampered)
            missing = json.dumps({key: value for key, value in stored.items() if key != name})
            with pytest.raises((CertificateMismatchError, InputError), match="certify the selection again"):
                ContributionCertificate.from_json(missing)
        for name in ("schedule", "groups", "origin", "tiers"):
            for key, value in (stored.get(name) or {}).items():
                tampered = json.dumps({**stored, name: {**stored[name], key: changed(value)}})
                with pytest.raises((CertificateMismatchError, InputError), match="certify the selection again"):
                    ContributionCertificate.from_json(tampered)
        with pytest.raises(InputError, match="has no key 'extra'"):
            ContributionCertificate.from_json(json.dumps({**stored, "extra": 1}))
        with pytest.raises(InputError, match="not JSON"):
            ContributionCertificate.from_json(text[:-5])


def resealed(certificate, name, value):
    """A certificate with one entry changed, such as "schedule.iterations", and a fresh checksum."""
    stored = json.loads(certificate.to_json())
    fields = {name: value for name, value in stored.items() if name not in ("format", "checksum")}
    part, _, key = name.rpartition(".")
    (fields[part] if part else fields)[key] = value
    return json.dumps({"format": stored["format"], **fields, "checksum": codec.checksum(fields)})


COUNTED = [
    "contribution_bound", "size", "num_distinct", "most_copies_of_one_example", "num_copies_without_users",
    "copies_per_user", "num_examples", "num_users", "num_unprotected_users", "graph_digest", "selection_digest",
    "schedule.min_separation", "schedule.iterations", "schedule.batch_size", "groups.of_examples", "groups.sizes",
    "groups.bounds", "groups.copies_per_user", "tiers.bounds", "tiers.copies_per_user", "tiers.digest",
    "tiers.num_examples_opted_out", "tiers.num_unknown_keys",
]  # fmt: skip


@pytest.mark.parametrize("name", COUNTED)
def test_a_fresh_checksum_does_not_help(graph, name):
    part, _, key = name.rpartition(".")
    for chosen in chosen_examples(graph):
        made = certify(graph, chosen)
        counted = getattr(made, part) if part else made
        if counted is None:
            continue
        text = resealed(made, name, changed(getattr(counted, key)))
        with pytest.raises(CertificateMismatchError, match=r"another graph|a recount gives|contradict each other"):
            ContributionCertificate.from_json(text).check(graph, chosen)


@pytest.mark.parametrize("part", ["schedule", "groups"])
def test_a_part_that_is_added_or_left_out_is_found(graph, part):
    chosen = chosen_examples(graph)
    found = next(counts for one in chosen if (counts := getattr(certify(graph, one), part)) is not None)
    for one in chosen:
        made = certify(graph, one)
        lie = codec.to_plain(found) if getattr(made, part) is None else None
        with pytest.raises(
            CertificateMismatchError, match=rf"says {part}\.\w+ = .*a recount gives|contradict each other"
        ):
            ContributionCertificate.from_json(resealed(made, part, lie)).check(graph, one)


@pytest.mark.parametrize(
    ("name", "value"),
    [("size", "3"), ("size", True), ("size", None), ("size", 3.0), ("graph_digest", 7), ("copies_per_user", [1, "2"]),
     ("copies_per_user", 3), ("origin.selector", []), ("groups", [[1]]), ("origin.proven_optimal", 1),
     ("columns_read", [1]), ("schedule", {"min_separation": 1})],
)  # fmt: skip
def test_wrong_types_are_refused(graph, name, value):
    made = certify(graph, Selection.from_copies(graph, [1, 0, 0, 1, 1]))
    with pytest.raises(InputError, match=rf"certificate: {name}\S* (must be|needs) .*; certify the selection again"):
        ContributionCertificate.from_json(resealed(made, name, value))


@pytest.mark.parametrize("text", ["", "null", "[]", "3", '{"format": "other"}', "{", "[" * 100_000, '{"format": 3}'])
def test_what_is_not_a_certificate(text):
    with pytest.raises(InputError, match="certify the selection again"):
        ContributionCertificate.from_json(text)


def test_another_graph_or_selection_is_refused(graph):
    selection = Selection.from_copies(graph, [1, 0, 0, 1, 1])
    made = certify(graph, selection)
    other = AttributionGraph.from_users_per_example([[0, 1], [0, 1, 2], [1, 3], [2, 1], [3, 0]])
    with pytest.raises(CertificateMismatchError, match=r"the certificate is for another graph .*; read the same data"):
        made.check(other, Selection.from_copies(other, [1, 0, 0, 1, 1]))
    with pytest.raises(CertificateMismatchError, match=r"selection_digest|says"):
        made.check(graph, Selection.from_copies(graph, [1, 0, 1, 0, 1]))
    with pytest.raises(CertificateMismatchError, match="made for another graph"):
        certify(other, selection)
    smaller = AttributionGraph.from_users_per_example([[0]])
    with pytest.raises(CertificateMismatchError, match="a graph of 5 examples"):
        certify(smaller, selection)
    # One schedule with two slots exchanged, one selection with other groups: the same counts, another digest.
    schedule = Schedule.from_batches(graph, [[0], [4]])
    with pytest.raises(CertificateMismatchError, match="selection_digest"):
        certify(graph, schedule).check(graph, Schedule.from_batches(graph, [[4], [0]]))


def test_every_counted_field_is_compared(graph):
    for chosen in chosen_examples(graph):
        claim = certify(graph, chosen)
        claim.check_recount(claim)
        parts = [name for name in module.PARTS if getattr(claim, name) is not None]
        names = [field.name for field in dataclasses.fields(claim) if field.name not in module.PARTS]
        names += [f"{part}.{field.name}" for part in parts for field in dataclasses.fields(getattr(claim, part))]
        for name in names:
            recount = copy.deepcopy(claim)
            part, _, key = name.rpartition(".")
            object.__setattr__(getattr(recount, part) if part else recount, key, "other")
            if part == "origin" or name == "columns_read":
                claim.check_recount(recount)
            else:
                said = "another graph" if name == "graph_digest" else f"says {re.escape(name)} = "
                with pytest.raises(CertificateMismatchError, match=said):
                    claim.check_recount(recount)


def test_unprotected_users_are_counted(graph):
    left = graph.without_users([1])
    made = certify(left, Selection.from_copies(left, [1, 1, 1, 1, 1]))
    assert (made.num_unprotected_users, made.num_users) == (1, 3)
    with pytest.raises(CertificateMismatchError, match="another graph"):
        made.check(graph, Selection.from_copies(graph, [1, 1, 1, 1, 1]))


def test_digest_of_a_selection_goes_by_ids():
    rows = [[0], [1], [0, 1]]
    graph = AttributionGraph.from_users_per_example(rows, example_ids=["a", "b", "c"])
    turned = AttributionGraph.from_users_per_example(rows[::-1], example_ids=["c", "b", "a"])
    one = certify(graph, Selection.from_copies(graph, [2, 0, 1]))
    other = certify(turned, Selection.from_copies(turned, [1, 0, 2]))
    assert (one.graph_digest, one.selection_digest) == (other.graph_digest, other.selection_digest)
    assert dataclasses.replace(other, origin=one.origin) == one


def test_large_counts():
    graph = AttributionGraph.from_users_per_example([[0], [0], [0, 1], []])
    found = certify(graph, Selection.from_copies(graph, [2**20, 1, 2**21, 2**31 - 1]))
    assert (found.contribution_bound, found.size) == (2**20 + 1 + 2**21, 2**20 + 1 + 2**21 + 2**31 - 1)
    with pytest.raises(
        UncertifiableError, match=r"user 0 is in more than 16,777,216 copies; select with a contribution bound"
    ):
        certify(graph, Selection.from_copies(graph, [2**31 - 1, 0, 0, 0]))


def test_wrong_arguments(graph):
    with pytest.raises(InputError, match="graph must be an AttributionGraph, not list"):
        certify(FIVE_EMAILS, Selection.from_copies(graph, [1, 0, 0, 1, 1]))
    with pytest.raises(
        InputError, match="selected must be a Selection or a Schedule, not list; create one with from_copies"
    ):
        certify(graph, [1, 0, 0, 1, 1])


def test_contradicting_counts_are_refused(graph):
    for chosen in chosen_examples(graph):
        made = certify(graph, chosen)
        with pytest.raises(CertificateMismatchError, match="contradict each other"):
            dataclasses.replace(made, contribution_bound=made.contribution_bound + 1)
        with pytest.raises(CertificateMismatchError, match="contradict each other"):
            dataclasses.replace(made, num_users=made.num_users + 1)


TIERS = [{"user": "0", "bound": 1, "tier": "careful"}, {"user": "3", "bound": 0, "tier": "out"}]


def tiered(graph, contribution_bounds=TIERS, contribution_bound=2):
    return Greedy(contribution_bound=contribution_bound, contribution_bounds=contribution_bounds).select(graph)


@given(rows_of_users, st.dictionaries(st.integers(0, NUM_USERS), st.integers(0, 3)), st.integers(1, 3))
@settings(max_examples=80)
def test_every_user_is_recounted_against_their_own_bound(rows, own, others):
    graph = AttributionGraph.from_users_per_example(rows, num_users=NUM_USERS)
    selection = tiered(graph, own, others)
    tiers = certify(graph, selection).tiers
    counts = in_copies(rows, selection.copies.tolist())
    assert tiers is not None
    bounds = [own.get(user, others) for user in range(NUM_USERS)]
    for bound, users, levels in zip(tiers.bounds, tiers.users, tiers.levels(), strict=True):
        held = [count for count, of_user in zip(counts, bounds, strict=True) if of_user == bound]
        assert users == len(held)
        assert [held.count(level) for level in range(len(levels))] == list(levels)
    assert tiers.num_unknown_keys == sum(user >= NUM_USERS for user in own)
    assert tiers.num_opted_out == bounds.count(0)
    assert tiers.num_examples_opted_out == sum(any(bounds[user] == 0 for user in row) for row in rows)
    for example in range(len(rows)):  # one copy more is refused exactly where somebody's own bound is exceeded
        more = selection.copies.copy()
        more[example] += 1
        over = any(n > bound for n, bound in zip(in_copies(rows, more.tolist()), bounds, strict=True))
        with pytest.raises(UncertifiableError, match="than their bound") if over else contextlib.nullcontext():
            certify(graph, dataclasses.replace(selection, copies=more))


def test_a_tier_that_is_not_held_to_its_bound_is_caught(graph, monkeypatch):
    """The planted bug: everybody is selected with the bound of the rest."""

    def one_for_all(self, graph):
        return np.full(graph.num_users, self.contribution_bound, np.int32)

    monkeypatch.setattr(Greedy, "capacities", one_for_all)
    with pytest.raises(UncertifiableError, match=r"of tier '(careful|out)', in [12]\)"):
        certify(graph, tiered(graph))


def test_tiers_are_stored_and_bound(graph, tmp_path):
    selection = tiered(graph)
    certificate = certify(graph, selection)
    text = certificate.to_json()
    assert json.loads(text)["format"] == "coowned-certificate-4"
    assert json.loads(certify(graph, Greedy(contribution_bound=2).select(graph)).to_json())["format"].endswith("-3")
    assert ContributionCertificate.from_json(text) == certificate
    assert certificate.digests()[0] == codec.checksum(json.loads(text))
    write_selection(tmp_path / "S.parquet", graph, selection)
    back = read_selection(tmp_path / "S.parquet", graph)
    certificate.check(graph, back)  # bounds travel with S
    assert isinstance(back, Selection)
    with pytest.raises(CertificateMismatchError, match="tiers"):
        certificate.check(graph, dataclasses.replace(back, user_bounds=None))
    other = dataclasses.replace(back, user_bounds=UserBounds.of({"0": 1, "3": 0}, others=2))
    with pytest.raises(CertificateMismatchError, match="tiers"):
        certificate.check(graph, other)
    with pytest.raises(UncertifiableError, match="kept apart"):
        certify(graph, dataclasses.replace(selection, user_bounds=None))
    assert certificate.tiers is not None
    wrong = dataclasses.replace(certificate.tiers, bounds=(2, 0, 0))
    with pytest.raises(CertificateMismatchError, match="contradict"):
        dataclasses.replace(certificate, tiers=wrong)
