"""Tables in memory: every kind gives the same examples, every fault one sentence that says where."""

# ruff: noqa: E501 (tables of cases: one case a line)

import re

import hypothesis.strategies as st
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from tests.attribution.attributed import users_of

from coowned import InputError, UserKeyRules, from_table

COLUMNS = {"id": ["m1", "m2", "m3"], "users": [["Ann", "bob"], [], ["carol"]], "text": ["x", "y", None]}


class OnlyStream:
    """Nothing but the Arrow C stream interface."""

    def __init__(self, table):
        self.table = table

    def __arrow_c_stream__(self, requested_schema=None):
        return self.table.__arrow_c_stream__(requested_schema)


def hugging_face(columns):
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({name: [values[2], *values[:2]] for name, values in columns.items()}).select(
        [1, 2, 0]
    )


ARROW = pa.table(COLUMNS)
KINDS = {
    "dict": lambda: COLUMNS,
    "arrow": lambda: ARROW,
    "record batch": lambda: ARROW.to_batches()[0],
    "record batch reader": lambda: ARROW.to_reader(),
    "stream": lambda: OnlyStream(ARROW),
    "polars": lambda: pl.DataFrame(COLUMNS),
    "polars lazy": lambda: pl.LazyFrame(COLUMNS),
    "pandas": lambda: pd.DataFrame(COLUMNS),
    "pandas index": lambda: pd.DataFrame(COLUMNS, index=[5, 6, 7]),
    "pandas arrow": lambda: ARROW.to_pandas(types_mapper=pd.ArrowDtype),
    "sliced": lambda: pa.concat_tables([ARROW, ARROW]).combine_chunks().slice(3),
    "chunked": lambda: pa.concat_tables([ARROW.slice(0, 1), ARROW.slice(1, 0), ARROW.slice(1)]),
    "large": lambda: ARROW.cast(pa.schema([("id", pa.large_string()), ("users", pa.large_list(pa.large_string())), ("text", pa.large_string())])),
    "views": lambda: pa.table({"id": pa.array(COLUMNS["id"], pa.string_view()), "users": pa.array(COLUMNS["users"], pa.list_(pa.string_view())), "text": COLUMNS["text"]}),
    "list view": lambda: ARROW.set_column(1, "users", pa.array(COLUMNS["users"], pa.list_view(pa.string()))),
    "large list view": lambda: ARROW.set_column(1, "users", pa.array(COLUMNS["users"], pa.large_list_view(pa.string()))),
    "dictionary": lambda: ARROW.set_column(0, "id", pa.array(COLUMNS["id"]).dictionary_encode()).set_column(
        1, "users", pa.ListArray.from_arrays(pa.array([0, 2, 2, 3]), pa.array(["Ann", "bob", "carol"]).dictionary_encode())),
    "hugging face": lambda: hugging_face(COLUMNS),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_table(kind):
    examples = from_table(KINDS[kind](), example_id="id")
    assert users_of(examples) == [{"ann", "bob"}, set(), {"carol"}]
    assert examples.ids.to_pylist() == COLUMNS["id"]
    assert examples.payload.column_names == ["id", "users", "text"]
    assert examples.payload["text"].to_pylist()[:2] == ["x", "y"]
    assert examples.graph.digest == from_table(ARROW, example_id="id").graph.digest


@pytest.mark.parametrize(
    "column",
    [
        pa.array([7, 8, 7]),
        pa.array([7, 8, 7], pa.uint64()),
        pa.array(["7", "8", "7"]),
        pa.array(["7", "8", "7"]).dictionary_encode(),
        pa.array(["7", "8", "7"], pa.string_view()),
        pl.Series(["7", "8", "7"], dtype=pl.Categorical),
        pd.Series(["7", "8", "7"], dtype="category").cat.add_categories(["unused", ""]),
        pa.array([[7], [8], [7]]),
        pa.array([[7], [8], [7]], pa.list_(pa.int8(), 1)),
    ],
)
def test_one_user_a_row(column):
    """7 and "7" are the same user, and a category that no row has is nobody."""
    examples = from_table({"users": column} if not isinstance(column, pd.Series) else pd.DataFrame({"users": column}))
    assert users_of(examples) == [{"7"}, {"8"}, {"7"}]
    assert examples.graph.num_users == 2
    assert examples.graph.digest == from_table({"users": [["7"], ["8"], ["7"]]}).graph.digest


@pytest.mark.parametrize(
    "ids", [[10, 11], ["10", "11"], pa.array([10, 11], pa.uint64()), pa.array([10, 11], pa.int8())]
)
def test_ids_of_every_type(ids):
    examples = from_table({"id": ids, "users": [["a"], ["b"]]}, example_id="id")
    assert [str(value) for value in examples.ids.to_pylist()] == ["10", "11"]
    assert (
        examples.graph.digest == from_table({"id": ["10", "11"], "users": [["a"], ["b"]]}, example_id="id").graph.digest
    )


def test_several_columns():
    table = {
        "sender": ["Ann", "bob", None, ""],
        "to": [["bob", "carol"], None, [], ["ann"]],
        "cc": pa.array([None, "dan", "  ", "ann"]),
        "none": pa.nulls(4),
        "number": [1, None, 2, None],
    }
    examples = from_table(table, ["sender", "to", "cc", "none", "number"])
    assert users_of(examples) == [{"ann", "bob", "carol", "1"}, {"bob", "dan"}, {"2"}, {"ann"}]
    assert examples.user_keys.to_pylist() == ["ann", "bob", "carol", "1", "dan", "2"]  # row by row, column by column
    assert examples.graph.columns_read == ("sender", "to", "cc", "none", "number")


def test_separator():
    table = {"users": ["a@x; b@y;;", None, " ", "c@z"], "more": ["", "d", "e;e", None]}
    assert users_of(from_table(table, separator=";")) == [{"a@x", "b@y"}, set(), set(), {"c@z"}]
    assert users_of(from_table(table, ["users", "more"], separator=";")) == [{"a@x", "b@y"}, {"d"}, {"e"}, {"c@z"}]
    assert users_of(from_table({"users": ["a, b", "c"]}, separator=", ")) == [{"a", "b"}, {"c"}]
    assert users_of(from_table({"users": pa.array(["x", "a|b", "c"]).slice(1)}, separator="|")) == [{"a", "b"}, {"c"}]


def test_many_rows_are_cut_into_parts(monkeypatch):
    monkeypatch.setattr("coowned.attribution.tables.ROWS_AT_ONCE", 2)
    table = {"users": ["a;b", "b", "", "c;a", "d"], "cc": ["x", None, "y", "", "z"]}
    assert users_of(from_table(table, separator=";")) == [{"a", "b"}, {"b"}, set(), {"a", "c"}, {"d"}]
    assert users_of(from_table(table, ["users", "cc"], separator=";"))[2:] == [{"y"}, {"a", "c"}, {"d", "z"}]
    with pytest.raises(InputError, match="no user in column 'users' at row 3"):
        from_table({"users": ["a", "b", "c", None]})


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from("abc"))))
def test_pairs(pairs):
    table = {
        "id": pa.array([i for i, _ in pairs], pa.int64()),
        "user": pa.array([user for _, user in pairs], pa.string()),
        "text": pa.array([f"text {i}" for i, _ in pairs], pa.string()),
    }
    examples = from_table(table, user="user", example_id="id")
    order = list(dict.fromkeys(i for i, _ in pairs))
    assert examples.ids.to_pylist() == order
    assert examples.payload["text"].to_pylist() == [f"text {i}" for i in order]
    assert users_of(examples) == [{user for j, user in pairs if j == i} for i in order]
    assert examples.payload.column_names == ["id", "text"]
    assert examples.graph.columns_read == ("id", "user")


