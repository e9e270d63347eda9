"""Workers as processes of this machine, connected by their engine; the arithmetic is in tests/training."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from safetensors.numpy import load_file

from coowned.errors import InputError
from coowned.runs.launch import Place, free_port, launch, workers_from
from coowned.training.workers import ALONE

CONFIG = """
[data]
path = "data.parquet"
users = "users"
example_id = "id"
[selection]
contribution_bound = 2
[privacy]
epsilon = 8.0
delta = 1e-6
adjacency = "zero-out"
[mechanism]
kind = "dp-sgd"
batch_size = 64
iterations = {iterations}
[model]
features = "features"
num_features = 5
label = "label"
[evaluation]
epsilon_share = 0.2
[run]
seed = 3
checkpoint_every = 50
"""


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        (
            {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "5", "SLURM_NTASKS": "9"},
            Place(1, 4, "a", 5),
        ),
        (
            {"SLURM_PROCID": "2", "SLURM_NTASKS": "3", "MASTER_ADDR": "b", "MASTER_PORT": "6"},
            Place(2, 3, "b", 6),
        ),
    ],
)
def test_places(environment, expected):
    assert Place.of(environment) == expected


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "a"}, "not MASTER_PORT"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "a", "MASTER_PORT": "5"}, "below WORLD_SIZE"),
        ({"WORLD_SIZE": "2", "RANK": "x", "MASTER_ADDR": "a", "MASTER_PORT": "5"}, "must be whole numbers"),
    ],
)
def test_bad_places_are_refused(environment, said):
    with pytest.raises(InputError, match=said):
        Place.of(environment)


def test_a_process_alone_needs_no_engine():
    assert workers_from({}) is ALONE


@pytest.mark.parametrize("processes", [1, 0, 5000])
def test_launch_refuses_other_numbers(processes):
    with pytest.raises(InputError, match="processes must be"):
        launch([sys.executable, "-c", ""], processes)


def test_the_first_failure_is_told(capfd):
    program = "import os, sys; sys.exit(0 if os.environ['RANK'] == '0' else sys.stderr.write('worker: no\\n') and 2)"
    assert launch([sys.executable, "-S", "-c", program], 2) == 2
    assert capfd.readouterr().err == "worker: no\n"


def write_data(folder, *, seed=0):
    random = np.random.default_rng(seed)
    features = random.normal(size=(2000, 5)).astype(np.float32)
    users = [[f"u{i % 700}", f"u{(7 * i) % 700}"] for i in range(2000)]
    labels = (features[:, 0] > 0).astype(int)
    columns = {"id": [f"e{i}" for i in range(2000)], "users": users, "features": features.tolist(), "label": labels}
    folder.mkdir(exist_ok=True)
    pl.DataFrame(columns).write_parquet(folder / "data.parquet")
    return folder


def write_config(folder, *, iterations=60):
    file = folder / "run.toml"
    file.write_text(CONFIG.format(iterations=iterations), encoding="utf-8")
    return file


@pytest.fixture
def start():
    """Starts the command in a process, which ends with the test at the latest."""
    started = []

    def begin(file, run, *more, **environment):
        command = [sys.executable, "-m", "coowned", "train", str(file), "-o", str(run), *more]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        started.append(subprocess.Popen(command, env=os.environ | environment, text=True, **pipes))
        return started[-1]

    yield begin
    for process in started:
        process.terminate()
    for process in started:
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def train(start, file, run, *more):
    process = start(file, run, *more)
    shown, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return shown


def start_workers(start, files, runs):
    """One worker for each configuration, started by hand."""
    place = {"WORLD_SIZE": str(len(files)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [start(file, run, RANK=str(rank), **place) for rank, (file, run) in enumerate(zip(files, runs, strict=True))]


def wait_for_checkpoint(run, processes):
    until = time.monotonic() + 120
    while not (run / "checkpoint.safetensors").exists():
        assert time.monotonic() < until
        assert all(process.poll() is None for process in processes)
        time.sleep(0.05)


def parameters(run):
    arrays = load_file(run / "model.safetensors")
    return np.concatenate([arrays[name].reshape(-1) for name in sorted(arrays)]).view(np.uint32)


@pytest.mark.full
def test_processes_give_the_same_bits(start, tmp_path):
    file = write_config(write_data(tmp_path))
    train(start, file, tmp_path / "1")
    shown = train(start, file, tmp_path / "2", "--processes", "2", "--json")
    assert json.loads(shown)["run"] == str(tmp_path / "2")  # nothing else is on standard output
    assert np.array_equal(parameters(tmp_path / "2"), parameters(tmp_path / "1"))
    assert (tmp_path / "2" / "covered.json").exists()


@pytest.mark.full
def test_other_workers_write_nothing(start, tmp_path):
    file = write_config(write_data(tmp_path))
    runs = [tmp_path / "run", tmp_path / "none"]
    for process in start_workers(start, [file, file], runs):
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said
    assert (runs[0] / "model.safetensors").exists()
    assert not runs[1].exists()


@pytest.mark.full
@pytest.mark.parametrize("changed", ["data", "configuration"])
def test_workers_that_differ_are_refused(start, tmp_path, changed):
    first, second = (write_data(tmp_path / name, seed=i * (changed == "data")) for i, name in enumerate("ab"))
    files = [write_config(first), write_config(second, iterations=61 if changed == "configuration" else 60)]
    runs = [tmp_path / "run", tmp_path / "none"]
    said = [process.communicate(timeout=300)[1] for process in start_workers(start, files, runs)]
    assert all(f"worker 1 has another {changed}" in text for text in said), said
    assert not runs[0].exists()  # nothing was begun


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_worker_ends_the_run(start, tmp_path, victim):
    """The other ends with one sentence and exit code 3; another number of processes resumes to the same bits."""
    file, run = write_config(write_data(tmp_path), iterations=700), tmp_path / "run"
    processes = start_workers(start, [file, file], [run, tmp_path / "none"])
    wait_for_checkpoint(run, processes)
    processes[victim].send_signal(signal.SIGKILL)
    ends = [process.communicate(timeout=60) for process in processes]
    assert processes[1 - victim].returncode == 3, ends
    assert "another worker of this run has ended" in ends[1 - victim][1].splitlines()[-1]
    assert (run / "checkpoint.safetensors").exists()
    train(start, file, run, "--processes", "1" if victim else "3")
    train(start, file, tmp_path / "alone")
    assert np.array_equal(parameters(run), parameters(tmp_path / "alone"))


@pytest.mark.full
def test_no_worker_is_left(start, tmp_path):
    """The command itself is stopped: so are the processes that it started."""
    file, run = write_config(write_data(tmp_path), iterations=100_000), tmp_path / "run"
    process = start(file, run, "--processes", "2")
    wait_for_checkpoint(run, [process])
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii").split()
    assert len(children) == 2
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert not any(Path(f"/proc/{child}").exists() for child in children)


SILENT = """
import os, sys, time
import numpy as np
from coowned.errors import WorkerLostError
from coowned.runs.launch import workers_from
workers = workers_from(os.environ, patience=300.0)
if workers.rank:
    time.sleep(600)
began = time.monotonic()
workers._patience = 2.0
try:
    workers.sum(np.ones(3, np.int64))
except WorkerLostError:
    print(time.monotonic() - began < 250, flush=True)
    os._exit(3)
"""

ALONE_OF_TWO = """
import os, sys
from coowned.errors import WorkerLostError
from coowned.runs.launch import workers_from
try:
    workers_from(os.environ, patience=2.0)
except WorkerLostError as error:
    print(error, flush=True)
    os._exit(3)
"""


def python(program, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", program], env=os.environ | environment, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.full
def test_a_silent_worker_ends_the_run():
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    first, second = (python(SILENT, RANK=rank, **place) for rank in "01")
    try:
        assert first.communicate(timeout=600)[0] == "True\n"
        assert first.returncode == 3
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()


@pytest.mark.full
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_connection_that_fails_is_told(rank):
    """In one sentence, although standard output is silent while workers connect."""
    port = str(free_port())
    process = python(ALONE_OF_TWO, RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    try:
        said = process.communicate(timeout=600)[0]
    finally:
        process.kill()
    assert said.startswith(f"worker {rank} did not reach all of the 2 workers at 127.0.0.1:{port}; ")
    assert process.returncode == 3
