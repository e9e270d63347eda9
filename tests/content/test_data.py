"""Features and labels."""

import dataclasses
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from tests.arrays import filled
from tests.small_world import part_of

from coowned import InputError, from_table, threads
from coowned.attribution.graph import AttributionGraph
from coowned.content.data import FeatureTable, rows_in_place, with_norms
from coowned.models.logistic_regression import LogisticRegression
from coowned.synthetic.logistic_data import WorldData
from coowned.training.loop import train


def columns(**named):
    return from_table(pa.table({"users": [["a"], ["b"], ["a", "b"]], **named}))


LABEL = {"label": [0, 1, 1]}


@pytest.mark.parametrize("kind", [pa.list_(pa.float64()), pa.large_list(pa.float32()), pa.list_(pa.int64(), 2)])
def test_list_columns(kind):
    examples = columns(features=pa.array([[1, 2], [3, 4], [5, 6]], kind), **LABEL)
    data = FeatureTable.from_examples(examples, features="features", label="label", num_features=2)
    assert data.features.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert data.labels.tolist() == [0, 1, 1]


def test_number_columns():
    examples = columns(x=[1, 2, 3], y=[0.5, None, 1e300], label=[True, False, None])
    data = FeatureTable.from_examples(examples, features=["x", "y"], label="label")
    assert data.features[0].tolist() == [1.0, 0.5]
    assert np.isnan(data.features[1, 1])  # missing: without influence, as is what float32 cannot hold
    assert np.isinf(data.features[2, 1])
    assert data.labels[:2].tolist() == [1, 0]
    assert np.isnan(data.labels[2])


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        (pa.int64(), 1_789_000_000_123_456_789),  # a time in nanoseconds
        (pa.int64(), -(2**63)),
        (pa.uint64(), 2**64 - 1),
        (pa.int8(), -5),
        (pa.float16(), np.float16(1.5)),
        (pa.decimal32(7, 2), Decimal("-1.25")),
        (pa.decimal64(12, 2), Decimal("1.25")),
        (pa.decimal128(38, 2), Decimal("123456789012345678.25")),
        (pa.decimal256(76, 0), Decimal(10**30)),
    ],
)
def test_every_kind_of_number_is_rounded(kind, number):
    for column, name in (
        (pa.array([number, None, 0], kind), ["x"]),
        (pa.array([[number], None, [0]], pa.list_(kind)), "x"),
    ):
        data = FeatureTable.from_examples(columns(x=column, **LABEL), features=name, label="label", num_features=1)
        assert np.array_equal(data.features[:, 0], np.array([float(number), np.nan, 0], np.float32), equal_nan=True)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1, 2, 3], pa.timestamp("ns")),
        pa.array([1, 2, 3], pa.duration("s")),
        pa.array([1, 2, 3], pa.date32()),
        pa.array([1, 2, 3]).dictionary_encode(),
        pa.array([{"a": 1}] * 3),
        pa.nulls(3),
    ],
    ids=lambda column: str(column.type),
)
def test_what_is_no_number_is_refused(column):
    with pytest.raises(InputError, match=r"column 'x' must contain numbers, not "):
        FeatureTable.from_examples(columns(x=column, **LABEL), features=["x"], label="label")


NAN = float("nan")


@pytest.mark.parametrize(
    ("named", "features", "matrix", "labels"),
    [
        ({"x": [[1.0, 2.0], [3.0], [4.0, 5.0]], **LABEL}, "x", [[1, 2], [NAN, NAN], [4, 5]], [0, 1, 1]),
        ({"x": pa.array([[], [], []], pa.list_(pa.int8())), **LABEL}, "x", [[NAN], [NAN], [NAN]], [0, 1, 1]),
        ({"x": [1.0, 2.0, 3.0], "label": [None, NAN, 7.0]}, ["x"], [[1], [2], [3]], [NAN, NAN, NAN]),
        ({"x": [None, float("inf"), 1e300], **LABEL}, ["x"], [[NAN], [np.inf], [np.inf]], [0, 1, 1]),
        ({"x": [1, 2, 3], "label": [0, 1, -2]}, ["x"], [[1], [2], [3]], [0, 1, NAN]),
    ],
)
def test_only_the_schema_refuses(named, features, matrix, labels):
    width = len(matrix[0])
    data = FeatureTable.from_examples(columns(**named), features=features, label="label", num_features=width)
    assert np.array_equal(data.features, np.array(matrix, np.float32), equal_nan=True)
    assert np.array_equal(data.labels, np.array(labels, np.float32), equal_nan=True)
    usable = np.isfinite(data.features).all(axis=1) & np.isfinite(data.labels)
    assert data.num_unusable == np.count_nonzero(~usable) > 0


