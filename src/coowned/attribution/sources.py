"""One description of where data comes from, read the same way by every command and every configuration file."""

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

    def read(self, progress: Progress | None = None, *, content: bool = True) -> AttributedExamples:
        """Reads the data, applies aliases, and removes unprotected users.

        Args:
          content: False leaves content where it is, for formats that can (Parquet, mail); `pieces` reads it later.
          progress: called now and then as progress(done, message), with `done` from 0 to 1, by the formats that take
            long (mail, Slack, databases).
        """
        kind = self._kind()
        self.refuse_unused(kind)
        # First: reading the data may take long.
        unprotected = None if self.unprotected is None else read_keys(self.unprotected)
        module = _module(kind)
        few = None if content else getattr(module, "read_without_content", lambda *about: None)(kind, self, progress)
        examples = few or module.read_source(kind, self, progress)
        return examples if unprotected is None else examples.without_users(unprotected)

    def read_rows(self) -> AttributedExamples:
        """Reads data for prediction: a table needs no user column, and then has no users."""
        kind = self._kind()
        unnamed = kind in TABLES and self.users is None and self.user is None
        return (dataclasses.replace(self, users=[]) if unnamed else self).read()

    def display_names(self) -> dict[str, set[str]]:
        """Returns people's display names by key, from the metadata; empty for tables, whose spellings have them."""
        kind = self._kind()
        named = getattr(_module(kind), "source_names", None)
        return {} if named is None else named(self)

    def text_columns(self) -> tuple[str, ...]:
        """Returns the columns that hold the text, for formats that have fixed ones; reads no content."""
        return SOURCES[self._kind()].text

    def _kind(self) -> str:
        if "://" in str(self.path):
            raise InputError(
                f"{self.path}: only Spark reads addresses (inspect, plan, select and certify with --engine "
                "spark); copy the rows here, those that were selected for example"
            )
        return self.format or detect_format(self.path)

    def refuse_unused(self, kind: str) -> None:
        """Raises an error for options that do not apply to this format."""
        for name, option in declared().items():
            if getattr(self, name) and kind not in option.formats:
                raise InputError(f"{self.path}: {name} does not apply to {kind} data; remove it or change the format")


def resolve_path(folder: str | os.PathLike[str], path: str) -> str | os.PathLike[str]:
    """Resolves a path relative to a folder, also inside the URL of a database.

    Example:
      >>> str(resolve_path("runs", "mail.mbox")), str(resolve_path("runs", "sqlite:///mail.db"))
      ('runs/mail.mbox', 'sqlite:///runs/mail.db')
    """
    if not path.startswith(_SQLITE):
        return path if "://" in path else Path(folder) / path
    return f"{_SQLITE}///{Path(folder) / _sqlite_file(path)}"


def _sqlite_file(address: str) -> Path:
    file = address.removeprefix(f"{_SQLITE}///")
    if file == address or not file:
        raise InputError(f"{address}: not the address of a SQLite file; write sqlite:///file.db")
    return Path(file)


def detect_format(path: str | os.PathLike[str]) -> str:
    """Detects the format of a file or folder: by suffix, then by content.

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
    """Calls the format's function of that name, if it has one; returns False if not."""
    answer = getattr(_module(kind), question, None)
    return answer is not None and answer(*about)
