"""Columns as arrays: declared types may refuse, inferred ones never do."""

import csv as csv_module
import dataclasses
import json
import sqlite3
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from coowned import from_table, read_csv, read_jsonl, read_parquet, read_sql
from coowned.attribution import table_files
from coowned.attribution.tables import types_are_inferred, with_inferred_types
from coowned.content.columns import (
    check_label_column,
    check_number_columns,
    check_text_columns,
    class_indices,
    declared_classes,
    inferred_numbers,
    number_matrix,
    numbers,
    text_column,
)
from coowned.errors import InputError
from coowned.models.jax_model import JaxModel
from coowned.models.linear_regression import LinearRegression
from coowned.models.logistic_regression import LogisticRegression
from coowned.models.text_classifier import TextClassifier


def read(model, examples, tmp_path):
    return model.task(examples.payload.schema, folder=tmp_path, is_private=True).read(examples)


def csv(tmp_path, *lines):
    file = tmp_path / "data.csv"
    file.write_text("\n".join(["users,x,z,y", *lines]) + "\n")
    return read_csv(file, users="users")


ROWS = [f"u{i},{i},{0.5 * i},{i % 2}" for i in range(6)]


@pytest.mark.parametrize("odd", ["u,oops,1.5,1", "u,1,n/a,1", "u,1,2,maybe", "u,,,", "u,1,2,7", "u,x,y,z"])
def test_one_odd_cell_does_not_stop_a_run(tmp_path, odd):
    """Whatever a cell holds: its own row adds nothing, is counted, and no other row changes."""
    for model in (
        LogisticRegression(features=["x", "z"], label="y"),
        LinearRegression(features=["x", "z"], target="y", target_bound=5.0),
    ):
        _, plain, counts = read(model, csv(tmp_path, *ROWS), tmp_path)
        assert counts["unusable_rows"] == 0
        _, table, counts = read(model, csv(tmp_path, *ROWS[:3], odd, *ROWS[3:]), tmp_path)
        unusable = model.kind == "logistic-regression" or not odd.endswith("7")
        assert counts["unusable_rows"] == unusable
        np.testing.assert_array_equal(np.delete(table.features, 3, axis=0), plain.features)
        np.testing.assert_array_equal(np.delete(table.labels, 3), plain.labels)


def test_odd_labels_of_declared_classes(tmp_path):
    """One cell that is no number turns the column into text; one that is a number, texts into nothing else."""
    model = LogisticRegression(features=["x", "z"], label="y", classes=[3, 5])
    _, table, _ = read(model, csv(tmp_path, "a,1,1,3", "b,1,1,5", "c,1,1,none"), tmp_path)
    np.testing.assert_array_equal(table.labels, [0, 1, np.nan])
    model = LogisticRegression(features=["x", "z"], label="y", classes=["3", "5"])
    _, table, _ = read(model, csv(tmp_path, "a,1,1,3", "b,1,1,5"), tmp_path)
    np.testing.assert_array_equal(table.labels, [0, 1])
    _, table, _ = read(LogisticRegression(features=["x", "z"], label="y"), csv(tmp_path, "a,1,1,true"), tmp_path)
    np.testing.assert_array_equal(table.labels, [1])


def test_odd_cells_of_json_lines(tmp_path):
    file = tmp_path / "data.jsonl"
    rows = [{"users": ["a"], "features": [1, 2], "label": 1}, {"users": ["b"], "features": [3.5, 4], "label": 0}]
    for odd in ("nothing", 7, ["a", "b"], {"a": 1}, None, [1, 2, 3]):
        file.write_text("\n".join(map(json.dumps, [*rows, {"users": ["c"], "features": odd, "label": 1}])))
        _, table, counts = read(LogisticRegression(num_features=2), read_jsonl(file, users="users"), tmp_path)
        np.testing.assert_array_equal(table.features[:2], [[1, 2], [3.5, 4]])
        assert counts["unusable_rows"] == 1, odd


