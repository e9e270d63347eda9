"""Mail on disk: mbox files, Maildir and MH folders, .eml files, read one message at a time as bytes.

The standard library (`mailbox`) begins a message at every line "From ": a text could make messages, and users
(`test_a_body_makes_no_message`).
"""

import enum
import mmap
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from coowned.errors import InputError
from coowned.files import read_head, unreadable

_REPORTED = 4 << 20  # bytes between two reports of progress
_LONGEST_LINE = 2000  # bytes of a "From " line that separates
_LOOK_AHEAD = 1 << 16  # bytes after a "From " line in which a mail header must be
_SEPARATOR = b"\nFrom "
_DATED = re.compile(
    rb"From [^\n]{0,500}?(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun),? [^\n]{0,40}?"
    rb"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[^\n]{0,40}?\d{1,2}:\d\d[^\n]{0,100}"
)
_UNDATED = re.compile(rb"From (?:\S{0,500}|\S{1,500} [^\n]{0,200}\d[^\n]{0,200})\r?$")
_HEADER_LINE = re.compile(rb"([!-9;-~]{1,200})[ \t]*:")
_MAIL_HEADERS = frozenset(
    b"from to cc bcc sender subject date message-id received return-path delivered-to reply-to mime-version "
    b"content-type in-reply-to references x-original-to resent-from resent-to list-id dkim-signature status x-status "
    b"x-mozilla-status x-gmail-labels x-gm-thrid envelope-to apparently-to arc-seal".split()
)
_MAIL_HEADER_FAMILIES = (b"x-", b"arc-", b"list-", b"resent-", b"content-", b"authentication-", b"received-")
_NUMBERED = re.compile(r"\d+\.?")  # the files of an MH folder
# Maildir: sizes (",S=1234,W=1260") tell the length of a text, and flags (":2,S") change when a message is read.
_SIZES_AND_FLAGS = re.compile(r"(?:,[A-Za-z]=[^,:;!]*)*(?:[:!;]2,[A-Za-z]*)?$")
_CONTENT_LENGTH = re.compile(rb"^content-length[ \t]*:[ \t]*(\d{1,15})[ \t]*\r?$", re.IGNORECASE | re.MULTILINE)
_HEADER_END = re.compile(rb"\r?\n\r?\n")
_LINE_ENDS = re.compile(rb"[\r\n]*")
_OPENING = re.compile(rb"(?:\xef\xbb\xbf)?[\r\n]*")


class RawMessage(NamedTuple):
    """One message as stored."""

    content: bytes  # all its bytes, a leading "From " line included
    name: str  # its id without a Message-ID: from file name and position, never from content
    escaped: bool  # lines of the body that begin with "From " carry one ">" too many
    folder: str = ""  # the message's folder, relative to the folder that was given


def raw_messages(
    path: str | os.PathLike[str], report: Callable[[float], None], dialect: str | None = None
) -> Iterator[RawMessage]:
    """Yields every message of a file or folder, in file order, files sorted by their path inside the folder.

    Args:
      dialect: how mbox files were written, as in `split_mbox`.

    Guarantees:
      - Nothing depends on the order in which the disk lists a folder.       (test_folder_is_read_in_name_order)
      - A box cut off in the middle of a message gives what is left of it.   (test_truncated_mbox_is_read)
    Cost: memory for the largest message.
    """
    box = Path(path)
    kind = _kind(box)
    if stat.S_ISDIR(kind):
        yield from _folder_messages(box, report, dialect)
    elif stat.S_ISREG(kind):
        head = read_head(box)
        if not head.strip():
            raise InputError(f"{box}: the file is empty; give a mailbox (mbox, Maildir, .eml or a folder of .eml)")
        if not is_mail_head(head):
            raise InputError(
                f"{box}: not a mailbox: at byte 0 there is neither a 'From ' line nor a mail header; "
                "give an mbox, a Maildir, an .eml file or a folder of .eml files"
            )
        is_mbox = box.suffix.lower() == ".mbox" or head.removeprefix(b"\xef\xbb\xbf").lstrip(b"\r\n").startswith(
            b"From "
        )
        several = is_mbox and box.suffix.lower() != ".eml" and not _in_maildir(box)
        yield from _file_messages(box, box.name, "", several=several, report=report, dialect=dialect)
    else:
        raise InputError(f"{box}: neither a file nor a folder; give a mailbox on disk")


