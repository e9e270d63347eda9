"""Files that one machine refuses are refused on Spark, and what it reads is read alike."""

import polars as pl
import pytest

import coowned as co
from coowned.attribution.sources import DataSource
from coowned.spark.sources import attribute_source, check_rows, check_source, read_rows

NAMED = {"users": ("users",), "example_id": "id", "separator": ";"}


def write(folder, files):
    for name, content in files.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, dict):
            pl.DataFrame(content).write_parquet(place)
        else:
            place.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder if len(files) > 1 else folder / next(iter(files))


def refusals(spark, source):
    """What one machine and Spark say, and that Spark says it in one line that begins with the data's path."""
    with pytest.raises(co.InputError) as local:
        source.read()
    with pytest.raises(co.InputError) as there:
        attribute_source(spark, source)
    said = str(there.value)
    assert said.startswith(str(source.path))
    assert "\n" not in said
    assert "SQLSTATE" not in said
    return str(local.value), said


def same_graph(spark, source, local):
    graph = attribute_source(spark, source)
    assert graph.digest == local.digest
    expected = (
        "string" if source.format == "jsonl" or str(source.path).endswith(".jsonl") else graph.id_type.simpleString()
    )
    assert graph.id_type.simpleString() == expected  # of JSON lines: whatever their cells are
    assert graph.columns_read == local.columns_read
    graph.release()


@pytest.mark.full
@pytest.mark.parametrize("by_address", [False, True])
@pytest.mark.parametrize(
    "files",
    [
        {"a.csv": "id,users\n1,a;b\n", "b.csv": "users,id\nc;d,3\n"},
        {"a.csv": "id,users,cc\n1,a,x\n", "b.csv": "id,users,body\n2,a,z\n"},
        {"a.parquet": {"id": [1], "users": ["a"], "cc": ["x"]}, "b.parquet": {"id": [2], "users": ["b"], "to": ["y"]}},
        {"a.jsonl": '{"id":1,"users":"a","cc":"x"}\n', "b.jsonl": '{"id":2,"users":"a","copy":"z"}\n'},
    ],
)  # fmt: skip
def test_folders_of_other_columns_are_refused(spark, tmp_path, files, by_address):
    folder = write(tmp_path, files)
    kind = next(iter(files)).partition(".")[2]
    users = ("users",) if "users,id" in str(files) else ("users", "cc")
    source = DataSource(path=folder, users=users, example_id="id", separator=";")
    local, there = refusals(spark, source)
    ending = "all files of a folder need the same columns"
    assert local.endswith(ending)
    assert there.endswith(ending)
    assert there.startswith(f"{folder / 'b.'}")
    assert there == local or kind == "jsonl"  # whose fields have no order on Spark
    if by_address:
        source = DataSource(path=folder.as_uri(), users=users, example_id="id", separator=";", format=kind)
        with pytest.raises(co.InputError, match=f"{ending}$"):
            attribute_source(spark, source)


@pytest.mark.full
def test_rows_of_other_columns_are_refused(spark, tmp_path):
    """As one machine does, which reads them as content too."""
    same = {"a.parquet": {"id": [1], "users": ["a"], "n": [1]}, "b.parquet": {"id": [2], "users": ["b"], "n": [2.5]}}
    (tmp_path / "same").mkdir()
    read = read_rows(spark, DataSource(path=write(tmp_path / "same", same), users=("users",), example_id="id"))
    assert sorted(map(tuple, read.collect())) == [(1, "a", 1.0), (2, "b", 2.5)]
    (tmp_path / "other").mkdir()
    other = {"a.parquet": {"id": [1], "users": ["a"], "n": [1]}, "b.parquet": {"id": [2], "users": ["b"]}}
    with pytest.raises(co.InputError, match="all files of a folder need the same columns"):
        read_rows(spark, DataSource(path=write(tmp_path / "other", other), users=("users",), example_id="id"))


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [("a.csv", {"users": ("users",)}, "written from Parquet"), ("a.parquet", {"user": "user"}, "one row per example")],
)
def test_data_that_make_no_shards(tmp_path, name, words, message):
    (tmp_path / name).write_text("id,users\n1,a\n")
    with pytest.raises(co.InputError, match=message):
        check_rows(DataSource(path=tmp_path / name, example_id="id", **words))


@pytest.mark.full
@pytest.mark.parametrize(
    "files",
    [
        {"a.csv": "id,users,cc\n1,a,x\n", "b.csv": "text,id,users\nz,2,a\n"},
        {"a.parquet": {"id": [1], "users": ["a"], "n": ["x"]}, "b.parquet": {"id": [2], "n": [3], "users": ["a"]}},
    ],
)
def test_content_may_differ_between_files(spark, tmp_path, files):
    graph = attribute_source(spark, DataSource(path=write(tmp_path, files), users=("users",), example_id="id"))
    assert sorted((int(row.id), row.users) for row in graph.examples.collect()) == [(1, ["a"]), (2, ["a"])]
    graph.release()


