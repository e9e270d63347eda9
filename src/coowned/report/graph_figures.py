"""Figures of the graph and of bounds: what was kept, what was lost, what other choices would cost."""

from collections.abc import Sequence
from typing import Any

from coowned.accounting import calculators
from coowned.accounting.planning import Choice
from coowned.accounting.statement import rounded_down, rounded_up
from coowned.errors import CoownedError
from coowned.mechanism.banded_strategy import BandedStrategy
from coowned.mechanism.sampling import PoissonSampling
from coowned.report import charts
from coowned.report.contents import Mark, RunContents
from coowned.report.figures import Figure, percent, shown

_NAMES = ("before selection", "after selection")


def levels(run: RunContents) -> Figure:
    """How many people have which level of protection."""
    rows = level_rows(run)
    columns = (("copies", "copies she is in"), ("users", "people"), ("share_text", "share of all"))
    if run.claims:
        columns = (*columns, ("epsilon_text", "epsilon for her"))
        reading = (
            "A person in fewer copies than the bound allows has a better guarantee of her own. Under the same delta "
            f"and adjacency ({run.claim.delta:.12g}, {run.claim.adjacency}) as the claim, which is for the worst-off."
        )
    else:
        reading = f"There is no guarantee ({run.reason}), so no level has an epsilon."
    return Figure(
        name="levels",
        title="How many people have which level of protection"
        if run.claims
        else f"How many copies people are in: no guarantee ({run.reason})",
        mark=Mark.GRAPH,
        chart=charts.bars(
            rows,
            x="label",
            y="share",
            title_x="copies a person is in" + (" (and her epsilon)" if run.claims else ""),
            title_y="share of people",
            colour=charts.colour_of(run.selector),
            tooltip=columns,
        ),
        columns=columns,
        rows=rows,
        reading=reading,
    )


def level_rows(run: RunContents) -> list[dict[str, Any]]:
    """One row a number of copies; of cyclic groups the worst epsilon counts."""
    counts = run.certificate.copies_per_user
    epsilons: dict[int, float] = {}
    if run.claims:
        for row in run.claim.by_copies().iter_rows(named=True):
            if row["epsilon"] is not None:
                epsilons[row["copies"]] = max(row["epsilon"], epsilons.get(row["copies"], 0.0))
    rows = []
    for copies, users in enumerate(counts):
        epsilon = epsilons.get(copies)
        text = "no part in training" if copies == 0 else None if epsilon is None else rounded_up(epsilon)
        label = str(copies) if epsilon is None else f"{copies} (ε {rounded_up(epsilon)})"
        rows.append(
            {
                "copies": copies,
                "label": label,
                "users": users,
                "share": users / max(1, run.certificate.num_users),
                "share_text": percent(users, run.certificate.num_users),
                "epsilon_text": text,
            }
        )
    return rows


def before_and_after(run: RunContents, statistics: dict[str, Any]) -> list[Figure]:
    """Users per example and examples per user, before and after selection."""
    graph_text = "Only the numbers of the graph enter; what the examples say does not."
    return [
        _classes(
            run,
            statistics["users_per_example"],
            name="users-per-example",
            title="Users per example, before and after selection",
            what="users per example",
            of="share of examples or copies",
            reading="Where the coloured bars lean to the left, the bound favours examples that few people share: that "
            f"is its bias. {graph_text}",
        ),
        _classes(
            run,
            statistics["examples_per_user"],
            name="examples-per-user",
            title="Examples per user, before and after selection",
            what="examples per user",
            of="share of users",
            reading=f"After selection nobody is in more than {run.certificate.contribution_bound:,} copies. "
            f"{graph_text}",
        ),
    ]


def _classes(
    run: RunContents, classes: Sequence[dict[str, Any]], *, name: str, title: str, what: str,
    of: str, reading: str,
) -> Figure:  # fmt: skip
    totals = [max(1, sum(row[key] for row in classes)) for key in ("before", "after")]
    rows = []
    for row in classes:
        span = str(row["from"]) if row["from"] == row["to"] else f"{row['from']:,}–{row['to']:,}"
        for series, key, total in zip(_NAMES, ("before", "after"), totals, strict=True):
            rows.append(
                {
                    "class": span,
                    "series": series,
                    "count": row[key],
                    "count_text": shown(row[key]),
                    "share": row[key] / total,
                    "share_text": percent(row[key], total),
                }
            )
    fields = (("class", what), ("series", "of"), ("count_text", "number"), ("share_text", "share"))
    return Figure(
        name=name,
        title=title,
        mark=Mark.GRAPH,
        chart=charts.paired_bars(
            rows,
            x="class",
            y="share",
            series="series",
            names=_NAMES,
            colours=(charts.NEUTRAL, charts.colour_of(run.selector)),
            title_x=what,
            title_y=of,
            tooltip=fields,
        ),
        columns=fields,
        rows=rows,
        reading=reading,
    )


