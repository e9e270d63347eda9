"""How much smaller is S on a skewed graph? (paper: figures bound-dsize and histogram-sample-skewed)"""

import itertools

import altair as alt
import numpy as np
import polars as pl

import coowned as co
from experiments.framework.graphs import synthetic_graph
from experiments.framework.rows import Point, Row
from experiments.framework.verdicts import Verdict, judge

CLAIMS = (
    "A skewed graph leaves a smaller S than a regular one.",
    "The loss from skew grows with the number of examples.",
    "The loss from skew grows with the examples per user.",
)


def _points(sizes: tuple[int, ...], degrees: tuple[int, ...]) -> list[Point]:
    return [
        {"num_examples": size, "examples_per_user": degree, "kind": kind}
        for size, degree, kind in itertools.product(sizes, degrees, ("regular", "skewed"))
    ]


BOUNDS = (1, 2, 3, 5, 8, 10)
GRID = {
    "ci": _points((2_000,), (2, 8)),
    "small": _points((125_000,), (2, 4, 8)),
    "paper": _points((125_000, 1_000_000, 8_000_000), (2, 4, 8)),
}


def cost(point: Point) -> float:
    return point["num_examples"]


def run(point: Point) -> Row:
    """Size of S for every bound, by Algorithm 3 (with duplicates) and without duplicates."""
    graph = synthetic_graph(point["kind"], point["num_examples"], point["examples_per_user"])
    duplicated = [co.GreedyWithDuplicates(contribution_bound=k).select(graph) for k in BOUNDS]
    counts = np.bincount(np.floor(np.log2(1 + graph.examples_per_user)).astype(int))
    return {
        "bounds": list(BOUNDS),
        "sizes": [selection.size for selection in duplicated],
        "distinct": [selection.num_distinct for selection in duplicated],
        "mean_users_per_example": graph.num_pairs / graph.num_examples,
        "most_examples_of_a_user": int(graph.examples_per_user.max()),
        "users_by_examples": counts.tolist(),  # entry c: users with 2^c <= 1 + examples < 2^(c + 1)
    }


def shares(rows: list[Row]) -> pl.DataFrame:
    """Size on the skewed graph as a share of the regular one, for every setting that ran on both."""
    columns = ["num_examples", "examples_per_user"]
    table = pl.DataFrame(rows, infer_schema_length=None).explode("bounds", "sizes", "distinct")
    table = table.select(*columns, "kind", pl.col("bounds").alias("bound"), "sizes")
    wide = table.pivot("kind", index=[*columns, "bound"], values="sizes")
    if not {"regular", "skewed"} <= set(wide.columns):
        return wide.clear()
    return wide.drop_nulls().with_columns((pl.col("skewed") / pl.col("regular")).alias("share"))


def draw(rows: list[Row]) -> alt.Chart:
    """Share of the regular graph's S that the skewed graph allows, by bound; one panel a graph size."""
    return (
        alt.Chart(shares(rows))
        .mark_line(point=True)
        .encode(
            x=alt.X("bound:Q", title="contribution bound k"),
            y=alt.Y("share:Q", title="size of S, skewed / regular", axis=alt.Axis(format="%")),
            color=alt.Color("examples_per_user:N", title="examples per user"),
            column=alt.Column("num_examples:O", title="examples", header=alt.Header(format=",")),
        )
        .properties(width=180, height=180)
    )


def claims(rows: list[Row]) -> list[Verdict]:
    table = shares(rows)
    smaller = int((table["share"] < 1).sum())
    by_size = _trend(table, "num_examples", ["examples_per_user", "bound"])
    by_degree = _trend(table, "examples_per_user", ["num_examples", "bound"])
    return [
        judge(
            CLAIMS[0],
            smaller,
            table.height,
            f"smaller in {smaller} of {table.height} settings; shares from {_percent(table['share'].min())} to "
            f"{_percent(table['share'].max())}",
            "Few users hold most of the pairs, and each of them is in at most k copies.",
        ),
        judge(
            CLAIMS[1],
            *by_size,
            f"It follows the largest share of examples with one user: {_heaviest(rows)}, from small to large.",
        ),
        judge(CLAIMS[2], *by_degree, "Fewer users share the same number of pairs."),
    ]


def _trend(table: pl.DataFrame, along: str, fixed: list[str]) -> tuple[int, int, str]:
    """(settings in which the share falls at every step along a column, settings, in words)."""
    falls = steadily = cases = 0
    for _, group in table.sort(along).group_by(fixed):
        if group.height > 1:
            cases += 1
            falls += group["share"][-1] < group["share"][0]
            steadily += bool((group["share"].diff().drop_nulls() < 0).all())
    return (
        steadily,
        cases,
        f"the share falls from first to last in {falls} of {cases} settings, at every step in {steadily}",
    )


def _heaviest(rows: list[Row]) -> str:
    """The largest share of a skewed graph's examples that one user is on, with the fewest examples per user."""
    fewest = min(row["examples_per_user"] for row in rows)
    own = [row for row in rows if row["kind"] == "skewed" and row["examples_per_user"] == fewest]
    shares = [row["most_examples_of_a_user"] / row["num_examples"] for row in own]
    return ", ".join(f"{share:.1%}" for share in shares) + f" with {fewest} examples per user"


def _percent(value: object) -> str:
    return "-" if value is None else f"{value:.1%}"
