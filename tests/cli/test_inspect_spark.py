"""`coowned inspect --engine spark`: the figures of the local engine, but for components."""

import json

import pytest

from coowned.cli.main import run


@pytest.fixture
def data(tmp_path):
    file = tmp_path / "mail.csv"
    rows = "".join(f"m{i},U{i % 7};u{i % 5};hub\n" for i in range(60))
    file.write_text(f"id,users\n{rows}" + "nobody,\n" + "".join(f"x{i},y{i}\n" for i in range(9)))
    return file


@pytest.mark.full
def test_figures_are_the_local_ones(data, capsys):
    from coowned.spark import session

    words = ["inspect", str(data), "--separator", ";", "--example-id", "id"]
    with session("local[2]", spark__sql__adaptive__enabled="false", spark__sql__shuffle__partitions=2):
        for more in (["--json", "--show-keys"], ["--json"]):
            assert run([*words, *more]) == 0
            local = json.loads(capsys.readouterr().out)
            assert run([*words, *more, "--engine", "spark"]) == 0
            found = json.loads(capsys.readouterr().out)
            components = {name for name in local if "component" in name}
            assert {name for name in local if local[name] != found[name]} == components
            assert {found[name] for name in components} == {None}
        assert run(words) == 0
        shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]  # columns differ in width
        assert run([*words, "--engine", "spark"]) == 0
        others = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
        assert others == [line for line in shown if "omponent" not in line and "in the largest" not in line]


def test_refusals_are_one_sentence(data, capsys):
    assert run(["inspect", str(data), "--engine", "spark"]) == 2
    assert "name the column with the ids" in capsys.readouterr().err
    assert run(["inspect", "hdfs://head/mail.csv"]) == 2
    assert "the local engine reads files of this machine" in capsys.readouterr().err
    assert run(["inspect", str(data), "--checkpoint-dir", "x"]) == 2
    assert "--checkpoint-dir applies to Spark only" in capsys.readouterr().err
    assert run(["inspect", str(data), "--engine", "spark", "--conf", "executor.memory=1g"]) == 2
    assert "--conf takes KEY=VALUE with a key that begins with spark." in capsys.readouterr().err
