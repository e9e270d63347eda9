"""One description of where data come from."""

import contextlib
import json
import sqlite3
import zipfile

import pyarrow as pa
import pyarrow.parquet
import pytest

from coowned import InputError
from coowned.attribution.options import SOURCES
from coowned.attribution.sources import DataSource, detect_format, resolve_path

EML = b"From: ann@x.org\r\nTo: bob@x.org\r\nMessage-ID: <1@x>\r\nSubject: hi\r\n\r\nhello\r\n"
MBOX = b"From ann@x.org Thu Jan  1 00:00:00 1970\n" + EML.replace(b"\r\n", b"\n") + b"\n"


@pytest.fixture
def data(tmp_path):
    """One file or folder of every kind."""
    table = pa.table({"users": [["a"], ["b"]]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    pyarrow.parquet.write_table(table, tmp_path / "no_suffix_parquet")
    (tmp_path / "t.csv").write_text("users,cc\na,b\nb,\n")
    (tmp_path / "t.TSV").write_text("users\tcc\na\tb\n")
    (tmp_path / "t.jsonl").write_text('{"users": ["a"]}\n')
    (tmp_path / "no_suffix_jsonl").write_text('  {"users": ["a"]}\n')
    (tmp_path / "arxiv.json").write_text(json.dumps({"id": "1", "authors_parsed": [["A", "B", ""]]}) + "\n")
    (tmp_path / "m.mbox").write_bytes(MBOX)
    (tmp_path / "no_suffix_mbox").write_bytes(MBOX)
    (tmp_path / "m.eml").write_bytes(EML)
    for folder in ("maildir/cur", "maildir/new", "maildir/tmp", "emls", "csvs/.hidden"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "maildir/cur/1").write_bytes(EML)
    (tmp_path / "emls/1.eml").write_bytes(EML)
    (tmp_path / "csvs/a.csv").write_text("users,cc\na,b\n")
    (tmp_path / "csvs/.hidden/x.parquet").write_text("no")
    lists = {"users.json": "[]", "channels.json": '[{"id": "C1", "name": "all", "members": ["U1", "U2"]}]'}
    lists["all/2024-01-01.json"] = '[{"type": "message", "user": "U1", "ts": "1.0", "text": "hi"}]'
    (tmp_path / "slack/all").mkdir(parents=True)
    with zipfile.ZipFile(tmp_path / "slack.zip", "w") as archive:
        for name, text in lists.items():
            archive.writestr(name, text)
            (tmp_path / "slack" / name).write_text(text)
    for name in ("mail.db", "mail.sqlite"):
        with contextlib.closing(sqlite3.connect(tmp_path / name)) as connection, connection:
            connection.execute("CREATE TABLE mail (id, users, cc)")
            connection.execute("INSERT INTO mail VALUES ('m1', 'a', 'b'), ('m2', 'b', NULL)")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("t.parquet", "parquet"), ("no_suffix_parquet", "parquet"), ("t.csv", "csv"), ("t.TSV", "csv"), ("csvs", "csv"),
        ("t.jsonl", "jsonl"), ("no_suffix_jsonl", "jsonl"), ("arxiv.json", "arxiv"), ("m.mbox", "mail"),
        ("no_suffix_mbox", "mail"), ("m.eml", "mail"), ("maildir", "mail"), ("emls", "mail"), ("slack", "slack"),
        ("slack.zip", "slack"),
    ],
)  # fmt: skip
def test_formats_are_detected_and_read(data, name, kind):
    assert detect_format(data / name) == kind
    assert DataSource(path=data / name).read().graph.num_examples >= 1
    assert DataSource(path=data / name, format=kind).read().graph.num_examples >= 1


def test_undetectable(data):
    (data / "strange").write_bytes(b"\x00\x01\x02")
    with pytest.raises(InputError, match=r"strange: unknown format; choose one with --format parquet\|csv"):
        detect_format(data / "strange")
    (data / "empty").mkdir()
    with pytest.raises(InputError, match="empty: no file of a known format in it; choose one with --format"):
        detect_format(data / "empty")
    with pytest.raises(InputError, match="no: no such file or folder; check the path"):
        detect_format(data / "no")
    with pytest.raises(InputError, match="format must be one of"):
        DataSource(path=data / "t.csv", format="excel")
    with pytest.raises(InputError, match="attribute_to must be one of"):
        DataSource(path=data / "m.mbox", attribute_to="all")


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        *((name, {"attribute_to": "sender"}) for name in ("t.parquet", "t.csv", "t.jsonl", "arxiv.json", "mail.db")),
        *((name, {"mbox_dialect": "mboxo"}) for name in ("t.csv", "arxiv.json", "slack", "mail.db")),
        *((name, {"query": "SELECT 1"}) for name in ("t.parquet", "t.csv", "t.jsonl", "arxiv.json", "m.mbox", "slack")),
        *(
            (name, setting)
            for name in ("m.mbox", "arxiv.json", "slack.zip")
            for setting in ({"users": ("a",)}, {"user": "a"}, {"example_id": "id"}, {"separator": ";"})
        ),
    ],
)
def test_unused_settings_are_refused(data, name, setting):
    with pytest.raises(InputError, match=f"{name}: {next(iter(setting))} does not apply to .* data; remove it"):
        DataSource(path=data / name, **setting).read()


