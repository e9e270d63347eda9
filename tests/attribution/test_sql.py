"""Tables in databases."""

import contextlib
import datetime
import decimal
import sqlite3
import uuid

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import given

from coowned import Greedy, InputError, from_table, read_sql
from coowned.attribution import sql
from coowned.attribution.sql import open_sqlite


@pytest.fixture
def connection():
    with contextlib.closing(sqlite3.connect(":memory:")) as opened:
        opened.execute("CREATE TABLE mail (id, sender, recipients, stars, score, body)")
        opened.executemany(
            "INSERT INTO mail VALUES (?, ?, ?, ?, ?, ?)",
            [
                ("m1", "Ann", "bob; Carol", 1, 0.5, "hello"),
                ("m2", "BOB", None, None, 2, None),
                ("m3", "carol", "", 2**53 + 1, None, "ünïcode"),
            ],
        )
        yield opened


def read(connection, query="SELECT * FROM mail ORDER BY id", **options):
    return read_sql(query, connection, **{"example_id": "id", "users": ["sender", "recipients"], **options})


def test_types_and_people(connection):
    examples = read(connection, separator=";")
    assert examples.ids.to_pylist() == ["m1", "m2", "m3"]
    assert examples.user_keys.to_pylist() == ["ann", "bob", "carol"]
    assert examples.graph.users_per_example.tolist() == [3, 1, 1]
    assert examples.graph.columns_read == ("id", "sender", "recipients")
    types = {field.name: field.type for field in examples.payload.schema}
    assert (types["stars"], types["score"], types["body"]) == (pa.int64(), pa.float64(), pa.large_string())
    assert examples.payload["stars"].to_pylist() == [1, None, 2**53 + 1]
    assert examples.payload["score"].to_pylist() == [0.5, 2.0, None]
    assert examples.payload["body"].to_pylist() == ["hello", None, "ünïcode"]


def test_one_pair_a_row(connection):
    connection.execute("CREATE TABLE pairs (doc, who)")
    connection.executemany("INSERT INTO pairs VALUES (?, ?)", [(7, "ann"), (8, "bob"), (7, "bob")])
    examples = read_sql("SELECT doc, who FROM pairs ORDER BY doc", connection, user="who", example_id="doc")
    assert (examples.ids.to_pylist(), examples.graph.num_pairs) == (["7", "8"], 3)


def test_parameters_and_aliases(connection, tmp_path):
    aliases = tmp_path / "aliases.csv"
    aliases.write_text("key,user\ncarol,ann\n")
    examples = read(
        connection, "SELECT id, sender FROM mail WHERE id <> ?", users="sender", parameters=("m2",), aliases=aliases
    )
    assert (examples.ids.to_pylist(), examples.graph.num_users) == (["m1", "m3"], 1)
    named = read(connection, "SELECT id, sender FROM mail WHERE id = :id", users="sender", parameters={"id": "m2"})
    assert named.ids.to_pylist() == ["m2"]


def test_no_rows(connection):
    examples = read(connection, "SELECT * FROM mail WHERE 0")
    assert (examples.graph.num_examples, examples.graph.num_users) == (0, 0)


def test_ids_are_asked_for(connection):
    with pytest.raises(
        InputError, match=r"the query: query results have no row order, .*; name the column with the ids"
    ):
        read(connection, example_id=None)
    again = read(connection, "SELECT * FROM mail ORDER BY id DESC", separator=";")
    one = read(connection, separator=";")
    assert again.graph.digest == one.graph.digest
    chosen = [
        set(examples.graph.ids_of(Greedy(contribution_bound=1).select(examples.graph).copies.nonzero()[0]).to_pylist())
        for examples in (one, again)
    ]
    assert chosen[0] == chosen[1]  # whatever order the rows came in


CELLS = {
    "whole": st.integers(-(2**63), 2**63 - 1),
    "number": st.floats(allow_nan=False) | st.integers(-(2**53), 2**53),
    "text": st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
    "blob": st.binary(),
}


