"""One description of where data come from, read the same way by every verb and every configuration file."""

import dataclasses
import os
from pathlib import Path

from coowned import validate
from coowned.attribution.examples import AttributedExamples
from coowned.attribution.mail_boxes import read_head
from coowned.attribution.options import FORMATS, MAIL_USERS, SLACK_USERS, SUFFIXES, TABLES, DataOptions, declared
from coowned.attribution.user_keys import read_keys
from coowned.errors import InputError
from coowned.progress import Progress

_BY_SUFFIX = {suffix: kind for kind, suffixes in SUFFIXES.items() for suffix in suffixes}
_BY_SUFFIX |= {".mbox": "mail", ".eml": "mail", ".sqlite": "sql", ".sqlite3": "sql"}
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
        examples = self._read(kind, progress)
        return examples if unprotected is None else examples.without_users(unprotected)

    def read_rows(self) -> AttributedExamples:
        """Reads data for prediction: a table needs no user column, and then has no users."""
        kind = self.format or detect_format(self.path)
        unnamed = kind in TABLES and self.users is None and self.user is None
        return (dataclasses.replace(self, users=[]) if unnamed else self).read()

    def display_names(self) -> dict[str, set[str]]:
        """Display names of people by key, from the metadata; tables keep such names in their spellings."""
        kind = self.format or detect_format(self.path)
        if kind == "mail":
            from coowned.attribution.mail import display_names

            return display_names(self.path, mbox_dialect=self.mbox_dialect)
        if kind == "slack":
            from coowned.attribution.slack import display_names

            return display_names(self.path)
        return {}

    def refuse_unused(self, kind: str) -> None:
        """Refuses options that do not apply to this format."""
        for name, option in declared().items():
            if getattr(self, name) and kind not in option.formats:
                raise InputError(f"{self.path}: {name} does not apply to {kind} data; remove it or change the format")

    def _read(self, kind: str, progress: Progress | None) -> AttributedExamples:
        if kind == "sql":
            from coowned.attribution.sql import open_sqlite, read_query

            if self.query is None:
                raise InputError(f"{self.path}: a database needs a query for the rows; add --query 'SELECT ...'")
            with open_sqlite(self.path) as connection:
                return read_query(
                    self.query, connection, self, aliases=self.aliases, name=str(self.path), progress=progress
                )
        if kind in TABLES:
            from coowned.attribution.table_files import read_table

            return read_table(kind, self.path, self, aliases=self.aliases)
        if kind == "arxiv":
            from coowned.attribution.arxiv import read_arxiv

            return read_arxiv(self.path, aliases=self.aliases)
        if kind == "mail":
            from coowned.attribution.mail import read_mail

            to = self.attribute_to or MAIL_USERS[0]
            return read_mail(
                self.path, attribute_to=to, mbox_dialect=self.mbox_dialect, aliases=self.aliases, progress=progress
            )
        from coowned.attribution.slack import read_slack

        to = self.attribute_to or SLACK_USERS[0]
        return read_slack(self.path, attribute_to=to, aliases=self.aliases, progress=progress)


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
    kind = _BY_SUFFIX.get(file.suffix.lower()) or _by_content(file)
    if kind is None:
        raise InputError(f"{file}: unknown format; choose one with --format {'|'.join(FORMATS)}")
    return "arxiv" if kind == "jsonl" and _is_arxiv(file) else kind


def _detect_folder(folder: Path) -> str:
    from coowned.attribution.mail import looks_like_mail
    from coowned.attribution.slack import looks_like_slack

    if (folder / "cur").is_dir() or (folder / "new").is_dir():
        return "mail"
    if looks_like_slack(folder):
        return "slack"
    for file in sorted(folder.rglob("*")):
        hidden = any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)
        kind = _BY_SUFFIX.get(file.suffix.lower())
        if kind and file.is_file() and not hidden:
            return "arxiv" if kind == "jsonl" and _is_arxiv(file) else kind
    if looks_like_mail(folder):
        return "mail"
    raise InputError(f"{folder}: no file of a known format in it; choose one with --format {'|'.join(FORMATS)}")


def _by_content(file: Path) -> str | None:
    from coowned.attribution.mail import looks_like_mail
    from coowned.attribution.slack import looks_like_slack

    start = read_head(file)
    if start.startswith(b"PAR1"):
        return "parquet"
    if start.startswith(b"SQLite format 3\0"):
        return "sql"
    if start.startswith(b"PK"):
        return "slack" if looks_like_slack(file) else None
    if start.lstrip().startswith(b"{"):
        return "jsonl"
    return "mail" if looks_like_mail(file) else None


def _is_arxiv(file: Path) -> bool:
    return b'"authors_parsed"' in read_head(file, 1 << 20).split(b"\n", 1)[0]
