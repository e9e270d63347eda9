"""Where one message ends and the next begins, and what is no mailbox at all."""

import contextlib
import os
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coowned.attribution import mail_boxes
from coowned.attribution.mail_boxes import is_mail_head, raw_messages, split_mbox
from coowned.attribution.mail_headers import split_message
from coowned.attribution.options import MBOX_DIALECTS
from coowned.errors import InputError

_FROM = b"From ann@x.org Mon Jan  1 10:00:00 2024\n"


def _split(content: bytes, dialect: str | None = None) -> list[bytes]:
    return [content[start:stop] for start, stop, _ in split_mbox(content, dialect, name="box")]


def _all(path, dialect: str | None = None) -> list[mail_boxes.RawMessage]:
    return list(raw_messages(path, lambda done: None, dialect))


@pytest.mark.parametrize(
    "line",
    [
        b"From ann@x.org Mon Jan  1 10:00:00 2024",
        b"From ann at x.org  Mon Jan  1 10:00:00 2024",
        b"From - Mon Jan 01 10:00:00 2024",
        b"From 1551@xxx Sat Apr 25 18:43:27 +0000 2015",
        b"From 0123456789abcdef Mon Sep 17 00:00:00 2001",
        b"From ann@x.org Mon, 1 Jan 2024 10:00:00 +0000",
        b"From ann@x.org",
        b"From MAILER-DAEMON",
        b"From ",
        b"From ann@x.org 2024-01-01T10:00:00Z",
    ],
)
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_lines_that_separate(line, end):
    first, second = line + b"\nSubject: 1\n\none\n\n", line + b"\nX-Own: 2\nNote: 2\n\ntwo\n"
    for dialect in (None, "mboxo", "mboxrd"):
        pieces = _split((first + second).replace(b"\n", end), dialect)
        assert pieces == [first.replace(b"\n", end), second.replace(b"\n", end)]


@pytest.mark.parametrize(
    "text",
    [
        b"\nFrom here on:\nall is well\n",
        b"\nFrom ann@x.org Mon Jan  1 10:00:00 2024\nno header follows\n",
        b"\nFrom the docs of 2024\nNote: none\n",
        b"\nFrom ann@x.org Mon Jan  1 10:00:00 2024\nNote: no header of mail\n",
        b"From ann@x.org\nSubject: no blank line before\n",
        b"\n>From ann@x.org Mon Jan  1 10:00:00 2024\nSubject: escaped\n",
    ],
)
def test_lines_that_are_text(text):
    content = _FROM + b"Subject: 1\n\none\n" + text
    assert _split(content) == _split(content, "mboxo") == [content]
    # It shows that the box is not escaped: whether the next line that looks like a start is one, nobody knows.
    more = content + b"\n" + _FROM + b"Subject: 2\n\ntwo\n"
    assert len(_split(more, "mboxrd")) == 2
    if b">From" in text:
        assert len(_split(more)) == 2
    else:
        with pytest.raises(InputError, match=r"^box, message 1: a line of its text begins with 'From '.*-dialect"):
            _split(more)


@pytest.mark.parametrize("dialect", [None, "mboxo", "mboxrd"])
def test_a_start_without_an_empty_line_is_refused(dialect):
    """As text, it would give the people of the second message's text no protection; as a message, a body makes one."""
    content = _FROM + b"Subject: 1\n\ncut of\n" + _FROM + b"Subject: 2\n\ntwo\n"
    with pytest.raises(InputError, match=r"^box, message 1: a line in it looks like the beginning of the next message"):
        _split(content, dialect)


def test_a_start_without_a_date_among_dated_ones_is_refused():
    content = _FROM + b"Subject: 1\n\none\n\nFrom ann@x.org\nSubject: 2\n\ntwo\n"
    with pytest.raises(InputError, match=r"^box, message 1: .* without a date where others have one; .*--mbox-dialect"):
        _split(content)
    assert len(_split(content, "mboxo")) == 2


