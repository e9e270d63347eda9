"""What does it cost to let some people have a smaller bound? (beyond the paper: bounds for single users)

A share of the people, drawn by their keys alone, asks for one copy; all others allow three. The noise is calibrated so
that the worst-off person has the same epsilon everywhere.
"""

import itertools

import altair as alt
import numpy as np
import polars as pl

import coowned as co
from coowned.selection.user_bounds import UserBounds
from experiments.framework.graphs import real_graph
from experiments.framework.rows import Point, Row
from experiments.framework.verdicts import Verdict, judge_cases

DATA = ("ACL", "arXiv", "mailing list")
CLAIMS = (
    "With a tenth of the people at bound 1, S is larger than with everybody at bound 1 (ours).",
    "At the same worst epsilon, those at bound 1 have at most half of it (ours).",
)
SELECTORS = {"greedy": co.Greedy, "priced": co.Priced}
SHARES = (0.0, 0.1, 0.5, 1.0)  # of people with the smaller bound
OPEN, CAREFUL = 3, 1  # the two bounds
OUT = 0.01  # share of people who opt out, in one more row
WORST = {"epsilon": 8.0, "delta": 1e-8, "adjacency": "zero-out"}


def _points(graphs: tuple[str, ...], sizes: dict[str, int]) -> list[Point]:
    shares = [{"careful": share, "out": 0.0} for share in SHARES] + [{"careful": 0.0, "out": OUT}]
    return [
        {"graph": graph, "selector": selector, **share, **sizes}
        for graph, selector, share in itertools.product(graphs, SELECTORS, shares)
    ]


GRID = {
    "ci": _points(("made up",), {"batch_size": 32, "iterations": 20}),
    "small": _points(DATA, {"batch_size": 1024, "iterations": 2500}),
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
    """Size, distinct examples and noise multiplier, and the epsilon of either tier."""
    graph = real_graph(point["graph"])
    bounds = bounds_of(graph, point["careful"], point["out"])
    selection = SELECTORS[point["selector"]](contribution_bound=OPEN, contribution_bounds=bounds).select(graph)
    certificate = co.certify(graph, selection)
    mechanism = co.PoissonSampling.from_certificate(
        certificate, batch_size=point["batch_size"], iterations=point["iterations"]
    )
    claim = co.guarantee(certificate, mechanism, **WORST)
    tiers, epsilons = certificate.tiers, dict(claim.by_tier().select("tier", "epsilon").iter_rows())
    assert tiers is not None
    return {
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


def draw(rows: list[Row]) -> alt.FacetChart:
    """Size of S against the share of people at bound 1."""
    table = pl.DataFrame(rows, infer_schema_length=None).filter(pl.col("out") == 0)
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


def claims(rows: list[Row]) -> list[Verdict]:
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
    ]
