"""Where a verb runs: on this machine, or on a Spark cluster."""

from typing import Annotated

import typer

from coowned.errors import InputError

Engine = Annotated[str, typer.Option(help="local, or spark for the same answer at cluster size.")]
Master = Annotated[
    str | None, typer.Option(metavar="URL", help="spark: the cluster, as Spark writes it (default: local[*]).")
]


def check_engine(engine: str, master: str | None, *places: str) -> None:
    """Refuses an engine that is not there, and addresses (hdfs://…) where the engine is this machine."""
    if engine not in ("local", "spark"):
        raise InputError(f"--engine {engine} is not there; use --engine local or --engine spark")
    if master is not None and engine != "spark":
        raise InputError("--master means nothing to the local engine; add --engine spark, or leave it out")
    for place in places:
        if "://" in place and engine != "spark":
            raise InputError(f"{place}: the local engine knows this machine's files only; add --engine spark")
