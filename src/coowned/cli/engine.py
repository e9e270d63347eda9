"""The engine of a verb, this machine or Spark, and its options."""

import contextlib
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coowned.cli import show
from coowned.cli.options import complete_with, with_parameters
from coowned.errors import InputError
from coowned.progress import Progress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ENGINES = ("local", "spark")
_SPARK = functools.partial(typer.Option, rich_help_panel="Spark")
_OPTIONS: dict[str, tuple[Any, Any]] = {  # annotation and default
    "engine": (
        Annotated[
            str,
            typer.Option(
                help="local, or spark for the same result on a cluster.", autocompletion=complete_with(_ENGINES)
            ),
        ],
        "local",
    ),
    "master": (Annotated[str | None, _SPARK(metavar="URL", help="The cluster (default: local[*]).")], None),
    "checkpoint_dir": (
        Annotated[
            str | None,
            _SPARK(
                metavar="DIR",
                help="A folder, or its address (hdfs://…), that driver and executors share, for tables between two "
                "steps; a cluster needs one.",
            ),
        ],
        None,
    ),
    "conf": (
        Annotated[list[str] | None, _SPARK(metavar="KEY=VALUE", help="A setting of Spark's; may be repeated.")],
        None,
    ),
    "py_files": (
        Annotated[
            list[str] | None,
            _SPARK(
                metavar="FILE",
                help="A zip for the executors' Python, such as `coowned spark-package` writes; may be repeated.",
            ),
        ],
        None,
    ),
    "verbose": (
        Annotated[
            bool,
            _SPARK("--verbose", help="Show Spark's log and, of a failure, the stack traces; these may quote the data."),
        ],
        False,
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine:
    """The chosen engine and the settings of its session."""

    on_spark: bool
    master: str | None = None
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)  # Spark's names and values
    py_files: tuple[str, ...] = ()
    verbose: bool = False

    def refuse_addresses(self, *paths: str) -> None:
        """Raises an error for URLs (hdfs://…) on the local engine."""
        for path in paths:
            if "://" in path and not self.on_spark:
                raise InputError(f"{path}: the local engine reads files of this machine only; add --engine spark")

    @contextlib.contextmanager
    def session(self, source: object, title: str) -> "Iterator[tuple[SparkSession, Progress]]":
        """Yields a Spark session and the progress of what is done in it; errors about `source` are one sentence."""
        from coowned.spark.session import session, spark_errors

        try:
            with (
                session(self.master, py_files=self.py_files, quiet=not self.verbose, **self.settings) as spark,
                spark_errors(str(source)),
                show.progress(title) as progress,
            ):
                yield spark, progress
        except Exception as error:
            if self.verbose and error.__cause__ is not None:
                sys.stderr.write(f"{error.__cause__}\n")
            raise


def runs_on_engines(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces the parameter `engine` of a verb's `run(…, engine, …)` by the options of the engines."""
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in _OPTIONS.items()
    ]
    return with_parameters(verb, "engine", parameters, _engine)


def _engine(values: dict[str, Any]) -> Engine:
    name = values.pop("engine")
    if name not in _ENGINES:
        raise InputError(f"Unknown engine {name!r}; choose local or spark")
    if name == "local":
        for option, value in values.items():
            if value:
                flag = f"--{option.replace('_', '-')}"
                raise InputError(f"{flag} applies to Spark only; add --engine spark or remove {flag}")
        return Engine(on_spark=False)
    settings = dict(map(_setting, values["conf"] or ()))
    if (folder := values["checkpoint_dir"]) is not None:
        settings["spark.checkpoint.dir"] = folder if "://" in folder else Path(folder).resolve().as_uri()
    return Engine(
        on_spark=True,
        master=values["master"],
        settings=settings,
        py_files=tuple(values["py_files"] or ()),
        verbose=values["verbose"],
    )


def _setting(text: str) -> tuple[str, str]:
    """Returns the name and the value of KEY=VALUE.

    >>> _setting("spark.executor.extraJavaOptions=-Da=b")
    ('spark.executor.extraJavaOptions', '-Da=b')
    """
    name, equals, value = text.partition("=")
    if not (equals and name.startswith("spark.")):
        raise InputError(f"--conf takes KEY=VALUE with a key that begins with spark., not {text!r}")
    return name, value
