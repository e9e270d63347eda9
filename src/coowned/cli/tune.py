"""`coowned tune`: the best of a random number of runs over a grid, with one guarantee for all of it; resumable."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from coowned.cli.options import Json, Ledger, ledger_file
from coowned.cli.train import show_run


def run(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG.toml", help="A configuration of `train` with a section [tuning].")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="RUN", help="The folder of the tuning.")],
    ledger: Ledger = None,
    json: Json = False,
) -> None:
    """Trains a random number of runs with random settings of a grid, and keeps the one with the best covered score.

    The epsilon of [privacy] is that of the whole tuning. The section [tuning] says expected_runs, and [tuning.grid] the
    values to try, such as learning_rate = [0.01, 0.1]. What it costs is said before the first run; the defaults of
    `coowned train` at the same epsilon are often better. Run the same command again to resume after an interruption. In
    the end RUN is the folder of the best run; the others are removed.

    Example:

        coowned tune tuning.toml -o RUN
    """
    from coowned.fitting import shown_to
    from coowned.runs.stored_run import StoredRun
    from coowned.runs.tuning_config import TuningConfig
    from coowned.runs.tuning_run import run_tuning
    from coowned.training.evaluate import check_labels

    tuning, began = TuningConfig.read(config), time.monotonic()
    with shown_to(None) as (progress, announce):  # a bar; no lines that could be kept, which would tell of all runs
        run_tuning(
            tuning,
            output,
            progress=progress,
            announce=announce,
            advise=lambda cost: sys.stderr.write(f"{cost}\n"),
            ledger=ledger_file(ledger),
        )
    finished = StoredRun.open(output)
    show_run(finished, json, time.monotonic() - began)
    check_labels(finished.evaluations())