def test_numbers_where_text_is_expected(tmp_path):
    """All subjects of a file may look like numbers."""
    examples = csv(tmp_path, *ROWS)
    assert text_column(examples.payload, ["x", "users"]).to_pylist()[1] == "1\nu1"
    _, table, _ = read(TextClassifier(text="x", label="y", num_features=64), examples, tmp_path)
    assert len(table.labels) == 6


def test_declared_types_refuse(tmp_path):
    declared = pa.table({"users": [["a"]], "x": ["1.5"], "y": [1]})
    file = tmp_path / "data.parquet"
    pa.parquet.write_table(declared, file)
    for examples in (from_table(declared), read_parquet(file)):
        assert not types_are_inferred(examples.payload.schema)
        with pytest.raises(InputError, match="column 'x' must contain numbers, not string"):
            check_number_columns(examples.payload.schema, "x")
        with pytest.raises(InputError, match="column 'y' must contain text, not int64"):
            check_text_columns(examples.payload.schema, "y")
    more = with_inferred_types(declared).append_column("z", declared.column("x"))
    assert check_number_columns(more.schema, ["x", "z"]) == ["x", "z"]


def test_width_of_lists(tmp_path):
    """Declared, or fixed by the type; never what lists hold."""
    ragged = pa.table({"x": [[1.0, 2.0], [3.0], [4.0, 5.0], [6.0, 7.0, 8.0]]})
    assert np.isnan(number_matrix(ragged, "x", 3)[:3]).all()
    assert number_matrix(ragged, "x", 3)[3].tolist() == [6, 7, 8]
    fixed = pa.table({"x": pa.array([None, None, [1.0, 2.0, 3.0]], pa.list_(pa.float64(), 3))})
    assert number_matrix(fixed, "x").shape == (3, 3)
    with pytest.raises(InputError, match="'x' has 3 by its type; they must agree"):
        number_matrix(fixed, "x", 4)
    numbers_alone = pa.table({"x": [1.0, 2.0], "z": [3, 4]})
    assert number_matrix(numbers_alone, "x").shape == (2, 1)
    assert number_matrix(numbers_alone, ["x", "z"]).shape == (2, 2)
    with pytest.raises(InputError, match="num_features is 2, but column 'x' has 1 by its type"):
        number_matrix(numbers_alone, "x", 2)
    says = r"declare num_features \(1 for a single number\), or store fixed-size lists"
    for names in ("x", ["x"]):
        with pytest.raises(InputError, match=rf"list<item: double>, does not say how long a list is.*{says}"):
            number_matrix(ragged, names)
    examples = csv(tmp_path, *ROWS)
    with pytest.raises(InputError, match=f"SQL and Python lists do not declare.*{says}"):  # before anything is read
        LogisticRegression(features="x", label="y").task(examples.payload.schema, folder=tmp_path, is_private=True)
    assert read(LogisticRegression(features=["x"], label="y"), examples, tmp_path)[0].num_features == 1


def write_lists(kind, folder, cells):
    """Examples of a user each, with these cells in the column x, whose type is not that of fixed-size lists."""
    users, label = [f"u{i}" for i in range(len(cells))], [i % 2 for i in range(len(cells))]
    if kind == "jsonl":
        file = folder / "data.jsonl"
        rows = zip(users, cells, label, strict=True)
        file.write_text("\n".join(json.dumps({"users": u, "x": x, "label": y}) for u, x, y in rows))
        return read_jsonl(file, users="users")
    plain = [cell if isinstance(cell, list) and all(isinstance(n, float) for n in cell) else None for cell in cells]
    lists = pa.array(plain, pa.large_list(pa.float64()))
    return from_table(pa.table({"users": users, "x": lists, "label": label}), users="users")


