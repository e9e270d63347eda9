"""Workers killed in ten places, one after the other, each time resumed on another number: the bits of a quiet run.

One run is killed again and again, so that what a kill leaves is what the next processes begin with.
"""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from tests.runs.test_launch import parameters, train, write_config, write_data

from coowned.runs.launch import free_port

ITERATIONS = 60  # a checkpoint every 3 steps
# (workers, who is killed, at which event): of files, or the n-th sum over workers.
PLACES = [
    (2, 1, "sum 1"),
    (2, 0, "open RUN/.run.json.part"),
    (3, 2, "sum 6"),
    (2, 0, "open RUN/.run-key.json.part"),
    (2, 1, "sum 40"),
    (3, 0, "open RUN/.checkpoint.safetensors.part"),
    (2, 0, "os.rename RUN/.checkpoint.safetensors.part"),
    (3, 1, "sum 50"),
    (2, 0, "open RUN/.validation.parquet.part"),
    (2, 0, "open RUN/.model.safetensors.part"),
]
WORKER = """
import os, signal, sys
rank, event, here = os.environ["RANK"], sys.argv[1], os.getcwd() + "/"
victim = rank == sys.argv[2]
del sys.argv[1:3]

def report(name, arguments):
    if victim and name in ("open", "os.rename"):
        path = str(arguments[0]).removeprefix(here)
        if f"{name} {path}" == event:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(report)
from coowned.runs import launch

class Dying(launch.JaxWorkers):
    sums = 0

    def sum(self, numbers):
        self.sums += 1
        if victim and f"sum {self.sums}" == event:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().sum(numbers)

launch.JaxWorkers = Dying
from coowned.__main__ import main
main()
"""


@pytest.fixture
def start(tmp_path):
    """Starts the command in a process, which ends with the test at the latest."""
    started = []

    def begin(file, run, *more, **environment):
        command = [sys.executable, "-m", "coowned", "train", str(file), "-o", str(run), *more]
        return begin_command(command, **environment)

    def begin_command(command, **environment):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        started.append(subprocess.Popen(command, env=os.environ | environment, text=True, cwd=tmp_path, **pipes))
        return started[-1]

    begin.command = begin_command
    yield begin
    for process in started:
        process.terminate()
    for process in started:
        process.communicate()


@pytest.mark.full
def test_workers_killed_in_ten_places(start, tmp_path):
    file, run = write_config(write_data(tmp_path), iterations=ITERATIONS), tmp_path / "RUN"
    train(start, file, tmp_path / "alone")
    steps = []
    for count, victim, event in PLACES:
        place = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        command = [sys.executable, "-c", WORKER, event, str(victim), "train", str(file.name), "-o"]
        workers = [
            start.command([*command, "RUN" if rank == 0 else f"none{rank}"], RANK=str(rank), **place)
            for rank in range(count)
        ]
        said = [worker.communicate(timeout=300) for worker in workers]
        assert workers[victim].returncode == -signal.SIGKILL, (event, said)
        others = [worker.returncode for rank, worker in enumerate(workers) if rank != victim]
        last = event.startswith(("open RUN/.validation", "open RUN/.model"))
        assert set(others) == ({0} if last else {3}), (event, said)  # worker 0 writes alone at the end
        steps.append(json.loads((run / "run.json").read_text())["state"] if (run / "run.json").exists() else None)
    assert steps[-1] == "training"
    train(start, file, run, "--processes", "3")
    assert np.array_equal(parameters(run), parameters(tmp_path / "alone"))
    assert not list(tmp_path.glob("none*"))