def is_mail_head(head: bytes, *, known_headers: int = 1) -> bool:
    """Returns whether bytes begin with the "From " line of an mbox, or a header with enough names known from mail."""
    head = head.removeprefix(b"\xef\xbb\xbf").lstrip(b"\r\n")
    if head.startswith(b"From "):
        line, _, rest = head.partition(b"\n")
        return _DATED.match(line) is not None or (_UNDATED.match(line) is not None and bool(_header_follows(rest, 0)))
    head = head.replace(b"\r\n", b"\n").replace(b"\r", b"\n").partition(b"\n\n")[0]
    if b"\0" in head or not _HEADER_LINE.match(head):
        return False
    names = {line.partition(b":")[0].rstrip().lower() for line in head.split(b"\n") if b":" in line}
    return len(names & _MAIL_HEADERS) >= known_headers


def folder_files(folder: Path) -> tuple[list[str], int]:
    """Returns a folder's mail files, as sorted paths inside it with "/" between parts, and the count of other files."""
    found: list[str] = []
    others = 0

    def refuse(error: OSError) -> None:
        raise unreadable(error.filename or folder, error)

    for parent, _, names in os.walk(folder, onerror=refuse):
        for name in names:
            file = Path(parent) / name
            if _is_mail_name(file):
                found.append(file.relative_to(folder).as_posix())
            else:
                others += 1
    return sorted(found), others


def _in_maildir(file: Path) -> bool:
    return file.parent.name in ("cur", "new")


def _is_mail_name(file: Path) -> bool:
    if _in_maildir(file):
        return not file.name.startswith(".")
    return file.name.lower().endswith((".eml", ".mbox")) or _NUMBERED.fullmatch(file.name) is not None


def _folder_messages(folder: Path, report: Callable[[float], None], dialect: str | None) -> Iterator[RawMessage]:
    files, others = folder_files(folder)
    if not files:
        raise InputError(
            f"{folder}: no message in this folder ({others} other files); a folder holds .eml or .mbox files, "
            "or is a Maildir with cur/ and new/"
        )
    like_mail = 0
    for number, inside in enumerate(files):
        file = folder / inside
        if not stat.S_ISREG(_kind(file)):
            raise InputError(f"{file}: not a regular file; remove it from the folder")
        like_mail += is_mail_head(read_head(file))
        several = file.suffix.lower() == ".mbox" and not _in_maildir(file)
        own: Callable[[float], None] = lambda done, number=number: report((number + done) / len(files))  # noqa: E731
        name = _valid_name(inside)
        parent = Path(name).with_suffix("") if several else Path(name).parent
        parent = parent.parent if _in_maildir(file) else parent
        for message in _file_messages(file, inside, f"{name}/", several=several, report=own, dialect=dialect):
            yield message._replace(folder="" if parent == Path() else parent.as_posix())
    if not like_mail:
        raise InputError(f"{folder}: none of its {len(files)} files looks like mail; give a folder of .eml files")


def _file_messages(
    file: Path, name: str, prefix: str, *, several: bool, report: Callable[[float], None], dialect: str | None
) -> Iterator[RawMessage]:
    """Yields the messages of one file: several in an mbox, otherwise one."""
    try:
        with file.open("rb") as opened:
            if not several or os.fstat(opened.fileno()).st_size == 0:
                yield RawMessage(opened.read(), _SIZES_AND_FLAGS.sub("", _valid_name(name)), False)
                report(1.0)
                return
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
                yield from _mbox_messages(content, split_mbox(content, dialect, name=str(file)), prefix, report)
    except OSError as error:
        raise unreadable(file, error) from error


