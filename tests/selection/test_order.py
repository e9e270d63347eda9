"""The shared order against a plain sort, the xxhash package, and values that Spark gave."""

import itertools

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from coowned.attribution.graph import AttributionGraph, read_only
from coowned.errors import InputError
from coowned.progress import silent
from coowned.selection import order
from coowned.selection.order import hash_order, ordered_rows, part
from coowned.testing.strategies import attribution_graphs

# Spark 4: SELECT xxhash64(cast(<seed> AS BIGINT), cast(<id> AS STRING))
SPARK = {
    (0, "0"): -6976473224671388967,
    (0, "7"): -581908036408372598,
    (0, "9999999"): 5896121323888630057,
    (0, "10000000"): 7197397421668614094,
    (0, "-5"): -6301248974022723049,
    (0, "9223372036854775807"): 7261813133402284234,
    (0, ""): -5904888402568203703,
    (0, "é"): 6271536446567022464,
    (0, "message-id@example.org"): -308829029719391627,
    (0, "x" * 31): 4754216528698044823,
    (0, "x" * 32): -2457743572982771478,
    (0, "0123456789" * 7 + "end"): -3786066704497025013,
    (1, "10"): 2166242506483666590,
    (1, "a"): -8527884376001292090,
    (2**63 - 1, "0"): -523375818311032411,
    (2**63 - 1, "10000000"): -6860567301589279696,
}


def signed_hash(seed, text):
    key = xxhash.xxh64_intdigest(seed.to_bytes(8, "little"), seed=42)
    return int(np.uint64(xxhash.xxh64_intdigest(text.encode(), seed=key)).astype(np.int64))


def kernel_hash(seed, text):
    key = np.uint64(order.hash_seed(np.int64(seed)))
    data = np.frombuffer(text.encode() + b"?", np.uint8)
    return int(np.uint64(order.hash_text(data, 0, len(data) - 1, key)).astype(np.int64))


def plain_order(graph, seed):
    ids = range(graph.num_examples) if graph.example_ids is None else graph.example_ids.to_pylist()
    keys = [
        (int(users), signed_hash(seed, str(name)), str(name).encode())
        for users, name in zip(graph.users_per_example, ids, strict=True)
    ]
    return sorted(range(graph.num_examples), key=keys.__getitem__)


@pytest.mark.parametrize(("seed", "name"), SPARK)
def test_hash_is_that_of_spark(seed, name):
    assert kernel_hash(seed, name) == signed_hash(seed, name) == SPARK[seed, name]


@given(text=st.text(max_size=150), seed=st.integers(0, 2**63 - 1))
def test_hash_of_text(text, seed):
    assert kernel_hash(seed, text) == signed_hash(seed, text)


@given(
    number=st.integers(-(2**63), 2**63 - 1) | st.integers(0, 19).map(lambda n: 10**n - 1 if n < 19 else 10**18),
    seed=st.integers(0, 2**63 - 1),
)
def test_hash_of_numbers_is_that_of_their_text(number, seed):
    key = np.uint64(order.hash_seed(np.int64(seed)))
    none = np.empty(0, np.int64), np.empty(0, np.uint8)
    ids = order.Ids(key, *map(read_only, (np.array([number]), *none)))  # as those of a graph
    keys = np.empty(1, np.uint32)
    order.hash_ids(ids, 0, 1, keys)
    assert keys[0] == (signed_hash(seed, str(number)) + 2**63) >> 32


@settings(max_examples=200)
@given(graph=attribution_graphs(max_examples=40), seed=st.sampled_from([0, 1, 2**63 - 1]))
def test_hash_order_is_the_plain_sort(graph, seed):
    order = ordered_rows(graph, seed=seed, ties="hash", progress=silent)
    assert order.examples.tolist() == plain_order(graph, seed)


@pytest.mark.parametrize("kind", ["index", "numbers", "text"])
def test_hash_order_of_many_examples(kind):
    """More than one bucket a rank, and several ranks."""
    rng = np.random.default_rng(5)
    indptr = np.concatenate([[0], np.cumsum(rng.integers(0, 3, 30_000))])
    users = np.concatenate([np.sort(rng.choice(50, size=size, replace=False)) for size in np.diff(indptr)])
    ids = {
        "index": None,
        "numbers": rng.permutation(30_000) * 999_983,
        "text": [f"{number}@mail" for number in rng.permutation(30_000)],
    }[kind]
    graph = AttributionGraph.from_csr(indptr, users, num_users=50, example_ids=ids)
    rows = ordered_rows(graph, seed=9, ties="hash", progress=silent)
    assert rows.examples.tolist() == plain_order(graph, 9)
    assert np.array_equal(np.diff(rows.indptr), graph.users_per_example[rows.examples])
    assert np.array_equal(rows.users, graph.subgraph(rows.examples).users)