@pytest.mark.full
@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.csv": b"id,users\n1,caf\xe9\n"}, "not UTF-8"),
        ({"a.jsonl": b'{"id":1,"users":"caf\xe9"}\n'}, "not UTF-8"),
        ({"a.csv": "id,users,text\n1,a,b\n2,a\n"}, "the header"),
        ({"a.csv": "id,users,text\n1,a,b\n2,a,b,c\n"}, "the header"),
        ({"a.csv": "id,users,users\n1,a,b\n"}, "2 columns are named 'users'"),
        ({"a.csv": "id,user_id\n1,a\n"}, "there is no column 'users'"),
        ({"a.csv": "id,users\n1,a\n", "b.csv": ""}, "the file is empty"),
        ({"a.jsonl": '{"id":1,"users":"a"}\n{"id":2,"users":["b"]}\n'}, "use one type"),
        ({"a.jsonl": '[{"id":1,"users":"a"}]\n'}, "a list where an object was expected"),
        ({"a.jsonl": '{"id":1,"users":"a","id":2}\n'}, "duplicate key 'id'"),
        (
            {"a.jsonl": '{"id":"x","users":"a"}\n{"id":1.50,"users":"a"}\n'},
            "'id' must be an integer or text, not a number",
        ),
        ({"a.parquet": {"id": [1], "users": ["a"]}, "b.parquet": {"id": ["x"], "users": ["b"]}}, "need the same types"),
    ],
)
def test_bad_files_are_refused_as_locally(spark, tmp_path, files, message):
    for said in refusals(spark, DataSource(path=write(tmp_path, files), **NAMED)):
        assert message in said


@pytest.mark.full
@pytest.mark.parametrize(
    "files",
    [
        {"A.CSV": "id,users\n1,a;b\n", "b.tsv": "id\tusers\n2\tc,d;e\n", "deep [1]/c d.csv": "id,users\n3,a\n"},
        {"a.csv": "\ufeffid,users\n,a;b\n2,\n"},  # an empty id is an id
        {"a.csv": 'users,id\na,1\r\nb"c,2\n\nc,3\r\n'},
        {"a.jsonl": '\ufeff{"id":1,"users":"a;b"}\n\n{"users":"b","id":2}\n'},
        {"a.csv": b"id,users,text\n1,a,caf\xe9\n"},  # content is not looked at
        {"a.jsonl": b'{"id":1,"users":"a","text":"caf\xe9"}\n{"id":2,"users":"b","text":7}\n'},
        {"a.jsonl": '{"id":1,"users":"a"}\n{"id":"2","users":"b"}\n'},
        {"a.jsonl": '{"id":1,"users":"a"}\n{"id":2,"users":7}\n'},
        {"a.jsonl": '{"id":1,"users":"\\ud800"}\n'},
        {
            "a.jsonl": '{"id":1,"users":"a"}\n',
            "b.jsonl": '{"id":"x","users":7}\n{"id":99999999999999999999,"users":"b"}\n',
        },
        {"a.pq": {"id": pl.Series([1], dtype=pl.Int32), "users": ["a"]}, "b.pq": {"id": [1 << 40], "users": ["b"]}},
    ],
)
def test_files_are_read_as_locally(spark, tmp_path, files):
    path = write(tmp_path, files)
    local = DataSource(path=path, **NAMED).read().graph
    same_graph(spark, DataSource(path=path, **NAMED), local)
    kind = "jsonl" if "a.jsonl" in files else "parquet" if "a.pq" in files else "csv"
    same_graph(spark, DataSource(path=f"file://{path}", format=kind, **NAMED), local)


@pytest.mark.full
def test_what_spark_would_pass_over_is_refused(spark, tmp_path):
    path = write(tmp_path, {"_a.csv": "id,users\n1,a\n"})
    with pytest.raises(co.InputError, match=r"_a\.csv: Spark ignores files whose names begin with"):
        attribute_source(spark, DataSource(path=path, **NAMED))
    quoted = write(tmp_path, {"q.csv": 'id,users\n1,"a"b\n'})  # one machine makes ab of it
    with pytest.raises(co.InputError, match=r"q\.csv: a row has more or fewer cells than the header; quote"):
        attribute_source(spark, DataSource(path=quoted, **NAMED))
    with pytest.raises(co.InputError, match="no such file or folder; check the address"):
        attribute_source(spark, DataSource(path=f"file://{tmp_path}/nothing.csv", **NAMED))


def test_formats_of_addresses():
    assert check_source(DataSource(path="hdfs://head/mail.PARQUET/", **NAMED)) == "parquet"
    with pytest.raises(co.InputError, match=r"hdfs://head/mail: unknown format; choose one with --format"):
        check_source(DataSource(path="hdfs://head/mail", **NAMED))
    with pytest.raises(co.InputError, match="query does not apply to csv data"):
        check_source(DataSource(path="hdfs://head/mail.csv", query="SELECT 1", **NAMED))


@pytest.mark.full
def test_bit_rot_names_the_file(spark, tmp_path):
    """A file whose footer is whole and whose pages are not: the row groups are only read by the executors."""
    columns = {"id": [f"m{i}" for i in range(500)], "users": ["a;b"] * 500}
    folder = write(tmp_path, {"a.parquet": columns, "b.parquet": {**columns, "id": [f"n{i}" for i in range(500)]}})
    damaged = bytearray((folder / "b.parquet").read_bytes())
    damaged[4:60] = bytes(255 - byte for byte in damaged[4:60])
    (folder / "b.parquet").write_bytes(damaged)
    with pytest.raises(co.InputError, match=f"^{folder}/b.parquet: not complete Parquet data"):
        attribute_source(spark, DataSource(path=folder, **NAMED))
