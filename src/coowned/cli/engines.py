"""Where a verb runs: on this machine, or on a Spark cluster."""

import re
from pathlib import Path
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


def certificate_beside(selection: str) -> str:
    """Where the certificate of S goes, which may be an address."""
    if "://" not in selection:
        return str(certificate_path_of(Path(selection)))
    if not re.fullmatch(r"[^:/]+://[^/]*/.*[^/]/*", selection):
        raise InputError(f"{selection}: not the address of a selection; name one such as hdfs://head/S.parquet")
    return f"{selection.rstrip('/').removesuffix('.parquet')}.certificate.json"


def certificate_path_of(selection: Path) -> Path:
    """S.parquet has its certificate in S.certificate.json."""
    if not selection.name:
        raise InputError(f"{selection}: a folder, not a selection; name a file such as S.parquet")
    return selection.with_name(f"{selection.stem}.certificate.json")
