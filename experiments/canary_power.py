"""How large an epsilon can canaries disprove, and is an honest run ever accused? (beyond the paper)

A logistic regression with two features on 600 made-up examples, 60 steps, epsilon 2 claimed at delta 1e-6.
"""

import dataclasses

import altair as alt
import numpy as np
import polars as pl

from coowned import AttributionGraph, Greedy, PoissonSampling, certify, guarantee
from coowned.audit.canaries import audit_with_canaries
from coowned.content.data import FeatureTable
from coowned.exact.keys import RunKey
from coowned.models.logistic_regression import LogisticRegression
from coowned.models.probes import feature_canaries
from coowned.training.plan import TrainingPlan
from experiments.framework.rows import Point, Row
from experiments.framework.verdicts import Verdict, judge_cases

BOUND, FEATURES, DELTA, ALPHA = 2, 2, 1e-6, 1e-3
CLAIMS = ("With 200 or more canary users, missing noise is found and an honest run is not accused (ours).",)
PAGE = "docs/trust.md"
GRID = {
    "ci": [{"canaries": 50, "noise": 0.0}],
    "small": [{"canaries": count, "noise": share} for count in (50, 100, 200, 400, 1000) for share in (0.0, 0.01, 1.0)],
    "paper": [],
}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LittleNoise(TrainingPlan):
    """Claims all of the noise, and adds a part of it."""

    share: float

    @property
    def noise_multiplier(self) -> float:
        return max(self.share, 1e-9) * super().noise_multiplier


def run(point: Point) -> Row:
    """One training with canaries."""
    random = np.random.default_rng(0)
    graph = AttributionGraph.from_users_per_example([[i // 2] for i in range(600)])
    data = FeatureTable(graph=graph, features=random.normal(size=(600, FEATURES)), labels=random.integers(0, 2, 600))
    content = feature_canaries(point["canaries"], BOUND, num_features=FEATURES, length=4.0)

    def plan(grown: AttributionGraph) -> TrainingPlan:
        selection = Greedy(contribution_bound=BOUND).select(grown)
        certificate = certify(grown, selection)
        mechanism = PoissonSampling.from_certificate(certificate, batch_size=certificate.size // 8, iterations=60)
        claim = guarantee(certificate, mechanism, epsilon=2.0, delta=DELTA, adjacency="zero-out", test_run=True)
        return LittleNoise(
            certificate=certificate,
            selected=selection,
            mechanism=mechanism,
            guarantee=claim,
            clip_norm=1.0,
            optimizer="sgd",
            learning_rate=0.1,
            run_key=RunKey.from_seed(1),
            share=point["noise"],
        )

    found = audit_with_canaries(
        LogisticRegression(num_features=FEATURES + point["canaries"]),
        data,
        plan,
        content,
        per_user=BOUND,
        alpha=ALPHA,
        coins=RunKey.from_seed(2),
    )
    return {
        "size": found.canaries,
        "claimed": found.claimed_epsilon,
        "at_least": found.epsilon_lower_bound,
        "gaussian": found.gaussian_lower_bound,
        "largest": found.largest_bound,
        "alarm": not found.claim_holds,
    }


def table(rows: list[Row]) -> str:
    """A Markdown table: one line a number of canaries, one column a share of the noise."""
    lines = [
        "| canary users | all guessed right proves | without noise | with 1% of it | with all of it |",
        "|---:|---:|---|---|---|",
    ]
    for count in dict.fromkeys(row["canaries"] for row in rows):
        own = {row["noise"]: row for row in rows if row["canaries"] == count}
        cells = [
            f"{max(row['at_least'], row['gaussian']):.1f}{', alarm' if row['alarm'] else ''}"
            for row in (own.get(share, own[0.0]) for share in (0.0, 0.01, 1.0))
        ]
        lines.append(f"| {count} | {own[0.0]['largest']:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: list[Row]) -> alt.Chart:
    """The proven epsilon by number of canary users, beside what is claimed."""
    shown = pl.DataFrame(rows).with_columns(
        pl.max_horizontal("at_least", "gaussian").alias("proven"), pl.format("{} of the noise", "noise").alias("run")
    )
    return (
        alt.Chart(shown)
        .mark_line(point=True)
        .encode(
            x=alt.X("canaries:Q", title="canary users").scale(type="log"),
            y=alt.Y("proven:Q", title="epsilon that is contradicted"),
            color=alt.Color("run:N", title=None),
        )
        .properties(width=260, height=160)
    )


def claims(rows: list[Row]) -> list[Verdict]:
    own = [row for row in rows if row["canaries"] >= 200]
    right = sum(row["alarm"] == (row["noise"] < 1) for row in own)
    return [judge_cases(CLAIMS[0], right, len(own), f"{right} of {len(own)} runs judged correctly")]
