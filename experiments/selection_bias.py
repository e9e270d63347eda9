"""What does the bias of S cost, and does mitigating it pay? (paper: figures lr-bias and pareto)

On the skewed graph with 8 examples per user and bound 3: there bounding leaves few enough examples that as many can be
drawn at random among those with more users than the median.
"""

import dataclasses
import itertools

import altair as alt
import numpy as np
import polars as pl

import coowned as co
from coowned.synthetic.logistic_data import LogisticWorld
from experiments.framework import logistic
from experiments.framework.rows import Point, Row
from experiments.framework.verdicts import FAILS, HOLDS, IN_PART, OPEN, Verdict, judge

CLAIMS = (
    "Greedy's S trains a worse model than a random subset of the same size at equal noise.",
    "A random subset of the examples with many users is at least as good as one of all examples.",
    "A sweet spot between size and users per example beats greedy.",
    "Mitigating bias has diminishing returns: a larger bias calls for only slightly more users per example.",
)
BOUND, KIND, EXAMPLES_PER_USER = 3, "skewed", 8
ARM = ["selector", "bias_strength"]
RANDOM = {"random": "all", "random, few users": "few-users", "random, many users": "many-users"}
_EPSILONS = {len(epsilons): epsilons for epsilons in logistic.EPSILONS_OF_MANY.values()}


def _points(scale: str, num_examples: int, batch_sizes: tuple[int, ...], steps: int) -> list[Point]:
    """`step` k of n is a setting on the frontier between size and users per example, from most size to most users."""
    common = {
        "num_examples": num_examples,
        "num_features": logistic.FEATURES[scale],
        "drawn": logistic.DRAWN_BY_MANY[scale],
        "num_epsilons": len(logistic.EPSILONS_OF_MANY[scale]),
        "steps": steps,
    }
    arms = [
        *({"selector": name, "bias_strength": 1.0} for name in ("greedy", *RANDOM)),
        {"selector": "greedy with duplicates", "bias_strength": 1.0},
        *({"selector": "bias-mitigating", "bias_strength": 1.0, "step": step} for step in range(steps)),
        *(
            {"selector": "bias-mitigating", "bias_strength": strength, "step": step}
            for strength, step in itertools.product((10.0, 0.1), range(steps))
        ),
    ]
    points = [common | arm | {"batch_size": batch_size} for batch_size in batch_sizes for arm in arms]
    return points + logistic.repetitions(points, ARM)


GRID = {
    "ci": _points("ci", 2_000, (64,), 2),
    "small": _points("small", 125_000, (2**10, 2**12), 5),
    "paper": _points("paper", 1_000_000, tuple(2**power for power in range(10, 16)), 20),
}


def run(point: Point, rows: list[Row]) -> Row:
    """One sweep; random subsets are trained with greedy's noise, and claim nothing."""
    if "batch_size" not in point:
        return logistic.repeated(point, _table(rows), ARM, _setting)
    setting = _setting(point, 0)
    graph = logistic.train_part(setting.world).graph
    copies = setting.selected.copies
    return {
        "epsilon": list(setting.epsilons),
        "mean_users_per_example": float(np.dot(copies, graph.users_per_example)) / setting.selected.size,
        **(_bias_mitigating(point, graph) or dict.fromkeys(("threshold", "few_user_run", "many_user_run"))),
        **logistic.tuned_in_world(setting),
    }


def _world(point: Point) -> LogisticWorld:
    return logistic.make_world(
        KIND, point["num_examples"], EXAMPLES_PER_USER, point["num_features"], point["bias_strength"]
    )


def _bias_mitigating(point: Point, graph: co.AttributionGraph) -> dict[str, int]:
    """The setting of this step, for the arm that has steps."""
    if point["selector"] != "bias-mitigating":
        return {}
    return frontier_settings(graph, point["steps"])[point["step"]]


