"""Mail: every message belongs to its sender and to everyone it was sent to."""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from coowned import validate
from coowned.attribution.examples import AttributedExamples, ExampleBuilder, Mentions, MentionsBuilder, Origin
from coowned.attribution.graph import connected_components, group_pairs, sort_and_collapse_rows, take_rows
from coowned.attribution.mail_addresses import named_addresses, parse_addresses
from coowned.attribution.mail_bodies import BODY_FIELDS, body_text
from coowned.attribution.mail_boxes import RawMessage, folder_files, is_mail_head, raw_messages
from coowned.attribution.mail_headers import (
    date_seconds,
    decode_words,
    first_value,
    header_fields,
    header_text,
    message_ids,
    own_message_id,
    split_message,
)
from coowned.attribution.options import MAIL_USERS, MBOX_DIALECTS
from coowned.attribution.user_keys import Aliases, UserKeyRules
from coowned.errors import InputError
from coowned.files import FileStates, file_states, read_head
from coowned.progress import Progress, reporting

if TYPE_CHECKING:
    from coowned.attribution.sources import DataSource

_SENDERS = (
    "From", "Sender", "Reply-To", "Resent-From", "Resent-Sender", "Resent-Reply-To", "Mail-Reply-To",
    "X-Original-From", "X-Original-Sender", "X-Original-Reply-To", "Original-From",
)  # fmt: skip
_RECIPIENTS = ("To", "Cc", "Bcc", "Resent-To", "Resent-Cc", "Resent-Bcc", "Apparently-To")
_PEOPLE = {
    "everyone": (*_SENDERS, *_RECIPIENTS),
    "sender": _SENDERS,
    "recipients": _RECIPIENTS,
    "thread": (*_SENDERS, *_RECIPIENTS),
}
_THREAD = ("References", "In-Reply-To")
_PAYLOAD = pa.schema(
    [
        ("subject", pa.large_string()),
        ("date", pa.timestamp("us", tz="UTC")),
        ("text", pa.large_string()),
        ("folder", pa.large_string()),
    ]
)
_NUMBERS = pa.schema([("number", pa.int64())])  # of messages whose content is deferred
_CONTENT_FIELDS = frozenset((*BODY_FIELDS, b"subject", b"date"))
_COUNTS = (
    "messages", "messages_without_id", "unreadable_headers", "unreadable_addresses", "unnamed_recipients",
    "undated_messages", "attachments_ignored", "undecodable_bodies", "repeated_messages",
)  # fmt: skip
_ROWS_AT_ONCE = 1 << 12  # of content that is read later
_REMEMBERED_HEADERS = 1 << 16  # parsed address headers that are kept, since they repeat


