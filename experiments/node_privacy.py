"""Is there an actionable attack on a person's presence? (beyond the paper, which leaves it open)

A person leaves with every example they are part of, and S is selected again with the same seed. How many copies of
*other* people's examples change is what the fixed-graph guarantee does not count: for people at random by selecting
again, and for everyone where the order is fixed. Small worlds are then trained many times with and without a person,
and an attacker who knows everything else, and perhaps the published size of S, guesses which.
"""

import functools
import itertools
import math
from typing import Any

import altair as alt
import numpy as np
import polars as pl

import coowned as co
from coowned.attribution.graph import AttributionGraph
from coowned.audit.bob import measure_leak, retrain
from coowned.audit.checks import lower_bound, upper_bound
from coowned.content.data import FeatureTable, with_norms
from coowned.exact.keys import RunKey
from coowned.progress import silent
from coowned.selection.order import hash_order, ordered_rows
from coowned.training.loop import Trainer
from coowned.training.plan import TrainingPlan
from experiments.framework.graphs import real_graph, synthetic_graph
from experiments.framework.leaving import leave, walk_of
from experiments.framework.rows import Point, Row
from experiments.framework.verdicts import Effect, Verdict, judge

DATA = ("ACL", "arXiv", "mailing list")
CLAIMS = (
    "On real graphs, a person who leaves changes at most 3 copies of others in 90% of cases (ours).",
    "Where a hand-made chain is walked in input order, presence is told beyond the claimed epsilon (ours).",
    "With hashed ties, presence is told beyond the claimed epsilon in some small world (ours).",
    "A chain built by somebody who knows the seed tells presence beyond the claimed epsilon with hashed ties (ours).",
    "Where the size of S is published, presence is told beyond the claimed epsilon in some small world (ours).",
)
PAGE = "docs/results.md"
INPUT = "greedy, input order"
SELECTORS: dict[str, Any] = {
    "greedy": co.Greedy,
    "bias-mitigating": functools.partial(
        co.BiasMitigating, threshold=2, few_user_run=2, many_user_run=1, allow_duplicates=False
    ),
    "priced": co.Priced,
    INPUT: functools.partial(co.Greedy, ties="input"),
}
HASHED = ("greedy", "bias-mitigating", "priced")
HASH_ALONE, FIRST_ONES = "greedy, hash alone", "first of each person"
CHAIN, SKEWED = "chain", "skewed"
KNOWN_SEED = "chain, seed known"  # whose examples follow one another in the order of their hashes
BOUNDS = {CHAIN: 1, KNOWN_SEED: 1}  # 3 elsewhere
SIZE = "size of S"
PEOPLE, LARGEST = 100, 20  # drawn at random, and with the most examples
TRIALS, ALPHA, FEATURES = 400, 1e-3, 8
CLAIM = {"epsilon": 1.0, "delta": 1e-5, "adjacency": "zero-out"}
BATCH, ITERATIONS, RATE = 32, 24, 0.5


def _stability(graphs: tuple[str, ...], selectors: tuple[str, ...], people: int = PEOPLE) -> list[Point]:
    return [
        {"part": "stability", "graph": graph, "selector": selector, "people": people}
        for graph, selector in itertools.product(graphs, selectors)
    ]


def _attacks(trials: int, *worlds: tuple[str, str, str, str]) -> list[Point]:
    return [
        {"part": "attack", "graph": graph, "selector": selector, "person": person, "content": content, "trials": trials}
        for graph, selector, person, content in worlds
    ]


def _everyone(*graphs: str) -> list[Point]:
    return [
        {"part": "everyone", "graph": graph, "selector": rule} for graph, rule in itertools.product(graphs, EVERYONE)
    ]


def _published(points: list[Point]) -> list[Point]:
    return [point | {"released": SIZE} for point in points]


