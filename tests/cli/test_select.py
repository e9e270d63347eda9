"""`coowned select`: S and its certificate, or nothing."""

import importlib.util
import json
from pathlib import Path

import pyarrow.parquet
import pytest
from tests.folders import names

from coowned import ContributionCertificate, Greedy, InputError, read_csv
from coowned.certificate import certificate_path_of
from coowned.cli import select as module
from coowned.cli.main import run


def select(data, *more, output="S.parquet", bound="2"):
    return run(
        [
            "select",
            str(data),
            "--separator",
            ";",
            "--example-id",
            "id",
            *(["--contribution-bound", bound] if bound else []),
            "-o",
            str(data.parent / output),
            *more,
        ]
    )


def test_bounds_of_single_users(data, capsys):
    tiers = data.parent / "tiers.csv"
    tiers.write_text("user,bound,tier\nu1,0,\nU2,1,careful\nstranger,1,careful\n")
    assert select(data, "--contribution-bounds-file", str(tiers)) == 0
    out = capsys.readouterr().out
    assert "1 user is of tier 'careful': none in more than 1\n" in out
    assert "1 user opted out (bound 0), and with them " in out
    assert "1 key with a bound is of nobody in the data" in out
    graph = read_csv(data, example_id="id", separator=";").graph
    expected = Greedy(contribution_bound=2, contribution_bounds={"u1": 0, "u2": 1}).select(graph)
    table = pyarrow.parquet.read_table(data.parent / "S.parquet")
    assert table["example_id"].to_pylist() == [f"m{i}" for i in range(60) if expected.copies[i]]
    certify = ["certify", str(data), str(data.parent / "S.parquet"), "--separator", ";", "--example-id", "id"]
    assert run(certify) == 0  # bounds are in S.parquet
    assert select(data, "--contribution-bounds-file", str(data), output="other.parquet") == 2
    assert "'bound' is missing" in capsys.readouterr().err
    pyarrow.parquet.write_table(table.replace_schema_metadata(None), data.parent / "S.parquet")
    assert run(certify) == 1
    assert "the certificate says tiers." in capsys.readouterr().err


def test_writes_what_the_library_selects(data, capsys):
    assert select(data, "--seed", "5") == 0
    assert names(data.parent) == ["S.certificate.json", "S.parquet", "mail.csv"]
    graph = read_csv(data, example_id="id", separator=";").graph
    expected = Greedy(contribution_bound=2).select(graph, seed=5)
    table = pyarrow.parquet.read_table(data.parent / "S.parquet")
    assert table["example_id"].to_pylist() == [f"m{i}" for i in range(60) if expected.copies[i]]
    assert set(table["copies"].to_pylist()) == {1}
    certificate = ContributionCertificate.from_json((data.parent / "S.certificate.json").read_text())
    certificate.check(graph, expected)
    assert (certificate.contribution_bound, certificate.origin.seed, certificate.origin.selector["name"]) == (
        2,
        5,
        "greedy",
    )
    text = capsys.readouterr().out
    assert f"{expected.size} copies of {expected.num_distinct} of 60 examples" in text
    assert "no user is in more than 2 of them" in text


def test_a_user_in_most_examples_is_named_with_the_cure(data, capsys):
    data.write_text("id,users\n" + "".join(f"m{i},owner;u{i}\n" for i in range(60)))
    assert select(data) == 0
    said = capsys.readouterr().err
    assert "1 user keeps 58 of 60 examples out at a contribution bound of 2." in said
    assert "--unprotected FILE" in said


def test_json(data, capsys):
    assert select(data, "--json") == 0
    stored = (data.parent / "S.certificate.json").read_text()
    assert json.loads(capsys.readouterr().out) == json.loads(stored)


def test_schedules(data, capsys):
    more = ["--selector", "greedy-min-separation", "--batch-size", "2", "--iterations", "4", "--min-separation", "2"]
    assert select(data, *more, bound=None) == 0
    assert pyarrow.parquet.read_table(data.parent / "S.parquet").column_names == ["batch", "position", "example_id"]
    assert "consecutive batches hold at most one copy of each user" in capsys.readouterr().out
    certificate = ContributionCertificate.from_json((data.parent / "S.certificate.json").read_text())
    assert certificate.min_separation >= 2


def test_an_earlier_result_is_replaced_only_when_asked(data, capsys):
    assert select(data) == 0
    first = (data.parent / "S.parquet").read_bytes()
    assert select(data, bound="1") == 2
    assert "S.parquet: already exists; choose another path, or give --overwrite" in capsys.readouterr().err
    assert (data.parent / "S.parquet").read_bytes() == first
    assert select(data, "--overwrite", bound="1") == 0
    assert (data.parent / "S.parquet").read_bytes() != first
    assert names(data.parent) == ["S.certificate.json", "S.parquet", "mail.csv"]


