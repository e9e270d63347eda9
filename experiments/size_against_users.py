"""How do size and users per example trade off over the 80 settings of mitigation? (paper: figure pareto)"""

import itertools

import altair as alt
import polars as pl

import coowned as co
from experiments.framework.graphs import synthetic_graph
from experiments.framework.rows import Point, Row
from experiments.framework.verdicts import Verdict, judge_cases

CLAIMS = ("Some of the 80 settings are dominated: another has a larger S and more users per example.",)
PAPER = "the 80 settings at bound 3; graph and number of examples not stated"
BOUND = 3


def _points(num_examples: int) -> list[Point]:
    return [
        {"num_examples": num_examples, "examples_per_user": degree, "kind": kind}
        for degree, kind in itertools.product((2, 8), ("regular", "skewed"))
    ]


GRID = {"ci": _points(1_000)[:1], "small": _points(125_000), "paper": _points(1_000_000)}


def run(point: Point) -> Row:
    """Size, users per example and whether it is dominated, of every setting."""
    graph = synthetic_graph(point["kind"], point["num_examples"], point["examples_per_user"])
    return co.pareto(graph, contribution_bound=BOUND).to_dict(as_series=False)


def draw(rows: list[Row]) -> alt.FacetChart:
    """All settings on the largest graphs that ran, the dominated ones in grey."""
    lists = (
        "threshold",
        "few_user_run",
        "many_user_run",
        "size",
        "num_distinct",
        "mean_users_per_example",
        "dominated",
    )
    table = pl.DataFrame(rows, infer_schema_length=None).explode(lists)
    table = table.filter(pl.col("num_examples") == pl.col("num_examples").max()).with_columns(
        pl.format("{}, {} per user", "kind", "examples_per_user").alias("graph"),
        pl.when("dominated").then(pl.lit("dominated")).otherwise(pl.lit("not dominated")).alias("setting"),
    )
    colours = alt.Scale(domain=["not dominated", "dominated"], range=["#00796b", "#b8b8b8"])
    return (
        alt.Chart(table)
        .mark_point(filled=True, size=24)
        .encode(
            x=alt.X("size:Q", title="copies in S").scale(zero=False).axis(format="~s", tickCount=4),
            y=alt.Y("mean_users_per_example:Q", title="users per example").scale(zero=False),
            color=alt.Color("setting:N", title=None).scale(colours),
        )
        .properties(width=160, height=170)
        .facet(column=alt.Column("graph:N", title=None))
        .resolve_scale(x="independent", y="independent")
    )


def claims(rows: list[Row]) -> list[Verdict]:
    counts = [(row["kind"], row["examples_per_user"], row["num_examples"], sum(row["dominated"])) for row in rows]
    shown = "; ".join(f"{count} ({kind}, {per} per user, {size:,} examples)" for kind, per, size, count in counts)
    dominated = sum(count > 0 for *_, count in counts)
    return [judge_cases(CLAIMS[0], dominated, len(counts), f"dominated of 80: {shown}")]