@pytest.mark.parametrize(
    "payload", [[1.5, 1.5], [float("nan")] * 2, [None, None], [["x"], ["x"]], [{"a": 1}, {"a": 1}], [b"x", b"x"]]
)
def test_pairs_with_equal_payload(payload):
    examples = from_table({"id": [1, 1], "user": ["a", "b"], "more": payload}, user="user", example_id="id")
    assert users_of(examples) == [{"a", "b"}]


@pytest.mark.parametrize("payload", [[1, 2], [None, "x"], [["x"], ["y"]], ['{"a": 1}', {"a": 2}], [["x"], None]])
def test_copies_of_an_example_are_one(payload):
    """The users of all copies, the payload of the first: content stops no run, and leaves nobody out."""
    table = {"id": [9, 1, 1], "user": ["a", "a", "b"], "more": [payload[0], *payload]}
    pairs = from_table(table, user="user", example_id="id")
    rows = from_table(table, users="user", example_id="id")
    for examples in (pairs, rows):
        assert examples.ids.to_pylist() == [9, 1]
        assert users_of(examples) == [{"a"}, {"a", "b"}]
        assert examples.payload["more"].to_pylist() == [payload[0], payload[0]]
    assert (dict(pairs.notes), dict(rows.notes)) == ({}, {"repeated_rows": 1})