def test_unprotected_users_are_told(data, capsys):
    (data.parent / "bots.txt").write_text("u0\n")
    assert select(data, "--unprotected", str(data.parent / "bots.txt"), "--unattributed", "keep") == 0
    assert "1 user is not protected; 2 copies have no protected user" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--selector", "nope"], "Unknown selector 'nope'; choose greedy, "),
        (["--batch-size", "3"], "The selector greedy has no option --batch-size; remove it"),
        (["--engine", "flink"], "Unknown engine 'flink'; choose local or spark"),
        (["--ties", "coin"], "ties must be one of"),
        (["--seed", "-1"], "seed must be"),
        (["--unattributed", "maybe"], "unattributed must be one of"),
        (["--selector", "greedy-min-separation"], "The selector greedy-min-separation has no option"),
    ],
)
def test_bad_settings(data, capsys, more, message):
    assert select(data, *more) == 2
    assert message in capsys.readouterr().err
    assert names(data.parent) == ["mail.csv"]


def test_missing_settings(data, capsys):
    assert select(data, bound=None) == 2
    assert capsys.readouterr().err == "coowned: The selector greedy needs --contribution-bound\n"
    assert select(data, bound="0") == 2
    assert "contribution_bound must be an integer of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"id,users\nm1\n",
        b"id,people\nm1,a\n",
        b"id,users\nm1,\xff\n",
        b"id,users\n,a\n\n,b\n",
    ],
)
def test_bad_data_writes_nothing(data, capsys, content):
    data.write_bytes(content)
    assert select(data) == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"coowned: {data}")
    assert output.err.count("\n") == 1
    assert names(data.parent) == ["mail.csv"]


def test_a_full_disk_writes_nothing(data, capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("coowned.selection.selection_files.write_selection", full)
    assert select(data) == 3
    said = f"coowned: {data.with_name('S.parquet')}: No space left on device; make room there, or write to another disk"
    assert capsys.readouterr().err == f"{said}\n"
    assert names(data.parent) == ["mail.csv"]


def test_what_is_read_survives(data, capsys):
    before = data.read_bytes()
    assert select(data, output="mail.csv") == 2
    assert "would overwrite its own input" in capsys.readouterr().err
    (data.parent / "folder").mkdir()
    (data.parent / "folder" / "a.csv").write_bytes(before)
    (data.parent / "thesis").mkdir()
    (data.parent / "thesis" / "chapter.tex").write_text("work")
    assert select(data.parent / "folder", output="folder/S.parquet") == 2
    assert "is inside the data folder" in capsys.readouterr().err
    assert select(data, "--overwrite", output="thesis") == 2
    assert "a folder with other files in it" in capsys.readouterr().err
    assert select(data, output="no/S.parquet") == 2
    assert "does not exist; create it first" in capsys.readouterr().err
    aliases = data.parent / "S.parquet"
    aliases.write_text("key,user\nu1,u2\n")
    assert select(data, "--aliases", str(aliases)) == 2
    assert aliases.read_text().startswith("key,user")
    assert data.read_bytes() == before
    assert (data.parent / "thesis" / "chapter.tex").read_text() == "work"


def test_every_selector_can_be_named():
    """Each word of the registry is offered in the help, and each setting is an option."""
    import inspect

    from coowned.selection.registry import CLASSES

    offered = str(inspect.signature(module.run).parameters["selector"].annotation.__metadata__[0].help)
    for word in CLASSES:
        assert word in offered


@pytest.mark.parametrize("place", [".", "/"])
def test_a_folder_is_not_a_selection(place):
    with pytest.raises(InputError, match="give a file"):
        certificate_path_of(Path(place))


@pytest.mark.parametrize("partitioner", [pytest.param("mt-kahypar", marks=pytest.mark.full), "label-propagation"])
def test_the_partitioner_of_groups_is_said(tmp_path: Path, capsys, monkeypatch, partitioner: str):
    if partitioner == "label-propagation":
        found = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mtkahypar" else found(name))
    data = tmp_path / "data.csv"
    data.write_text("id,users\n" + "\n".join(f"{i},u{i};u{i + i % 2}" for i in range(40)), encoding="utf-8")
    output = tmp_path / "S.parquet"
    arguments = ["select", str(data), "--example-id", "id", "--separator", ";", "--selector", "cyclic-groups"]
    assert run([*arguments, "--num-groups", "2", "--contribution-bound", "2", "-o", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "no user is in two of the 2 groups" in printed
    assert ("users were partitioned by label propagation" in printed) == (partitioner == "label-propagation")
    certificate = json.loads(output.with_suffix(".certificate.json").read_text(encoding="utf-8"))
    assert certificate["origin"]["selector"]["partitioner"] == partitioner
