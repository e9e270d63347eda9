"""`coowned export-model`."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from coowned import AttributionGraph
from coowned.cli.main import run
from coowned.runs.config import example
from coowned.synthetic.logistic_data import LogisticData


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    graph = AttributionGraph.from_users_per_example([[i % 60, (i * 7) % 60] for i in range(200)])
    table = LogisticData(num_features=3).attach(graph, seed=1).to_table().drop_columns(["split"])
    pq.write_table(table, folder / "papers.parquet")

    def made(name: str, privacy: str) -> Path:
        text = example().replace("batch_size = 256", "batch_size = 20").replace("iterations = 500", "iterations = 10")
        (folder / "run.toml").write_text(text.replace("epsilon = 8.0 ", privacy), encoding="utf-8")
        assert run(["train", str(folder / "run.toml"), "-o", str(folder / name)]) == 0
        return folder / name

    return made


def test_model_and_promise(make, tmp_path: Path, capsys):
    finished = make("private", "epsilon = 8.0 ")
    capsys.readouterr()
    output = tmp_path / "model"
    assert run(["export-model", str(finished), "-o", str(output), "--json"]) == 0
    names = ["model.safetensors", "guarantee.json", "certificate.json", "README.md"]
    assert json.loads(capsys.readouterr().out) == {"folder": str(output), "files": names}
    assert sorted(file.name for file in output.iterdir()) == sorted(names)
    assert run(["export-model", str(finished), "-o", str(output)]) == 2
    assert "already exists" in capsys.readouterr().err


def test_without_a_guarantee(make, tmp_path: Path, capsys):
    finished = make("none", 'epsilon = "none" ')
    capsys.readouterr()
    assert run(["export-model", str(finished), "-o", str(tmp_path / "model")]) == 2
    captured = capsys.readouterr()
    assert "no guarantee (" in captured.err
    assert len(captured.err.splitlines()) == 1
    assert not (tmp_path / "model").exists()
