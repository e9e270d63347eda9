"""Selection, Schedule and the template method that every selector shares."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coowned.attribution.graph import AttributionGraph
from coowned.errors import CertificateMismatchError, InputError
from coowned.selection.bias_mitigating import BiasMitigating
from coowned.selection.greedy import Greedy
from coowned.selection.greedy_min_separation import GreedyMinSeparation
from coowned.selection.greedy_with_duplicates import GreedyWithDuplicates
from coowned.selection.random_subset import RandomSubset
from coowned.selection.selector import Schedule, Selection
from coowned.testing.strategies import attribution_graphs

ROWS = [[0], [0, 1], [2], [1, 2]]


def graph_of(rows=ROWS, **named):
    return AttributionGraph.from_users_per_example(rows, **named)


def test_arrays_are_read_only():
    selection = Greedy(contribution_bound=1).select(graph_of())
    schedule = GreedyMinSeparation(batch_size=1, iterations=2, min_separation=1).select(graph_of())
    grouped = Selection.from_copies(graph_of(), [1, 0, 1, 0], groups=[0, -1, 1, -1])
    for array in (selection.copies, schedule.batches, schedule.copies, grouped.groups):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        selection.seed = 3


def test_from_copies_keeps_its_own_array():
    mine = np.array([1, 0, 2, 0])
    selection = Selection.from_copies(graph_of(), mine)
    mine[0] = 7
    assert selection.copies.tolist() == [1, 0, 2, 0]
    assert selection.copies.dtype == np.int32
    assert (selection.size, selection.num_distinct, selection.upper_bound) == (3, 2, None)
    assert not selection.proven_optimal
    same = np.array([1, 0, 2, 0], np.int32)
    own = Selection.from_copies(graph_of(), same)
    same[0] = 7
    assert own.copies.tolist() == [1, 0, 2, 0]


@pytest.mark.parametrize(
    ("copies", "match"),
    [
        ([1, 0, 1], "copies must have 4 entries, not 3"),
        ([1, 0, 1, -1], r"copies must be in \[0, 2\^31\)"),
        ([1, 0, 1, 2**31], r"copies must be in \[0, 2\^31\)"),
        ([1.0, 0, 1, 0], "copies must be integers, not float64"),
        ([[1, 0, 1, 0]], "one entry per example"),
    ],
)
def test_bad_copies(copies, match):
    with pytest.raises(InputError, match=match):
        Selection.from_copies(graph_of(), copies)


@pytest.mark.parametrize("groups", [[0, 0, 1, -1], [0, -1, -1, -1], [0, -1, 1, -2], [0, -1, 1]])
def test_bad_groups(groups):
    with pytest.raises(InputError, match="groups must"):
        Selection.from_copies(graph_of(), [1, 0, 1, 0], groups=groups)


@pytest.mark.parametrize(
    ("batches", "match"),
    [
        ([0, 1], "shape"),
        ([[0, 4]], r"example indices in \[0, 4\)"),
        ([[0, -1]], r"example indices in \[0, 4\)"),
        ([[0.5]], "integers"),
        ([[0, 1], [2]], "same length"),
    ],
)
def test_bad_batches(batches, match):
    with pytest.raises(InputError, match=match):
        Schedule.from_batches(graph_of(), batches)


def test_schedule_counts():
    schedule = Schedule.from_batches(graph_of(), [[0, 2], [3, 0], [2, 1]])
    assert (schedule.iterations, schedule.batch_size, schedule.size, schedule.num_distinct) == (3, 2, 6, 4)
    assert schedule.copies.tolist() == [2, 1, 2, 1]
    assert schedule.min_separation is None
    assert Schedule.from_batches(graph_of([]), np.zeros((0, 4), int)).iterations == 0


@given(graph=attribution_graphs(), data=st.data())
def test_json_round_trip(graph, data):
    counts = st.lists(st.integers(0, 3), min_size=graph.num_examples, max_size=graph.num_examples)
    copies = data.draw(counts)
    groups = [count - 1 for count in copies] if data.draw(st.booleans()) else None
    selection = Selection.from_copies(graph, copies, groups=groups)
    alone = Selection.from_json(selection.to_json())
    assert alone == selection
    assert alone.graph is None
    assert alone.to_json() == selection.to_json()
    assert Selection.from_json(selection.to_json(), graph) == selection
    if graph.num_examples:
        row = st.integers(0, graph.num_examples - 1)
        batches = data.draw(st.lists(st.lists(row, min_size=2, max_size=2), min_size=1, max_size=4))
        schedule = Schedule.from_batches(graph, batches)
        assert Schedule.from_json(schedule.to_json()) == schedule
        assert Schedule.from_json(schedule.to_json(), graph).graph is graph


def test_json_says_where_it_came_from():
    graph = graph_of(example_ids=["a", "b", "c", "d"])
    selection = Greedy(contribution_bound=np.int64(1)).select(graph, seed=5)
    stored = json.loads(selection.to_json())
    assert stored["format"] == "coowned-selection-2"
    assert stored["selector"] == {"name": "greedy", "ties": "hash", "unattributed": "drop", "contribution_bound": 1}
    assert (stored["seed"], stored["graph_digest"], stored["num_examples"]) == (5, graph.digest, 4)
    assert stored["indices"] == np.flatnonzero(selection.copies).tolist()
    schedule = GreedyMinSeparation(batch_size=1, iterations=2, min_separation=1).select(graph)
    stored = json.loads(schedule.to_json())
    assert (stored["format"], stored["min_separation"]) == ("coowned-schedule-2", 1)


@pytest.mark.parametrize("kind", [Selection, Schedule])
def test_another_graph_is_refused(kind):
    graph = graph_of(example_ids=["a", "b", "c", "d"])
    made = (
        Selection.from_copies(graph, [1, 0, 1, 0])
        if kind is Selection
        else Schedule.from_batches(graph, [[0, 2], [0, 2]])
    )
    text = made.to_json()
    others = {
        "another graph": graph_of([[0], [0, 1], [2], [0, 2]], example_ids=["a", "b", "c", "d"]),
        "graph of 4 examples, not 3": graph_of(ROWS[:3], example_ids=["a", "b", "c"]),
        "another row order": graph_of([ROWS[i] for i in (1, 0, 2, 3)], example_ids=["b", "a", "c", "d"]),
    }
    for match, other in others.items():
        with pytest.raises(CertificateMismatchError, match=match):
            kind.from_json(text, other)
        with pytest.raises(CertificateMismatchError, match=match):
            made.check_graph(other)
    kind.from_json(text, graph_of(example_ids=["a", "b", "c", "d"]))
    made.check_graph(graph)


@pytest.mark.parametrize("kind", [Selection, Schedule])
def test_bad_json(kind):
    graph = graph_of()
    made = Selection.from_copies(graph, [1, 0, 1, 0]) if kind is Selection else Schedule.from_batches(graph, [[0, 2]])
    stored = json.loads(made.to_json())
    for text, match in [
        ("{", "not JSON"),
        ("[]", "must be an object"),
        (json.dumps(stored | {"format": "other"}), "format"),
    ]:
        with pytest.raises(InputError, match=match):
            kind.from_json(text)
    for key in stored:
        with pytest.raises(InputError, match=r"format|needs the key"):
            kind.from_json(json.dumps({name: value for name, value in stored.items() if name != key}))
    wrong = (
        [
            {"indices": [2, 0]},
            {"indices": [0, 4]},
            {"copies": [1]},
            {"copies": [1, -2]},
            {"num_examples": -1},
            {"copies": [1, 2**70]},
        ]
        if kind is Selection
        else [
            {"batches": [[0, 9]]},
            {"batches": [[0]]},
            {"batches": [[0, 2**70]]},
            {"batches": [[0, 1.5]]},
            {"batch_size": None},
        ]
    )
    for change in wrong:
        with pytest.raises(InputError):
            kind.from_json(json.dumps(stored | change))


def test_equality_and_repr():
    graph = graph_of()
    a, b = (Selection.from_copies(graph, [1, 0, 1, 0]) for _ in range(2))
    assert a == b
    assert a != Selection.from_copies(graph, [1, 0, 1, 0], groups=[0, -1, 1, -1])
    assert a != Selection.from_copies(graph, [1, 0, 0, 0])
    assert a != "a selection"
    assert Schedule.from_batches(graph, [[0]]) != Schedule.from_batches(graph, [[1]])
    assert Schedule.from_batches(graph, [[0]]) != "a schedule"
    assert "copies=" in repr(a)


def test_select_checks_its_arguments():
    greedy = Greedy(contribution_bound=1)
    with pytest.raises(InputError, match="graph must be an AttributionGraph, not list"):
        greedy.select(ROWS)
    for seed in (-1, 2**63, 1.0, None):
        with pytest.raises(InputError, match="seed"):
            greedy.select(graph_of(), seed=seed)
    with pytest.raises(InputError, match="progress must be callable"):
        greedy.select(graph_of(), progress=3)
    for make in (Selection.from_copies, Schedule.from_batches):
        with pytest.raises(InputError, match="graph must be an AttributionGraph"):
            make(ROWS, [[0]])


def test_digest_is_not_computed_by_select(monkeypatch):
    graph = graph_of()
    monkeypatch.setattr(AttributionGraph, "digest_sums", lambda self: pytest.fail("the digest was computed"))
    assert Greedy(contribution_bound=1).select(graph).size == 2


@pytest.mark.parametrize(
    "selector",
    [
        Greedy(contribution_bound=2),
        Greedy(contribution_bound=2, ties="input"),
        GreedyWithDuplicates(contribution_bound=3),
        BiasMitigating(contribution_bound=3, threshold=1, few_user_run=2, many_user_run=3),
        GreedyMinSeparation(batch_size=5, iterations=70, min_separation=4),
        RandomSubset(size=77),
    ],
    ids=lambda selector: selector.name,
)
def test_work_in_many_ranges_gives_the_same(selector, monkeypatch):
    rng = np.random.default_rng(2)
    rows = [rng.choice(150, size=rng.integers(0, 5), replace=False).tolist() for _ in range(500)]
    graph = graph_of(rows, num_users=150)
    whole = selector.select(graph, seed=6)
    calls = []
    monkeypatch.setattr("coowned.selection.order.RANGE", 7)
    monkeypatch.setattr("coowned.selection.order.BUCKET", 16)
    monkeypatch.setattr("coowned.selection.greedy_min_separation.ROWS", 10)
    assert selector.select(graph, seed=6, progress=lambda done, message: calls.append(done)) == whole
    assert len(calls) > 50
    assert calls == sorted(calls)


def test_a_mask_selects_each_once():
    graph = AttributionGraph.from_users_per_example([[0], [1], [2]])
    assert Selection.from_copies(graph, [True, False, True]).copies.tolist() == [1, 0, 1]