EVERYONE = ("greedy", INPUT, HASH_ALONE, FIRST_ONES)
GRID = {
    "ci": _stability(("made up", CHAIN), ("greedy", INPUT), 5)
    + _attacks(16, (CHAIN, INPUT, "worst", "worst case"), (SKEWED, "greedy", "random", "drawn"))
    + _published(_attacks(16, (SKEWED, "greedy", "random", "drawn")))
    + _everyone("made up", KNOWN_SEED),
    "small": _attacks(
        TRIALS,
        (CHAIN, INPUT, "worst", "worst case"),
        (SKEWED, "greedy", "worst", "worst case"),
    )
    + _stability(("ACL", "mailing list", CHAIN), ("greedy", "bias-mitigating", INPUT), 100)
    + _stability(("ACL", "mailing list", CHAIN), ("priced",), 20)
    + _attacks(
        TRIALS,
        (SKEWED, "bias-mitigating", "worst", "worst case"),
        (SKEWED, "greedy", "random", "worst case"),
        (SKEWED, "greedy", "worst", "drawn"),
        (CHAIN, "greedy", "worst", "worst case"),
    )
    + _stability(("arXiv",), ("greedy", "bias-mitigating"), 20)
    + _everyone("ACL", "mailing list", "arXiv", CHAIN, KNOWN_SEED)
    + _attacks(TRIALS, (KNOWN_SEED, "greedy", "worst", "worst case"))
    + _published(
        _attacks(
            TRIALS,
            (SKEWED, "greedy", "worst", "worst case"),
            (SKEWED, "greedy", "random", "drawn"),
            (SKEWED, "bias-mitigating", "worst", "worst case"),
            (CHAIN, INPUT, "worst", "worst case"),
        )
    ),
    "paper": [],
}


def cost(point: Point) -> float:
    return 1.0 + 9.0 * (point.get("selector") == "priced")


@functools.lru_cache(maxsize=2)
def graph_of(name: str, small: bool = False) -> co.AttributionGraph:
    """Returns a graph; those of the attack are small."""
    if name in (CHAIN, KNOWN_SEED):
        length = 300 if small else 2000
        at = np.arange(length)  # of each example
        if name == KNOWN_SEED:
            at[hash_order(np.full(length, 2, np.int32), None, seed=0, progress=silent)] = np.arange(length)
        return co.AttributionGraph.from_users_per_example([[i, i + 1] for i in at.tolist()])
    return synthetic_graph(name, 1_500, 4) if name == SKEWED else real_graph(name)


def choose(name: str, graph: co.AttributionGraph, bound: int) -> co.Selection:
    return SELECTORS[name](contribution_bound=bound).select(graph)


def without(graph: co.AttributionGraph, person: int) -> np.ndarray:
    """Returns the examples that stay when a person leaves."""
    indptr, examples = graph.by_user
    stays = np.ones(graph.num_examples, bool)
    stays[examples[indptr[person] : indptr[person + 1]]] = False
    return np.flatnonzero(stays)


def changed_copies(name: str, graph: co.AttributionGraph, whole: co.Selection, person: int, bound: int) -> int:
    """Returns how many copies of examples without this person are in one of the two S and not in the other."""
    rest = without(graph, person)
    again = choose(name, graph.subgraph(rest), bound)
    return int(np.abs(again.copies - whole.copies[rest]).sum())


def run(point: Point) -> Row:
    return {"stability": stability, "everyone": everyone, "attack": attack}[point["part"]](point)


def everyone(point: Point) -> Row:
    """Copies of others that change for every person, and whether the size of S does: what statements publish."""
    rule, graph = point["selector"], graph_of(point["graph"])
    people = np.flatnonzero(graph.examples_per_user)
    walk = walk_of(graph, _order(rule, graph))
    chosen, left = leave(walk, BOUNDS.get(point["graph"], 3), people, first_ones=rule == FIRST_ONES)
    degrees, worst = graph.examples_per_user[people], int(left.changed.argmax())
    of_class = np.log2(degrees).astype(int)
    classes = [left.changed[of_class == number] for number in range(of_class.max() + 1)]
    return {
        "num_examples": graph.num_examples,
        "num_people": len(people),
        "size": int(chosen.taken.sum()),
        "mean_changed": float(left.changed.mean()),
        "percentile_99": float(np.quantile(left.changed, 0.99)),
        "worst_changed": int(left.changed[worst]),
        "worst_degree": int(degrees[worst]),
        "share_unchanged": float((left.changed == 0).mean()),
        "share_of_sizes_changed": float((left.gained != left.own).mean()),
        "people_by_degree": [len(found) for found in classes],  # 1, 2 to 3, 4 to 7, …
        "mean_by_degree": [float(found.mean()) if len(found) else None for found in classes],
        "worst_by_degree": [int(found.max()) if len(found) else None for found in classes],
    }