@pytest.mark.parametrize("kind", ["jsonl", "arrow"])
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cell=st.one_of(st.lists(st.floats(-9, 9), max_size=6), st.sampled_from([None, 3.0, "7", "[1, 2]", [[1.0]], {}])))
def test_one_cell_changes_no_shape_and_no_other_row(kind, tmp_path, cell):
    """Two people, so that either may be the one whose list has the usual length."""
    import jax.numpy as jnp

    def loss(parameters, example, key):
        return jnp.square(parameters["w"] @ example["x"] - example["label"])

    own = JaxModel(
        loss=loss, parameters={"w": np.ones(2, np.float32)}, columns=["x", "label"], shapes={"x": (2,)}, microbatch=2
    )
    linear = LinearRegression(features="x", target="label", target_bound=2.0, num_features=2)
    for model in (own, linear, LogisticRegression(features="x", num_features=2), LogisticRegression(features="x")):
        found = []
        for odd in ([3.0, 4.0], cell):
            examples = write_lists(kind, tmp_path, [[1.0, 2.0], odd])
            try:
                task = model.task(examples.payload.schema, folder=tmp_path, is_private=False)  # no probe of the loss
            except InputError as error:  # of the schema: the same whatever a cell holds
                found.append(str(error))
            else:
                found.append(task.read(examples))
        if isinstance(found[0], str) or isinstance(found[1], str):
            assert found[0] == found[1]
            continue
        (usual, table, _), (changed, other, _) = found
        assert changed.shapes() == usual.shapes()
        assert other.shapes() == table.shapes()
        assert other.dtypes() == table.dtypes()
        rows = [{n: np.zeros((1, *s), part.dtypes()[n]) for n, s in part.shapes().items()} for part in (table, other)]
        for part, arrays in zip((table, other), rows, strict=True):
            part.fill(np.array([0]), arrays)
        assert all(rows[0][name].tobytes() == rows[1][name].tobytes() for name in rows[0])


def test_texts_that_are_numbers():
    column = pa.chunked_array([["1", " -2.5e3 ", "", None, "inf", "1,5", "TRUE", "nan"]])
    np.testing.assert_array_equal(numbers(column), [1, -2500, np.nan, np.nan, np.inf, np.nan, 1, np.nan])


NUMBERS = st.one_of(st.integers(-3, 3), st.sampled_from([0.5, 1.0, -2.0, -0.0, 1e20, float("inf")]))
WORDS = st.sampled_from(
    ["", "a", "01", "1", "1.50", "True", "true", "[1]", "[1, 2]", "[", "2020-01-01", "0x10", " 7 ", "null"]
)
NESTED = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=5,
)
ABSENT = b"\0absent"  # JSON: the row does not have the field at all
CELLS = st.one_of(
    st.none(),
    st.just(ABSENT),
    st.booleans(),
    NUMBERS,
    st.integers(2**53 - 2, 2**53 + 2),
    WORDS,
    st.sampled_from([b"7", b"\xff", b"a"]),
    st.lists(st.one_of(st.integers(-2, 2), st.sampled_from([0.5, "1", "x", None, True])), max_size=3),
    st.lists(st.none() | st.lists(st.none() | st.integers(0, 3), max_size=2), min_size=1, max_size=2),
    NESTED,
)


def everything_read(payload):
    """By what reads it: the rows that each kind of model gets of the column x."""
    column = payload.column("x")
    lists = {f"as {shape}": inferred_numbers(column, shape) for shape in ((), (1,), (2,), (2, 2))}
    return {
        "text": text_column(payload, "x").to_pylist(),
        "texts": text_column(payload, ["x", "x"]).to_pylist(),
        "classes": class_indices(column, ["1", "true", "a", "01"]),
        "integer classes": class_indices(column, [0, 1, 2]),
        "numbers": numbers(column),
        "one column": number_matrix(payload, ["x"], num_features=2),
        "columns": number_matrix(payload, ["x", "x"]),
        **lists,
    }


def from_memory(kind, cells):
    """The cells in one of the kinds of table that declare no types."""
    if kind == "rows":
        return from_table([{"users": ["u"]} | ({} if cell == ABSENT else {"x": cell}) for cell in [None, *cells]])
    values = [None, *(None if cell == ABSENT else cell for cell in cells)]
    objects = np.empty(len(values), object)
    objects[:] = values
    column = {"lists": values, "tuple": tuple(values), "objects": objects, "pandas": pd.Series(objects, dtype=object)}
    table = {"users": [["u"]] * len(values), "x": column[kind]}
    return from_table(pd.DataFrame(table) if kind == "pandas" else table)


