"""Figures of the graph: users by level of protection, what was kept, and the cost of other choices."""

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from coowned.accounting.statement import by_number_of_copies, interval, rounded_down, rounded_up
from coowned.attribution.statistics import class_name
from coowned.errors import UncertifiableError
from coowned.progress import counted
from coowned.report import figures as draw
from coowned.report.figures import Axis, Columns, Figure, Mark, Row, percent, shown
from coowned.runs.records import CountClass, GraphSummary
from coowned.runs.stored_run import StoredRun

if TYPE_CHECKING:
    from coowned.accounting.choices import Choice

_BEFORE, _AFTER = "before selection", "after selection"
_GRAPH_ALONE = "Computed from the graph alone, not from content."


def levels(run: StoredRun) -> Figure:
    rows = level_rows(run)
    columns: Columns = (("copies", "copies they are in"), ("users", "people"), ("share_text", "share of all"))
    if run.claims:
        columns = (*columns, ("epsilon_text", "their epsilon"))
        title = "How many people have which level of protection"
        reading = (
            "A person in fewer copies than the bound allows has a stronger guarantee. Same delta and adjacency "
            f"({run.claim.delta:.12g}, {run.claim.adjacency}) as the claim, which is for the worst-off."
        )
    else:
        title = f"How many copies people are in: no guarantee ({run.reason})"
        reading = f"There is no guarantee ({run.reason}), so no level has an epsilon."
    return Figure.drawn(
        draw.bars,
        name="levels",
        title=title,
        mark=Mark.GRAPH,
        columns=columns,
        rows=rows,
        reading=reading,
        x=Axis("label", "copies a person is in" + (" (and their epsilon)" if run.claims else "")),
        y=Axis("share", "share of people"),
        colours={"": draw.colour_of(run.selector)},
    )


def level_rows(run: StoredRun) -> list[Row]:
    """Returns one row per number of copies; for groups the spread, so that the worst-off user is always in it."""
    certificate = run.certificate
    epsilons: dict[int, str] = {}
    if run.claims:
        epsilons[run.claim.contribution_bound] = rounded_up(run.claim.epsilon)
        with contextlib.suppress(UncertifiableError):  # then only the claim itself is shown
            for copies, _, least, most in by_number_of_copies(run.claim.by_copies()).iter_rows():
                if most is not None:
                    epsilons[copies] = interval(least, most)
    rows = []
    for copies, users in enumerate(certificate.copies_per_user):
        epsilon = epsilons.get(copies)
        rows.append(
            {
                "copies": copies,
                "label": str(copies) if epsilon is None else f"{copies} (ε {epsilon})",
                "users": users,
                "share": users / max(1, certificate.num_users),
                "share_text": percent(users, certificate.num_users),
                "epsilon_text": "not in training" if copies == 0 else epsilon,
            }
        )
    return rows


def before_and_after(run: StoredRun, summary: GraphSummary) -> list[Figure]:
    bound = counted(run.certificate.contribution_bound, "copy", "copies")
    return [
        _histograms(
            run,
            summary.users_per_example,
            what="users per example",
            of="share of examples or copies",
            reading="If the coloured bars lean to the left, the bound favours examples that few people share: that "
            f"is its bias. {_GRAPH_ALONE}",
        ),
        _histograms(
            run,
            summary.examples_per_user,
            what="examples per user",
            of="share of users",
            reading=f"After selection nobody is in more than {bound}. {_GRAPH_ALONE}",
        ),
    ]


def _histograms(run: StoredRun, classes: Sequence[CountClass], *, what: str, of: str, reading: str) -> Figure:
    totals = [max(1, sum(counts)) for counts in list(zip(*classes, strict=True))[1:]]
    rows = [
        {
            "class": class_name(begin),
            "series": series,
            "count_text": shown(count),
            "share": count / total,
            "share_text": percent(count, total),
        }
        for begin, *counts in classes
        for series, count, total in zip((_BEFORE, _AFTER), counts, totals, strict=True)
    ]
    return Figure.drawn(
        draw.bars,
        name=what.replace(" ", "-"),
        title=f"{what.capitalize()}, before and after selection",
        mark=Mark.GRAPH,
        columns=(("class", what), ("series", "of"), ("count_text", "number"), ("share_text", "share")),
        rows=rows,
        reading=reading,
        x=Axis("class", what),
        y=Axis("share", of),
        series="series",
        colours={_BEFORE: draw.NEUTRAL, _AFTER: draw.colour_of(run.selector)},
    )


