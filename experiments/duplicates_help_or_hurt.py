"""Do duplicates in S help or hurt? (paper: figure lr-dup)"""

import itertools
from typing import Any

import altair as alt
import numpy as np
import polars as pl

import coowned as co
from experiments.framework import logistic
from experiments.framework.rows import Point, Row
from experiments.framework.verdicts import Effect, Verdict, combine, judge, unrun, with_interval

CLAIMS = (
    "On a regular graph, duplicates help below a threshold epsilon of about 1 and hurt above it.",
    "On a skewed graph, duplicates help below a threshold epsilon of about 2 and hurt above it.",
    "The threshold below which duplicates help is larger on a skewed graph.",
)
PAPER = (
    "1 million examples, 2 per user, both graphs, six batch sizes with 10,240,000 drawn examples, epsilon 1/2 to 64; "
    "bounds and seeds not stated"
)
SELECTORS = {"no duplicates": co.Greedy, "duplicates": co.GreedyWithDuplicates}
THRESHOLDS = {"regular": 1.0, "skewed": 2.0}  # the paper's
ABOUT = 2.0  # a threshold is about x where the sign is right from x / 2 down and from 2 x up
DRAWS = 10_000  # of the interval of the difference between two thresholds
FEWER = "With fewer examples, the same epsilon needs more noise, so the threshold moves up."
DESIGN = logistic.Design(arm=["num_examples", "kind", "selector"], candidate=["batch_size", "contribution_bound"])


def _points(scale: str, size: int, batches: tuple[int, ...], bounds: tuple, further: tuple = ()) -> list[Point]:
    """With bound 1 both selectors give the same S: it runs once, and counts for both; `further` bounds: skewed only."""
    points = [
        {
            "num_examples": size,
            "kind": kind,
            "contribution_bound": bound,
            "selector": selector,
            "batch_size": batch_size,
            "num_features": logistic.FEATURES[scale],
            "drawn": logistic.DRAWN[scale],
            "num_epsilons": len(logistic.EPSILONS[scale]),
            "seed": 0,
        }
        for batch_size, bound, kind, selector in itertools.product(batches, bounds + further, THRESHOLDS, SELECTORS)
        if (bound > 1 or selector == "no duplicates") and (kind == "skewed" or bound in bounds)
    ]
    return points + DESIGN.later_points(points)


GRID = {
    "ci": _points("ci", 2_000, (64,), (1, 2)),
    "small": _points("small", 125_000, (2**12, 2**10, 2**14), (3, 1, 8)),
    "paper": _points("paper", 1_000_000, (2**12, 2**10, 2**14), (3, 1, 8), (16, 32)),
}
_EPSILONS = {len(epsilons): epsilons for epsilons in logistic.EPSILONS.values()}


def cost(point: Point) -> float:
    return 2.0 if "batch_size" in point else 1.0


def run(point: Point, rows: list[Row]) -> Row:
    """One sweep of the first pass, or a later stage."""
    if "batch_size" not in point:
        return DESIGN.run_again(point, _lines(rows), _setting)
    return logistic.first_pass(_setting(point, point["seed"]), seed=point["seed"])


def _setting(point: Point, seed: int) -> logistic.Setting:
    world = logistic.make_world(point["kind"], point["num_examples"], 2, point["num_features"])
    data = logistic.train_part(world)
    selector = SELECTORS[point["selector"]](contribution_bound=int(point["contribution_bound"]))
    selection = selector.select(data.graph, seed=seed)
    batch_size = int(point["batch_size"])
    mechanism = co.PoissonSampling.from_certificate(
        co.certify(data.graph, selection), batch_size=batch_size, iterations=point["drawn"] // batch_size
    )
    splits = (logistic.Split(world, name) for name in ("validation", "test"))
    return logistic.Setting(data, selection, mechanism, _EPSILONS[point["num_epsilons"]], *splits)


def _lines(rows: list[Row]) -> pl.DataFrame:
    lines = DESIGN.lines(rows)
    shared = lines.filter(pl.col("contribution_bound") == 1).with_columns(pl.lit("duplicates").alias("selector"))
    return pl.concat([lines, shared])


def reported(rows: list[Row]) -> pl.DataFrame:
    """Both arms, each tuned over batch sizes and bounds."""
    return DESIGN.reported(_lines(rows))


