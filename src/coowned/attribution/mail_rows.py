"""Messages gathered into columns, a batch at a time, so that a large box never lies in Python objects."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from coowned.attribution.mail_addresses import AddressList, parse_addresses
from coowned.attribution.mail_bodies import BODY_FIELDS, BodyCounts, body_text
from coowned.attribution.mail_boxes import RawMessage
from coowned.attribution.mail_headers import (
    date_seconds,
    decode_words,
    header_fields,
    header_text,
    message_ids,
    own_message_id,
    split_message,
)

_PAYLOAD = pa.schema(
    [("subject", pa.large_string()), ("date", pa.timestamp("us", tz="UTC")), ("text", pa.large_string())]
)
_BATCH_CHARACTERS = 8 << 20
_REMEMBERED_HEADERS = 1 << 16  # parsed address headers kept at hand: they repeat
_REFERENCES = (b"references", b"in-reply-to")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mailbox:
    """The messages of a box as columns; the columns of strings in chunks, all cut at the same rows."""

    ids: list[pa.Array]  # (num_messages,) in chunks
    batches: list[pa.RecordBatch]  # (num_messages,) in chunks: subject, date, text
    has_message_id: np.ndarray  # (num_messages,) bool
    num_users: np.ndarray  # (num_messages,) entries of each message in users
    users: np.ndarray  # (num_entries,) int32 index into addresses, may repeat inside a message
    addresses: list[str]  # every address once
    num_references: np.ndarray  # (num_messages,) entries of each message in references
    references: list[pa.Array]  # (num_mentions,) message ids in chunks, each message's own among them
    counts: Mapping[str, int]

    @property
    def num_messages(self) -> int:
        return len(self.num_users)

    def user_lists(self) -> pa.LargeListArray:
        """(num_messages,) lists of addresses, each address stored once."""
        ends = np.concatenate([[0], np.cumsum(self.num_users, dtype=np.int64)])
        dictionary = pa.array(self.addresses, pa.large_string())
        return pa.LargeListArray.from_arrays(
            pa.array(ends), pa.DictionaryArray.from_arrays(pa.array(self.users), dictionary)
        )

    def payload(self) -> pa.Table:
        return pa.Table.from_batches(self.batches, _PAYLOAD)

    def with_users(self, *, num_users: np.ndarray, users: np.ndarray) -> "Mailbox":
        return dataclasses.replace(self, num_users=num_users, users=users)

    def with_counts(self, **counts: int) -> "Mailbox":
        return dataclasses.replace(self, counts={**self.counts, **counts})

    def changed(self, *, dropped: np.ndarray, renamed: Mapping[int, str]) -> "Mailbox":
        """Without the dropped rows and with new ids for the renamed ones; untouched chunks are kept as they are."""
        stays = np.ones(self.num_messages, dtype=bool)
        stays[dropped] = False
        ids, batches, start = [], [], 0
        touched = np.sort(np.concatenate([dropped, np.fromiter(renamed, dtype=np.int64, count=len(renamed))]))
        for own_ids, batch in zip(self.ids, self.batches, strict=True):
            end = start + len(own_ids)
            if np.searchsorted(touched, start) < np.searchsorted(touched, end):
                values = [renamed.get(start + row, value) for row, value in enumerate(own_ids.to_pylist())]
                keep = pa.array(stays[start:end])
                own_ids, batch = pa.array(values, pa.large_string()).filter(keep), batch.filter(keep)
            ids.append(own_ids)
            batches.append(batch)
            start = end
        return dataclasses.replace(
            self,
            ids=ids,
            batches=batches,
            has_message_id=self.has_message_id[stays],
            num_users=self.num_users[stays],
            users=self.users[np.repeat(stays, self.num_users)],
            # Threads are known by now; what they were made from is no longer needed.
            num_references=np.zeros(int(stays.sum()), dtype=np.int64),
            references=[],
        )


class MailboxBuilder:
    """Takes messages one by one and keeps them as Arrow columns.

    Args:
      people: the headers whose addresses are the users, as they are written ("From", "To").
      with_references: keep the message ids that each message mentions.
    """

    def __init__(self, *, people: Sequence[str], with_references: bool):
        self._people = tuple(name.lower().encode() for name in people)
        self._with_references = with_references
        self._wanted = frozenset((*self._people, *BODY_FIELDS, *_REFERENCES, b"message-id", b"subject", b"date"))
        self._codes: dict[str, int] = {}  # address -> its index
        self._parsed: dict[bytes, tuple[tuple[int, ...], int, bool]] = {}
        self._body = BodyCounts()
        self._counts = dict.fromkeys(
            (
                "messages_without_id",
                "unreadable_headers",
                "unreadable_addresses",
                "unnamed_recipients",
                "undated_messages",
            ),
            0,
        )
        self._ids: list[pa.Array] = []
        self._batches: list[pa.RecordBatch] = []
        self._numbers: list[tuple[np.ndarray, ...]] = []
        self._references: list[pa.Array] = []
        self._start_batch()

    def add(self, message: RawMessage) -> None:
        """Reads one message; whatever it holds, it becomes one row."""
        header, body = split_message(message.content)
        fields = header_fields(header, self._wanted)
        counts = self._counts
        counts["unreadable_headers"] += not fields
        own_id = own_message_id(header_text(fields[b"message-id"][0])) if b"message-id" in fields else ""
        counts["messages_without_id"] += not own_id
        self._row_ids.append(own_id or message.name)
        self._row_has_id.append(bool(own_id))
        self._add_users(fields)
        if self._with_references:
            self._add_references(fields, own_id)
        subject = " ".join(decode_words(header_text(fields[b"subject"][0])).split()) if b"subject" in fields else ""
        seconds = date_seconds(header_text(fields[b"date"][0])) if b"date" in fields else None
        counts["undated_messages"] += seconds is None
        text = body_text(fields, body, self._body, escaped=message.escaped)
        self._row_subjects.append(subject)
        self._row_dates.append(None if seconds is None else seconds * 1_000_000)
        self._row_texts.append(text)
        self._characters += len(text) + len(subject) + 100
        if self._characters >= _BATCH_CHARACTERS:
            self._end_batch()

    def finish(self) -> Mailbox:
        """The box of all messages added."""
        self._end_batch()
        has_id, num_users, users, num_references = (
            np.concatenate(column) for column in zip(*self._numbers, strict=True)
        )
        return Mailbox(
            ids=self._ids,
            batches=self._batches,
            has_message_id=has_id,
            num_users=num_users,
            users=users,
            addresses=list(self._codes),
            num_references=num_references,
            references=self._references,
            counts={
                **self._counts,
                "attachments_ignored": self._body.attachments,
                "undecodable_bodies": self._body.undecodable,
            },
        )

    def _add_users(self, fields: dict[bytes, list[bytes]]) -> None:
        before = len(self._row_users)
        unnamed = False
        for name in self._people:
            for value in fields.get(name, ()):
                parsed = self._parsed.get(value)
                if parsed is None:
                    parsed = self._remember(value, parse_addresses(header_text(value)))
                self._row_users.extend(parsed[0])
                self._counts["unreadable_addresses"] += parsed[1]
                unnamed |= parsed[2]
        self._counts["unnamed_recipients"] += unnamed
        self._row_num_users.append(len(self._row_users) - before)

    def _remember(self, value: bytes, parsed: AddressList) -> tuple[tuple[int, ...], int, bool]:
        codes = self._codes
        users = tuple(codes.setdefault(address, len(codes)) for address in parsed.addresses)
        if len(self._parsed) >= _REMEMBERED_HEADERS:
            self._parsed.clear()
        self._parsed[value] = entry = (users, parsed.unreadable, parsed.unnamed)
        return entry

    def _add_references(self, fields: dict[bytes, list[bytes]], own_id: str) -> None:
        found = [own_id] if own_id else []
        for name in _REFERENCES:
            for value in fields.get(name, ()):
                found.extend(message_ids(header_text(value)))
        self._row_references.extend(found)
        self._row_num_references.append(len(found))

    def _start_batch(self) -> None:
        self._row_ids: list[str] = []
        self._row_has_id: list[bool] = []
        self._row_num_users: list[int] = []
        self._row_users: list[int] = []
        self._row_references: list[str] = []
        self._row_num_references: list[int] = []
        self._row_subjects: list[str] = []
        self._row_dates: list[int | None] = []
        self._row_texts: list[str] = []
        self._characters = 0

    def _end_batch(self) -> None:
        columns = (self._row_subjects, self._row_dates, self._row_texts)
        self._ids.append(pa.array(self._row_ids, pa.large_string()))
        self._batches.append(
            pa.record_batch(
                [pa.array(column, field.type) for column, field in zip(columns, _PAYLOAD, strict=True)], schema=_PAYLOAD
            )
        )
        num_references = self._row_num_references if self._with_references else [0] * len(self._row_ids)
        self._numbers.append(
            (
                np.array(self._row_has_id, dtype=bool),
                np.array(self._row_num_users, dtype=np.int64),
                np.array(self._row_users, dtype=np.int32),
                np.array(num_references, dtype=np.int64),
            )
        )
        if self._with_references:
            self._references.append(pa.array(self._row_references, pa.large_string()))
        self._start_batch()
