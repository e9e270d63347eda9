"""The attribution graph: every constructor gives the same thing, and it cannot be changed."""

# ruff: noqa: E501 (tables of cases: one case a line)

import dataclasses
import pickle

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given

from coowned import AttributionGraph, InputError

rows_of_users = st.lists(st.lists(st.integers(0, 6), max_size=25), max_size=10)


def plain(graph):
    return [graph.users[a:b].tolist() for a, b in zip(graph.indptr[:-1], graph.indptr[1:], strict=True)]


@given(rows_of_users, st.sampled_from([np.int8, np.int32, np.int64, np.uint16, np.uint64, np.dtype(">i4")]))
def test_constructors_agree(rows, kind):
    expected = [sorted(set(row)) for row in rows]
    lists = AttributionGraph.from_users_per_example(rows, num_users=7)
    flat = np.array([user for row in rows for user in row], dtype=kind)
    indptr = np.cumsum([0, *map(len, rows)])
    compressed = AttributionGraph.from_csr(indptr, flat, num_users=7)
    pairs = [(example, user) for example, row in enumerate(rows) for user in row][::-1]
    example, user = (np.array([pair[side] for pair in pairs], dtype=kind) for side in (0, 1))
    paired = AttributionGraph.from_pairs(example, user, num_examples=len(rows), num_users=7)
    for graph in (lists, compressed, paired):
        assert plain(graph) == expected
        assert (graph.num_examples, graph.num_users, graph.num_pairs) == (len(rows), 7, sum(map(len, expected)))
        assert (graph.indptr.dtype, graph.users.dtype) == (np.int64, np.int32)
        assert graph.users_per_example.tolist() == [len(row) for row in expected]
        assert graph.examples_per_user.tolist() == [sum(u in row for row in expected) for u in range(7)]
        user_indptr, examples = graph.by_user
        for u in range(7):
            assert examples[user_indptr[u] : user_indptr[u + 1]].tolist() == [
                e for e, row in enumerate(expected) if u in row
            ]


def test_repeated_users_collapse():
    graph = AttributionGraph.from_users_per_example([[2, 0, 2, 2], [1, 1]])
    assert plain(graph) == [[0, 2], [1]]
    assert graph.num_pairs == 3
    wide = AttributionGraph.from_users_per_example([[*range(40), *range(40)]])  # beyond the short-row sort
    assert plain(wide) == [list(range(40))]


def test_examples_without_users():
    graph = AttributionGraph.from_users_per_example([[], [1], []])
    assert graph.users_per_example.tolist() == [0, 1, 0]
    assert (graph.num_examples, graph.num_users) == (3, 2)
    assert graph.digest != AttributionGraph.from_users_per_example([[], [1]]).digest
    for empty in (
        AttributionGraph.from_users_per_example([]),
        AttributionGraph.from_pairs([], [], num_examples=0, num_users=0),
    ):
        assert (empty.num_examples, empty.num_users, empty.num_pairs) == (0, 0, 0)
        assert empty.by_user[0].tolist() == [0]


@given(rows_of_users, st.permutations(range(7)), st.randoms(use_true_random=False))
def test_digest_ignores_order_and_labels(rows, relabelled, random):
    ids = [f"m{i}" for i in range(len(rows))]
    keys = [f"u{i}" for i in range(7)]
    graph = AttributionGraph.from_users_per_example(rows, num_users=7, example_ids=ids, user_keys=keys)
    order = list(range(len(rows)))
    random.shuffle(order)
    moved_keys = [""] * 7
    for user, label in enumerate(relabelled):
        moved_keys[label] = keys[user]
    moved = AttributionGraph.from_users_per_example(
        [[relabelled[user] for user in rows[i]] for i in order],
        num_users=9,  # users that nobody meets do not count either
        example_ids=[ids[i] for i in order],
        user_keys=[*moved_keys, "nobody", "nobody else"],
    )
    assert moved.digest == graph.digest
    assert moved.digest != AttributionGraph.from_users_per_example([*rows, []], num_users=7, user_keys=keys).digest


def test_digest_sees_ids_pairs_and_keys():
    base = AttributionGraph.from_users_per_example([[0], [1]])
    same = [
        AttributionGraph.from_users_per_example([[0], [1]], example_ids=["0", "1"]),
        AttributionGraph.from_users_per_example([[0], [1]], example_ids=[0, 1], user_keys=["0", "1"]),
        AttributionGraph.from_users_per_example([[0], [1]], user_keys=pa.array([0, 1], pa.uint64())),
    ]
    assert {graph.digest for graph in same} == {base.digest}
    other = [
        AttributionGraph.from_users_per_example([[0], [0]], num_users=2),
        AttributionGraph.from_users_per_example([[0], [1]], example_ids=["0", "01"]),
        AttributionGraph.from_users_per_example([[0], [1]], user_keys=["0", "x"]),
        AttributionGraph.from_users_per_example([[0], [0, 1]]),
        # An id and a key that together read the same as another pair's.
        AttributionGraph.from_users_per_example([[0], [1]], example_ids=["01", "1"], user_keys=["", "1"]),
    ]
    assert len({graph.digest for graph in [base, *other]}) == len(other) + 1


def test_graph_is_immutable():
    graph = AttributionGraph.from_users_per_example([[0, 1], [1]])
    with pytest.raises(dataclasses.FrozenInstanceError):
        graph.num_users = 7  # type: ignore[misc]
    for array in (graph.indptr, graph.users, graph.users_per_example, graph.examples_per_user, *graph.by_user):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    assert pickle.loads(pickle.dumps(graph)).digest == graph.digest


