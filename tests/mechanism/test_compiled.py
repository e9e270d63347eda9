"""What is kept on disk must be what the sources say, whichever file was changed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import coowned

PROGRAM = """
import numpy as np
from coowned.mechanism.tiled_clipping import tiled_clipped_logistic_sums
from coowned.mechanism.fused_clipping import sigmoid
one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
sums = tiled_clipped_logistic_sums(np.zeros((1, 2)), zero[:, None], zero, np.ones(1, bool), 9 * one)
print(sigmoid(zero[0]), sums.rounded[0, 1])
"""


@pytest.mark.full
def test_a_change_in_another_file_is_seen(tmp_path):
    """A sigmoid that is twofold in one file doubles what the other's loop, kept on disk, adds up."""
    shutil.copytree(Path(coowned.__file__).parent, tmp_path / "coowned", ignore=shutil.ignore_patterns("*.nb[ic]"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    environment.pop("NUMBA_CACHE_DIR", None)

    def run() -> str:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    assert run() == run() == "0.5 0.5"
    kept = {path.name: path.stat().st_mtime_ns for path in tmp_path.rglob("tiled_clipping._add_parts*.nbc")}
    assert kept  # it was kept, and read the second time
    changed = tmp_path / "coowned" / "mechanism" / "fused_clipping.py"
    source = changed.read_text()
    once = "return np.float32(1) / (np.float32(1) + series * power)"
    assert once in source
    changed.write_text(source.replace(once, once.replace("(1) /", "(2) /")))
    assert run() == "1.0 1.0"
