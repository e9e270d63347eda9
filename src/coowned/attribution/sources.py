"""One description of where data come from, read the same way by every verb and every configuration file."""

import dataclasses
import importlib
import os
from pathlib import Path
from typing import Any

from coowned import validate
from coowned.attribution.examples import AttributedExamples
from coowned.attribution.options import SOURCES, TABLES, DataOptions, declared
from coowned.attribution.user_keys import read_keys
from coowned.errors import InputError
from coowned.progress import Progress

_SQLITE = "sqlite:"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSource(DataOptions):
    """A path and the options to read it with.

    Guarantees:
      - Options that do not apply to a format are refused, not ignored.   (test_unused_settings_are_refused)

    Attributes:
      path: a file or folder; "sqlite:///mail.db" (or "sqlite:////home/ann/mail.db") is the file mail.db of SQLite.
    """

    path: str | os.PathLike[str]

    def __post_init__(self) -> None:
        if str(self.path).startswith(_SQLITE):
            object.__setattr__(self, "path", _sqlite_file(str(self.path)))
            object.__setattr__(self, "format", self.format or "sql")
        for name, option in declared().items():
            if option.choices and getattr(self, name) is not None:
                validate.one_of(option.choices, **{name: getattr(self, name)})

    def read(self, progress: Progress | None = None) -> AttributedExamples:
        """Reads the data, with aliases and without unprotected users.

        Args:
          progress: called now and then as progress(done, message), with `done` from 0 to 1, by the formats that take
            long (mail, Slack, databases).
        """
        kind = self.format or detect_format(self.path)
        self.refuse_unused(kind)
        # First: reading the data may take long.
        unprotected = None if self.unprotected is None else read_keys(self.unprotected)
        examples = _module(kind).read_source(kind, self, progress)
        return examples if unprotected is None else examples.without_users(unprotected)

    def read_rows(self) -> AttributedExamples:
        """Reads data for prediction: a table needs no user column, and then has no users."""
        kind = self.format or detect_format(self.path)
        unnamed = kind in TABLES and self.users is None and self.user is None
        return (dataclasses.replace(self, users=[]) if unnamed else self).read()

    def display_names(self) -> dict[str, set[str]]:
        """Display names of people by key, from the metadata; tables keep such names in their spellings."""
        kind = self.format or detect_format(self.path)
        named = getattr(_module(kind), "source_names", None)
        return {} if named is None else named(self)

    def text_columns(self) -> tuple[str, ...]:
        """The columns that hold the text, where the format says; no content is read."""
        return SOURCES[self.format or detect_format(self.path)].text

    def refuse_unused(self, kind: str) -> None:
        """Refuses options that do not apply to this format."""
        for name, option in declared().items():
            if getattr(self, name) and kind not in option.formats:
                raise InputError(f"{self.path}: {name} does not apply to {kind} data; remove it or change the format")


def resolve_path(folder: str | os.PathLike[str], path: str) -> str | os.PathLike[str]:
    """A path relative to a folder, also in the URL of a database.

    Example:
      >>> str(resolve_path("runs", "mail.mbox")), str(resolve_path("runs", "sqlite:///mail.db"))
      ('runs/mail.mbox', 'sqlite:///runs/mail.db')
    """
    if not path.startswith(_SQLITE):
        return Path(folder) / path
    return f"{_SQLITE}///{Path(folder) / _sqlite_file(path)}"


def _sqlite_file(address: str) -> Path:
    file = address.removeprefix(f"{_SQLITE}///")
    if file == address or not file:
        raise InputError(f"{address}: not the address of a SQLite file; write sqlite:///file.db")
    return Path(file)


def detect_format(path: str | os.PathLike[str]) -> str:
    """What a file or folder holds: by suffix, then by content.

    Example:
      >>> import tempfile
      >>> file = Path(tempfile.mkdtemp()) / "pairs.csv"
      >>> _ = file.write_text("users\\nann\\n")
      >>> detect_format(file)
      'csv'
    """
    file = Path(path)
    if file.is_dir():
        return _detect_folder(file)
    if not file.is_file():
        raise InputError(f"{file}: no such file or folder; check the path")
    kind = _by_suffix(file) or _by_content(file)
    if kind is None:
        raise InputError(f"{file}: unknown format; choose one with --format {'|'.join(SOURCES)}")
    return kind


def _detect_folder(folder: Path) -> str:
    for kind in SOURCES:
        if _says(kind, "is_laid_out", folder):
            return kind
    for file in sorted(folder.rglob("*")):
        hidden = any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)
        if not hidden and file.is_file() and (kind := _by_suffix(file)):
            return kind
    if kind := _by_content(folder):
        return kind
    raise InputError(f"{folder}: no file of a known format in it; choose one with --format {'|'.join(SOURCES)}")


def _by_suffix(file: Path) -> str | None:
    kinds = [kind for kind, entry in SOURCES.items() if file.suffix.lower() in entry.suffixes]
    return next((kind for kind in kinds[:-1] if _says(kind, "recognizes", kind, file)), kinds[-1] if kinds else None)


def _by_content(path: Path) -> str | None:
    return next((kind for kind in SOURCES if _says(kind, "recognizes", kind, path)), None)


def _module(kind: str) -> Any:
    return importlib.import_module(SOURCES[kind].module)


def _says(kind: str, question: str, *about: Any) -> bool:
    """What a format's module answers; False where it cannot tell."""
    answer = getattr(_module(kind), question, None)
    return answer is not None and answer(*about)
