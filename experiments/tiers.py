"""What does it cost to let some people have a smaller bound? (beyond the paper: bounds for single users)

A share of the people, drawn by their keys alone, asks for one copy; all others allow three. The noise is calibrated so
that the worst-off person has the same epsilon everywhere. Accuracy is that of a logistic regression on made-up features
of the real graphs.
"""

import itertools
from typing import Any

import altair as alt
import numpy as np
import polars as pl

import coowned as co
from coowned.selection.user_bounds import UserBounds
from coowned.synthetic.logistic_data import LogisticData
from experiments.framework import logistic
from experiments.framework.graphs import real_graph
from experiments.framework.rows import Point, Row
from experiments.framework.verdicts import Effect, Verdict, combine, judge, judge_cases, with_interval

DATA = ("ACL", "arXiv", "mailing list")
CLAIMS = (
    "With a tenth of the people at bound 1, S is larger than with everybody at bound 1 (ours).",
    "At the same worst epsilon, those at bound 1 have at most half of it (ours).",
    "At the same worst epsilon, a tenth of the people at bound 1 cost at most half a point of accuracy (ours).",
)
PAGE = "docs/results.md"
SELECTORS = {"greedy": co.Greedy, "priced": co.Priced}
SHARES = (0.0, 0.1, 0.5, 1.0)  # of people with the smaller bound
OPEN, CAREFUL = 3, 1  # the two bounds
OUT = 0.01  # share of people who opt out, in one more row
WORST = {"epsilon": 8.0, "delta": 1e-8, "adjacency": "zero-out"}
NEAR = 0.005
TRAINED = (0.0, 0.1, 1.0)  # shares with which models are trained: bound 3, two tiers, bound 1
WORST_EPSILONS, SEEDS = (2.0, 8.0), range(5)


def _points(graphs: tuple[str, ...], sizes: dict[str, int]) -> list[Point]:
    shares = [{"careful": share, "out": 0.0} for share in SHARES] + [{"careful": 0.0, "out": OUT}]
    return [
        {"graph": graph, "selector": selector, **share, **sizes}
        for graph, selector, share in itertools.product(graphs, SELECTORS, shares)
    ]


def _trained(batch_sizes: dict[str, int], seeds: range, iterations: int, features: int) -> list[Point]:
    choices = itertools.product(batch_sizes, seeds, WORST_EPSILONS, TRAINED)
    return [
        {"graph": graph, "selector": "greedy", "careful": share, "out": 0.0, "batch_size": batch_sizes[graph]}
        | {"iterations": iterations, "num_features": features, "worst_epsilon": epsilon, "seed": seed}
        for graph, seed, epsilon, share in choices
    ]


GRID = {
    "ci": _points(("made up",), {"batch_size": 32, "iterations": 20}) + _trained({"made up": 32}, range(2), 20, 4),
    "small": _points(DATA, {"batch_size": 1024, "iterations": 2500})
    + _trained({"mailing list": 256, "ACL": 256, "arXiv": 2048}, SEEDS, 500, 100),
    "paper": [],
}


def bounds_of(graph: co.AttributionGraph, careful: float, out: float) -> UserBounds:
    """Returns the bounds of the people whom a draw chose that saw nothing but how many there are."""
    order = np.random.default_rng(0).permutation(graph.num_users)
    keys = np.arange(graph.num_users) if graph.user_keys is None else np.array(graph.user_keys.to_pylist())
    small, none = round(careful * graph.num_users), round(out * graph.num_users)
    rows = {"user": keys[order[: small + none]], "bound": np.repeat([CAREFUL, 0], [small, none])}
    names = pl.Series("tier", ["careful"] * small + ["out"] * none, pl.String)
    return UserBounds.of(pl.DataFrame(rows).with_columns(names), others=OPEN)