def test_rows_that_were_not_read(small):
    features, labels = small.world.batch(np.arange(300))
    used = np.arange(300) % 3 == 0
    rows = np.where(used, np.cumsum(used) - 1, -1)
    data = FeatureTable(graph=small.graph, features=features[used], labels=labels[used], rows=rows)
    whole = FeatureTable(graph=small.graph, features=features, labels=labels)
    for few, all_ in ((data, whole), (with_norms(data), with_norms(whole))):
        out = [{name: np.zeros((2, *shape), np.float32) for name, shape in few.shapes().items()} for _ in range(2)]
        few.fill(np.array([0, 297]), out[0])
        all_.fill(np.array([0, 297]), out[1])
        for name in out[0]:
            assert np.array_equal(out[0][name], out[1][name])
        with pytest.raises(InputError, match="not selected"):
            few.fill(np.array([0, 1]), out[0])


def test_missing_lists_and_chunks():
    column = pa.chunked_array([pa.array([[1.0, 2.0]]), pa.array([None, [5.0, None]], pa.list_(pa.float64()))])
    examples = columns(features=column, **LABEL)
    data = FeatureTable.from_examples(examples, features="features", label="label", num_features=2)
    assert np.array_equal(data.features, [[1, 2], [np.nan, np.nan], [5, np.nan]], equal_nan=True)


@pytest.mark.parametrize(
    ("named", "features", "says"),
    [
        ({"features": ["a", "b", "c"], **LABEL}, "features", "must contain numbers"),
        ({"features": [["a"], ["b"], ["c"]], **LABEL}, "features", "must contain numbers"),
        ({"x": [1, 2, 3], **LABEL}, "y", "no column 'y'"),
        ({"x": [1, 2, 3], **LABEL}, [], "must name"),
        ({"x": [1, 2, 3], "label": ["a", "b", "c"]}, ["x"], "declare its classes"),
    ],
)
def test_bad_columns(named, features, says):
    with pytest.raises(InputError, match=says):
        FeatureTable.from_examples(columns(**named), features=features, label="label")


def test_bad_arrays(small):
    good = np.zeros((300, 2))
    for features, labels in ((np.zeros(300), np.zeros(300)), (good, np.zeros(299)), (good[:9], np.zeros(9))):
        with pytest.raises(InputError):
            FeatureTable(graph=small.graph, features=features, labels=labels)


def test_fill_gives_the_rows(small):
    features, labels = small.world.batch(np.arange(300))
    data = FeatureTable(graph=small.graph, features=features, labels=labels)
    part = part_of(part_of(data, np.arange(100, 200)), np.array([5, 3]))
    assert part.graph.num_examples == 2
    found = filled(part, [1, 0, 1])
    assert np.array_equal(found["features"], features[[103, 105, 103]])
    assert np.array_equal(found["labels"], labels[[103, 105, 103]])


def test_rows_in_place_are_those_of_fill(small):
    features, labels = small.world.batch(np.arange(300))
    table = FeatureTable(graph=small.graph, features=features, labels=labels)
    stored = WorldData.part(small.world.materialize(), np.arange(50, 90))
    wanted = np.array([7, 2, 7, 0])
    for data in (table, part_of(table, np.array([9, 8, 3, 1, 4, 6, 11, 200])), stored):
        for read in (data, with_norms(data)):
            place = rows_in_place(read, wanted)
            assert place is not None
            assert np.shares_memory(place.source, data.features)
            out = filled(read, wanted)
            assert np.array_equal(place.arrays()["features"], out["features"])
            rest = {name: np.zeros_like(array) for name, array in out.items() if name != "features"}
            read.fill(wanted, rest)
            assert all(np.array_equal(rest[name], out[name]) for name in rest)
    assert rows_in_place(small.data, wanted) is None  # made on demand
    assert rows_in_place(with_norms(small.data), wanted) is None


def test_many_numbers_are_gathered_by_threads(small, monkeypatch):
    from coowned.content import data as module

    features, labels = small.world.batch(np.arange(300))
    data = FeatureTable(graph=small.graph, features=features, labels=labels)
    order = np.random.default_rng(0).integers(0, 300, 1000)
    alone = filled(data, order)
    monkeypatch.setattr(module, "_NUMBERS_A_THREAD", 100)
    monkeypatch.setattr(threads, "cores", lambda: 3)
    assert np.array_equal(filled(data, order)["features"], alone["features"])


