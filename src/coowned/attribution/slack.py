"""Slack: every message belongs to the people of its thread, or to everybody in its channel."""

import contextlib
import json
import os
import re
import zipfile
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import pyarrow as pa

from coowned import validate
from coowned.attribution.examples import AttributedExamples, ExampleBuilder, Origin, valid_text
from coowned.attribution.identifiers import one_line
from coowned.attribution.options import SLACK_USERS
from coowned.attribution.user_keys import Aliases, UserKeyRules
from coowned.errors import InputError
from coowned.files import read_head
from coowned.progress import Progress, reporting

if TYPE_CHECKING:
    from coowned.attribution.sources import DataSource

_LISTS = ("channels.json", "groups.json", "dms.json", "mpims.json")
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}\.json")
LARGEST_FILE = 1 << 30  # one day of one channel; more is no export
_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, OSError)
_COUNTS = ("messages", "repeated_messages", "notices_left_out", "bot_messages", "messages_without_author")
_PAYLOAD = pa.schema([("channel", pa.large_string()), ("ts", pa.large_string()), ("text", pa.large_string())])
# Subtypes written by a person; all others are Slack's own notices, or answers composed from other people's words.
_WRITTEN = (None, "", "me_message", "thread_broadcast", "reply_broadcast", "file_share", "file_comment", "bot_message")
# What attribution is derived from, as the certificate names it.
_READ = (
    "channel id and ts", "subtype", "thread_ts", "user", "bot_id", "reply_users", "replies", "parent_user_id", "members"
)  # fmt: skip

Kind = TypeVar("Kind")
_Id = Annotated[str, msgspec.Meta(pattern=r"^[!-~]{0,200}\Z")]  # visible ASCII; empty for none
_Time = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,20}\.[0-9]{1,20}\Z")]


class _Reply(msgspec.Struct):
    user: _Id | None = None


class _Message(msgspec.Struct):
    """The fields read from a message: metadata, which is validated, and the text, which may have any type."""

    ts: _Time
    type: str | None = "message"
    subtype: str | None = None
    thread_ts: _Time | None = None
    user: _Id | None = None
    bot_id: _Id | None = None
    parent_user_id: _Id | None = None
    reply_users: list[_Id | None] | None = None
    replies: list[_Reply] | None = None
    comment: Any = None  # of a file; it keeps its author inside
    text: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.comment, dict):
            try:
                self.comment = msgspec.convert(self.comment, _Reply)
            except msgspec.ValidationError as error:
                raise ValueError(f"comment.user: {str(error).partition(' - at ')[0].lower()}") from None


class _User(msgspec.Struct):
    id: _Id
    real_name: Any = None
    profile: dict[str, Any] = msgspec.field(default_factory=dict)


class _Conversation(msgspec.Struct):
    """A public or private channel, or direct messages; members is None if the export does not list them."""

    id: Annotated[_Id, msgspec.Meta(min_length=1)]
    name: str | None = None
    members: list[_Id | None] | None = None
    is_im: bool | None = None
    is_mpim: bool | None = None