def _setting(point: Point, seed: int) -> logistic.Setting:
    world, epsilons, noise = _world(point), _EPSILONS[point["num_epsilons"]], None
    data = logistic.train_part(world)
    graph = data.graph
    if bias_mitigating := _bias_mitigating(point, graph):
        selector = co.BiasMitigating(contribution_bound=BOUND, allow_duplicates=True, **bias_mitigating)
    elif point["selector"] == "greedy with duplicates":
        selector = co.GreedyWithDuplicates(contribution_bound=BOUND)
    else:
        selector = co.Greedy(contribution_bound=BOUND)
    selection = selector.select(graph, seed=seed)
    if point["selector"] in RANDOM:
        greedy = _mechanism(graph, selection, point)
        terms = {"delta": logistic.DELTA, "adjacency": logistic.ADJACENCY}
        noise = tuple(co.calibrate(greedy, epsilon=epsilon, **terms) for epsilon in epsilons)
        subset = co.RandomSubset(size=selection.size, among=RANDOM[point["selector"]]).select(graph, seed=seed)
        data = dataclasses.replace(data, graph=_unshared(graph))
        selection = co.Selection.from_copies(data.graph, subset.copies)
    return logistic.Setting(world, data, selection, _mechanism(data.graph, selection, point), epsilons, noise)


def _unshared(graph: co.AttributionGraph) -> co.AttributionGraph:
    """Every example with a user of its own: a random subset holds no bound for the real users."""
    number = graph.num_examples
    return co.AttributionGraph.from_csr(np.arange(number + 1), np.arange(number), num_users=number)


def _mechanism(graph: co.AttributionGraph, selection: co.Selection, point: Point) -> co.PoissonSampling:
    batch_size = point["batch_size"]
    return co.PoissonSampling.from_certificate(
        co.certify(graph, selection), batch_size=batch_size, iterations=point["drawn"] // batch_size
    )


def frontier_settings(graph: co.AttributionGraph, steps: int) -> list[dict[str, int]]:
    """So many of the paper's 80 settings that no other dominates, evenly from the largest S to the most users."""
    table = co.pareto(graph, contribution_bound=BOUND).filter(~pl.col("dominated"))
    table = table.unique("size", keep="first", maintain_order=True).sort("size", descending=True)
    chosen = np.linspace(0, table.height - 1, steps).round().astype(int)
    return table[chosen].select("threshold", "few_user_run", "many_user_run").to_dicts()


def _table(rows: list[Row]) -> pl.DataFrame:
    table = logistic.by_epsilon(rows)
    return table.filter(pl.col("num_examples") == pl.col("num_examples").max())


def subsets(rows: list[Row]) -> pl.DataFrame:
    """Greedy and random subsets of its size, tuned over batch sizes."""
    own = _table(rows).filter(pl.col("selector").is_in(["greedy", *RANDOM]))
    return logistic.best(own, ARM)


def mitigated(rows: list[Row]) -> pl.DataFrame:
    """The best setting for each bias and epsilon."""
    own = _table(rows).filter(pl.col("selector") == "bias-mitigating")
    return logistic.best(own, ARM)


def draw(rows: list[Row]) -> alt.HConcatChart:
    """Arms of equal size and noise; what the best setting gains; how many users an example of it has."""
    accuracy = alt.Y("expected:Q", title="test accuracy").scale(zero=False)
    users = alt.Y("mean_users_per_example:Q", title="users per example").scale(zero=False)
    gain = alt.Y("gain:Q", title="accuracy over greedy's")
    panels = (
        ("equal size and noise", subsets(rows), {"y": accuracy, "color": alt.Color("selector:N", title=None)}),
        ("bias-mitigating, best setting", _improvement(rows), {"y": gain}),
        ("users per example of the best", mitigated(rows), {"y": users, "color": alt.Color("bias_strength:N")}),
    )
    charts = [
        alt.Chart(table, title=title, width=180, height=170)
        .mark_line(point=True)
        .encode(x=alt.X("epsilon:Q").scale(type="log", base=2), **channels)
        for title, table, channels in panels
        if not table.is_empty()
    ]
    return alt.hconcat(*charts).resolve_scale(color="independent")


