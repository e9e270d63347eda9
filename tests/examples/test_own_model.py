"""The example script runs, and its model learns something."""

import re
import runpy
from pathlib import Path

import pytest


@pytest.mark.full  # the quick suite trains such models in tests/models/test_jax_model.py
def test_own_model(capsys):
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "own_model.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.startswith("1. Training is (8, 1e-06)-differentially private")
    right, trivial = map(int, re.search(r"test: (\d+)% right, (\d+)% by the most frequent class", printed).groups())
    assert right > trivial
    assert "null" in printed
