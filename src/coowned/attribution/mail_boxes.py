"""Mail on disk: mbox files, Maildir and MH folders, .eml files. Gives one message at a time, as bytes."""

import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from coowned.errors import InputError

_CHUNK = 4 << 20  # bytes read at a time
_HEAD = 1 << 16  # bytes read to detect the kind of a file
_LOOK_AHEAD = 1 << 12  # bytes after a "From " line that decide whether it separates
_SEPARATOR = b"\nFrom "
_DATED = re.compile(
    rb"From [^\n]{0,500}?(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun),? [^\n]{0,40}?"
    rb"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[^\n]{0,40}?\d{1,2}:\d\d[^\n]{0,100}"
)
_UNDATED = re.compile(rb"From (?:\S{0,500}|\S{1,500} [^\n]{0,200}\d[^\n]{0,200})\r?$")
_HEADER_LINE = re.compile(rb"(?:>?From [^\n]*\n)?([!-9;-~]{1,200})[ \t]*:")
_MAIL_HEADERS = frozenset(
    b"from to cc bcc sender subject date message-id received return-path delivered-to reply-to mime-version "
    b"content-type in-reply-to references x-original-to resent-from resent-to list-id dkim-signature status x-status "
    b"x-mozilla-status x-gmail-labels x-gm-thrid envelope-to apparently-to arc-seal".split()
)
_NUMBERED = re.compile(r"\d+\.?")  # the files of an MH folder
# Maildir: sizes (",S=1234,W=1260") tell the length of a text, and flags (":2,S") change when a message is read.
_SIZES_AND_FLAGS = re.compile(r"(?:,[A-Za-z]=[^,:;!]*)*(?:[:!;]2,[A-Za-z]*)?$")
_CONTENT_LENGTH = re.compile(rb"^content-length[ \t]*:[ \t]*(\d{1,15})[ \t]*\r?$", re.IGNORECASE | re.MULTILINE)
_HEADER_END = re.compile(rb"\r?\n\r?\n")


class RawMessage(NamedTuple):
    """One message as it is stored."""

    content: bytes  # all its bytes, a leading "From " line included
    name: str  # its id without a Message-ID: from file name and position, never from content
    escaped: bool  # lines of the body that begin with "From " carry one ">" too many
    folder: str = ""  # the message's folder, relative to the folder that was given


def raw_messages(path: str | os.PathLike[str], report: Callable[[float], None]) -> Iterator[RawMessage]:
    """Every message of a file or folder, in file order, files sorted by their path inside the folder.

    Guarantees:
      - Nothing depends on the order in which the disk lists a folder.       (test_folder_is_read_in_name_order)
      - A box cut off in the middle of a message gives what is left of it.   (test_truncated_mbox_is_read)
    Cost: memory for one chunk of 4 MiB and the largest message.
    """
    box = Path(path)
    kind = _kind(box)
    if stat.S_ISDIR(kind):
        yield from _folder_messages(box, report)
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
        yield from _file_messages(box, box.name, "", several=several, report=report)
    else:
        raise InputError(f"{box}: neither a file nor a folder; give a mailbox on disk")


def is_mail_head(head: bytes, *, known_headers: int = 1) -> bool:
    """True where bytes begin with the "From " line of an mbox, or a header with enough names known from mail."""
    head = head.removeprefix(b"\xef\xbb\xbf").lstrip(b"\r\n")
    if head.startswith(b"From "):
        line, _, rest = head.partition(b"\n")
        return _DATED.match(line) is not None or (_UNDATED.match(line) is not None and _names_header(rest, 0))
    head = head.replace(b"\r\n", b"\n").replace(b"\r", b"\n").partition(b"\n\n")[0]
    if b"\0" in head or not _HEADER_LINE.match(head):
        return False
    names = {line.partition(b":")[0].rstrip().lower() for line in head.split(b"\n") if b":" in line}
    return len(names & _MAIL_HEADERS) >= known_headers


def folder_files(folder: Path) -> tuple[list[str], int]:
    """The mail files of a folder, as sorted paths inside it with "/" between parts, and the number of other files."""
    found: list[str] = []
    others = 0

    def refuse(error: OSError) -> None:
        raise _unreadable(error.filename or folder, error)

    for parent, _, names in os.walk(folder, onerror=refuse):
        for name in names:
            file = Path(parent) / name
            if _is_mail_name(file):
                found.append(file.relative_to(folder).as_posix())
            else:
                others += 1
    return sorted(found), others


def read_head(file: Path, length: int = _HEAD) -> bytes:
    """The first bytes of a file, enough to detect its kind."""
    try:
        with file.open("rb") as opened:
            return opened.read(length)
    except OSError as error:
        raise _unreadable(file, error) from error


def _in_maildir(file: Path) -> bool:
    return file.parent.name in ("cur", "new")


def _is_mail_name(file: Path) -> bool:
    if _in_maildir(file):
        return not file.name.startswith(".")
    return file.name.lower().endswith((".eml", ".mbox")) or _NUMBERED.fullmatch(file.name) is not None