def test_from_csr_keeps_memory_and_leaves_it_alone():
    indptr, users = np.array([0, 2, 3]), np.array([0, 1, 1], dtype=np.int32)
    graph = AttributionGraph.from_csr(indptr, users, num_users=2)
    assert np.shares_memory(graph.users, users)
    assert np.shares_memory(graph.indptr, indptr)
    unsorted = np.array([1, 0, 1], dtype=np.int32)
    assert plain(AttributionGraph.from_csr(indptr, unsorted, num_users=2)) == [[0, 1], [1]]
    assert unsorted.tolist() == [1, 0, 1]
    strided = np.arange(6, dtype=np.int32)[::2]
    assert plain(AttributionGraph.from_csr([0, 3], strided, num_users=5)) == [[0, 2, 4]]


@given(rows_of_users.filter(len), st.data())
def test_subgraph(rows, data):
    keep = data.draw(st.lists(st.integers(0, len(rows) - 1), unique=True))
    for ids in (None, [f"m{i}" for i in range(len(rows))]):
        graph = AttributionGraph.from_users_per_example(rows, num_users=7, example_ids=ids)
        part = graph.subgraph(keep)
        assert plain(part) == [sorted(set(rows[i])) for i in keep]
        assert part.num_users == 7
        assert part.ids_of(range(len(keep))).to_pylist() == [i if ids is None else ids[i] for i in keep]
    mask = np.isin(np.arange(len(rows)), keep)
    assert plain(graph.subgraph(mask)) == [sorted(set(rows[i])) for i in sorted(keep)]


@given(rows_of_users, st.sets(st.integers(0, 6)))
def test_without_users(rows, gone):
    graph = AttributionGraph.from_users_per_example(rows, num_users=7)
    left = graph.without_users(sorted(gone))
    keys = left.user_keys.to_pylist()
    assert keys == [user for user in range(7) if user not in gone]
    assert [[keys[user] for user in row] for row in plain(left)] == [sorted(set(row) - gone) for row in rows]
    assert left.num_unprotected_users == len(gone)
    assert left.num_examples == graph.num_examples
    assert left.without_users([]).num_unprotected_users == len(gone)


def test_large_user_labels_are_64_bit():
    graph = AttributionGraph.from_csr([0, 1], [2**31], num_users=2**31 + 1)
    assert graph.users.dtype == np.int64
    assert graph.users.tolist() == [2**31]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AttributionGraph.from_csr([0, 1], [5], num_users=5), r"example 0 has user 5, not in 0\.\.4; raise num_users"),
        (lambda: AttributionGraph.from_csr([0, 0, 1], [-1], num_users=5), "example 1 has user -1"),
        (lambda: AttributionGraph.from_csr([0, 2, 1], [0], num_users=1), "indptr must not decrease"),
        (lambda: AttributionGraph.from_csr([1, 1], [0], num_users=1), "indptr must start at 0"),
        (lambda: AttributionGraph.from_csr([], [], num_users=1), "indptr must start at 0"),
        (lambda: AttributionGraph.from_csr([0, 2], [0], num_users=1), "indptr must start at 0"),
        (lambda: AttributionGraph.from_csr([0, 1], [0.5], num_users=1), "users must be a one-dimensional array of integers"),
        (lambda: AttributionGraph.from_csr([0, 1], [True], num_users=1), "users must be a one-dimensional array of integers"),
        (lambda: AttributionGraph.from_csr([0, 1], [[0]], num_users=1), "users must be a one-dimensional array of integers"),
        (lambda: AttributionGraph.from_csr([0, 1], [0], num_users=-1), "num_users must be an integer"),
        (lambda: AttributionGraph.from_csr([0, 1], [2**64 - 1], num_users=1), "users must be below 2"),
        (lambda: AttributionGraph.from_csr([0, 1], [2**70], num_users=1), "users must be a one-dimensional array of integers"),
        (lambda: AttributionGraph.from_users_per_example([["a"]]), "users_per_example must be a one-dimensional array of integers"),
        (lambda: AttributionGraph.from_users_per_example([[[1], [2, 3]]]), "users_per_example must be a one-dimensional array"),
        (lambda: AttributionGraph.from_users_per_example([[0]], example_ids=["a", "b"]), "example_ids must have 1 entries"),
        (lambda: AttributionGraph.from_users_per_example([[0], [0]], example_ids=["a", "a"]), "example_ids must be unique"),
        (lambda: AttributionGraph.from_users_per_example([[0]], user_keys=[None]), "user_keys has no value at row 0"),
        (lambda: AttributionGraph.from_pairs([0, 1], [0], num_examples=2, num_users=1), "user must have 2 entries, not 1"),
        (lambda: AttributionGraph.from_pairs([2], [0], num_examples=2, num_users=1), "pair 0 has example 2"),
        (lambda: AttributionGraph.from_users_per_example([[0]]).subgraph([1]), "examples must be in 0..0"),
        (lambda: AttributionGraph.from_users_per_example([[0]]).subgraph([0, 0]), "examples must not repeat"),
        (lambda: AttributionGraph.from_users_per_example([[0]]).subgraph([True, False]), "examples must have 1 entries"),
        (lambda: AttributionGraph.from_users_per_example([[0]]).without_users([1]), "users must be in 0..0"),
    ],
)  # fmt: skip
def test_bad_arguments(make, message):
    with pytest.raises(InputError, match=message):
        make()