def _improvement(rows: list[Row]) -> pl.DataFrame:
    """Accuracy of the best setting less that of greedy with duplicates, at beta = 1, by epsilon."""
    greedy = logistic.best(_table(rows).filter(pl.col("selector") == "greedy with duplicates"), ARM)
    found = mitigated(rows).filter(pl.col("bias_strength") == 1)
    joined = found.join(greedy.select("epsilon", pl.col("expected").alias("greedy")), on="epsilon")
    return joined.select("epsilon", (pl.col("expected") - pl.col("greedy")).alias("gain")).sort("epsilon")


def claims(rows: list[Row]) -> list[Verdict]:
    trained = subsets(rows)
    wide = trained.pivot("selector", index="epsilon", values="expected").sort("epsilon")
    names, seeds = set(wide.columns), logistic.seeds_shown(trained)
    return [
        _compare(CLAIMS[0], wide, "greedy", "random", seeds, margin=0.0) if {"greedy", "random"} <= names else _open(0),
        _compare(CLAIMS[1], wide, "random", "random, many users", seeds, margin=-0.002)
        if {"random", "random, many users"} <= names
        else _open(1),
        _sweet_spot(rows),
        _diminishing(rows),
    ]


def _open(number: int) -> Verdict:
    return Verdict(claim=CLAIMS[number], verdict=OPEN, found="")


def _compare(claim: str, wide: pl.DataFrame, lower: str, higher: str, seeds: str, *, margin: float) -> Verdict:
    """Whether the second arm is ahead of the first by the margin, at how many epsilons."""
    gains = (wide[higher] - wide[lower]).to_list()
    shown = ", ".join(f"{100 * gain:+.2f} at {e:g}" for e, gain in zip(wide["epsilon"], gains, strict=True))
    ahead = sum(gain > margin for gain in gains)
    found = f"accuracy of '{higher}' over '{lower}', in points by epsilon: {shown}{seeds}"
    return judge(claim, ahead, len(gains), found)


def _sweet_spot(rows: list[Row]) -> Verdict:
    table = _improvement(rows)
    if table.is_empty():
        return _open(2)
    shown = ", ".join(f"{100 * line['gain']:+.2f} at {line['epsilon']:g}" for line in table.to_dicts())
    ahead = int((table["gain"] > 0.001).sum())
    return judge(
        CLAIMS[2], ahead, table.height, f"accuracy over greedy's with duplicates, in points by epsilon: {shown}"
    )


def _diminishing(rows: list[Row]) -> Verdict:
    table = mitigated(rows).pivot("bias_strength", index="epsilon", values="mean_users_per_example").sort("epsilon")
    if not {"0.1", "1.0", "10.0"} <= set(table.columns):
        return _open(3)
    means = [float(table[name].mean()) for name in ("0.1", "1.0", "10.0")]  # type: ignore[arg-type]
    offered = _table(rows).filter(pl.col("selector") == "bias-mitigating")["mean_users_per_example"]
    low, high = float(offered.min()), float(offered.max())  # type: ignore[arg-type]
    rise = (means[2] - means[1]) / (high - low)
    return Verdict(
        claim=CLAIMS[3],
        verdict=HOLDS if rise <= 0.25 else IN_PART if rise <= 0.5 else FAILS,
        found="users per example of the best setting, mean over epsilons: "
        + ", ".join(f"{mean:.2f} at beta {beta}" for mean, beta in zip(means, ("0.1", "1", "10"), strict=True))
        + f"; the settings range from {low:.2f} to {high:.2f}",
        why="Settings are chosen with one seed: neighbouring ones differ by less than the noise of a run.",
    )