def read_in_format(kind, folder, cells):
    if kind not in ("csv", "jsonl", "folder", "sql"):
        found = from_memory(kind, cells)
        return dataclasses.replace(found, payload=found.payload.slice(1))
    absent = ABSENT.decode("latin1")
    if kind in ("csv", "sql"):
        cells = [None if cell == ABSENT else cell for cell in cells]
    if kind != "sql":
        cells = [cell.decode("latin1") if isinstance(cell, bytes) else cell for cell in cells]
    else:
        connection = sqlite3.connect(":memory:")
        connection.execute("CREATE TABLE t (id INTEGER, users TEXT, x)")
        plain = [json.dumps(cell) if isinstance(cell, list | dict) else cell for cell in cells]
        connection.executemany("INSERT INTO t VALUES (?, ?, ?)", [(i, f"u{i}", x) for i, x in enumerate(plain)])
        found = read_sql("SELECT * FROM t ORDER BY id", connection, example_id="id", users="users")
        connection.close()
        return found
    parts = [cells] if kind != "folder" else [cells[:2], cells[2:]]
    for number, part in enumerate(parts):
        file = folder / f"{number}.{'csv' if kind == 'csv' else 'jsonl'}"
        if kind == "csv":
            with file.open("w", newline="") as opened:
                rows = [("u", "" if cell is None else cell) for cell in part]
                csv_module.writer(opened).writerows([("users", "x"), *rows])
        else:
            rows = [{"users": ["u"], "x": cell} if cell != absent else {"users": ["u"]} for cell in part]
            rows[0].setdefault("x", None)  # a field that no row has is no column
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_csv(folder, users="users") if kind == "csv" else read_jsonl(folder, users="users")


def bits(value):
    """What decides whether two readings are the same: 0.0 and -0.0 are two numbers."""
    return value if value is None or isinstance(value, str) else np.where(np.isnan(value), np.nan, value).tobytes()


KINDS = ["csv", "jsonl", "folder", "sql", "lists", "tuple", "objects", "pandas", "rows"]
# A column that is null, or absent, in every row but one, too.
COLUMNS = st.lists(CELLS, min_size=4, max_size=7) | st.lists(st.sampled_from([None, ABSENT]), min_size=4, max_size=7)


@pytest.mark.parametrize("kind", KINDS)
@given(cells=COLUMNS, other=CELLS, row=st.integers(0, 3), peeked=st.sampled_from([1, 1000]))
@example(cells=[-0.0, None, None, None], other=[], row=3, peeked=1000)
@example(cells=[None, None, None, {"a": False}], other={"a": 0.5}, row=0, peeked=1000)
@example(cells=[None, None, None, [None, [None, False]]], other={}, row=0, peeked=1000)
@example(cells=[None, None, None, [[], [1, 2]]], other="text", row=0, peeked=1000)
@example(cells=[None, None, None, None], other=[None, None, None], row=0, peeked=1)
@settings(max_examples=100)
def test_one_cell_changes_no_other(kind, cells, other, row, peeked):
    """Whatever one person writes into their cell, and whatever that makes of the column: other rows stay the same."""
    found = []
    for these in (cells, [*cells[:row], other, *cells[row + 1 :]]):
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            patch.setattr(table_files, "_PEEKED_LINES", peeked)
            found.append(everything_read(read_in_format(kind, Path(folder), these).payload))
    for name, before in found[0].items():
        after = found[1][name]
        for index in set(range(len(cells))) - {row}:
            assert bits(after[index]) == bits(before[index]), f"{name}, row {index}"


@given(
    cells=st.lists(st.none() | st.lists(st.sampled_from([1.0, 0.5, -0.0, None]), max_size=3), min_size=2, max_size=5),
    other=st.none() | st.lists(st.sampled_from([2.0, None]), max_size=3),
)
def test_one_cell_of_parquet_changes_no_other(cells, other):
    found = []
    for these in (cells, [other, *cells[1:]]):
        with tempfile.TemporaryDirectory() as folder:
            table = {"users": ["u"] * len(cells), "x": pa.array(these, pa.list_(pa.float64()))}
            pyarrow.parquet.write_table(pa.table(table), Path(folder) / "x.parquet")
            found.append(number_matrix(read_parquet(Path(folder) / "x.parquet").payload, "x", num_features=2))
    assert bits(found[0][1:]) == bits(found[1][1:])


