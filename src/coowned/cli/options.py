"""Options shared by several verbs: those of the data and of a run, those made from a declaration, and paths."""

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coowned.accounting.terms import ADJACENCIES
from coowned.attribution.options import Option, declared
from coowned.errors import InputError
from coowned.progress import one_of

if TYPE_CHECKING:
    from coowned.attribution.sources import DataSource
    from coowned.certificate import ContributionCertificate


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


PathOrURL = str | os.PathLike[str]


def files_of(source: "DataSource") -> list[PathOrURL]:
    return [path for path in (source.path, source.aliases, source.unprotected) if path is not None]


def refuse_to_overwrite(
    inputs: Iterable[PathOrURL], outputs: Iterable[PathOrURL | None], *, replace: bool = True
) -> None:
    """Refuses an output that is an input, is inside an input folder, or is another output; None is no output.

    A file in a data folder would be read as data next time. Without `replace` an output that exists is
    refused too; what exists at a URL of another file system is not looked at here.
    """
    read = [_resolved(path_or_url) for path_or_url in inputs]
    written: set[str] = set()
    for output in outputs:
        if output is None:
            continue
        path = _resolved(output)
        if path in read:
            raise InputError(f"{output}: would overwrite its own input; choose another path")
        if any(path.startswith(f"{folder}/") and ("://" in folder or Path(folder).is_dir()) for folder in read):
            raise InputError(f"{output}: is inside the data folder and would be read as data; choose another path")
        if path in written:
            raise InputError(f"{output}: two outputs have this path; choose another path for one of them")
        if not replace and os.path.lexists(path):
            raise_exists(output)
        written.add(path)


def raise_exists(output: PathOrURL) -> None:
    raise InputError(f"{output}: already exists; choose another path, or give --overwrite to replace it")


def refuse_to_replace(folders: Iterable[Path], output: Path | None, *, except_for: Iterable[str]) -> None:
    """Refuses an output that would replace a file inside one of the folders, other than one of these names in it."""
    if output is None:
        return
    path = output.resolve()
    for folder in folders:
        allowed = [folder.resolve() / name for name in except_for]
        if folder.resolve() in path.parents and os.path.lexists(output) and path not in allowed:
            raise InputError(f"{output}: would overwrite a file of the run; choose another path")


def _resolved(path_or_url: PathOrURL) -> str:
    """Returns one spelling of each path or URL, so that two can be compared; a SQLite URL becomes its file."""
    path = str(path_or_url).removeprefix("sqlite:///").removeprefix("file://")
    return path.rstrip("/") if "://" in path else str(Path(path).resolve())


def read_certificate(path: Path) -> "ContributionCertificate":
    """Reads a certificate file; what cannot be read is bad input."""
    from coowned.certificate import ContributionCertificate

    try:
        text = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot read the certificate ({error.strerror}); give --certificate FILE") from error
    return ContributionCertificate.from_json(text, name=str(path))


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