def read_slack(
    export: str | os.PathLike[str],
    *,
    attribute_to: str = "participants",
    user_keys: UserKeyRules | None = None,
    aliases: Aliases | str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> AttributedExamples:
    """Reads the messages of a Slack export, attributed by their metadata; payload: channel (its id), ts, text.

    Args:
      export: the zip that Slack exported, or its unpacked folder.
      attribute_to: whom a message belongs to.
        "participants": its author and everyone who wrote in its thread (`reply_users` and `replies` of the first
        message, and the authors of all messages with its `thread_ts`); in direct messages, of two or of several, also
        every member.
        "channel": also every member of the channel, and everybody who ever wrote, joined or left there, since the list
        of members is that of the day of the export. People who only read are protected, too; the number of pairs is
        that of messages times people, and a bound keeps few messages of a large channel.
        Mentions in the text are never read: they would let content choose S. Somebody whom a message is about, and who
        did not take part, is not protected by it.
      user_keys: the rules that make keys of user ids; None for `UserKeyRules.exact()`: Slack makes the ids.
      aliases: who has several accounts: a CSV file `key,user` of user ids.
      progress: called after each file as progress(done, message), with `done` from 0 to 1.

    A message is an example, its id is "CHANNEL:TS". If an id occurs twice (a reply also sent to the channel, days
    that overlap), the first one in file order is kept, with the people of all. A person whose account was
    deleted stays a user. What a program posts belongs to the account it posts as, or else to "bot:ID", a user like
    others that can be left unprotected ("bot:unnamed" for those without an id). Other notices of Slack (joined, left,
    topic, pinned, ...) are left out by their `subtype`, as are folders that no list of conversations names, because who
    could read them is not known. `notes` of the result counts all of these.

    Guarantees:
      - Ids and attribution come from metadata alone.                      (test_texts_do_not_reach_the_graph)
      - Everyone who wrote in a thread is a user of each message of it.    (test_threads)
      - Any folder or file is either read or refused with `InputError`.    (test_mangled_exports)

    Cost: linear time; memory for the result, one file, and the people of one channel. A zip is read entry by entry and
    never extracted.

    Example:
      >>> import json, pathlib, tempfile
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> channels = [{"id": "C1", "name": "general", "members": ["U1", "U2"]}]
      >>> _ = (folder / "channels.json").write_text(json.dumps(channels))
      >>> (folder / "general").mkdir()
      >>> messages = [{"type": "message", "user": "U1", "ts": "1700000000.000100", "text": "Lunch, <@U9>?"}]
      >>> _ = (folder / "general" / "2023-11-14.json").write_text(json.dumps(messages))
      >>> examples = read_slack(folder)
      >>> examples.ids.to_pylist(), examples.user_keys.to_pylist()
      (['C1:1700000000.000100'], ['U1'])
      >>> read_slack(folder, attribute_to="channel").user_keys.to_pylist()
      ['U1', 'U2']
    """
    validate.one_of(SLACK_USERS, attribute_to=attribute_to)
    report = reporting(progress)
    builder = ExampleBuilder(_PAYLOAD)
    counts: dict[str, int] = dict.fromkeys(_COUNTS, 0)
    with _open_export(export) as files:
        days, notes = _days(files, _conversations(files))
        total = max(1, sum(files.sizes[name] for _, names in days for name in names))
        done = 0
        for conversation, names in days:
            everybody = attribute_to == "channel" or bool(conversation.is_im)
            if everybody and conversation.members is None:
                where = f"{files.path}: {names[0].split('/')[0]}"
                raise InputError(f"{where}: has no member list; use attribute_to participants")
            thread = _ConversationReader(conversation, everybody, builder, counts)
            for name in names:
                for message in files.read(name, list[_Message]):
                    thread.add(message)
                done += files.sizes[name]
                report(done / total, "reading Slack messages")
            thread.finish()
    return builder.attribute(
        user_keys=user_keys or UserKeyRules.exact(),
        aliases=aliases,
        origin=Origin(str(export), _READ, {"conversations": len(days), **counts, **notes}),
    )


class _ConversationReader:
    """A reader of one conversation; users are assigned at its end, since a thread can run over many days."""

    def __init__(self, conversation: _Conversation, everybody: bool, builder: ExampleBuilder, counts: dict[str, int]):
        self.id = conversation.id
        self.builder = builder
        self.counts = counts
        # Everyone who ever took part in the conversation, if all of them are users of each message.
        self.everybody = set(map(builder.code, filter(None, conversation.members or ()))) if everybody else None
        self.people: dict[str, set[int]] = {}  # thread_ts -> who wrote in it
        self.threads: dict[str, list[str]] = {}  # ts -> the threads of each message kept, in order

    def add(self, message: _Message) -> None:
        """Counts one message and, unless it is a notice or a repetition, adds it as a row."""
        thread = message.thread_ts or message.ts
        author, is_bot = _author(message)
        named = [author, message.parent_user_id, *(message.reply_users or ())]
        named += [reply.user for reply in message.replies or ()]
        people = set(map(self.builder.code, filter(None, named)))
        self.people.setdefault(thread, set()).update(people)
        if self.everybody is not None:
            self.everybody |= people
        if (message.type or "message") != "message" or message.subtype not in _WRITTEN:
            self.counts["notices_left_out"] += 1
            return
        if message.ts in self.threads:
            self.counts["repeated_messages"] += 1
            self.threads[message.ts].append(thread)
            return
        self.threads[message.ts] = [thread]
        self.counts["messages"] += 1
        self.counts["bot_messages"] += is_bot
        self.counts["messages_without_author"] += author is None
        text = valid_text(message.text)
        self.builder.add_row(f"{self.id}:{message.ts}", self.id, message.ts, text, characters=len(text))

    def finish(self) -> None:
        """Gives every message its users, when all threads are known."""
        everybody = array("i", sorted(self.everybody or ()))
        for threads in self.threads.values():
            people = set().union(*(self.people[thread] for thread in threads)) if self.everybody is None else everybody
            self.builder.add_mentions(people)


def _author(message: _Message) -> tuple[str | None, bool]:
    """Returns the author of a message, and whether it is a bot."""
    user = message.user or None
    if user is None and isinstance(message.comment, _Reply):
        user = message.comment.user or None
    is_bot = bool(message.bot_id) or message.subtype == "bot_message"
    if user is None and is_bot:
        return f"bot:{message.bot_id or 'unnamed'}", True
    return user, is_bot


def _conversations(files: "_SlackFiles") -> dict[str, _Conversation]:
    """Returns the conversation of each folder, from the export's lists; `is_im` is set for all direct messages."""
    found: dict[str, _Conversation] = {}
    for name in _LISTS:
        for one in files.read(name, list[_Conversation]) if name in files.sizes else ():
            one.is_im = name in ("dms.json", "mpims.json") or bool(one.is_im or one.is_mpim)
            # Direct messages have no name, and some exports name every folder by the id.
            for key in dict.fromkeys((one.name or one.id, one.id)):
                found[key] = _joined(found[key], one) if key in found else one
    return found


def _joined(one: _Conversation, other: _Conversation) -> _Conversation:
    """Merges two conversations that share a folder: the people of both."""
    known = one.members is not None and other.members is not None
    members = list(dict.fromkeys((*(one.members or ()), *(other.members or ())))) if known else None
    return _Conversation(id=one.id, members=members, is_im=bool(one.is_im or other.is_im))


def _days(
    files: "_SlackFiles", listed: dict[str, _Conversation]
) -> tuple[list[tuple[_Conversation, list[str]]], dict[str, int]]:
    """Returns the conversations that have files, with their files in order of name, and the number of other files."""
    days: dict[str, tuple[_Conversation, list[str]]] = {}  # by the conversation's id: it may have two folders
    unlisted: set[str] = set()
    others = 0
    for name in sorted(files.sizes):
        folder, _, file = name.rpartition("/")
        if not folder:
            continue
        if "/" in folder or not _DAY.fullmatch(file):
            others += 1
        elif folder in listed:
            here = listed[folder]
            known, names = days.setdefault(here.id, (here, []))
            names.append(name)
            if known is not here:
                days[here.id] = (_joined(known, here), names)
        else:
            unlisted.add(folder)
    return list(days.values()), {"unlisted_folders_left_out": len(unlisted), "other_files_ignored": others}


class _SlackFiles:
    """The JSON files of an export, by their names below its root ("general/2024-01-31.json").

    The root is where the list of channels is: at the top, or in the one folder that a new zip was made of. Nothing is
    extracted from a zip.
    """

    def __init__(self, path: str | os.PathLike[str], sizes: dict[str, int], archive: zipfile.ZipFile | None):
        self.path = Path(path)
        self._archive = archive
        root = _root_of(sizes)
        if root is None:
            raise InputError(
                f"{self.path}: not a Slack export: there is no {', '.join(_LISTS[:-1])} or {_LISTS[-1]} in it; "
                "give the folder or zip that Slack exported"
            )
        self._root = root
        self.sizes = {name.removeprefix(root): size for name, size in sizes.items() if name.startswith(root)}

    def read(self, name: str, kind: type[Kind]) -> Kind:
        """Decodes one JSON file."""
        where = f"{self.path}: {name}"
        if self.sizes[name] > LARGEST_FILE:
            raise InputError(
                f"{where}: has {self.sizes[name]:,} bytes, too many for one day of a channel; check the file"
            )
        try:
            inside = f"{self._root}{name}"
            content = (self.path / inside).read_bytes() if self._archive is None else self._archive.read(inside)
        except _ZIP_ERRORS as error:
            reason = getattr(error, "strerror", None) or one_line(error)
            raise InputError(f"{where}: cannot be read ({reason}); export it again") from error
        try:
            return msgspec.convert(json.loads(content.decode("utf-8-sig")), kind)
        except msgspec.ValidationError as error:
            raise InputError(f"{where}: {_explained(error)}; export it again") from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: not JSON in UTF-8 ({one_line(error)}); export it again") from None


def _explained(error: msgspec.ValidationError) -> str:
    """Rewrites "Expected `str`, got `int` - at `$[0].user`" as "entry 0, 'user': expected str, got int"."""
    problem, _, path = one_line(error).replace("`", "").partition(" - at ")
    found = re.match(r"\$\[(\d+)\]\.?(.*)", path)
    named = "" if found is None else f"entry {found[1]}{f', {found[2]!r}' if found[2] else ''}: "
    return f"{named}{problem[:1].lower()}{problem[1:]}"


@contextlib.contextmanager
def _open_export(path: str | os.PathLike[str]) -> Iterator[_SlackFiles]:
    root = Path(path)
    if root.is_dir():
        yield _SlackFiles(root, _files_below(root), None)
        return
    if not root.is_file():
        raise InputError(f"{root}: no such file or folder; check the path")
    try:
        archive = zipfile.ZipFile(root)
    except _ZIP_ERRORS as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise InputError(f"{root}: neither a folder nor a readable zip file ({reason}); check the path") from error
    with archive:
        yield _SlackFiles(root, _entries_of(archive), archive)


def display_names(export: str | os.PathLike[str]) -> dict[str, set[str]]:
    """Returns the names and addresses of each user in the export's list of users, by id."""
    with _open_export(export) as files:
        listed = files.read("users.json", list[_User]) if "users.json" in files.sizes else []
    fields = ("real_name", "display_name", "email")
    return {
        user.id: {name for name in (user.real_name, *map(user.profile.get, fields)) if isinstance(name, str) and name}
        for user in listed
    }


def looks_like_slack(path: str | os.PathLike[str]) -> bool:
    """Returns whether a folder or zip has users.json and channels.json where Slack puts them.

    Example:
      >>> import tempfile
      >>> folder = Path(tempfile.mkdtemp())
      >>> looks_like_slack(folder)
      False
      >>> for name in ("users.json", "channels.json"):
      ...     _ = (folder / name).write_text("[]")
      >>> looks_like_slack(folder)
      True
    """
    root = Path(path)
    lists = ("channels.json", "users.json")
    with contextlib.suppress(InputError, *_ZIP_ERRORS):
        if root.is_dir():  # without listing all of what may be another kind of folder
            below = [path for path in root.iterdir() if path.name[0] not in "._"]
            tops = [root, *(below if len(below) == 1 else [])]
            return any(all((top / name).is_file() for name in lists) for top in tops)
        with _open_export(root) as files:
            return files.sizes.keys() >= set(lists)
    return False


def _files_below(folder: Path) -> dict[str, int]:
    try:
        return {
            file.relative_to(folder).as_posix(): file.stat().st_size
            for file in folder.rglob("*")
            if file.is_file() and file.name[0] not in "._"
        }
    except OSError as error:
        raise InputError(f"{folder}: cannot be read ({error.strerror}); check its permissions") from error


def _entries_of(archive: zipfile.ZipFile) -> dict[str, int]:
    return {
        entry.filename: entry.file_size
        for entry in archive.infolist()
        if not entry.is_dir() and not entry.filename.startswith("__MACOSX/")
    }


def _root_of(names: dict[str, int]) -> str | None:
    """Returns the prefix of the lists of conversations: "" or "folder/"; None if there is none, or more than one."""
    paths = [PurePosixPath(name) for name in names]
    found = {str(path.parent) for path in paths if path.name in _LISTS and len(path.parts) <= 2}
    if "." in found:
        return ""
    return f"{found.pop()}/" if len(found) == 1 else None


def read_source(kind: str, source: "DataSource", progress: Progress | None) -> AttributedExamples:
    """Reads a `DataSource` of this format."""
    del kind
    to = source.attribute_to or SLACK_USERS[0]
    return read_slack(source.path, attribute_to=to, aliases=source.aliases, progress=progress)


def source_names(source: "DataSource") -> dict[str, set[str]]:
    """Returns the display names in a `DataSource` of this format."""
    return display_names(source.path)


def recognizes(kind: str, path: Path) -> bool:
    """Returns whether a file is a zip of an export."""
    del kind
    return path.is_file() and read_head(path).startswith(b"PK") and looks_like_slack(path)


def is_laid_out(folder: Path) -> bool:
    """Returns whether a folder is an export."""
    return looks_like_slack(folder)