@given(graph=attribution_graphs(max_examples=40))
def test_input_order_is_a_stable_sort(graph):
    rows = ordered_rows(graph, seed=0, ties="input", progress=silent)
    users_of = graph.users_per_example.tolist()
    assert rows.examples.tolist() == sorted(range(graph.num_examples), key=users_of.__getitem__)


@given(graph=attribution_graphs(max_examples=40), ties=st.sampled_from(["hash", "input"]))
def test_rows_keep_their_users(graph, ties):
    rows = ordered_rows(graph, seed=3, ties=ties, progress=silent)
    for row, example in enumerate(rows.examples):
        laid = rows.users[rows.indptr[row] : rows.indptr[row + 1]].tolist()
        assert laid == graph.users[graph.indptr[example] : graph.indptr[example + 1]].tolist()


@settings(max_examples=30)
@given(ids=st.lists(st.integers(-(10**6), 10**6), min_size=2, max_size=40, unique=True))
def test_equal_hashes_are_ordered_by_the_bytes_of_the_id(ids):
    """Real collisions of 64 bits cannot be found, so the last comparison is tried by itself."""
    in_bytes = sorted(ids, key=lambda number: str(number).encode())
    text, other = np.empty(20, np.uint8), np.empty(20, np.uint8)
    for a, b in itertools.pairwise(in_bytes):
        first = (text, order.put_decimal(np.int64(a), text), 20)
        second = (other, order.put_decimal(np.int64(b), other), 20)
        assert order.bytes_before(*first, *second)
        assert not order.bytes_before(*second, *first)


def test_equal_upper_halves_are_ordered_by_the_whole_hash():
    """Among 200,000 ids four or five pairs are expected to share the upper half of their hash; the seed is fixed."""
    order = hash_order(np.zeros(200_000, np.int32), None, seed=0, progress=silent)
    signed = np.array([signed_hash(0, str(i)) for i in range(200_000)])
    assert len(np.unique(signed >> 32)) < len(signed)
    assert (np.diff(signed[order]) > 0).all()


def test_seven_and_its_text_are_the_same_id():
    numbers = AttributionGraph.from_users_per_example([[0]] * 50, example_ids=list(range(100, 150)))
    texts = AttributionGraph.from_users_per_example([[0]] * 50, example_ids=[str(i) for i in range(100, 150)])
    a, b = (ordered_rows(graph, seed=4, ties="hash", progress=silent).examples for graph in (numbers, texts))
    assert a.tolist() == b.tolist()
    index = AttributionGraph.from_users_per_example([[0]] * 50)
    same = AttributionGraph.from_users_per_example([[0]] * 50, example_ids=list(range(50)))
    a, b = (ordered_rows(graph, seed=4, ties="hash", progress=silent).examples for graph in (index, same))
    assert a.tolist() == b.tolist()


def test_order_does_not_depend_on_the_row_order():
    names = [f"id{i}" for i in range(60)]
    rows = [list(range(i % 4)) for i in range(60)]
    shuffled = np.random.default_rng(1).permutation(60)
    graph = AttributionGraph.from_users_per_example(rows, num_users=4, example_ids=names)
    other = AttributionGraph.from_users_per_example(
        [rows[i] for i in shuffled], num_users=4, example_ids=[names[i] for i in shuffled]
    )
    walked = [names[i] for i in ordered_rows(graph, seed=2, ties="hash", progress=silent).examples]
    assert walked == [names[shuffled[i]] for i in ordered_rows(other, seed=2, ties="hash", progress=silent).examples]


def test_split():
    graph = AttributionGraph.from_users_per_example([[0, 1, 2], [], [0], [1, 2], [2]])
    rows = ordered_rows(graph, seed=0, ties="input", progress=silent)
    assert rows.examples[: rows.num_unattributed].tolist() == [1]
    assert rows.attributed.tolist() == rows.examples[rows.attributed_rows()].tolist() == [2, 4, 3, 0]
    assert [rows.examples[half].tolist() for half in rows.split(1)] == [[2, 4], [3, 0]]
    assert [rows.examples[half].tolist() for half in rows.split(9)] == [[2, 4, 3, 0], []]


def test_a_sliced_id_array_is_read_from_its_offset():
    ids = pa.array(["left out", "b", "c", "d"], pa.large_string())[1:]
    graph = AttributionGraph.from_users_per_example([[0], [0], [0]], example_ids=ids)
    assert ordered_rows(graph, seed=0, ties="hash", progress=silent).examples.tolist() == plain_order(graph, 0)


def test_too_many_examples_are_refused():
    ranks = np.broadcast_to(np.int32(0), (1 << 32,))  # no memory behind it
    with pytest.raises(InputError, match="Spark"):
        hash_order(ranks, None, seed=0, progress=silent)


def test_part_of_a_progress():
    seen = []
    part(lambda done, message: seen.append((done, message)), 0.5, 1.0)(0.5, "half")
    assert seen == [(0.75, "half")]
