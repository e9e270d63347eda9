"""Is tuning that is paid for better than the defaults at the same epsilon? (beyond the paper)

Three tasks. The defaults (`fit`) and `tune` over six settings, eight runs expected, have the same total epsilon; the
best in hindsight trains each of the six with the noise of a single run and takes the one with the best test accuracy,
which no guarantee covers. All are compared on the validation split, which none of them looks at.
"""

import functools
import itertools
import statistics
from collections.abc import Callable
from pathlib import Path

import altair as alt
import polars as pl

import coowned as co
from coowned.content.splits import split_examples
from experiments.defaults import TASKS as OTHERS
from experiments.defaults import Data
from experiments.framework.rows import Point, Row
from experiments.framework.verdicts import Effect, Verdict, combine, judge, unrun, with_interval
from experiments.text_models import CORPORA, corpus

DATA = ("ACL", "mailing list")
CLAIMS = (
    "At the same total epsilon, tuning has better accuracy than the defaults in at least one of six cases (ours).",
    "At the same total epsilon, tuning has better accuracy than the defaults on average over six cases (ours).",
    "The best of the same grid in hindsight, not covered, is better than the defaults on average (ours).",
)
PAGE = "docs/results.md"
EPSILONS, SEEDS = (2.0, 8.0), range(5)
CLAIM = {"delta": 1e-6, "adjacency": "zero-out"}
SPLITS = (0.5, 0.25, 0.25)
EXPECTED_RUNS = 8
RATES, CLIP_NORMS = (0.04, 0.13, 0.4), (0.25, 1.0)  # around 3 / sqrt(500) and 0.25, which are the defaults
ARMS = {"defaults": "defaults", "tuned": "tune", "hindsight": "best in hindsight, not covered"}


def _acl(seed: int) -> Data:
    """The kind of venue of 6,000 abstracts, chosen by a hash of their ids, from their first 256 characters."""
    del seed
    rows = pl.DataFrame(pl.from_arrow(corpus("ACL").payload)).with_columns(pl.col("text").str.slice(0, 256))
    rows = rows.sort(pl.col("example_id").hash(seed=0)).head(6000)
    classes = CORPORA["ACL"][0]
    model = co.TextClassifier(text="text", label="label", classes=classes, num_features=2**12, character_ngrams=())
    return Data(co.from_table(rows, example_id="example_id"), model)


TASKS: dict[str, Callable[[int], Data]] = {
    "mailing list": OTHERS["mailing list: reply or not"],
    "ACL topics": _acl,
    "synthetic logistic": OTHERS["skewed logistic"],
    "made up": OTHERS["made up"],
}
JUDGED = tuple(itertools.product(tuple(TASKS)[:3], EPSILONS))


def _points(cases: tuple[tuple[str, float], ...], seeds: range) -> list[Point]:
    return [{"task": task, "epsilon": epsilon, "seed": seed} for seed in seeds for task, epsilon in cases]


GRID = {"ci": _points((("made up", 8.0),), range(1)), "small": _points(JUDGED, SEEDS), "paper": []}


def run(point: Point) -> Row:
    """Accuracy of the defaults, of the tuned run and of the best in hindsight on examples that chose nothing."""
    data = _data(point["task"], point["seed"])
    asked = {"epsilon": point["epsilon"], **CLAIM, "splits": SPLITS, "seed": point["seed"]}
    plain = co.fit(data.examples, data.model, **asked)
    grid = {"learning_rate": RATES, "clip_norm": CLIP_NORMS}
    tuned = co.tune(data.examples, data.model, grid=grid, expected_runs=EXPECTED_RUNS, **asked)
    found = plain.evaluations()["validation"].row(0, named=True)
    assert tuned.covered is not None
    return {
        "fresh_examples": found["examples"],
        "trivial": found["trivial_accuracy"],
        "defaults": found["accuracy"],
        "tuned": tuned.evaluations()["validation"]["accuracy"][0],
        "noise_multiplier": plain.plan.noise_multiplier,
        "tuned_noise_multiplier": tuned.plan.noise_multiplier,
        "tuned_choice": f"learning rate {tuned.plan.learning_rate:g}, clip norm {tuned.plan.clip_norm:g}",
        "covered_accuracy": tuned.covered.accuracy,
        **_hindsight(data, point, plain),
    }


@functools.lru_cache(maxsize=1)
def _data(task: str, seed: int) -> Data:
    return TASKS[task](seed)


