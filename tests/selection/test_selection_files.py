"""S.parquet: what was written comes back, and what was not is refused."""

# ruff: noqa: E501 (tables of cases: one case a line)

import contextlib
import csv
import json
import os
import sqlite3
import stat
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import example, given, settings

from coowned import (
    AttributionGraph,
    CertificateMismatchError,
    InputError,
    Schedule,
    Selection,
    certify,
    read_csv,
    read_jsonl,
    read_sql,
)
from coowned.selection.selection_files import read_selection, write_selection

ROWS = [[0], [1], [0, 1], [2]]
IDS = {
    "none": None,
    "integers": [7, -1, 30, 2**60],
    "text": ["m1", "é", "", "7"],
    "unsigned": pa.array([1, 2, 3, 2**64 - 1], pa.uint64()),
}


def graph_with(ids):
    return AttributionGraph.from_users_per_example(ROWS, example_ids=ids)


def test_selections_are_private(tmp_path):
    graph = graph_with(None)
    before = os.umask(0)
    try:
        write_selection(tmp_path / "S.parquet", graph, Selection.from_copies(graph, [1, 0, 0, 1]))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "S.parquet").stat().st_mode) == 0o600


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("kind", ["selection", "groups", "schedule", "nothing"])
def test_selection_round_trip(tmp_path, ids, kind):
    graph = graph_with(IDS[ids])
    selected = {
        "selection": lambda: Selection.from_copies(graph, [2, 0, 1, 3]),
        "groups": lambda: Selection.from_copies(graph, [2, 0, 0, 3], groups=[1, -1, -1, 0]),
        "schedule": lambda: Schedule.from_batches(graph, [[0, 3], [1, 3], [0, 0]]),
        "nothing": lambda: Selection.from_copies(graph, [0, 0, 0, 0]),
    }[kind]()
    file = tmp_path / "S.parquet"
    write_selection(file, graph, selected)
    again = read_selection(file, graph)
    assert again.copies.tolist() == selected.copies.tolist()
    assert certify(graph, again).selection_digest == certify(graph, selected).selection_digest
    table = pyarrow.parquet.read_table(file)
    if kind == "schedule":
        assert np.array_equal(again.batches, selected.batches)
        assert table.column_names == ["batch", "position", "example_id"]
    else:
        assert table.column_names[:2] == ["example_id", "copies"]
        assert table.schema.field("copies").type == pa.int32()
        assert table.num_rows == selected.num_distinct
    expected = {"none": pa.int64(), "integers": pa.int64(), "unsigned": pa.uint64()}.get(ids, pa.large_string())
    assert table.schema.field("example_id").type == expected


@given(st.lists(st.integers(0, 3), min_size=4, max_size=4), st.permutations(range(4)), st.sampled_from([str, int]))
def test_any_order_and_type_of_rows(tmp_path_factory, copies, order, kind):
    """Other engines write parts in any order, and ids as they please: 7 and "7" are the same."""
    graph = graph_with([10, 11, 12, 13])
    rows = [row for row in order if copies[row]]
    folder = tmp_path_factory.mktemp("S")
    for part, chosen in enumerate((rows[:2], rows[2:])):
        ids = pa.array([kind(10 + row) for row in chosen], pa.string() if kind is str else pa.int32())
        table = pa.table({"example_id": ids, "copies": pa.array([copies[row] for row in chosen], pa.int32())})
        pyarrow.parquet.write_table(table, folder / f"part-{part}.parquet")
    (folder / "_SUCCESS").touch()
    assert read_selection(folder, graph).copies.tolist() == copies


def write(tmp_path, columns):
    file = tmp_path / "S.parquet"
    pyarrow.parquet.write_table(pa.table(columns), file)
    return file


