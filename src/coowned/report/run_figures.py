"""Figures of the claim and of measurements: the privacy curve, attacks, utility, the Bob test."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from coowned.accounting.statement import rounded_down, rounded_up
from coowned.accounting.terms import OTHER_ADJACENCY
from coowned.progress import counted
from coowned.report import figures as draw
from coowned.report.figures import Axis, Columns, Figure, Mark, Row, percent_up, shown
from coowned.report.summary import clipping
from coowned.runs.stored_run import StoredRun

if TYPE_CHECKING:
    from coowned.audit.bob import Measured

_FALSE_POSITIVE_RATES = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5)
_CURVE_POINTS = 25
_SMALLEST_DELTA = 1e-14  # smaller values are not drawn
_MOST_STEPS = 120  # points of a training curve
_FORMATS = {"accuracy": "%", "loss": draw.NUMBER}


def delta_curve(run: StoredRun) -> Figure:
    claim = run.claim
    other = OTHER_ADJACENCY[claim.adjacency]
    epsilons = [
        float(value) for value in np.linspace(0.0, 1.25 * max(claim.epsilon, claim.other_epsilon), _CURVE_POINTS)
    ]
    rows = []
    names = {f"{claim.adjacency} (claimed)": claim.adjacency, other: other}
    for name, adjacency in names.items():
        deltas = claim.deltas(adjacency, epsilons)
        rows += [
            {
                "epsilon": epsilon,
                "delta": delta,
                "series": name,
                "epsilon_text": rounded_up(epsilon),
                "delta_text": f"{float(rounded_up(delta)):.3e}",
            }
            for epsilon, delta in zip(epsilons, deltas.tolist(), strict=True)
            if _SMALLEST_DELTA <= delta < 1  # a delta of 1 is no information, or could not be certified
        ]
    return Figure.drawn(
        draw.curves,
        name="delta-curve",
        title="The whole guarantee: delta at every epsilon",
        mark=Mark.COVERED,
        columns=(("series", "adjacency"), ("epsilon_text", "epsilon"), ("delta_text", "delta at most")),
        rows=rows,
        reading=f"What is released satisfies all of these pairs at once; the ring marks the claimed one: "
        f"{run.headline}. Every value is an upper bound.",
        x=Axis("epsilon", "epsilon"),
        y=Axis("delta", "delta", format=".0e", log=True),
        series="series",
        colours=dict(zip(names, (draw.colour_of(run.selector), draw.NEUTRAL), strict=True)),
        ring=(claim.epsilon, claim.delta),
    )


def tiers(run: StoredRun) -> Figure | None:
    """Returns the figure of each tier's guarantee; None if one bound holds for everybody."""
    rows = [
        {
            **row,
            "label": f"{row['tier']} ({counted(row['contribution_bound'], 'copy', 'copies')})",
            "epsilon_text": rounded_up(row["epsilon"]),
            "other_text": rounded_up(row["other_epsilon"]),
        }
        for row in run.claim.by_tier().drop("users").to_dicts()  # how many they are is a statistic of the graph
        if row["contribution_bound"]
    ]
    if not rows:
        return None
    adjacency, delta = run.claim.adjacency, run.claim.delta
    return Figure.drawn(
        draw.horizontal_bars,
        name="tiers",
        title="What each tier is promised",
        mark=Mark.COVERED,
        columns=(
            ("tier", "tier"),
            ("contribution_bound", "copies, at most"),
            ("epsilon_text", f"epsilon ({adjacency})"),
            ("other_text", f"epsilon ({OTHER_ADJACENCY[adjacency]})"),
        ),
        rows=rows,
        reading="The noise is the same for all; people who are in fewer copies have a smaller epsilon. Bars show "
        f"{adjacency} adjacency, with the unit and delta ({delta:.12g}) of the claim, which is for the worst-off tier.",
        x=Axis("epsilon", f"epsilon ({adjacency})"),
        y="label",
        colours=[draw.colour_of(run.selector)] * len(rows),
    )


def membership(run: StoredRun) -> Figure:
    claim = run.claim
    rows = []
    for rate in _FALSE_POSITIVE_RATES:
        for series, found in (("any attack, at most", claim.attack_bound(claim.adjacency, rate)), ("guessing", rate)):
            rows.append(
                {
                    "series": series,
                    "rate": rate,
                    "rate_text": f"{rate:.1%}",
                    "found": found,
                    "found_text": percent_up(found),
                }
            )
    return Figure.drawn(
        draw.curves,
        name="membership",
        title="What a membership attack could find",
        mark=Mark.COVERED,
        columns=(("series", "who"), ("rate_text", "wrongly accused"), ("found_text", "rightly found")),
        rows=rows,
        reading="An attacker decides from what is released whether a person's texts were used. Whatever the method, at "
        f"the rate of false accusations on the horizontal axis they find at most this share ({run.claim.terms()}).",
        x=Axis("rate", "wrongly accused (false-positive rate)", format="~%", log=True, ticks=_FALSE_POSITIVE_RATES),
        y=Axis("found", "rightly found (true-positive rate)", format="%"),
        series="series",
        colours={"any attack, at most": draw.colour_of(run.selector), "guessing": draw.NEUTRAL},
    )


