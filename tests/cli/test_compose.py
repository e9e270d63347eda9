"""`coowned compose`: the total of several runs, from their folders."""

import json

import pytest
from tests.runs.run_folders import claim, write_run

from coowned import compose
from coowned.accounting.statement import rounded_up
from coowned.cli.main import run


@pytest.fixture
def runs(tmp_path):
    claims = [claim(1.0), claim(2.0)]
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder, made in zip(folders, claims, strict=True):
        folder.mkdir()
        write_run(folder, made)
    return [str(folder) for folder in folders], claims


def test_total_of_two_runs(runs, capsys):
    folders, claims = runs
    assert run(["compose", *folders, "--delta", "1e-6"]) == 0
    shown = capsys.readouterr().out
    total = compose(claims, delta=1e-6)
    assert total.epsilon > max(made.epsilon for made in claims)
    assert f"All 2 runs together are ({rounded_up(total.epsilon)}, 1e-06)-differentially private" in shown
    assert "each run alone, at its own delta (unit: user, fixed graph; bound k; adjacency: zero-out)" in " ".join(
        shown.split()
    )
    for folder, made in zip(folders, claims, strict=True):
        assert folder in shown
        assert rounded_up(made.epsilon) in shown
    assert run(["compose", *folders, "--delta", "1e-6", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["epsilon"] == total.epsilon


def test_what_cannot_be_composed(runs, tmp_path, capsys):
    folders, _ = runs
    assert run(["compose", folders[0], folders[0], "--delta", "1e-6"]) == 2
    assert "duplicate run" in capsys.readouterr().err
    assert run(["compose", *folders, "--delta", "0.2"]) == 2
    assert "--allow-large-delta" in capsys.readouterr().err
    assert run(["compose", *folders, "--delta", "0.2", "--allow-large-delta"]) == 0
    assert "Warning: delta 0.2" in capsys.readouterr().out
    assert run(["compose", str(tmp_path / "none"), "--delta", "1e-6"]) == 2
    assert "not a folder" in capsys.readouterr().err
    seeded = tmp_path / "seeded"
    seeded.mkdir()
    write_run(seeded, claim(1.0, test_run=True))
    assert run(["compose", folders[0], str(seeded), "--delta", "1e-6"]) == 2
