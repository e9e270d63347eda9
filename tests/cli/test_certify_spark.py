"""`coowned certify --engine spark`: the verdict of the local engine."""

import json

import polars as pl
import pytest

from coowned.cli.main import run

COMMON = ["--separator", ";", "--example-id", "id"]
SPARK = ["--engine", "spark", "--master", "local[1]"]


@pytest.fixture
def data(tmp_path, capsys):
    file = tmp_path / "mail.csv"
    file.write_text("id,users\n" + "".join(f"m{i},U{i % 7};u{i % 5}\n" for i in range(60)))
    assert run(["select", str(file), *COMMON, "--contribution-bound", "3", "-o", str(tmp_path / "S.parquet")]) == 0
    capsys.readouterr()
    return file


def certify(data, *more):
    return run(["certify", str(data), str(data.parent / "S.parquet"), *COMMON, *more])


@pytest.mark.full
def test_the_verdict_is_the_local_one(data, capsys):
    from coowned.spark import session

    with session("local[2]", spark__sql__adaptive__enabled="false", spark__sql__shuffle__partitions=2):
        for more in ([], ["--json"]):
            assert certify(data, *more) == 0
            local = capsys.readouterr().out
            assert certify(data, *more, "--engine", "spark") == 0
            assert capsys.readouterr().out == local
        # Addresses, as of hdfs://: data, S and the certificate beside it.
        folder = data.parent
        places = [f"file://{data}", f"file://{folder}/S.parquet"]
        assert run(["certify", *places, *COMMON, "--engine", "spark"]) == 0
        assert "holds: " in capsys.readouterr().out
        # The train split is the local one.
        split, part = ["--splits", "0.6,0.2,0.2"], str(folder / "part.parquet")
        words = ["select", str(data), *COMMON, *split, "--contribution-bound", "2", "-o", part, "--engine", "spark"]
        assert run(words) == 0
        assert run(["certify", str(data), part, *COMMON, *split]) == 0
        assert run(["certify", str(data), part, *COMMON, *split, "--engine", "spark"]) == 0
        assert run(["certify", str(data), part, *COMMON, "--engine", "spark"]) == 1
        capsys.readouterr()
        # One copy less, one more, an id that is not there: exit code 1, one sentence, nothing on stdout.
        file = folder / "S.parquet"
        whole = pl.read_parquet(file)
        strange = whole.with_columns(example_id=pl.col("example_id").replace("m1", "nobody"))
        for changed in (whole[1:], whole.with_columns(copies=pl.lit(2, pl.Int32)), strange):
            changed.write_parquet(file)
            assert certify(data, "--engine", "spark") == 1
            said = capsys.readouterr()
            assert said.out == ""
            assert said.err.count("\n") == 1
            assert certify(data, "--engine", "spark", "--json") == 1
            assert json.loads(capsys.readouterr().out)["holds"] is False
        whole.write_parquet(file)
        text = data.read_text()
        data.write_text(text.replace("m3,U3;u3", "m3,U3;u4"))
        assert certify(data, "--engine", "spark") == 1
        assert "another graph" in capsys.readouterr().err
        data.write_text(text)
        whole.with_columns(group=pl.lit(0, pl.Int32)).write_parquet(file)
        assert certify(data, "--engine", "spark") == 2
        assert "use the local engine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engine", "cloud"], "Unknown engine 'cloud'; choose local or spark"),
        (["--master", "local[2]"], "--master applies to Spark only"),
        (["--certificate", "hdfs://head/c.json"], "hdfs://head/c.json: the local engine reads files of this machine"),
        (["--certificate", "nowhere.json", *SPARK], "cannot read the certificate"),
        (["--format", "mail", *SPARK], "Spark reads parquet, csv and jsonl, not mail"),
    ],
)
def test_refusals_are_one_sentence(data, capsys, words, message):
    assert certify(data, *words) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