def test_repeated_names_of_unused_columns():
    table = pa.table(
        [pa.array([1, 1]), pa.array(["a", "b"]), pa.array([1, 1]), pa.array([2, 2])], names=["id", "user", "x", "x"]
    )
    assert from_table(table, user="user", example_id="id").payload.column_names == ["id", "x", "x"]


@given(st.lists(st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=4), max_size=3), max_size=5))
def test_any_text_is_a_user(rows):
    table = {"users": pa.array(rows, pa.list_(pa.string()))}
    examples = from_table(table, user_keys=UserKeyRules.exact())
    assert users_of(examples) == [set(row) for row in rows]
    merged = from_table(table, user_keys=UserKeyRules(whitespace=False))
    assert merged.graph.num_users <= examples.graph.num_users


NULL_INSIDE = pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["a", None]))
LIST_INSIDE = pa.ListArray.from_arrays(pa.array([0, 1, 2]), NULL_INSIDE)


def test_nulls_that_no_row_has():
    """A null among a dictionary's values is a missing user only where a row has it."""
    users = pa.chunked_array([LIST_INSIDE.slice(0, 1), LIST_INSIDE.slice(0, 1)])
    assert users_of(from_table({"users": users})) == [{"a"}, {"a"}]
    nobody = pa.chunked_array([[[]], [[], []]], pa.list_(pa.null()))
    assert users_of(from_table({"users": nobody})) == [set(), set(), set()]


