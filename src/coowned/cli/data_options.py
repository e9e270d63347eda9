"""The data options, shared by every verb that reads data."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coowned.attribution.options import declared
from coowned.cli.options import declared_parameter, with_parameters
from coowned.errors import InputError

if TYPE_CHECKING:
    from coowned.attribution.sources import DataSource

_DATA = Annotated[
    str,  # not a Path, which would turn sqlite:///mail.db into sqlite:/mail.db
    typer.Argument(
        metavar="DATA",
        help="A Parquet, CSV or JSONL file or folder, mail, arXiv metadata, a Slack export (folder or zip), "
        "or a SQLite file (also as sqlite:///FILE) with --query.",
    ),
]


def reads_data(verb: Callable[..., Any], *, or_config: bool = False) -> Callable[..., Any]:
    """Replaces the parameter `source` of a verb's `run(source, …)` by the data options.

    With `or_config` DATA may be left out, and `source` is then None: the verb takes them from a configuration.
    """
    options = [
        declared_parameter(name, Path if option.is_path else bool if option.is_flag else str, option, "Data")
        for name, option in declared().items()
    ]
    data = inspect.Parameter("data", inspect.Parameter.KEYWORD_ONLY, annotation=_DATA)
    data = data.replace(default=None) if or_config else data
    return with_parameters(verb, "source", [data, *options], _source)


def _source(given: dict[str, Any]) -> "DataSource | None":
    from coowned.attribution.sources import DataSource

    if given["data"] is None:
        for name, value in given.items():
            if value:
                raise InputError(f"--{name.replace('_', '-')} needs DATA; with --config, set it in the configuration")
        return None
    chosen: dict[str, Any] = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    columns = [part.strip() for part in (chosen.pop("users") or "").split(",") if part.strip()]
    return DataSource(path=chosen.pop("data"), users=columns or None, **chosen)
