"""When does DP-MF beat DP-SGD? (paper: figure lr-sgd-ftrl)"""

import itertools
import math
from typing import Any

import altair as alt
import polars as pl

import coowned as co
from coowned.errors import InfeasibleScheduleError
from experiments.framework import logistic
from experiments.framework.rows import Point, Row
from experiments.framework.verdicts import LEVEL, Verdict, combine, judge, unrun, with_interval

CLAIMS = (
    "DP-MF gains on DP-SGD as epsilon grows.",
    "DP-MF gains on a skewed graph.",
    "DP-MF gains with more examples per user.",
    "In some settings, DP-MF beats DP-SGD.",
)
PAPER = (
    "125,000 and 8 million examples, 2 and 8 examples per user, both graphs, six batch sizes with 10,240,000 drawn "
    "examples, epsilon 1/2 to 64, every separation; seeds not stated"
)
THRESHOLD = 0.0  # of every claim: any gain counts
SGD, MF = "DP-SGD", "DP-MF"
DESIGN = logistic.Design(
    arm=["num_examples", "examples_per_user", "kind", "mechanism"],
    candidate=["batch_size", "contribution_bound", "separation_share"],
)
GRAPHS = ((8, "skewed"), (2, "skewed"), (8, "regular"), (2, "regular"))  # examples per user, kind
SIZES = (125_000, 8_000_000)
SMALLER = "125,000 examples and a tenth of the paper's draws"
_EPSILONS = {len(epsilons): epsilons for epsilons in logistic.EPSILONS_OF_MANY.values()}


def _points(
    scale: str, size: int, batches: tuple[int, ...], bounds: tuple, shares: tuple, graphs: tuple = GRAPHS
) -> list[Point]:
    """Graph by graph: a stop leaves some that can be judged. A share of 1 is the largest feasible separation."""
    tuned = [
        *({"mechanism": SGD, "contribution_bound": bound} for bound in bounds),
        *({"mechanism": MF, "separation_share": share} for share in shares),
    ]
    points = []
    for degree, kind in graphs:
        common = {
            "num_examples": size,
            "examples_per_user": degree,
            "kind": kind,
            "num_features": logistic.FEATURES[scale],
            "drawn": logistic.DRAWN_BY_MANY[scale],
            "num_epsilons": len(logistic.EPSILONS_OF_MANY[scale]),
        }
        first = [common | {"batch_size": batch} | arm for batch, arm in itertools.product(batches, tuned)]
        points += first + DESIGN.later_points(first)
    return points


GRID = {
    "ci": _points("ci", 2_000, (32,), (3,), (1.0,), GRAPHS[:1]),
    "small": _points("small", 125_000, (2**10, 2**12), (3, 1, 8), (1.0, 0.5, 0.1)),
    "paper": _points("paper", 8_000_000, (2**15, 2**13), (8, 3, 16), (1.0, 0.5, 0.25)),
}


def cost(point: Point) -> float:
    return 3.0 if "batch_size" in point else 1.0


def run(point: Point, rows: list[Row]) -> Row:
    """One sweep of the first pass, or a later stage; no results where no schedule with a separation of 2 exists."""
    if "batch_size" not in point:
        return DESIGN.run_again(point, DESIGN.lines(rows), _setting)
    try:
        setting = _setting(point, 0)
    except InfeasibleScheduleError:
        return {"min_separation": 0} | {name: [] for name in logistic.LISTS}
    separation = getattr(setting.mechanism, "min_separation", None)
    return {"min_separation": separation} | logistic.first_pass(setting)


