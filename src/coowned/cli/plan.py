"""`coowned plan`: what every bound and selector would cost, before anything is decided."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coowned.cli import show
from coowned.cli.data_options import reads_data
from coowned.cli.options import Adjacency, AllowLargeDelta, Delta, Json, Seed, offering
from coowned.cli.overwriting import files_of, refuse_to_overwrite
from coowned.errors import InputError
from coowned.files import whole_files
from coowned.mechanism.registry import PLANNED
from coowned.progress import one_of

if TYPE_CHECKING:
    from coowned.accounting.planning import Choice
    from coowned.attribution.sources import DataSource


@reads_data
def run(
    source: "DataSource",
    epsilon: Annotated[float, typer.Option(metavar="E", help="The privacy target.")],
    delta: Delta,
    batch_size: Annotated[int, typer.Option(metavar="B", help="Expected batch size.")],
    iterations: Annotated[int, typer.Option(metavar="T", help="Number of steps.")],
    contribution_bounds: Annotated[
        str | None,
        typer.Option(metavar="1,2,…", help="Bounds to try (default: 1,2,3,5,8, and on while users have as many)."),
    ] = None,
    selectors: Annotated[
        str, typer.Option(metavar="A,B…", help="Selectors to try.")
    ] = "greedy,greedy-with-duplicates,priced",
    mechanism: Annotated[
        str, typer.Option(help=f"{one_of([*PLANNED, 'all'])}.", autocompletion=offering([*PLANNED, "all"]))
    ] = "all",
    parameters: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Trainable parameters of the model, which the noise is spread over (default: 100, a small linear "
            "model; a text-classifier has num_features + 1 for two classes, BERT-Tiny 4.4 million).",
        ),
    ] = None,
    adjacency: Adjacency = "zero-out",
    allow_large_delta: AllowLargeDelta = False,
    seed: Seed = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="plan.json", help="Where to write the rows.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="F", help="Where to write a page with charts of the trade-off.")
    ] = None,
    json: Json = False,
) -> None:
    """Shows the size of S, its bias and the noise for each contribution bound and selector, and marks the best.

    The best has the largest predicted signal-to-noise: many distinct examples, little noise. What that noise means for
    the model, and what would lower it, is said below the table. Only the graph is used.

    Examples:

        coowned plan mail.mbox --epsilon 8 --delta 1e-8 --batch-size 256 --iterations 1000 --html plan.html

        coowned plan mail.mbox --epsilon 8 --delta 1e-8 --batch-size 64 --iterations 1000 --parameters 16385
    """
    from coowned.accounting.planning import plan
    from coowned.accounting.signal_to_noise import DEFAULT_PARAMETERS
    from coowned.accounting.terms import OTHER_ADJACENCY, UNIT

    bounds = None if contribution_bounds is None else _bounds(contribution_bounds)
    words = [part.strip() for part in selectors.split(",") if part.strip()]
    if bounds == [] or not words:
        raise InputError("Nothing to plan; name at least one bound and one selector")
    refuse_to_overwrite(files_of(source), [output, html])
    with show.progress("reading") as progress:
        graph = source.read(progress).graph
    with show.progress("planning") as progress:
        found = plan(
            graph,
            epsilon=epsilon,
            delta=delta,
            adjacency=adjacency,
            batch_size=batch_size,
            iterations=iterations,
            contribution_bounds=bounds,
            selectors=words,
            mechanism=mechanism,
            num_parameters=DEFAULT_PARAMETERS if parameters is None else parameters,
            allow_large_delta=allow_large_delta,
            seed=seed,
            progress=progress,
        )
    if output is not None:
        with whole_files(output) as (temporary,):
            temporary.write_text(found.to_json() + "\n", encoding="utf-8")
    if html is not None:
        from coowned.report.page import write_plan

        write_plan(found, html)
    if json:
        show.as_json(found.to_rows())
        return
    show.table(
        f"epsilon {epsilon:g} (unit: {UNIT}; bound k), delta {delta:g}, {adjacency}; batches of {batch_size:,}, "
        f"{iterations:,} steps",
        ("selector", "k", "distinct", "copies", "users per copy", "noise multiplier", "effective", "signal-to-noise",
         f"epsilon, {OTHER_ADJACENCY[adjacency]}", ""),
        [_row(choice) for choice in found.choices],
        left=(0, 9),
    )  # fmt: skip
    if found.choices:
        show.line(f"users per example in all the data: {found.choices[0].population_mean_users_per_example:.2f}")
    for sentence in (*found.notes(), *found.advice):
        show.line(sentence)


def _bounds(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise InputError(f"--contribution-bounds takes whole numbers separated by commas, not {text!r}") from None


def _row(choice: "Choice") -> tuple[str | int, ...]:
    from coowned.accounting.statement import rounded_up

    def number(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    return (
        choice.selector,
        choice.contribution_bound or "-",
        choice.num_distinct,
        choice.size,
        number(choice.mean_users_per_example, 2),
        number(choice.noise_multiplier, 4),
        number(choice.effective_noise, 4),
        number(choice.signal_to_noise, 1),
        "-" if choice.other_epsilon is None else rounded_up(choice.other_epsilon),
        "<- best" if choice.best else "",
    )
