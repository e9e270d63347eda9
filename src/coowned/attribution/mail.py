"""Mail: every message belongs to its sender and to everyone it was sent to."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from coowned import validate
from coowned.attribution.examples import AttributedExamples, attribute, read_aliases
from coowned.attribution.mail_boxes import begins_like_mail, folder_files, raw_messages, read_head
from coowned.attribution.mail_rows import Mailbox, MailboxBuilder
from coowned.attribution.user_keys import Aliases, UserKeyRules
from coowned.errors import InputError

ATTRIBUTE_TO = ("everyone", "sender", "recipients", "thread")
_SENDERS = ("From", "Sender", "Resent-From", "Resent-Sender")
_RECIPIENTS = ("To", "Cc", "Bcc", "Resent-To", "Resent-Cc", "Resent-Bcc")
_PEOPLE = {
    "everyone": (*_SENDERS, *_RECIPIENTS),
    "sender": _SENDERS,
    "recipients": _RECIPIENTS,
    "thread": (*_SENDERS, *_RECIPIENTS),
}
_THREAD = ("References", "In-Reply-To")


def read_mail(
    path: str | os.PathLike[str],
    *,
    attribute_to: str = "everyone",
    user_keys: UserKeyRules | None = None,
    aliases: Aliases | str | os.PathLike[str] | None = None,
    progress: Callable[[float, str], None] | None = None,
) -> AttributedExamples:
    """Messages attributed to the people of their headers; payload: subject, date (UTC or null), text.

    Args:
      path: an mbox, a Maildir, one .eml file, or a folder of .eml files (also .mbox files, Maildirs and MH folders in
        it, at any depth, sorted by name).
      attribute_to: whom a message belongs to.
        "everyone": From, Sender, To, Cc, Bcc, and the same with Resent- before it: whoever wrote it or got it.
        "thread": everyone of every message connected with it by References and In-Reply-To, whether the messages
        between them are in the box or not, since a reply quotes other people's words.
        "sender", "recipients": a part of "everyone". Fewer people are then protected: what Ann writes to Bob about
        Bob is not bounded for Bob where only the sender counts.
        Reply-To, Delivered-To and names inside the text are never read: somebody whom a message is about, or who got it
        through a list, is not protected by it.
      user_keys: the rules that make one person of several spellings; None for `UserKeyRules.email()`.
      aliases: further addresses of people, and members of lists: a CSV file `key,user`.
      progress: called now and then as progress(done, message), with `done` from 0 to 1.

    The id is the Message-ID. Without one it is the file's name in the folder, or the message's position in the mbox,
    counted in messages: a byte offset would carry the length of other people's words into the order of selection.
    Messages with one Message-ID and one attribution are one example, the first; where the attribution differs, the
    later ones get "#2", "#3", ... behind their id. An mbox is cut at lines that begin with "From " and are followed by
    a header line, where they carry a date or come after a blank line; other such lines are text.
    What is wrong with a message never removes it: an address that cannot be read is a key of its own text, a message
    whose header cannot be read is an example without users, a body that cannot be decoded is read with replacement
    characters. `notes` of the result counts all of these, and attachments, which are ignored.

    Guarantees:
      - Ids and attribution come from headers, file names and positions alone.   (test_bodies_do_not_reach_the_graph)
      - Every address in the headers read is a user of the example.              (test_every_address_is_a_user)
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
    validate.one_of(ATTRIBUTE_TO, attribute_to=attribute_to)
    if progress is not None and not callable(progress):
        raise InputError(f"progress must be callable as progress(done, message), not {progress!r}")
    rules = user_keys or UserKeyRules.email()
    known_aliases = read_aliases(aliases)
    in_thread = attribute_to == "thread"
    builder = MailboxBuilder(people=_PEOPLE[attribute_to], with_references=in_thread)
    for message in raw_messages(path, lambda done: progress(done, "reading mail") if progress else None):
        builder.add(message)
    box = builder.finish()
    num_messages = box.num_messages
    if in_thread:
        box = _attribute_to_threads(box)
    box = _without_repeats(box, rules, known_aliases)
    if Path(path).is_dir():
        box = box.with_counts(other_files_ignored=folder_files(Path(path))[1])
    read = ("Message-ID", *(("file name or position",) if box.counts["messages_without_id"] else ()))
    return attribute(
        box.user_lists(),
        example_ids=pa.chunked_array(box.ids, pa.large_string()),
        payload=box.payload(),
        user_keys=rules,
        aliases=known_aliases,
        columns_read=(*read, *(_THREAD if in_thread else ()), *_PEOPLE[attribute_to]),
        notes={"messages": num_messages, **box.counts, "messages_without_users": int(np.sum(box.num_users == 0))},
        place=str(path),
    )