def size_against_bound(run: RunContents, statistics: dict[str, Any]) -> Figure | None:
    """The size of S beside the proven bound; None for a schedule, whose size is given."""
    bound, size = statistics["upper_bound"], statistics["size"]
    if bound is None:
        return None
    rows = [
        {"what": f"by {run.selector}", "copies": size, "text": shown(size), "share": percent(size, bound)},
        {"what": "proven maximum", "copies": bound, "text": shown(bound), "share": "100%"},
    ]
    fields = (("what", "selected"), ("text", "copies"), ("share", "share of the proven bound"))
    return Figure(
        name="size",
        title="Copies selected, against the proven bound",
        mark=Mark.GRAPH,
        chart=charts.level_bars(
            rows,
            x="copies",
            y="what",
            title_x="copies",
            title_y=None,
            colours=(charts.colour_of(run.selector), charts.NEUTRAL),
            tooltip=fields,
        ),
        columns=fields,
        rows=rows,
        reading=f"{percent(size, bound)} of the most that any selection under this bound could have; the bound was "
        f"proven by {statistics['upper_bound_from']} in exact arithmetic.",
    )


def trade_off_rows(run: RunContents, statistics: dict[str, Any]) -> list[dict[str, Any]]:
    """The stored choices with the noise that each would need for the run's own target."""
    return [
        _trade_off_row(row, _noise_for(run, row), row["mean_users_per_copy"], row["chosen"])
        for row in statistics["trade_off"]
    ]


def plan_rows(choices: Sequence[Choice]) -> list[dict[str, Any]]:
    """The choices of a plan, in the same form; the best is the chosen one."""
    return [
        _trade_off_row(
            {
                "selector": choice.selector,
                # A schedule that there is not has neither a bound nor a size: no picture has a mark for it.
                "contribution_bound": choice.contribution_bound or None,
                "size": choice.size if choice.contribution_bound else None,
                "num_distinct": choice.num_distinct if choice.contribution_bound else None,
            },
            choice.effective_noise,
            choice.mean_users_per_example,
            choice.best,
        )
        | {
            "note": choice.note,
            "multiplier_text": "–" if choice.noise_multiplier is None else rounded_down(choice.noise_multiplier),
            "other_text": "–" if choice.other_epsilon is None else rounded_up(choice.other_epsilon),
        }
        for choice in choices
    ]


def trade_off(
    rows: Sequence[dict[str, Any]],
    *,
    chosen: str,
    population_mean: float,
    noise_title: str = "Bound and noise",
) -> list[Figure]:
    """Size, noise and bias against the contribution bound, from `trade_off_rows` or `plan_rows`.

    Args:
      chosen: what the ring marks, in words.
      population_mean: users per example in all the data.
    """
    fields = (
        ("selector", "selector"),
        ("contribution_bound", "contribution bound"),
        ("size_text", "copies"),
        ("distinct_text", "distinct examples"),
        ("noise_text", "effective noise"),
        ("mean_text", "users per copy"),
        ("chosen_text", "marked"),
    )
    shown_rows = [{**row, "chosen_text": chosen if row["chosen"] else "–"} for row in rows]

    def figure(name: str, title: str, key: str, title_y: str, format_y: str, reading: str) -> Figure | None:
        own = [row for row in shown_rows if row[key] is not None]
        if not own:
            return None
        return Figure(
            name=f"trade-off-{name}",
            title=title,
            mark=Mark.GRAPH,
            chart=charts.trade_off(own, y=key, title_y=title_y, format_y=format_y, tooltip=fields),
            columns=fields,
            rows=own,
            reading=f"{reading} The ring is what {'this run uses' if chosen == 'chosen' else 'needs the least noise'}.",
        )

    made = [
        figure("size", "Bound and size", "size", "copies in the training set", "~s",
               "A larger bound lets more examples in."),
        figure("noise", noise_title, "noise", "effective noise multiplier", "~g",
               "A larger bound needs more noise, a larger training set less. Correlated noise counts as independent "
               "noise of the same error."),
        figure("bias", "Bound and bias", "mean", "users per copy", ".2~f",
               f"In all the data an example has {population_mean:.2f} users on average: the nearer, the less bias."),
    ]  # fmt: skip
    return [one for one in made if one is not None]


def _trade_off_row(row: dict[str, Any], noise: float | None, mean: float | None, chosen: bool) -> dict[str, Any]:
    return {
        "selector": row["selector"],
        "contribution_bound": row["contribution_bound"],
        "size": row["size"],
        "size_text": shown(row["size"]),
        "distinct_text": shown(row["num_distinct"]),
        "noise": noise,
        "noise_text": "–" if noise is None else rounded_down(noise),
        "mean": mean,
        "mean_text": "–" if mean is None else f"{mean:.2f}",
        "chosen": chosen,
    }


def _noise_for(run: RunContents, row: dict[str, Any]) -> float | None:
    """The noise of the run itself; for another choice what Poisson sampling would need for the same target."""
    made = run.guarantee
    if made is None:
        return None
    if row["chosen"]:
        if isinstance(run.mechanism, PoissonSampling):
            return made.noise_multiplier
        strategy = BandedStrategy(num_bands=run.mechanism.num_bands, iterations=run.mechanism.iterations)
        return made.noise_multiplier * strategy.error_factor()
    batch_size = run.mechanism.batch_size
    if batch_size is None or row["size"] < batch_size or not row["recounted_bound"]:
        return None
    mechanism = PoissonSampling(
        contribution_bound=row["recounted_bound"],
        sampling_probability=batch_size / row["size"],
        iterations=run.mechanism.iterations,
        batch_size=batch_size,
    )
    try:
        return calculators.calibrate(mechanism, epsilon=made.epsilon, delta=made.delta, adjacency=made.adjacency)
    except CoownedError:  # a choice nobody made must not spoil the page
        return None
