"""`coowned inspect`."""

import json

import pytest

from coowned import GraphStatistics, read_csv
from coowned.cli.main import run

TEXT = "id,users\nm1,Ann;bob\nm2,bob\nm3,bob;[carol]\nm4,\n"


@pytest.fixture
def data(tmp_path):
    file = tmp_path / "mail.csv"
    file.write_text(TEXT)
    return file


def inspect(data, *more):
    return run(["inspect", str(data), "--separator", ";", *more])


def test_json(data, capsys):
    assert inspect(data, "--example-id", "id", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    graph = read_csv(data, example_id="id", separator=";").graph
    expected = json.loads(json.dumps(GraphStatistics.of(graph).to_dict()))
    for name, value in expected.items():
        if name != "heaviest_users":
            assert found[name] == value
    assert found["digest"] == graph.digest
    assert found["columns_read"] == ["id", "users"]
    assert found["heaviest_users"][0] == {"user": "#1", "examples": 3}
    assert found["notes"] == {}


def test_keys_are_hidden_unless_asked_for(data, capsys):
    assert inspect(data) == 0
    text = capsys.readouterr().out
    assert not {"ann", "bob", "carol"} & set(text.replace("[", " ").replace("]", " ").split())
    assert "#1" in text
    assert inspect(data, "--show-keys") == 0
    text = capsys.readouterr().out
    assert "bob" in text
    assert "[carol]" in text  # a key that looks like markup is shown as it is
    assert inspect(data, "--show-keys", "--json") == 0
    assert json.loads(capsys.readouterr().out)["heaviest_users"][0] == {"user": "bob", "examples": 3}


def test_the_page(data, capsys):
    assert inspect(data) == 0
    output = capsys.readouterr()
    assert output.err == ""
    for part in ("Counts", "Users per example", "Examples per user", "Heaviest users", "75.0%"):
        assert part in output.out
    assert "At a contribution bound of 1, the heaviest 3 users alone block 2 examples (50.0%)." in output.out


def test_unprotected_users_and_aliases(data, capsys):
    (data.parent / "bots.txt").write_text("# a robot\nBOB\n")
    (data.parent / "aliases.csv").write_text("key,user\n[carol],ann\n")
    more = ["--unprotected", str(data.parent / "bots.txt"), "--aliases", str(data.parent / "aliases.csv"), "--json"]
    assert inspect(data, *more) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_unprotected_users"], found["num_users"], found["num_examples_without_users"]) == (1, 1, 2)
    assert found["notes"] == {}
    assert "bob" not in json.dumps(found)
    (data.parent / "bots.txt").write_text("BOB\nnobody\n")
    assert inspect(data, *more) == 2
    assert "1 unprotected key is not in the data, the first is 'nobody'" in capsys.readouterr().err


def test_no_examples_at_all(data, capsys):
    data.write_text("id,users\n")
    assert inspect(data) == 0
    assert inspect(data, "--json") == 0
    assert '"num_examples": 0' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", b"users,text\na,1\nb\n", "row 1: 1 cell where the header has 2; quote cells"),
        ("x.csv", b"people,text\na,1\n", "there is no column 'users'; choose from 'people', 'text'"),
        ("x.csv", b"", "the file is empty; add data"),
        ("x.csv", b"users,text\n\xff,a\n", "column 'users' is not UTF-8 at row 0"),
        ("x.parquet", b"PAR1 and no more", "cannot be read"),
        ("x.jsonl", b'{"users": ["a"]}\n{"users": [', "line 2: not JSON"),
        ("x.jsonl", b'{"users": [null]}\n', "null user in column 'users' at row 0; fill it in"),
        ("x.jsonl", b'{"users": null}\n', "column 'users' is null"),
        ("x.mbox", b"this is no mailbox\n", ""),
        ("x.bin", b"\0\1\2", "unknown format; choose one with --format"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, capsys, name, content, message):
    file = tmp_path / name
    file.write_bytes(content)
    assert run(["inspect", str(file)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"coowned: {file}")
    assert output.err.count("\n") == 1
    assert "Traceback" not in output.err
    assert message in output.err
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_settings_that_do_not_fit(data, capsys):
    for more in (["--attribute-to", "sender"], ["--format", "excel"], ["--users", "nope"], ["--aliases", "no.csv"]):
        assert inspect(data, *more) == 2
        assert capsys.readouterr().err.count("\n") == 1
