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
from coowned.synthetic.hashed_words import hashed_words
from coowned.synthetic.logistic_data import LogisticData
from experiments.framework import logistic
from experiments.framework.graphs import FILES, data_folder, real_graph
from experiments.framework.rows import Point, Row
from experiments.framework.verdicts import OPEN, Verdict, judge

CLAIMS = (
    "At the same claimed epsilon, attribution to everyone costs accuracy (ours).",
    "A claim for first users only is false for the other users (ours).",
)
EPSILONS = (2.0, 8.0)
QUANTILES = (0.5, 0.9, 0.99, 1.0)
EVERYONE, FIRST = "everyone", "first user alone"
YEAR = {"ACL": "year", "mailing list": "date"}


def _points(graphs: tuple[str, ...], bounds: tuple[int, ...], batch_size: int, iterations: int) -> list[Point]:
    return [
        {
            "graph": graph,
            "contribution_bound": bound,
            "attribution": attribution,
            "batch_size": batch_size,
            "iterations": iterations,
        }
        for graph, bound, attribution in itertools.product(graphs, bounds, (EVERYONE, FIRST))
    ]


GRID = {
    "ci": _points(("made up",), (2,), 16, 10),
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
    table = pl.read_parquet(data_folder() / FILES[name], columns=["users", "text", YEAR[name]])
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
    order = np.random.default_rng(0).permutation(graph.num_examples)
    train, validation, test = np.split(order, [len(order) * 8 // 10, len(order) * 9 // 10])
    train = np.sort(train)
    everyone = graph.subgraph(train)
    claimed = everyone if point["attribution"] == EVERYONE else owned_alone(first[train])
    selection = co.Greedy(contribution_bound=point["contribution_bound"]).select(claimed)
    mechanism = co.PoissonSampling.from_certificate(
        co.certify(claimed, selection), batch_size=point["batch_size"], iterations=point["iterations"]
    )
    trained = logistic.tuned(
        FeatureTable(graph=claimed, features=features[train], labels=labels[train]),
        selection,
        mechanism,
        validation=logistic.HeldOut(features[validation], labels[validation], labels[validation]),
        test=logistic.HeldOut(features[test], labels[test], labels[test]),
        epsilons=list(EPSILONS),
    )
    copies = np.bincount(everyone.users, np.repeat(selection.copies, everyone.users_per_example)).astype(int)
    levels = np.quantile(copies[copies > 0], QUANTILES, method="higher").astype(int)
    return {
        "epsilon": list(EPSILONS),
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


def draw(rows: list[Row]) -> alt.Chart:
    shown = logistic.by_epsilon(rows).with_columns(
        pl.format("{}, k = {}", "graph", "contribution_bound").alias("data"),
        pl.format("epsilon {}", pl.col("epsilon").cast(pl.Int64)).alias("claim"),
    )
    return (
        alt.Chart(shown)
        .mark_point(filled=True, size=60)
        .encode(
            x=alt.X("test:Q", title="test accuracy").scale(zero=False),
            y=alt.Y("data:N", title=None),
            color=alt.Color("attribution:N", title="attributed to"),
            column=alt.Column("claim:N", title=None, sort="descending"),
        )
        .properties(width=220, height=alt.Step(26))
    )


def claims(rows: list[Row]) -> list[Verdict]:
    index = ["graph", "contribution_bound", "epsilon"]
    wide = logistic.by_epsilon(rows).pivot("attribution", index=index, values="test")
    if not {EVERYONE, FIRST} <= set(wide.columns):
        return [Verdict(claim=claim, verdict=OPEN, found="") for claim in CLAIMS]
    costs = [
        (
            f"{line['graph']}, k = {line['contribution_bound']}, epsilon {line['epsilon']:g}",
            line[FIRST] - line[EVERYONE],
        )
        for line in wide.drop_nulls().to_dicts()
    ]
    first = [row for row in rows if row["attribution"] == FIRST]
    broken = sum(row["copies_of_users"][-1] > row["contribution_bound"] for row in first)
    worth = "; ".join(f"{row['graph']}, k = {row['contribution_bound']}: {_worth(row)}" for row in first)
    return [
        judge(
            CLAIMS[0],
            sum(cost > 0 for _, cost in costs),
            len(costs),
            "accuracy lost, in points: " + "; ".join(f"{100 * cost:+.2f} ({name})" for name, cost in costs),
            "S is smaller if everyone counts, so the same claim needs more noise.",
        ),
        judge(
            CLAIMS[1],
            broken,
            len(first),
            f"true epsilon of everybody in S where epsilon {EPSILONS[-1]:g} is claimed for first users: {worth}",
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