def crossing(epsilons: np.ndarray, gains: np.ndarray) -> np.ndarray:
    """The logarithm (base 2) of where each line of gains first falls to 0, by straight lines in log epsilon.

    It is that of the first epsilon where no gain is above 0 there, of the last where all gains are.
    """
    logs, down, lines = np.log2(epsilons), gains <= 0, np.arange(len(gains))
    first = down.argmax(axis=1)
    before = np.maximum(first - 1, 0)
    above, below = gains[lines, before], gains[lines, first]
    part = np.divide(above, above - below, out=np.zeros(len(gains)), where=(first > 0) & (above > below))
    return np.where(down.any(axis=1), logs[before] + part * (logs[first] - logs[before]), logs[-1])


def draw(rows: list[Row]) -> alt.FacetChart:
    panel = pl.format("{}, {} examples", "kind", "num_examples").alias("panel")
    return logistic.draw(reported(rows).with_columns(panel), "selector", "panel", 240)


def claims(rows: list[Row]) -> list[Verdict]:
    """Each graph at the most examples of which both arms are reported; both thresholds at the same number."""
    table = reported(rows)
    gains: dict[str, dict[int, dict[float, logistic.Contrast]]] = {kind: {} for kind in THRESHOLDS}
    differences = logistic.differences(table, "selector", "duplicates", "no duplicates")
    for (size, kind, epsilon), gain in differences.items():
        gains[kind].setdefault(size, {})[epsilon] = gain
    verdicts = [
        _sides(claim, threshold, max(gains[kind]), gains[kind][max(gains[kind])], _about(table, max(gains[kind])))
        if gains[kind]
        else unrun([claim])[0]
        for claim, (kind, threshold) in zip(CLAIMS, THRESHOLDS.items(), strict=False)
    ]
    common = set.intersection(*(set(own) for own in gains.values()))
    if not common:
        return [*verdicts, *unrun(CLAIMS[2:])]
    crossings = {kind: _crossings(own[max(common)]) for kind, own in gains.items()}
    return [*verdicts, _larger(crossings, _about(table, max(common)))]


def _about(table: pl.DataFrame, size: int) -> dict[str, Any]:
    fewer = size < 1_000_000
    diverged = logistic.divergence(table.filter(num_examples=size))
    return {
        "why": " ".join(filter(None, [FEWER if fewer else "", diverged])),
        "seeds": logistic.SEEDS_SHOWN,
        "num_examples": size,
        "smaller": f"{size:,} examples and a quarter of the paper's draws" if fewer else "",
    }


def _sides(claim: str, threshold: float, size: int, gains: dict, about: dict[str, Any]) -> Verdict:
    """Whether duplicates help well below the paper's threshold and hurt well above it."""
    low = [gain for epsilon, gain in gains.items() if epsilon <= threshold / ABOUT]
    high = [gain for epsilon, gain in gains.items() if epsilon >= threshold * ABOUT]
    if not low or not high:
        return unrun([claim])[0]
    helps, hurts = (combine(logistic.mean(part)) for part in (low, high))
    shown = ", ".join(f"{with_interval(combine(gain))} at {epsilon:g}" for epsilon, gain in gains.items())
    found = (
        f"accuracy gained by duplicates, in points at {size:,} examples: mean {with_interval(helps)} for epsilon up to "
        f"{threshold / ABOUT:g}, {with_interval(hurts)} from {threshold * ABOUT:g}. By epsilon: {shown}"
    )
    reverse = Effect(-hurts.estimate, hurts.error, hurts.freedom)
    return judge(claim, [helps, reverse], found, above=0.0, **about)


def _crossings(gains: dict[float, logistic.Contrast]) -> np.ndarray:
    """Where the gain crosses 0: the estimate first, then as it varies with the gains' errors (Student's)."""
    generator = np.random.default_rng(0)
    effects = [combine(gain) for gain in gains.values()]
    drawn = [
        effect.estimate + effect.error * generator.standard_t(min(effect.freedom, 1e9), DRAWS) for effect in effects
    ]
    estimates = np.array([effect.estimate for effect in effects])
    return crossing(np.array(list(gains)), np.vstack([estimates, np.column_stack(drawn)]))


def _larger(crossings: dict[str, np.ndarray], about: dict[str, Any]) -> Verdict:
    """By the central 95% of the difference between the two thresholds' logarithms."""
    doublings = crossings["skewed"] - crossings["regular"]
    low, high = np.quantile(doublings[1:], [0.025, 0.975])
    shown = ", ".join(f"{kind} {2 ** found[0]:.2f}" for kind, found in crossings.items())
    found = (
        f"thresholds: {shown}; skewed over regular {2 ** doublings[0]:.2f} [{2**low:.2f}, {2**high:.2f}] "
        f"({DRAWS:,} draws of the gains from their errors)"
    )
    return judge(CLAIMS[2], [Effect(float(doublings[0]), bounds=(float(low), float(high)))], found, above=0.0, **about)
