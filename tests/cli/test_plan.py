"""`coowned plan`."""

import json
from pathlib import Path

import pytest

from coowned import Priced, read_csv
from coowned.cli.main import run
from coowned.content.splits import split_examples

TARGET = ["--epsilon", "4", "--delta", "1e-6", "--batch-size", "10", "--iterations", "20"]


def test_rows_and_table(table: Path, capsys):
    output = table.with_name("plan.json")
    arguments = [
        "plan",
        str(table),
        "--example-id",
        "id",
        "--separator",
        ";",
        *TARGET,
        "--contribution-bounds",
        "1,3",
    ]
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


def test_verdict_for_the_model(table: Path, capsys):
    arguments = ["plan", str(table), "--example-id", "id", "--separator", ";", *TARGET, "--mechanism", "poisson"]
    page = table.with_name("plan.html")
    assert run([*arguments, "--parameters", "1000000", "--html", str(page)]) == 0
    printed = capsys.readouterr().out
    assert "times the root of 1,000,000 parameters): noise swamps the signal at this batch size" in printed
    assert "noise swamps the signal at this batch size" in page.read_text(encoding="utf-8")
    assert run([*arguments, "--parameters", "4", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)[0]
    assert row["num_parameters"] == 4
    assert row["step_signal_to_noise"] == pytest.approx(10 / (row["noise_multiplier"] * 2))


def test_what_cannot_be_used_is_said_in_full(table: Path, capsys):
    target = [*TARGET[:4], "--batch-size", "200", "--iterations", "20"]
    assert run(["plan", str(table), "--example-id", "id", "--separator", ";", *target, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    page = table.with_name("plan.html")
    assert run(["plan", str(table), "--example-id", "id", "--separator", ";", *target, "--html", str(page)]) == 0
    printed, text = capsys.readouterr().out, page.read_text(encoding="utf-8")
    (schedule,) = [row for row in rows if row["mechanism"] == "min-separation"]
    assert schedule["note"] in printed
    line = next(line for line in printed.splitlines() if line.startswith("min-separation"))
    assert line.split()[1:3] == ["greedy-min-separation", "-"]  # there is no bound
    assert '"contribution_bound":0' not in text
    assert '"contribution_bound":1' in text


CONFIGURATION = """
[data]
path = "data.csv"
example_id = "id"
separator = ";"
splits = [0.8, 0.1, 0.1]
[selection]
selector = "priced"
contribution_bound = 4
seed = 3
[privacy]
epsilon = 4.0
delta = 1e-6
adjacency = "replace"
[mechanism]
kind = "dp-sgd"
batch_size = 10
iterations = 20
clip_norm = 1.0
[model]
kind = "logistic-regression"
features = ["x"]
label = "y"
[optimizer]
learning_rate = 0.1
"""


def test_from_a_training_configuration(table: Path, capsys):
    config = table.with_name("train.toml")
    config.write_text(CONFIGURATION, encoding="utf-8")
    assert run(["plan", "--config", str(config), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {(row["batch_size"], row["iterations"], row["adjacency"], row["epsilon"]) for row in rows} == {
        (10, 20, "replace", 4.0)
    }
    sgd = [row for row in rows if row["mechanism"] == "poisson"]
    assert {row["selector"] for row in sgd} == {"priced"}
    assert 4 in {row["contribution_bound"] for row in sgd}
    # The noise is that of the run: S is chosen from the train split.
    graph = read_csv(table, users="users", example_id="id", separator=";").graph
    graph = graph.subgraph(split_examples(graph, [0.8, 0.1, 0.1])["train"])
    selected = Priced(contribution_bound=4).select(graph, seed=3)
    assert [row["size"] for row in sgd if row["contribution_bound"] == 4] == [selected.size]
    overridden = ["--epsilon", "2", "--batch-size", "5", "--selectors", "greedy", "--mechanism", "poisson"]
    assert run(["plan", "--config", str(config), *overridden, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {(row["epsilon"], row["batch_size"], row["selector"]) for row in rows} == {(2.0, 5, "greedy")}
    assert run(["plan", "--config", str(config), str(table)]) == 2
    assert "either DATA or --config" in capsys.readouterr().err
    assert run(["plan", "--config", str(config), "--users", "users"]) == 2
    assert "--users needs DATA" in capsys.readouterr().err


def test_parameters_are_those_of_the_configured_model(table: Path, capsys):
    config = table.with_name("train.toml")
    config.write_text(CONFIGURATION, encoding="utf-8")
    asked = ["plan", "--config", str(config), "--mechanism", "poisson", "--contribution-bounds", "1", "--json"]
    rows = {}
    for columns in (table.read_text(encoding="utf-8"), _with_columns(table)):
        table.write_text(columns, encoding="utf-8")
        assert run(asked) == 0
        rows[columns] = {row["num_parameters"] for row in json.loads(capsys.readouterr().out)}
    assert list(rows.values()) == [{100}, {2}]  # the columns are missing; one feature and the intercept


def _with_columns(table: Path) -> str:
    head, *lines = table.read_text(encoding="utf-8").splitlines()
    return "\n".join([f"{head},x,y", *(f"{line},0.5,1" for line in lines)]) + "\n"


def test_all_mechanisms_and_batch_sizes(table: Path, capsys):
    asked = [*TARGET[:4], "--batch-size", "5,10", "--iterations", "20", "--mechanism", "all"]
    arguments = [
        "plan",
        str(table),
        "--example-id",
        "id",
        "--separator",
        ";",
        *asked,
        "--contribution-bounds",
        "1,3",
    ]
    page = table.with_name("plan.html")
    assert run([*arguments, "--selectors", "greedy", "--html", str(page)]) == 0
    printed = capsys.readouterr().out
    assert "batches of 5 or 10, 20 steps" in printed
    assert "cyclic-groups" in printed
    assert "Best predicted signal-to-noise" in printed
    assert "cyclic DP-MF (cyclic-groups, bound" in printed
    assert "groups, p " in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("missing", ["--epsilon", "--delta"])
def test_what_is_missing_is_said(table: Path, capsys, missing: str):
    position = TARGET.index(missing)
    assert run(["plan", str(table), *TARGET[:position], *TARGET[position + 2 :]]) == 2
    assert capsys.readouterr().err == f"coowned: plan needs {missing} or --config\n"


def test_sizes_that_are_left_out_are_chosen(table: Path, capsys):
    """Half of each S, and 500 steps; a mechanism whose S depends on them needs them."""
    arguments = ["plan", str(table), "--example-id", "id", "--separator", ";", *TARGET[:4], "--json"]
    assert run(arguments) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["mechanism"] for row in rows} == {"poisson"}
    assert all((row["batch_size"], row["iterations"]) == ((row["size"] + 1) // 2, 500) for row in rows)
    assert run([*arguments, "--mechanism", "min-separation"]) == 2
    assert "needs batch_size and iterations" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [
        ["--batch-size", "a"],
        ["--contribution-bounds", "1,x"],
        ["--contribution-bounds", ""],
        ["--contribution-bounds", "0"],
        ["--selectors", "greed"],
        ["--mechanism", "shuffle"],
        ["--adjacency", "remove"],
        ["--parameters", "0"],
    ],
)
def test_bad_input(table: Path, capsys, wrong: list[str]):
    assert run(["plan", str(table), "--separator", ";", *TARGET, *wrong]) == 2
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""
