"""`coowned plan`: what every mechanism, bound and selector would cost, before anything is decided."""

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coowned.cli import show
from coowned.cli.described import Described, describes_run
from coowned.cli.options import AllowLargeDelta, Json, complete_with, reads_data
from coowned.cli.paths import files_of, refuse_to_overwrite
from coowned.errors import CoownedError, InputError
from coowned.files import check_target, check_writable, whole_files
from coowned.mechanism.registry import MECHANISMS, mechanism_class
from coowned.progress import one_of

if TYPE_CHECKING:
    from coowned.accounting.choices import Choice
    from coowned.attribution.examples import AttributedExamples
    from coowned.attribution.sources import DataSource
    from coowned.runs.config import TrainConfig


@describes_run
@functools.partial(reads_data, or_config=True)
def run(
    source: "DataSource | None",
    described: Described,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="TRAIN.toml",
            help="A training configuration: its data, selector, sizes and privacy target replace DATA and the options.",
        ),
    ] = None,
    batch_size: Annotated[
        str | None, typer.Option(metavar="B[,B…]", help="Expected batch size, or several to try.")
    ] = None,
    iterations: Annotated[int | None, typer.Option(metavar="T", help="Number of steps.")] = None,
    contribution_bounds: Annotated[
        str | None,
        typer.Option(
            metavar="1,2,…", help="Bounds to try (default: 1,2,3,5,8, and larger while users have that many examples)."
        ),
    ] = None,
    selectors: Annotated[
        str | None,
        typer.Option(metavar="A,B…", help="Selectors to try (default: greedy,greedy-with-duplicates,priced)."),
    ] = None,
    mechanism: Annotated[
        str, typer.Option(help=f"{one_of([*MECHANISMS, 'all'])}.", autocompletion=complete_with([*MECHANISMS, "all"]))
    ] = "all",
    parameters: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Trainable parameters of the model, which the noise is spread over (default: those of the --model "
            "or the --config's, at most 100 of a linear one; else 100. BERT-Tiny has 4.4 million).",
        ),
    ] = None,
    allow_large_delta: AllowLargeDelta = False,
    seed: Annotated[
        int | None, typer.Option(help="Public seed that breaks ties (default: 0): the same seed gives the same S.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="plan.json|run.toml",
            help="Where to write the rows; or, if it ends in .toml, the configuration that `train` would choose.",
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="F", help="Where to write a page with charts of the trade-off.")
    ] = None,
    json: Json = False,
) -> None:
    """Shows the size of S, its bias and the noise for each mechanism, contribution bound and selector; marks the best.

    The best has the largest predicted signal-to-noise: many distinct examples, little noise. The text below the
    table explains why, what the noise means for the model, and what would lower it. Only the graph is used.

    Examples:

        coowned plan mail.mbox --epsilon 8 --delta 1e-8 --batch-size 256 --iterations 1000 --html plan.html

        coowned plan mail.mbox --epsilon 8 --delta 1e-8 --batch-size 64,256 --iterations 1000 --parameters 16385

        coowned plan --config train.toml --mechanism cyclic

        coowned plan mail --label folder --classes work,family --epsilon 8 --delta 1e-6 -o run.toml
    """
    from coowned.accounting.planning import default_bounds, plan
    from coowned.accounting.signal_to_noise import DEFAULT_PARAMETERS
    from coowned.runs.configured_run import completed_for
    from coowned.runs.defaults import reasons_in

    options: dict[str, Any] = {
        **described.privacy,
        "batch_size": None if batch_size is None else _numbers(batch_size, "--batch-size"),
        "iterations": iterations,
        "contribution_bounds": None if contribution_bounds is None else _numbers(contribution_bounds),
        "selectors": None if selectors is None else [part.strip() for part in selectors.split(",") if part.strip()],
        "allow_large_delta": allow_large_delta or None,
        "seed": seed,
    }
    writes_config = output is not None and output.suffix == ".toml"
    if [] in options.values():
        raise InputError("Nothing to plan; name at least one bound, one selector and one batch size")
    if (source is None) == (config is None):
        raise InputError("plan needs either DATA or --config TRAIN.toml")
    configuration = None
    if config is not None:
        from coowned.runs.config import TrainConfig

        described.refuse("needs DATA; with a configuration, set it there", privacy=False)
        if writes_config:
            raise InputError(f"{output}: needs DATA; with --config, `coowned train` chooses what the file leaves out")
        configuration = TrainConfig.read(config)
    elif writes_config or described.model:
        assert source is not None
        configuration = _configuration(source, described, options, mechanism if writes_config else None)
    settings: dict[str, Any] = {"adjacency": "zero-out"} if configuration is None else _settings_of(configuration)
    settings |= {name: value for name, value in options.items() if value is not None}
    for name in ("epsilon", "delta"):
        if name not in settings:
            raise InputError(f"plan needs --{name.replace('_', '-')}{' or --config' if config is None else ''}")
    source = source if configuration is None else configuration.source()
    assert source is not None
    refuse_to_overwrite([*files_of(source), *([] if config is None else [config])], [output, html])
    for target in filter(None, (output, html)):  # before the work
        check_target(target)
        check_writable(target.parent, target)
    with show.progress("reading") as progress:
        examples = source.read(progress)
    graph = examples.graph
    if configuration is not None:  # the examples that `coowned train` would select from
        from coowned.content.splits import split_examples

        graph = graph.subgraph(split_examples(graph, configuration.splits)["train"])
        if writes_config:
            with show.progress("choosing") as progress:
                configuration = completed_for(configuration, examples, graph, progress=progress)
            # What the table says of it is what is written.
            settings |= _settings_of(configuration)
            settings["contribution_bounds"] = [configuration.selection.settings["contribution_bound"]]
            mechanism = mechanism_class(configuration.mechanism.sizes[0]).kind
        elif bound := configuration.selection.settings.get("contribution_bound"):
            settings.setdefault("contribution_bounds", sorted({bound, *default_bounds(graph)}))
        parameters = parameters or _parameters_of(configuration, examples)
    with show.progress("planning") as progress:
        found = plan(
            graph,
            **settings,
            mechanism=mechanism,
            num_parameters=DEFAULT_PARAMETERS if parameters is None else parameters,
            progress=progress,
        )
    if output is not None:
        with whole_files(output) as (temporary,):
            text = configuration.text if configuration and writes_config else f"{found.to_json()}\n"
            temporary.write_text(text, encoding="utf-8")
    if html is not None:
        from coowned.report.page import write_plan

        write_plan(found, html)
    if json:
        show.as_json(found.to_rows())
        return
    _show(found.choices)
    for sentence in (*found.notes(), *found.advice):
        show.line(sentence)
    if configuration is not None and writes_config:
        assert output is not None
        for reason in reasons_in(configuration.text):
            show.line(reason)
        show.written(output)


