"""Training on shards: the memory of two workers, and how soon they begin, against reading all rows.

python -m benchmarks.shards 20000000
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.timing import Figure
from coowned import read_parquet

ROWS, PIECE = 2_000_000, 100_000
SPLITS = "0.98,0.01,0.01"
PEAK = 2.0  # GB of a worker
CONFIG = f"""
[data]
shards = "shards"
splits = [{SPLITS}]
[privacy]
epsilon = 8.0
delta = 1e-9
[mechanism]
kind = "dp-sgd"
batch_size = 1024
iterations = 20
clip_norm = 1.0
[model]
kind = "text-classifier"
text = "text"
label = "label"
classes = [0, 1]
num_features = 16384
[optimizer]
learning_rate = 0.1
[run]
seed = 1
checkpoint_every = 1
"""


def run(rows: int = ROWS) -> list[Figure]:
    with tempfile.TemporaryDirectory(dir=os.environ.get("COOWNED_BENCH_DIR")) as name:
        folder = Path(name)
        files = write(folder / "data", rows)
        (folder / "run.toml").write_text(CONFIG)
        begun = time.perf_counter()
        for file in files:
            read_parquet(file, example_id="id")
        reading = time.perf_counter() - begun
        words = ["select", "data", "--example-id", "id", "--contribution-bound", "1", "--splits", SPLITS]
        selected = watched(folder, [*words, "--shards", "shards", "-o", "S.parquet"])
        figures = [
            Figure(f"{rows / 1e6:g}M rows, file by file: read all", reading, "s"),
            Figure("select --shards", selected["seconds"], "s"),
            Figure("select --shards: peak", selected["peak"], "GB"),
        ]
        for what, target, bar in (("first run", "RUN", ""), ("next run on the same shards", "NEXT", "<= 0.1")):
            found = watched(folder, ["train", "run.toml", "-o", target, "--processes", "2"], folder / target)
            figures += [
                Figure(f"{what}, 2 workers: first checkpoint, after one step", found["first"], "s"),
                # The first run derives features from all texts of S before its first step; it cannot meet this.
                Figure(f"{what}: of the time to read all", found["first"] / reading, "x", bar),
                Figure(f"{what}: peak of a worker", found["peak"], "GB", f"<= {PEAK:g}"),
                Figure(f"{what}: of it not files", found["own"], "GB"),
            ]
        return figures


def write(folder: Path, rows: int) -> list[Path]:
    """Writes texts of 40 words, about 400 bytes, of one to three of rows / 5 users; some users have many."""
    folder.mkdir()
    random, files = np.random.default_rng(0), []
    words = np.array([f"word{number:05d}" for number in range(20_000)])
    for begin in range(0, rows, PIECE):
        count = min(PIECE, rows - begin)
        texts = words[(len(words) * random.random((count, 40)) ** 2).astype(int)]
        users = (rows // 5 * random.random((count, 3)) ** 1.5).astype(int)
        table = {
            "id": [f"m{number}" for number in range(begin, begin + count)],
            "users": [
                [f"u{user}" for user in set(row[:some].tolist())]
                for row, some in zip(users, random.integers(1, 4, count), strict=True)
            ],
            "text": [" ".join(row) for row in texts.tolist()],
            "label": random.integers(0, 2, count),
        }
        files.append(folder / f"part-{begin // PIECE:04d}.parquet")
        pq.write_table(pa.table(table), files[-1], row_group_size=20_000)
    return files


def watched(folder: Path, words: list[str], target: Path | None = None) -> dict[str, float]:
    """Runs the command; its seconds, the first checkpoint of `target`, and the largest peaks of its processes."""
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    begun, first, peak, own = time.perf_counter(), float("nan"), 0, 0
    command = [sys.executable, "-m", "coowned", *words]
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while process.poll() is None:
        for number in [process.pid, *children(process.pid)]:
            with contextlib.suppress(OSError, KeyError):
                lines = (line.split() for line in Path(f"/proc/{number}/status").read_text().splitlines())
                status = {line[0]: int(line[1]) for line in lines if line[0] in ("VmHWM:", "RssAnon:")}
                peak, own = max(peak, status["VmHWM:"]), max(own, status["RssAnon:"])
        if target is not None and np.isnan(first) and (target / "checkpoint.safetensors").exists():
            first = time.perf_counter() - begun
        time.sleep(0.02)
    if process.returncode:
        raise RuntimeError(f"{' '.join(words)} has failed")
    return {
        "seconds": time.perf_counter() - begun,
        "first": first,
        "peak": peak * 1024 / 1e9,
        "own": own * 1024 / 1e9,
    }


def children(process: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return []


if __name__ == "__main__":
    for figure in run(int(sys.argv[1]) if len(sys.argv) > 1 else ROWS):
        print(f"{figure.name:<60} {figure.value:>10.4g} {figure.unit} {figure.bar}", flush=True)
