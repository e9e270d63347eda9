"""`coowned train`: from data to a model, following one configuration; resumable."""

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coowned import interrupts
from coowned.cli import show
from coowned.cli.options import (
    AllowLargeDelta,
    Described,
    Json,
    Ledger,
    describes_run,
    files_of,
    ledger_file,
    reads_data,
    refuse_to_overwrite,
)
from coowned.errors import InputError
from coowned.progress_display import to_stderr, training

if TYPE_CHECKING:
    import polars as pl

    from coowned.attribution.sources import DataSource
    from coowned.runs.config import TrainConfig
    from coowned.runs.run_folder import RunFolder
    from coowned.runs.stored_run import StoredRun


@describes_run
@functools.partial(reads_data, or_config=True, as_option=True)
def run(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG.toml", help="What to train on, how, and with which privacy.")
    ] = None,
    *,
    source: "DataSource | None",
    described: Described,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="RUN", help="The folder of the run.")] = None,
    example: Annotated[bool, typer.Option("--example", help="Print a commented configuration and exit.")] = False,
    sign_key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Sign the finished run with this private key; created, with FILE.pub, if missing."
        ),
    ] = None,
    processes: Annotated[
        int, typer.Option(min=1, metavar="N", help="Train in N processes of this machine: the same bits.")
    ] = 1,
    allow_large_delta: AllowLargeDelta = False,
    ledger: Ledger = None,
    json: Json = False,
) -> None:
    """Reads, splits, selects, certifies, accounts, trains and evaluates, following a configuration file.

    Without a file, `--data` says what to train on. What is not given is chosen from the graph and public numbers, with
    reasons in RUN/config.toml.

    Run the same command again to resume after an interruption. The result is in RUN: model.safetensors, guarantee.json,
    certificate.json, config.toml, and metrics that no guarantee covers.

    Examples:

        coowned train --example > run.toml

        coowned train run.toml -o RUN

        coowned train --data mail --label folder --classes work,family --epsilon 8 --delta 1e-6 -o RUN
    """
    if example:
        from coowned.runs.config import example as text

        show.line(text().rstrip("\n"))
        return
    if (config is None and source is None) or output is None:
        raise InputError(
            "train needs CONFIG.toml and -o RUN, or --data in place of the file; --example prints one to start from"
        )
    from coowned.runs.configured_run import run_configuration
    from coowned.runs.launch import workers_from
    from coowned.runs.run_folder import RunFolder
    from coowned.runs.stored_run import StoredRun
    from coowned.training.evaluate import check_labels

    settings = _configuration(config, source, described, output, allow_large_delta)
    workers = workers_from(os.environ)
    if processes > 1:
        if workers.count > 1:
            raise InputError("--processes: these processes were started as workers already; leave the option out")
        paths = {"--sign-key": sign_key, "--ledger": ledger}
        flags = {"--allow-large-delta": allow_large_delta, "--json": json}
        raise typer.Exit(_in_processes(processes, config, output, paths, flags))
    if workers.rank:  # worker 0 tells what happens, and signs
        with RunFolder.open(output, workers=workers) as folder:
            run_configuration(settings, folder)
        return
    sign = _signer(sign_key)
    began = time.monotonic()
    with (
        RunFolder.open(output, workers=workers, ledger=ledger_file(ledger)) as folder,
        training() as (progress, announce),
        _saying_how_to_resume(folder),
    ):
        run_configuration(settings, folder, progress=progress, announce=announce, advise=to_stderr)
    sign(output)
    finished = StoredRun.open(output)
    show_run(finished, json, time.monotonic() - began)
    check_labels(finished.evaluations())


def _signer(sign_key: Path | None) -> Callable[[Path], None]:
    """Reads the key, before hours of training, and returns what signs a run with it; without a key, nothing does."""
    if sign_key is None:
        return lambda folder: None
    from coowned.runs.signature import sign_run, signing_key

    key = signing_key(sign_key)
    return lambda folder: sign_run(folder, key)