def _folder_messages(folder: Path, report: Callable[[float], None]) -> Iterator[RawMessage]:
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
        for message in _file_messages(file, inside, f"{name}/", several=several, report=own):
            yield message._replace(folder="" if parent == Path() else parent.as_posix())
    if not like_mail:
        raise InputError(f"{folder}: none of its {len(files)} files looks like mail; give a folder of .eml files")


def _file_messages(
    file: Path, name: str, prefix: str, *, several: bool, report: Callable[[float], None]
) -> Iterator[RawMessage]:
    """The messages of one file: several in an mbox, otherwise one."""
    try:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if not several:
                yield RawMessage(opened.read(), _SIZES_AND_FLAGS.sub("", _valid_name(name)), False)
                report(1.0)
                return
            lengths = _lengths(opened, size)
            opened.seek(0)
            report_bytes: Callable[[int], None] = lambda done: report(done / max(size, 1))  # noqa: E731
            contents = split_mbox(opened, report_bytes) if lengths is None else map(opened.read, lengths)
            # The position counts messages, not bytes: a byte offset would carry the length of other people's words
            # into the id, and from there into the order of selection.
            for position, content in enumerate(contents):
                yield RawMessage(content, f"{prefix}message {position + 1}", lengths is None)
            report(1.0)
    except OSError as error:
        raise _unreadable(file, error) from error


def _lengths(opened: BinaryIO, size: int) -> list[int] | None:
    """The lengths of the messages of an mbox that is cut by Content-Length (mboxcl), or None for any other.

    It is one only where every message has a Content-Length that leads to a "From " line or the end of the file: in a
    box that is cut by "From " lines, a sender could otherwise hide the messages that follow in a body of their own.
    """
    lengths, at = [], 0
    while at < size:
        opened.seek(at)
        head = opened.read(_HEAD)
        end = _HEADER_END.search(head)
        found = _CONTENT_LENGTH.search(head, 0, end.start() + 1) if end else None
        if end is None or found is None or not head.startswith(b"From "):
            return None
        stop = at + end.end() + int(found[1])
        opened.seek(min(stop, size))
        after = opened.read(16)
        blank = len(after) - len(after.lstrip(b"\r\n"))
        if stop > size or (stop + blank < size and not after[blank:].startswith(b"From ")):
            return None
        lengths.append(stop + blank - at)
        at = stop + blank
    return lengths


def split_mbox(opened: BinaryIO, report: Callable[[int], None]) -> Iterator[bytes]:
    """The messages of an mbox, as consecutive pieces that make up the whole file.

    A line that begins with "From " separates two messages where a header line follows it at once, and it either carries
    a date ("From ann@x.org Mon Jan  1 10:00:00 2024") or follows a blank line and names an address or nothing. Every
    other such line is text. Writers of mbox escape text as ">From ", so that only a box written without escaping (or by
    Content-Length alone) leaves room for doubt.

    Guarantees:
      - The pieces joined are the file.   (test_split_mbox_keeps_every_byte)
    Cost: linear in the file.
    """
    buffer, start, scanned, done, at_end = b"", 0, 0, 0, False
    while True:
        at = buffer.find(_SEPARATOR, scanned)
        if at >= 0 and (at_end or len(buffer) - at >= _LOOK_AHEAD):
            scanned = at + 1
            if _separates(buffer, at + 1) and buffer[start : at + 1].strip():
                yield buffer[start : at + 1]
                start = at + 1
            continue
        if at_end:
            break
        scanned = at if at >= 0 else max(len(buffer) - len(_SEPARATOR) + 1, scanned, start)
        # A message larger than a chunk doubles the next read: joining stays linear in its size.
        more = opened.read(max(_CHUNK, len(buffer) - start))
        at_end = not more
        buffer, scanned, start = buffer[start:] + more, scanned - start, 0
        done += len(more)
        report(done)
    if start < len(buffer):
        yield buffer[start:]


def _separates(buffer: bytes, at: int) -> bool:
    end = buffer.find(b"\n", at, at + 2000)
    if end < 0:
        return False
    line = buffer[at:end]
    if _DATED.match(line):
        return _HEADER_LINE.match(buffer, end + 1) is not None
    after_blank = buffer[max(at - 2, 0) : at] == b"\n\n" or buffer[max(at - 3, 0) : at] == b"\n\r\n"
    return after_blank and _UNDATED.match(line) is not None and _names_header(buffer, end + 1)


def _names_header(buffer: bytes, at: int) -> bool:
    match = _HEADER_LINE.match(buffer, at)
    if match is None:
        return False
    name = match.group(1).lower()
    return name in _MAIL_HEADERS or name.startswith(b"x-")


def _valid_name(name: str) -> str:
    """A file name as valid Unicode: Arrow takes no other text."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _kind(path: Path) -> int:
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        raise InputError(f"{path}: no such file or folder; check the path of the mailbox") from None
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: object, error: Exception) -> InputError:
    reason = getattr(error, "strerror", None) or error
    return InputError(f"{path}: cannot be read ({reason}); check the path and its permissions")
