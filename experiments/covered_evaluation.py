"""What does a covered evaluation cost in accuracy, and how sure is its figure? (beyond the paper)

Logistic data of two users an example, trained with the same coins and standard normals for every share of epsilon, so
that runs of one seed differ in the size of the noise alone. A run with a seed promises nothing, but has the noise of
one that does.
"""

import functools
import statistics

import altair as alt
import numpy as np
import polars as pl

import coowned as co
from coowned.training.covered import score_interval
from experiments.framework.rows import Point, Row
from experiments.framework.verdicts import Effect, Verdict, judge_cases, unrun, with_interval

SHARES, EPSILONS = (0.02, 0.05, 0.1), (1.0, 2.0, 8.0)
DEFAULT = co.CoveredEvaluation().epsilon_share
CLAIMS = (
    "The default share costs at most half a point of accuracy on average at epsilon 1, 2 and 8 (ours).",
    "Of the shares tried, the default has the least of accuracy lost plus what noise adds to half the interval, "
    "averaged over epsilon 1, 2 and 8 (ours).",
)
PAGE = "docs/results.md"
FEATURES, FRESH = 20, 200_000


def _points(examples: int, seeds: range) -> list[Point]:
    return [
        {"examples": examples, "epsilon": epsilon, "epsilon_share": share, "seed": seed}
        for seed in seeds
        for epsilon in EPSILONS
        for share in (0.0, *SHARES)
    ]


GRID = {"ci": _points(1000, range(1))[:4], "small": _points(40_000, range(5)), "paper": []}


def run(point: Point) -> Row:
    """Accuracy of the model on fresh examples, and the covered figure with its interval."""
    covers = point["epsilon_share"] > 0
    names = [f"x{i}" for i in range(FEATURES)]
    examples, fresh, labels = _world(point["examples"], point["seed"])
    trained = co.fit(
        examples,
        co.LogisticRegression(features=names, label="y"),
        epsilon=point["epsilon"],
        delta=1e-7,
        adjacency="zero-out",
        selector=co.Greedy(contribution_bound=3),
        batch_size=min(1024, point["examples"] // 8),
        iterations=200,
        learning_rate=0.02,
        evaluation=co.CoveredEvaluation(epsilon_share=point["epsilon_share"]) if covers else None,
        seed=point["seed"],
    )
    arrays = trained.arrays()
    right = (fresh @ arrays["weights"] + arrays["intercept"] > 0) == labels
    row: Row = {"noise_multiplier": trained.plan.noise_multiplier, "true_accuracy": float(right.mean())}
    found = trained.covered
    if found is not None:
        _, low, high = score_interval(found.accuracy or 0.0, found.size, 0.0)
        row |= {
            "covered_accuracy": found.accuracy,
            "half_interval": (found.accuracy_high - found.accuracy_low) / 2,
            "half_interval_without_noise": (high - low) / 2,
            "held_out": found.size,
            "held_out_bound": trained.guarantee.evaluation.contribution_bound,
        }
    return row


@functools.lru_cache(maxsize=1)
def _world(size: int, seed: int) -> tuple[co.AttributedExamples, np.ndarray, np.ndarray]:
    """Examples to train on, and the features and labels of fresh ones."""
    random = np.random.default_rng(seed)
    features = random.normal(size=(size + FRESH, FEATURES)).astype(np.float32)
    scores = features @ (2 * random.normal(size=FEATURES) / np.sqrt(FEATURES))
    labels = random.random(size + FRESH) < 1 / (1 + np.exp(-2 * scores))
    users = random.integers(0, size // 4, (size, 2))
    table = {"users": [[f"u{a}", f"u{b}"] for a, b in users.tolist()], "y": labels[:size].astype(int)}
    table |= {f"x{i}": features[:size, i] for i in range(FEATURES)}
    return co.from_table(pl.DataFrame(table)), features[size:], labels[size:]


def costs(rows: list[Row]) -> pl.DataFrame:
    """One line for each seed, epsilon and share: accuracy lost, and what the noise adds to half the interval."""
    table = pl.DataFrame(rows, infer_schema_length=None)
    alone = table.filter(pl.col("epsilon_share") == 0).select("epsilon", "seed", without="true_accuracy")
    return (
        table.filter(pl.col("epsilon_share") > 0)
        .join(alone, on=["epsilon", "seed"])
        .with_columns(
            lost=pl.col("without") - pl.col("true_accuracy"),
            added=pl.col("half_interval") - pl.col("half_interval_without_noise"),
        )
    )


def _effect(values: pl.Series) -> Effect:
    found = values.to_list()
    if len(found) < 2:
        return Effect(found[0])
    return Effect(statistics.mean(found), statistics.stdev(found) / len(found) ** 0.5, len(found) - 1)


def table(rows: list[Row]) -> str:
    """Accuracy lost and the interval by epsilon and share, in points, as Markdown."""
    lines = ["| epsilon | share | accuracy without | accuracy lost | half the interval | of it by noise |"]
    lines.append("|---|---|---|---|---|---|")
    for (epsilon, share), own in costs(rows).group_by("epsilon", "epsilon_share", maintain_order=True):
        means = {name: 100 * float(own[name].mean()) for name in ("without", "half_interval", "added")}
        lines.append(
            f"| {epsilon:g} | {share:g} | {means['without']:.1f} | {with_interval(_effect(own['lost']))} | "
            f"{means['half_interval']:.2f} | {means['added']:.2f} |"
        )
    return "\n".join(lines)


def draw(rows: list[Row]) -> alt.Chart:
    """Accuracy lost, and what noise adds to half the interval, by share; one panel an epsilon."""
    long = costs(rows).unpivot(["lost", "added"], index=["epsilon", "epsilon_share", "seed"], variable_name="what")
    return (
        alt.Chart(long)
        .mark_point(filled=True)
        .encode(
            x=alt.X("epsilon_share:O", title="share of epsilon"),
            y=alt.Y("value:Q", title="cost", axis=alt.Axis(format="%")),
            color=alt.Color("what:N", title=None),
            column=alt.Column("epsilon:O", title="epsilon"),
        )
        .properties(width=150, height=180)
    )


def claims(rows: list[Row]) -> list[Verdict]:
    found = costs(rows)
    if found.group_by("epsilon").len().height < len(EPSILONS):
        return unrun(CLAIMS)
    seeds = f"0 to {found['seed'].max()}"
    own = found.filter(pl.col("epsilon_share") == DEFAULT)
    lost = {epsilon: _effect(part["lost"]) for (epsilon,), part in own.group_by("epsilon", maintain_order=True)}
    total = {
        share: 100 * float((part["lost"] + part["added"]).mean())
        for (share,), part in found.group_by("epsilon_share", maintain_order=True)
    }
    parts = "; ".join(f"{with_interval(effect)} at epsilon {epsilon:g}" for epsilon, effect in lost.items())
    sums = "; ".join(f"{value:.2f} at {share:g}" for share, value in total.items())
    best = min(total, key=lambda share: total[share])
    verdicts = [
        judge_cases(
            CLAIMS[0],
            sum(effect.estimate <= 0.005 for effect in lost.values()),
            len(lost),
            f"points of accuracy lost on average: {parts}",
        ),
        judge_cases(CLAIMS[1], int(best == DEFAULT), 1, f"points, by share: {sums}"),
    ]
    return [Verdict(**(vars(verdict) | {"seeds": seeds})) for verdict in verdicts]
