"""Workers that torchrun starts and `torch.distributed` connects."""

import os
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.runs.test_engines import write_config, write_data

from coowned.runs.launch import free_port


def train(tmp_path, name, *starter):
    command = [sys.executable, *starter, "-m", "coowned", "train", str(tmp_path / "run.toml"), "-o", name]
    done = subprocess.run(
        command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return load_file(tmp_path / name / "model.safetensors")


@pytest.mark.peers
def test_torchrun_gives_the_same_bits(tmp_path):
    write_config(write_data(tmp_path))
    two = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()))
    found, alone = train(tmp_path, "two", *two), train(tmp_path, "one")
    assert sorted(found) == sorted(alone)
    assert all(np.array_equal(found[name].view(np.uint32), alone[name].view(np.uint32)) for name in alone)