def test_unknown_and_repeated_ids(tmp_path):
    graph = graph_with(["a", "b", "c", "d"])
    file = write(tmp_path, {"example_id": ["a", "x"], "copies": [1, 1]})
    with pytest.raises(
        CertificateMismatchError, match=r"S.parquet: example 'x' at row 1 is not in the data; check the data"
    ):
        read_selection(file, graph)
    file = write(tmp_path, {"example_id": ["b", "a", "a"], "copies": [1, 1, 1]})
    with pytest.raises(InputError, match="rows 1 and 2 have the same example_id; put its copies in one row"):
        read_selection(file, graph)
    file = write(tmp_path, {"example_id": ["a", None], "copies": [1, 1]})
    with pytest.raises(CertificateMismatchError, match="example None at row 1 is not in the data"):
        read_selection(file, graph)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"id": ["a"]}, "a selection has the columns example_id and copies, but this file has .*; give the S.parquet"),
        ({"example_id": ["a"], "copies": [0]}, "copies must be at least 1 and below 2.31, not 0 at row 0; write the file again"),
        ({"example_id": ["a"], "copies": [-1]}, "copies must be at least 1"),
        ({"example_id": ["a", "b"], "copies": [1, None]}, "copies must be at least 1 .* not None at row 1"),
        ({"example_id": ["a"], "copies": [2**40]}, "copies must be at least 1 and below 2.31"),
        ({"example_id": ["a"], "copies": [1.0]}, "column 'copies' must contain integers, not Float64"),
        ({"example_id": ["a"], "copies": ["1"]}, "column 'copies' must contain integers, not String"),
        ({"example_id": [1.5], "copies": [1]}, "column 'example_id' must contain integers or text, not Float64"),
        ({"example_id": [b"a"], "copies": [1]}, "column 'example_id' must contain integers or text, not Binary"),
        ({"example_id": ["a"], "copies": [1], "group": [None]}, "column 'group' must contain integers, not Null"),
        ({"example_id": ["a"], "copies": [1], "group": [-1]}, "group must be at least 0"),
        ({"batch": [0, 0], "position": [0, 0], "example_id": ["a", "b"]}, "the schedule has missing or duplicate slots; give each"),
        ({"batch": [0, 2], "position": [0, 0], "example_id": ["a", "b"]}, "the schedule has missing"),
        ({"batch": [0, 2**31 - 1], "position": [0, 2**31 - 1], "example_id": ["a", "b"]}, "the schedule has missing"),
        ({"batch": [0, None], "position": [0, 1], "example_id": ["a", "b"]}, "batch must be at least 0 .* not None at row 1"),
        ({"batch": [0.0], "position": [0], "example_id": ["a"]}, "column 'batch' must contain integers, not Float64"),
        ({"batch": [0], "position": [-1], "example_id": ["a"]}, "position must be at least 0"),
    ],
)  # fmt: skip
def test_bad_files(tmp_path, columns, message):
    with pytest.raises(InputError, match=f"S.parquet: .*{message}"):
        read_selection(write(tmp_path, columns), graph_with(["a", "b", "c", "d"]))


def test_broken_files(tmp_path):
    graph = graph_with(None)
    file = tmp_path / "S.parquet"
    write_selection(file, graph, Selection.from_copies(graph, [1, 1, 1, 1]))
    data = file.read_bytes()
    for broken in (data[:-3], data[:40], b"text", b""):
        file.write_bytes(broken)
        with pytest.raises(InputError, match=r"S.parquet: "):
            read_selection(file, graph)
    with pytest.raises(InputError, match="no such file or folder"):
        read_selection(tmp_path / "no.parquet", graph)


def test_writing_checks_the_graph(tmp_path):
    graph, other = graph_with(None), graph_with(["a", "b", "c", "d"])
    with pytest.raises(CertificateMismatchError):
        write_selection(tmp_path / "S.parquet", other, Selection.from_copies(graph, [1, 0, 0, 0]))
    assert list(tmp_path.iterdir()) == []


_ID = st.one_of(st.integers(-5, 2**70), st.integers(0, 50).map(str), st.sampled_from(["m1", "2020-01-01", "07"]))


def read_ids(kind, folder, rows):
    """Examples of (id, user) rows in one of the formats that declare no types."""
    if kind == "sql":
        with contextlib.closing(sqlite3.connect(":memory:")) as connection:
            connection.execute("CREATE TABLE t (id, users)")
            stored = [[str(cell) if isinstance(cell, int) and cell >= 2**63 else cell for cell in row] for row in rows]
            connection.executemany("INSERT INTO t VALUES (?, ?)", stored)
            return read_sql("SELECT * FROM t", connection, example_id="id", users="users")
    if kind == "csv":
        with (folder / "a.csv").open("w", newline="") as opened:
            csv.writer(opened).writerows([("id", "users"), *rows])
        return read_csv(folder, example_id="id")
    parts = [rows] if kind == "jsonl" else [rows[:1], rows[1:]]
    for number, part in enumerate(parts):
        lines = [json.dumps({"id": own, "users": user}) for own, user in part]
        (folder / f"{number}.jsonl").write_text("\n".join(lines))
    return read_jsonl(folder, example_id="id")


@pytest.mark.parametrize("kind", ["csv", "jsonl", "folder", "sql"])
@given(
    ids=st.lists(_ID, min_size=3, max_size=5, unique_by=str),
    other=st.tuples(_ID, st.one_of(st.integers(-3, 2**70), st.sampled_from(["ann", "7"]))),
    row=st.integers(0, 2),
)
@example(ids=[1, 2, 3], other=("m1", "ann"), row=0)
@settings(max_examples=40)
def test_one_cell_changes_the_type_of_no_id(kind, ids, other, row):
    """Ids and users of others, and the type of all ids in S.parquet, are the same whatever one row says."""
    found = []
    rows = [(own, f"user {number}") for number, own in enumerate(ids)]
    others = [str(own) for at, own in enumerate(ids) if at != row]
    for these in (rows, [*rows[:row], other, *rows[row + 1 :]]):
        if str(these[row][0]) in others:  # their row is then a copy of another's
            return
        with tempfile.TemporaryDirectory() as folder:
            graph = read_ids(kind, Path(folder), these).graph
            file = Path(folder) / "S.parquet"
            write_selection(file, graph, Selection.from_copies(graph, [1] * len(ids)))
            table = pyarrow.parquet.read_table(file)
        rest = [own for at, own in enumerate(table["example_id"].to_pylist()) if at != row]
        keys = [graph.user_keys[user].as_py() for user in graph.users]
        found.append((table.schema, rest, [key for at, key in enumerate(keys) if at != row]))
    assert found[0] == found[1]
    assert found[0][1] == others
