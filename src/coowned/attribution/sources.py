"""One description of where data come from, read the same way by every verb and every configuration file."""

import dataclasses
import os
from pathlib import Path
from typing import Any

from coowned import validate
from coowned.attribution.examples import AttributedExamples
from coowned.attribution.user_keys import read_keys
from coowned.errors import InputError

FORMATS = ("parquet", "csv", "jsonl", "mail", "arxiv")
_BY_SUFFIX = {
    ".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".tsv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl",
    ".json": "jsonl", ".mbox": "mail", ".eml": "mail",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSource:
    """A path and how to read it.

    Guarantees:
      - Settings that a format has no use for are refused, not passed over.   (test_unused_settings_are_refused)

    Attributes:
      path: a file or folder.
      format: one of FORMATS; None looks at the suffix, then at the content.
      users: for tables, the columns that name the users of an example.
      user: for tables with one pair a row, the column that names the user.
      example_id: for tables, the column with the ids; None for the row number.
      separator: for tables, what stands between two users in one cell.
      aliases: a CSV file `key,user`.
      unprotected: a file with the keys of users who are not to be protected, one a line.
      attribute_to: for mail, whom a message belongs to.
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "users", (self.users,) if isinstance(self.users, str) else tuple(self.users))
        if self.format is not None:
            validate.one_of(FORMATS, format=self.format)
        if self.attribute_to is not None:
            from coowned.attribution.mail import ATTRIBUTE_TO

            validate.one_of(ATTRIBUTE_TO, attribute_to=self.attribute_to)

    def read(self) -> AttributedExamples:
        """Reads the data, with aliases and without unprotected users."""
        kind = self.format or detect_format(self.path)
        unprotected = None if self.unprotected is None else read_keys(self.unprotected)  # first: the data may take long
        examples = self._read_table(kind) if kind in ("parquet", "csv", "jsonl") else self._read_attributed(kind)
        return examples if unprotected is None else examples.without_users(unprotected)

    def _read_table(self, kind: str) -> AttributedExamples:
        from coowned.attribution import table_files

        self._refuse("attribute_to", kind)
        reader = {"parquet": table_files.read_parquet, "csv": table_files.read_csv, "jsonl": table_files.read_jsonl}[
            kind
        ]
        users: Any = None if not self.users else self.users[0] if len(self.users) == 1 else list(self.users)
        return reader(self.path, users, self.user, self.example_id, self.separator, aliases=self.aliases)

    def _read_attributed(self, kind: str) -> AttributedExamples:
        for setting in ("users", "user", "example_id", "separator"):
            self._refuse(setting, kind)
        if kind == "mail":
            from coowned.attribution.mail import read_mail

            return read_mail(self.path, attribute_to=self.attribute_to or "everyone", aliases=self.aliases)
        from coowned.attribution.arxiv import read_arxiv

        self._refuse("attribute_to", kind)
        return read_arxiv(self.path, aliases=self.aliases)

    def _refuse(self, setting: str, kind: str) -> None:
        if getattr(self, setting):
            raise InputError(
                f"{self.path}: {setting} means nothing for {kind} data; leave it out or name another format"
            )


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

    if (folder / "cur").is_dir() or (folder / "new").is_dir():
        return "mail"
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

    start = _start_of(file, 4096)
    if start.startswith(b"PAR1"):
        return "parquet"
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
