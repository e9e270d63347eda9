"""`coowned report`."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from coowned import AttributionGraph
from coowned.cli.main import run
from coowned.runs.config import example
from coowned.synthetic.logistic_data import LogisticData


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A finished run without privacy, whose page is written soonest."""
    folder = tmp_path_factory.mktemp("run")
    graph = AttributionGraph.from_users_per_example([[i % 60, (i * 7) % 60] for i in range(200)])
    table = LogisticData(num_features=3).attach(graph, seed=1).to_table().drop_columns(["split"])
    pq.write_table(table, folder / "papers.parquet")
    text = example().replace("batch_size = 256", "batch_size = 20").replace("iterations = 500", "iterations = 10")
    (folder / "run.toml").write_text(text.replace("epsilon = 8.0 ", 'epsilon = "none" '), encoding="utf-8")
    assert run(["train", str(folder / "run.toml"), "-o", str(folder / "RUN")]) == 0
    return folder / "RUN"


def test_page_and_release(finished: Path, tmp_path: Path, capsys):
    assert run(["report", str(finished)]) == 0
    printed = capsys.readouterr().out
    assert str(finished / "report.html") in printed
    assert "no guarantee covers" in printed
    output = tmp_path / "public.html"
    assert run(["report", str(finished), "--release", "-o", str(output), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "report": str(output),
        "bytes": output.stat().st_size,
        "release": True,
        "guarantee": False,
        "claim": "no guarantee (trained without privacy)",
    }
    assert "Training loss" in (finished / "report.html").read_text(encoding="utf-8")
    assert "Training loss" not in output.read_text(encoding="utf-8")


def test_compare(finished: Path, tmp_path: Path, capsys):
    output = tmp_path / "page.html"
    assert run(["report", str(finished), "--compare", str(finished), "-o", str(output)]) == 0
    assert "Accuracy against epsilon" in output.read_text(encoding="utf-8")
    assert run(["report", str(finished), "--compare", str(finished), "--release", "-o", str(output)]) == 2
    assert "a release leaves out" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["model.safetensors", "run.json", "metrics.parquet"])
def test_files_of_the_run_are_kept(finished: Path, tmp_path: Path, capsys, name: str):
    before = (finished / name).read_bytes()
    link = tmp_path / "link"
    link.symlink_to(finished)
    for place in (finished / name, link / name):
        assert run(["report", str(finished), "-o", str(place)]) == 2
        assert "would overwrite a file of the run" in capsys.readouterr().err
    assert (finished / name).read_bytes() == before


def test_its_own_page_may_be_written_again(finished: Path, capsys):
    for name in ("report.html", "report.html", "new.html"):
        assert run(["report", str(finished), "-o", str(finished / name)]) == 0
    assert run(["report", str(finished), "-o", str(finished / "new.html")]) == 2
    capsys.readouterr()


def test_bad_input(tmp_path: Path, finished: Path, capsys):
    for arguments in (
        ["report", str(tmp_path / "nowhere")],
        ["report", str(tmp_path)],
        ["report", str(finished), "-o", str(tmp_path / "no" / "page.html")],
    ):
        assert run(arguments) == 2
        captured = capsys.readouterr()
        assert len(captured.err.splitlines()) == 1
        assert captured.out == ""