_PIECES = st.sampled_from(
    [_FROM, b"Subject: a\n", b"\n", b"\r\n", b"From ", b"text\n", b">From x\n", b"From ann@x.org\n"]
)


@given(st.lists(_PIECES | st.binary(max_size=3), max_size=30), st.sampled_from([None, *MBOX_DIALECTS]))
def test_split_mbox_keeps_every_byte(pieces, dialect):
    content = b"".join(pieces)
    with contextlib.suppress(InputError):
        assert b"".join(_split(content, dialect)) == content


def test_truncated_mbox_is_read(tmp_path):
    content = _FROM + b"Message-ID: <1>\n\none\n\n" + _FROM + b"Message-ID: <2>\nTo: bob@x.org\n\ntwo\n"
    file = tmp_path / "box.mbox"
    for length in range(len(_FROM), len(content)):
        file.write_bytes(content[:length])
        assert b"".join(message.content for message in _all(file)) == content[:length]


def test_folder_is_read_in_name_order(tmp_path, monkeypatch):
    for name in (
        "b/2.eml",
        "a.eml",
        "b/1.EML",
        "c.mbox",
        "d/cur/77.host:2,S",
        "d/new/78.host",
        "d/tmp/79.host",
        "mh/12",
        "note.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(_FROM + b"Subject: a\n\nx\n" if name == "c.mbox" else b"Subject: a\n\nx\n")
    expected = ["a.eml", "b/1.EML", "b/2.eml", "c.mbox/message 1", "d/cur/77.host", "d/new/78.host", "mh/12"]
    assert [message.name for message in _all(tmp_path)] == expected
    walk = os.walk

    def backwards(*args, **kwargs):
        return [(parent, folders, names[::-1]) for parent, folders, names in list(walk(*args, **kwargs))[::-1]]

    monkeypatch.setattr(os, "walk", backwards)
    assert [message.name for message in _all(tmp_path)] == expected


def test_file_names_that_are_not_unicode(tmp_path):
    (tmp_path / os.fsdecode(b"caf\xe9.eml")).write_bytes(b"Subject: a\n\nx")
    assert [message.name for message in _all(tmp_path)] == ["caf�.eml"]


def test_an_eml_is_one_message_whatever_its_text_quotes(tmp_path):
    file = tmp_path / "a.eml"
    file.write_bytes(b"Subject: a\n\nquoted:\n\n" + _FROM + b"Subject: b\n\nx\n")
    assert len(_all(file)) == 1
    file.rename(tmp_path / "a.mbox")
    assert len(_all(tmp_path / "a.mbox")) == 2


def test_an_eml_that_begins_with_a_from_line_is_one_message(tmp_path):
    content = _FROM + b"Subject: a\n\nquoted:\n\n" + _FROM + b"From: eve@x.org\n\nx\n"
    for name in ("a.eml", "cur/77.host", "cur/78.mbox", "mh/12"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert [message.content for message in _all(tmp_path)] == [content] * 4
    for name in ("a.eml", "cur/77.host"):
        assert [message.content for message in _all(tmp_path / name)] == [content]


def _with_length(body: bytes, length: int | None = None) -> bytes:
    return _FROM + b"Subject: a\nContent-Length: %d\n\n" % (len(body) if length is None else length) + body


_QUOTING = b"she wrote:\n\n" + _FROM + b"From: eve@x.org\nTo: dan@x.org\n\nhello\n"


@pytest.mark.parametrize("name", ["box.mbox", "inbox"])
@pytest.mark.parametrize("between", [b"", b"\n", b"\n\n"])
def test_content_length_is_honoured(tmp_path, name, between):
    plain = b"From here on\nall is well\n"
    parts = [_with_length(plain) + between, _with_length(b"two\n") + between, _with_length(plain)]
    (tmp_path / name).write_bytes(b"".join(parts))
    for dialect in (None, "mboxcl", "mboxcl2"):
        assert [message.content for message in _all(tmp_path / name, dialect)] == parts
    parts = [_with_length(_QUOTING) + between, _with_length(b"two\n") + between, _with_length(_QUOTING)]
    (tmp_path / name).write_bytes(b"".join(parts))
    assert [message.content for message in _all(tmp_path / name, "mboxcl2")] == parts
    with pytest.raises(InputError, match=r", message 1: by its Content-Length, a line that begins a message is a part"):
        _all(tmp_path / name)


@pytest.mark.parametrize("length", [0, 3, 10**9])
def test_a_wrong_content_length_hides_no_message(tmp_path, length):
    first, second = _with_length(b"one\n\n", length), _FROM + b"Subject: b\n\ntwo\n\n"
    (tmp_path / "box.mbox").write_bytes(first + second + second)
    assert [message.content for message in _all(tmp_path / "box.mbox")] == [first, second, second]


@pytest.mark.parametrize("hidden", [1, 2])
def test_a_content_length_over_other_messages_is_refused(tmp_path, hidden):
    """Somebody may have chosen it to hide what follows in their own message, up to the end of the box."""
    second = _FROM + b"Subject: b\n\ntwo\n\n"
    first = _with_length(b"one\n\n", len(b"one\n\n") + hidden * len(second))
    (tmp_path / "box.mbox").write_bytes(first + second + second)
    with pytest.raises(InputError, match=r"message 1: by its Content-Length, .* say how .*--mbox-dialect"):
        _all(tmp_path / "box.mbox")
    assert [message.content for message in _all(tmp_path / "box.mbox", "mboxrd")] == [first, second, second]


def test_a_content_length_into_the_middle_of_a_line_ends_nothing(tmp_path):
    escaped = b"one\n\n>" + _FROM + b"From: eve@x.org\n\nhello\n"
    content = _with_length(escaped + b"\n", len(b"one\n\n>")) + _with_length(b"two\n")
    (tmp_path / "box.mbox").write_bytes(content)
    assert len(_all(tmp_path / "box.mbox")) == 2
    with pytest.raises(InputError, match=r"message 1: no Content-Length that leads to the next message"):
        _all(tmp_path / "box.mbox", "mboxcl")


def _write(dialect: str, messages: list[tuple[bytes, bytes]]) -> bytes:
    """An mbox of (header, text) as its dialect says, by a writer of our own."""
    out = b""
    for header, text in messages:
        text = text if text.endswith(b"\n") else text + b"\n"
        if dialect in ("mboxo", "mboxcl"):
            text = re.sub(rb"(?m)^From ", b">From ", text)
        elif dialect == "mboxrd":
            text = re.sub(rb"(?m)^(>*From )", rb">\1", text)
        counted = b"Content-Length: %d\n" % len(text) if dialect.startswith("mboxcl") else b""
        out += _FROM + header + counted + b"\n" + text + b"\n"
    return out


_HEADERS = [b"From: u%d@x.org\nTo: bob@x.org\nSubject: a\n" % number for number in range(3)]
_TEXTS = st.lists(
    st.sampled_from(
        [_FROM, b">" + _FROM, b"From eve@x.org\n", b"From here\n", b"From: eve@x.org\n", b"To: dan@x.org\n", b"\n",
         b"\r\n", b"Message-ID: <9@x.org>\n", b"\0", b"Content-Length: 4\n", b"text\n", b"\r", b"From "]
    ) | st.binary(max_size=3), max_size=12,
).map(b"".join)  # fmt: skip


@pytest.mark.parametrize("dialect", MBOX_DIALECTS)
@given(st.lists(_TEXTS, min_size=3, max_size=3))
@example([b"\n" + _FROM + b"From: eve@x.org\n\nhello", b"", b""])
@example([b"hello\n" + _FROM + b"From: eve@x.org\n\nhello", b"", b""])
@settings(max_examples=200)
def test_a_body_makes_no_message(dialect, texts):
    """The messages, their headers and so their people are the same whatever somebody writes, or the box is refused."""
    content = _write(dialect, list(zip(_HEADERS, texts, strict=True)))
    found = [split_message(piece)[0] for piece in _split(content, dialect)]
    assert [header.partition(b"\nContent-Length")[0].rstrip(b"\n") + b"\n" for header in found] == _HEADERS
    with contextlib.suppress(InputError):
        assert [split_message(piece)[0] for piece in _split(content)] == found
    if dialect in ("mboxo", "mboxrd", "mboxcl"):  # which escape: nothing is ambiguous
        assert [split_message(piece)[0] for piece in _split(content)] == found


@given(_TEXTS, st.sampled_from(MBOX_DIALECTS))
def test_an_unescaped_body_that_shows_itself_is_refused_or_harmless(text, dialect):
    """Of a writer that follows no dialect: as long as a body does not imitate a whole message, nothing comes of it."""
    harmless = re.sub(rb"(?m)^(?:To|From|Message-ID|Content-Length):", b"Note:", text)
    texts = [harmless, b"", b""]
    content = b"".join(_FROM + header + b"\n" + text + b"\n\n" for header, text in zip(_HEADERS, texts, strict=True))
    for declared in (None, dialect):
        with contextlib.suppress(InputError):
            assert len(_split(content, declared)) == 3


def test_the_size_in_a_maildir_name_is_no_part_of_the_id(tmp_path):
    for name in ("1700.M1P2.host,S=1234,W=1260:2,S", "1701.M1P2.host,S=99", "1702.host:2,", "1703.host;2,RS"):
        (tmp_path / "cur").mkdir(exist_ok=True)
        (tmp_path / "cur" / name).write_bytes(b"Subject: a\n\nx\n")
    names = ["cur/1700.M1P2.host", "cur/1701.M1P2.host", "cur/1702.host", "cur/1703.host"]
    assert [message.name for message in _all(tmp_path)] == names


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n\r\n \n", "is empty"),
        (b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", "not a mailbox: at byte 0"),
        (b"date,from,to\n2024-01-01,ann,bob\n", "not a mailbox: at byte 0"),
        (b'{"from": "ann"}\n', "not a mailbox: at byte 0"),
        (b"From the beginning\nthere was text\n", "not a mailbox: at byte 0"),
        (b"key: value\nother: value\n", "not a mailbox: at byte 0"),
    ],
)
def test_files_that_are_no_mailbox(tmp_path, content, message):
    file = tmp_path / "box.mbox"
    file.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        _all(file)
    assert str(file) in str(caught.value)


def test_places_that_are_no_mailbox(tmp_path):
    with pytest.raises(InputError, match="no such file or folder"):
        _all(tmp_path / "nowhere")
    with pytest.raises(InputError, match="cannot be read"):
        _all(tmp_path / "with\0null")
    (tmp_path / "note.txt").write_text("hello")
    with pytest.raises(InputError, match=r"no message in this folder \(1 other files\)"):
        _all(tmp_path)
    (tmp_path / "a.eml").write_bytes(b"\x89PNG")
    with pytest.raises(InputError, match="none of its 1 files looks like mail"):
        _all(tmp_path)
    (tmp_path / "a.eml").unlink()
    (tmp_path / "a.eml").symlink_to(tmp_path / "gone")
    with pytest.raises(InputError, match=r"a\.eml: no such file"):
        _all(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="neither a file nor a folder"):
        _all(tmp_path / "pipe")


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    file = tmp_path / "a.eml"
    file.write_bytes(b"Subject: a\n\nx")

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", refuse)
    with pytest.raises(InputError, match=r"a\.eml: cannot be read \(Permission denied\)"):
        _all(file)


def test_begins_like_mail_asks_for_known_names():
    assert is_mail_head(b"Subject: a\n\n")
    assert not is_mail_head(b"Subject: a\n\nFrom: b\n", known_headers=2)
    assert is_mail_head(b"\xef\xbb\xbf\nX-Other: 1\r\nSubject: a\r\nFrom: b\r\n\r\n", known_headers=2)
    assert not is_mail_head(b"Subject: a\0\nFrom: b\n\n")