def read_mail(
    path: str | os.PathLike[str],
    *,
    attribute_to: str = "everyone",
    mbox_dialect: str | None = None,
    user_keys: UserKeyRules | None = None,
    aliases: Aliases | str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> AttributedExamples:
    """Reads messages attributed to the people in their headers; payload: subject, date (UTC or null), text, folder.

    Args:
      path: an mbox, a Maildir, one .eml file, or a folder of .eml files (also .mbox files, Maildirs and MH folders in
        it, at any depth, sorted by name).
      attribute_to: whom a message belongs to.
        "everyone": From, Sender, Reply-To, To, Cc, Bcc, the same with Resent- before it, and the headers in which
        lists keep a sender whose From they rewrote (X-Original-From and the like): whoever wrote it or got it.
        "thread": everyone of every message connected with it by References and In-Reply-To, whether the messages
        between them are in the box or not, since a reply quotes other people's words.
        "sender", "recipients": a part of "everyone". Fewer people are then protected: what Ann writes to Bob about
        Bob is not bounded for Bob where only the sender counts.
        Delivered-To and names inside the text are never read: people whom a message is about, or who received it
        through a list, are not protected.
      mbox_dialect: how mbox files keep texts from beginning a message: "mboxo" or "mboxrd" escape lines of text that
        begin with "From ", "mboxcl" and "mboxcl2" count the bytes of a text in Content-Length. None: a box is read
        where both say the same, and refused where it is ambiguous (see `split_mbox`).
      user_keys: the rules that make one person of several spellings; None for `UserKeyRules.email()`.
      aliases: further addresses of people, and members of lists: a CSV file `key,user`.
      progress: called now and then as progress(done, message), with `done` from 0 to 1.

    The id is the Message-ID. Without one it is the file's name in the folder, or the message's position in the mbox,
    counted in messages: a byte offset would carry the length of other people's words into the order of selection.
    Messages with one Message-ID are copies of one example: it belongs to the people of all of them (a copy in a Sent
    folder still names those in Bcc) and has text and folder of the first, in the order of files. A folder's name is the
    path to it inside `path`; an mbox is a folder too.
    What is wrong with a message never removes it: an address that cannot be read is a key of its own text, a message
    whose header cannot be read is an example without users, a body that cannot be decoded is read with replacement
    characters. `notes` of the result counts all of these, and attachments, which are ignored.

    Guarantees:
      - Ids and attribution come from headers, file names and positions alone.   (test_bodies_do_not_reach_the_graph)
      - With a conforming writer, no text makes a message, in any dialect.       (test_a_body_makes_no_message)
      - Every address in the headers read is a user of the example.              (test_every_address_is_a_user)
      - Copies of a message are one example with the users of all.               (test_copies_in_several_folders)
      - Any file is either read or refused with `InputError`.                    (test_mangled_mailboxes)
    Cost: linear time; memory for the result, one batch of messages and the largest message.
    Not to be confused with protection of everybody whom a message mentions: only of those whom its header names.

    Example:
      >>> import tempfile
      >>> file = Path(tempfile.mkdtemp()) / "letter.eml"
      >>> _ = file.write_text("From: Ann <ann@x.org>\\nTo: BOB@x.org\\nMessage-ID: <1@x.org>\\n\\nSee you.\\n")
      >>> examples = read_mail(file)
      >>> examples.ids.to_pylist(), examples.user_keys.to_pylist(), examples.payload["text"].to_pylist()
      (['1@x.org'], ['ann@x.org', 'bob@x.org'], ['See you.'])

    References: RFC 5322 (headers), RFC 2045 to 2047 (content), RFC 4155 (mbox).
    """
    validate.one_of(MAIL_USERS, attribute_to=attribute_to)
    if mbox_dialect is not None:
        validate.one_of(MBOX_DIALECTS, mbox_dialect=mbox_dialect)
    box = _Mailbox(_PEOPLE[attribute_to], with_references=attribute_to == "thread")
    box.add_all(path, mbox_dialect, progress)
    return box.attribute(path, user_keys=user_keys or UserKeyRules.email(), aliases=aliases)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MailContent:
    """Subjects, dates, texts and folders of messages, which are read in one pass when some are asked for.

    Guarantees:
      - No body is decoded but those that are asked for.   (test_bodies_are_read_when_they_are_asked_for)
      - Mail that changed in between is refused.           (test_mail_that_changed_is_refused)

    Attributes:
      path, dialect: as for `read_mail`.
      messages: (num_examples,) the number of each example's message, counted over all files.
      states: of the files, before their headers were read.
    """

    path: Path
    dialect: str | None
    messages: npt.NDArray[np.int64] = dataclasses.field(repr=False)
    states: FileStates = dataclasses.field(repr=False)

    @property
    def schema(self) -> pa.Schema:
        return _PAYLOAD

    def pieces(self, examples: npt.NDArray[np.int64]) -> Iterator[tuple[npt.NDArray[np.int64], pa.Table]]:
        """Yields (indices into `examples`, table of their content), in the order of the files."""
        wanted = self.messages[examples]
        order = np.argsort(wanted, kind="stable")
        numbers, begin, builder = wanted[order].tolist(), 0, ExampleBuilder(_PAYLOAD)
        for number, message in enumerate(raw_messages(self.path, lambda done: None, self.dialect)):
            while begin + len(builder) < len(numbers) and numbers[begin + len(builder)] == number:
                header, body = split_message(message.content)
                content = _content(message, header_fields(header, _CONTENT_FIELDS), body)
                builder.add_row("", *content.row, characters=content.size)
            if len(builder) == _ROWS_AT_ONCE:
                yield order[begin : begin + len(builder)], builder.payload()
                begin, builder = begin + len(builder), ExampleBuilder(_PAYLOAD)
        if file_states(self.path) != self.states or begin + len(builder) != len(numbers):
            raise InputError(
                f"{self.path}: changed after its headers were read; run again, on a copy if it goes on changing"
            )
        if len(builder):
            yield order[begin:], builder.payload()


class _Content(NamedTuple):
    """The content of one message, and how much of it could not be read."""

    row: tuple[str, int | None, str, str]  # subject, date in microseconds, text, folder
    attachments: int
    undecodable: bool

    @property
    def size(self) -> int:
        return len(self.row[0]) + len(self.row[2])


def _content(message: RawMessage, fields: dict[bytes, list[bytes]], body: Any) -> _Content:
    subject = " ".join(decode_words(first_value(fields, b"subject")).split())
    seconds = date_seconds(first_value(fields, b"date"))
    text, attachments, undecodable = body_text(fields, body, escaped=message.escaped)
    microseconds = None if seconds is None else seconds * 1_000_000
    return _Content((subject, microseconds, text, message.folder), attachments, undecodable)


def display_names(path: str | os.PathLike[str], *, mbox_dialect: str | None = None) -> dict[str, set[str]]:
    """Returns the display names of each address in the headers, by the address's key."""
    wanted = tuple(name.lower().encode() for name in _PEOPLE["everyone"])
    values: set[str] = set()
    for message in raw_messages(path, lambda done: None, mbox_dialect):
        for found in header_fields(split_message(message.content)[0], wanted).values():
            values.update(map(header_text, found))
    pairs: set[tuple[str, str]] = set()
    for value in values:
        pairs.update(named_addresses(value))
    keys = UserKeyRules.email().canonical([address for _, address in pairs])
    names: dict[str, set[str]] = {}
    for key, (name, _) in zip(keys, pairs, strict=True):
        names.setdefault(key, set()).add(decode_words(name))
    return names


def looks_like_mail(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path looks like mail: by suffix, by the folders of a Maildir, else by the first bytes.

    Example:
      >>> import tempfile
      >>> file = Path(tempfile.mkdtemp()) / "inbox"
      >>> _ = file.write_text("From ann@x.org Mon Jan  1 10:00:00 2024\\nFrom: ann@x.org\\n\\nHello\\n")
      >>> looks_like_mail(file)
      True
    """
    location = Path(path)
    try:
        if location.is_dir():
            files, _ = folder_files(location)
            return any((location / file).is_file() and is_mail_head(read_head(location / file)) for file in files[:10])
        if not location.is_file():
            return False
        if location.suffix.lower() in (".eml", ".mbox"):
            return True
        # A line "name: value" opens many kinds of file: two names of mail headers do not.
        return is_mail_head(read_head(location), known_headers=2)
    except InputError:
        return False


class _Mailbox:
    """A builder to which messages are added one by one; every message becomes one row, whatever it contains.

    Args:
      people: the headers whose addresses are the users, as they are written ("From", "To").
      with_references: keep the message ids that each message mentions.
      deferred: keep the number of each message in place of its content, which is not read.
    """

    def __init__(self, people: Sequence[str], *, with_references: bool, deferred: bool = False):
        self.builder = ExampleBuilder(_NUMBERS if deferred else _PAYLOAD)
        self._deferred = deferred
        self._headers = (*(_THREAD if with_references else ()), *people)
        self._people = tuple(name.lower().encode() for name in people)
        self._thread = tuple(name.lower().encode() for name in _THREAD) if with_references else ()
        self._wanted = frozenset((*self._people, *self._thread, *_CONTENT_FIELDS, b"message-id"))
        self._parsed: dict[bytes, tuple[tuple[int, ...], int, bool]] = {}  # codes, unreadable, unnamed
        self._references = MentionsBuilder()  # message ids that each message mentions, its own among them
        self.counts: dict[str, int] = dict.fromkeys(_COUNTS, 0)  # what a person should know of the messages

    def add_all(self, path: str | os.PathLike[str], dialect: str | None, progress: Progress | None) -> None:
        """Adds every message of a file or folder."""
        report = reporting(progress)
        for message in raw_messages(path, lambda done: report(done, "reading mail"), dialect):
            self.add(message)
        if Path(path).is_dir():
            self.counts["other_files_ignored"] = folder_files(Path(path))[1]

    def attribute(self, path: str | os.PathLike[str], **settings: Any) -> AttributedExamples:
        """Attributes the messages added so far; `settings` are those of `attribute`."""
        mentions, counts = self.thread_mentions() if self._thread else self.builder.mentions(), self.counts
        counts["messages_without_users"] = int(np.sum(np.diff(mentions.indptr) == 0))
        read = ("Message-ID", *(("file name or position",) if counts["messages_without_id"] else ()), *self._headers)
        origin = Origin(str(path), read, counts, repeats="repeated_messages")
        return self.builder.attribute(mentions, origin=origin, **settings)

    def add(self, message: RawMessage) -> None:
        header, body = split_message(message.content)
        fields = header_fields(header, self._wanted)
        own_id = own_message_id(first_value(fields, b"message-id"))
        self._add_users(fields)
        if self._thread:
            self._add_references(fields, own_id)
        if self._deferred:
            self.builder.add_row(own_id or message.name, self.counts["messages"])
        else:
            content = _content(message, fields, body)
            self.builder.add_row(own_id or message.name, *content.row, characters=content.size)
            self.counts["undated_messages"] += content.row[1] is None
            self.counts["attachments_ignored"] += content.attachments
            self.counts["undecodable_bodies"] += content.undecodable
        self.counts["messages"] += 1
        self.counts["messages_without_id"] += not own_id
        self.counts["unreadable_headers"] += not fields

    def thread_mentions(self) -> Mentions:
        """Returns for every message the users of all messages connected with it."""
        indptr, codes, spellings = self.builder.mentions()
        thread = self._threads(spellings)
        num_threads = int(thread.max(initial=-1)) + 1
        grouped = group_pairs(np.repeat(thread, np.diff(indptr)), codes, num_threads)
        by_thread, users = sort_and_collapse_rows(*grouped)
        return Mentions(*take_rows(by_thread, users, thread), spellings)

    def _threads(self, addresses: pa.Array) -> np.ndarray:
        """Returns the (messages,) thread of each message, from 0; messages that mention one id share a thread."""
        indptr, mentioned, spellings = self._references.mentions()
        ids = pl.Series(spellings, dtype=pl.String)
        # "In-Reply-To: message of Ann <ann@x.org>" names a person, not a message: joining by it would make one thread
        # of everything that answers Ann.
        people = pl.Series(addresses, dtype=pl.String).str.to_lowercase()
        own_ids = pl.Series(self.builder.ids()).unique()
        is_person = (ids.str.to_lowercase().is_in(people.implode()) & ~ids.is_in(own_ids.implode())).to_numpy()
        joins = ~is_person[mentioned]
        ends, mentioned = np.concatenate([[0], np.cumsum(joins)])[indptr], mentioned[joins]
        component = connected_components(ends, mentioned, len(ids))  # (ids,)
        thread = len(ids) + np.arange(len(indptr) - 1)  # a message without references is its own thread
        connected = np.diff(ends) > 0
        thread[connected] = component[mentioned[ends[:-1][connected]]]
        return np.unique(thread, return_inverse=True)[1]

    def _add_users(self, fields: dict[bytes, list[bytes]]) -> None:
        users: list[int] = []
        unnamed = False
        for name in self._people:
            for value in fields.get(name, ()):
                codes, unreadable, says_unnamed = self._parsed.get(value) or self._parse(value)
                users.extend(codes)
                self.counts["unreadable_addresses"] += unreadable
                unnamed |= says_unnamed
        self.counts["unnamed_recipients"] += unnamed
        self.builder.add_mentions(users)

    def _parse(self, value: bytes) -> tuple[tuple[int, ...], int, bool]:
        parsed = parse_addresses(header_text(value))
        if len(self._parsed) >= _REMEMBERED_HEADERS:
            self._parsed.clear()
        entry = tuple(map(self.builder.code, parsed.addresses)), parsed.unreadable, parsed.unnamed
        self._parsed[value] = entry
        return entry

    def _add_references(self, fields: dict[bytes, list[bytes]], own_id: str) -> None:
        found = [own_id] if own_id else []
        for name in self._thread:
            for value in fields.get(name, ()):
                found.extend(message_ids(header_text(value)))
        self._references.add_mentions([self._references.code(one) for one in found])


def read_without_content(kind: str, source: "DataSource", progress: Progress | None) -> AttributedExamples:
    """Reads the headers of a `DataSource` of this format; bodies are read when `pieces` of them are asked for.

    Guarantees:
      - Ids, users and rows are those of reading everything.   (test_mail_without_content)
    """
    del kind
    to, dialect, path = source.attribute_to or MAIL_USERS[0], source.mbox_dialect, Path(source.path)
    states = file_states(path)
    box = _Mailbox(_PEOPLE[to], with_references=to == "thread", deferred=True)
    box.add_all(path, dialect, progress)
    examples = box.attribute(path, user_keys=UserKeyRules.email(), aliases=source.aliases)
    content = MailContent(path=path, dialect=dialect, messages=examples.payload["number"].to_numpy(), states=states)
    return dataclasses.replace(examples, payload=examples.payload.select([]), content=content)


def read_source(kind: str, source: "DataSource", progress: Progress | None) -> AttributedExamples:
    """Reads a `DataSource` of this format."""
    del kind
    to = source.attribute_to or MAIL_USERS[0]
    return read_mail(
        source.path, attribute_to=to, mbox_dialect=source.mbox_dialect, aliases=source.aliases, progress=progress
    )


def source_names(source: "DataSource") -> dict[str, set[str]]:
    """Returns the display names in a `DataSource` of this format."""
    return display_names(source.path, mbox_dialect=source.mbox_dialect)


def recognizes(kind: str, path: Path) -> bool:
    """Returns whether a file, or the first files of a folder, look like mail."""
    del kind
    return looks_like_mail(path)


def is_laid_out(folder: Path) -> bool:
    """Returns whether a folder is laid out as a Maildir."""
    return (folder / "cur").is_dir() or (folder / "new").is_dir()
