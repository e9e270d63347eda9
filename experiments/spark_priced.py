"""How near is `Priced` on Spark to its proven bound? (beyond the paper)

A point of the engine "local" needs no Spark.
"""

import time

import altair as alt
import polars as pl

import coowned as co
from coowned.synthetic.skewed_graph import SkewedGraph
from experiments.framework.graphs import real_graph
from experiments.framework.rows import Point, Row
from experiments.framework.verdicts import Verdict, judge_cases
from experiments.spark_scaling import copies_of, on_spark, shuffled_bytes

DATA = ("arXiv", "ACL", "mailing list")
NEAR = 0.995
CLAIMS = ("Priced on Spark is within 0.5% of its proven bound, with and without the driver's help (ours).",)
PAGE = "docs/spark.md"
GRID = {
    "ci": [{"graph": "made up", "contribution_bound": 3, "engine": "local", "residue": 0}],
    "small": [
        {"graph": graph, "contribution_bound": 3, "engine": "spark", "residue": residue}
        for residue in (1_000_000, 0)
        for graph in ("ACL", "mailing list", "skewed", "arXiv")
    ],
    "paper": [],
}


def run(point: Point) -> Row:
    """Three selections: greedy and priced on one machine, priced on a local Spark."""
    graph = (
        real_graph(point["graph"]) if point["graph"] != "skewed" else SkewedGraph(num_examples=10**6).generate(seed=0)
    )
    selector = co.Priced(contribution_bound=point["contribution_bound"])
    local = selector.select(graph)
    row: Row = {
        "num_pairs": graph.num_pairs,
        "greedy_size": co.Greedy(contribution_bound=point["contribution_bound"]).select(graph).size,
        "local_size": local.size,
        "local_upper_bound": local.upper_bound,
        "size": None,
        "upper_bound": None,
        "shuffled_bytes": None,
        "seconds": None,
    }
    return row if point["engine"] == "local" else row | _run_on_spark(graph, selector, point["residue"])


def _run_on_spark(graph: co.AttributionGraph, selector: co.Priced, residue: int) -> dict:
    from coowned.spark.selection import choose

    with on_spark(graph) as attributed:
        before = shuffled_bytes(attributed.checkpoints.spark)
        started = time.perf_counter()
        chosen = choose(attributed, selector, residue=residue)
        seconds = time.perf_counter() - started
        selection = co.Selection.from_copies(graph, copies_of(chosen.table, graph))
        certificate = co.certify(graph, selection)
        if certificate.contribution_bound > selector.contribution_bound:
            raise AssertionError("Spark gave an S that breaks its bound")
        return {
            "size": selection.size,
            "upper_bound": chosen.upper_bound,
            "shuffled_bytes": shuffled_bytes(attributed.checkpoints.spark) - before,
            "seconds": round(seconds, 1),
        }


def table(rows: list[Row]) -> str:
    """A Markdown table: one line a run."""
    lines = [
        "| graph | pairs | k | greedy | priced, local | priced, Spark | proven bound | of the bound | last pairs "
        "| shuffled bytes per pair | seconds |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|---:|---:|",
    ]
    for row in rows:
        if row["size"] is not None:
            lines.append(
                f"| {row['graph']} | {row['num_pairs']:,} | {row['contribution_bound']} | {row['greedy_size']:,} "
                f"| {row['local_size']:,} | {row['size']:,} | {row['upper_bound']:,} "
                f"| {row['size'] / row['upper_bound']:.2%} | {'on the driver' if row['residue'] else 'by rounds'} "
                f"| {row['shuffled_bytes'] / row['num_pairs']:,.0f} | {row['seconds']} |"
            )
    return "\n".join(lines)


def draw(rows: list[Row]) -> alt.Chart:
    """The share of the bound, by graph."""
    shown = pl.DataFrame(rows, infer_schema_length=None).with_columns(
        (pl.col("size") / pl.col("upper_bound")).alias("share"),
        pl.when(pl.col("residue") > 0).then(pl.lit("on the driver")).otherwise(pl.lit("by rounds")).alias("last pairs"),
    )
    return (
        alt.Chart(shown)
        .mark_point(filled=True)
        .encode(
            x=alt.X("share:Q", title="size / proven bound").scale(zero=False),
            y=alt.Y("graph:N", title=None),
            color=alt.Color("last pairs:N"),
        )
        .properties(width=260, height=160)
    )


def claims(rows: list[Row]) -> list[Verdict]:
    shares = [row["size"] / row["upper_bound"] for row in rows if row["engine"] == "spark"]
    near = sum(share >= NEAR for share in shares)
    found = f"{near} of {len(shares)} runs, the worst {min(shares):.2%}" if shares else ""
    return [judge_cases(CLAIMS[0], near, len(shares), found)]
