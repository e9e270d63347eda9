"""How far is Algorithm 4's bound from the optimum? (paper: left open)"""

import altair as alt
import polars as pl

from coowned.errors import InfeasibleScheduleError
from coowned.selection.greedy_min_separation import GreedyMinSeparation
from coowned.selection.min_separation_program import MinSeparationProgram
from coowned.synthetic.regular_graph import RegularGraph
from coowned.testing.selector_checks import copies_per_user
from experiments.framework.rows import Point, Row
from experiments.framework.verdicts import Verdict, judge_cases, unrun

CLAIMS = ("Algorithm 4's contribution bound is optimal on small graphs (left open in the paper).",)
SETTINGS = [(60, 4, 6, 1), (60, 4, 6, 2), (60, 6, 8, 1), (60, 6, 8, 2), (100, 8, 8, 1), (100, 8, 8, 2), (100, 8, 8, 3)]


def _points(settings: list[tuple[int, int, int, int]], seeds: range, time_limit: int) -> list[Point]:
    names = ("num_examples", "batch_size", "iterations", "min_separation")
    return [
        dict(zip(names, setting, strict=True)) | {"seed": seed, "time_limit": time_limit}
        for setting in settings
        for seed in seeds
    ]


GRID = {
    "ci": _points(SETTINGS[:1], range(1), 2),
    "small": _points(SETTINGS, range(2), 10),
    "paper": [],
}


def run(point: Point) -> Row:
    """Algorithm 4's bound, the program's, and what is proven; None where no schedule was found."""
    graph = RegularGraph(
        num_examples=point["num_examples"], mean_users_per_example=2, mean_examples_per_user=4
    ).generate(seed=point["seed"])
    settings = {name: point[name] for name in ("batch_size", "iterations", "min_separation")}
    row: Row = {"greedy": None, "program": None, "lower_bound": None}
    try:
        schedule = GreedyMinSeparation(**settings).select(graph, seed=point["seed"])
        row["greedy"] = int(copies_per_user(graph, schedule.copies).max())
    except InfeasibleScheduleError:
        pass
    try:
        schedule = MinSeparationProgram(**settings, time_limit=point["time_limit"]).select(graph, seed=point["seed"])
        row["program"] = int(copies_per_user(graph, schedule.copies).max())
        row["lower_bound"] = schedule.lower_bound
    except InfeasibleScheduleError:
        pass
    return row


def draw(rows: list[Row]) -> alt.Chart:
    """Both bounds, one mark a setting and seed."""
    shown = pl.DataFrame(rows, infer_schema_length=None).with_columns(
        pl.format("{} examples, B {}, T {}, b {}", "num_examples", "batch_size", "iterations", "min_separation").alias(
            "setting"
        )
    )
    narrow = shown.unpivot(["greedy", "program"], index=["setting", "seed"]).drop_nulls()
    return (
        alt.Chart(narrow)
        .mark_point(filled=True, opacity=0.7, size=60)
        .encode(
            x=alt.X("value:Q", title="contribution bound"),
            y=alt.Y("setting:N", title=None, axis=alt.Axis(labelLimit=300)),
            color=alt.Color("variable:N", title=None),
            shape=alt.Shape("seed:N"),
        )
        .properties(width=260, height=alt.Step(22))
    )


def claims(rows: list[Row]) -> list[Verdict]:
    both = [row for row in rows if row["greedy"] is not None and row["program"] is not None]
    if not both:
        return unrun(CLAIMS)
    equal = sum(row["greedy"] <= row["program"] for row in both)
    worst = max(row["greedy"] / row["program"] for row in both)
    failed = sum(row["greedy"] is None and row["program"] is not None for row in rows)
    found = f"as good as the program in {equal} of {len(both)} cases; at worst {worst:.2f} times its bound; "
    found += f"no schedule from Algorithm 4 although the program found one: {failed} of {len(rows)}"
    return [judge_cases(CLAIMS[0], equal, len(both), found, "The program ran for at most ten seconds per case.")]
