"""`coowned plan`: the cost of every mechanism, bound and selector, before training."""

import contextlib
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coowned.cli import show
from coowned.cli.engine import Engine, runs_on_engines
from coowned.cli.options import (
    AllowLargeDelta,
    Described,
    Json,
    complete_with,
    describes_run,
    files_of,
    reads_data,
    refuse_to_overwrite,
)
from coowned.errors import InputError
from coowned.files import check_target, check_writable, whole_files
from coowned.mechanism.registry import MECHANISMS, mechanism_class
from coowned.progress import one_of

if TYPE_CHECKING:
    from coowned.accounting.choices import Choice, Plan
    from coowned.attribution.sources import DataSource
    from coowned.runs.config import TrainConfig
    from coowned.runs.defaults import Attempted


_Config = Annotated[
    Path | None,
    typer.Option(
        metavar="TRAIN.toml",
        help="A training configuration: its data, selector, sizes and privacy target replace DATA and the options.",
    ),
]
_BatchSizes = Annotated[str | None, typer.Option(metavar="B[,B…]", help="Expected batch size, or several to try.")]
_Iterations = Annotated[int | None, typer.Option(metavar="T", help="Number of steps.")]
_Bounds = Annotated[
    str | None,
    typer.Option(
        metavar="1,2,…", help="Bounds to try (default: 1,2,3,5,8, and larger while users have that many examples)."
    ),
]
_BoundsFile = Annotated[
    Path | None,
    typer.Option(
        "--contribution-bounds-file",
        metavar="FILE",
        help="A table with the columns user, bound (and tier): bounds of single users, under each bound that is tried.",
    ),
]
_Selectors = Annotated[
    str | None,
    typer.Option(metavar="A,B…", help="Selectors to try (default: greedy,greedy-with-duplicates,priced)."),
]
_Mechanism = Annotated[
    str, typer.Option(help=f"{one_of([*MECHANISMS, 'all'])}.", autocompletion=complete_with([*MECHANISMS, "all"]))
]
_Parameters = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Trainable parameters of the model, which the noise is spread over (default: those of the --model "
        "or the --config's, at most 100 of a linear one; else 100. BERT-Tiny has 4.4 million).",
    ),
]
_Seed = Annotated[
    int | None, typer.Option(help="Public seed that breaks ties (default: 0): the same seed gives the same S.")
]
_Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="plan.json|run.toml",
        help="Where to write the rows; or, if it ends in .toml, the configuration that `train` would choose.",
    ),
]
_Html = Annotated[
    Path | None, typer.Option("--html", metavar="F", help="Where to write a page with charts of the trade-off.")
]


@describes_run
@runs_on_engines
@functools.partial(reads_data, or_config=True)
def run(
    source: "DataSource | None",
    engine: Engine,
    described: Described,
    config: _Config = None,
    batch_size: _BatchSizes = None,
    iterations: _Iterations = None,
    contribution_bounds: _Bounds = None,
    contribution_bounds_file: _BoundsFile = None,
    selectors: _Selectors = None,
    mechanism: _Mechanism = "all",
    parameters: _Parameters = None,
    allow_large_delta: AllowLargeDelta = False,
    seed: _Seed = None,
    output: _Output = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file of -o if it exists.")] = False,
    html: _Html = None,
    json: Json = False,
) -> None:
    """Shows the size of S, its bias and the noise for each mechanism, contribution bound and selector; marks the best.

    The best has the largest predicted signal-to-noise: many distinct examples, little noise. The text below the
    table explains why, what the noise means for the model, and what would lower it. Only the graph is used.

    Examples:

        coowned plan mail.mbox --epsilon 8 --delta 1e-8 --batch-size 256 --iterations 1000 --html plan.html

        coowned plan mail.mbox --epsilon 8 --delta 1e-8 --batch-size 64,256 --iterations 1000 --parameters 16385

        coowned plan hdfs://head/papers.parquet --users authors --example-id id --epsilon 8 --delta 1e-8 \\
            --engine spark --master spark://head:7077 --checkpoint-dir hdfs://head/tmp

        coowned plan --config train.toml --mechanism cyclic

        coowned plan mail --label folder --classes work,family --epsilon 8 --delta 1e-6 -o run.toml
    """
    options: dict[str, Any] = {
        **described.privacy,
        "batch_size": None if batch_size is None else _numbers(batch_size, "--batch-size"),
        "iterations": iterations,
        "contribution_bounds": None if contribution_bounds is None else _numbers(contribution_bounds),
        "user_bounds": contribution_bounds_file,
        "selectors": None if selectors is None else [part.strip() for part in selectors.split(",") if part.strip()],
        "mechanism": mechanism,
        "num_parameters": parameters,
        "allow_large_delta": allow_large_delta or None,
        "seed": seed,
    }
    given = {name: value for name, value in options.items() if value is not None}
    if [] in given.values():
        raise InputError("Nothing to plan; name at least one bound, one selector and one batch size")
    if (source is None) == (config is None):
        raise InputError("plan needs either DATA or --config TRAIN.toml")
    chosen = _configuration(source, described, given, config, output)
    _check_target(chosen, given, from_file=config is not None)
    data = chosen.source() if chosen is not None else source
    assert data is not None
    read = [*files_of(data), *filter(None, (config, contribution_bounds_file))]
    refuse_to_overwrite(read, [output, html])
    refuse_to_overwrite((), [output], replace=overwrite)
    for target in filter(None, (output, html)):  # before the work
        check_target(target)
        check_writable(target.parent, target)
    engine.refuse_addresses(str(data.path))
    if engine.on_spark:
        if chosen is not None:
            raise InputError("a plan on Spark takes DATA, but no configuration or model; use the local engine")
        found, complete = _plan_on_spark(data, given, engine), None
    else:
        attempted = _attempted(data, chosen, given, complete=_is_config(output))
        with show.progress("planning") as progress:
            found, complete = attempted.plan(progress), attempted.config
    _write(found, complete, output, html)
    if json:
        show.as_json(found.to_rows())
    else:
        _show(found, complete, output)


