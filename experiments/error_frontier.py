"""Which mechanism has the smallest error at which epsilon, and on how many examples? (beyond the paper)

No training: the root mean squared error of all prefix sums of the noise, in clip norms.
"""

import math

import altair as alt
import polars as pl

import coowned as co
from coowned.errors import InfeasibleScheduleError
from coowned.mechanism.mechanism import Mechanism
from experiments.framework.graphs import real_graph
from experiments.framework.rows import Point, Row
from experiments.framework.verdicts import Verdict, judge_cases, unrun

DATA = ("ACL", "mailing list", "arXiv")
CLAIMS = (
    "DP-MF without amplification has a smaller error than DP-SGD at large epsilon, a larger one at small (ours).",
    "DP-MF without amplification uses fewer distinct examples (ours).",
    "At the same bound, the error of cyclic DP-MF is at most 1% above that of DP-SGD (ours).",
    "At bound 1 and in the same groups, random allocation has a smaller error than cyclic DP-MF (ours).",
)
EPSILONS = (2.0, 8.0, 32.0, 64.0)
DELTA = 1e-10
SGD, SEPARATED, CYCLIC = "DP-SGD", "DP-MF, min separation", "DP-MF, cyclic"
ALLOCATED = "random allocation"


def _points(graphs: dict[str, int], iterations: int, bounds: tuple, separations: tuple, groups: tuple) -> list[Point]:
    arms = [
        *({"mechanism": SGD, "contribution_bound": bound} for bound in bounds),
        *({"mechanism": SEPARATED, "min_separation": separation} for separation in separations),
        *(
            {"mechanism": CYCLIC, "contribution_bound": bound, "num_groups": number}
            for bound in bounds[:2]
            for number in groups
        ),
        *({"mechanism": ALLOCATED, "contribution_bound": 1, "num_groups": number} for number in (1, *groups)),
    ]
    return [
        {"graph": graph, "batch_size": batch, "iterations": iterations} | arm
        for graph, batch in graphs.items()
        for arm in arms
    ]


GRID = {
    "ci": _points({"made up": 8}, 40, (1, 2), (4,), (2,)),
    "small": _points(
        {"ACL": 512, "mailing list": 256, "arXiv": 4096}, 2500, (1, 3, 10), (4, 8, 16, 32, 46), (2, 4, 8, 16, 32)
    ),
    "paper": [],
}


def run(point: Point) -> Row:
    """The noise for every epsilon and the error it makes; no error where no schedule was found."""
    graph = real_graph(point["graph"])
    steps = {"batch_size": point["batch_size"], "iterations": point["iterations"]}
    try:
        selected, mechanism = _arm(point, graph, steps)
    except InfeasibleScheduleError:
        return {"epsilon": [], "noise_multiplier": [], "error": [], "num_distinct": 0, "recounted_bound": None}
    strategy = mechanism.check_strategy(None)
    factor = 1.0 if strategy is None else strategy.error_factor()
    factor /= mechanism.drawn_share(co.certify(graph, selected))  # batches may be larger or smaller than coins draw
    noise = [co.calibrate(mechanism, epsilon=e, delta=DELTA, adjacency="zero-out") for e in EPSILONS]
    return {
        "epsilon": list(EPSILONS),
        "noise_multiplier": noise,
        "error": [sigma * factor * math.sqrt((point["iterations"] + 1) / 2) for sigma in noise],
        "num_distinct": selected.num_distinct,
        "recounted_bound": mechanism.contribution_bound,
    }


def _arm(point: Point, graph: co.AttributionGraph, steps: dict) -> tuple[co.Selection | co.Schedule, Mechanism]:
    if point["mechanism"] == SEPARATED:
        schedule = co.GreedyMinSeparation(**steps, min_separation=point["min_separation"]).select(graph)
        return schedule, co.MinSeparation.from_certificate(co.certify(graph, schedule))
    bound = point["contribution_bound"]
    if point["mechanism"] in (CYCLIC, ALLOCATED):
        number = point["num_groups"]
        selector = co.CyclicGroups(num_groups=number, contribution_bound=bound) if number > 1 else None
        selection = (selector or co.Greedy(contribution_bound=bound)).select(graph)
        kind = co.CyclicPoisson if point["mechanism"] == CYCLIC else co.RandomAllocation
        return selection, kind.from_certificate(co.certify(graph, selection), **steps)
    selection = co.Greedy(contribution_bound=bound).select(graph)
    return selection, co.PoissonSampling.from_certificate(co.certify(graph, selection), **steps)


def frontier(rows: list[Row]) -> pl.DataFrame:
    """The least error of each mechanism by graph and epsilon, with the examples it keeps."""
    table = pl.DataFrame(rows, infer_schema_length=None).explode("epsilon", "noise_multiplier", "error")
    least = table.drop_nulls("error").sort("error")
    return least.unique(["graph", "mechanism", "epsilon"], keep="first").sort("graph", "mechanism", "epsilon")


