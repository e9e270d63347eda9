"""Tuning in one call."""

import functools
import io
import sys

import numpy as np
import pytest
import rich.progress
from safetensors.numpy import load_file

import coowned as co
from coowned.cli.main import run as command
from coowned.report import run_figures

MODEL = co.LogisticRegression(features=["x1"], label="y", classes=[0, 1])
GRID = {"learning_rate": [0.01, 1.0]}
CONFIGURATION = """
[data]
path = "data.parquet"
example_id = "id"
[privacy]
epsilon = 8.0
delta = 1e-6
adjacency = "zero-out"
[model]
kind = "logistic-regression"
features = ["x1"]
label = "y"
classes = [0, 1]
[run]
seed = 3
[tuning]
expected_runs = 2
[tuning.grid]
learning_rate = [0.01, 1.0]
"""
SHAPE = """
[selection]
selector = "greedy-min-separation"
[mechanism]
kind = "dp-mf"
batch_size = 8
iterations = 8
min_separation = 2
"""


@pytest.fixture(scope="module")
def examples():
    random = np.random.default_rng(0)
    values = random.standard_normal(240).tolist()
    rows = [{"id": f"e{i}", "users": [f"u{i % 80}"], "x1": x, "y": int(x > 0)} for i, x in enumerate(values)]
    return co.from_table(rows, example_id="id")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def tune(examples, *, model=MODEL, **changed):
    settings = {
        "grid": GRID,
        "expected_runs": 2,
        "epsilon": 8.0,
        "delta": 1e-6,
        "adjacency": "zero-out",
        "selector": co.GreedyMinSeparation(batch_size=8, iterations=8, min_separation=2),
        "seed": 3,
    }
    return co.tune(examples, model, **(settings | changed))


def defaults_of(plan):
    names = ("mechanism", "clip_norm", "optimizer", "learning_rate", "decay", "average")
    return {name: getattr(plan, name) for name in names}


def test_tune(examples):
    told = []
    run = tune(examples, seed=None, progress=lambda done, text: told.append(text))
    assert run.guarantee.target_epsilon == 8.0
    assert 8.0 * 0.997 <= run.guarantee.epsilon <= 8.0
    assert run.plan.learning_rate in GRID["learning_rate"]
    assert run.covered.accuracy_low <= run.covered.accuracy <= run.covered.accuracy_high
    assert run.predict([{"x1": 5.0}])["prediction"].to_list() in ([0], [1])
    [cost] = [text for text in told if text.startswith("tuning: noise multiplier")]
    assert told.index(cost) < min(told.index(text) for text in told if text.startswith("run 1"))
    assert "2 runs expected, at most 8" in cost
    assert "an untuned run" in cost
    assert not any("after" in text and "epsilon" in text for text in told)  # no part of a tuning has an epsilon
    assert "whole tuning" in run.statement()


def test_figures_of_a_tuning_are_of_the_whole_tuning(examples):
    """What a page says of every epsilon and of any attack is no better than what the tuning's claim says."""
    run = tune(examples, seed=None)
    claim = run.guarantee
    curve = [row for row in run_figures.delta_curve(run).rows if row["series"] == "zero-out (claimed)"]
    beyond = [row for row in curve if row["epsilon"] >= claim.epsilon]
    before = [row for row in curve if row["epsilon"] < claim.epsilon]
    assert min(row["delta"] for row in before) > claim.delta * 0.99
    assert max(row["delta"] for row in beyond) <= claim.delta * 1.01
    [found] = [
        row["found"] for row in run_figures.membership(run).rows if row["rate"] == 0.01 and "any" in row["series"]
    ]
    assert found == run.guarantee.statement_parts().attack_bounds["zero-out"]


def test_tune_says_how_good_it_is(examples, monkeypatch):
    """On a terminal a bar, and the verdict in the end; never how many runs there will be."""
    stream, update = Terminal(), rich.progress.Progress.update
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", "400")
    # A bar draws ten times a second and leaves out what it is told in between; here it draws all.
    monkeypatch.setattr(rich.progress.Progress, "update", functools.partialmethod(update, refresh=True))
    tune(examples, seed=None)
    lines = stream.getvalue().splitlines()
    assert sum("2 runs expected, at most 8" in line for line in lines) == 1
    assert any("run 1: " in line for line in lines)
    assert "How good it is (covered by the guarantee): Covered" in lines[-2]
    assert "How good it is (NOT covered by a guarantee): Test accuracy" in lines[-1]


