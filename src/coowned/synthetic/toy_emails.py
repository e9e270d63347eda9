"""Synthetic e-mail: the five messages of the paper's first figure, and a small world of people who write."""

import dataclasses
import datetime
import email.message
import email.policy
import os
import re
import zlib
from collections.abc import Iterable, Sequence
from email.generator import BytesGenerator
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from coowned import validate
from coowned.errors import InputError
from coowned.files import whole_files
from coowned.synthetic.kernels import GAMMA, python_mix, stream_key

STREAM_TAG = 8  # tells the random stream of this world from those of the others
DOMAIN = "example.org"  # reserved for examples (RFC 2606): no message to these addresses can reach anyone
START = datetime.datetime(2024, 1, 8, 8, 0, tzinfo=datetime.UTC)

FIRST_NAMES = (
    "alice", "bob", "carol", "david", "erin", "frank", "grace", "heidi", "ivan",
    "judy", "kevin", "laura", "mallory", "niaj", "olivia", "peggy", "quentin", "rupert",
    "sybil", "trent", "ursula", "victor", "wendy", "xavier", "yara", "zoe", "amir",
    "bianca", "chen", "dalia", "emil", "farah", "goran", "hana", "imran", "jana",
)  # fmt: skip

# label 1: work, label 0: private life; (subjects, sentences); a sentence's {a} and {b} are words of the topic
WORK = (
    ("budget draft", "release plan", "meeting notes", "server outage", "customer visit"),
    (
        "The {a} needs another look before the {b} is due.",
        "Please send me the numbers for the {a} by noon.",
        "We moved the {a} because the {b} was late again.",
        "Can you review the {a} and tell me what is missing?",
        "I put the {a} next to the {b} in the shared folder.",
        "The client asked about the {a} twice this week.",
    ),
    ("report", "invoice", "schedule", "contract", "proposal", "test run", "backup", "slide deck", "forecast"),
)
PRIVATE = (
    ("weekend", "dinner on friday", "the garden", "concert tickets", "hiking trip"),
    (
        "We could bring the {a} and leave the {b} at home.",
        "The children loved the {a} and asked for the {b}.",
        "Is there still some {a} left from last time?",
        "I found a lovely place for the {a} near the lake.",
        "Do you remember the {a} we had in the old house?",
        "My sister promised to look after the {b} and the {a}.",
    ),
    ("picnic", "cake", "bicycle", "guitar", "tomatoes", "puppy", "tent", "photographs", "soup"),
)

MAIL_SCHEMA = pa.schema(
    [
        ("message_id", pa.string()),
        ("in_reply_to", pa.string()),  # null: starts a thread
        ("references", pa.list_(pa.string())),
        ("date", pa.timestamp("s", tz="UTC")),
        ("sender", pa.string()),
        ("to", pa.list_(pa.string())),
        ("cc", pa.list_(pa.string())),
        ("users", pa.list_(pa.string())),  # sender, to and cc together, each once, the sender first
        ("subject", pa.string()),
        ("text", pa.string()),
        ("label", pa.int8()),
    ]
)

Item = TypeVar("Item")


