"""Several workers train a PyTorch module; and workers that torchrun starts and `torch.distributed` connects."""

import os
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.runs.test_launch import write_config, write_data
from tests.small_world import small_world
from tests.training.test_workers import same, trained
from tests.training.thread_workers import together

from coowned.content.example_table import ExampleTable
from coowned.runs.launch import free_port


def square_loss(module, example):
    return (module(example["x"]).sum() - example["y"]) ** 2


@pytest.mark.peers
@pytest.mark.parametrize("mechanism", ["dp-sgd", "dp-mf", "cyclic-dp-mf", "random-allocation"])
def test_a_module_has_the_same_bits(mechanism):
    import torch

    from coowned.torch.model import TorchModel

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    world = small_world()
    random = np.random.default_rng(0)
    arrays = {"x": random.normal(size=(300, 3)).astype(np.float32), "y": random.normal(size=300).astype(np.float32)}
    table = ExampleTable(graph=world.graph, arrays=arrays)
    model = TorchModel(module=module, loss=square_loss).for_table(table)
    plan = world.plan(mechanism, iterations=5)
    alone, *_ = trained(plan, table, model=model)
    assert not same(alone, model.initial())
    for count in (2, 3):
        found = together(count, lambda workers: trained(plan, table, workers, model=model))
        assert all(same(parameters, alone) for parameters, *_ in found)


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