def test_tuned_classes_that_match_no_label(examples, tmp_path):
    model = co.LogisticRegression(features=["x1"], label="y", classes=[7, 9])
    with pytest.raises(co.InputError, match="has a label among the classes '7', '9': this run is finished"):
        tune(examples, model=model, folder=tmp_path / "RUN")
    assert co.open_run(tmp_path / "RUN").covered is not None


def test_temporary_folder_is_removed(examples):
    run = tune(examples, grid={"learning_rate": [0.1]}, expected_runs=1)
    folder = run.folder
    assert folder.exists()
    del run
    assert not folder.exists()


@pytest.mark.full
def test_tune_chooses_as_fit_does(examples):
    """Beside the grid's keys, what is left out is what `fit` chooses, for the same reasons."""
    asked = {"epsilon": 8.0, "delta": 1e-6, "adjacency": "zero-out", "seed": 3}
    fitted = co.fit(examples, MODEL, **asked)
    tuned = co.tune(examples, MODEL, grid={"average": ["none"]}, expected_runs=1, **asked)
    assert defaults_of(tuned.plan) == defaults_of(fitted.plan)
    assert tuned.selector == fitted.selector
    assert tuned.plan.reasons[:-1] == fitted.plan.reasons[:-1] != ()
    rated = co.tune(examples, MODEL, grid={"learning_rate": [0.5]}, expected_runs=1, **asked)
    assert defaults_of(rated.plan) == defaults_of(fitted.plan) | {"learning_rate": 0.5}
    bounded = co.tune(examples, MODEL, grid={"contribution_bound": [1]}, expected_runs=1, **asked)
    limited = co.fit(examples, MODEL, selector=co.Greedy(contribution_bound=1), **asked)
    assert bounded.certificate.contribution_bound == 1
    assert bounded.plan.batch_size == limited.plan.batch_size


@pytest.mark.full
@pytest.mark.parametrize("given", ["", SHAPE])
def test_tune_is_what_the_verb_does(examples, tmp_path, capsys, given):
    import pyarrow.parquet as pq

    called = tune(examples, folder=tmp_path / "called", **({} if given else {"selector": None}))
    pq.write_table(examples.payload, tmp_path / "data.parquet")
    (tmp_path / "tuning.toml").write_text(CONFIGURATION + given)
    assert command(["tune", str(tmp_path / "tuning.toml"), "-o", str(tmp_path / "RUN")]) == 0
    said = capsys.readouterr()
    assert "It is a test run" in said.out
    assert "a test run, for all of it" in said.err
    assert "tuning: noise multiplier" in said.err
    verb = co.open_run(tmp_path / "RUN")
    assert verb.plan.learning_rate == called.plan.learning_rate
    for name, array in load_file(called.folder / "model.safetensors").items():
        np.testing.assert_array_equal(array, load_file(verb.folder / "model.safetensors")[name])
    assert command(["tune", str(tmp_path / "tuning.toml"), "-o", str(tmp_path / "RUN")]) == 2
    assert "this run is finished" in capsys.readouterr().err


def test_bad_arguments_are_refused(examples, tmp_path, capsys):
    with pytest.raises(co.InputError, match="no on_metrics"):
        tune(examples, on_metrics=print)
    with pytest.raises(co.InputError, match="adjacency is required"):
        tune(examples, adjacency=None)
    with pytest.raises(co.InputError, match="cannot be tuned"):
        tune(examples, grid={"rate": [1]})
    (tmp_path / "plain.toml").write_text(CONFIGURATION.split("[tuning]")[0])
    assert command(["tune", str(tmp_path / "plain.toml"), "-o", str(tmp_path / "RUN")]) == 2
    assert "needs a section [tuning]" in capsys.readouterr().err
    assert not (tmp_path / "RUN").exists()