@contextlib.contextmanager
def _saying_how_to_resume(folder: "RunFolder") -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if folder.is_begun:  # otherwise nothing was written that could be resumed
            if isinstance(error, KeyboardInterrupt) or interrupts.was_received():
                sys.stderr.write("run the same command again to resume from the last checkpoint\n")
            elif isinstance(error, OSError):
                error.add_note("then run the same command again to resume from the last checkpoint")
        raise


def _in_processes(
    processes: int, config: Path | None, output: Path, paths: Mapping[str, Path | None], flags: Mapping[str, bool]
) -> int:
    from coowned.runs.launch import launch

    if config is None:
        raise InputError("--processes needs CONFIG.toml in place of --data; --example prints one to start from")
    options = [word for name, path in paths.items() if path is not None for word in (name, str(path))]
    options += [name for name, given in flags.items() if given]
    return launch([sys.executable, "-m", "coowned", "train", str(config), "-o", str(output), *options], processes)


def _configuration(
    config: Path | None, source: "DataSource | None", described: Described, output: Path, allow_large_delta: bool
) -> "TrainConfig":
    from coowned.runs.config import TrainConfig

    if config is not None:
        if source is not None:
            raise InputError("train takes either CONFIG.toml or --data, not both")
        described.refuse("needs --data; with a configuration, set it there")
        return TrainConfig.read(config, allow_large_delta=allow_large_delta)
    assert source is not None
    refuse_to_overwrite(files_of(source), [output])
    sections = described.sections(source, allow_large_delta=allow_large_delta)
    return TrainConfig.from_sections(sections, name="the options")


def show_run(run: "StoredRun", json: bool, seconds: float) -> None:
    from coowned import codec
    from coowned.report.summary import next_steps, sentences

    splits, noise = run.evaluations(), run.signal_to_noise
    verdict = [*sentences(splits, run.metrics()), noise.verdict()] if noise else sentences(splits, None)
    steps = [step for step in next_steps(run) if step not in verdict]
    if json:
        show.as_json(
            {
                "run": str(run.path),
                "guarantee": run.claims,
                "noise_multiplier": run.plan.noise_multiplier,
                "statement": run.statement(),
                "covered": None if run.covered is None else codec.to_plain(run.covered),
                "verdict": verdict,
                "next_steps": steps,
                **{name: table.row(0, named=True) for name, table in splits.items()},
            }
        )
        return
    show.line(run.statement())
    show.line()
    if run.covered is not None:
        show.line(f"Covered by the guarantee: {run.covered}")
        show.line()
    for name, table in splits.items():
        head, rows = _figures(table)
        show.table(f"{name} (not covered by the guarantee; 95% intervals)", head, rows)
        if without := table["without_loss"][0]:
            show.line(f"{without:,} of them have no loss (a value or label is unusable) and count as wrong")
    show.line()
    for sentence in verdict:
        show.line(sentence)
    if steps:
        show.line("\nWhat to try next:")
    for step in steps:
        show.line(f"- {step}")
    show.written(run.path, seconds=seconds)


def _figures(table: "pl.DataFrame") -> tuple[list[str], Iterator[list[str | int]]]:
    """Returns headings and rows: every figure with its interval, the trivial answer and the model without privacy."""

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.4f}"

    names = table.columns
    measures = [name for name in ("accuracy", "loss") if table[name].drop_nulls().len()]
    head = ["users per example", "examples"]
    for measure in measures:
        head += [measure, ""]
        head += [table["trivial"][0]] if "trivial" in names else []
        head += ["without privacy"] if f"baseline_{measure}" in names else []

    def cells(row: dict[str, Any]) -> Iterator[str | int]:
        yield from (row["users_per_example"], row["examples"])
        for measure in measures:
            yield number(row[measure])
            yield f"{number(row[f'{measure}_low'])} to {number(row[f'{measure}_high'])}"
            yield from (number(row[key]) for key in (f"trivial_{measure}", f"baseline_{measure}") if key in row)

    return head, (list(cells(row)) for row in table.iter_rows(named=True))