@given(
    st.lists(st.tuples(*(st.none() | cells for cells in CELLS.values())), max_size=12),
    st.integers(1, 5),
    st.integers(1, 300),
)
def test_same_as_a_table(rows, first, most_bytes):
    with contextlib.closing(sqlite3.connect(":memory:")) as connection, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sql, "_FIRST_ROWS", first)
        patch.setattr(sql, "_CHUNK_BYTES", most_bytes)
        connection.execute("CREATE TABLE t (id, users, whole, number, text, blob)")
        connection.executemany(
            "INSERT INTO t VALUES (?, ?, ?, ?, ?, ?)", [(i, f"u{i % 3}", *row) for i, row in enumerate(rows)]
        )
        found = read_sql("SELECT * FROM t ORDER BY id", connection, example_id="id")
    columns = {name: [row[place] for row in rows] for place, name in enumerate(CELLS)}
    columns["number"] = [None if cell is None else float(cell) for cell in columns["number"]]
    table = {"id": list(range(len(rows))), "users": [f"u{i % 3}" for i in range(len(rows))]}
    expected = from_table(table, example_id="id") if rows else from_table({"users": pa.array([], pa.string())})
    assert found.graph.digest == expected.graph.digest
    assert {name: found.payload[name].to_pylist() for name in CELLS} == columns


class Rows:
    """A DB-API connection that gives these rows, two at a time at most, with a driver's own error."""

    class Error(Exception):
        pass

    def __init__(self, names, rows):
        self.description = [(name, None, None, None, None, None, None) for name in names]
        self.left = list(rows)

    def cursor(self):
        return self

    def execute(self, query):
        if "nonsense" in query:
            raise self.Error("no such\nthing.")

    def fetchmany(self, size):
        taken, self.left = self.left[: min(size, 2)], self.left[min(size, 2) :]
        return taken

    def close(self):
        pass


class Arrow(Rows):
    """An ADBC connection."""

    def fetch_arrow_table(self):
        return pa.table({"id": ["a", "b"], "users": [["x", "y"], ["y"]]})


def test_values_of_other_drivers():
    number, day = decimal.Decimal("12.50"), datetime.datetime(2024, 1, 2, 3, 4, 5)
    rows = [
        (uuid.UUID(int=1), ["ann", "bob"], number, day, memoryview(b"x"), True),
        (uuid.UUID(int=2), ["bob"], decimal.Decimal("1.234"), None, None, None),
        (uuid.UUID(int=3), [], None, day, b"y", False),
    ]
    examples = read_sql("q", Rows(["id", "users", "price", "at", "raw", "flag"], rows), example_id="id")
    assert examples.ids[0].as_py() == "00000000-0000-0000-0000-000000000001"
    assert examples.graph.users_per_example.tolist() == [2, 1, 0]
    assert examples.payload["price"].to_pylist() == [number, decimal.Decimal("1.234"), None]
    assert examples.payload["at"].to_pylist() == [day, None, day]
    assert examples.payload["raw"].to_pylist() == [b"x", None, b"y"]
    assert examples.payload["flag"].to_pylist() == [True, None, False]


def test_arrow_connections():
    examples = read_sql("SELECT", Arrow([], []), example_id="id")
    assert (examples.ids.to_pylist(), examples.graph.num_pairs) == (["a", "b"], 3)


@pytest.mark.parametrize(
    ("names", "rows", "message"),
    [
        (["id", "users"], [("a", b"x")], "column 'users' is large_binary; users are text, integers"),
        (["id", "users"], [("a", 0.5)], "column 'users' is double; users are text"),
        (["id", "users"], [("a", None)], "column 'users' is null; users are text"),
        (["id", "users"], [("a", "x"), ("b", None)], "no user in column 'users' at row 1; fill it in"),
        (["id", "users"], [(b"a", "x")], "column 'id' must be integers or text, not large_binary"),
        (["id", "users"], [(None, "x")], "column 'id' has no value at row 0"),
        (["id", "who"], [("a", "x")], "there is no column 'users'; choose from 'id', 'who'"),
        (["id", "users", "id"], [("a", "x", "b")], "two columns are named 'id'; rename one in the query with AS"),
        (["id", "users"], [{"id": "a", "users": "x"}], "returns rows as mappings; configure it to return tuples"),
    ],
)  # fmt: skip
def test_bad_columns(names, rows, message):
    with pytest.raises(InputError, match=message) as caught:
        read_sql("q", Rows(names, rows), example_id="id")
    assert str(caught.value).startswith("the query: ")
    assert str(2**60 + 1) not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([None, 1, 2.5, "z"], [None, "1", "2.5", "z"]),
        ([1, 2**64], ["1", str(2**64)]),
        ([2**60 + 1, 0.5], [str(2**60 + 1), "0.5"]),
        ([2**60 + 1, 1, 0.5], [str(2**60 + 1), "1", "0.5"]),
        (["\ud800"], ["?"]),
        ([1, True, None, b"x"], ["1", "true", None, "x"]),
        ([datetime.date(2024, 1, 2), 7], ["2024-01-02", "7"]),
    ],
)
def test_mixed_columns(values, text):
    """Whatever a cell holds, it stops no run."""
    rows = [(f"m{row}", "ann", value) for row, value in enumerate(values)]
    found = read_sql("q", Rows(["id", "users", "n"], rows), example_id="id").payload["n"].to_pylist()
    assert found == text