def _configuration(
    source: "DataSource", described: Described, options: dict[str, Any], mechanism: str | None
) -> "TrainConfig":
    """Returns the configuration that the options describe; with a mechanism, all that they say of its other keys."""
    from coowned.runs.config import TrainConfig

    sections = described.sections(source, allow_large_delta=bool(options["allow_large_delta"]))
    if mechanism is not None:
        several = [name for name, value in options.items() if isinstance(value, list) and len(value) > 1]
        for name in several:
            raise InputError(f"--{name.replace('_', '-')}: a configuration has one; give one, or leave it out")
        sizes, bounds, selectors = (
            options[name] or [None] for name in ("batch_size", "contribution_bounds", "selectors")
        )
        kind = None if mechanism == "all" else mechanism_class(mechanism).training_kind
        sections["mechanism"] = {"kind": kind, "batch_size": sizes[0], "iterations": options["iterations"]}
        seed, bound = options["seed"], bounds[0]
        sections["selection"] = {"selector": selectors[0], "contribution_bound": bound, "seed": seed}
    return TrainConfig.from_sections(sections, name="the options")


def _settings_of(config: "TrainConfig") -> dict[str, Any]:
    from coowned.selection.registry import selectors_by_bound

    selection, privacy, sizes = config.selection, config.privacy, config.mechanism
    if isinstance(privacy.epsilon, dict):
        raise InputError("[privacy] epsilon: a plan compares choices at one epsilon, not at one for each tier")
    settings: dict[str, Any] = {
        "epsilon": None if isinstance(privacy.epsilon, str) else privacy.epsilon,
        "delta": privacy.delta,
        "adjacency": privacy.adjacency,
        "allow_large_delta": privacy.allow_large_delta,
        "batch_size": sizes.batch_size,
        "iterations": sizes.iterations,
        "selectors": [selection.selector] if selection.selector in selectors_by_bound() else None,
        "seed": selection.seed,
    }
    return {name: value for name, value in settings.items() if value is not None}