def training_curves(run: StoredRun, metrics: pl.DataFrame) -> list[Figure]:
    every = max(1, math.ceil(len(metrics) / _MOST_STEPS))
    clipped = clipping(metrics) if run.guarantee else None
    kept = metrics.gather_every(every)
    figures = []
    for key, title, title_y, format_y, reading in (
        ("loss", "Training loss", "loss before the step", draw.NUMBER, "The mean over the batch that was drawn."),
        ("clipped_share", "Clipped gradients", "share of copies clipped", "%",
         f"How many gradients were longer than the clip norm.{(clipped and f' {clipped}') or ''}"),
        ("copies", "Drawn batch sizes", "copies drawn", draw.NUMBER,
         "How many copies were drawn; sums are divided by the public batch size, never by this."),
    ):  # fmt: skip
        if key not in kept.columns:
            continue
        rows = [
            {"step": row["step"], "value": float(row[key]), "step_text": shown(row["step"]), "text": shown(row[key])}
            for row in kept.select("step", key).iter_rows(named=True)
            if row[key] is not None and math.isfinite(row[key])
        ]
        if not rows:
            continue
        columns: Columns = (("step_text", "step"), ("text", title_y))
        figures.append(
            Figure.drawn(
                draw.curves,
                name=f"training-{key.replace('_', '-')}",
                title=titled(run, title),
                mark=Mark.PRIVATE,
                columns=columns,
                rows=rows,
                reading=reading if every == 1 else f"{reading} One stored step in {every} is shown.",
                x=Axis("step", "step"),
                y=Axis("value", title_y, format=format_y, zero=key != "loss"),
                colours={"": draw.colour_of(run.selector)},
            )
        )
    return figures


def titled(run: StoredRun, title: str) -> str:
    """Returns a title that never lets a run without a guarantee pass for a private one."""
    return title if run.claims else f"{title}: no guarantee ({run.reason})"


def utility_by_users(run: StoredRun, splits: dict[str, pl.DataFrame]) -> Figure | None:
    """Returns the main figure on held-out examples, by their number of users."""
    rows = [
        {"split": split, **figures, "users": row["users_per_example"]}
        for split, found in splits.items()
        for row in found.iter_rows(named=True)
        if (figures := _evaluated(row)) is not None
    ]
    if not rows:
        return None
    order = {name: number for number, name in enumerate(["all", *map(str, range(1000))])}
    rows.sort(key=lambda row: order.get(row["users"], len(order)))
    colours = {"validation": draw.NEUTRAL, "test": draw.colour_of(run.selector)}
    measure = rows[0]["measure"]
    return Figure.drawn(
        draw.intervals,
        name="utility-by-users",
        title=titled(run, f"{measure.capitalize()} by users per example"),
        mark=Mark.PRIVATE,
        columns=(("users", "users per example"), ("split", "split"), *_columns(rows)),
        rows=rows,
        reading=f"On examples that were kept out of training, with 95% intervals. {_references(rows)} Selection under "
        "a bound prefers examples that few people share, so the model may serve the others less well.",
        x=Axis("users", "users per example"),
        y=Axis("value", measure, format=_FORMATS[measure]),
        series="split",
        colours={name: colours.get(name, draw.NEUTRAL) for name in dict.fromkeys(row["split"] for row in rows)},
        beside="split",
    )


def _evaluated(row: dict[str, Any]) -> Row | None:
    """Returns one row of an evaluation, drawn by accuracy, or by loss if there is none; None without both."""
    measure = row.get("measure", "accuracy")
    if row.get(measure) is None or row.get(f"{measure}_low") is None:
        return None
    keys = {"value": measure, "low": f"{measure}_low", "high": f"{measure}_high"}
    keys |= {"trivial": f"trivial_{measure}", "baseline": f"baseline_{measure}", "loss": "loss"}
    figures = {name: row.get(key) for name, key in keys.items()}
    texts = {f"{name}_text": _text(measure if name != "loss" else name, value) for name, value in figures.items()}
    return {
        **figures,
        **texts,
        "measure": measure,
        "trivial_name": row.get("trivial"),
        "interval_text": f"{texts['low_text']} to {texts['high_text']}",
        "examples_text": shown(row["examples"]),
    }


def _text(measure: str, value: float | None) -> str:
    return f"{value:.1%}" if measure == "accuracy" and value is not None else shown(value)


