"""One description of where data come from, read the same way by every verb and every configuration file."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coowned import validate
from coowned.attribution.examples import AttributedExamples
from coowned.attribution.user_keys import read_keys
from coowned.errors import InputError

FORMATS = ("parquet", "csv", "jsonl", "mail", "arxiv", "slack", "sql")
_BY_SUFFIX = {
    ".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".tsv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl",
    ".json": "jsonl", ".mbox": "mail", ".eml": "mail", ".sqlite": "sql", ".sqlite3": "sql",
}  # fmt: skip
_SQLITE = "sqlite:"
_TABLES = ("parquet", "csv", "jsonl", "sql")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSource:
    """A path and how to read it.

    Guarantees:
      - Settings that a format has no use for are refused, not passed over.   (test_unused_settings_are_refused)

    Attributes:
      path: a file or folder; "sqlite:///mail.db" (or "sqlite:////home/ann/mail.db") is the file mail.db of SQLite.
      format: one of FORMATS; None looks at the suffix, then at the content.
      users: for tables, the columns that name the users of an example.
      user: for tables with one pair a row, the column that names the user.
      example_id: for tables, the column with the ids; None for the row number, which the rows of a query do not have.
      separator: for tables, what stands between two users in one cell.
      aliases: a CSV file `key,user`.
      unprotected: a file with the keys of users who are not to be protected, one a line.
      attribute_to: for mail and Slack, whom a message belongs to.
      query: for a database, the SELECT that gives the rows; it must not choose by content.
    """

    path: str | os.PathLike[str]
    format: str | None = None
    users: tuple[str, ...] = ()
    user: str | None = None
    example_id: str | None = None
    separator: str | None = None
    aliases: str | os.PathLike[str] | None = None
    unprotected: str | os.PathLike[str] | None = None
    attribute_to: str | None = None
    query: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "users", (self.users,) if isinstance(self.users, str) else tuple(self.users))
        if str(self.path).startswith(_SQLITE):
            object.__setattr__(self, "path", _sqlite_file(str(self.path)))
            object.__setattr__(self, "format", self.format or "sql")
        if self.format is not None:
            validate.one_of(FORMATS, format=self.format)
        if self.attribute_to is not None:
            from coowned.attribution import mail, slack

            choices = (*mail.ATTRIBUTE_TO, *slack.ATTRIBUTE_TO)
            validate.one_of(choices, attribute_to=self.attribute_to)

    def read(self, progress: Callable[[float, str], None] | None = None) -> AttributedExamples:
        """Reads the data, with aliases and without unprotected users.

        Args:
          progress: called now and then as progress(done, message), with `done` from 0 to 1, by the formats that take
            long (mail, Slack, databases).
        """
        kind = self.format or detect_format(self.path)
        unprotected = None if self.unprotected is None else read_keys(self.unprotected)  # first: the data may take long
        read = self._read_table if kind in _TABLES else self._read_attributed
        examples = read(kind, progress)
        return examples if unprotected is None else examples.without_users(unprotected)

    def _read_table(self, kind: str, progress: Callable[[float, str], None] | None) -> AttributedExamples:
        self._refuse("attribute_to", kind)
        users: Any = None if not self.users else self.users[0] if len(self.users) == 1 else list(self.users)
        if kind == "sql":
            return self._read_query(users, progress)
        from coowned.attribution import table_files

        self._refuse("query", kind)
        reader = {"parquet": table_files.read_parquet, "csv": table_files.read_csv, "jsonl": table_files.read_jsonl}[
            kind
        ]
        return reader(self.path, users, self.user, self.example_id, self.separator, aliases=self.aliases)

    def _read_query(self, users: Any, progress: Callable[[float, str], None] | None) -> AttributedExamples:
        from coowned.attribution.sql import open_sqlite, read_sql

        if self.query is None:
            raise InputError(f'{self.path}: a database needs a query that gives the rows; say --query "SELECT ..."')
        with open_sqlite(self.path) as connection:
            return read_sql(
                self.query,
                connection,
                users=users,
                user=self.user,
                example_id=self.example_id,
                separator=self.separator,
                aliases=self.aliases,
                place=str(self.path),
                progress=progress,
            )

    def _read_attributed(self, kind: str, progress: Callable[[float, str], None] | None) -> AttributedExamples:
        for setting in ("users", "user", "example_id", "separator", "query"):
            self._refuse(setting, kind)
        if kind == "mail":
            from coowned.attribution.mail import read_mail

            to = self.attribute_to or "everyone"
            return read_mail(self.path, attribute_to=to, aliases=self.aliases, progress=progress)
        if kind == "slack":
            from coowned.attribution.slack import read_slack

            to = self.attribute_to or "participants"
            return read_slack(self.path, attribute_to=to, aliases=self.aliases, progress=progress)
        from coowned.attribution.arxiv import read_arxiv

        self._refuse("attribute_to", kind)
        return read_arxiv(self.path, aliases=self.aliases)

    def _refuse(self, setting: str, kind: str) -> None:
        if getattr(self, setting):
            raise InputError(
                f"{self.path}: {setting} means nothing for {kind} data; leave it out or name another format"
            )


def beside(folder: str | os.PathLike[str], path: str) -> str | os.PathLike[str]:
    """A path as a file in that folder means it: relative ones from there, those of databases too.

    Example:
      >>> str(beside("runs", "mail.mbox")), str(beside("runs", "sqlite:///mail.db"))
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
    place = Path(path)
    if place.is_dir():
        return _detect_folder(place)
    if not place.is_file():
        raise InputError(f"{place}: no such file or folder; check the path")
    kind = _BY_SUFFIX.get(place.suffix.lower()) or _by_content(place)
    if kind is None:
        raise InputError(f"{place}: cannot tell what it holds; say --format {'|'.join(FORMATS)}")
    return "arxiv" if kind == "jsonl" and _is_arxiv(place) else kind


def _detect_folder(folder: Path) -> str:
    from coowned.attribution.mail import looks_like_mail
    from coowned.attribution.slack_files import looks_like_slack

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
    raise InputError(f"{folder}: no file in it is of a known kind; say --format {'|'.join(FORMATS)}")


def _by_content(file: Path) -> str | None:
    from coowned.attribution.mail import looks_like_mail
    from coowned.attribution.slack_files import looks_like_slack

    start = _start_of(file, 4096)
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
    return b'"authors_parsed"' in _start_of(file, 1 << 20).split(b"\n", 1)[0]


def _start_of(file: Path, length: int) -> bytes:
    try:
        with file.open("rb") as opened:
            return opened.read(length)
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror}); check the path and who may read it") from error