def run(point: Point) -> Row:
    """Size, distinct examples and noise multiplier, the epsilon of either tier and, with features, an accuracy."""
    if point.get("num_features") is None:
        return _chosen(point, real_graph(point["graph"]), WORST)[0]
    world = LogisticData(num_features=point["num_features"]).attach(real_graph(point["graph"]), seed=0)
    data = logistic.train_part(world)
    worst = {"epsilon": point["worst_epsilon"], "delta": logistic.DELTA, "adjacency": logistic.ADJACENCY}
    row, selection, mechanism = _chosen(point, data.graph, worst)
    validation, test = logistic.Split(world, "validation"), logistic.Split(world, "test")
    setting = logistic.Setting(data, selection, mechanism, [point["worst_epsilon"]], validation, test)
    swept = logistic.sweep(setting, seed=point["seed"]).filter(~logistic.has_diverged())
    best = swept.sort("validation", "learning_rate", "clip_norm", descending=True).row(0, named=True)
    assert best["noise_multiplier"] == row["noise_multiplier"]
    return row | {"accuracy": best["expected"], "validation": best["validation"], "diverged": _PAIRS - swept.height}


_PAIRS = len(logistic.LEARNING_RATES) * len(logistic.CLIP_NORMS)


def _chosen(
    point: Point, graph: co.AttributionGraph, worst: dict[str, Any]
) -> tuple[Row, co.Selection, co.PoissonSampling]:
    """What S and its noise are, S itself, and how it is drawn."""
    bounds = bounds_of(graph, point["careful"], point["out"])
    selection = SELECTORS[point["selector"]](contribution_bound=OPEN, contribution_bounds=bounds).select(graph)
    certificate = co.certify(graph, selection)
    mechanism = co.PoissonSampling.from_certificate(
        certificate, batch_size=point["batch_size"], iterations=point["iterations"]
    )
    claim = co.guarantee(certificate, mechanism, **worst)
    tiers, epsilons = certificate.tiers, dict(claim.by_tier().select("tier", "epsilon").iter_rows())
    assert tiers is not None
    row = {
        "graph_digest": graph.digest,
        "num_examples": graph.num_examples,
        "num_users": graph.num_users,
        "size": selection.size,
        "num_distinct": selection.num_distinct,
        "noise_multiplier": claim.noise_multiplier,
        "epsilon": claim.epsilon,
        "careful_epsilon": epsilons.get("careful"),
        "examples_opted_out": tiers.num_examples_opted_out,
        "users_opted_out": tiers.num_opted_out,
    }
    return row, selection, mechanism


def draw(rows: list[Row]) -> alt.FacetChart:
    """Size of S against the share of people at bound 1."""
    sizes = [row for row in rows if row.get("accuracy") is None]
    table = pl.DataFrame(sizes, infer_schema_length=None).filter(pl.col("out") == 0)
    return (
        alt.Chart(table)
        .mark_line(point=True)
        .encode(
            x=alt.X("careful:Q", title="share of people at bound 1, others at 3").axis(format="%"),
            y=alt.Y("size:Q", title="size of S").axis(format="~s"),
            color=alt.Color("selector:N", title=None),
        )
        .properties(width=170, height=170)
        .facet(column=alt.Column("graph:N", title=None))
        .resolve_scale(y="independent")
    )


def table(rows: list[Row]) -> str:
    """Size of S, noise and accuracy by graph, worst epsilon and bounds, in Markdown."""
    lines = ["| graph | worst epsilon | bounds | size of S | distinct | noise | careful people | accuracy |"]
    lines.append("|---|---:|---|---:|---:|---:|---:|---:|")
    words = dict(zip(TRAINED, (f"{OPEN}", f"{OPEN}; a tenth {CAREFUL}", f"{CAREFUL}"), strict=True))
    for (graph, epsilon, share), own in _by_arm(rows).items():
        first = own[0]
        careful = "" if first["careful_epsilon"] is None else f"epsilon {first['careful_epsilon']:.2f}"
        accuracy = combine([(1.0, [row["accuracy"] for row in own])]) if len(own) > 1 else Effect(first["accuracy"])
        low, high = accuracy.interval()
        lines.append(
            f"| {graph} | {epsilon:g} | {words[share]} | {first['size']:,} | {first['num_distinct']:,} | "
            f"{first['noise_multiplier']:.3f} | {careful} | {accuracy.estimate:.3f} [{low:.3f}, {high:.3f}] |"
        )
    return "\n".join(lines)


