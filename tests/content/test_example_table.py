"""Examples of any shape: what is read, what cannot be used, and a key for every copy."""

import dataclasses

import numpy as np
import pyarrow as pa
import pytest
from tests.arrays import filled

from coowned import AttributionGraph, InputError, from_table
from coowned.content.data import Draw
from coowned.content.example_table import KEY, USABLE, ExampleColumn, ExampleTable, columns_of, numeric_columns
from coowned.exact.keys import RunKey

COLUMNS = (
    ExampleColumn(name="x", column="features", shape=(2,)),
    ExampleColumn(name="image", column="pixels", shape=(2, 2), whole=True),
    ExampleColumn(name="y", column="folder", whole=True, classes=("spam", "ham")),
    ExampleColumn(name="n", column="count", whole=True),
)


def make_examples(**changes):
    columns = {
        "features": pa.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], pa.list_(pa.float64())),
        "pixels": pa.array([[[1, 2], [3, 4]]] * 3),
        "folder": pa.array(["ham", "spam", "ham"]),
        "count": pa.array([7, 8, 9]),
    } | changes
    return from_table(pa.table({"users": [["a"], ["b"], ["c"]], **columns}), users="users")


def test_fill_gives_the_rows():
    table = ExampleTable.from_examples(make_examples(), COLUMNS)
    out = filled(table, [2, 0])
    assert out["x"].tolist() == [[5, 6], [1, 2]]
    assert out["x"].dtype == np.float32
    assert out["image"].shape == (2, 2, 2)
    assert out["image"].dtype == np.int32
    assert out["y"].tolist() == [1, 1]
    assert out["n"].tolist() == [9, 7]
    part = dataclasses.replace(table, graph=table.graph.subgraph(np.array([2])), rows=np.array([2]))
    assert {name: array.tolist() for name, array in filled(part, [0]).items()} == {
        name: array[:1].tolist() for name, array in out.items()
    }
    unread = dataclasses.replace(part, rows=np.array([-1]))
    with pytest.raises(InputError, match="was not read"):
        filled(unread, [0])


@pytest.mark.parametrize(
    "changes",
    [
        {"features": pa.array([[1.0, 2.0], [3.0, None], [5.0, 6.0]])},
        {"features": pa.array([[1.0, 2.0], None, [5.0, 6.0]])},
        {"features": pa.array([[1.0, 2.0], [3.0], [5.0, 6.0]])},
        {"features": pa.array([[1.0, 2.0], [3.0, float("nan")], [5.0, 6.0]])},
        {"features": pa.array([[1.0, 2.0], [3.0, 1e300], [5.0, 6.0]])},
        {"features": pa.array([[1.0, 2.0], None, [5.0, 6.0]], pa.list_(pa.float32(), 2))},
        {"pixels": pa.array([[[1, 2], [3, 4]], [[1], [2, 3]], [[1, 2], [3, 4]]])},
        {"folder": pa.array(["ham", "eggs", "ham"])},
        {"folder": pa.array(["ham", None, "ham"]).dictionary_encode()},
        {"count": pa.array([7, 2**40, 9])},
        {"count": pa.array([7, 2**63, 9], pa.uint64())},
        {"count": pa.array([7, None, 9], pa.int8())},
    ],
)
def test_only_the_schema_refuses(changes):
    plain, odd = (ExampleTable.from_examples(make_examples(**given), COLUMNS) for given in ({}, changes))
    assert odd.num_unusable == 1
    assert plain.num_unusable == 0
    one, other = filled(plain, [0, 1, 2]), filled(odd, [0, 1, 2])
    assert other[USABLE].tolist() == [True, False, True]
    for name in ("x", "image", "y", "n"):
        assert not other[name][1].any()
        assert other[name][[0, 2]].tolist() == one[name][[0, 2]].tolist()


def test_no_rows_are_a_table():
    examples = make_examples()
    none = dataclasses.replace(
        examples, graph=examples.graph.subgraph(np.array([], np.int64)), payload=examples.payload.slice(0, 0)
    )
    table = ExampleTable.from_examples(none, COLUMNS)
    assert {name: len(array) for name, array in filled(table, []).items()} == dict.fromkeys(table.shapes(), 0)


def test_a_class_that_the_columns_type_cannot_hold_is_no_error():
    columns = (ExampleColumn(name="n", column="count", whole=True, classes=(7, 300)),)
    table = ExampleTable.from_examples(make_examples(count=pa.array([7, 8, 9], pa.int8())), columns)
    assert np.asarray(table.usable).tolist() == [True, False, False]


