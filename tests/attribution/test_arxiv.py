"""arXiv metadata: papers and their authors."""

# ruff: noqa: E501 (tables of cases: one case a line)

import contextlib
import json

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from tests.attribution.attributed import users_of

from coowned import InputError, UserKeyRules, read_arxiv

PAPERS = [
    {"id": "0704.0001", "title": "A\n  title", "abstract": " One. ", "categories": "hep-ph", "authors_parsed": [["Müller", "Jean-Luc", ""], ["Nadolsky", "P. M.", "Jr"]], "license": None},
    {"id": "math/0001", "title": "B", "abstract": "Two.", "authors_parsed": [["Muller", "Jean Luc"]]},
    {"id": "0704.0003", "title": "C", "abstract": None, "authors_parsed": [["", "", ""]]},
]  # fmt: skip


def write(file, papers):
    file.write_text("".join(json.dumps(paper) + "\n" for paper in papers), encoding="utf-8")
    return file


def test_papers_and_authors(tmp_path, monkeypatch):
    monkeypatch.setattr("coowned.attribution.examples.BATCH_CHARACTERS", 250)  # the last chunk is not full
    examples = read_arxiv(write(tmp_path / "arxiv.json", PAPERS))
    assert examples.ids.to_pylist() == ["0704.0001", "math/0001", "0704.0003"]
    assert users_of(examples) == [{"jean luc muller", "p m nadolsky jr"}, {"jean luc muller"}, set()]
    assert examples.payload["abstract"].to_pylist() == ["One.", "Two.", ""]
    assert examples.payload["title"].to_pylist() == ["A title", "B", "C"]
    assert examples.graph.columns_read == ("id", "authors_parsed")
    assert examples.user_mapping.spellings_of("jean luc muller") == ["Jean-Luc Müller", "Jean Luc Muller"]


def test_initials_and_aliases(tmp_path):
    file = write(tmp_path / "arxiv.json", PAPERS)
    merged = read_arxiv(file, user_keys=UserKeyRules.authors(initials=True))
    assert "j muller" in merged.user_keys.to_pylist()
    aliases = tmp_path / "aliases.csv"
    aliases.write_text("key,user\nP. M. Nadolsky Jr,Jean-Luc Müller\n", encoding="utf-8")
    assert users_of(read_arxiv(file, aliases=aliases))[0] == {"jean luc muller"}


def test_folder(tmp_path):
    write(tmp_path / "a.json", PAPERS[:1])
    write(tmp_path / "b.jsonl", PAPERS[1:])
    assert read_arxiv(tmp_path).graph.num_examples == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"id": "x", "authors_parsed": [["A"]', "line 2: not JSON .*; is the file cut off"),
        (b'["x"]', "line 2: Expected object, got array; is it the arXiv"),
        (b'{"id": "x"}', "line 2: Object missing required field authors_parsed; is it the arXiv"),
        (b'{"id": "x", "authors_parsed": ["A"]}', r"line 2: Expected array, got str - at authors_parsed\[0\]"),
        (b'{"id": "x", "authors_parsed": [[]]}', r"line 2: Expected array of length >= 1 - at authors_parsed\[0\]"),
        (b'{"id": "x", "authors_parsed": [[null]]}', "line 2: Expected str, got null - at authors_parsed"),
        (b'{"id": 7, "authors_parsed": []}', "line 2: Expected str, got int - at id; is it"),
        (b'{"authors_parsed": []}', "line 2: Object missing required field id"),
        (b'{"id": "x", "authors_parsed": [["\xff"]]}', "line 2: not JSON in UTF-8"),
    ],
)
def test_bad_lines(tmp_path, line, message):
    file = write(tmp_path / "arxiv.json", PAPERS[:1])
    file.write_bytes(file.read_bytes() + line + b"\n")
    with pytest.raises(InputError, match=f"arxiv.json.*{message}"):
        read_arxiv(file)


def test_texts_that_are_none_stop_nothing(tmp_path):
    line = b'{"id": "x\\ud800", "authors_parsed": [["\\ud800"]], "title": 7, "abstract": ["a"]}'
    (tmp_path / "arxiv.json").write_bytes(line + b"\n")
    examples = read_arxiv(tmp_path / "arxiv.json")
    assert (examples.ids.to_pylist(), users_of(examples)) == (["x?"], [{"?"}])
    assert examples.payload["abstract"].to_pylist() == [""]


def test_a_paper_on_several_lines_is_one_example(tmp_path):
    again = {"id": "0704.0001", "title": "Later", "authors_parsed": [["Third", "T."]]}
    examples = read_arxiv(write(tmp_path / "arxiv.json", [*PAPERS, again]))
    assert examples.ids.to_pylist() == ["0704.0001", "math/0001", "0704.0003"]
    assert users_of(examples)[0] == {"jean luc muller", "p m nadolsky jr", "t third"}
    assert examples.payload["title"][0].as_py() == "A title"
    assert examples.notes == {"repeated_rows": 1}


def test_missing_and_empty(tmp_path):
    with pytest.raises(InputError, match="no such file or folder; check the path"):
        read_arxiv(tmp_path / "no.json")
    (tmp_path / "empty.json").touch()
    with pytest.raises(InputError, match="the file is empty"):
        read_arxiv(tmp_path / "empty.json")


@given(st.integers(0, 10_000), st.binary(max_size=6), st.integers(0, 8))
@settings(max_examples=150)
def test_mangled(tmp_path_factory, at, put_in, cut):
    file = write(tmp_path_factory.getbasetemp() / "mangled.json", PAPERS)
    data = file.read_bytes()
    at %= len(data)
    file.write_bytes(data[:at] + put_in + data[at + cut :])
    with contextlib.suppress(InputError):  # nothing else may be raised
        examples = read_arxiv(file)
        assert examples.graph.num_examples == examples.payload.num_rows
