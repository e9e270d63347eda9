"""How much smaller is S on a skewed graph? (paper: figures bound-dsize and histogram-sample-skewed)"""

import itertools

import altair as alt
import numpy as np
import polars as pl

import coowned as co
from experiments.framework.graphs import synthetic_graph
from experiments.framework.rows import Point, Row
from experiments.framework.verdicts import Verdict, combine, judge, judge_cases, unrun, with_interval

CLAIMS = (
    "A skewed graph leaves a smaller S than a regular one.",
    "The loss from skew grows with the number of examples.",
    "The loss from skew grows with the examples per user.",
)
PAPER = "several sizes, bounds and examples per user; one graph each, as far as is stated"
SEEDS = (1, 2, 3, 4, 5)  # of the graphs that judge the trends; those of seed 0 had been seen when the rule was written
BOUNDS = (1, 2, 3, 5, 8, 10)


def _points(sizes: tuple[int, ...], degrees: tuple[int, ...], seeds: tuple[int, ...] = SEEDS) -> list[Point]:
    graphs = [
        {"num_examples": size, "examples_per_user": degree, "kind": kind}
        for size, degree, kind in itertools.product(sizes, degrees, ("regular", "skewed"))
    ]
    return graphs + [graph | {"seed": seed} for seed in seeds for graph in graphs]


GRID = {
    "ci": _points((1_000, 2_000), (2, 8), (1, 2)),
    "small": _points((125_000,), (2, 4, 8)),
    "paper": _points((125_000, 1_000_000, 8_000_000), (2, 4, 8)),
}


def cost(point: Point) -> float:
    return point["num_examples"]


def run(point: Point) -> Row:
    """Size of S for every bound, by Algorithm 3 (with duplicates) and without duplicates."""
    graph = synthetic_graph(point["kind"], point["num_examples"], point["examples_per_user"], point.get("seed", 0))
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
    """Size on the skewed graph as a share of the regular one, for every setting and seed that ran on both."""
    columns = ["num_examples", "examples_per_user", "seed"]
    table = pl.DataFrame([{"seed": None} | row for row in rows], infer_schema_length=None)
    table = table.with_columns(pl.col("seed").fill_null(0)).explode("bounds", "sizes", "distinct")
    table = table.select(*columns, "kind", pl.col("bounds").alias("bound"), "sizes")
    wide = table.pivot("kind", index=[*columns, "bound"], values="sizes")
    if not {"regular", "skewed"} <= set(wide.columns):
        return wide.clear().with_columns(share=pl.lit(None, pl.Float64))
    return wide.drop_nulls().with_columns((pl.col("skewed") / pl.col("regular")).alias("share"))


def draw(rows: list[Row]) -> alt.FacetChart:
    """Share of the regular graph's S that the skewed graph allows, by bound; bars: 95% intervals over graphs."""
    grouped = shares(rows).group_by("num_examples", "examples_per_user", "bound", maintain_order=True)
    lines = []
    for (size, degree, bound), own in grouped:
        effect = combine([(1.0, own["share"].to_list())]) if own.height > 1 else None
        low, high = effect.interval() if effect else (None, None)
        mean = own["share"].mean()
        lines.append({"examples": size, "per user": degree, "bound": bound, "share": mean, "low": low, "high": high})
    base = alt.Chart(pl.DataFrame(lines, infer_schema_length=None)).encode(
        x=alt.X("bound:Q", title="contribution bound k"),
        color=alt.Color("per user:N", title="examples per user"),
    )
    share = alt.Y("share:Q", title="size of S, skewed / regular", axis=alt.Axis(format="%"))
    return (
        (base.mark_rule().encode(y="low:Q", y2="high:Q") + base.mark_line(point=True).encode(y=share))
        .properties(width=180, height=180)
        .facet(column=alt.Column("examples:O", title="examples", header=alt.Header(format=",")))
    )


def pictures(rows: list[Row]) -> dict[str, alt.Chart]:
    """How many users have how many examples, on the paper's graph: 125,000 examples, 2 per user."""
    own = [row for row in rows if row["kind"] == "skewed" and row["examples_per_user"] == 2]
    smallest = min(row["num_examples"] for row in own)
    counts = next(row["users_by_examples"] for row in own if row["num_examples"] == smallest)
    bins = [
        {"order": power, "examples": f"{2**power - 1:,} to {2 ** (power + 1) - 2:,}" if power else "0", "users": count}
        for power, count in enumerate(counts)
    ]
    chart = (
        alt.Chart(pl.DataFrame(bins).filter(pl.col("users") > 0))
        .mark_bar()
        .encode(
            x=alt.X("examples:N", sort=alt.EncodingSortField("order"), title="examples of a user"),
            y=alt.Y("users:Q").scale(type="log", domainMin=0.5, nice=False),
            y2=alt.datum(0.5),
        )
        .properties(width=380, height=180)
    )
    return {"histogram-sample-skewed": chart}


def claims(rows: list[Row]) -> list[Verdict]:
    table = shares(rows)
    if table.is_empty():
        return unrun(CLAIMS)
    smaller = int((table["skewed"] < table["regular"]).sum())
    return [
        judge_cases(
            CLAIMS[0],
            smaller,
            table.height,
            f"smaller in {smaller} of {table.height} settings; shares from {table['share'].min():.1%} to "
            f"{table['share'].max():.1%}",
            "Few users hold most of the pairs, and each of them is in at most k copies.",
        ),
        _trend(
            CLAIMS[1],
            table,
            "num_examples",
            f"The largest share of examples with one user varies between graphs: {_heaviest(rows)}.",
        ),
        _trend(CLAIMS[2], table, "examples_per_user", "Fewer users share the same number of pairs."),
    ]


def _trend(claim: str, table: pl.DataFrame, along: str, why: str) -> Verdict:
    """By the slope of the share by doubling of a column, mean over the other settings; a value for every graph seed."""
    largest = table["num_examples"].n_unique() if along == "num_examples" else table["examples_per_user"].n_unique()
    other = "examples_per_user" if along == "num_examples" else "num_examples"
    slopes = []
    for _, own in table.filter(pl.col("seed").is_in(SEEDS)).group_by("seed", maintain_order=True):
        groups = [group for _, group in own.group_by(other, "bound") if group.height == largest]
        if largest > 1 and len(groups) == own.select(other, "bound").n_unique():
            slopes.append(float(np.mean([np.polyfit(np.log2(group[along]), group["share"], 1)[0] for group in groups])))
    if len(slopes) < len(SEEDS):
        return unrun([claim])[0]
    effect = combine([(1.0, slopes)])
    found = (
        f"change of the share by doubling, in points: {with_interval(effect)} over {len(slopes)} graphs of each kind"
    )
    return judge(claim, [effect], found, below=0.0, why=why, seeds=f"{SEEDS[0]} to {SEEDS[-1]}")


def _heaviest(rows: list[Row]) -> str:
    """The largest share of a skewed graph's examples that one user is on, with the fewest examples per user."""
    fewest = min(row["examples_per_user"] for row in rows)
    by_size: dict[int, list[float]] = {}
    for row in rows:
        if row["kind"] == "skewed" and row["examples_per_user"] == fewest:
            share = row["most_examples_of_a_user"] / row["num_examples"]
            by_size.setdefault(row["num_examples"], []).append(share)
    ranges = (f"{min(own):.1%} to {max(own):.1%} ({size:,} examples)" for size, own in sorted(by_size.items()))
    return f"{', '.join(ranges)}, with {fewest} per user"
