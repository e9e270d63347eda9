"""A new model is one file and one line in the registry: everything else finds it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.registration import registered, write_configuration, write_table

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


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    """A table and a configuration, in a folder where the toy model's module is; that module is registered."""
    write_configuration(tmp_path, model={"kind": "toy", "colour": "red"})
    with registered(tmp_path, "toy_model", MODULE, MODELS, "toy_model.ToyModel", public="ToyModel"):
        yield write_table(tmp_path)


def test_a_registered_model_is_trained_opened_and_shown(data: Path, capsys):
    folder = data.with_name("RUN")
    assert "ToyModel" in dir(co)
    assert run(["train", str(data.with_name("run.toml")), "-o", str(folder)]) == 0, capsys.readouterr().err
    stored = co.open_run(folder)
    assert stored.predict([{"x": 6.0}])["prediction"][0] in (0, 1)
    assert 'colour = "red"' in (folder / "config.toml").read_text(encoding="utf-8")
    assert run(["report", str(folder)]) == 0


def test_it_is_fitted_by_its_public_name(data: Path):
    examples = co.read_csv(data, users="users", example_id="id", separator=";")
    model = co.ToyModel(features=["x"], label="y", colour="blue")
    settings = {"selector": co.Greedy(contribution_bound=2), "batch_size": 8, "iterations": 2, "clip_norm": 1.0}
    found = co.fit(examples, model, epsilon=8.0, delta=1e-6, adjacency="zero-out", learning_rate=0.1, **settings)
    assert found.arrays()["weights"].shape == (1,)


def test_without_the_line_it_is_unknown(data: Path, capsys, monkeypatch):
    monkeypatch.delitem(MODELS, "toy")
    with pytest.raises(AttributeError, match="ToyModel"):
        _ = co.ToyModel
    config = write_configuration(data.parent, model={"kind": "toy"})
    assert run(["train", str(config), "-o", str(data.with_name("RUN"))]) == 2
    assert "toy" in capsys.readouterr().err
