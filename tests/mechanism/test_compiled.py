"""What is kept on disk must be what the sources say, whichever file was changed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import coowned

PROGRAM = """
from coowned.mechanism.keys import RunKey
from coowned.mechanism.noise import NoiseStream
from coowned.mechanism.normals import central_normal
stream = NoiseStream(RunKey.from_seed(0), deviations=[1e6], coefficients=(1.0,), shapes={"w": (1,)}, iterations=1)
print(central_normal(0.25), int(stream.next()["w"].ravel()[0]))
"""


@pytest.mark.full
def test_a_change_in_another_file_is_seen(tmp_path):
    """Normals that are twofold in one file double the noise that another file's loop, kept on disk, makes of them."""
    shutil.copytree(Path(coowned.__file__).parent, tmp_path / "coowned", ignore=shutil.ignore_patterns("*.nb[ic]"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    environment.pop("NUMBA_CACHE_DIR", None)

    def run() -> tuple[float, int]:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        normal, noise = done.stdout.split()
        return float(normal), int(noise)

    normal, noise = run()
    assert (normal, noise) == run()
    assert normal == pytest.approx(0.6744897501960817)
    assert abs(noise) > 1000
    assert list(tmp_path.rglob("noise_kernels.round_normals*.nbc"))  # it was kept, and read the second time
    changed = tmp_path / "coowned" / "mechanism" / "normals.py"
    source = changed.read_text()
    once = "return q * top / low"
    assert once in source
    changed.write_text(source.replace(once, "return 2 * q * top / low"))
    doubled, more = run()
    assert doubled == 2 * normal
    assert abs(more - 2 * noise) <= 1
