"""From files to graphs: time against polars alone, peak memory against the arrays produced.

    python -m benchmarks attribution

The CSV is made up in a temporary folder and removed afterwards. Memory is measured in a process of its own: the peak of
its resident memory while reading, less what it held after imports and a first small reading.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import memory
from benchmarks.timing import Figure

ARXIV = Path("../shared/data/arxiv_hypergraph.parquet")
REPEATS = 3
CSV_BYTES = 500_000_000


def run() -> list[Figure]:
    """The best of three where time is measured."""
    rows = []
    if ARXIV.exists():
        rows += _time_of_arxiv()
        rows += _memory("arXiv Parquet to graph", ["parquet", str(ARXIV)])
    with tempfile.TemporaryDirectory(prefix="coowned-bench-") as folder:
        file = Path(folder) / "mail.csv"
        size = _write_csv(file, CSV_BYTES)
        rows += _memory(f"CSV of {size / 1e9:.2f} GB to graph", ["csv", str(file)])
    return rows


def _time_of_arxiv() -> list[Figure]:
    import polars as pl

    from coowned import read_parquet

    read_parquet(ARXIV, example_id="example_id")  # compiles
    alone, ours = [], []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        codes = pl.read_parquet(ARXIV)["users"].explode().cast(pl.Categorical).to_physical()
        alone.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        graph = read_parquet(ARXIV, example_id="example_id").graph
        ours.append(time.perf_counter() - begin)
        assert graph.num_pairs <= len(codes)
    return [
        Figure("arXiv Parquet, read and factorized by polars alone", min(alone), "s"),
        Figure("arXiv Parquet to graph", min(ours), "s"),
        Figure("arXiv Parquet to graph, time", min(ours) / min(alone), "x polars alone", "<= 2"),
    ]


def _memory(name: str, arguments: list[str]) -> list[Figure]:
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the measured process failed: {done.stderr}")
    found = json.loads(done.stdout)
    return [
        Figure(f"{name}, peak memory", found["peak"] / found["produced"], "x arrays produced", "<= 3"),
        Figure(f"{name}: arrays produced", found["produced"] / 1e6, "MB"),
        Figure(name, found["seconds"], "s"),
    ]


def measure(kind: str, path: str) -> dict[str, Any]:
    """Reads one file; says the peak of memory while doing so and the bytes of what was made."""
    from coowned import read_csv, read_parquet

    read, settings = {
        "parquet": (read_parquet, {"example_id": "example_id"}),
        "csv": (read_csv, {"users": ["sender", "to"], "separator": ";", "example_id": "example_id"}),
    }[kind]
    with tempfile.TemporaryDirectory() as folder:
        read(_small_file(Path(folder), kind), **settings)
    before = memory.resident()
    memory.restart_peak()
    begin = time.perf_counter()
    examples = read(path, **settings)
    seconds = time.perf_counter() - begin
    return {"peak": memory.peak() - before, "produced": _bytes_of(examples), "seconds": seconds}


def _small_file(folder: Path, kind: str) -> Path:
    import polars as pl

    if kind == "parquet":
        file = folder / "small.parquet"
        pl.DataFrame({"example_id": ["a", "b"], "users": [["x", "y"], ["y", "x"]]}).write_parquet(file)
    else:
        file = folder / "small.csv"
        file.write_text("example_id,sender,to,text\na,x,y;z,t\nb,z,x;y,t\n")
    return file


def _bytes_of(examples: Any) -> int:
    """Graph arrays, ids, keys, payload and mapping; memory that two of them share counts once."""
    graph, mapping = examples.graph, examples.user_mapping
    held = {
        array.__array_interface__["data"][0]: array.nbytes
        for array in (graph.indptr, graph.users, mapping.indptr, mapping.users)
    }
    for array in (graph.example_ids, graph.user_keys, mapping.spellings, *examples.payload.columns):
        for chunk in getattr(array, "chunks", [array]):
            held.update({buffer.address: buffer.size for buffer in chunk.buffers() if buffer is not None})
    return sum(held.values())


def _write_csv(file: Path, size: int) -> int:
    """Made-up mail with a sender, up to four recipients and a text; heavy users are few, as in the world."""
    import numpy as np

    generator = np.random.default_rng(0)
    words = np.array([f"word{number}" for number in range(2000)])
    rows = 200_000
    people = np.minimum(generator.zipf(1.3, (rows, 5)), 500_000)
    counts = generator.integers(1, 5, rows)
    # Contents repeat after so many rows, which costs a reader nothing; ids do not.
    contents = [
        f"user{people[row, 0]}@example.org,"
        f"{'; '.join(f'user{person}@example.org' for person in people[row, 1 : 1 + counts[row]])},"
        f"{' '.join(words[generator.integers(0, 2000, 25)])}\n"
        for row in range(rows)
    ]
    number, written = 0, 0
    with file.open("w", encoding="utf-8") as csv:
        csv.write("example_id,sender,to,text\n")
        while written < size:
            written += csv.write("".join(f"message-{number + row}@x.org,{text}" for row, text in enumerate(contents)))
            number += rows
    return file.stat().st_size


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
