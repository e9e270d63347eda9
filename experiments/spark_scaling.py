"""What do the rounds on Spark cost, and is S always the same as on one machine? (beyond the paper)

A point of the engine "local" needs no Spark.
"""

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import altair as alt
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet

import coowned as co
from coowned.synthetic.regular_graph import RegularGraph
from coowned.synthetic.skewed_graph import SkewedGraph
from experiments.framework.rows import Point, Row
from experiments.framework.verdicts import Verdict, judge_cases

if TYPE_CHECKING:
    from coowned.spark import SparkGraph

CLAIMS = ("Spark selects the same S as one machine, on every graph (ours).",)
PAGE = "docs/spark.md"
GRID = {
    "ci": [{"graph": "made up", "pairs": 1000, "contribution_bound": 3, "engine": "local"}],
    "small": [
        {"graph": "path, growing", "pairs": 324, "contribution_bound": 1, "engine": "spark"},
        {"graph": "path", "pairs": 10**5, "contribution_bound": 1, "engine": "spark"},
        *(
            {"graph": graph, "pairs": pairs, "contribution_bound": 3, "engine": "spark"}
            for pairs in (10**5, 10**6, 10**7)
            for graph in ("regular", "skewed")
        ),
    ],
    "paper": [],
}


def run(point: Point) -> Row:
    """One selection on one machine, and one by rounds alone (residue=0) on a local Spark."""
    graph = _graph(point["graph"], point["pairs"])
    selector = co.Greedy(contribution_bound=point["contribution_bound"])
    selector.select(_graph("made up", 1000))  # compiles
    started = time.perf_counter()
    selection = selector.select(graph)
    row: Row = {
        "num_examples": graph.num_examples,
        "num_pairs": graph.num_pairs,
        "size": selection.size,
        "local_seconds": round(time.perf_counter() - started, 2),
        "rounds": None,
        "shuffled_bytes": None,
        "seconds": None,
        "first_round_left": None,
    }
    return row if point["engine"] == "local" else row | _run_on_spark(graph, selector, selection)


def table(rows: list[Row]) -> str:
    """A Markdown table: one line a graph."""
    lines = [
        "| graph | pairs | k | copies in S | rounds | pairs left after round 1 | shuffled bytes per pair | seconds "
        "| seconds, local engine |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        measured = row["rounds"] is not None
        left = f"{row['first_round_left'] / row['num_pairs']:.1%}" if measured else ""
        per_pair = f"{row['shuffled_bytes'] / row['num_pairs']:.0f}" if measured else ""
        lines.append(
            f"| {row['graph']} | {row['num_pairs']:,} | {row['contribution_bound']} | {row['size']:,} "
            f"| {row['rounds'] if measured else ''} | {left} | {per_pair} "
            f"| {row['seconds'] if measured else ''} | {row['local_seconds']} |"
        )
    return "\n".join(lines)


def draw(rows: list[Row]) -> alt.Chart:
    """Rounds and bytes shuffled per pair, by graph."""
    shown = pl.DataFrame(rows, infer_schema_length=None).with_columns(
        (pl.col("shuffled_bytes") / pl.col("num_pairs")).alias("bytes")
    )
    return (
        alt.Chart(shown)
        .mark_point(filled=True)
        .encode(
            x=alt.X("num_pairs:Q", title="pairs").scale(type="log"),
            y=alt.Y("rounds:Q"),
            size=alt.Size("bytes:Q", title="shuffled bytes per pair"),
            color=alt.Color("graph:N", title=None),
        )
        .properties(width=260, height=160)
    )


def claims(rows: list[Row]) -> list[Verdict]:
    own = [row for row in rows if row["engine"] == "spark"]
    rounds = f"in {min(r['rounds'] for r in own)} to {max(r['rounds'] for r in own)} rounds" if own else ""
    # A row is stored only where S was equal: `run` raises otherwise.
    return [judge_cases(CLAIMS[0], len(own), len(own), f"the same S in {len(own)} of {len(own)} runs, {rounds}")]


def _run_on_spark(graph: co.AttributionGraph, selector: co.Greedy, expected: co.Selection) -> dict:
    from coowned.spark import select

    left: list[int] = []

    def progress(done: float, message: str) -> None:
        if message.startswith("round"):
            left.append(int(message.rsplit("(", 1)[1].removesuffix(" pairs)").replace(",", "")))

    with on_spark(graph) as attributed:
        spark = attributed.checkpoints.spark
        before = shuffled_bytes(spark)
        started = time.perf_counter()
        found = select(attributed, selector, residue=0, progress=progress)
        seconds = time.perf_counter() - started
        shuffled = shuffled_bytes(spark) - before
        if not np.array_equal(copies_of(found, graph), expected.copies):
            raise AssertionError("Spark gave another S than one machine")
    return {
        "rounds": len(left),
        "first_round_left": left[0],
        "shuffled_bytes": shuffled,
        "seconds": round(seconds, 1),
    }


@contextlib.contextmanager
def on_spark(graph: co.AttributionGraph) -> "Iterator[SparkGraph]":
    """The graph with integers as ids and users, on a Spark session with two threads."""
    from coowned.spark import attribute, session

    with tempfile.TemporaryDirectory() as folder, session("local[2]") as spark:
        lists = pa.LargeListArray.from_arrays(pa.array(graph.indptr), pa.array(graph.users.astype(np.int64)))
        table = pa.table({"example_id": np.arange(graph.num_examples), "users": lists})
        pyarrow.parquet.write_table(table, Path(folder) / "graph.parquet", row_group_size=1 << 18)
        yield attribute(spark.read.parquet(folder))


def copies_of(selected: Any, graph: co.AttributionGraph) -> np.ndarray:
    """(num_examples,) the copies in a table of Spark's."""
    rows = selected.toArrow()
    copies = np.zeros(graph.num_examples, np.int32)
    copies[rows["example_id"].to_numpy()] = rows["copies"].to_numpy()
    return copies


def shuffled_bytes(spark: Any) -> int:
    """What all stages of a session wrote for shuffles so far."""
    context = spark.sparkContext
    none = context._gateway.new_array(context._jvm.double, 0)
    stages = context._jsc.sc().statusStore().stageList(None, False, False, none, None)
    return sum(stages.apply(at).shuffleWriteBytes() for at in range(stages.size()))


def _graph(name: str, pairs: int) -> co.AttributionGraph:
    if name in ("made up", "regular"):
        return RegularGraph(num_examples=pairs // 2).generate(seed=0)
    if name == "skewed":
        return SkewedGraph(num_examples=pairs // 2).generate(seed=0)
    if name == "path":
        examples = pairs // 2
        users = np.stack([np.arange(examples), np.arange(1, examples + 1)], axis=1).ravel()
        return co.AttributionGraph.from_csr(np.arange(0, pairs + 1, 2), users, num_users=examples + 1)
    # Example i shares a user with each neighbour and has i more of its own: the order runs along the path.
    rows, free = [], 1 << 20
    for at in range(24):
        rows.append([at, at + 1, *range(free, free + at)])
        free += at
    return co.AttributionGraph.from_users_per_example(rows)
