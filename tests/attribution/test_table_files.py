"""Parquet, CSV and JSON lines: what is in the file is what is read, and every fault says file, place and remedy."""

# ruff: noqa: E501 (tables of cases: one case a line)

import io
import json
import re

import hypothesis.strategies as st
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from tests.attribution.attributed import invalid_text, users_of

from coowned import InputError, from_table, read_csv, read_jsonl, read_parquet
from coowned.attribution import table_files

READERS = {"parquet": read_parquet, "csv": read_csv, "jsonl": read_jsonl}


def parquet_bytes(columns):
    sink = io.BytesIO()
    pyarrow.parquet.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), sink)
    return sink.getvalue()


@pytest.fixture
def put(tmp_path):
    """Writes a file and gives its path."""

    def write(name, content):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return file

    return write


def test_the_same_from_every_format(put):
    rows = [
        {"id": "m1", "users": ["Ann", "böb"], "n": 1},
        {"id": "m2", "users": [], "n": 2},
        {"id": "m3", "users": ["日本"], "n": 3},
    ]
    expected = from_table(pa.Table.from_pylist(rows), example_id="id")
    parquet = read_parquet(put("a.parquet", parquet_bytes(pa.Table.from_pylist(rows))), example_id="id")
    lines = "\n".join(json.dumps(row, ensure_ascii=bool(i)) for i, row in enumerate(rows))
    jsonl = read_jsonl(put("a.jsonl", lines), example_id="id")
    text = "id,users,n\n" + "".join(f"{row['id']},{';'.join(row['users'])},{row['n']}\n" for row in rows)
    csv = read_csv(put("a.csv", text), example_id="id", separator=";")
    tsv = read_csv(put("a.tsv", text.replace(",", "\t")), example_id="id", separator=";")
    pairs = "id,user,n\nm1,Ann,1\nm1,böb,1\nm3,日本,3\n"
    by_pair = read_csv(put("pairs.csv", pairs), user="user", example_id="id")
    for examples in (parquet, jsonl, csv, tsv):
        assert users_of(examples) == [{"ann", "böb"}, set(), {"日本"}]
        assert examples.graph.digest == expected.graph.digest
        text = examples in (csv, tsv)  # which declare no types
        assert examples.payload["n"].to_pylist() == (["1", "2", "3"] if text else [1, 2, 3])
    assert users_of(by_pair) == [{"ann", "böb"}, {"日本"}]


def test_csv_details(put):
    text = '\ufeffid,users,text\r\n0704.0001,007,"two\r\nlines, ""quoted"""\r\n0704.00010,7,\r\n'
    examples = read_csv(put("a.csv", text), example_id="id")
    assert examples.ids.to_pylist() == ["0704.0001", "0704.00010"]  # text, not numbers
    assert users_of(examples) == [{"007"}, {"7"}]
    assert examples.payload["text"].to_pylist() == ['two\r\nlines, "quoted"', ""]
    assert read_csv(put("none.csv", "users,text\n")).graph.num_examples == 0
    assert users_of(read_csv(put("null.csv", "users,text\nnull,NA\nNA,x\n"))) == [{"null"}, {"na"}]
    assert users_of(read_csv(put("end.csv", "users,text\na,1\n\nb,2"))) == [{"a"}, {"b"}]


@pytest.mark.parametrize("late", ["2.5", "x", "", "99999999999999999999"])
def test_csv_types_may_change_late(put, monkeypatch, late):
    monkeypatch.setattr(table_files, "_BLOCK_BYTES", 1 << 10)
    numbers = [str(i) for i in range(1000)]
    text = "users,n,empty\n" + "".join(f"u{i % 7},{n},\n" for i, n in enumerate(numbers)) + f"u1,{late},late\n"
    examples = read_csv(put("a.csv", text))
    assert examples.graph.num_examples == 1001
    cells = examples.payload["n"].to_pylist()
    assert [str(cell) for cell in cells[:1000]] == numbers
    assert str(cells[1000] if cells[1000] is not None else "") == late
    assert examples.payload["empty"].to_pylist()[-1] == "late"


