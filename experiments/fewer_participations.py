"""How much error does a bound on participations save, and how many examples remain? (beyond the paper's Algorithm 4)

Algorithm 4 lets users participate as often as the separation allows. `PricedMinSeparation` orders a near-optimal S
in which nobody participates more than k times. No training: the root mean squared error of all prefix sums of the
noise, in clip norms, and the distinct examples in the batches.
"""

import math

import altair as alt
import polars as pl

import coowned as co
from coowned.errors import InfeasibleScheduleError
from experiments.framework.graphs import real_graph
from experiments.framework.rows import Point, Row
from experiments.framework.verdicts import Verdict, judge_cases, unrun

DATA = ("arXiv",)
CLAIMS = (
    "Every schedule of Algorithm 4 is beaten in error and distinct examples by one with bounded participations (ours).",
    "With a bound, k·b is at least half of T, so more bands than the separation gain little (ours).",
)
GREEDY, PACED = "Algorithm 4", "bounded participations"
EPSILON, DELTA = 8.0, 1e-10
SHARES = (0.8, 0.7, 0.6, 0.5, 0.4)  # of the largest separation that k participations in T steps have room for


def _points(graph: str, batch: int, steps: dict[int, tuple[tuple[int, ...], tuple[int, ...]]]) -> list[Point]:
    return [
        {"graph": graph, "batch_size": batch, "iterations": iterations} | arm
        for iterations, (separations, bounds) in steps.items()
        for arm in (
            *({"schedule": GREEDY, "min_separation": separation} for separation in separations),
            *({"schedule": PACED, "contribution_bound": bound} for bound in bounds),
        )
    ]


GRID = {
    "ci": _points("made up", 8, {20: ((2, 4), (2,))}),
    "small": _points("arXiv", 4096, {100: ((4, 8, 16, 32, 46), (3, 4, 6)), 500: ((4, 8, 16, 32, 46), (12, 16))}),
    "paper": [],
}


def run(point: Point) -> Row:
    """The schedule with the largest separation that was found, recounted, and the error of its noise."""
    graph = real_graph(point["graph"])
    steps = {"batch_size": point["batch_size"], "iterations": point["iterations"]}
    schedule = _schedule(point, graph, steps)
    if schedule is None:
        return {"error": None, "num_distinct": 0, "recounted_bound": None, "separation": None, "users": None}
    certificate = co.certify(graph, schedule)
    mechanism = co.MinSeparation.from_certificate(certificate)
    noise = co.calibrate(mechanism, epsilon=EPSILON, delta=DELTA, adjacency="zero-out")
    factor = mechanism.strategy().error_factor()
    return {
        "error": noise * factor * math.sqrt((point["iterations"] + 1) / 2),
        "num_distinct": certificate.num_distinct,
        "recounted_bound": certificate.contribution_bound,
        "separation": certificate.min_separation,
        "users": float(schedule.copies @ graph.users_per_example) / certificate.size,
    }


def _schedule(point: Point, graph: co.AttributionGraph, steps: dict) -> co.Schedule | None:
    if point["schedule"] == GREEDY:
        tried = [co.GreedyMinSeparation(**steps, min_separation=point["min_separation"])]
    else:
        bound = point["contribution_bound"]
        largest = (point["iterations"] - 1) // max(1, bound - 1)
        separations = dict.fromkeys(max(1, int(share * largest)) for share in SHARES)
        tried = [
            co.PricedMinSeparation(**steps, min_separation=separation, contribution_bound=bound)
            for separation in separations
        ]
    for selector in tried:
        try:
            return selector.select(graph)
        except InfeasibleScheduleError:
            continue
    return None


def draw(rows: list[Row]) -> alt.Chart:
    """Error against distinct examples; one panel a number of steps."""
    table = pl.DataFrame(rows, infer_schema_length=None).drop_nulls("error")
    return (
        alt.Chart(table)
        .mark_line(point=True)
        .encode(
            x=alt.X("num_distinct:Q", title="distinct examples", axis=alt.Axis(format="~s")).scale(zero=False),
            y=alt.Y("error:Q", title=f"error of prefix sums, epsilon {EPSILON:g}").scale(type="log"),
            order="num_distinct:Q",
            color=alt.Color("schedule:N", title=None),
            column=alt.Column("iterations:O", title="steps"),
        )
        .properties(width=220, height=180)
    )


def claims(rows: list[Row]) -> list[Verdict]:
    table = pl.DataFrame(rows, infer_schema_length=None).drop_nulls("error")
    found, beaten, full, rivals, bounded = [], 0, 0, 0, 0
    for (iterations,), own in table.group_by("iterations", maintain_order=True):
        greedy, paced = (own.filter(pl.col("schedule") == name).to_dicts() for name in (GREEDY, PACED))
        rivals, bounded = rivals + len(greedy), bounded + len(paced)
        beaten += sum(
            any(row["error"] <= rival["error"] and row["num_distinct"] >= rival["num_distinct"] for row in paced)
            for rival in greedy
        )
        full += sum(2 * row["recounted_bound"] * row["separation"] >= iterations for row in paced)
        found.append(f"{iterations} steps: {GREEDY} {_listed(greedy)}; bounded {_listed(paced)}")
    if not rivals or not bounded:
        return unrun(CLAIMS)
    return [
        judge_cases(
            CLAIMS[0],
            beaten,
            rivals,
            f"{beaten} of {rivals} are beaten. Error and distinct examples, {'. '.join(found)}",
            "Noise grows with the square root of the largest number of participations, and few users need many to "
            "fill the batches.",
        ),
        judge_cases(
            CLAIMS[1],
            full,
            bounded,
            f"in {full} of {bounded} schedules",
            "A larger separation costs no examples until it nears T / k, so the largest is used. Its bands then reach "
            "from one participation to the next.",
        ),
    ]


def _listed(rows: list[Row]) -> str:
    return "; ".join(
        f"k {row['recounted_bound']}, b {row['separation']}: {row['error']:.3g} on {row['num_distinct']:,}"
        for row in sorted(rows, key=lambda row: row["error"])
    )