def _hindsight(data: Data, point: Point, plain: co.Run) -> Row:
    """The setting of the grid with the best test accuracy, each trained with the noise of one untuned run."""
    splits = split_examples(data.examples.graph, SPLITS)
    selected = plain.selection(data.examples.graph.subgraph(splits["train"]))
    certificate = co.certify(data.examples.graph.subgraph(splits["train"]), selected)
    task = data.model.task(data.examples.payload.schema, folder=Path(), is_private=True)
    content = task.load(data.examples, splits, selected.copies)
    plans = co.grid(
        certificate,
        selected,
        co.PoissonSampling.from_certificate(
            certificate, batch_size=plain.plan.batch_size, iterations=plain.plan.iterations
        ),
        learning_rates=RATES,
        clip_norms=CLIP_NORMS,
        epsilons=[point["epsilon"]],
        decay=["cosine"],
        run_key=co.RunKey.from_seed(point["seed"]),
        **CLAIM,
    )
    swept = co.sweep(plans, content.model, content.parts["train"])
    scores, fresh = (swept.compare(content.parts[split], split=split) for split in ("test", "validation"))
    best = scores["accuracy"].arg_max()
    assert best is not None
    rate, clip_norm = (scores[name][best] for name in ("learning_rate", "clip_norm"))
    return {
        "hindsight": fresh["accuracy"][best],
        "hindsight_choice": f"learning rate {rate:g}, clip norm {clip_norm:g}",
    }


# ---- from rows


def cases(rows: list[Row]) -> dict[tuple[str, float], list[Row]]:
    """Rows of every task and epsilon, over seeds."""
    found: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        found.setdefault((row["task"], row["epsilon"]), []).append(row)
    return found


def _gains(rows: list[Row], arm: str) -> dict[tuple[str, float], list[float]]:
    """What an arm gains on the defaults, seed by seed, of the judged cases with at least two seeds."""
    gains = {case: [row[arm] - row["defaults"] for row in own] for case, own in cases(rows).items()}
    return {case: own for case, own in gains.items() if case in JUDGED and len(own) > 1}


def table(rows: list[Row]) -> str:
    """Mean accuracy over seeds in points, and what is gained on the defaults, in Markdown."""
    lines = ["| task | epsilon | trivial | defaults | tune | best in hindsight | tune gains | hindsight gains |"]
    lines.append("|---|---:|---:|---:|---:|---:|---|---|")
    tuned, hindsight = _gains(rows, "tuned"), _gains(rows, "hindsight")
    for case, own in cases(rows).items():
        means = [100 * statistics.fmean(row[name] for row in own) for name in ("trivial", *ARMS)]
        gained = [with_interval(combine([(1, found[case])])) if case in found else "" for found in (tuned, hindsight)]
        figures = " | ".join(f"{value:.1f}" for value in means)
        lines.append(f"| {case[0]} | {case[1]:g} | {figures} | {' | '.join(gained)} |")
    return "\n".join(lines)


def draw(rows: list[Row]) -> alt.FacetChart:
    """Accuracy by epsilon and arm, a point a seed; a panel for each task."""
    points = [
        {"task": row["task"], "epsilon": row["epsilon"], "arm": shown, "accuracy": row[arm]}
        for row in rows
        for arm, shown in ARMS.items()
    ]
    return (
        alt.Chart(alt.Data(values=points))
        .mark_point(filled=True)
        .encode(
            x=alt.X("epsilon:O"),
            xOffset=alt.XOffset("arm:N", sort=list(ARMS.values())),
            y=alt.Y("accuracy:Q", axis=alt.Axis(format="%")).scale(zero=False),
            color=alt.Color("arm:N", title=None, sort=list(ARMS.values())),
        )
        .properties(width=150, height=160)
        .facet(column=alt.Column("task:N", title=None))
        .resolve_scale(y="independent")
    )


def claims(rows: list[Row]) -> list[Verdict]:
    tuned, hindsight = _gains(rows, "tuned"), _gains(rows, "hindsight")
    if not tuned:
        return unrun(CLAIMS)
    effects = {case: combine([(1, own)]) for case, own in tuned.items()}
    parts = "; ".join(f"{with_interval(own)} ({task}, epsilon {epsilon:g})" for (task, epsilon), own in effects.items())
    seeds = f"0 to {max(row['seed'] for row in rows)}"
    return [
        judge(CLAIMS[0], list(effects.values()), parts, above=0, in_some=True, cases=len(JUDGED), seeds=seeds),
        *(_mean(claim, gains, seeds) for claim, gains in zip(CLAIMS[1:], (tuned, hindsight), strict=True)),
    ]


def _mean(claim: str, gains: dict[tuple[str, float], list[float]], seeds: str) -> Verdict:
    """Judged once all cases have run: their mean, with the error of the seeds."""
    if len(gains) < len(JUDGED):
        return unrun([claim])[0]
    effect: Effect = combine([(1 / len(gains), own) for own in gains.values()])
    return judge(claim, [effect], f"{with_interval(effect)} points", above=0, seeds=seeds)