def _mbox_messages(
    content: mmap.mmap, pieces: Iterator["Piece"], prefix: str, report: Callable[[float], None]
) -> Iterator[RawMessage]:
    reported = 0
    # The position counts messages, not bytes: a byte offset would carry the length of other people's words into the id,
    # and from there into the order of selection.
    for position, (start, stop, escaped) in enumerate(pieces):
        yield RawMessage(content[start:stop], f"{prefix}message {position + 1}", escaped)
        if stop - reported >= _REPORTED or stop == len(content):
            reported = stop
            report(stop / len(content))


class Piece(NamedTuple):
    """The position of one message in an mbox."""

    start: int
    stop: int
    escaped: bool  # as in `RawMessage`


def split_mbox(content: bytes | mmap.mmap, dialect: str | None = None, *, name: str = "") -> Iterator[Piece]:
    """Yields the messages of an mbox, as consecutive pieces that make up the whole file.

    A message begins at a line "From ann@x.org Mon Jan  1 10:00:00 2024" that follows an empty line and is followed by
    a mail header. Writers keep such lines out of texts in two ways, and a person's text must be taken for neither a
    message nor its header:
      - mboxo, mboxrd: a line of text that begins with "From " is written as ">From ".
      - mboxcl, mboxcl2: Content-Length counts the bytes of the text (mboxcl escapes it, too).
    Without `dialect` a box is read only where both ways give the same messages and nothing shows that its writer
    followed neither. Refused are:
      - a Content-Length that fits and has the start of a message in its text;
      - the start of a message without an empty line before it that no Content-Length leads to;
      - a start without a date in a box whose first line has one, or the other way round;
      - where a line of text begins with "From ", so that the writer does not escape: any start to which no
        Content-Length leads.
    A Content-Length that does not lead to a start or to the end of the file is ignored, unless the dialect is declared.

    Args:
      dialect: "mboxo" or "mboxrd": every start is one, and Content-Length is ignored. "mboxcl" or "mboxcl2":
        Content-Length alone decides. None: see above.
      name: what errors call the file.

    Guarantees:
      - The pieces joined are the file.                                (test_split_mbox_keeps_every_byte)
      - What is written by the rules of a dialect has the same messages whatever the texts are, if the
        dialect is declared; otherwise it has, or it is refused.       (test_a_body_makes_no_message)
    Cost: linear in the file.
    """
    if dialect in ("mboxcl", "mboxcl2"):
        yield from split_by_length(content, name, escaped=dialect == "mboxcl")
        return
    dated = None if dialect else is_dated(content, first_line(content, 0))
    start, number = 0, 1
    unescaped = unconfirmed = 0  # the first message with an unescaped line, and the first that only a line ends
    while start < len(content):
        counted = None if dialect else counted_end(content, start)
        stop = len(content)
        for at, kind in from_lines(content, start, dated):
            if kind is Line.TEXT:
                unescaped = unescaped or number
                continue
            if counted is not None and at < counted:
                raise _undecided(name, number, "by its Content-Length, a line that begins a message is a part of it")
            if kind is Line.ODD and at != counted:
                raise _undecided(name, number, "a line in it looks like the beginning of the next message, but without "
                                 "an empty line before it, or without a date where others have one")  # fmt: skip
            stop = at
            unconfirmed = unconfirmed or (number if at != counted else 0)
            break
        if unescaped and unconfirmed and not dialect:
            raise _undecided(name, unescaped, "a line of its text begins with 'From ', which shows that the box was "
                             f"written without escaping; what ends message {unconfirmed} may then be text")  # fmt: skip
        yield Piece(start, stop, escaped=counted is None)
        start, number = stop, number + 1


def split_by_length(content: bytes | mmap.mmap, name: str, *, escaped: bool) -> Iterator[Piece]:
    start, number = 0, 1
    while start < len(content):
        stop = counted_end(content, start)
        if stop is None:
            raise InputError(
                f"{name}, message {number}: no Content-Length that leads to the next message, although the dialect is "
                "one that counts; correct it, or declare another dialect (mbox_dialect=, --mbox-dialect)"
            )
        yield Piece(start, stop, escaped)
        start, number = stop, number + 1