@pytest.mark.parametrize(
    ("table", "arguments", "message"),
    [
        ({"user": ["a"]}, {}, "there is no column 'users'; did you mean 'user'?"),
        ({"x": ["a"]}, {}, "there is no column 'users'; choose from 'x'"),
        ({}, {}, "there is no column 'users'; it has no columns"),
        ({"users": ["a"]}, {"example_id": "id"}, "there is no column 'id'"),
        ({"users": ["a"]}, {"users": []}, "users= is empty; name at least one column"),
        ({"users": ["a"]}, {"users": [3]}, "there is no column 3"),
        ({"users": ["a"]}, {"users": "users", "user": "users"}, "give users= .* or user= .*, not both"),
        ({"users": ["a"]}, {"user": "users"}, "user= \\(--user\\) needs example_id= \\(--example-id\\)"),
        ({"users": [["a"]], "id": [1]}, {"user": "users", "example_id": "id"}, "contains lists; pass it as users=, not user="),
        ({"users": ["a"], "id": [None]}, {"user": "users", "example_id": "id"}, "column 'id' has no value at row 0; fill in every row"),
        ({"users": ["a", None], "id": [1, 2]}, {"user": "users", "example_id": "id"}, "no user in column 'users' at row 1; fill"),
        ({"users": [1.5]}, {}, "column 'users' is double; users are text, integers, or lists of them: name another"),
        ({"users": [True]}, {}, "column 'users' is bool; users are"),
        ({"users": [[1.5]]}, {}, "column 'users' is list.*double.*; users are"),
        ({"users": [{"a": 1}]}, {}, "column 'users' is struct"),
        ({"users": [None, None]}, {}, "column 'users' is null; users are"),
        ({"users": ["a", None]}, {}, "no user in column 'users' at row 1; fill it in, or drop the row"),
        ({"users": NULL_INSIDE}, {}, "no user in column 'users' at row 1; fill it in"),
        ({"users": pa.chunked_array([NULL_INSIDE, NULL_INSIDE])}, {}, "no user in column 'users' at row 1; fill it in"),
        ({"users": pa.chunked_array([LIST_INSIDE, LIST_INSIDE])}, {}, "null user in column 'users' at row 1; fill it in"),
        ({"users": [["a"], None]}, {}, "no list of users in column 'users' at row 1; use an empty list for an example without users"),
        ({"users": [["a"], [], ["b", None]]}, {}, "null user in column 'users' at row 2; fill it in or remove"),
        ({"users": [["a"], ["b", " "]]}, {}, "blank user in column 'users' at row 1; fill it in or remove"),
        ({"users": ["a", ""]}, {}, "blank user in column 'users' at row 1"),
        ({"users": [["a"]]}, {"separator": ";"}, "column 'users' already contains lists; remove the separator"),
        ({"users": ["a"]}, {"separator": ""}, "separator must be text of at least one character, not ''"),
        ({"users": ["a"]}, {"separator": 3}, "separator must be text"),
        ({"users": ["a", "b"], "id": [1, None]}, {"example_id": "id"}, "column 'id' has no value at row 1; fill in every row"),
        ({"users": ["a", "b", "c"], "id": ["x", "", ""]}, {"example_id": "id"}, "column 'id' is empty at row 1 and row 2; give each"),
        ({"users": ["a"], "id": [0.5]}, {"example_id": "id"}, "column 'id' must be integers or text, not double; cast"),
        ({"users": ["a"], "id": [[1]]}, {"example_id": "id"}, "column 'id' must be integers or text, not list"),
        ({"users": ["a", 1]}, {}, "cannot be read as Arrow"),
        ({"users": ["a"], "x": [1, 2]}, {}, "cannot be read as Arrow .*all columns need one type each and the same length"),
        ({"users": 3}, {}, "cannot be read as Arrow"),
        ({"users": ["a"], "id": [2**70]}, {"example_id": "id"}, "cannot be read as Arrow .*column 'id'"),
        ({"users": pa.array([b"ok", b"\xff"]).view(pa.string())}, {}, "column 'users' is not UTF-8 at row 1; correct it"),
        ([["a"]], {}, "list is not a table; pass a pandas, polars or Arrow table"),
        (np.zeros(3), {}, "ndarray is not a table"),
        (None, {}, "NoneType is not a table"),
        (pd.Series(["a"]), {}, "not a table|no column 'users'|cannot be read"),
        (pd.DataFrame({"users": ["a", 1]}), {}, "cannot be read as Arrow .*users"),
        (pl.LazyFrame({"users": ["a"]}).select("nope"), {}, "cannot be read as Arrow .*nope"),
        (pa.table([pa.array(["a"]), pa.array(["b"])], names=["users", "users"]), {}, "2 columns are named 'users'; rename them"),
    ],
)  # fmt: skip
def test_bad_tables(table, arguments, message):
    with pytest.raises(InputError, match=message):
        from_table(table, **arguments)


def test_place_is_named():
    with pytest.raises(InputError, match=r"^my table: no user in column 'users' at row 0"):
        from_table({"users": pa.array([None], pa.string())}, name="my table")
    with pytest.raises(InputError, match=r"^my table: column 'id' has no value at row 1"):
        from_table({"users": ["a", "b"], "id": [1, None]}, example_id="id", name="my table")


def test_a_semicolon_separates_before_a_comma_that_may_be_in_names(caplog):
    from_table({"users": ["Lee, Ann; Ray, Bob", "Lee, Ann"]})
    assert "(--separator ';')" in caplog.text


@pytest.mark.parametrize("cells", [["b,c", "b", "c"], ["b,c", "c,d", "a"], ["a; b", "c"], ["a|b", "d"]])
def test_several_users_in_one_cell_are_warned_of(cells, caplog):
    sign = next(sign for sign in ",;|" if sign in cells[0])
    from_table({"users": cells})
    (said,) = caplog.messages
    assert f"(--separator '{sign}')" in said
    assert not set("abcd") & set(re.findall(r"\b\w\b", said.split("; if so")[0]))
    caplog.clear()
    from_table({"users": cells}, separator=sign)
    from_table({"users": ["Lee, Ann", "Lee, Carol"]})
    assert caplog.messages == []
    from_table({"users": [[cell] for cell in cells]})
    assert "if so, split the entries of the lists" in caplog.messages[0]
