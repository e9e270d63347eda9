"""How far are the defaults from the best of a full sweep in hindsight? (beyond the paper)

Eight small tasks, none of which the defaults were tuned on. A sweep has three selections, two shapes of batches, two
optimizers, rates and clip norms; the member that is best on validation is compared with the defaults, on test.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import altair as alt
import numpy as np
import polars as pl

import coowned as co
from coowned.attribution.examples import AttributedExamples
from coowned.content.splits import split_examples
from coowned.synthetic.logistic_data import LogisticData
from coowned.synthetic.toy_emails import EmailWorld
from experiments.framework.graphs import KINDS, data_file
from experiments.framework.rows import Point, Row
from experiments.framework.verdicts import FAILS, HOLDS, LEVEL, OPEN, UNRESOLVED, Effect, Verdict, with_interval

DATA = ("arXiv", "ACL", "mailing list", "math.AP")
CLAIMS = (
    "Over eight tasks at epsilon 1, 2 and 8, the defaults are within 1.5 points of the best of a sweep on average "
    "(ours).",
    "The defaults are in no case clearly below the trivial answer (ours).",
    "Of the runs that the outlook calls hopeless, at most one in ten clearly beats the trivial answer (ours).",
    "Of the runs that the outlook calls promising, at least nine in ten clearly beat the trivial answer, where the "
    "same model without privacy does (ours).",
)
PAGE = "docs/results.md"
MOST_LOST, FEW, MANY = 0.015, 0.1, 0.9
EPSILONS, FAINT = (1.0, 2.0, 8.0), (0.05,)  # the second is for the outlook alone
SEEDS = (0, 1)
SPLITS = (0.5, 0.2, 0.3)
CLAIM = {"delta": 1e-6, "adjacency": "zero-out"}
SELECTORS = (
    co.Greedy(contribution_bound=1),
    co.Greedy(contribution_bound=3),
    co.GreedyWithDuplicates(contribution_bound=8),
)
SHAPES = ((2, 200), (8, 400))  # S over the batch size, and steps
CLIP_NORMS = (0.05, 0.25, 1.0)
RATES = {"adam": (0.02, 0.07, 0.2, 0.6), "sgd": (1.0, 4.0, 16.0)}  # falling to 0 by a cosine


class Data(NamedTuple):
    """Examples, and the model that a user would ask for."""

    examples: AttributedExamples
    model: Any


def _text(table: pl.DataFrame, label: pl.Expr, *, size: int) -> Data:
    """Texts of 256 characters, hashed to 4,096 numbers, with a label from metadata; chosen by a hash of their ids."""
    rows = table.with_columns(label.alias("label"), pl.col("text").str.slice(0, 256)).drop_nulls("label")
    rows = rows.sort(pl.col("example_id").hash(seed=0)).head(size).select("example_id", "users", "text", "label")
    classes = sorted(rows["label"].unique())
    model = co.TextClassifier(text="text", label="label", classes=classes, num_features=2**12, character_ngrams=())
    return Data(co.from_table(rows, example_id="example_id"), model)


def _acl(seed: int) -> Data:
    del seed
    era = pl.when(pl.col("year") >= 2023).then(pl.lit("new")).when(pl.col("year") < 2020).then(pl.lit("old"))
    wanted = pl.col("venue").is_in(["acl", "emnlp", "naacl", "eacl", "findings", "coling"])
    return _text(pl.read_parquet(data_file("ACL")).filter(wanted), era, size=6000)


def _mailing_list(seed: int) -> Data:
    del seed
    subject, body = (pl.col("text").str.splitn("\n", 2).struct.field(f"field_{part}") for part in (0, 1))
    reply = pl.when(subject.str.contains("(?i)^re:")).then(pl.lit("reply")).otherwise(pl.lit("first"))
    table = pl.read_parquet(data_file("mailing list")).filter(pl.col("date").str.starts_with("2009"))
    return _text(table.with_columns(body.fill_null("").alias("text"), reply.alias("reply")), pl.col("reply"), size=6000)


def _math(seed: int) -> Data:
    del seed
    wanted = pl.col("primary_cat").is_in(["math.DG", "math-ph", "math.PR", "math.NA"])
    return _text(pl.read_parquet(data_file("math.AP")).filter(wanted), pl.col("primary_cat"), size=6000)


def _arxiv(seed: int) -> Data:
    """Which archive a paper is in, from three columns of its metadata at public scales."""
    del seed
    table = pl.read_parquet(data_file("arXiv")).filter(pl.col("year").is_between(2008, 2020))
    archive = pl.col("primary_cat").str.extract(r"^(cs|math|cond-mat)\.")
    rows = table.select(
        "example_id",
        "users",
        archive.alias("label"),
        ((pl.col("year") - 2014) / 6).alias("year"),
        (pl.col("abstract_chars") / 1000 - 1).alias("length"),
        (pl.col("users").list.len().clip(1, 20).log() - 1).alias("authors"),
    ).drop_nulls()
    rows = rows.sort(pl.col("example_id").hash(seed=0)).head(16_000)
    model = co.LogisticRegression(
        features=["year", "length", "authors"], label="label", classes=["cond-mat", "cs", "math"]
    )
    return Data(co.from_table(rows, example_id="example_id"), model)


def _logistic(kind: str, num_examples: int, num_features: int, seed: int) -> Data:
    graph = KINDS[kind](num_examples=num_examples).generate(seed=100 + seed)
    world = LogisticData(num_features=num_features).attach(graph, seed=100 + seed)
    features, labels = world.batch(np.arange(num_examples))
    return _table(graph, features, labels, classes=2)


def _clusters(seed: int) -> Data:
    """Five overlapping classes of which two are rare."""
    random = np.random.default_rng(seed)
    graph = KINDS["skewed"](num_examples=10_000).generate(seed=200 + seed)
    labels = random.choice(5, size=10_000, p=(0.4, 0.25, 0.2, 0.1, 0.05))
    centres = random.normal(size=(5, 20)) / math.sqrt(20)
    return _table(graph, centres[labels] + 0.6 * random.normal(size=(10_000, 20)), labels, classes=5)


def _table(graph: co.AttributionGraph, features: np.ndarray, labels: np.ndarray, *, classes: int) -> Data:
    names = [f"x{number}" for number in range(features.shape[1])]
    users = np.split(graph.users.astype(str), graph.indptr[1:-1])
    columns = dict(zip(names, features.astype(np.float32).T, strict=True))
    rows = pl.DataFrame({"users": [own.tolist() for own in users], "label": labels.astype(int), **columns})
    return Data(co.from_table(rows), co.LogisticRegression(features=names, label="label", classes=classes))


def _mail(num_people: int, num_emails: int, seed: int) -> Data:
    mail = EmailWorld(num_people=num_people, num_emails=num_emails).generate(seed=100 + seed)
    examples = co.from_table(mail, users="users", example_id="message_id")
    return Data(examples, co.TextClassifier(text=["subject", "text"], label="label"))


TASKS: dict[str, Callable[[int], Data]] = {
    "ACL: old or new": _acl,
    "mailing list: reply or not": _mailing_list,
    "math: four fields": _math,
    "arXiv: three archives": _arxiv,
    "regular logistic": functools.partial(_logistic, "regular", 8000, 30),
    "skewed logistic": functools.partial(_logistic, "skewed", 16_000, 100),
    "five clusters": _clusters,
    "toy mail": functools.partial(_mail, 500, 3000),
    "made up": functools.partial(_mail, 60, 400),
}
JUDGED = tuple(TASKS)[:-1]


def _points(tasks: tuple[str, ...], epsilons: tuple[float, ...], seeds: tuple[int, ...]) -> list[Point]:
    cases = itertools.product(seeds, tasks, epsilons)
    return [{"task": task, "epsilon": epsilon, "seed": seed} for seed, task, epsilon in cases]


GRID = {
    "ci": _points(("made up",), (8.0,), (0,)),
    "small": _points(JUDGED, EPSILONS + FAINT, SEEDS),
    "paper": [],
}


def run(point: Point) -> Row:
    """Test accuracy of the defaults beside the trivial answer, without privacy, and of the best of the sweep."""
    data = _data(point["task"], point["seed"])
    trained = co.fit(
        data.examples,
        data.model,
        epsilon=point["epsilon"],
        **CLAIM,
        splits=SPLITS,
        run=co.RunSettings(seed=point["seed"], baseline=True),
    )
    noise = trained.signal_to_noise
    assert noise is not None
    found = trained.evaluations()
    test = found["test"].row(0, named=True)
    row: Row = {
        "selector": trained.selector,
        "contribution_bound": trained.certificate.contribution_bound,
        "size": trained.certificate.size,
        "num_distinct": trained.certificate.num_distinct,
        "batch_size": noise.batch_size,
        "iterations": noise.iterations,
        "noise_multiplier": noise.noise_multiplier,
        "clip_norm": trained.plan.clip_norm,
        "learning_rate": trained.plan.learning_rate,
        "num_parameters": noise.num_parameters,
        "num_scores": noise.num_scores,
        "outlook": noise.outlook(trained.certificate.num_distinct).word,
        "test_examples": test["examples"],
        "trivial": test["trivial_accuracy"],
        "defaults": test["accuracy"],
        "defaults_low": test["accuracy_low"],
        "without_privacy": test["baseline_accuracy"],
        "without_privacy_low": test["baseline_accuracy_low"],
    }
    if point["epsilon"] in FAINT:
        return row
    own = {"validation": found["validation"]["accuracy"][0], "test": test["accuracy"], "choice": "the defaults"}
    members = [own, *itertools.chain.from_iterable(_swept(data, point))]
    best = max(members, key=lambda member: member["validation"])
    return row | {"best": best["test"], "best_choice": best["choice"], "members": len(members)}


@functools.lru_cache(maxsize=1)
def _data(task: str, seed: int) -> Data:
    return TASKS[task](seed)


def _swept(data: Data, point: Point) -> Iterator[list[dict[str, Any]]]:
    """Accuracy on validation and on test of every member of the sweep."""
    splits = split_examples(data.examples.graph, SPLITS)
    graph = data.examples.graph.subgraph(splits["train"])
    task = data.model.task(data.examples.payload.schema, folder=Path(), is_private=True)
    for selector in SELECTORS:
        selected = selector.select(graph, seed=point["seed"])
        certificate = co.certify(graph, selected)
        content = task.load(data.examples, splits, selected.copies)
        for (share, iterations), optimizer in itertools.product(SHAPES, RATES):
            size = max(1, selected.size // share)
            plans = co.grid(
                certificate,
                selected,
                co.PoissonSampling.from_certificate(certificate, batch_size=size, iterations=iterations),
                learning_rates=RATES[optimizer],
                clip_norms=CLIP_NORMS,
                epsilons=[point["epsilon"]],
                optimizer=optimizer,
                decay=["cosine"],
                run_key=co.RunKey.from_seed(point["seed"]),
                **CLAIM,
            )
            swept = co.sweep(plans, content.model, content.parts["train"])
            shown = f"{selector.name} {certificate.contribution_bound}, {iterations} x {size}, {optimizer}"
            scores = {name: swept.compare(content.parts[name], split=name) for name in ("validation", "test")}
            yield [
                {
                    "validation": validation["accuracy"],
                    "test": accuracy,
                    "choice": f"{shown} {validation['learning_rate']:g}, clip norm {validation['clip_norm']:g}",
                }
                for validation, accuracy in zip(
                    scores["validation"].to_dicts(), scores["test"]["accuracy"], strict=True
                )
            ]


# ---- from rows


def _swept_rows(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.get("best") is not None]


def draw(rows: list[Row]) -> alt.FacetChart:
    """Accuracy by epsilon: the defaults, the best of the sweep and the trivial answer; a panel for each task."""
    arms = {"defaults": "defaults", "best": "best of a sweep", "trivial": "trivial answer"}
    lines = [
        {"task": row["task"], "epsilon": row["epsilon"], "arm": shown, "accuracy": row[arm]}
        for row in _swept_rows(rows)
        for arm, shown in arms.items()
    ]
    return (
        alt.Chart(alt.Data(values=lines))
        .mark_line(point=True)
        .encode(
            x=alt.X("epsilon:Q").scale(type="log", base=2),
            y=alt.Y("mean(accuracy):Q", title="test accuracy", axis=alt.Axis(format="%")).scale(zero=False),
            color=alt.Color("arm:N", title=None),
        )
        .properties(width=150, height=130)
        .facet(facet=alt.Facet("task:N", title=None), columns=4)
        .resolve_scale(y="independent")
    )


def cases(rows: list[Row]) -> dict[tuple[str, float], list[Row]]:
    """Rows of every task and epsilon that were swept, over seeds."""
    found: dict[tuple[str, float], list[Row]] = {}
    for row in _swept_rows(rows):
        found.setdefault((row["task"], row["epsilon"]), []).append(row)
    return found


def table(rows: list[Row]) -> str:
    """Accuracy of each case in points, mean over seeds, in Markdown."""
    lines = ["| task | epsilon | trivial | defaults | best of a sweep | behind | without privacy | outlook |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|---|")
    for (task, epsilon), own in cases(rows).items():
        means = [
            100 * statistics.fmean(row[name] for row in own)
            for name in ("trivial", "defaults", "best", "without_privacy")
        ]
        figures = " | ".join(f"{value:.1f}" for value in (*means[:3], means[2] - means[1], means[3]))
        lines.append(f"| {task} | {epsilon:g} | {figures} | {' or '.join(sorted({row['outlook'] for row in own}))} |")
    return "\n".join(lines)


def claims(rows: list[Row]) -> list[Verdict]:
    """The gap, what is below the trivial answer, and both ends of the outlook."""
    return [_gap(rows), _below_trivial(rows), *_outlooks(rows)]


def _seeds(rows: list[Row]) -> str:
    return " and ".join(str(seed) for seed in sorted({row["seed"] for row in rows}))


def _gap(rows: list[Row]) -> Verdict:
    """Mean over tasks, with Student's interval over them; the threshold is inside it, below or above it."""
    by_task: dict[str, list[float]] = {}
    for row in _swept_rows(rows):
        by_task.setdefault(row["task"], []).append(row["best"] - row["defaults"])
    values = [statistics.fmean(gaps) for gaps in by_task.values()]
    if len(values) < len(JUDGED):
        return Verdict(claim=CLAIMS[0], verdict=OPEN, found="")
    error = statistics.stdev(values) / math.sqrt(len(values))
    effect = Effect(statistics.fmean(values), error, len(values) - 1)
    low, high = effect.interval()
    verdict = HOLDS if high <= MOST_LOST else FAILS if low > MOST_LOST else UNRESOLVED
    parts = "; ".join(f"{100 * value:+.2f} ({task})" for task, value in zip(by_task, values, strict=True))
    found = f"{with_interval(effect)} points behind; by task {parts}"
    return Verdict(claim=CLAIMS[0], verdict=verdict, found=found, seeds=_seeds(rows))