def _is_config(output: Path | None) -> bool:
    return output is not None and output.suffix == ".toml"


def _configuration(
    source: "DataSource | None", described: Described, given: dict[str, Any], file: Path | None, output: Path | None
) -> "TrainConfig | None":
    """Returns the configuration to plan for: of a file, or what the options describe; None where they do not."""
    if file is not None:
        from coowned.runs.config import TrainConfig

        described.refuse("needs DATA; with a configuration, set it there", privacy=False)
        if _is_config(output):
            raise InputError(f"{output}: needs DATA; with --config, `coowned train` chooses what the file leaves out")
        return TrainConfig.read(file)
    assert source is not None
    if not _is_config(output) and not described.model:
        return None
    from coowned.runs.config import TrainConfig

    sections = described.sections(source, allow_large_delta=bool(given.get("allow_large_delta")))
    return TrainConfig.from_sections(
        sections | _sections_of(given) if _is_config(output) else sections, name="the options"
    )


def _sections_of(given: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the sections of selection and mechanism; a configuration has one value where a plan tries several."""
    for name, value in given.items():
        if isinstance(value, list) and len(value) > 1:
            raise InputError(f"--{name.replace('_', '-')}: a configuration has one; give one, or leave it out")
    batch_size, bound, selector = (
        given.get(name, [None])[0] for name in ("batch_size", "contribution_bounds", "selectors")
    )
    kind = None if given["mechanism"] == "all" else mechanism_class(given["mechanism"]).training_kind
    file = given.get("user_bounds")
    bounds = {} if file is None else {"contribution_bounds": os.path.abspath(file)}
    return {
        "mechanism": {"kind": kind, "batch_size": batch_size, "iterations": given.get("iterations")},
        "selection": {"selector": selector, "contribution_bound": bound, "seed": given.get("seed"), **bounds},
    }


def _check_target(config: "TrainConfig | None", given: dict[str, Any], *, from_file: bool) -> None:
    """Refuses a plan without epsilon or delta."""
    from coowned.runs.defaults import plan_settings

    known = given if config is None else {**plan_settings(config), **given}
    for name in ("epsilon", "delta"):
        if name not in known:
            raise InputError(f"plan needs --{name}{'' if from_file else ' or --config'}")


def _attempted(
    source: "DataSource", config: "TrainConfig | None", given: dict[str, Any], *, complete: bool
) -> "Attempted":
    from coowned.runs.defaults import Attempted, attempts_for

    with show.progress("reading") as progress:
        examples = source.read(progress, content=False)
    if config is None:
        return Attempted(graph=examples.graph, settings={"adjacency": "zero-out", **given})
    with show.progress("choosing") if complete else contextlib.nullcontext() as progress:
        return attempts_for(config, examples, given, complete=complete, progress=progress)


def _plan_on_spark(source: "DataSource", given: dict[str, Any], engine: Engine) -> "Plan":
    """Plans DP-SGD, with the selectors that Spark has."""
    from coowned.accounting.planning import plan
    from coowned.spark.planning import SparkPopulation
    from coowned.spark.session import check_machine
    from coowned.spark.sources import attribute_source, check_source

    if given["mechanism"] not in ("all", "poisson"):
        raise InputError("only DP-SGD can be planned on Spark; use --mechanism poisson, or the local engine")
    check_source(source)
    check_machine()
    with engine.session(source.path, "planning") as (spark, progress):
        graph = attribute_source(spark, source)
        settings = {"adjacency": "zero-out", **given, "mechanism": "poisson"}
        found = plan(SparkPopulation(graph=graph), **settings, progress=progress)
        graph.release()
    return found


def _write(found: "Plan", config: "TrainConfig | None", output: Path | None, html: Path | None) -> None:
    if output is not None:
        text = config.text if config is not None and _is_config(output) else f"{found.to_json()}\n"
        with whole_files(output) as (temporary,):
            temporary.write_text(text, encoding="utf-8")
    if html is not None:
        from coowned.report.page import write_plan

        write_plan(found, html)


def _numbers(text: str, option: str = "--contribution-bounds") -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise InputError(f"{option} takes integers separated by commas, not {text!r}") from None


def _show(found: "Plan", config: "TrainConfig | None", output: Path | None) -> None:
    from coowned.runs.config import reasons_in

    if found.choices:
        _show_choices(found.choices)
    for sentence in (*found.notes(), *found.advice):
        show.line(sentence)
    if config is not None and output is not None and _is_config(output):
        for reason in reasons_in(config.text):
            show.line(reason)
        show.written(output)


def _show_choices(choices: "tuple[Choice, ...]") -> None:
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
