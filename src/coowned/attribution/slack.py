"""Slack: every message belongs to the people of its thread, or to everybody in its channel."""

import os
import re
from collections.abc import Callable

from coowned import validate
from coowned.attribution.examples import AttributedExamples, attribute
from coowned.attribution.slack_files import SlackFiles, open_export
from coowned.attribution.slack_rows import Conversation, MessageColumns, conversations, joined
from coowned.attribution.user_keys import Aliases, UserKeyRules
from coowned.errors import InputError

ATTRIBUTE_TO = ("participants", "channel")
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}\.json")
# What attribution is made from, as the certificate names it.
_READ = (
    "channel id and ts", "subtype", "thread_ts", "user", "bot_id", "reply_users", "replies", "parent_user_id", "members"
)  # fmt: skip


def read_slack(
    export: str | os.PathLike[str],
    *,
    attribute_to: str = "participants",
    user_keys: UserKeyRules | None = None,
    aliases: Aliases | str | os.PathLike[str] | None = None,
    progress: Callable[[float, str], None] | None = None,
) -> AttributedExamples:
    """Messages of a Slack export, attributed by their metadata; payload: channel (its id), ts, text.

    Args:
      export: the zip that Slack made, or the folder it unpacks to.
      attribute_to: whom a message belongs to.
        "participants": its author and everyone who wrote in its thread (`reply_users` and `replies` of the first
        message, and the authors of all messages with its `thread_ts`); in direct messages, of two or of several, also
        every member.
        "channel": also every member of the channel, and whoever ever wrote, joined or left there, since the list of
        members is that of the day of the export. Whoever only reads is protected then, too; the number of pairs is that
        of messages times people, and a bound keeps few messages of a large channel.
        Mentions in the text are never read: they would let content choose S. Somebody whom a message is about, and who
        did not take part, is not protected by it.
      user_keys: the rules that make keys of user ids; None for `UserKeyRules.exact()`: Slack makes the ids.
      aliases: who has several accounts: a CSV file `key,user` of user ids.
      progress: called after each file as progress(done, message), with `done` from 0 to 1.

    A message is an example, its id is "CHANNEL:TS". Where one id comes twice (a reply also sent to the channel, days
    that overlap), the first one in order of files stands for all, with the people of all. A person whose account was
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
    validate.one_of(ATTRIBUTE_TO, attribute_to=attribute_to)
    if progress is not None and not callable(progress):
        raise InputError(f"progress must be callable as progress(done, message), not {progress!r}")
    columns = MessageColumns()
    with open_export(export) as files:
        listed = conversations(files)
        days, notes = _days(files, listed)
        total = max(1, sum(files.sizes[name] for _, names in days for name in names))
        done = 0
        for conversation, names in days:
            everybody = attribute_to == "channel" or conversation.is_direct
            columns.begin(conversation, everybody=everybody, place=f"{files.path}: {names[0].split('/')[0]}")
            for name in names:
                columns.add(files.list_of_objects(name), f"{files.path}: {name}")
                done += files.sizes[name]
                if progress is not None:
                    progress(done / total, "reading Slack messages")
            columns.end()
    return attribute(
        columns.user_lists(),
        example_ids=columns.ids(),
        payload=columns.payload(),
        user_keys=user_keys or UserKeyRules.exact(),
        aliases=aliases,
        columns_read=_READ,
        notes={"conversations": len(days), **columns.counts, **notes},
        place=str(export),
    )


def _days(
    files: SlackFiles, listed: dict[str, Conversation]
) -> tuple[list[tuple[Conversation, list[str]]], dict[str, int]]:
    """The conversations that have files, with these in order of their names, and how much else there is."""
    days: dict[str, tuple[Conversation, list[str]]] = {}  # by the conversation's id: it may have two folders
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
                days[here.id] = (joined(known, here), names)
        else:
            unlisted.add(folder)
    return list(days.values()), {"unlisted_folders_left_out": len(unlisted), "other_files_ignored": others}