def looks_like_mail(path: str | os.PathLike[str]) -> bool:
    """True for what `read_mail` is likely to read: by suffix, by the folders of a Maildir, else by the first bytes.

    Example:
      >>> import tempfile
      >>> file = Path(tempfile.mkdtemp()) / "inbox"
      >>> _ = file.write_text("From ann@x.org Mon Jan  1 10:00:00 2024\\nFrom: ann@x.org\\n\\nHello\\n")
      >>> looks_like_mail(file)
      True
    """
    place = Path(path)
    try:
        if place.is_dir():
            files, _ = folder_files(place)
            return any((place / file).is_file() and begins_like_mail(read_head(place / file)) for file in files[:10])
        if not place.is_file():
            return False
        if place.suffix.lower() in (".eml", ".mbox"):
            return True
        # A line "name: value" opens many kinds of file: two names of mail headers do not.
        return begins_like_mail(read_head(place), known_headers=2)
    except InputError:
        return False


def _attribute_to_threads(box: Mailbox) -> Mailbox:
    """Gives every message the users of all messages connected with it."""
    thread_of = _threads(box)  # (num_messages,)
    row_of_user = np.repeat(np.arange(box.num_messages), box.num_users)
    width = max(len(box.addresses), 1)
    pairs = np.unique(thread_of[row_of_user].astype(np.int64) * width + box.users)  # (…,) each thread's users once
    thread_of_pair, user_of_pair = np.divmod(pairs, width)
    starts = np.searchsorted(thread_of_pair, thread_of)  # (num_messages,) where the users of its thread start
    num_users = np.searchsorted(thread_of_pair, thread_of, side="right") - starts
    ends = np.cumsum(num_users)
    places = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - num_users), num_users)
    return box.with_users(num_users=num_users, users=user_of_pair.astype(np.int32)[places])


def _threads(box: Mailbox) -> np.ndarray:
    """(num_messages,) the connected component of each message, messages joined by the ids they mention."""
    encoded = pa.chunked_array(box.references, pa.large_string()).combine_chunks().dictionary_encode()
    mentioned = np.asarray(encoded.indices)  # (num_mentions,) message id, the message's own among them
    message = np.repeat(np.arange(box.num_messages), box.num_references)
    # "In-Reply-To: message of Ann <ann@x.org>" names a person, not a message: joining by it would make one thread of
    # everything that answers her.
    addresses = pl.Series(box.addresses, dtype=pl.String).str.to_lowercase()
    own_ids = pl.Series(pa.chunked_array(box.ids, pa.large_string())).unique()
    ids = pl.Series(encoded.dictionary, dtype=pl.String)
    is_person = (ids.str.to_lowercase().is_in(addresses.implode()) & ~ids.is_in(own_ids.implode())).to_numpy()
    joins = ~is_person[mentioned]
    size = box.num_messages + len(ids)
    edges = coo_array(
        (np.ones(int(joins.sum()), dtype=np.int8), (message[joins], box.num_messages + mentioned[joins])),
        shape=(size, size),
    )
    return connected_components(edges, directed=False)[1][: box.num_messages]


def _without_repeats(box: Mailbox, rules: UserKeyRules, aliases: Aliases | None) -> Mailbox:
    """Drops messages that repeat Message-ID and attribution of an earlier one; renames others that repeat the id."""
    ids = pl.Series(pa.chunked_array(box.ids, pa.large_string()))
    rows = np.flatnonzero(ids.is_duplicated().to_numpy()) if len(ids) else np.zeros(0, dtype=np.int64)
    if not len(rows):
        return box.with_counts(repeated_messages=0, repeated_ids=0)
    keys = rules.canonical(box.addresses).to_list()
    users_of = aliases.canonical(rules).users_of if aliases else {}
    ends = np.concatenate([[0], np.cumsum(box.num_users)])
    taken = set(ids.filter(ids.str.contains(r"#\d+$")).to_list())
    seen: dict[str, set[frozenset[str]]] = {}
    dropped: list[int] = []
    renamed: dict[int, str] = {}
    for row, example_id in zip(rows.tolist(), ids.gather(rows).to_list(), strict=True):
        found = [keys[user] for user in box.users[ends[row] : ends[row + 1]].tolist()]
        attribution = frozenset(user for key in found for user in users_of.get(key, (key,)))
        earlier = seen.setdefault(example_id, set())
        if attribution in earlier and box.has_message_id[row]:
            dropped.append(row)
            continue
        if earlier:
            number = 2
            while f"{example_id}#{number}" in taken:
                number += 1
            renamed[row] = f"{example_id}#{number}"
            taken.add(renamed[row])
        earlier.add(attribution)
    return box.changed(dropped=np.array(dropped, dtype=np.int64), renamed=renamed).with_counts(
        repeated_messages=len(dropped), repeated_ids=len(renamed)
    )