def _order(rule: str, graph: AttributionGraph) -> np.ndarray:
    """The examples with users, as they are visited."""
    if rule == HASH_ALONE:
        order = hash_order(np.zeros(graph.num_examples, np.int32), graph.example_ids, seed=0, progress=silent)
        return order[graph.users_per_example[order] > 0]
    return ordered_rows(graph, seed=0, ties="input" if rule == INPUT else "hash", progress=silent).attributed


def stability(point: Point) -> Row:
    """Copies of others that change, for people at random and for those with the most examples."""
    name, graph = point["selector"], graph_of(point["graph"])
    bound = BOUNDS.get(point["graph"], 3)
    whole = choose(name, graph, bound)
    people = np.flatnonzero(graph.examples_per_user)
    drawn = np.random.default_rng(0).permutation(people)[: point["people"]]
    largest = people[np.argsort(-graph.examples_per_user[people], kind="stable")][: min(LARGEST, point["people"])]
    ends = people[[0, -1]]  # of a chain, where a change begins to travel
    chosen = np.concatenate([largest, ends])
    found = [[changed_copies(name, graph, whole, int(p), bound) for p in group] for group in (drawn, chosen)]
    return {
        "num_examples": graph.num_examples,
        "contribution_bound": bound,
        "size": whole.size,
        "degrees": graph.examples_per_user[drawn].tolist(),
        "own_copies": [int(whole.size - whole.copies[without(graph, int(p))].sum()) for p in drawn],
        "changed": found[0],
        "chosen_degrees": graph.examples_per_user[chosen].tolist(),
        "chosen_changed": found[1],
    }


def attack(point: Point) -> Row:
    """What an attacker proves who knows all content and both graphs, and asks whether a person took part."""
    name, graph = point["selector"], graph_of(point["graph"], small=True)
    bound = BOUNDS.get(point["graph"], 3)
    whole = choose(name, graph, bound)
    person, changed = _person(point, graph, whole, bound)
    rest = without(graph, person)
    again = choose(name, graph.subgraph(rest), bound)
    copies_without = np.zeros(graph.num_examples, np.int64)
    copies_without[rest] = again.copies
    features, labels = _content(point["content"], whole.copies - copies_without)
    plans = {True: _plan(graph, whole), False: _plan(graph.subgraph(rest), again)}
    table = FeatureTable(graph=graph, features=features, labels=labels)
    small = FeatureTable(graph=graph.subgraph(rest), features=features[rest], labels=labels[rest])
    tables = {True: with_norms(table), False: with_norms(small)}
    question = _mean_gradient(features, labels, copies_without) - _mean_gradient(features, labels, whole.copies)
    model = co.LogisticRegression(num_features=FEATURES)
    start = model.initial()
    # Who sees the size of S and knows everything else compares it with what it would be with this person.
    seen = 1e6 * np.sign(whole.size - again.size) if point.get("released") == SIZE else 0.0

    def score(included: bool, number: int) -> float:
        trainer = Trainer([_with_key(plans[included], 1 + number)], model)
        return included * seen + float(
            question @ trainer.train(tables[included], start)["coefficients"][0].astype(np.float64)
        )

    leak = measure_leak(*retrain(score, trials=point["trials"]), delta=CLAIM["delta"], alpha=ALPHA)
    claimed = [plan.guarantee.epsilon for plan in plans.values() if plan.guarantee is not None]
    tested = point["trials"] // 4
    power = math.log(float(lower_bound(tested, tested, ALPHA / 2)) / float(upper_bound(0, tested, ALPHA / 2)))
    return {
        "num_examples": graph.num_examples,
        "contribution_bound": bound,
        "size": whole.size,
        "size_without": again.size,
        "degree": int(graph.examples_per_user[person]),
        "own_copies_of_person": int(whole.copies.sum() - whole.copies[rest].sum()),
        "changed_copies": changed,
        "claimed_epsilon": max(claimed),
        "epsilon_lower_bound": leak.epsilon_lower_bound,
        "true_positive_rate": leak.true_positive_rate,
        "false_positive_rate": leak.false_positive_rate,
        "largest_provable": power,
    }


