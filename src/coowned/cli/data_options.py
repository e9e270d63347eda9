"""The options that say where the data are, the same on every verb that reads them."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

# What a shell offers. The readers have these words too, but take long to import; a test holds them equal.
_FORMATS = ["parquet", "csv", "jsonl", "mail", "arxiv", "slack", "sql"]
_ATTRIBUTE_TO = ["everyone", "sender", "recipients", "thread", "participants", "channel"]

_OPTIONS: list[tuple[str, Any, Any]] = [
    (
        "data",
        Annotated[
            str,  # not a Path: that would take two strokes out of sqlite:///mail.db
            typer.Argument(
                metavar="DATA",
                help="A Parquet, CSV or JSONL file or folder, mail, arXiv metadata, a Slack export (folder or zip), "
                "or a SQLite file (also as sqlite:///FILE) with --query.",
            ),
        ],
        inspect.Parameter.empty,
    ),
    (
        "format",
        Annotated[
            str | None,
            typer.Option(
                help="parquet, csv, jsonl, mail, arxiv, slack or sql; by default from the suffix, then the content.",
                autocompletion=lambda: _FORMATS,
                rich_help_panel="Data",
            ),
        ],
        None,
    ),
    (
        "users",
        Annotated[
            str | None,
            typer.Option(
                metavar="A[,B…]",
                help="The columns that name an example's users (default: users).",
                rich_help_panel="Data",
            ),
        ],
        None,
    ),
    (
        "user",
        Annotated[
            str | None,
            typer.Option(
                metavar="COLUMN",
                help="The column with the user, where the data have one (example, user) pair a row.",
                rich_help_panel="Data",
            ),
        ],
        None,
    ),
    (
        "example_id",
        Annotated[
            str | None,
            typer.Option(
                metavar="COLUMN",
                help="The column with the ids (default: the row number; a query has none).",
                rich_help_panel="Data",
            ),
        ],
        None,
    ),
    (
        "separator",
        Annotated[str | None, typer.Option(help="What stands between two users in one cell.", rich_help_panel="Data")],
        None,
    ),
    (
        "aliases",
        Annotated[
            Path | None,
            typer.Option(
                metavar="FILE",
                help="CSV key,user: several addresses of one person, or a list for its members.",
                rich_help_panel="Data",
            ),
        ],
        None,
    ),
    (
        "unprotected",
        Annotated[
            Path | None,
            typer.Option(
                metavar="FILE", help="Keys, one a line, of users who are not to be protected.", rich_help_panel="Data"
            ),
        ],
        None,
    ),
    (
        "attribute_to",
        Annotated[
            str | None,
            typer.Option(
                help="For mail: everyone (default), sender, recipients or thread. For Slack: participants (default) or "
                "channel.",
                autocompletion=lambda: _ATTRIBUTE_TO,
                rich_help_panel="Data",
            ),
        ],
        None,
    ),
    (
        "query",
        Annotated[
            str | None,
            typer.Option(
                metavar="SELECT",
                help="For SQLite: the query that gives the rows; it must not choose them by content.",
                rich_help_panel="Data",
            ),
        ],
        None,
    ),
]


def reads_data(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a verb `run(source, …)` the data options in place of its first parameter, a `DataSource`."""

    @functools.wraps(verb)
    def run(**given: Any) -> Any:
        from coowned.attribution.sources import DataSource

        chosen = {name: given.pop(name) for name, _, _ in _OPTIONS}
        columns = tuple(part.strip() for part in (chosen.pop("users") or "").split(",") if part.strip())
        return verb(DataSource(path=chosen.pop("data"), users=columns, **chosen), **given)

    own = list(inspect.signature(verb).parameters.values())[1:]
    given = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, kind, default in _OPTIONS
    ]
    parameters = [*given, *(part.replace(kind=inspect.Parameter.KEYWORD_ONLY) for part in own)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {part.name: part.annotation for part in [*given, *own]}
    return run
