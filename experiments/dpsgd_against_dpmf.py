"""When does DP-MF beat DP-SGD? (paper: figure lr-sgd-ftrl)"""

import itertools

import altair as alt
import polars as pl

import coowned as co
from coowned.errors import InfeasibleScheduleError
from experiments.framework import logistic
from experiments.framework.rows import Point, Row
from experiments.framework.verdicts import FAILS, HOLDS, OPEN, Verdict, judge

CLAIMS = (
    "DP-MF gains on DP-SGD as epsilon grows.",
    "DP-MF gains on a skewed graph.",
    "DP-MF gains with more examples per user.",
    "In some settings, DP-MF beats DP-SGD.",
)
SGD, MF = "DP-SGD", "DP-MF"
ARM = ["num_examples", "examples_per_user", "kind", "mechanism"]
GRAPHS = ((2, "regular"), (8, "skewed"), (2, "skewed"), (8, "regular"))  # examples per user, kind
_EPSILONS = {len(epsilons): epsilons for epsilons in logistic.EPSILONS_OF_MANY.values()}


def _points(scale: str, sizes: tuple[int, ...], batches: tuple[int, ...], bounds: tuple, shares: tuple) -> list[Point]:
    """A share of 1 is the largest feasible separation."""
    first = [{"mechanism": SGD, "contribution_bound": bounds[0]}, {"mechanism": MF, "separation_share": shares[0]}]
    more = [
        *({"mechanism": SGD, "contribution_bound": bound} for bound in bounds[1:]),
        *({"mechanism": MF, "separation_share": share} for share in shares[1:]),
    ]
    points = [
        {
            "num_examples": num_examples,
            "examples_per_user": degree,
            "kind": kind,
            "batch_size": batch_size,
            "num_features": logistic.FEATURES[scale],
            "drawn": logistic.DRAWN_BY_MANY[scale],
            "num_epsilons": len(logistic.EPSILONS_OF_MANY[scale]),
        }
        | arm
        for num_examples, batch_size in itertools.product(sizes, batches)
        for arms in (first, more)  # a stop leaves pairs to compare
        for (degree, kind), arm in itertools.product(GRAPHS, arms)
    ]
    return points + logistic.repetitions(points, ARM)


GRID = {
    "ci": _points("ci", (2_000,), (32,), (3,), (1.0,)),
    "small": _points("small", (125_000,), (2**10, 2**12), (3, 1, 8), (1.0, 0.5, 0.1)),
    "paper": _points(
        "paper",
        (125_000, 8_000_000),
        tuple(2**power for power in range(10, 16)),
        (1, 2, 3, 5, 8, 10),
        tuple(share / 10 for share in range(10, 0, -1)),
    ),
}


def run(point: Point, rows: list[Row]) -> Row:
    """One sweep; no results where no schedule with a separation of 2 exists."""
    if "batch_size" not in point:
        return logistic.repeated(point, _candidates(rows), ARM, _setting)
    try:
        setting = _setting(point, 0)
    except InfeasibleScheduleError:
        return {"epsilon": [], "min_separation": 0} | {name: [] for name in logistic.LISTS}
    separation = getattr(setting.mechanism, "min_separation", None)
    return {"epsilon": list(setting.epsilons), "min_separation": separation} | logistic.tuned_in_world(setting)


def _setting(point: Point, seed: int) -> logistic.Setting:
    world = logistic.make_world(point["kind"], point["num_examples"], point["examples_per_user"], point["num_features"])
    data = logistic.train_part(world)
    graph, batch_size = data.graph, point["batch_size"]
    steps = {"batch_size": batch_size, "iterations": point["drawn"] // batch_size}
    if point["mechanism"] == SGD:
        selected = co.GreedyWithDuplicates(contribution_bound=point["contribution_bound"]).select(graph, seed=seed)
        mechanism = co.PoissonSampling.from_certificate(co.certify(graph, selected), **steps)
    else:
        separation = max(2, round(point["separation_share"] * co.max_min_separation(graph, **steps, seed=seed)))
        selected = co.GreedyMinSeparation(**steps, min_separation=separation).select(graph, seed=seed)
        mechanism = co.MinSeparation.from_certificate(co.certify(graph, selected))
    return logistic.Setting(world, data, selected, mechanism, _EPSILONS[point["num_epsilons"]])


def _candidates(rows: list[Row]) -> pl.DataFrame:
    return logistic.by_epsilon(rows).drop_nulls("expected")


def arms(rows: list[Row]) -> pl.DataFrame:
    """Both mechanisms, tuned over batch sizes, bounds and separations."""
    return logistic.best(_candidates(rows), ARM)


def gains(rows: list[Row]) -> pl.DataFrame:
    """Accuracy of DP-MF less that of DP-SGD, where both ran."""
    index = ["num_examples", "examples_per_user", "kind", "epsilon"]
    wide = arms(rows).pivot("mechanism", index=index, values="expected")
    absent = [pl.lit(None, pl.Float64).alias(name) for name in (SGD, MF) if name not in wide.columns]
    wide = wide.with_columns(absent).drop_nulls([SGD, MF])
    return wide.with_columns((pl.col(MF) - pl.col(SGD)).alias("gain")).sort(index)


def draw(rows: list[Row]) -> alt.Chart:
    shown = arms(rows).with_columns(pl.format("{}, {} examples per user", "kind", "examples_per_user").alias("graph"))
    return (
        alt.Chart(shown)
        .mark_line(point=True)
        .encode(
            x=alt.X("epsilon:Q").scale(type="log", base=2),
            y=alt.Y("expected:Q", title="test accuracy").scale(zero=False),
            color=alt.Color("mechanism:N", title=None),
            column=alt.Column("graph:N", title=None),
        )
        .properties(width=150, height=160)
        .resolve_scale(y="independent")
    )


def claims(rows: list[Row]) -> list[Verdict]:
    table = gains(rows)
    if table.is_empty():
        return [Verdict(claim=claim, verdict=OPEN, found="") for claim in CLAIMS]
    ahead = table.filter(pl.col("gain") > 0.001)
    best = table.sort("gain", descending=True).row(0, named=True)
    return [
        _trend(table, "epsilon", 0),
        _trend(table, "kind", 1),
        _trend(table, "examples_per_user", 2),
        Verdict(
            claim=CLAIMS[3],
            verdict=HOLDS if ahead.height else FAILS,
            found=f"ahead by more than 0.1 points in {ahead.height} of {table.height} cases; at best "
            f"{100 * best['gain']:+.2f} points ({best['kind']}, {best['examples_per_user']} examples per user, "
            f"epsilon {best['epsilon']:g}){logistic.seeds_shown(arms(rows))}",
        ),
    ]


def _trend(table: pl.DataFrame, along: str, number: int) -> Verdict:
    """Whether the gain rises from the first to the last value of a column, the others fixed."""
    fixed = [name for name in ("num_examples", "examples_per_user", "kind", "epsilon") if name != along]
    changes = [
        (", ".join(str(value) for value in values[1:]), group["gain"][-1] - group["gain"][0])
        for values, group in table.sort(along).group_by(fixed, maintain_order=True)
        if group.height > 1
    ]
    rises = sum(change > 0 for _, change in changes)
    shown = ", ".join(f"{100 * change:+.2f} ({values})" for values, change in changes)
    found = f"gain rises in {rises} of {len(changes)} cases, in points: {shown}"
    return judge(CLAIMS[number], rises, len(changes), found)