def test_world_part_equals_the_whole(small):
    rows = np.array([7, 2, 250])
    part = WorldData.part(small.world, rows)
    found = filled(part, [2, 0])
    assert np.array_equal(found["features"], small.world.features([250, 7]))
    assert np.array_equal(found["labels"], small.world.labels([250, 7]))
    stored = WorldData.part(small.world.materialize(), rows)
    assert np.array_equal(filled(stored, [2, 0])["features"], found["features"])


def test_digest_follows_content(small):
    features, labels = small.world.batch(np.arange(300))
    data = FeatureTable(graph=small.graph, features=features, labels=labels)
    same = FeatureTable(graph=small.graph, features=features.copy(), labels=labels.astype(float))
    assert data.digest == same.digest
    other = features.copy()
    other[299, 5] += 1e-6
    different = {
        data.digest,
        dataclasses.replace(data, features=other).digest,
        dataclasses.replace(data, labels=1 - labels).digest,
        part_of(data, np.arange(299)).digest,
        part_of(data, np.arange(300)[::-1]).digest,
        WorldData.part(small.world).digest,
        WorldData.part(small.world, np.arange(299)).digest,
    }
    assert len(different) == 7


def test_rows_must_be_rows_and_not_repeat():
    graph = AttributionGraph.from_users_per_example([[0], [1]])
    features, labels = np.ones((3, 2), np.float32), np.zeros(3, np.float32)
    for rows in ([0, 0], [0, 3], [-2, 0]):
        with pytest.raises(InputError, match="rows must"):
            FeatureTable(graph=graph, features=features, labels=labels, rows=np.array(rows))


def test_norms_are_those_of_the_rows(small):
    """Stored or made on demand, whole or a part: the same bits, never below the row's norm."""
    features, labels = small.world.batch(np.arange(300))
    chosen, order = np.arange(5, 205)[::-1], [3, 0, 199, 3]
    table = FeatureTable(graph=small.graph, features=features, labels=labels)
    found = []
    for data in (
        part_of(table, chosen),
        WorldData.part(small.world, chosen),
        WorldData.part(small.world.materialize(), chosen),
    ):
        normed = with_norms(data)
        assert normed.shapes() == {"features": (6,), "labels": (), "norms": ()}
        assert normed.digest == data.digest
        assert normed.graph is data.graph
        row = filled(normed, order)
        exact = np.linalg.norm(np.float64(row["features"]), axis=1)
        assert (row["norms"] >= exact).all()
        np.testing.assert_allclose(row["norms"], exact, rtol=1e-6)
        assert np.array_equal(row["features"], features[chosen[order]])
        found.append(row["norms"])
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


def test_norms_of_what_is_not_finite():
    graph = AttributionGraph.from_users_per_example([[0], [1], [2], [3]])
    features = np.array([[np.nan, 1], [np.inf, 1], [3e38, 3e38], [0, 0]], np.float32)
    table = FeatureTable(graph=graph, features=features, labels=np.zeros(4))
    norms = filled(with_norms(table), [0, 1, 2, 3])["norms"]
    assert np.isinf(norms[:3]).all()
    assert 0 <= norms[3] < 1e-40


def test_norms_follow_what_was_written_over(small):
    features, labels = small.world.batch(np.arange(300))
    table = FeatureTable(graph=small.graph, features=features, labels=labels)
    before = filled(with_norms(table), [7])["norms"][0]
    features *= 8
    assert filled(with_norms(table), [7])["norms"][0] == pytest.approx(8 * before, rel=1e-6)
    model, plan = LogisticRegression(num_features=6), small.plan()
    fresh = FeatureTable(graph=small.graph, features=features.copy(), labels=labels)
    found = [train(plan, model, data).parameters["coefficients"] for data in (table, fresh)]
    assert np.array_equal(*found)


def test_other_data_have_no_norms():
    class Other:
        pass

    other = Other()
    assert with_norms(other) is other


def test_digest_follows_the_order_of_the_ids():
    """The same pairs and the same rows, but content that belongs to others: another run."""
    content = {"features": np.ones((2, 1)), "labels": np.zeros(2)}
    graphs = [
        AttributionGraph.from_users_per_example(users, example_ids=ids, user_keys=["u", "v"])
        for users, ids in (([[0], [1]], ["a", "b"]), ([[1], [0]], ["b", "a"]))
    ]
    assert graphs[0].digest == graphs[1].digest
    assert FeatureTable(graph=graphs[0], **content).digest != FeatureTable(graph=graphs[1], **content).digest
