"""A small world on disk: messages of a few people, a configuration, and how to run the command line on them."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SEED = 918273645  # of the run; no other number of the world looks like it
USERS = [f"person{number:03}@people.example" for number in range(120)]
CONFIGURATION = f"""
[data]
path = "mail.jsonl"
users = ["users"]
example_id = "id"

[selection]
selector = "greedy"
contribution_bound = 2

[privacy]
epsilon = 8
delta = 1e-5

[mechanism]
kind = "dp-sgd"
batch_size = 16
iterations = 30
clip_norm = 1.0

[model]
kind = "logistic-regression"
features = ["length", "hour"]
label = "answered"

[optimizer]
name = "sgd"
learning_rate = 0.1

[run]
seed = {SEED}
checkpoint_every = 5
"""
DATA_OPTIONS = ["--users", "users", "--example-id", "id"]
# The road of the world, verb by verb; each needs what the ones before it wrote.
COMMANDS = {
    "select": ["select", "mail.jsonl", *DATA_OPTIONS, "--contribution-bound", "2", "-o", "S.parquet"],
    "train": ["train", "run.toml", "-o", "RUN"],
    "audit": ["audit", "RUN", "--trials", "1000", "--seed", "3"],
    "report": ["report", "RUN"],
    "predict": ["predict", "RUN", "mail.jsonl", "--example-id", "id", "-o", "P.parquet"],
}


def write_world(folder: Path, *, seed: bool = True) -> Path:
    """Writes mail.jsonl and run.toml into a new folder; without `seed` the run draws its key from the system."""
    folder.mkdir(parents=True)
    draws = random.Random(0)
    rows = [
        {
            "id": f"message{number}",
            "users": draws.sample(USERS, draws.choice((1, 2, 2, 3))),
            "length": round(draws.random(), 3),
            "hour": round(draws.random(), 3),
            "answered": draws.randrange(2),
        }
        for number in range(300)
    ]
    (folder / "mail.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    text = CONFIGURATION if seed else CONFIGURATION.replace(f"seed = {SEED}\n", "")
    (folder / "run.toml").write_text(text, encoding="utf-8")
    return folder


def coowned(
    folder: Path, *arguments: str, before: str = "", options: tuple[str, ...] = (), **more
) -> subprocess.Popen[str]:
    """Starts the command line in a process of its own, in that folder.

    Args:
      before: Python that the process runs first; `sys.argv` then still begins with `options`, which it must remove.
    """
    program = f"import sys\n{before}\nfrom coowned.cli.main import main\nmain()\n"
    command = [sys.executable, "-c", program, *options, *arguments]
    more = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **more}
    # One cache for all, so that a process does not repeat what another has computed.
    environment = {**os.environ, "COOWNED_CACHE": str(folder.parent / "cache"), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, cwd=folder, env=environment, **more)


def run_coowned(folder: Path, *arguments: str, before: str = "") -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of one command."""
    process = coowned(folder, *arguments, before=before)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err
