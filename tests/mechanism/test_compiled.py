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
from coowned.mechanism.fused_clipping import RAISED
one = np.ones(1, np.float32)
sums = tiled_clipped_logistic_sums(np.zeros((1, 3)), np.float32([[30, 40]]), one, np.ones(1, bool), one)
print(round(RAISED), round(1 / float(np.linalg.norm(sums.rounded))))
"""


@pytest.mark.full
def test_a_change_in_another_file_is_seen(tmp_path):
    """A norm that is raised twofold in one file halves what the other's loop, kept on disk, lets through."""
    shutil.copytree(Path(coowned.__file__).parent, tmp_path / "coowned", ignore=shutil.ignore_patterns("*.nb[ic]"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    environment.pop("NUMBA_CACHE_DIR", None)

    def run() -> str:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    assert run() == run() == "1 1"
    kept = {path.name: path.stat().st_mtime_ns for path in tmp_path.rglob("tiled_clipping._add_parts*.nbc")}
    assert kept  # it was kept, and read the second time
    changed = tmp_path / "coowned" / "mechanism" / "fused_clipping.py"
    source = changed.read_text()
    assert "RAISED = 1 + 2.0**-20" in source
    changed.write_text(source.replace("RAISED = 1 + 2.0**-20", "RAISED = 2.0"))
    assert run() == "2 2"