def _below_trivial(rows: list[Row]) -> Verdict:
    """Cases whose interval is below the trivial answer, corrected for their number."""
    found, total = [], len(JUDGED) * len(EPSILONS)
    for (task, epsilon), own in cases(rows).items():
        accuracy = statistics.fmean(row["defaults"] for row in own)
        trivial = statistics.fmean(row["trivial"] for row in own)
        # The seeds of a real task share their test examples.
        error = math.sqrt(accuracy * (1 - accuracy) / own[0]["test_examples"])
        if Effect(accuracy - trivial, error).interval(LEVEL / total)[1] < 0:
            found.append(f"{accuracy:.1%} against {trivial:.1%} ({task}, epsilon {epsilon:g})")
    ran = len(cases(rows))
    verdict = FAILS if found else HOLDS if ran >= total else OPEN
    return Verdict(claim=CLAIMS[1], verdict=verdict, found="; ".join(found) or f"0 of {ran}", seeds=_seeds(rows))


def _outlooks(rows: list[Row]) -> Iterator[Verdict]:
    hopeless = [row["defaults_low"] > row["trivial"] for row in rows if row["outlook"] == "hopeless"]
    promising = [
        row["defaults_low"] > row["trivial"]
        for row in rows
        if row["outlook"] == "promising" and row["without_privacy_low"] > row["trivial"]
    ]
    unlearnable = sum(row["outlook"] == "promising" and row["without_privacy_low"] <= row["trivial"] for row in rows)
    for claim, beat, right, why in (
        (CLAIMS[2], hopeless, lambda share: share <= FEW, ""),
        (CLAIMS[3], promising, lambda share: share >= MANY, f"Left out: {unlearnable} promising runs of that kind."),
    ):
        verdict = OPEN if not beat else HOLDS if right(sum(beat) / len(beat)) else FAILS
        found = f"{sum(beat)} of {len(beat)} runs" if beat else "no run"
        yield Verdict(claim=claim, verdict=verdict, found=found, why=why if unlearnable else "", seeds=_seeds(rows))