def _undecided(name: str, number: int, why: str) -> InputError:
    return InputError(
        f"{name}, message {number}: {why}; correct the box, or say how it was written (mbox_dialect=, --mbox-dialect): "
        "mboxo or mboxrd if texts are escaped ('>From '), mboxcl or mboxcl2 if Content-Length counts their bytes"
    )


class Line(enum.Enum):
    """The possible meanings of a line that begins with "From "."""

    START = "the beginning of a message"
    ODD = "almost the beginning of a message"
    TEXT = "text"


def from_lines(content: bytes | mmap.mmap, start: int, dated: bool | None) -> Iterator[tuple[int, Line]]:
    """Yields the "From " lines in and after the message at `start`, except the one or two that open it.

    Where the end of the file leaves it open what a line would have been, it is passed over.
    """
    at = first_line(content, start)
    if content[at : at + 5] == b"From ":
        at = content.find(b"\n", at) + 1 or len(content)
    while (at := content.find(_SEPARATOR, at) + 1) > 0:
        end = content.find(b"\n", at, at + _LONGEST_LINE)
        if end < 0 and at + _LONGEST_LINE >= len(content):
            return
        own_date = is_dated(content, at)
        if end < 0 or not (own_date or _UNDATED.match(content[at:end])):
            yield at, Line.TEXT
            continue
        header = _header_follows(content, end + 1)
        if header is None:
            return
        empty_line = content[max(at - 2, 0) : at] == b"\n\n" or content[max(at - 3, 0) : at] == b"\n\r\n"
        if not header or not (own_date or empty_line):
            yield at, Line.TEXT
        else:
            yield at, Line.START if empty_line and dated in (None, own_date) else Line.ODD


def first_line(content: bytes | mmap.mmap, start: int) -> int:
    """Returns the start of a message's first line, after a byte-order mark and empty lines."""
    return _OPENING.match(content, start).end()  # type: ignore[union-attr]


def is_dated(content: bytes | mmap.mmap, at: int) -> bool | None:
    """Returns whether a "From " line has a date; None if it is not such a line."""
    line = content[at : at + _LONGEST_LINE].partition(b"\n")[0]
    return _DATED.match(line) is not None if line.startswith(b"From ") else None


def counted_end(content: bytes | mmap.mmap, start: int) -> int | None:
    """Returns the end of the message at `start` by its Content-Length; None if no message ends there."""
    begin = first_line(content, start)
    end = _HEADER_END.search(content, begin)
    lengths = set() if end is None else set(_CONTENT_LENGTH.findall(content, begin, end.start() + 1))
    if end is None or len(lengths) != 1:
        return None
    stop = end.end() + int(lengths.pop())
    if stop > len(content):
        return None
    following = _LINE_ENDS.match(content, stop).end()  # type: ignore[union-attr]
    if following == len(content):
        return following
    line = content[following : following + _LONGEST_LINE].partition(b"\n")[0]
    begins = (
        content[following - 1 : following] == b"\n"
        and (_DATED.match(line) or _UNDATED.match(line))
        and _header_follows(content, following + len(line) + 1) is not False
    )
    return following if begins else None


def _header_follows(content: bytes | mmap.mmap, at: int) -> bool | None:
    """Returns whether header lines follow, one of them known from mail; None if the end of the file leaves it open."""
    limit = at + _LOOK_AHEAD
    while at < limit:
        end = content.find(b"\n", at)
        line = content[at : min(limit, end if end >= 0 else limit)]
        field = _HEADER_LINE.match(line)
        if field is not None and _is_mail_header(field.group(1)):
            return True
        if end < 0:
            return None
        if field is None and not line.startswith((b" ", b"\t", b">From ", b"From ")):
            return False
        at = end + 1
    return False


def _is_mail_header(name: bytes) -> bool:
    return name.lower() in _MAIL_HEADERS or name.lower().startswith(_MAIL_HEADER_FAMILIES)


def _valid_name(name: str) -> str:
    """Returns a file name as valid Unicode, the only text that Arrow takes."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _kind(path: Path) -> int:
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        raise InputError(f"{path}: no such file or folder; check the path of the mailbox") from None
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
