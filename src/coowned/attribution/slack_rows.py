"""Slack messages gathered into columns, a conversation at a time, since a thread can run over many days."""

import dataclasses
import re
from array import array
from typing import Any

import numpy as np
import pyarrow as pa

from coowned.attribution.slack_files import LISTS, SlackFiles
from coowned.errors import InputError

_PAYLOAD = pa.schema([("channel", pa.large_string()), ("ts", pa.large_string()), ("text", pa.large_string())])
# Subtypes that somebody wrote; all others are notices of Slack itself, or answers it makes of other people's words.
WRITTEN = (None, "", "me_message", "thread_broadcast", "reply_broadcast", "file_share", "file_comment", "bot_message")
_TS = re.compile(r"[0-9]{1,20}\.[0-9]{1,20}", re.ASCII)
_ID = re.compile(r"[!-~]{1,200}")  # visible ASCII
_BATCH_CHARACTERS = 8 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
    """A channel, a private one, or direct messages; members is None where the export does not say."""

    id: str
    members: tuple[str, ...] | None
    is_direct: bool


def conversations(files: SlackFiles) -> dict[str, Conversation]:
    """The conversation of each folder, from the lists of the export."""
    found: dict[str, Conversation] = {}
    for name in LISTS:
        if name not in files.sizes:
            continue
        for number, entry in enumerate(files.list_of_objects(name)):
            place = f"{files.path}: {name}, entry {number}"
            own_id = _identifier(entry, "id", place)
            if own_id is None:
                raise InputError(f"{place}: has no 'id'; get the export anew")
            folder = entry.get("name")
            if folder is not None and not isinstance(folder, str):
                raise InputError(f"{place}: 'name' is not text; get the export anew")
            listed = entry.get("members")
            members = None if listed is None else tuple(_identifiers(listed, "members", place))
            direct = name in ("dms.json", "mpims.json") or bool(entry.get("is_im") or entry.get("is_mpim"))
            one = Conversation(id=own_id, members=members, is_direct=direct)
            # Direct messages have no name, and some exports name every folder by the id.
            for key in dict.fromkeys((folder or own_id, own_id)):
                found[key] = joined(found[key], one) if key in found else one
    return found


def joined(one: Conversation, other: Conversation) -> Conversation:
    """Two conversations as one, as where both have the same folder: the people of both."""
    known = one.members is not None and other.members is not None
    members = tuple(dict.fromkeys((*(one.members or ()), *(other.members or ())))) if known else None
    return Conversation(id=one.id, members=members, is_direct=one.is_direct or other.is_direct)