def five_emails() -> pa.Table:
    """Returns the toy data set of the paper's first figure, with texts of our own.

    Columns: example_id, sender, recipients, users (the sender first), text.

    >>> five_emails().column("users").to_pylist()
    [['Alice', 'Bob'], ['Alice', 'Bob', 'Carol'], ['Bob', 'David'], ['Carol', 'Bob'], ['David', 'Carol']]
    """
    rows = (
        ("e1", "Alice", ["Bob"], "Dear Bob, I was so glad to hear that the surgery went well; rest and get better!"),
        ("e2", "Alice", ["Bob", "Carol"], "Shall the three of us meet on Thursday to go over the plan?"),
        ("e3", "Bob", ["David"], "David, could you take my shift next week while I recover?"),
        ("e4", "Carol", ["Bob"], "Thursday is fine with me, and we can come to your place if walking is hard."),
        ("e5", "David", ["Carol"], "Carol, do you still have the ladder I lent you in spring?"),
    )
    names = ("example_id", "sender", "recipients", "users", "text")
    return pa.Table.from_pylist([dict(zip(names, (*row[:3], [row[1], *row[2]], row[3]), strict=True)) for row in rows])


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmailWorld:
    """A world of people with very different activity who write, reply and copy each other, on work and private matters.

    One person has a secret that others mention in e-mails to them: protecting only what a person *sent* would not
    cover it.

    Guarantees:
      - The secret is in exactly `num_secret_emails` texts; all were received by that person, none sent.
                                                                     (test_secret_is_only_in_received_mail)
      - `users` is sender, to and cc together, each once.            (test_users_are_everyone_on_the_message)
      - A reply's parent is an earlier message of its thread.        (test_replies_point_backwards)
      - The same table for the same seed, on every platform.         (test_same_table_everywhere)
    Cost: plain Python, O(num_people) a message; meant for thousands of messages, not millions.
    Not a model of real mail: topics are a handful of sentences, so that a small classifier can learn `label`
    (1 work, 0 private).

    Example:
      >>> world = EmailWorld(num_people=12, num_emails=50).generate(seed=0)
      >>> world.num_rows, sum("knee surgery" in text for text in world.column("text").to_pylist())
      (50, 8)
    """

    num_people: int = 40
    num_emails: int = 2000
    secret_about: str = "bob"
    secret: str = "knee surgery"
    num_secret_emails: int = 8
    reply_probability: float = 0.35

    def __post_init__(self):
        validate.integer(at_least=3, num_people=self.num_people)
        validate.positive(num_emails=self.num_emails)
        validate.integer(at_least=0, at_most=self.num_emails, num_secret_emails=self.num_secret_emails)
        validate.in_range(0.0, 1.0, reply_probability=self.reply_probability)
        if self.secret_about not in self.names:
            raise InputError(
                f"secret_about must be one of `names`, such as {self.names[0]!r}, not {self.secret_about!r}"
            )
        if not self.secret.strip() or "\n" in self.secret:
            raise InputError(f"secret must be a few words on one line, not {self.secret!r}")

    @property
    def names(self) -> list[str]:
        """alice, bob, carol, …; after the last name they repeat as alice2, bob2, …"""
        rounds = [(name, lap) for lap in range(self.num_people // len(FIRST_NAMES) + 1) for name in FIRST_NAMES]
        return [name if lap == 0 else f"{name}{lap + 1}" for name, lap in rounds[: self.num_people]]

    def generate(self, *, seed: int) -> pa.Table:
        """Returns the messages in order of date, with the columns of `MAIL_SCHEMA`."""
        validate.seed(seed)
        draws = _Draws(seed)
        people = [f"{name}@{DOMAIN}" for name in self.names]
        activity = [1.0 / (1 + rank) for rank in range(len(people))]  # a few write most of the mail
        draws.shuffle(activity)
        secret_rows = set(draws.distinct(range(self.num_emails), self.num_secret_emails))
        subject_of_secret = f"{self.secret_about}@{DOMAIN}"
        clock, messages = START, []
        for row in range(self.num_emails):
            clock += datetime.timedelta(seconds=60 + draws.below(3600))
            if row in secret_rows:
                message = self._secret_message(draws, people, activity, subject_of_secret)
            elif messages and draws.unit() < self.reply_probability:
                message = self._reply(draws, people, messages[max(0, len(messages) - 40) :])
            else:
                message = self._opening(draws, people, activity)
            message["message_id"] = f"<{row:06d}.{seed}@{DOMAIN}>"  # from the row alone: ids must not depend on content
            message["date"] = clock
            message["users"] = list(dict.fromkeys([message["sender"], *message["to"], *message["cc"]]))
            messages.append(message)
        found = {
            row for row, message in enumerate(messages) if self.secret in message["subject"] + "\n" + message["text"]
        }
        if found != secret_rows:
            raise InputError(f"secret {self.secret!r} also occurs in ordinary e-mail; choose rarer words")
        return pa.Table.from_pylist(messages, schema=MAIL_SCHEMA)

    def _opening(self, draws: "_Draws", people: list[str], activity: list[float]) -> dict:
        label = draws.below(2)
        subjects, _, _ = topic = WORK if label else PRIVATE
        sender = draws.weighted(people, activity)
        others = [person for person in people if person != sender]
        to = draws.distinct(others, 1 + min(draws.geometric(0.35), len(others) - 1, 4))
        rest = [person for person in others if person not in to]
        cc = draws.distinct(rest, min(draws.geometric(0.25), len(rest), 3))
        return _message(sender, to, cc, draws.choice(subjects), _sentences(draws, topic), label)

    def _reply(self, draws: "_Draws", people: list[str], recent: list[dict]) -> dict:
        parent = draws.choice(recent)
        sender = draws.choice([*parent["to"], *parent["cc"]])
        cc = [person for person in parent["users"] if person not in (sender, parent["sender"])]
        outsiders = [person for person in people if person not in parent["users"]]
        if outsiders and draws.unit() < 0.2:  # someone new reads words of people who did not write to them
            cc.append(draws.choice(outsiders))
        quote = parent["text"].split("\n\n")[-2]  # its own sentences, not its greeting or what it quotes
        body = _sentences(draws, WORK if parent["label"] else PRIVATE)
        if self.secret not in quote:
            body = f"> {quote}\n\n{body}"
        subject = parent["subject"] if parent["subject"].startswith("Re: ") else f"Re: {parent['subject']}"
        message = _message(sender, [parent["sender"]], cc, subject, body, parent["label"])
        thread = [*parent["references"], parent["message_id"]]
        return message | {"in_reply_to": parent["message_id"], "references": thread}

    def _secret_message(self, draws: "_Draws", people: list[str], activity: list[float], about: str) -> dict:
        message = self._opening(draws, people, activity)
        sender = message["sender"]
        if sender == about:
            sender = draws.choice([person for person in people if person != about])
        cc = [person for person in message["cc"] if person not in (about, sender)]
        body = f"I hope you are well again after the {self.secret}. " + _sentences(draws, PRIVATE)
        return _message(sender, [about], cc, "get well soon", body, 0)


def write_mbox(table: pa.Table, path: str | os.PathLike[str]) -> None:
    """Writes the messages of an `EmailWorld` as an mbox file, with the headers a mail reader expects.

    From, To, Cc, Subject, Date, Message-ID, In-Reply-To and References are as in RFC 5322; lines that start with
    "From " are escaped. The file appears whole or not at all, and the same table gives the same bytes.

    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "mail.mbox"
    ...     write_mbox(EmailWorld(num_people=3, num_emails=10).generate(seed=0), path)
    ...     path.read_bytes().count(b"Message-ID: ")
    10
    """
    missing = [name for name in MAIL_SCHEMA.names if name not in ("users", "label", *table.column_names)]
    if missing:
        raise InputError(f"the table has no column {missing[0]!r}; pass the table that EmailWorld.generate returned")
    policy = email.policy.default.clone(linesep="\n", max_line_length=78)
    with whole_files(path) as (temporary,), temporary.open("wb") as file:
        for row in table.to_pylist():
            file.write(f"From {row['sender']} {row['date'].ctime()}\n".encode())
            BytesGenerator(file, mangle_from_=True, policy=policy).flatten(as_message(row))
            file.write(b"\n")


def as_message(row: dict) -> email.message.EmailMessage:
    message = email.message.EmailMessage()
    message["From"] = _with_name(row["sender"])
    message["To"] = ", ".join(_with_name(address) for address in row["to"])
    if row["cc"]:
        message["Cc"] = ", ".join(_with_name(address) for address in row["cc"])
    message["Subject"] = row["subject"]
    message["Date"] = row["date"]
    message["Message-ID"] = row["message_id"]
    if row["in_reply_to"] is not None:
        message["In-Reply-To"] = row["in_reply_to"]
        message["References"] = " ".join(row["references"])
    message.set_content(row["text"] + "\n")
    return message


def _with_name(address: str) -> str:
    return f"{_first_name(address)} <{address}>"


def _first_name(address: str) -> str:
    return address.partition("@")[0].capitalize()


def _message(sender: str, to: list[str], cc: list[str], subject: str, body: str, label: int) -> dict:
    """Returns a message that starts a thread, with what is known before it is sent."""
    greeting = f"Hi {' and '.join(_first_name(address) for address in to)}," if len(to) < 3 else "Hi all,"
    text = f"{greeting}\n\n{body}\n\n{_first_name(sender)}"
    message = {"sender": sender, "to": to, "cc": cc, "subject": subject, "text": text, "label": label}
    return message | {"in_reply_to": None, "references": []}


def _sentences(draws: "_Draws", topic: tuple[Sequence[str], Sequence[str], Sequence[str]]) -> str:
    _, patterns, words = topic
    chosen = []
    for pattern in draws.distinct(patterns, 1 + draws.below(3)):
        a, b = draws.distinct(words, 2)
        chosen.append(pattern.format(a=a, b=b))
    return " ".join(chosen)


class _Draws:
    """Random choices from SplitMix64 on Python integers: those of `random` and numpy may change between versions."""

    def __init__(self, seed: int):
        self.state = int(stream_key(seed, STREAM_TAG))

    def below(self, count: int) -> int:
        self.state = (self.state + int(GAMMA)) & (2**64 - 1)
        return python_mix(self.state) * count >> 64

    def unit(self) -> float:
        return self.below(2**53) / 2**53

    def choice(self, items: Sequence[Item]) -> Item:
        return items[self.below(len(items))]

    def weighted(self, items: Sequence[Item], weights: Sequence[float]) -> Item:
        left = self.unit() * sum(weights)
        for item, weight in zip(items, weights, strict=True):
            left -= weight
            if left < 0:
                return item
        return items[-1]

    def geometric(self, go_on: float) -> int:
        count = 0
        while self.unit() < go_on:
            count += 1
        return count

    def distinct(self, items: Sequence[Item], count: int) -> list[Item]:
        pool = list(items)
        return [pool.pop(self.below(len(pool))) for _ in range(count)]

    def shuffle(self, items: list) -> None:
        items[:] = self.distinct(items, len(items))


_WORD = re.compile(r"[a-z]+")


def hashed_words(texts: Iterable[str], num_features: int) -> npt.NDArray[np.float32]:
    """Returns (texts, num_features) float32 rows of norm at most 1.

    Nothing is fitted: the features of a text depend on that text alone, so that one person's words cannot change
    another's row.

    Guarantees:
      - A row depends on its own text alone.   (test_a_row_depends_on_its_text_alone)

    >>> hashed_words(["a cat", ""], 4).tolist()
    [[0.7071..., 0.0, 0.0, 0.7071...], [0.0, 0.0, 0.0, 0.0]]
    """
    validate.positive(num_features=num_features)
    texts = list(texts)
    counts = np.zeros((len(texts), num_features), np.float32)
    for row, text in enumerate(texts):
        for word in _WORD.findall(text.lower()):
            counts[row, zlib.crc32(word.encode()) % num_features] += 1
    return counts / np.maximum(1, np.linalg.norm(counts, axis=1, keepdims=True))