def size_against_bound(run: StoredRun) -> Figure:
    """Returns the size of S beside the bound that its selector proved."""
    bound, size = run.certificate.origin.upper_bound, run.certificate.size
    assert bound is not None
    rows = [
        {"what": f"by {run.selector}", "copies": size, "text": shown(size), "share": percent(size, bound)},
        {"what": "proven maximum", "copies": bound, "text": shown(bound), "share": "100%"},
    ]
    return Figure.drawn(
        draw.horizontal_bars,
        name="size",
        title="Copies selected, against the proven bound",
        mark=Mark.GRAPH,
        columns=(("what", "selected"), ("text", "copies"), ("share", "share of the proven bound")),
        rows=rows,
        reading=f"{percent(size, bound)} of the most that any selection under this bound could have; the bound was "
        f"proven by {run.selector} in exact arithmetic.",
        x=Axis("copies", "copies"),
        y="what",
        colours=(draw.colour_of(run.selector), draw.NEUTRAL),
    )


def plan_row(choice: "Choice") -> Row:
    """Returns a plan's choice as a chart and table row; an infeasible schedule has no bound and no size."""
    exists = choice.contribution_bound > 0
    return {
        "selector": choice.selector,
        "contribution_bound": choice.contribution_bound or None,
        "size": choice.size if exists else None,
        "size_text": shown(choice.size if exists else None),
        "distinct_text": shown(choice.num_distinct if exists else None),
        "multiplier_text": "–" if choice.noise_multiplier is None else rounded_down(choice.noise_multiplier),
        "noise": None if choice.noise is None else choice.noise.effective_noise,
        "noise_text": "–" if choice.noise is None else rounded_down(choice.noise.effective_noise),
        "batch_size": choice.target.batch_size,
        "settings_text": _settings(choice),
        "error_text": "–" if choice.prefix_error is None else f"{choice.prefix_error:.3g}",
        "signal_text": "–" if choice.signal_to_noise is None else f"{choice.signal_to_noise:.1f}",
        "other_text": "–" if choice.noise is None else rounded_up(choice.noise.other_epsilon),
        "mean": choice.mean_users_per_example,
        "mean_text": "–" if choice.mean_users_per_example is None else f"{choice.mean_users_per_example:.2f}",
        "note": choice.note,
        "chosen": choice.best,
    }


def _settings(choice: "Choice") -> str:
    """Returns the batch size, and for correlated noise the separation or groups, with the spread of probabilities."""
    separation, sampling = choice.selected.min_separation, choice.sampling
    parts = [f"batches of {choice.target.batch_size:,}"]
    if separation:
        parts.append(f"min separation {separation:,}")
    if sampling.num_groups:
        parts.append(f"{sampling.num_groups:,} groups, p {sampling.least_group_probability:.3g} to "
                     f"{sampling.sampling_probability:.3g}")  # fmt: skip
    return "; ".join(parts)


def trade_off(rows: Sequence[Row], *, chosen: str, mean_users: float) -> list[Figure]:
    """Returns figures of size, noise and bias against the contribution bound.

    Args:
      rows: from `plan_row`.
      chosen: what the ring marks, in words.
      mean_users: users per example in all the data.
    """
    columns: Columns = (
        ("selector", "selector"),
        ("contribution_bound", "contribution bound"),
        ("size_text", "copies"),
        ("distinct_text", "distinct examples"),
        ("noise_text", "effective noise"),
        ("signal_text", "signal-to-noise"),
        ("mean_text", "users per copy"),
        ("chosen_text", "marked"),
    )
    shown_rows = [{**row, "chosen_text": chosen if row["chosen"] else "–"} for row in rows]
    figures = []
    for name, title, key, title_y, format_y, reading in (
        ("size", "Bound and size", "size", "copies in the training set", draw.NUMBER, "A larger bound lets more in."),
        ("noise", "Bound and noise", "noise", "effective noise multiplier", draw.NUMBER,
         "A larger bound needs more noise, a larger training set less. Correlated noise counts as independent noise of "
         "the same error."),
        ("bias", "Bound and bias", "mean", "users per copy", ".2~f",
         f"In all the data an example has {mean_users:.2f} users on average: the closer to it, the less bias."),
    ):  # fmt: skip
        drawn = [row for row in shown_rows if row[key] is not None]
        if drawn:
            figures.append(
                Figure.drawn(
                    draw.trade_off,
                    name=f"trade-off-{name}",
                    title=title,
                    mark=Mark.GRAPH,
                    columns=columns,
                    rows=drawn,
                    reading=f"{reading} The ring marks {chosen}.",
                    y=Axis(key, title_y, format=format_y),
                )
            )
    return figures
