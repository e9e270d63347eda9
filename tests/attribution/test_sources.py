"""One description of where data come from."""

import json

import pyarrow as pa
import pyarrow.parquet
import pytest

from coowned import InputError
from coowned.attribution.sources import FORMATS, DataSource, detect_format

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
    return tmp_path


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("t.parquet", "parquet"), ("no_suffix_parquet", "parquet"), ("t.csv", "csv"), ("t.TSV", "csv"), ("csvs", "csv"),
        ("t.jsonl", "jsonl"), ("no_suffix_jsonl", "jsonl"), ("arxiv.json", "arxiv"), ("m.mbox", "mail"),
        ("no_suffix_mbox", "mail"), ("m.eml", "mail"), ("maildir", "mail"), ("emls", "mail"),
    ],
)  # fmt: skip
def test_formats_are_detected_and_read(data, name, kind):
    assert detect_format(data / name) == kind
    assert DataSource(path=data / name).read().graph.num_examples >= 1
    assert DataSource(path=data / name, format=kind).read().graph.num_examples >= 1


def test_undetectable(data):
    (data / "strange").write_bytes(b"\x00\x01\x02")
    with pytest.raises(InputError, match=r"strange: cannot tell what it holds; say --format parquet\|csv"):
        detect_format(data / "strange")
    (data / "empty").mkdir()
    with pytest.raises(InputError, match="empty: no file in it is of a known kind; say --format"):
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
        *((name, {"attribute_to": "sender"}) for name in ("t.parquet", "t.csv", "t.jsonl", "arxiv.json")),
        *(
            (name, setting)
            for name in ("m.mbox", "arxiv.json")
            for setting in ({"users": ("a",)}, {"user": "a"}, {"example_id": "id"}, {"separator": ";"})
        ),
    ],
)
def test_unused_settings_are_refused(data, name, setting):
    with pytest.raises(InputError, match=f"{name}: {next(iter(setting))} means nothing for .* data; leave it out"):
        DataSource(path=data / name, **setting).read()


def test_settings_reach_the_reader(data):
    (data / "aliases.csv").write_text("key,user\nb,a\n")
    (data / "unprotected.txt").write_text("A\n")
    assert DataSource(path=data / "t.csv", users="users").users == ("users",)
    assert DataSource(path=data / "t.csv", users=("users", "cc")).read().graph.num_pairs == 3
    assert DataSource(path=data / "t.csv", aliases=data / "aliases.csv").read().graph.num_users == 1
    left = DataSource(path=data / "t.csv", unprotected=data / "unprotected.txt").read().graph
    assert (left.num_users, left.num_unprotected_users) == (1, 1)
    assert DataSource(path=data / "t.csv", user="users", example_id="cc").read().graph.num_examples == 2
    everyone, sender = (DataSource(path=data / "m.mbox", attribute_to=to).read().graph for to in (None, "sender"))
    assert (everyone.num_pairs, sender.num_pairs) == (2, 1)
    for setting in ("aliases", "unprotected"):
        with pytest.raises(InputError, match=r"no.txt: cannot be read .*; check the path"):
            DataSource(path=data / "t.csv", **{setting: data / "no.txt"}).read()
    assert set(FORMATS) == {"parquet", "csv", "jsonl", "mail", "arxiv"}
