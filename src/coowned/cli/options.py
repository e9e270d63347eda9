"""Options shared by several verbs: those of the data, and others generated from a declaration."""

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coowned.accounting.terms import ADJACENCIES
from coowned.attribution.options import Option, declared
from coowned.errors import InputError

if TYPE_CHECKING:
    from coowned.attribution.sources import DataSource


def complete_with(words: Iterable[str]) -> Callable[[], list[str]]:
    """Returns a shell completion of an option; the shell keeps the words that match."""
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
Ledger = Annotated[
    Path | None,
    typer.Option("--ledger", metavar="FILE", help="Runs to compose with; default: coowned-ledger.jsonl next to RUN."),
]


def ledger_file(given: Path | None) -> str:
    """Returns the ledger as `RunFolder.open` takes it: the file that was given, or the one next to the run."""
    from coowned.runs.ledger import NAME

    return NAME if given is None else os.path.abspath(given)


Splits = Annotated[
    str | None,
    typer.Option(
        metavar="A,B,C",
        help="Only the train split of these shares (train, validation, test), which `train` selects from.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")]
VerifyKey = Annotated[
    Path | None,
    typer.Option("--verify-key", metavar="FILE", help="Refuse a run that the owner of this public key did not sign."),
]
_DATA_HELP = (
    "A Parquet, CSV or JSONL file or folder, mail, arXiv metadata, a Slack export (folder or zip), or a SQLite file "
    "(also as sqlite:///FILE) with --query."
)
# Not a Path, which would turn sqlite:///mail.db into sqlite:/mail.db
_DATA = Annotated[str, typer.Argument(metavar="DATA", help=_DATA_HELP)]
_DATA_OPTION = Annotated[str | None, typer.Option("--data", metavar="DATA", help=_DATA_HELP, rich_help_panel="Data")]


def check_signature(folder: Path, key: Path | None) -> None:
    """Refuses a run whose signature does not match the public key in a file, if one is given."""
    if key is not None:
        from coowned.runs.signature import verification_key, verify_run

        verify_run(folder, verification_key(key))


def shares_of(splits: str | None) -> list[float] | None:
    """Returns the shares that `--splits` names.

    >>> shares_of("0.8, 0.1,0.1")
    [0.8, 0.1, 0.1]
    """
    try:
        return None if splits is None else [float(part) for part in splits.split(",")]
    except ValueError:
        raise InputError(
            f"--splits takes three numbers separated by commas, such as 0.8,0.1,0.1, not {splits!r}"
        ) from None


def targets_of(epsilon: str | None) -> float | dict[str, float] | None:
    """Returns the target that `--epsilon` names, or one for each tier.

    >>> targets_of("8"), targets_of("bound 3=8, customers=2")
    (8.0, {'bound 3': 8.0, 'customers': 2.0})
    """
    if epsilon is None:
        return None
    try:
        if "=" not in epsilon:
            return float(epsilon)
        parts = [part.rpartition("=") for part in epsilon.split(",")]
        names, values = [name.strip() for name, _, _ in parts], [float(value) for _, _, value in parts]
    except ValueError:
        names, values = [], []
    if not values or "" in names or len(set(names)) < len(names):
        raise InputError(
            f"--epsilon takes one number, or one for each tier by name, such as staff=8,customers=2, not {epsilon!r}"
        )
    return dict(zip(names, values, strict=True))


def declared_parameter(name: str, kind: type, option: Option, panel: str) -> inspect.Parameter:
    """Returns a keyword parameter of a verb, None by default, for a declared option."""
    described = typer.Option(
        *([] if option.flag is None else [option.flag]),
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
    """Returns the verb with `parameters` instead of the parameter `replaced`, whose value `build` creates from them."""

    @functools.wraps(verb)
    def run(**arguments: Any) -> Any:
        built = build({one.name: arguments.pop(one.name) for one in parameters})
        return verb(**{replaced: built}, **arguments)

    signature: list[inspect.Parameter] = []
    for one in inspect.signature(verb).parameters.values():
        signature += parameters if one.name == replaced else [one.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
    run.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in signature}
    return run


def reads_data(verb: Callable[..., Any], *, or_config: bool = False, as_option: bool = False) -> Callable[..., Any]:
    """Replaces the parameter `source` of a verb's `run(source, …)` by the data options.

    With `or_config` DATA may be left out, and `source` is then None: the verb takes them from a configuration.
    With `as_option` DATA is the option `--data`, since the argument is the configuration.
    """
    options = [
        declared_parameter(name, Path if option.is_path else bool if option.is_flag else str, option, "Data")
        for name, option in declared().items()
    ]
    annotation = _DATA_OPTION if as_option else _DATA
    data = inspect.Parameter("data", inspect.Parameter.KEYWORD_ONLY, annotation=annotation)
    data = data.replace(default=None) if or_config else data
    return with_parameters(verb, "source", [data, *options], _source)


def _source(values: dict[str, Any]) -> "DataSource | None":
    from coowned.attribution.sources import DataSource

    if values["data"] is None:
        for name, value in values.items():
            if value:
                raise InputError(f"--{name.replace('_', '-')} needs DATA; with a configuration, set it there")
        return None
    chosen: dict[str, Any] = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
    columns = [part.strip() for part in (chosen.pop("users") or "").split(",") if part.strip()]
    return DataSource(path=chosen.pop("data"), users=columns or None, **chosen)