def _columns(rows: Sequence[Row]) -> Columns:
    """Returns the table columns for evaluated rows."""
    first = rows[0]
    columns = [("value_text", first["measure"]), ("interval_text", "95% interval")]
    if first["trivial"] is not None:
        columns.append(("trivial_text", first["trivial_name"]))
    if any(row["baseline"] is not None for row in rows):
        columns.append(("baseline_text", "without privacy"))
    return (*columns, ("examples_text", "examples"), *((("loss_text", "loss"),) if first["measure"] != "loss" else ()))


def _references(rows: Sequence[Row]) -> str:
    """Explains the reference marks next to the points."""
    found = []
    if rows[0]["trivial"] is not None:
        found.append(f"A line: {rows[0]['trivial_name']}, counted on the same examples.")
    if any(row["baseline"] is not None for row in rows):
        found.append("A ring: the same model trained on the same batches without privacy.")
    return " ".join(found)


def utility_by_epsilon(run: StoredRun, also: Sequence[StoredRun]) -> Figure | None:
    """Returns the utility of several runs on the test split against epsilon; None if fewer than two have one."""
    rows = []
    for one in sorted([run, *also], key=lambda one: one.claim.epsilon if one.claims else math.inf):
        found = one.evaluations().get("test")
        figures = None if found is None or not len(found) else _evaluated(found.row(0, named=True))
        if figures is not None:
            about = {"run": one.path.name, "epsilon": _axis_label(one), "claim": one.headline, "selector": one.selector}
            rows.append({**about, **figures})
    if len(rows) < 2:
        return None
    measure = rows[0]["measure"]
    return Figure.drawn(
        draw.intervals,
        name="utility-by-epsilon",
        title=f"{measure.capitalize()} against epsilon, over several runs",
        mark=Mark.PRIVATE,
        columns=(("run", "run"), ("claim", "what is promised"), ("selector", "selector"), *_columns(rows)),
        rows=rows,
        reading="Unit, bound, delta and adjacency of each epsilon are in its row and show on hovering. "
        f"{_references(rows)} The guarantee shown is for each run alone; together, on the same people, they have a "
        "weaker one (compose them before publishing more than one model).",
        x=Axis("epsilon", "epsilon"),
        y=Axis("value", f"test {measure}", format=_FORMATS[measure]),
        series="selector",
        colours={name: draw.colour_of(name) for name in dict.fromkeys(row["selector"] for row in rows)},
        beside="run",
    )


def _axis_label(run: StoredRun) -> str:
    if not run.claims:
        return "no guarantee"
    simulated = run.claim.simulated_epsilon
    return run.claim.shown_epsilon + ("" if simulated is None else f" (simulated {rounded_up(simulated)})")


def audit(run: StoredRun, measured: float | None, *, verdict: str | None = None) -> Figure | None:
    """Returns the figure of the measured lower bound and the claim, or that of canaries; None if there is none."""
    if not run.claims or measured is None:
        return None
    canaries = verdict is None
    proven = run.claim.epsilon
    rows = [
        {"what": "measured: at least", "epsilon": float(measured), "text": shown(float(measured))},
        {"what": "proven: at most", "epsilon": proven, "text": rounded_up(proven)},
    ]
    how = (
        "One training with synthetic people among the real ones; the auditor guesses who was included."
        if canaries
        else "Many runs of the mechanism with the audit’s own keys and worst-case users."
    )
    return Figure.drawn(
        draw.horizontal_bars,
        name="audit-canaries" if canaries else "audit",
        title="Measured leakage and claim: " + ("canaries" if canaries else "mechanism"),
        mark=Mark.PRIVATE if canaries else Mark.COVERED,
        columns=(("what", "which"), ("text", "epsilon")),
        rows=rows,
        reading=f"{how} A measured value above the proven one would show a fault; a value below proves nothing by "
        f"itself. {verdict or ''} Claimed: {run.headline}.".replace("  ", " "),
        x=Axis("epsilon", "epsilon"),
        y="what",
        colours=(draw.NEUTRAL, draw.colour_of(run.selector)),
    )


def bob(measured: "Measured") -> Figure:
    """Returns the figure of the Bob test under one attribution: every trained model is one mark and one row."""
    scores = {"Bob's e-mails in": measured.scores_with, "Bob's e-mails out": measured.scores_without}
    rows = [{"models": name, "answer": score} for name, found in scores.items() for score in found]
    verdict = "the claim is not refuted" if measured.claim_holds else "the claim is not true for Bob"
    return Figure.drawn(
        draw.ticks,
        name=f"bob-{measured.attribution}",
        title=f"E-mails {measured.title}: {verdict}",
        mark=Mark.PRIVATE,
        columns=(("models", "models"), ("answer", "answer")),
        rows=rows,
        reading=f"Each mark is one trained model. Claimed: epsilon {measured.shown_epsilon}; {measured.terms}. "
        f"Measured with Bob as the unit: at least {rounded_down(measured.leak.epsilon_lower_bound)}.",
        x=Axis("answer", "log-odds that the secret is about work"),
        y="models",
        colours=dict(zip(scores, ("#b5442e", "#2b6cb0"), strict=True)),
    )