def test_rows_longer_than_a_block(put, monkeypatch):
    monkeypatch.setattr(table_files, "_BLOCK_BYTES", 1 << 10)
    long = "x" * 5000
    assert read_csv(put("a.csv", f'users,text\na,"{long}"\nb,y\n')).payload["text"].to_pylist() == [long, "y"]
    assert read_jsonl(put("a.jsonl", json.dumps({"users": ["a"], "text": long}) + "\n")).payload[
        "text"
    ].to_pylist() == [long]
    monkeypatch.setattr(table_files, "_LARGEST_BLOCK", 1 << 12)
    text = "users,text\n" + "a,1\n" * 10 + 'b,"never closed\n' + "c,2\n" * 9000
    with pytest.raises(InputError, match=r"a.csv: a row has more than .* bytes; an unclosed quote"):
        read_csv(put("a.csv", text))


def test_jsonl_details(put):
    text = '\ufeff{"id": "2020-01-01", "users": ["2020-01-01"], "when": "2020-01-01 10:00:00"}\n\n{"id": "x", "users": []}\n'
    examples = read_jsonl(put("a.jsonl", text), example_id="id")
    assert examples.ids.to_pylist() == ["2020-01-01", "x"]  # text that looks like a date stays text
    assert users_of(examples) == [{"2020-01-01"}, set()]
    assert examples.payload["when"].to_pylist() == ["2020-01-01 10:00:00", None]
    mixed = '{"users": []}\n{"users": [7, 8]}\n{"users": [7]}'
    assert users_of(read_jsonl(put("b.jsonl", mixed))) == [set(), {"7", "8"}, {"7"}]
    assert read_jsonl(put("c.jsonl", '{"users": "ann; bob"}'), separator=";").graph.num_pairs == 2


@pytest.mark.parametrize("kind", READERS)
def test_folders(put, tmp_path, kind):
    contents = {
        "parquet": [parquet_bytes({"users": [["a"]], "n": [1]}), parquet_bytes({"users": [["b"], ["a"]], "n": [2, 3]})],
        "csv": ["users,n\na,1\n", "users,n\nb,2\na,3\n"],
        "jsonl": ['{"users": ["a"], "n": 1}\n', '{"users": ["b"], "n": 2}\n{"users": ["a"], "n": 3}\n'],
    }[kind]
    put(f"d/part-1/b.{kind}", contents[1])
    put(f"d/a.{kind}", contents[0])
    for passed_over in ("d/_SUCCESS", f"d/.hidden.{kind}", f"d/_tmp/x.{kind}", "d/readme.txt"):
        put(passed_over, b"not data")
    examples = READERS[kind](tmp_path / "d")
    assert users_of(examples) == [{"a"}, {"b"}, {"a"}]
    assert examples.payload["n"].to_pylist() == (["1", "2", "3"] if kind == "csv" else [1, 2, 3])
    put(f"d/z.{kind}", b"")
    with pytest.raises(InputError, match=f"z.{kind}: the file is empty; add data or remove it"):
        READERS[kind](tmp_path / "d")
    other = {
        "parquet": parquet_bytes({"users": [["a"]], "m": [1]}),
        "csv": "users,m\na,1\n",
        "jsonl": '{"users": ["a"], "m": 1}',
    }
    put(f"d/z.{kind}", other[kind])
    if kind == "jsonl":  # a field is content: one person's must not stop the others
        assert READERS[kind](tmp_path / "d").payload.column_names == ["users", "n", "m"]
        return
    with pytest.raises(
        InputError,
        match=rf"z.{kind}: its columns are \['users', 'm'\], those of .*a.{kind} are .*; all files of a folder",
    ):
        READERS[kind](tmp_path / "d")


def test_users_are_in_every_file(put, tmp_path):
    """A column of users that one file spells otherwise is refused: its people would not be protected."""
    put("d/a.jsonl", '{"users": "a", "cc": "x"}\n')
    put("d/b.jsonl", '{"users": "b", "copy": "y"}\n')
    with pytest.raises(InputError, match=r"b.jsonl: its columns are \['users'\], those of .* all files of a folder"):
        read_jsonl(tmp_path / "d", users=["users", "cc"])


def test_folder_errors_name_the_file(put, tmp_path):
    put("d/a.csv", "id,users\n1,a\n2,b\n")
    put("d/b.csv", "id,users\n3,c\n4,\n")
    with pytest.raises(InputError, match=r"d: blank user in column 'users' at row 1 of .*d/b.csv; fill it in"):
        read_csv(tmp_path / "d")
    put("d/b.csv", "id,users\n3,c\n2,d\n")
    examples = read_csv(tmp_path / "d", example_id="id")
    assert (examples.ids.to_pylist(), users_of(examples)) == (["1", "2", "3"], [{"a"}, {"b", "d"}, {"c"}])
    put("t/a.parquet", parquet_bytes({"users": [["a"]], "n": [1]}))
    put("t/b.parquet", parquet_bytes({"users": [["a"]], "n": [[1]]}))
    with pytest.raises(InputError, match=r"b.parquet: its column types differ from those of .*a.parquet .*; all files"):
        read_parquet(tmp_path / "t")


