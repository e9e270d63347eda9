"""The options that say where the data are, the same on every verb that reads them."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from coowned.attribution.options import Option, declared

_DATA = Annotated[
    str,  # not a Path, which would turn sqlite:///mail.db into sqlite:/mail.db
    typer.Argument(
        metavar="DATA",
        help="A Parquet, CSV or JSONL file or folder, mail, arXiv metadata, a Slack export (folder or zip), "
        "or a SQLite file (also as sqlite:///FILE) with --query.",
    ),
]


def reads_data(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a verb `run(source, …)` the data options in place of its first parameter, a `DataSource`."""

    @functools.wraps(verb)
    def run(**given: Any) -> Any:
        from coowned.attribution.sources import DataSource

        chosen = {name: given.pop(name) for name in declared()}
        chosen = {name: str(value) if isinstance(value, Path) else value for name, value in chosen.items()}
        columns = [part.strip() for part in (chosen.pop("users") or "").split(",") if part.strip()]
        return verb(DataSource(path=given.pop("data"), users=columns or None, **chosen), **given)

    own = list(inspect.signature(verb).parameters.values())[1:]
    options = {name: _parameter(name, option) for name, option in declared().items()}
    data = inspect.Parameter("data", inspect.Parameter.KEYWORD_ONLY, annotation=_DATA)
    parameters = [data, *options.values(), *(part.replace(kind=inspect.Parameter.KEYWORD_ONLY) for part in own)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {part.name: part.annotation for part in parameters}
    return run


def _parameter(name: str, option: Option) -> inspect.Parameter:
    offered = list(option.choices)
    described = typer.Option(
        metavar=option.metavar,
        help=option.help,
        autocompletion=(lambda: offered) if offered else None,
        rich_help_panel="Data",
    )
    kind = Path if option.is_path else bool if option.is_flag else str
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, described]
    )
