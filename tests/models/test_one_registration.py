"""A new model is one file and one line in the registry: everything else finds it."""

from pathlib import Path

import pytest

import coowned as co
from coowned.cli.main import run
from coowned.models.registry import MODELS

MODULE = '''
"""A logistic regression by another name, with an option of its own."""

import dataclasses
from typing import ClassVar

from coowned.models.logistic_regression import LogisticRegression


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyModel(LogisticRegression):
    kind: ClassVar[str] = "toy"
    colour: str = "green"
'''
CONFIGURATION = """
[data]
path = "data.csv"
separator = ";"
splits = [0.8, 0.1, 0.1]
[selection]
selector = "greedy"
contribution_bound = 2
[privacy]
epsilon = 8.0
delta = 1e-6
[mechanism]
kind = "dp-sgd"
batch_size = 8
iterations = 4
clip_norm = 1.0
[model]
kind = "toy"
features = ["x"]
label = "y"
colour = "red"
[optimizer]
learning_rate = 0.1
"""


@pytest.fixture
def data(tmp_path: Path, monkeypatch) -> Path:
    """A table, in a folder where the toy model's module is; that module is registered."""
    (tmp_path / "toy_model.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(MODELS, "toy", "toy_model.ToyModel")
    rows = "\n".join(f"user{i % 60};user{i % 59},{i % 7},{int(i % 7 > 3)}" for i in range(240))
    path = tmp_path / "data.csv"
    path.write_text(f"users,x,y\n{rows}\n", encoding="utf-8")
    (tmp_path / "run.toml").write_text(CONFIGURATION, encoding="utf-8")
    yield path
    vars(co).pop("ToyModel", None)


def test_a_registered_model_is_trained_opened_and_shown(data: Path, capsys):
    folder = data.with_name("RUN")
    assert "ToyModel" in dir(co)
    assert run(["train", str(data.with_name("run.toml")), "-o", str(folder)]) == 0, capsys.readouterr().err
    stored = co.open_run(folder)
    assert stored.predict([{"x": 6.0}])["prediction"][0] in (0, 1)
    assert 'colour = "red"' in (folder / "config.toml").read_text(encoding="utf-8")
    assert run(["report", str(folder)]) == 0


def test_it_is_fitted_by_its_public_name(data: Path):
    examples = co.read_csv(data, users="users", separator=";")
    model = co.ToyModel(features=["x"], label="y", colour="blue")
    settings = {"selector": co.Greedy(contribution_bound=2), "batch_size": 8, "iterations": 2, "clip_norm": 1.0}
    found = co.fit(examples, model, epsilon=8.0, delta=1e-6, adjacency="zero-out", learning_rate=0.1, **settings)
    assert found.arrays()["weights"].shape == (1,)


def test_without_the_line_it_is_unknown(data: Path, capsys, monkeypatch):
    monkeypatch.delitem(MODELS, "toy")
    with pytest.raises(AttributeError, match="ToyModel"):
        _ = co.ToyModel
    config = data.with_name("run.toml")
    config.write_text(CONFIGURATION.replace('colour = "red"', ""), encoding="utf-8")
    assert run(["train", str(config), "-o", str(data.with_name("RUN"))]) == 2
    assert "toy" in capsys.readouterr().err