def _person(point: Point, graph: co.AttributionGraph, whole: co.Selection, bound: int) -> tuple[int, int]:
    """Returns a person and how many copies of others change: at random, or the worst of those that were tried."""
    people = np.flatnonzero(graph.examples_per_user)
    count = 1 if point["person"] == "random" else min(PEOPLE, point["trials"])
    drawn = np.random.default_rng(1).permutation(people)[:count]
    if point["person"] == "worst":
        drawn = np.unique(np.concatenate([drawn, people[[0, -1]]]))
    counts = [changed_copies(point["selector"], graph, whole, int(p), bound) for p in drawn]
    return int(drawn[np.argmax(counts)]), int(max(counts))


def _content(kind: str, difference: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns features and labels: drawn, or such that every copy that differs moves the model the same way."""
    rng = np.random.default_rng(2)
    features = rng.normal(size=(len(difference), FEATURES)).astype(np.float32)
    labels = rng.integers(0, 2, len(difference)).astype(np.int32)
    if kind == "worst case":
        features *= 0.01
        apart = difference != 0
        features[apart], labels[apart] = 0, 1
        features[apart, 0] = 10.0 * np.sign(difference[apart])
    return features, labels


def _mean_gradient(features: np.ndarray, labels: np.ndarray, copies: np.ndarray) -> np.ndarray:
    """Returns the mean clipped gradient of S at parameters of zero: what the attacker expects of a step."""
    extended = np.column_stack([features, np.ones(len(features))]).astype(np.float64)
    gradients = (0.5 - labels)[:, None] * extended
    gradients /= np.maximum(1.0, np.linalg.norm(gradients, axis=1, keepdims=True) / 0.5)
    return copies @ gradients / copies.sum()


def _plan(graph: co.AttributionGraph, selection: co.Selection) -> TrainingPlan:
    certificate = co.certify(graph, selection)
    mechanism = co.PoissonSampling.from_certificate(certificate, batch_size=BATCH, iterations=ITERATIONS)
    return TrainingPlan(
        certificate=certificate,
        selected=selection,
        mechanism=mechanism,
        guarantee=co.guarantee(certificate, mechanism, test_run=True, **CLAIM),
        clip_norm=0.5,
        optimizer="sgd",
        learning_rate=RATE,
        run_key=RunKey.from_seed(0),
    )


def _with_key(plan: TrainingPlan, number: int) -> TrainingPlan:
    import dataclasses

    return dataclasses.replace(plan, run_key=RunKey.from_seed(number))


def draw(rows: list[Row]) -> alt.LayerChart:
    """Copies of others that change when a person leaves, by the person's examples."""
    own = [row for row in rows if row["part"] == "stability"]
    kinds = {"graph": pl.String, "selector": pl.String, "degrees": pl.List(pl.Int64), "changed": pl.List(pl.Int64)}
    points = [{name: row[name] for name in kinds} for row in own]
    table = pl.DataFrame(points, schema=kinds).select(
        pl.format("{}: {}", "graph", "selector").alias("where"), pl.col("degrees"), pl.col("changed")
    )
    table = table.explode("degrees", "changed").with_columns(pl.col("changed") + 1, pl.col("degrees"))
    return (
        alt.Chart(table)
        .mark_circle(size=18, opacity=0.5)
        .encode(
            x=alt.X("degrees:Q", title="examples of the person").scale(type="log"),
            y=alt.Y("changed:Q", title="1 + copies of others that change").scale(type="log"),
        )
        .properties(width=130, height=110)
        .facet(facet=alt.Facet("where:N", title=None), columns=4)
    )


def pictures(rows: list[Row]) -> dict[str, alt.FacetChart]:
    """Of everyone: mean and worst number of copies of others that change, by the person's examples."""
    own = [row for row in rows if row["part"] == "everyone"]
    if not own:
        return {}
    lines = [
        {"graph": row["graph"], "rule": row["selector"], "examples": 2**number, "mean": mean, "worst": worst}
        for row in own
        for number, (mean, worst) in enumerate(zip(row["mean_by_degree"], row["worst_by_degree"], strict=True))
        if mean is not None
    ]
    base = alt.Chart(pl.DataFrame(lines)).encode(
        x=alt.X("examples:Q", title="examples of the person, at least").scale(type="log"),
        color=alt.Color("rule:N", title=None, sort=list(EVERYONE)),
    )
    count = {"title": "copies of others: mean (line), worst (point)", "axis": alt.Axis(values=[0, 1, 10, 100, 1000])}
    mean = base.mark_line().encode(y=alt.Y("mean:Q", **count).scale(type="symlog"))
    worst = base.mark_point(size=20).encode(y=alt.Y("worst:Q", **count).scale(type="symlog"))
    chart = (mean + worst).properties(width=170, height=170).facet(facet=alt.Facet("graph:N", title=None), columns=3)
    return {"node_privacy_everyone": chart}


def table(rows: list[Row]) -> str:
    """What the leaving of everyone changes, by graph and rule, in Markdown."""
    lines = ["| graph | rule | size of S | people | mean | 99th percentile | worst | nothing | size of S changes |"]
    lines.append("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for row in (row for row in rows if row["part"] == "everyone"):
        lines.append(
            f"| {row['graph']} | {row['selector']} | {row['size']:,} | {row['num_people']:,} | "
            f"{row['mean_changed']:.2f} | {row['percentile_99']:,.0f} | {row['worst_changed']:,} | "
            f"{row['share_unchanged']:.1%} | {row['share_of_sizes_changed']:.1%} |"
        )
    return "\n".join(lines)


def claims(rows: list[Row]) -> list[Verdict]:
    real = [row for row in rows if row["part"] == "stability" and row["graph"] != CHAIN]
    real = [row for row in real if row["selector"] in HASHED]
    chains = [row for row in rows if row["part"] == "stability" and row["graph"] == CHAIN]
    sampled = [point for point in GRID["small"] if point["part"] == "stability" and point["graph"] != CHAIN]
    attacks = [row for row in rows if row["part"] == "attack"]
    return [
        judge(
            CLAIMS[0],
            [_share_within(row["changed"]) for row in real],
            "; ".join(map(_spread, real)),
            above=0.9,
            cases=len([point for point in sampled if point["selector"] in HASHED]),
            why=f"Hand-made chains: {'; '.join(map(_spread, chains))}." if chains else "",
        ),
        *(_judged(number, [row for row in attacks if _tested_by(row) == number]) for number in range(1, len(CLAIMS))),
    ]


def _tested_by(attack: Point) -> int:
    """The number of the claim that an attack is for."""
    if attack.get("released") == SIZE:
        return 4
    if attack["graph"] == KNOWN_SEED:
        return 3
    return 1 if attack["selector"] == INPUT else 2


def _judged(number: int, rows: list[Row]) -> Verdict:
    """The verdict on attacks, which waits for all cases that were named before any row."""
    named = [point for point in GRID["small"] if point["part"] == "attack" and _tested_by(point) == number]
    return judge(
        CLAIMS[number],
        list(map(_excess, rows)),
        "; ".join(map(_found, rows)),
        above=0.0,
        in_some=True,
        cases=len(named),
    )


def _share_within(changed: list[int]) -> Effect:
    """The share of people with at most three changes, with its exact 95% interval."""
    within, total = sum(count <= 3 for count in changed), len(changed)
    low, high = float(lower_bound(within, total, 0.025)), float(upper_bound(within, total, 0.025))
    return Effect(within / total, bounds=(low, high))


def _excess(row: Row) -> Effect:
    """Proven epsilon less what is claimed: the interval is open above, since an attack only proves a lower bound."""
    excess = row["epsilon_lower_bound"] - row["claimed_epsilon"]
    return Effect(excess, bounds=(excess, math.inf))


def _spread(row: Row) -> str:
    changed, chosen = np.array(row["changed"]), np.array(row["chosen_changed"])
    return (
        f"mean {changed.mean():.2f}, 99th percentile {np.quantile(changed, 0.99):.0f}, worst {changed.max()} of "
        f"{len(changed)} people, worst of {len(chosen)} chosen ones {chosen.max()}, S {row['size']:,} "
        f"({row['graph']}, {row['selector']})"
    )


def _found(row: Row) -> str:
    return (
        f"epsilon at least {row['epsilon_lower_bound']:.2f} (claimed {row['claimed_epsilon']:.2f}, provable "
        f"{row['largest_provable']:.2f}), {row['changed_copies']} copies of others ({row['graph']}, {row['selector']}, "
        f"{row['person']} person, {row['content']} content)"
    )
