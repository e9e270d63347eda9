"""`coowned select --engine spark`: the S and the certificate of the local engine."""

import json
import re

import pytest

from coowned.cli.main import run


@pytest.fixture
def data(tmp_path):
    file = tmp_path / "mail.csv"
    file.write_text("id,users\n" + "".join(f"m{i},U{i % 7};u{i % 5}\n" for i in range(60)))
    return file


def select(data, *more, output="S.parquet"):
    fixed = ["select", str(data), "--separator", ";", "--contribution-bound", "3"]
    return run([*fixed, "-o", str(data.parent / output), *more])


def without_sizes(text):
    """What was printed, but for the sizes of files: Spark compresses Parquet in its own way."""
    return re.sub(r"\([\d.]+ \w+\)", "", text)


@pytest.mark.full
def test_equals_the_local_engine(data, capsys):
    words = ["--example-id", "id", "--selector", "greedy-with-duplicates", "--seed", "5"]
    assert select(data, *words, output="local.parquet") == 0
    local = capsys.readouterr().out
    assert select(data, *words, "--engine", "spark", "--master", "local[2]") == 0
    assert without_sizes(capsys.readouterr().out) == without_sizes(local.replace("local.", "S."))
    folder = data.parent
    assert (folder / "S.parquet").is_dir()
    assert (folder / "S.certificate.json").read_text() == (folder / "local.certificate.json").read_text()
    assert sorted(path.name for path in folder.iterdir() if path.name.startswith(("S", "."))) == [
        "S.certificate.json",
        "S.parquet",
    ]
    assert run(["certify", str(data), str(folder / "S.parquet"), "--separator", ";", "--example-id", "id"]) == 0
    assert "holds: " in capsys.readouterr().out

    from pyspark.sql import SparkSession

    assert SparkSession.getActiveSession() is None  # what was started was stopped


@pytest.mark.full
def test_json_and_bad_data(data, capsys):
    from coowned.spark import session

    with session("local[2]", spark__sql__adaptive__enabled="false", spark__sql__shuffle__partitions=2):
        assert select(data, "--example-id", "id", "--engine", "spark", "--json") == 0
        assert json.loads(capsys.readouterr().out)["contribution_bound"] == 3
        data.write_text(data.read_text() + "m0,ann\n")
        assert select(data, "--example-id", "id", "--engine", "spark", output="again.parquet") == 2
        assert "must be unique, but several rows have 'm0'" in capsys.readouterr().err.replace("\n", " ")
        data.write_text("id,users\n1,ann\n2\n")
        assert select(data, "--example-id", "id", "--engine", "spark", output="again.parquet") == 2
        assert "Spark cannot read it" in capsys.readouterr().err
    assert not (data.parent / "again.parquet").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--example-id", "id", "--master", "local[2]"], "--master means nothing to the local engine"),
        (["--engine", "spark"], "has no row numbers; name the column with the ids (--example-id)"),
        (["--engine", "spark", "--format", "mail"], "Spark reads parquet, csv and jsonl, not mail"),
        (["--engine", "spark", "--example-id", "id", "--selector", "priced"], "priced does not run on Spark"),
        (["--engine", "spark", "--example-id", "id", "--ties", "input"], "means nothing on Spark"),
    ],
)
def test_refusals_are_one_sentence(data, capsys, words, message):
    assert select(data, *words) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert sorted(path.name for path in data.parent.iterdir()) == ["mail.csv"]
