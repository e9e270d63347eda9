"""The options of a data source, declared once for the readers, `[data]` in TOML and the command line."""

import dataclasses
import functools
import re
import typing
from collections.abc import Collection
from typing import Annotated, NamedTuple

SUFFIXES = {"parquet": (".parquet", ".pq"), "csv": (".csv", ".tsv"), "jsonl": (".jsonl", ".ndjson", ".json")}
TABLES = (*SUFFIXES, "sql")
MAIL_USERS = ("everyone", "sender", "recipients", "thread")
MBOX_DIALECTS = ("mboxo", "mboxrd", "mboxcl", "mboxcl2")
SLACK_USERS = ("participants", "channel")


class SourceEntry(NamedTuple):
    """The module that reads a format by `read_source(kind, source, progress)`, and the suffixes of its files.

    Where it can tell from the inside, it has `recognizes(kind, path)`, and `is_laid_out(folder)` for a folder whose
    arrangement says enough; `source_names(source)` where people have names beside their keys.
    """

    module: str
    reader: str  # its public function, a name of `coowned`
    suffixes: tuple[str, ...] = ()  # of several formats with one suffix the last need not recognize the file
    text: tuple[str, ...] = ()  # the columns that hold its text, where all data of the format have the same


SOURCES = {
    "parquet": SourceEntry("coowned.attribution.table_files", "read_parquet", SUFFIXES["parquet"]),
    "csv": SourceEntry("coowned.attribution.table_files", "read_csv", SUFFIXES["csv"]),
    "arxiv": SourceEntry("coowned.attribution.arxiv", "read_arxiv", SUFFIXES["jsonl"], text=("title", "abstract")),
    "jsonl": SourceEntry("coowned.attribution.table_files", "read_jsonl", SUFFIXES["jsonl"]),
    "mail": SourceEntry("coowned.attribution.mail", "read_mail", (".mbox", ".eml"), text=("subject", "text")),
    "slack": SourceEntry("coowned.attribution.slack", "read_slack", text=("text",)),
    "sql": SourceEntry("coowned.attribution.sql", "read_sql", (".sqlite", ".sqlite3")),
}
"""Where data can come from, by format: one file and one line here."""
_ADDRESS_WORDS = frozenset(
    (
        "from", "to", "cc", "bcc", "sender", "senders", "recipient", "recipients", "mail", "mails", "email", "emails",
        "address", "addresses", "mailbox",
    )
)  # fmt: skip


class Option(NamedTuple):
    """The help text of an option, and the formats it applies to."""

    help: str  # one sentence for people
    formats: Collection[str] = SOURCES  # the formats that it applies to; it is refused for others
    metavar: str | None = None  # placeholder of its value in the command line's help
    choices: Collection[str] = ()  # the values it can have, if they are few
    is_path: bool = False  # it names a file
    is_flag: bool = False  # it is true or false
    flag: str | None = None  # on the command line, where it is not its name


_TableOption = functools.partial(Option, formats=TABLES)
_FileOption = functools.partial(Option, metavar="FILE", is_path=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The options of a data source.

    Guarantees:
      - The command line and the configuration have these options, under these names.   (test_options_are_declared_once)

    Example:
      >>> DataOptions(users="sender").user_columns(), DataOptions().user_columns()
      (['sender'], ['users'])
    """

    format: Annotated[
        str | None,
        Option(
            "parquet, csv, jsonl, mail, arxiv, slack or sql (default: by the suffix, then the content).",
            choices=SOURCES,
        ),
    ] = None
    users: Annotated[
        str | list[str] | None,
        _TableOption("The columns that name an example's users (default: users).", metavar="A[,B…]"),
    ] = None
    user: Annotated[
        str | None,
        _TableOption("The column with the user, if every row is one (example, user) pair.", metavar="COLUMN"),
    ] = None
    example_id: Annotated[
        str | None,
        _TableOption(
            "The column with the ids (default: the row number; a query has none). Rows with one id are one example.",
            metavar="COLUMN",
        ),
    ] = None
    separator: Annotated[str | None, _TableOption("The separator between several users in one cell.")] = None
    addresses: Annotated[
        bool | None,
        _TableOption(
            "The user columns contain mail addresses, maybe several per cell (default: by the columns' names).",
            is_flag=True,
        ),
    ] = None
    aliases: Annotated[
        str | None,
        _FileOption("CSV file key,user: other addresses of a person, or the members of a mailing list."),
    ] = None
    unprotected: Annotated[
        str | None, _FileOption("File with the keys of users who are not to be protected, one per line.")
    ] = None
    attribute_to: Annotated[
        str | None,
        Option(
            "For mail: everyone (default), sender, recipients or thread. For Slack: participants (default) or channel.",
            formats=("mail", "slack"),
            choices=(*MAIL_USERS, *SLACK_USERS),
        ),
    ] = None
    mbox_dialect: Annotated[
        str | None,
        Option(
            "For mbox files: mboxo or mboxrd if their texts are escaped, mboxcl or mboxcl2 if Content-Length counts "
            "(default: what both agree on; a box that stays ambiguous is refused).",
            formats=("mail",),
            choices=MBOX_DIALECTS,
        ),
    ] = None
    query: Annotated[
        str | None,
        Option(
            "For SQLite: the query that returns the rows; it must not select them by content.",
            formats=("sql",),
            metavar="SELECT",
        ),
    ] = None

    def has_addresses(self) -> bool:
        """Returns whether the user columns contain mail addresses, as declared or by their names; content is not read.

        >>> DataOptions(users=["Sender Address", "cc"]).has_addresses(), DataOptions(users="authors").has_addresses()
        (True, False)
        """
        if self.addresses is not None:
            return self.addresses
        words = [
            re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()) for name in self.user_columns()
        ]
        return any(not _ADDRESS_WORDS.isdisjoint(found) for found in words)

    def user_columns(self) -> list[str]:
        """Returns the columns with users: "users" by default."""
        if self.user is not None:
            return [self.user]
        if self.users is None or isinstance(self.users, str):
            return [self.users or "users"]
        return list(self.users)


def declared() -> dict[str, Option]:
    """Returns the description of every option, by name."""
    hints = typing.get_type_hints(DataOptions, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}
