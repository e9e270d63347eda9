"""How large a separation is feasible? (paper: figure b-dpmf)"""

import itertools

import altair as alt
import polars as pl

import coowned as co
from coowned.errors import InfeasibleScheduleError
from experiments.framework.graphs import synthetic_graph
from experiments.framework.rows import Point, Row
from experiments.framework.verdicts import Verdict, judge_cases, unrun

CLAIMS = ("Skew lowers the feasible separation b (times batch size B).",)
PAPER = "several sizes and examples per user; one graph each, as far as is stated"
DRAWN = 10_240_000  # batch size times iterations, as in the paper


def _points(sizes: tuple[int, ...], degrees: tuple[int, ...], powers: range, drawn: int) -> list[Point]:
    return [
        {"num_examples": n, "examples_per_user": degree, "kind": kind, "batch_size": 2**power, "drawn": drawn}
        for n, degree, kind, power in itertools.product(sizes, degrees, ("regular", "skewed"), powers)
    ]


GRID = {
    "ci": _points((2_000,), (2,), range(3, 6), 4_096),
    "small": _points((125_000,), (2, 4, 8), range(10, 16, 2), DRAWN),
    "paper": _points((125_000, 1_000_000, 8_000_000), (2, 4, 8), range(10, 16), DRAWN),
}


def cost(point: Point) -> float:
    return point["num_examples"] + point["drawn"]


def run(point: Point) -> Row:
    """The largest separation up to which Algorithm 4 never fails, by bisection from a million on; 0 if it fails at 1.

    Trying every separation takes hours there. At 125,000 examples bisection gives the same numbers.
    """
    graph = synthetic_graph(point["kind"], point["num_examples"], point["examples_per_user"])
    iterations = point["drawn"] // point["batch_size"]
    search = "bisection" if point["num_examples"] >= 1_000_000 else "sweep"
    try:
        separation = co.max_min_separation(graph, batch_size=point["batch_size"], iterations=iterations, search=search)
    except InfeasibleScheduleError:
        separation = 0
    return {
        "iterations": iterations,
        "separation": separation,
        "separation_times_batch": separation * point["batch_size"],
    }


def pairs(rows: list[Row]) -> pl.DataFrame:
    """b·B on both graphs, for every setting that ran on both."""
    index = ["num_examples", "examples_per_user", "batch_size"]
    wide = pl.DataFrame(rows).pivot("kind", index=index, values="separation_times_batch")
    return wide.drop_nulls() if {"regular", "skewed"} <= set(wide.columns) else wide.clear()


def draw(rows: list[Row]) -> alt.Chart:
    """Feasible separation times batch size, over all batch sizes, by graph."""
    table = pl.DataFrame(rows).filter(pl.col("separation_times_batch") > 0)
    return (
        alt.Chart(table)
        .mark_point()
        .encode(
            x=alt.X("kind:N", title=None),
            y=alt.Y("separation_times_batch:Q", title="feasible b·B", scale=alt.Scale(type="log")),
            color=alt.Color("examples_per_user:N", title="examples per user"),
            column=alt.Column("num_examples:O", title="examples", header=alt.Header(format=",")),
        )
        .properties(width=120, height=200)
    )


def claims(rows: list[Row]) -> list[Verdict]:
    table = pairs(rows)
    if table.is_empty():
        return unrun(CLAIMS)
    lower = int((table["skewed"] < table["regular"]).sum())
    both = table.filter(pl.col("regular") > 0)
    share = both["skewed"] / both["regular"]
    return [
        judge_cases(
            CLAIMS[0],
            lower,
            both.height,
            f"lower in {lower} of {both.height} settings with a schedule on the regular graph; skewed / regular from "
            f"{share.min():.1%} to {share.max():.1%}, median {share.median():.1%}; no schedule at all in "
            f"{int((both['skewed'] == 0).sum())} skewed settings",
            "A user with many examples blocks all of them for b batches.",
        )
    ]
