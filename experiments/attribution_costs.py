"""What does attribution to everyone cost, and what is a sender-only claim worth? (beyond the paper)

Logistic regression on hashed words: was an abstract or message written in the later half of the years?
"""

import functools
import itertools
from typing import NamedTuple

import altair as alt
import numpy as np
import polars as pl

import coowned as co
from coowned.content.data import FeatureTable
from coowned.errors import UncertifiableError
from coowned.progress import counted
from coowned.synthetic.logistic_data import LogisticData
from coowned.synthetic.toy_emails import hashed_words
from experiments.framework import logistic
from experiments.framework.graphs import data_file, real_graph
from experiments.framework.rows import Point, Row
from experiments.framework.verdicts import Verdict, combine, judge, judge_cases, unrun, with_interval

DATA = ("ACL", "mailing list")
CLAIMS = (
    "At the same claimed epsilon, attribution to everyone costs accuracy (ours).",
    "A claim for first users only is false for the other users (ours).",
)
EPSILONS = (2.0, 8.0)
SEEDS = (1, 2, 3, 4, 5)  # of splits, selections, coins and noise; each is tuned on its own validation examples
QUANTILES = (0.5, 0.9, 0.99, 1.0)
EVERYONE, FIRST = "everyone", "first user alone"
YEAR = {"ACL": "year", "mailing list": "date"}


def _points(
    graphs: tuple[str, ...], bounds: tuple[int, ...], batch_size: int, iterations: int, seeds: tuple[int, ...] = SEEDS
) -> list[Point]:
    return [
        {
            "graph": graph,
            "contribution_bound": bound,
            "attribution": attribution,
            "batch_size": batch_size,
            "iterations": iterations,
            "seed": seed,
        }
        for seed, graph, bound, attribution in itertools.product(seeds, graphs, bounds, (EVERYONE, FIRST))
    ]


GRID = {
    "ci": _points(("made up",), (2,), 16, 10, (1, 2)),
    "small": _points(("ACL", "mailing list"), (1, 5), 512, 1000),
    "paper": [],
}


class Corpus(NamedTuple):
    graph: co.AttributionGraph
    first_users: np.ndarray  # (examples,) sender or first author, as an integer; a graph keeps no order of users
    features: np.ndarray  # (examples, features) hashed words
    labels: np.ndarray  # (examples,)


@functools.lru_cache(maxsize=1)
def corpus(name: str) -> Corpus:
    graph = real_graph(name)
    if name == "made up":
        content = LogisticData(num_features=8).attach(graph, seed=0).batch(np.arange(graph.num_examples))
        return Corpus(graph, np.arange(graph.num_examples) % graph.num_users, *content)
    table = pl.read_parquet(data_file(name), columns=["users", "text", YEAR[name]])
    years = table[YEAR[name]].cast(pl.String).str.head(4).cast(pl.Int32).to_numpy()
    first = table["users"].list.first().fill_null("").rank("dense").to_numpy() - 1
    words = hashed_words(table["text"].fill_null(""), 512)
    return Corpus(graph, first, words, (years > np.median(years)).astype(np.int8))


def owned_alone(users: np.ndarray) -> co.AttributionGraph:
    """Example i belongs to users[i] and nobody else."""
    return co.AttributionGraph.from_csr(np.arange(len(users) + 1), users, num_users=int(users.max()) + 1)


