"""`coowned plan --engine spark`: the rows of the local engine for DP-SGD."""

import json

import pytest

from coowned.cli.main import run


@pytest.fixture
def data(tmp_path):
    file = tmp_path / "mail.csv"
    file.write_text("id,users\n" + "".join(f"m{i},u{i % 23};v{i % 19}\n" for i in range(80)) + "nobody,\n")
    return file


@pytest.mark.full
def test_rows_are_the_local_ones(data, capsys):
    from coowned.spark import session

    words = ["plan", str(data), "--separator", ";", "--example-id", "id", "--epsilon", "8", "--delta", "1e-6"]
    words += ["--selectors", "greedy,greedy-with-duplicates", "--contribution-bounds", "1,2", "--json"]
    words += ["--batch-size", "8", "--iterations", "20"]
    with session("local[2]", spark__sql__adaptive__enabled="false", spark__sql__shuffle__partitions=2):
        assert run([*words, "--mechanism", "poisson"]) == 0
        local = json.loads(capsys.readouterr().out)
        assert run([*words, "--engine", "spark"]) == 0
        assert json.loads(capsys.readouterr().out) == local
    assert len(local) == 4


def test_refusals_are_one_sentence(data, capsys):
    words = ["plan", str(data), "--separator", ";", "--example-id", "id", "--epsilon", "8", "--delta", "1e-6"]
    assert run([*words, "--engine", "spark", "--mechanism", "cyclic"]) == 2
    assert "only DP-SGD can be planned on Spark" in capsys.readouterr().err
    assert run([*words, "--engine", "spark", "--label", "users", "--text", "id"]) == 2
    assert "a plan on Spark takes DATA" in capsys.readouterr().err
    assert run(["plan", "hdfs://head/mail.csv", *words[2:]]) == 2
    assert "the local engine reads files of this machine" in capsys.readouterr().err