def _setting(point: Point, seed: int) -> logistic.Setting:
    world = logistic.make_world(point["kind"], point["num_examples"], point["examples_per_user"], point["num_features"])
    data = logistic.train_part(world)
    graph, batch_size = data.graph, int(point["batch_size"])
    steps = {"batch_size": batch_size, "iterations": point["drawn"] // batch_size}
    if point["mechanism"] == SGD:
        selected = co.GreedyWithDuplicates(contribution_bound=int(point["contribution_bound"])).select(graph, seed=seed)
        mechanism = co.PoissonSampling.from_certificate(co.certify(graph, selected), **steps)
    else:
        search = "bisection" if point["num_examples"] >= 1_000_000 else "sweep"
        largest = co.max_min_separation(graph, **steps, seed=seed, search=search)
        separation = max(2, round(point["separation_share"] * largest))
        selected = co.GreedyMinSeparation(**steps, min_separation=separation).select(graph, seed=seed)
        mechanism = co.MinSeparation.from_certificate(co.certify(graph, selected))
    splits = (logistic.Split(world, name) for name in ("validation", "test"))
    return logistic.Setting(data, selected, mechanism, _EPSILONS[point["num_epsilons"]], *splits)


def reported(rows: list[Row]) -> pl.DataFrame:
    """Both mechanisms, each tuned over batch sizes, bounds or separations."""
    return DESIGN.reported(DESIGN.lines(rows))


def draw(rows: list[Row]) -> alt.FacetChart:
    graph = pl.format("{} examples, {}, {} per user", "num_examples", "kind", "examples_per_user")
    return logistic.draw(reported(rows).with_columns(graph.alias("graph")), "mechanism", "graph", 150)


def claims(rows: list[Row]) -> list[Verdict]:
    lines = DESIGN.lines(rows)
    table = DESIGN.reported(lines)
    gains = logistic.differences(table, "mechanism", MF, SGD)  # by examples, examples per user, kind, epsilon
    if not gains:
        return unrun(CLAIMS)
    epsilons = logistic.EPSILONS_OF_MANY["paper"]
    every = list(itertools.product((8, 2), ("skewed", "regular"), epsilons))
    whole = [size for size in {case[0] for case in gains} if all((size, *case) in gains for case in every)]
    own = {case[1:]: gain for case, gain in gains.items() if whole and case[0] == max(whole)}
    why = f"{logistic.at_the_edge(DESIGN.winners(lines))} {logistic.divergence(table)}".strip()
    about = {"why": why, "seeds": logistic.SEEDS_SHOWN}
    largest = max(case[0] for case in gains)
    effects = {case: combine(gain) for case, gain in gains.items()}
    cases = len(SIZES) * len(every)
    shown = "; ".join(
        f"{with_interval(effect, LEVEL / cases)} ({size:,} examples, {kind}, {degree} per user, epsilon {epsilon:g})"
        for (size, degree, kind, epsilon), effect in effects.items()
    )
    return [
        *_trends(own, max(whole, default=0), about),
        judge(
            CLAIMS[3],
            list(effects.values()),
            f"accuracy of DP-MF less that of DP-SGD, in points, in {len(effects)} of {cases} cases, "
            f"with intervals for all of them together: {shown}",
            above=THRESHOLD,
            in_some=True,
            cases=cases,
            smaller=SMALLER if largest < SIZES[-1] else "",
            **about,
        ),
    ]


def _trends(gains: dict[tuple, logistic.Contrast], size: int, about: dict[str, Any]) -> list[Verdict]:
    """On the largest graphs of which all cases ran: gain by doubling of epsilon, by skew and by examples per user."""
    if not gains:
        return unrun(CLAIMS[:3])
    by_epsilon: dict[float, list] = {}
    for (_, _, epsilon), gain in gains.items():
        by_epsilon.setdefault(epsilon, []).append(gain)
    logs = {epsilon: math.log2(epsilon) for epsilon in by_epsilon}
    middle = sum(logs.values()) / len(logs)
    spread = sum((value - middle) ** 2 for value in logs.values())
    slope = [((logs[epsilon] - middle) / spread, logistic.mean(own)) for epsilon, own in by_epsilon.items()]
    skew = [(1.0 if kind == "skewed" else -1.0, gain) for (_, kind, _), gain in gains.items()]
    degree = [(1.0 if number == 8 else -1.0, gain) for (number, _, _), gain in gains.items()]
    half = len(gains) / 2
    contrasts = (
        ("DP-MF's gain by doubling of epsilon (regression, mean over graphs)", slope),
        ("DP-MF's gain on skewed graphs less that on regular ones", [(sign / half, gain) for sign, gain in skew]),
        ("DP-MF's gain with 8 examples per user less that with 2", [(sign / half, gain) for sign, gain in degree]),
    )
    verdicts = []
    about = about | {"num_examples": size, "smaller": SMALLER if size < SIZES[-1] else ""}
    for claim, (name, parts) in zip(CLAIMS, contrasts, strict=False):
        effect = combine(logistic.weighted(parts))
        found = f"{name}, in points at {size:,} examples: {with_interval(effect)}"
        verdicts.append(judge(claim, [effect], found, above=THRESHOLD, **about))
    return verdicts