def test_text_that_is_not_utf8_is_replaced(tmp_path):
    with contextlib.closing(sqlite3.connect(tmp_path / "mail.db")) as connection, connection:
        connection.execute("CREATE TABLE mail (id, users, body)")
        connection.execute("INSERT INTO mail VALUES ('m1', 'ann', CAST(x'73ff63' AS TEXT))")
    with open_sqlite(tmp_path / "mail.db") as connection:
        examples = read_sql("SELECT * FROM mail", connection, example_id="id")
    assert examples.payload["body"].to_pylist() == ["s\ufffdc"]


def test_bad_queries(connection):
    with pytest.raises(
        InputError, match=r"the query: the database rejected the query \(no such table: nope\); correct it"
    ):
        read(connection, "SELECT * FROM nope")
    with pytest.raises(InputError, match="the query returns no rows; write a SELECT"):
        read(connection, "CREATE TABLE other (x)")
    with pytest.raises(InputError, match="the query must be text, not ''; write a SELECT"):
        read(connection, "")
    with pytest.raises(InputError, match=r"the database rejected the query \(no such thing\)"):
        read_sql("nonsense", Rows(["id"], []), example_id="id")
    with pytest.raises(InputError, match=r"str is not a DB-API or ADBC connection: it has no cursor\(\)"):
        read_sql("SELECT 1", "mail.db", example_id="id")
    connection.execute("INSERT INTO mail (id, sender, body) VALUES ('m4', 'x', CAST(x'73ff63' AS TEXT))")
    with pytest.raises(InputError, match="column 'body' contains text that is not UTF-8") as caught:
        read(connection)
    assert "with text" not in str(caught.value)  # the driver quotes the cell; we do not


def test_progress_is_told(connection):
    told = []
    read(connection, separator=";", progress=lambda done, message: told.append((done, message)))
    assert told == [(0.0, "reading rows: 3")]


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM mail", "DROP TABLE mail", "CREATE TABLE other (x)", "PRAGMA user_version = 7", "VACUUM",
        "ATTACH DATABASE 'other.db' AS other", "INSERT INTO mail VALUES ('x', 'y') RETURNING id, sender",
    ],
)  # fmt: skip
def test_sqlite_files_are_only_read(tmp_path, monkeypatch, statement):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "a 100% file?.db"
    with contextlib.closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("CREATE TABLE mail (id, sender)")
        connection.execute("INSERT INTO mail VALUES ('m1', 'ann')")
    before = file.read_bytes()
    with open_sqlite(file) as connection:
        assert read_sql("SELECT * FROM mail", connection, example_id="id", users="sender").graph.num_examples == 1
        with pytest.raises(InputError, match="rejected the query"):
            read_sql(statement, connection, example_id="id", users="sender")
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_sqlite_files_that_are_none(tmp_path):
    with pytest.raises(InputError, match=r"no.db: no such file; check the path"), open_sqlite(tmp_path / "no.db"):
        pass
    (tmp_path / "x.db").write_text("this is no database, and long enough to be looked at " * 20)
    with open_sqlite(tmp_path / "x.db") as connection, pytest.raises(InputError, match="file is not a database"):
        read_sql("SELECT id FROM mail", connection, example_id="id")