def draw(rows: list[Row]) -> alt.Chart:
    return (
        alt.Chart(frontier(rows))
        .mark_line(point=True)
        .encode(
            x=alt.X("epsilon:Q").scale(type="log", base=2),
            y=alt.Y("error:Q", title="error of prefix sums").scale(type="log"),
            color=alt.Color("mechanism:N", title=None),
            column=alt.Column("graph:N", title=None),
        )
        .properties(width=180, height=180)
        .resolve_scale(y="independent")
    )


def claims(rows: list[Row]) -> list[Verdict]:
    table = frontier(rows)
    wide = table.pivot("mechanism", index=["graph", "epsilon"], values="error").sort("graph", "epsilon")
    distinct = table.pivot("mechanism", index=["graph", "epsilon"], values="num_distinct").sort("graph", "epsilon")
    if not {SGD, SEPARATED} <= set(wide.columns):
        return unrun(CLAIMS)
    wide, distinct = wide.drop_nulls([SGD, SEPARATED]), distinct.drop_nulls([SGD, SEPARATED])
    crossings = {
        graph: [line[SEPARATED] < line[SGD] for line in own.to_dicts()]
        for (graph,), own in wide.group_by("graph", maintain_order=True)
    }
    right = sum(wins[-1] and not wins[0] for wins in crossings.values())
    fewer = distinct.filter(wide[SEPARATED] < wide[SGD])
    pays = int((fewer[SEPARATED] < fewer[SGD]).sum())
    shown = "; ".join(
        f"{line['graph']}, epsilon {line['epsilon']:g}: {line[SEPARATED]:.3g} against {line[SGD]:.3g}"
        for line in wide.to_dicts()
    )
    kept = "; ".join(
        f"{line['graph']}, epsilon {line['epsilon']:g}: {line[SEPARATED]:,} against {line[SGD]:,}"
        for line in fewer.to_dicts()
    )
    return [
        judge_cases(
            CLAIMS[0],
            right,
            len(crossings),
            f"smallest error, min separation against DP-SGD: {shown}",
            "Amplification by sampling fades as epsilon grows; correlated noise keeps its advantage.",
        ),
        judge_cases(
            CLAIMS[1],
            pays,
            fewer.height,
            f"distinct examples where it wins: {kept or 'nowhere'}",
            "DP-SGD's smallest error is at bound 1, which also keeps few; larger bounds keep more but err more.",
        ),
        _cyclic(rows),
        _allocated(rows),
    ]


def _cyclic(rows: list[Row]) -> Verdict:
    """Best number of groups against DP-SGD at the same bound, for every graph, bound and epsilon."""
    table = pl.DataFrame(rows, infer_schema_length=None).explode("epsilon", "noise_multiplier", "error")
    table = table.drop_nulls("error").filter(pl.col("mechanism").is_in([SGD, CYCLIC]))
    index = ["graph", "contribution_bound", "epsilon"]
    wide = table.pivot("mechanism", index=index, values="error", aggregate_function="min").drop_nulls()
    if CYCLIC not in wide.columns or wide.is_empty():
        return unrun(CLAIMS[2:3])[0]
    ratio = wide[CYCLIC] / wide[SGD]
    good = int((ratio <= 1.01).sum())
    return judge_cases(
        CLAIMS[2],
        good,
        len(ratio),
        f"error over DP-SGD's from {ratio.min():.3f} to {ratio.max():.3f}; at most 1.01 in {good} of "
        f"{len(ratio)} cases",
        "Groups are sampled with a larger probability in fewer rounds; the best number of groups is used.",
    )


def _allocated(rows: list[Row]) -> Verdict:
    """Random allocation against cyclic sampling in the same groups, at bound 1, for every graph and epsilon."""
    table = pl.DataFrame(rows, infer_schema_length=None).explode("epsilon", "noise_multiplier", "error")
    table = table.drop_nulls("error").filter(pl.col("contribution_bound") == 1, pl.col("num_groups") > 1)
    wide = table.pivot("mechanism", index=["graph", "num_groups", "epsilon"], values="error").drop_nulls()
    if not {ALLOCATED, CYCLIC} <= set(wide.columns) or wide.is_empty():
        return unrun(CLAIMS[3:])[0]
    ratio = wide[ALLOCATED] / wide[CYCLIC]
    smaller = int((ratio < 1).sum())
    return judge_cases(
        CLAIMS[3],
        smaller,
        len(ratio),
        f"error over cyclic DP-MF's from {ratio.min():.3f} to {ratio.max():.3f}; smaller in {smaller} of "
        f"{len(ratio)} cases",
        "One round of each epoch needs less noise than coins of that rate. An epoch has a whole number of rounds, "
        "so that batches are a little larger or smaller than asked for; with one round both are the same.",
    )