GOOD = parquet_bytes({"users": [["a"]] * 50, "text": ["some text"] * 50})

BAD = [
    # name, content, arguments, place, what is wrong, remedy
    ("x.parquet", GOOD[:-1], {}, f"{len(GOOD) - 1:,} bytes", "cannot be read", "write it again"),
    ("x.parquet", GOOD[: len(GOOD) // 2], {}, "bytes", "cannot be read", "write it again"),
    ("x.parquet", b"PAR1", {}, "4 bytes", "cannot be read", "write it again"),
    ("x.parquet", b"hello, this is text", {}, "19 bytes", "cannot be read", "name its format"),
    ("x.parquet", b"", {}, "", "the file is empty", "add data"),
    ("x.parquet", parquet_bytes({"people": [["a"]]}), {}, "column 'users'", "there is no column", "choose from"),
    ("x.parquet", parquet_bytes({"user": [["a"]]}), {}, "column 'users'", "there is no column", "did you mean 'user'"),
    ("x.parquet", parquet_bytes({"users": [1.5]}), {}, "column 'users'", "is double", "name another column"),
    ("x.parquet", parquet_bytes({"users": [["a"], ["b", None]]}), {}, "row 1", "null user", "fill it in"),
    ("x.parquet", parquet_bytes({"users": [["a"], None]}), {}, "row 1", "no list of users", "use an empty list"),
    ("x.parquet", parquet_bytes({"users": ["a", None]}), {}, "row 1", "no user", "fill it in"),
    ("x.parquet", parquet_bytes({"users": ["a"], "id": [0.5]}), {"example_id": "id"}, "column 'id'", "not double", "cast the column"),
    ("x.parquet", parquet_bytes({"users": invalid_text([b"a", b"\xff"])}), {}, "row 1", "not UTF-8", "write the data again"),
    ("x.csv", b"", {}, "", "the file is empty", "add data"),
    ("x.csv", b"\n\n", {}, "", "no header line", "add one"),
    ("x.csv", b"people,text\na,b\n", {}, "column 'users'", "there is no column", "choose from"),
    ("x.csv", b"users,text\na,1\nb\nc,2\n", {}, "row 1", "1 cell where the header has 2", "quote cells"),
    ("x.csv", b"users,text\na,1\nb,2,3\n", {}, "row 1", "3 cells where the header has 2", "quote cells"),
    ("x.csv", b"users,text\na,1\n\xff,1\n", {}, "row 1", "column 'users' is not UTF-8", "correct it"),
    ("x.csv", b"users,t\xffxt\na,1\n", {}, "byte 1", "not UTF-8", "save the file as UTF-8"),
    ("x.csv", b"users,text\na,1\n,2\n", {}, "row 1", "blank user", "fill it in"),
    ("x.jsonl", b"", {}, "", "the file is empty", "add data"),
    ("x.jsonl", b'{"users": ["a"]}\n{"users": ["b"\n', {}, "line 2", "not JSON", "write one complete object per line"),
    ("x.jsonl", b'{"users": ["a"]}\n["b"]\n', {}, "line 2", "a list where an object was expected", "one object per line"),
    ("x.jsonl", b'{"users": ["a"]}\nnull\n{"users"\n', {}, "line 2", "null where an object", "one object per line"),
    ("x.jsonl", b'{"users": ["a"]}\n{"users": 3}\n', {}, "line 2", "'users' is an integer here and a list in an earlier line", "one type"),
    ("x.jsonl", b'{"users": ["a"]}\n{"users": null}\n', {}, "row 1", "no list of users", "use an empty list"),
    ("x.jsonl", b'{"users": ["a"]}\n{"x": 1}\n', {}, "row 1", "no list of users", "use an empty list"),
    ("x.jsonl", b'{"users": ["a", null]}\n', {}, "row 0", "null user", "fill it in"),
    ("x.jsonl", b'{"users": ["a"]}\n{"users": ["\xff"]}\n', {}, "row 1", "not UTF-8", "correct it"),
    ("x.jsonl", b'{"users": ["a"], "x": 1}\n{"users": ["\xff"], "x": "a"}\n', {}, "line 2", "'users' is not UTF-8", "save the file as UTF-8"),
    ("x.jsonl", b'{"users": ["a"], "users": ["b"]}\n', {}, "line 1", "duplicate key 'users'", "one complete object per line"),
    ("x.jsonl", b'{"users": ["a"], "id": 1}\n{"users": ["a"]}\n', {"example_id": "id"}, "row 1", "no value", "fill in every row"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "arguments", "place", "wrong", "remedy"), BAD)
def test_bad_files(put, name, content, arguments, place, wrong, remedy):
    file = put(name, content)
    with pytest.raises(InputError) as raised:
        READERS[file.suffix[1:]](file, **arguments)
    message = str(raised.value)
    assert message.startswith(str(file))
    for part in (place, wrong, remedy):
        assert part in message
    assert "\n" not in message
    assert "some text" not in message


@pytest.mark.parametrize("kind", READERS)
def test_missing_files(tmp_path, kind):
    with pytest.raises(InputError, match=f"no.{kind}: no such file or folder; check the path"):
        READERS[kind](tmp_path / f"no.{kind}")
    with pytest.raises(InputError, match=f"the folder has no .{kind} or .* file; check the path or the format"):
        READERS[kind](tmp_path)


def test_the_line_is_found_beyond_the_first_block(put, monkeypatch):
    monkeypatch.setattr(table_files, "_BLOCK_BYTES", 1 << 10)
    good = '{"users": ["a"], "text": "some words"}\n'
    with pytest.raises(InputError, match=r"a.jsonl, line 501: not JSON"):
        read_jsonl(put("a.jsonl", good * 500 + '{"users": [}\n' + good * 10))
    with pytest.raises(InputError, match=r"a.csv, row 500: 1 cell where"):
        read_csv(put("a.csv", "users,text\n" + "a,some words\n" * 500 + "b\n" + "a,x\n" * 10))


CONTENT = [  # a file with one strange cell, and what becomes of the column
    ("x.parquet", parquet_bytes({"users": ["a", "b"], "x": invalid_text([b"1", b"\xff"])}), ["1", "\ufffd"]),
    ("x.parquet", parquet_bytes({"users": ["a", "b"], "x": pa.ListArray.from_arrays([0, 2, 3], invalid_text([b"1", b"\xff", b"2"]))}),
     [["1", "\ufffd"], ["2"]]),
    ("x.csv", b"users,x\na,1\nb,\xff\n", ["1", "\ufffd"]),
    ("x.csv", b"users,x\na,1\nb,one\n", ["1", "one"]),
    ("x.jsonl", b'{"users": ["a"], "x": 1}\n{"users": ["b"], "x": "one"}\n', ["1", "one"]),
    ("x.jsonl", b'{"users": ["a"], "x": [1, 2]}\n{"users": ["b"], "x": [1]}\n', [[1, 2], [1]]),
    ("x.jsonl", b'{"users": ["a"], "x": [1, 2]}\n{"users": ["b"], "x": [1, "z"]}\n', ['[1, 2]', '[1, "z"]']),
    ("x.jsonl", b'{"users": ["a"], "x": [1, 2]}\n{"users": ["b"], "x": 7}\n', ["[1, 2]", "7"]),
    ("x.jsonl", b'{"users": ["a"], "x": {"y": 1}}\n{"users": ["b"], "x": {"y": "z"}}\n', ['{"y": 1}', '{"y": "z"}']),
    ("x.jsonl", b'{"users": ["a"], "x": "1"}\n{"users": ["b"], "x": "\\ud800"}\n', ["1", "?"]),
    ("x.jsonl", b'{"users": ["a"], "x": "1"}\n{"users": ["b"], "x": "\xff"}\n', ["1", "\ufffd"]),
    ("x.jsonl", b'{"users": ["a"], "x": 1}\n{"users": ["b"], "x": "\xff"}\n', ["1", "\ufffd"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "values"), CONTENT)
def test_no_content_stops_a_run(put, name, content, values):
    """Only the columns of ids and users can refuse a file: what others hold must not tell by an error."""
    file = put(name, content)
    examples = READERS[file.suffix[1:]](file)
    assert examples.payload["x"].to_pylist() == values
    assert users_of(examples) == [{"a"}, {"b"}]


@pytest.mark.parametrize("users", ['["b"], "x": {}', '[7], "x": 1.5', '["b", "c"]'])
def test_strange_content_leaves_users_as_they_are(put, users):
    lines = ['{"users": ["a"], "x": 1}', f'{{"users": {users}}}', '{"users": ["a"], "x": "text"}']
    text = "\n".join(lines)
    assert users_of(read_jsonl(put("x.jsonl", text)))[::2] == [{"a"}, {"a"}]


LINES = "".join(
    json.dumps({"id": i, "users": ["ann", "bob"][: i % 3], "text": f"é {i}"}) + "\n" for i in range(5)
).encode()
CSV = b"id,users,text\n" + b"".join(f'{i},ann;bob,"é, {i}"\n'.encode() for i in range(5))
PARQUET = parquet_bytes(
    {"id": list(range(5)), "users": [["ann", "bob"][: i % 3] for i in range(5)], "text": [f"é {i}" for i in range(5)]}
)


@st.composite
def mangled(draw, content):
    """A file with some bytes flipped, cut out or put in, or with its end cut off."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        what = draw(st.sampled_from(["flip", "cut", "insert", "truncate"]))
        if what == "flip" and data:
            data[at] ^= draw(st.integers(1, 255))
        elif what == "cut":
            del data[at : at + draw(st.integers(1, 20))]
        elif what == "insert":
            data[at:at] = draw(
                st.one_of(st.binary(min_size=1, max_size=4), st.sampled_from([b'"', b",", b"\n", b"{", b"\xff", b"\0"]))
            )
        else:
            del data[at:]
    return bytes(data)


def check_mangled(folder, kind, data, arguments):
    """The promise for every reader: InputError, or examples that hang together."""
    file = folder / f"x.{kind}"
    file.write_bytes(data)
    try:
        examples = READERS[kind](file, **arguments)
    except InputError as error:
        message = str(error)
        assert message.startswith(str(file))
        assert re.search(r"; \w+|\?$", message), message
        assert "\n" not in message
        return
    graph = examples.graph
    assert graph.num_examples == examples.payload.num_rows == len(examples.ids)
    assert len(examples.user_keys) == graph.num_users
    assert graph.users.max(initial=-1) < graph.num_users
    assert len(graph.digest) == 64
    examples.payload.validate(full=True)
    examples.payload.to_pylist()
    assert all(key for key in examples.user_keys.to_pylist())


@given(mangled(LINES), st.sampled_from([{}, {"example_id": "id"}]))
@settings(max_examples=150)
def test_mangled_jsonl(tmp_path_factory, data, arguments):
    check_mangled(tmp_path_factory.getbasetemp(), "jsonl", data, arguments)


@given(mangled(CSV), st.sampled_from([{"separator": ";"}, {"example_id": "id"}, {"user": "users", "example_id": "id"}]))
@settings(max_examples=150)
def test_mangled_csv(tmp_path_factory, data, arguments):
    check_mangled(tmp_path_factory.getbasetemp(), "csv", data, arguments)


@given(mangled(PARQUET), st.sampled_from([{}, {"example_id": "id"}]))
@settings(max_examples=300)
def test_mangled_parquet(tmp_path_factory, data, arguments):
    check_mangled(tmp_path_factory.getbasetemp(), "parquet", data, arguments)


@pytest.mark.parametrize("text", ["null\n", "null{}\n", '{"users": ["a"]} null\n', '{"users": ["a"]}\n \tnull\n'])
def test_a_null_in_place_of_an_object(tmp_path, text):
    """Arrow's reader dies of the first two, and makes a row of the others."""
    file = tmp_path / "data.jsonl"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"line [12]: (not JSON|null where an object was expected)"):
        read_jsonl(file, users="users")


@pytest.mark.parametrize("before", ["", '{"users": ["a"]}\n' * 1100])
def test_lists_that_begin_with_null(tmp_path, before):
    """Arrow's reader loses the nulls at the beginning of a list whose type it has to infer."""
    file = tmp_path / "data.jsonl"
    file.write_text(before + '{"users": ["a"], "v": [null, 1.5], "t": "null, [ null"}\n', encoding="utf-8")
    examples = read_jsonl(file, users="users")
    assert examples.payload["v"].to_pylist()[-1] == [None, 1.5]
