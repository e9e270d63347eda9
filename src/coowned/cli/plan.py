"""`coowned plan`: what every bound and selector would cost, before anything is decided."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coowned.cli import show
from coowned.cli.data_options import reads_data
from coowned.cli.overwriting import files_of, refuse_to_overwrite
from coowned.errors import InputError
from coowned.files import whole_files

if TYPE_CHECKING:
    from coowned.attribution.sources import DataSource


@reads_data
def run(
    source: "DataSource",
    epsilon: Annotated[float, typer.Option(metavar="E", help="The privacy target.")],
    delta: Annotated[float, typer.Option(metavar="D", help="The probability that the promise may fail.")],
    batch_size: Annotated[int, typer.Option(metavar="B", help="Expected batch size.")],
    iterations: Annotated[int, typer.Option(metavar="T", help="Number of steps.")],
    contribution_bounds: Annotated[str, typer.Option(metavar="1,2,…", help="The bounds to try.")] = "1,2,3,5,8",
    selectors: Annotated[
        str, typer.Option(metavar="A,B…", help="The selectors to try.")
    ] = "greedy,greedy-with-duplicates,priced",
    mechanism: Annotated[str, typer.Option(help="poisson, min-separation or all.")] = "all",
    adjacency: Annotated[str, typer.Option(help="zero-out or replace.")] = "zero-out",
    seed: Annotated[int, typer.Option(help="Public; orders ties.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="plan.json", help="Where the rows go.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="F", help="A page with pictures of the trade-off.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="The rows as JSON on stdout.")] = False,
) -> None:
    """Size of S, bias and noise for each contribution bound and selector; marks the best. Uses the graph alone.

    Example:

        coowned plan mail.mbox --epsilon 8 --delta 1e-8 --batch-size 256 --iterations 1000 --html plan.html
    """
    from coowned.accounting.guarantee import OTHER_ADJACENCY, UNIT
    from coowned.accounting.planning import plan
    from coowned.accounting.statement import rounded_up

    try:
        bounds = [int(part) for part in contribution_bounds.split(",") if part.strip()]
    except ValueError:
        raise InputError(
            f"--contribution-bounds takes whole numbers with commas between them, not {contribution_bounds!r}"
        ) from None
    words = [part.strip() for part in selectors.split(",") if part.strip()]
    if not bounds or not words:
        raise InputError("there is nothing to plan; name at least one bound and one selector")
    refuse_to_overwrite(files_of(source), [output, html])
    with show.progress("reading") as progress:
        graph = source.read(progress).graph
    with show.progress("planning") as progress:
        made = plan(
            graph,
            epsilon=epsilon,
            delta=delta,
            batch_size=batch_size,
            iterations=iterations,
            adjacency=adjacency,
            contribution_bounds=bounds,
            selectors=words,
            mechanism=mechanism,
            seed=seed,
            progress=progress,
        )
    if output is not None:
        with whole_files(output) as (temporary,):
            temporary.write_text(made.to_json() + "\n", encoding="utf-8")
    if html is not None:
        from coowned.report.page import write_plan

        write_plan(
            made,
            html,
            epsilon=epsilon,
            delta=delta,
            adjacency=adjacency,
            batch_size=batch_size,
            iterations=iterations,
        )
    if json:
        show.as_json(made.to_rows())
        return
    other = OTHER_ADJACENCY[adjacency]
    show.table(
        f"epsilon {epsilon:g} (unit: {UNIT}; bound k), delta {delta:g}, {adjacency}; batches of {batch_size:,}, "
        f"{iterations:,} steps",
        (
            "selector",
            "k",
            "copies",
            "distinct",
            "users per copy",
            "noise multiplier",
            "effective",
            f"epsilon, {other}",
            "",
        ),
        [
            (
                choice.selector,
                choice.contribution_bound or "-",
                choice.size,
                choice.num_distinct,
                "-" if choice.mean_users_per_example is None else f"{choice.mean_users_per_example:.2f}",
                "-" if choice.noise_multiplier is None else f"{choice.noise_multiplier:.4f}",
                "-" if choice.effective_noise is None else f"{choice.effective_noise:.4f}",
                "-" if choice.other_epsilon is None else rounded_up(choice.other_epsilon),
                "<- best" if choice.best else "",
            )
            for choice in made.choices
        ],
        left=(0, 8),
    )
    if made.choices:
        show.line(f"users per example in all the data: {made.choices[0].population_mean_users_per_example:.2f}")
    for choice in made.choices:
        if choice.note:
            bound = f", bound {choice.contribution_bound:,}" if choice.contribution_bound else ""
            show.line(f"{choice.selector}{bound}: {choice.note}")
    for sentence in made.advice:
        show.line(sentence)