def _by_arm(rows: list[Row]) -> dict[tuple[str, float, float], list[Row]]:
    """The trained rows by graph, worst epsilon and share of people at the smaller bound, seeds in order."""
    found: dict[tuple[str, float, float], list[Row]] = {}
    trained = [row for row in rows if row.get("accuracy") is not None]
    for row in sorted(trained, key=lambda row: (row["graph"], row["worst_epsilon"], row["careful"], row["seed"])):
        found.setdefault((row["graph"], row["worst_epsilon"], row["careful"]), []).append(row)
    return found


def _differences(rows: list[Row], higher: float, lower: float) -> dict[str, Effect]:
    """Accuracy with one share less that with another, seed by seed, by graph and worst epsilon."""
    arms, found = _by_arm(rows), {}
    for graph, epsilon in dict.fromkeys(key[:2] for key in arms):
        accuracies = [
            {row["seed"]: row["accuracy"] for row in arms.get((graph, epsilon, share), [])} for share in (higher, lower)
        ]
        pairs = [accuracies[0][seed] - accuracies[1][seed] for seed in accuracies[0].keys() & accuracies[1].keys()]
        if len(pairs) > 1:
            found[f"{graph}, epsilon {epsilon:g}"] = combine([(1.0, pairs)])
    return found


def _said(effects: dict[str, Effect]) -> str:
    return "; ".join(f"{with_interval(effect)} ({case})" for case, effect in effects.items())


def claims(rows: list[Row]) -> list[Verdict]:
    lost, gained = _differences(rows, 0.1, 0.0), _differences(rows, 0.1, 1.0)
    rows = [row for row in rows if row.get("accuracy") is None]
    by_point = {(row["graph"], row["selector"], row["careful"]): row for row in rows if row["out"] == 0}
    cases = [key[:2] for key in by_point if key[2] == 1.0 and {(*key[:2], share) for share in SHARES} <= set(by_point)]
    larger, halved, sizes, epsilons = 0, 0, [], []
    for graph, selector in cases:
        open_, some, all_ = (by_point[graph, selector, share] for share in (0.0, 0.1, 1.0))
        larger += some["size"] > all_["size"]
        halved += 2 * some["careful_epsilon"] <= some["epsilon"]
        sizes.append(f"{open_['size']:,}, {some['size']:,} and {all_['size']:,} ({graph}, {selector})")
        own, noise = some["careful_epsilon"], some["noise_multiplier"]
        epsilons.append(
            f"{own:.2f} of {some['epsilon']:.2f} at noise multiplier {noise:.3f}, {open_['noise_multiplier']:.3f} with "
            f"nobody and {all_['noise_multiplier']:.3f} with everybody at bound 1 ({graph}, {selector})"
        )
    opted = [
        f"{row['users_opted_out']:,} people take {row['examples_opted_out']:,} examples along, and S has "
        f"{row['size']:,} copies ({row['graph']}, {row['selector']})"
        for row in rows
        if row["out"]
    ]
    found = f"size of S with nobody, a tenth and everybody at bound 1: {'; '.join(sizes)}"
    why = f"Opting out, 1% of the people: {'; '.join(opted)}." if opted else ""
    return [
        judge_cases(CLAIMS[0], larger, len(cases), found, why),
        judge_cases(CLAIMS[1], halved, len(cases), "; ".join(epsilons)),
        judge(
            CLAIMS[2],
            list(lost.values()),
            f"two tiers less bound 3 for all, in points: {_said(lost)}",
            above=-NEAR,
            cases=len(DATA) * len(WORST_EPSILONS),
            why=f"Two tiers less bound 1 for all: {_said(gained)}." if gained else "",
            seeds=f"{SEEDS[0]} to {SEEDS[-1]}",
        ),
    ]
