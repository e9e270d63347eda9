"""Figures of the claim, and of what was measured: curves, attacks, utility."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from coowned.accounting import calculators
from coowned.accounting.guarantee import OTHER_ADJACENCY
from coowned.accounting.statement import rounded_up
from coowned.report import charts
from coowned.report.contents import Mark, RunContents
from coowned.report.figures import Figure, shown

FALSE_POSITIVE_RATES = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5)
_CURVE_POINTS = 25
_SMALLEST_DELTA = 1e-14
_MOST_STEPS = 120  # of a training curve; a picture shows no more


def delta_curve(run: RunContents) -> Figure:
    """delta at every epsilon, under both adjacencies."""
    made = run.claim
    largest = 1.25 * max(made.epsilon, made.other_epsilon)
    points = [float(value) for value in np.linspace(0.0, largest, _CURVE_POINTS)]
    rows = []
    names = (f"{made.adjacency} (claimed)", OTHER_ADJACENCY[made.adjacency])
    for name, adjacency in zip(names, (made.adjacency, OTHER_ADJACENCY[made.adjacency]), strict=True):
        deltas = calculators.epsilon_curve(
            made.mechanism, noise_multiplier=made.noise_multiplier, adjacency=adjacency, epsilons=points
        )
        for epsilon, delta in zip(points, deltas.tolist(), strict=True):
            if delta >= _SMALLEST_DELTA:
                rows.append(
                    {
                        "epsilon": epsilon,
                        "delta": delta,
                        "series": name,
                        "epsilon_text": rounded_up(epsilon),
                        "delta_text": f"{float(rounded_up(delta)):.3e}" if delta else "0",
                    }
                )
    fields = (("series", "adjacency"), ("epsilon_text", "epsilon"), ("delta_text", "delta at most"))
    return Figure(
        name="delta-curve",
        title="The whole promise: delta at every epsilon",
        mark=Mark.COVERED,
        chart=charts.curves(
            rows,
            x="epsilon",
            y="delta",
            series="series",
            names=names,
            colours=(charts.colour_of(run.selector), charts.NEUTRAL),
            title_x="epsilon",
            title_y="delta",
            format_y=".0e",
            log_y=True,
            tooltip=fields,
            points_at=(made.epsilon, made.delta),
        ),
        columns=fields,
        rows=rows,
        reading=f"One run satisfies all of these pairs at once; the ring is the one that is claimed: {run.headline}. "
        "Every value is an upper bound.",
    )


def membership_rows(run: RunContents) -> list[dict[str, Any]]:
    """The most that any membership test can find, at some rates of false accusation."""
    made = run.claim
    rows = []
    for rate in FALSE_POSITIVE_RATES:
        bound = calculators.true_positive_rate_bound(
            made.mechanism,
            noise_multiplier=made.noise_multiplier,
            adjacency=made.adjacency,
            false_positive_rate=rate,
        )
        rows.append({"rate": rate, "found": bound, "rate_text": f"{rate:.1%}", "found_text": share_up(bound)})
    return rows


def share_up(share: float) -> str:
    """A share in percent that is never rounded to one that was not proven.

    >>> share_up(0.12301), share_up(1.0)
    ('12.4%', '100.0%')
    """
    return f"{min(100.0, math.ceil(share * 1000 - 1e-9) / 10):.1f}%"


def membership(run: RunContents, found: Sequence[dict[str, Any]]) -> Figure:
    """What a membership test can find, beside guessing."""
    limit, guess = "any attack, at most", "guessing"
    rows = [{**row, "series": limit} for row in found]
    rows += [{**row, "found": row["rate"], "found_text": row["rate_text"], "series": guess} for row in found]
    fields = (("series", "who"), ("rate_text", "wrongly accused"), ("found_text", "rightly found"))
    return Figure(
        name="membership",
        title="What a membership attack could find",
        mark=Mark.COVERED,
        chart=charts.curves(
            rows,
            x="rate",
            y="found",
            series="series",
            names=(limit, guess),
            colours=(charts.colour_of(run.selector), charts.NEUTRAL),
            title_x="wrongly accused (false-positive rate)",
            title_y="rightly found (true-positive rate)",
            log_x=True,
            format_x="~%",
            format_y="%",
            ticks_x=FALSE_POSITIVE_RATES,
            tooltip=fields,
        ),
        columns=fields,
        rows=rows,
        reading="An attacker decides from the model whether a person's texts were used. However she does it, at the "
        f"rate of false accusations below the picture she finds at most this share ({run.claim.terms()}).",
    )


def training_curves(run: RunContents, metrics: pl.DataFrame) -> list[Figure]:
    """Loss, clipped share and drawn copies by step."""
    every = max(1, math.ceil(len(metrics) / _MOST_STEPS))
    kept = metrics.gather_every(every)
    what = {
        "loss": ("Training loss", "loss before the step", False, "The mean over the batch that was drawn."),
        "clipped_share": ("Clipped gradients", "share of copies clipped", True,
                          "How many gradients were longer than the clip norm."),
        "copies": ("Drawn batch sizes", "copies drawn", True,
                   "How many coins fell on yes; sums are divided by the public batch size, never by this."),
    }  # fmt: skip
    made = []
    for key, (title, title_y, zero, reading) in what.items():
        if key not in kept.columns:
            continue
        rows = [
            {"step": row["step"], "value": float(row[key]), "step_text": shown(row["step"]), "text": shown(row[key])}
            for row in kept.select("step", key).iter_rows(named=True)
            if row[key] is not None and math.isfinite(row[key])
        ]
        if rows:
            fields = (("step_text", "step"), ("text", title_y))
            made.append(
                Figure(
                    name=f"training-{key.replace('_', '-')}",
                    title=titled(run, title),
                    mark=Mark.PRIVATE,
                    chart=charts.curve(
                        rows,
                        x="step",
                        y="value",
                        title_x="step",
                        title_y=title_y,
                        zero=zero,
                        tooltip=fields,
                        colour=charts.colour_of(run.selector),
                        format_y=_AXIS[key],
                    ),
                    columns=fields,
                    rows=rows,
                    reading=f"{reading} {_whole(every)}",
                )
            )
    return made


_AXIS = {"loss": "~g", "clipped_share": "%", "copies": "~s"}


def titled(run: RunContents, title: str) -> str:
    """A title that does not let a run pass for private that is not."""
    return title if run.claims else f"{title}: no guarantee ({run.reason})"


def _whole(every: int) -> str:
    return "" if every == 1 else f"Every {every}th stored step is shown."


def utility_by_users(run: RunContents, splits: dict[str, pl.DataFrame]) -> Figure | None:
    """Accuracy on held-out examples by how many users they have."""
    rows = []
    for split, found in splits.items():
        for row in found.iter_rows(named=True):
            if row.get("accuracy") is None or row.get("accuracy_low") is None:
                continue
            rows.append({"split": split, **_accuracy(row), "users": row["users_per_example"]})
    if not rows:
        return None
    order = {name: place for place, name in enumerate(["all", *map(str, range(1000))])}
    rows.sort(key=lambda row: order.get(row["users"], len(order)))
    names = tuple(dict.fromkeys(row["split"] for row in rows))
    colours = {"validation": charts.NEUTRAL, "test": charts.colour_of(run.selector)}
    return Figure(
        name="utility-by-users",
        title=titled(run, "Accuracy by users per example"),
        mark=Mark.PRIVATE,
        chart=charts.intervals(
            rows,
            x="users",
            y="accuracy",
            low="low",
            high="high",
            series="split",
            names=names,
            colours=[colours.get(name, charts.NEUTRAL) for name in names],
            title_x="users per example",
            title_y="accuracy",
            tooltip=(("users", "users per example"), ("split", "split"), *_ACCURACY),
        ),
        columns=(("users", "users per example"), ("split", "split"), *_ACCURACY),
        rows=rows,
        reading="On examples that were kept out of training, with 95% intervals. Selection under a bound prefers "
        "examples that few people share, so the model may serve the others less well.",
    )


_ACCURACY = (
    ("accuracy_text", "accuracy"),
    ("interval_text", "95% interval"),
    ("examples_text", "examples"),
    ("loss_text", "loss"),
)


def _accuracy(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "accuracy": row["accuracy"],
        "low": row["accuracy_low"],
        "high": row["accuracy_high"],
        "accuracy_text": f"{row['accuracy']:.1%}",
        "interval_text": f"{row['accuracy_low']:.1%} to {row['accuracy_high']:.1%}",
        "examples_text": shown(row["examples"]),
        "loss_text": shown(row["loss"]),
    }


def utility_by_epsilon(run: RunContents, also: Sequence[RunContents]) -> Figure | None:
    """Accuracy on the test split of several runs."""
    runs = sorted([run, *also], key=lambda one: one.claim.epsilon if one.claims else math.inf)
    rows = []
    for one in runs:
        found = None if one.private is None else one.private.splits.get("test")
        if found is None or not len(found) or found["accuracy"][0] is None:
            continue
        rows.append(
            {
                "run": one.path.name,
                "epsilon": one.short,
                "claim": one.headline,
                "selector": one.selector,
                **_accuracy(found.row(0, named=True)),
            }
        )
    if not also or len(rows) < 2:
        return None
    names = list(dict.fromkeys(row["selector"] for row in rows))
    fields = (("run", "run"), ("claim", "what is promised"), ("selector", "selector"), *_ACCURACY)
    return Figure(
        name="utility-by-epsilon",
        title="Accuracy against epsilon, over several runs",
        mark=Mark.PRIVATE,
        chart=charts.intervals(
            rows,
            x="epsilon",
            y="accuracy",
            low="low",
            high="high",
            series="selector",
            names=names,
            colours=[charts.colour_of(name) for name in names],
            title_x="epsilon",
            title_y="test accuracy",
            beside="run",
            tooltip=fields,
        ),
        columns=fields,
        rows=rows,
        reading="Unit, bound, delta and adjacency of each epsilon are in its row and show on hovering. Each run alone "
        "has the promise shown; all of them together, on the same people, have a weaker one "
        "(compose them before publishing more than one model).",
    )


def audit(run: RunContents, found: dict[str, Any], *, canaries: bool) -> Figure | None:
    """The measured lower bound beside the claim; None where the audit's file states none, or there is no claim."""
    measured = found.get("epsilon_lower_bound")
    if not run.claims or not isinstance(measured, int | float) or not math.isfinite(measured):
        return None
    proven = run.claim.epsilon
    rows = [
        {"what": "measured: at least", "epsilon": float(measured), "text": shown(float(measured))},
        {"what": "proven: at most", "epsilon": proven, "text": rounded_up(proven)},
    ]
    fields = (("what", "which"), ("text", "epsilon"))
    how = (
        "One training with made-up people among the real ones; the auditor guesses who was in."
        if canaries
        else "Many runs of the mechanism with keys and users of the audit’s own, the worst that the claim allows."
    )
    verdict = str(found.get("verdict", "")).strip()
    return Figure(
        name="audit-canaries" if canaries else "audit",
        title="Measured leak beside the claim: " + ("canaries" if canaries else "mechanism"),
        mark=Mark.PRIVATE if canaries else Mark.COVERED,
        chart=charts.level_bars(
            rows,
            x="epsilon",
            y="what",
            title_x="epsilon",
            title_y=None,
            colours=(charts.NEUTRAL, charts.colour_of(run.selector)),
            tooltip=fields,
        ),
        columns=fields,
        rows=rows,
        reading=f"{how} A measured value above the proven one would show a fault; one below proves nothing by itself. "
        f"{verdict} Claimed: {run.headline}.".replace("  ", " "),
    )