def test_settings_reach_the_reader(data):
    (data / "aliases.csv").write_text("key,user\nb,a\n")
    (data / "unprotected.txt").write_text("A\n")
    assert DataSource(path=data / "t.csv", users="cc").user_columns() == ["cc"]
    assert DataSource(path=data / "t.csv", users=("users", "cc")).read().graph.num_pairs == 3
    assert DataSource(path=data / "t.csv", aliases=data / "aliases.csv").read().graph.num_users == 1
    left = DataSource(path=data / "t.csv", unprotected=data / "unprotected.txt").read().graph
    assert (left.num_users, left.num_unprotected_users) == (1, 1)
    assert DataSource(path=data / "t.csv", user="users", example_id="users").read().graph.num_examples == 2
    everyone, sender = (DataSource(path=data / "m.mbox", attribute_to=to).read().graph for to in (None, "sender"))
    assert (everyone.num_pairs, sender.num_pairs) == (2, 1)
    for setting in ("aliases", "unprotected"):
        with pytest.raises(InputError, match=r"no.txt: cannot be read .*; check the path"):
            DataSource(path=data / "t.csv", **{setting: data / "no.txt"}).read()
    assert set(SOURCES) == {"parquet", "csv", "jsonl", "mail", "arxiv", "slack", "sql"}
    some, all_of_it = (DataSource(path=data / "slack", attribute_to=to).read().graph for to in (None, "channel"))
    assert (some.num_pairs, all_of_it.num_pairs) == (1, 2)
    with pytest.raises(InputError, match="attribute_to must be one of 'participants', 'channel', not 'sender'"):
        DataSource(path=data / "slack", attribute_to="sender").read()


QUERY = {"query": "SELECT * FROM mail ORDER BY id", "example_id": "id"}


def test_databases(data, monkeypatch):
    assert detect_format(data / "mail.db") == detect_format(data / "mail.sqlite") == "sql"
    monkeypatch.chdir(data)
    for path in (data / "mail.db", "mail.sqlite", "sqlite:///mail.db", f"sqlite:///{data}/mail.db"):
        source = DataSource(path=path, users=("users", "cc"), **QUERY)
        assert source.read().graph.num_pairs == 3
        assert not str(source.path).startswith("sqlite:")
    pairs = DataSource(path="mail.db", format="sql", user="users", query="SELECT id, users FROM mail", example_id="id")
    assert pairs.read().graph.num_pairs == 2
    with pytest.raises(InputError, match=r"mail.db: a database needs a query .*; add --query"):
        DataSource(path="sqlite:///mail.db").read()
    with pytest.raises(InputError, match=r"mail.db: query results have no row order"):
        DataSource(path="sqlite:///mail.db", query="SELECT * FROM mail").read()
    with pytest.raises(InputError, match=r"write sqlite:///file.db"):
        DataSource(path="sqlite:mail.db")
    with pytest.raises(InputError, match=r"no.db: no such file"):
        DataSource(path="sqlite:///no.db", **QUERY).read()


def test_paths_beside_a_file(data, monkeypatch):
    monkeypatch.chdir(data.parent)
    assert DataSource(path=resolve_path(data.name, "sqlite:///mail.db"), **QUERY).read().graph.num_examples == 2
    assert (
        DataSource(path=resolve_path("elsewhere", f"sqlite:///{data}/mail.db"), **QUERY).read().graph.num_examples == 2
    )
    assert resolve_path("elsewhere", str(data / "t.csv")) == data / "t.csv"


def test_progress_reaches_the_readers(data):
    for name, settings in (("m.mbox", {}), ("slack.zip", {}), ("mail.db", QUERY), ("t.csv", {})):
        told = []
        DataSource(path=data / name, **settings).read(lambda done, message, told=told: told.append(message))
        assert bool(told) == (name != "t.csv")


@pytest.mark.parametrize("format", [None, "parquet"])
def test_addresses_are_for_spark(data, format):
    """Named as they were written, with both slashes."""
    source = DataSource(path=resolve_path(data, "s3a://bucket/mail.parquet"), format=format)
    for read in (source.read, source.read_rows, source.display_names, source.text_columns):
        with pytest.raises(InputError, match=r"^s3a://bucket/mail.parquet: only Spark reads addresses"):
            read()