def run(point: Point) -> Row:
    """One sweep at the same claim, and a recount of S for everyone."""
    graph, first, features, labels = corpus(point["graph"])
    order = np.random.default_rng(point["seed"]).permutation(graph.num_examples)
    train, validation, test = np.split(order, [len(order) * 8 // 10, len(order) * 9 // 10])
    train = np.sort(train)
    everyone = graph.subgraph(train)
    claimed = everyone if point["attribution"] == EVERYONE else owned_alone(first[train])
    selection = co.Greedy(contribution_bound=point["contribution_bound"]).select(claimed, seed=point["seed"])
    mechanism = co.PoissonSampling.from_certificate(
        co.certify(claimed, selection), batch_size=point["batch_size"], iterations=point["iterations"]
    )
    setting = logistic.Setting(
        FeatureTable(graph=claimed, features=features[train], labels=labels[train]),
        selection,
        mechanism,
        EPSILONS,
        validation=[logistic.HeldOut(features[validation], labels[validation], labels[validation])],
        test=[logistic.HeldOut(features[test], labels[test], labels[test])],
    )
    trained = logistic.first_pass(setting, seed=point["seed"], keep=1)
    copies = np.bincount(everyone.users, np.repeat(selection.copies, everyone.users_per_example)).astype(int)
    levels = np.quantile(copies[copies > 0], QUANTILES, method="higher").astype(int)
    return {
        **trained,
        "quantiles": list(QUANTILES),
        "copies_of_users": levels.tolist(),
        "epsilon_of_users": [_epsilon(mechanism, int(level), trained["noise_multiplier"][-1]) for level in levels],
        "most_frequent_class": float(max(labels[test].mean(), 1 - labels[test].mean())),
    }


def _epsilon(mechanism: co.PoissonSampling, copies: int, noise_multiplier: float) -> float | None:
    """What the run promises a user in so many copies; None above 10,000, which protects nobody."""
    actual = co.PoissonSampling(
        contribution_bound=copies,
        sampling_probability=mechanism.sampling_probability,
        iterations=mechanism.iterations,
    )
    try:
        return co.epsilon(actual, noise_multiplier=noise_multiplier, delta=logistic.DELTA, adjacency=logistic.ADJACENCY)
    except UncertifiableError:
        return None


def accuracies(rows: list[Row]) -> dict[tuple, dict[str, list[float]]]:
    """Test accuracies over seeds by attribution, by graph, bound and epsilon."""
    found: dict[tuple, dict[str, list[float]]] = {}
    for row in rows:
        for epsilon, accuracy in zip(row["epsilon"], row["test"], strict=True):
            case = found.setdefault((row["graph"], row["contribution_bound"], epsilon), {})
            case.setdefault(row["attribution"], []).append(accuracy)
    return found


def draw(rows: list[Row]) -> alt.FacetChart:
    """Test accuracy; bars: 95% intervals over seeds."""
    lines = []
    for (graph, bound, epsilon), case in accuracies(rows).items():
        for attribution, values in case.items():
            effect = combine([(1.0, values)]) if len(values) > 1 else None
            low, high = effect.interval() if effect else (None, None)
            line = {"data": f"{graph}, k = {bound}", "claim": f"epsilon {epsilon:g}", "attribution": attribution}
            lines.append(line | {"test": sum(values) / len(values), "low": low, "high": high})
    base = alt.Chart(pl.DataFrame(lines, infer_schema_length=None)).encode(
        y=alt.Y("data:N", title=None), color=alt.Color("attribution:N", title="attributed to")
    )
    points = base.mark_point(filled=True, size=60).encode(x=alt.X("test:Q", title="test accuracy").scale(zero=False))
    return (
        (base.mark_rule().encode(x="low:Q", x2="high:Q") + points)
        .properties(width=220, height=alt.Step(26))
        .facet(column=alt.Column("claim:N", title=None, sort="descending"))
    )


def claims(rows: list[Row]) -> list[Verdict]:
    """Accuracy lost, mean over all cases; and whether any user is in more copies than was claimed, in every row."""
    cases = {
        case: [(1.0, own[FIRST]), (-1.0, own[EVERYONE])]
        for case, own in accuracies(rows).items()
        if all(len(own.get(name, ())) > 1 for name in (FIRST, EVERYONE))
    }
    if not cases:
        return unrun(CLAIMS)
    effect = combine(logistic.mean(cases.values()))
    shown = "; ".join(
        f"{with_interval(combine(cost))} ({graph}, k = {bound}, epsilon {epsilon:g})"
        for (graph, bound, epsilon), cost in cases.items()
    )
    first = [row for row in rows if row["attribution"] == FIRST]
    broken = sum(row["copies_of_users"][-1] > row["contribution_bound"] for row in first)
    once = [row for row in first if row["seed"] == first[0]["seed"]]
    worth = "; ".join(f"{row['graph']}, k = {row['contribution_bound']}: {_worth(row)}" for row in once)
    return [
        judge(
            CLAIMS[0],
            [effect],
            f"accuracy lost, mean over all cases, in points: {with_interval(effect)}. By case: {shown}",
            above=0.0,
            why="S is smaller if everyone counts, so the same claim needs more noise.",
            seeds=f"{SEEDS[0]} to {SEEDS[-1]}",
        ),
        judge_cases(
            CLAIMS[1],
            broken,
            len(first),
            f"true epsilon of everybody in S where epsilon {EPSILONS[-1]:g} is claimed for first users (seed "
            f"{first[0]['seed']}): {worth}",
            "The bound was never enforced for recipients and co-authors.",
        ),
    ]


def _worth(row: Row) -> str:
    """What users have of a claim, by how many copies they are in."""
    levels = zip(row["quantiles"], row["copies_of_users"], row["epsilon_of_users"], strict=True)
    return ", ".join(
        f"{share:.0%} of users at most {counted(copies, 'copy', 'copies')}, epsilon "
        + ("above 10,000" if epsilon is None else f"{epsilon:.3g}")
        for share, copies, epsilon in levels
    )
