"""`coowned certify`: exit 1 where the claim does not hold."""

# ruff: noqa: E501 (tables of cases: one case a line)

import json

import polars as pl
import pytest

from coowned.cli.main import run


@pytest.fixture
def data(tmp_path, capsys):
    file = tmp_path / "mail.csv"
    file.write_text("id,users,text\n" + "".join(f"m{i},u{i % 7};u{i % 5},text {i}\n" for i in range(60)))
    assert run(["select", str(file), *COMMON, "--contribution-bound", "2", "-o", str(tmp_path / "S.parquet")]) == 0
    capsys.readouterr()
    return file


COMMON = ["--separator", ";", "--example-id", "id"]


def certify(data, *more, selection="S.parquet"):
    return run(["certify", str(data), str(data.parent / selection), *COMMON, *more])


def test_what_was_selected_holds(data, capsys):
    assert certify(data) == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert output.out.startswith("holds: ")
    assert certify(data, "--json") == 0
    stored = json.loads((data.parent / "S.certificate.json").read_text())
    recount = json.loads(capsys.readouterr().out)
    for name in ("contribution_bound", "size", "num_distinct", "graph_digest", "selection_digest", "copies_per_user"):
        assert recount[name] == stored[name]


def test_other_order_and_other_content_hold(data):
    lines = data.read_text().splitlines()
    changed = [lines[0], *(line.replace("text", "other") for line in reversed(lines[1:]))]
    data.write_text("\n".join(changed) + "\n")
    assert certify(data) == 0


def test_parts_as_spark_writes_them_hold(data):
    table = pl.read_parquet(data.parent / "S.parquet")
    folder = data.parent / "parts.parquet"
    folder.mkdir()
    table[5:].write_parquet(folder / "part-0.parquet")
    table[:5].write_parquet(folder / "part-1.parquet")
    certificate = ["--certificate", str(data.parent / "S.certificate.json")]
    assert certify(data, *certificate, selection="parts.parquet") == 0


def tampered(data, change):
    file = data.parent / "S.parquet"
    change(pl.read_parquet(file)).write_parquet(file)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s[1:],
        lambda s: s.with_columns(pl.lit(2, pl.Int32).alias("copies")),
        lambda s: s.with_columns(pl.lit(2**31 - 1, pl.Int32).alias("copies")),
        lambda s: s.with_columns(pl.lit("m59x").alias("example_id")) if len(s) == 1 else s[:-1].vstack(s[-1:].with_columns(pl.lit("nobody").alias("example_id"))),
        lambda s: s.with_columns(group=pl.int_range(pl.len(), dtype=pl.Int32)),
    ],
)  # fmt: skip
def test_a_changed_selection_fails(data, capsys, change):
    tampered(data, change)
    assert certify(data) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("coowned: ")
    assert output.err.count("\n") == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"contribution_bound": 2', '"contribution_bound": 1'),
        ('"seed": 0', '"seed": 1'),
        ('"checksum": "', '"checksum": "0'),
    ],
)
def test_a_changed_certificate_fails(data, capsys, old, new):
    file = data.parent / "S.certificate.json"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    assert certify(data) == 1
    assert "S.certificate.json: the certificate was changed after it was written" in capsys.readouterr().err


def test_other_data_fail(data, capsys):
    text = data.read_text()
    data.write_text(text.replace("m3,u3;u3", "m3,u3;u4"))
    assert certify(data) == 1
    assert "another graph" in capsys.readouterr().err
    data.write_text(text)
    bots = data.parent / "bots.txt"
    bots.write_text("u1\n")
    assert certify(data, "--unprotected", str(bots)) == 1
    assert certify(data) == 0


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: (folder / "S.certificate.json").unlink(), "cannot read the certificate"),
        (lambda folder: (folder / "S.certificate.json").write_text("{"), "S.certificate.json: is not JSON"),
        (lambda folder: (folder / "S.certificate.json").write_bytes(b"\xff"), "S.certificate.json: is not UTF-8"),
        (
            lambda folder: (folder / "S.certificate.json").write_text("{}"),
            "expected the format 'coowned-certificate-3'",
        ),
        (lambda folder: (folder / "S.parquet").unlink(), "no such file or folder"),
        (lambda folder: (folder / "S.parquet").write_bytes(b"PAR1"), "cannot be read"),
        (lambda folder: (folder / "S.parquet").write_bytes(b""), "the file is empty"),
        (lambda folder: (folder / "mail.csv").unlink(), "no such file or folder"),
        (lambda folder: pl.DataFrame({"x": [1]}).write_parquet(folder / "S.parquet"), "a selection has the columns"),
    ],
)
def test_unreadable_input_is_not_a_failed_claim(data, capsys, break_it, message):
    break_it(data.parent)
    assert certify(data) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert output.err.count("\n") == 1


def test_schedules(data, capsys):
    more = ["--selector", "greedy-min-separation", "--batch-size", "2", "--iterations", "4", "--min-separation", "2"]
    assert run(["select", str(data), *COMMON, *more, "-o", str(data.parent / "T.parquet")]) == 0
    capsys.readouterr()
    assert certify(data, selection="T.parquet") == 0
    assert "consecutive batches hold at most one copy of each user" in capsys.readouterr().out
    file = data.parent / "T.parquet"
    table = pl.read_parquet(file)
    table.with_columns(batch=3 - pl.col("batch")).write_parquet(file)
    assert certify(data, selection="T.parquet") == 1