class MessageColumns:
    """Takes the messages of one conversation after the other: `begin`, `add` for each file, `end`."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(
            ("messages", "repeated_messages", "notices_left_out", "bot_messages", "messages_without_author"), 0
        )
        self._codes: dict[str, int] = {}  # user id -> its index
        self._ids: list[pa.Array] = []
        self._batches: list[pa.RecordBatch] = []
        self._num_users: list[np.ndarray] = []
        self._users: list[np.ndarray] = []
        self._rows: tuple[list[str], list[str], list[str]] = ([], [], [])  # channel, ts, text
        self._characters = 0

    def begin(self, conversation: Conversation, *, everybody: bool, place: str) -> None:
        """everybody: its members, and whoever appears in it, have a part in each message."""
        self._conversation = conversation
        self._everybody: set[int] | None = None
        if everybody:
            if conversation.members is None:
                raise InputError(
                    f"{place}: the export has no list of its members; attribute to participants, or leave it out"
                )
            self._everybody = {self._code(member) for member in conversation.members}
        self._threads: dict[str, tuple[int, ...]] = {}  # thread_ts -> who wrote in it
        self._thread_of: dict[str, str] = {}  # ts -> thread_ts of the messages kept, in order
        self._other_threads: dict[str, list[str]] = {}  # for messages that came again in another thread

    def add(self, messages: list[dict[str, Any]], place: str) -> None:
        """Takes the messages of one file."""
        for number, message in enumerate(messages):
            self._add_one(message, f"{place}, message {number}")

    def end(self) -> None:
        """Gives every message of the conversation its users: by now all its threads are known."""
        if self._everybody is not None:
            users = np.array(sorted(self._everybody), dtype=np.int32)
            self._num_users.append(np.full(len(self._thread_of), len(users), dtype=np.int64))
            self._users.append(np.tile(users, len(self._thread_of)))
            return
        lengths, flat = array("q"), array("i")
        for ts, thread in self._thread_of.items():
            people = set(self._threads[thread])
            for other in self._other_threads.get(ts, ()):
                people.update(self._threads[other])
            lengths.append(len(people))
            flat.extend(people)
        self._num_users.append(np.array(lengths, dtype=np.int64))
        self._users.append(np.array(flat, dtype=np.int32))

    def user_lists(self) -> pa.LargeListArray:
        """(num_messages,) lists of user ids, each id stored once."""
        lengths = np.concatenate([np.zeros(1, dtype=np.int64), *self._num_users])
        users = np.concatenate([np.zeros(0, dtype=np.int32), *self._users])
        dictionary = pa.array(list(self._codes), pa.large_string())
        return pa.LargeListArray.from_arrays(
            pa.array(np.cumsum(lengths)), pa.DictionaryArray.from_arrays(pa.array(users), dictionary)
        )

    def ids(self) -> pa.ChunkedArray:
        self._end_batch()
        return pa.chunked_array(self._ids, pa.large_string())

    def payload(self) -> pa.Table:
        self._end_batch()
        return pa.Table.from_batches(self._batches, _PAYLOAD)

    def _add_one(self, message: dict[str, Any], place: str) -> None:
        ts = _time(message, "ts", place)
        if ts is None:
            raise InputError(f"{place}: has no 'ts'; get the export anew")
        thread = _time(message, "thread_ts", place) or ts
        author, is_bot = _author(message, place)
        named = [author, _identifier(message, "parent_user_id", place)]
        named += [*_identifiers(message.get("reply_users") or [], "reply_users", place)]
        replies = message.get("replies") or []
        if not isinstance(replies, list) or not all(isinstance(reply, dict) for reply in replies):
            raise InputError(f"{place}: 'replies' is not a list of objects; get the export anew")
        named += [_identifier(reply, "user", place) for reply in replies]
        people = {self._code(user) for user in named if user is not None}
        known = self._threads.setdefault(thread, ())
        if not people.issubset(known):
            self._threads[thread] = (*known, *people.difference(known))
        if self._everybody is not None:
            self._everybody |= people
        if message.get("type", "message") != "message" or message.get("subtype") not in WRITTEN:
            self.counts["notices_left_out"] += 1
            return
        if ts in self._thread_of:
            self.counts["repeated_messages"] += 1
            if thread != self._thread_of[ts]:
                self._other_threads.setdefault(ts, []).append(thread)
            return
        text = message.get("text")
        if text is not None and not isinstance(text, str):
            raise InputError(f"{place}: 'text' is not text; get the export anew")
        self._thread_of[ts] = thread
        self.counts["messages"] += 1
        self.counts["bot_messages"] += is_bot
        self.counts["messages_without_author"] += author is None
        text = (text or "").encode("utf-8", "replace").decode()  # JSON can hold half a surrogate pair
        for column, value in zip(self._rows, (self._conversation.id, ts, text), strict=True):
            column.append(value)
        self._characters += len(text) + 100
        if self._characters >= _BATCH_CHARACTERS:
            self._end_batch()

    def _code(self, user: str) -> int:
        return self._codes.setdefault(user, len(self._codes))

    def _end_batch(self) -> None:
        channels, times, texts = (pa.array(column, pa.large_string()) for column in self._rows)
        own_ids = [f"{channel}:{ts}" for channel, ts in zip(self._rows[0], self._rows[1], strict=True)]
        self._ids.append(pa.array(own_ids, pa.large_string()))
        self._batches.append(pa.record_batch([channels, times, texts], schema=_PAYLOAD))
        self._rows = ([], [], [])
        self._characters = 0


def _author(message: dict[str, Any], place: str) -> tuple[str | None, bool]:
    """Who wrote it, and whether a program did."""
    user = _identifier(message, "user", place)
    if user is None and isinstance(message.get("comment"), dict):  # a comment on a file keeps its author inside
        user = _identifier(message["comment"], "user", place)
    bot = _identifier(message, "bot_id", place)
    is_bot = bot is not None or message.get("subtype") == "bot_message"
    if user is None and is_bot:
        return f"bot:{bot or 'unnamed'}", True
    return user, is_bot


def _time(message: dict[str, Any], name: str, place: str) -> str | None:
    value = message.get(name)
    if value is not None and not (isinstance(value, str) and _TS.fullmatch(value)):
        raise InputError(f'{place}: {name!r} is not a time such as "1700000000.000100"; get the export anew')
    return value


def _identifier(entry: dict[str, Any], name: str, place: str) -> str | None:
    """An id, or None where there is none."""
    value = entry.get(name)
    if value is None or value == "":
        return None
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise InputError(f'{place}: {name!r} is not an id such as "U012AB3CD"; get the export anew')
    return value


def _identifiers(values: Any, name: str, place: str) -> list[str]:
    if not isinstance(values, list):
        raise InputError(f"{place}: {name!r} is not a list of ids; get the export anew")
    found = (_identifier({name: value}, name, place) for value in values)
    return [value for value in found if value is not None]
