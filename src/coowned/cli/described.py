"""Options that describe a training run without a configuration file, shared by `train` and `plan`."""

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coowned.accounting.terms import ADJACENCIES
from coowned.cli.options import complete_with, with_parameters
from coowned.errors import InputError
from coowned.progress import one_of

if TYPE_CHECKING:
    from coowned.attribution.sources import DataSource

_USUAL = "text-classifier"
_KINDS = (_USUAL, "embedding-classifier", "embedding-regression")  # whose keys are the options below
_COLUMNS = functools.partial(typer.Option, metavar="A[,B…]", rich_help_panel="Model")
_MODEL = {
    "model": Annotated[
        str | None,
        typer.Option(
            help=f"{one_of(_KINDS)} (default: {_USUAL}).",
            metavar="KIND",
            autocompletion=complete_with(_KINDS),
            rich_help_panel="Model",
        ),
    ],
    "text": Annotated[
        str | None,
        _COLUMNS(
            help="The columns with the text (default for mail: subject,text; arXiv: title,abstract; Slack: text)."
        ),
    ],
    "label": Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="The column with the label (default: label); in mail, folder is the folder of a message.",
            rich_help_panel="Model",
        ),
    ],
    "classes": Annotated[
        str | None,
        _COLUMNS(
            help="The labels that there are, as the data spell them, or how many (0, 1, …; default: 2). They are "
            "declared, never collected from the data."
        ),
    ],
    "encoder": Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="The public encoder of an embedding model.", rich_help_panel="Model"),
    ],
}
_PRIVACY = {
    "epsilon": Annotated[float | None, typer.Option(metavar="E", help="The privacy target.")],
    "delta": Annotated[
        float | None,
        typer.Option(metavar="D", help="Probability that the guarantee may fail; far below 1 / users."),
    ],
    "adjacency": Annotated[
        str | None,
        typer.Option(
            help="zero-out (default) or replace; the other is shown as well.", autocompletion=complete_with(ADJACENCIES)
        ),
    ],
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Described:
    """The given options of a model and of a privacy target."""

    model: Mapping[str, Any]
    privacy: Mapping[str, Any]

    def refuse(self, reason: str, *, privacy: bool = True) -> None:
        """Raises an error for all options of the model, and for those of privacy if they do not apply either."""
        for name in {**self.model, **(self.privacy if privacy else {})}:
            raise InputError(f"--{name} {reason}")

    def sections(self, source: "DataSource", *, allow_large_delta: bool) -> dict[str, dict[str, Any]]:
        """Returns the sections of a configuration of this run; its paths are absolute.

        Guarantees:
          - `train` and `plan -o run.toml` describe the same run.   (test_a_plan_is_what_train_chooses)
          - What cannot be known is asked for by the name of its option.   (test_what_is_missing_is_asked_for)
        """
        for name in ("epsilon", "delta"):
            if name not in self.privacy:
                raise InputError(f"--{name} is needed beside the data: nobody can choose it for you")
        data = {name: value for name, value in vars(source).items() if value is not None}
        for name in ("path", "aliases", "unprotected"):
            if name in data:
                data[name] = os.path.abspath(data[name])
        privacy = {**self.privacy, **({"allow_large_delta": True} if allow_large_delta else {})}
        return {"data": data, "privacy": privacy, "model": self._model(source)}

    def _model(self, source: "DataSource") -> dict[str, Any]:
        kind = self.model.get("model", _USUAL)
        if kind not in _KINDS:
            raise InputError(
                f"--model must be {one_of(_KINDS)}, not {kind!r}; other models need a configuration, `coowned train "
                "--example`"
            )
        found = {"kind": kind, **{name: value for name, value in self.model.items() if name != "model"}}
        if not found.setdefault("text", ",".join(source.text_columns())):
            raise InputError(f"{source.path}: --text is needed: the columns with the text that {kind} reads")
        if "encoder" in found:
            found["encoder"] = os.path.abspath(found["encoder"])
        columns = _parts(found["text"])
        found["text"] = columns[0] if len(columns) == 1 else columns
        if "classes" in found:
            found["classes"] = _classes(found["classes"])
        return found


def describes_run(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces the parameter `described` of a verb's `run(…, described, …)` by options of the model and of privacy."""
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in (_PRIVACY | _MODEL).items()
    ]
    return with_parameters(verb, "described", parameters, _described)


def _described(values: dict[str, Any]) -> Described:
    given = {name: value for name, value in values.items() if value is not None}
    return Described(
        model={name: value for name, value in given.items() if name in _MODEL},
        privacy={name: value for name, value in given.items() if name in _PRIVACY},
    )


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _classes(text: str) -> list[str] | list[int] | int:
    """Returns the names of classes, integers where all are; one number is how many there are.

    >>> _classes("work, family"), _classes("1,2,5"), _classes("3")
    (['work', 'family'], [1, 2, 5], 3)
    """
    names = _parts(text)
    if not all(name.removeprefix("-").isdecimal() for name in names):
        return names
    numbers = [int(name) for name in names]
    return numbers[0] if len(numbers) == 1 else numbers