def _parameters_of(config: "TrainConfig", examples: "AttributedExamples") -> int | None:
    """Trainable parameters of a configuration's model whose noise counts; None if it cannot be made yet.

    Its columns, files or packages may be missing. No content is read.
    """
    import numpy as np

    from coowned.accounting.signal_to_noise import felt_parameters
    from coowned.models.model import num_parameters, num_scores

    no_rows = {"train": np.empty(0, np.int64)}
    try:
        model = config.task(examples.payload.schema).load(examples, no_rows).model
        return felt_parameters(num_parameters(model), num_scores(model))
    except CoownedError:
        return None


def _numbers(text: str, option: str = "--contribution-bounds") -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise InputError(f"{option} takes integers separated by commas, not {text!r}") from None


def _show(choices: "tuple[Choice, ...]") -> None:
    if not choices:
        return
    first = choices[0].target
    sizes = sorted({choice.target.batch_size for choice in choices})
    steps = sorted({choice.target.iterations for choice in choices})
    batches = " or ".join(f"{size:,}" for size in sizes) if len(sizes) < 4 else f"{sizes[0]:,} to {sizes[-1]:,}"
    differing = {  # shown where rows differ in them
        "batch": [choice.target.batch_size for choice in choices],
        "mechanism": [choice.mechanism for choice in choices],
    }
    leading = {name: values for name, values in differing.items() if len(set(values)) > 1}
    columns = [*leading, "selector", "k", "bands", "distinct", "copies", "users per copy"]
    columns += ["noise multiplier", "effective", "error", "signal-to-noise", f"epsilon, {first.other_adjacency}", ""]
    show.table(
        f"epsilon {first.epsilon:g} (unit: {first.unit}; bound k), delta {first.delta:g}, {first.adjacency}; batches "
        f"of {batches}, {' to '.join(f'{step:,}' for step in (steps[0], steps[-1])[: len(steps)])} steps",
        columns,
        [(*values, *_row(choice)) for choice, *values in zip(choices, *leading.values(), strict=True)],
        left=[number for number, column in enumerate(columns) if column in ("mechanism", "selector", "")],
    )
    show.line(
        "error: root mean square over the steps of the error in prefix sums of mean gradients, in clip norms (*: "
        "lowest for its mechanism)"
    )
    show.line("signal-to-noise: predicted for the whole training; that of a single step is below")
    show.line(f"users per example in all data: {first.population_mean_users_per_example:.2f}")
    for choice in choices:
        least, most = choice.sampling.least_group_probability, choice.sampling.sampling_probability
        if least not in (None, most):
            show.line(
                f"{choice.label}: groups are sampled with probability {least:.4g} to {most:.4g}; the noise covers the "
                "worst"
            )


def _row(choice: "Choice") -> tuple[str | int, ...]:
    from coowned.accounting.statement import rounded_up

    def number(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    return (
        choice.selector,
        choice.contribution_bound or "-",
        choice.sampling.num_bands or "-",
        choice.num_distinct,
        choice.size,
        number(choice.mean_users_per_example, 2),
        number(choice.noise_multiplier, 4),
        number(None if choice.noise is None else choice.noise.effective_noise, 4),
        "-" if choice.prefix_error is None else f"{choice.prefix_error:.3g}{'*' if choice.least_error else ''}",
        number(choice.signal_to_noise, 1),
        "-" if choice.noise is None else rounded_up(choice.noise.other_epsilon),
        "<- best" if choice.best else "",
    )
