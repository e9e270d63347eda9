"""`coowned plan`."""

import json
from pathlib import Path

import pytest

from coowned.cli.main import run

TARGET = ["--epsilon", "4", "--delta", "1e-6", "--batch-size", "10", "--iterations", "20"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = "\n".join(f"{number},user{number % 40};user{number % 37}" for number in range(300))
    path = tmp_path / "data.csv"
    path.write_text(f"id,users\n{rows}\n", encoding="utf-8")
    return path


def test_rows_and_table(data: Path, capsys):
    output = data.with_name("plan.json")
    arguments = ["plan", str(data), "--example-id", "id", "--separator", ";", *TARGET, "--contribution-bounds", "1,3"]
    assert run([*arguments, "-o", str(output)]) == 0
    printed = capsys.readouterr().out
    rows = json.loads(output.read_text(encoding="utf-8"))
    names = {
        "selector",
        "contribution_bound",
        "size",
        "num_distinct",
        "mean_users_per_example",
        "noise_multiplier",
        "best",
    }
    assert all(names <= set(row) for row in rows)
    terms = {"epsilon": 4.0, "delta": 1e-6, "adjacency": "zero-out", "other_adjacency": "replace"}
    terms |= {"unit": "user, fixed graph", "batch_size": 10, "iterations": 20}
    assert all(terms.items() <= row.items() for row in rows)
    for word in {row["selector"] for row in rows}:  # nothing is cut in a pipe
        assert f"{word} " in printed
    assert "…" not in printed
    assert sum(row["best"] for row in rows) == 1
    best = next(row for row in rows if row["best"])
    line = next(line for line in printed.splitlines() if "best" in line)
    assert best["selector"] in line
    assert f"{best['noise_multiplier']:.4f}" in line
    assert run([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == rows


def test_verdict_for_the_model(data: Path, capsys):
    arguments = ["plan", str(data), "--example-id", "id", "--separator", ";", *TARGET, "--mechanism", "poisson"]
    page = data.with_name("plan.html")
    assert run([*arguments, "--parameters", "1000000", "--html", str(page)]) == 0
    printed = capsys.readouterr().out
    assert "times the root of 1,000,000 parameters): noise swamps the signal at this batch size" in printed
    assert "noise swamps the signal at this batch size" in page.read_text(encoding="utf-8")
    assert run([*arguments, "--parameters", "4", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)[0]
    assert row["num_parameters"] == 4
    assert row["step_signal_to_noise"] == pytest.approx(10 / (row["noise_multiplier"] * 2))


def test_what_cannot_be_used_is_said_in_full(data: Path, capsys):
    target = [*TARGET[:4], "--batch-size", "200", "--iterations", "20"]
    assert run(["plan", str(data), "--example-id", "id", "--separator", ";", *target, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    page = data.with_name("plan.html")
    assert run(["plan", str(data), "--example-id", "id", "--separator", ";", *target, "--html", str(page)]) == 0
    printed, text = capsys.readouterr().out, page.read_text(encoding="utf-8")
    (schedule,) = [row for row in rows if row["mechanism"] == "min-separation"]
    assert schedule["note"] in printed
    line = next(line for line in printed.splitlines() if line.startswith("greedy-min-separation"))
    assert line.split()[1] == "-"  # there is no bound
    assert '"contribution_bound":0' not in text
    assert '"contribution_bound":1' in text


@pytest.mark.parametrize(
    "wrong",
    [
        ["--contribution-bounds", "1,x"],
        ["--contribution-bounds", ""],
        ["--contribution-bounds", "0"],
        ["--selectors", "greed"],
        ["--mechanism", "shuffle"],
        ["--adjacency", "remove"],
        ["--parameters", "0"],
    ],
)
def test_bad_input(data: Path, capsys, wrong: list[str]):
    assert run(["plan", str(data), "--separator", ";", *TARGET, *wrong]) == 2
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""