def test_lists_declare_no_type(tmp_path):
    """Whether somebody's cell is a number, a text or a list decides nothing; other columns keep the type they have."""
    table = {"users": ["a", "b", "c"], "x": [True, 0.5, "1"], "z": np.array([1.0, 2.0, 3.0]), "y": [1, 0, "1"]}
    for given_table in (table, pd.DataFrame(table)):
        payload = from_table(given_table).payload
        assert [types_are_inferred(payload.schema, name) for name in ("x", "z", "y")] == [True, False, True]
        assert payload.schema.field("z").type == pa.float64()
    _, read_table, counts = read(LogisticRegression(features=["x", "z"], label="y"), from_table(table), tmp_path)
    np.testing.assert_array_equal(read_table.features, [[1, 1], [0.5, 2], [1, 3]])
    assert counts["unusable_rows"] == 0
    array = np.arange(6.0).reshape(3, 2)
    for fixed in (pa.array(array.tolist(), pa.list_(pa.float64(), 2)), array):
        np.testing.assert_array_equal(number_matrix(from_table({**table, "z": fixed}).payload, "z"), array)
    assert from_table({**table, "z": np.ones((3, 4, 5), np.int32)}).payload.schema.field("z").type == pa.list_(
        pa.list_(pa.int32(), 5), 4
    )


@pytest.mark.parametrize("classes", [1, 0, True, 2.5, "ab", ["a"], ["a", "a"], ["a", 1], [True, False], [0.5, 1.5]])
def test_bad_classes(classes):
    with pytest.raises(InputError, match="classes"):
        declared_classes(classes)


@pytest.mark.parametrize(
    ("kind", "classes", "match"),
    [
        (pa.string(), (0, 1), r"holds text: declare its classes"),
        (pa.dictionary(pa.int32(), pa.string()), (0, 1), r"holds text: declare its classes"),
        (pa.int64(), ("a", "b"), "declare them as the data spell them"),
        (pa.list_(pa.int64()), (0, 1), "declare them as the data spell them"),
    ],
)
def test_columns_that_cannot_hold_the_classes(kind, classes, match):
    with pytest.raises(InputError, match=match):
        check_label_column(pa.schema({"y": kind}), "y", classes)
    with pytest.raises(InputError, match="no column 'z', which the model reads; they have y"):
        check_label_column(pa.schema({"y": kind}), "z", classes)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_texts(kind):
    check_label_column(pa.schema({"y": kind}), "y", ("b", "a"))
    column = pa.chunked_array([pa.array(["a", "B", None]).cast(kind), pa.array(["b"]).cast(kind)])
    np.testing.assert_array_equal(class_indices(column, ("b", "a")), [1, np.nan, np.nan, 0])


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint64(), pa.float32(), pa.float64()])
def test_numbers(kind):
    check_label_column(pa.schema({"y": kind}), "y", (0, 1, 2))
    column = pa.chunked_array([pa.array([2, 0, 3, None]).cast(kind)])
    np.testing.assert_array_equal(class_indices(column, (0, 1, 2)), [2, 0, np.nan, np.nan])


def test_neighbouring_large_numbers_are_different_classes():
    column = pa.chunked_array([[2**24, 2**24 + 1, 2**31 + 1]])  # the first two are one number in float32
    np.testing.assert_array_equal(class_indices(column, (2**24 + 1, 2**31)), [np.nan, 0, np.nan])


def test_labels_depend_on_their_own_cell():
    """Not on what others hold: nothing is collected."""
    whole = pa.chunked_array([["x", "ham", None, "spam", "ham"]])
    alone = [class_indices(whole.slice(row, 1), ("spam", "ham"))[0] for row in range(5)]
    np.testing.assert_array_equal(class_indices(whole, ("spam", "ham")), alone)


def test_nothing_but_nulls():
    check_label_column(pa.schema({"y": pa.null()}), "y", (0, 1))
    assert np.isnan(class_indices(pa.chunked_array([pa.nulls(3)]), (0, 1))).all()