def test_schema_is_checked():
    schema = make_examples().payload.schema
    assert columns_of(schema, {"x": "features", "n": "count"}, {}) == {"x": (None, False), "n": ((), True)}
    assert columns_of(pa.schema({"x": pa.list_(pa.float32(), 3)}), {"x": "x"}, {}) == {"x": ((3,), False)}
    assert numeric_columns(schema) == ["features", "pixels", "count"]
    for columns, match in (({"x": "other"}, "no column 'other'"), ({"x": "folder"}, "must contain numbers")):
        with pytest.raises(InputError, match=match):
            columns_of(schema, columns, {})
    with pytest.raises(InputError, match=r"shape \(3,\), not \(2, 2\)"):
        columns_of(pa.schema({"x": pa.list_(pa.float32(), 3)}), {"x": "x"}, {"x": (2, 2)})


def test_booleans_and_flat_images():
    examples = make_examples(count=pa.array([True, False, None]), features=pa.array([[1, 2, 3, 4]] * 3))
    columns = (
        ExampleColumn(name="b", column="count", whole=True, classes=(0, 1)),
        ExampleColumn(name="x", column="features", shape=(2, 2)),
    )
    out = filled(ExampleTable.from_examples(examples, columns), [0, 1, 2])
    assert out["b"].tolist() == [1, 0, 0]
    assert out[USABLE].tolist() == [True, True, False]
    assert out["x"][0].tolist() == [[1, 2], [3, 4]]


def test_keys_are_new_for_every_step_and_copy():
    table = ExampleTable.from_examples(make_examples(), COLUMNS)
    examples, key = [0, 0, 1], RunKey.from_seed(1)

    def keys(step, copies, run_key=key):
        return [tuple(row) for row in filled(table, examples, Draw(run_key, step, np.array(copies, np.int32)))[KEY]]

    seen = [*keys(0, [0, 1, 0]), *keys(1, [0, 1, 0]), *keys(0, [0, 1, 0], RunKey.from_seed(2))]
    assert len(set(seen)) == 9
    assert keys(1, [0, 1, 0]) == seen[3:6]
    held_out = filled(table, examples)[KEY]
    assert (held_out == filled(table, examples)[KEY]).all()
    assert tuple(held_out[2]) not in seen
    part = dataclasses.replace(table, graph=table.graph.subgraph(np.array([1])), rows=np.array([1]))
    assert (filled(part, [0])[KEY] == held_out[2]).all()


def test_digest_follows_content():
    graph = AttributionGraph.from_users_per_example([[0], [1]])
    arrays = {"x": np.ones((2, 3)), "y": np.array([0, 1])}
    first = ExampleTable(graph=graph, arrays=arrays)
    others = [
        ExampleTable(graph=graph, arrays=arrays | {"x": np.zeros((2, 3))}),
        ExampleTable(graph=graph, arrays=arrays | {"y": np.array([1, 1])}),
        ExampleTable(graph=graph, arrays=arrays | {"y": np.array([0.0, 1.0])}),
        ExampleTable(graph=graph, arrays={"z": arrays["x"], "y": arrays["y"]}),
        ExampleTable(graph=graph, arrays=arrays, usable=np.array([True, False])),
        ExampleTable(graph=graph, arrays=arrays, rows=np.array([1, 0])),
        ExampleTable(graph=AttributionGraph.from_users_per_example([[0], [0]]), arrays=arrays),
    ]
    digests = {table.digest for table in (first, *others)}
    assert len(digests) == 8
    assert first.digest == ExampleTable(graph=graph, arrays=arrays).digest


@pytest.mark.parametrize(
    ("arrays", "match"),
    [
        ({}, "at least one array"),
        ({"x": np.array(["a", "b"])}, "must contain numbers"),
        ({"x": np.array([1, 2**40])}, "beyond 32 bits"),
        ({KEY: np.zeros(2)}, "choose another"),
        ({"x": np.zeros(2), "y": np.zeros(3)}, "y must have 2 entries"),
    ],
)
def test_arrays_are_checked(arrays, match):
    with pytest.raises(InputError, match=match):
        ExampleTable(graph=AttributionGraph.from_users_per_example([[0], [1]]), arrays=arrays)
