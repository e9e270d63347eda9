"""Options shared by several verbs, and options generated from a declaration."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from coowned.accounting.terms import ADJACENCIES
from coowned.attribution.options import Option
from coowned.errors import InputError


def complete_with(words: Iterable[str]) -> Callable[[], list[str]]:
    """Shell completion of an option; the shell keeps the words that match."""
    offered = list(words)
    return lambda: offered


Delta = Annotated[
    float, typer.Option(metavar="D", help="Probability that the guarantee may fail; far below 1 / users.")
]
AllowLargeDelta = Annotated[
    bool,
    typer.Option("--allow-large-delta", help="Accept a delta of 0.1 or more, which protects hardly anyone."),
]
Adjacency = Annotated[
    str,
    typer.Option(help="zero-out or replace; the other is shown as well.", autocompletion=complete_with(ADJACENCIES)),
]
Seed = Annotated[int, typer.Option(help="Public seed that breaks ties: the same seed gives the same S.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")]
VerifyKey = Annotated[
    Path | None, typer.Option("--verify-key", metavar="FILE", help="Refuse a run that was not signed with this key.")
]
Engine = Annotated[
    str,
    typer.Option(
        help="local, or spark for the same result on a cluster.", autocompletion=complete_with(("local", "spark"))
    ),
]
Master = Annotated[str | None, typer.Option(metavar="URL", help="spark: the cluster (default: local[*]).")]


def check_signature(folder: Path, key: Path | None) -> None:
    """Refuses a run that was not signed with the key in a file, if one is given."""
    if key is not None:
        from coowned.training.signature import read_key, verify_run

        verify_run(folder, read_key(key))


def check_engine(engine: str, master: str | None, *paths: str) -> None:
    """Refuses an unknown engine, and URLs (hdfs://…) on the local engine."""
    if engine not in ("local", "spark"):
        raise InputError(f"Unknown engine {engine!r}; choose local or spark")
    if master is not None and engine != "spark":
        raise InputError("--master applies to Spark only; add --engine spark or remove --master")
    for path in paths:
        if "://" in path and engine != "spark":
            raise InputError(f"{path}: the local engine reads files of this machine only; add --engine spark")


def declared_parameter(name: str, kind: type, option: Option, panel: str) -> inspect.Parameter:
    """A keyword parameter of a verb, None by default, for a declared option."""
    described = typer.Option(
        metavar=option.metavar,
        help=option.help,
        autocompletion=complete_with(option.choices) if option.choices else None,
        rich_help_panel=panel,
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, described]
    )


def with_parameters(
    verb: Callable[..., Any],
    replaced: str,
    parameters: Sequence[inspect.Parameter],
    build: Callable[[dict[str, Any]], Any],
) -> Callable[..., Any]:
    """The verb with `parameters` instead of the parameter `replaced`, whose value `build` creates from them."""

    @functools.wraps(verb)
    def run(**given: Any) -> Any:
        built = build({one.name: given.pop(one.name) for one in parameters})
        return verb(**{replaced: built}, **given)

    signature: list[inspect.Parameter] = []
    for one in inspect.signature(verb).parameters.values():
        signature += parameters if one.name == replaced else [one.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
    run.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in signature}
    return run
