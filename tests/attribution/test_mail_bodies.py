"""Text comes out of every body, and attachments stay out of it."""

import email.message
import email.policy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coowned.attribution.mail_bodies import BodyText, body_text, strip_html
from coowned.attribution.mail_headers import header_fields, split_message

_FIELDS = frozenset({b"content-type", b"content-transfer-encoding", b"content-disposition"})


def _read(content: bytes, *, escaped: bool = False) -> BodyText:
    header, body = split_message(content)
    return body_text(header_fields(header, _FIELDS), body, escaped=escaped)


def _message(**headers: str) -> email.message.EmailMessage:
    message = email.message.EmailMessage()
    message["From"] = "ann@x.org"
    return message


@pytest.mark.parametrize("encoding", ["quoted-printable", "base64", "8bit"])
@pytest.mark.parametrize("charset", ["utf-8", "iso-8859-1"])
@pytest.mark.parametrize("policy", [email.policy.SMTP, email.policy.default])
def test_encodings_and_charsets(encoding, charset, policy):
    message = _message()
    message.set_content("Grüße\nan alle\n", charset=charset, cte=encoding)
    assert _read(message.as_bytes(policy=policy)) == BodyText("Grüße\nan alle")


def test_plain_text_is_preferred_to_html():
    message = _message()
    message.set_content("plain")
    message.add_alternative("<p>rich</p>", subtype="html")
    assert _read(message.as_bytes()) == BodyText("plain")


def test_html_is_read_where_the_plain_text_is_blank_or_missing():
    message = _message()
    message.set_content(" \n")
    message.add_alternative("<p>rich</p>", subtype="html")
    message.add_attachment(b"\x89PNG", maintype="image", subtype="png")
    assert _read(message.as_bytes()) == BodyText("rich", attachments=1)


def test_attachments_are_counted_and_not_read():
    message = _message()
    message.set_content("see below")
    message.add_attachment("secret table", filename="a.txt")
    message.add_attachment(b"%PDF", maintype="application", subtype="pdf", filename="b.pdf")
    forwarded = _message()
    forwarded.set_content("words of others")
    message.add_attachment(forwarded)
    assert _read(message.as_bytes()) == BodyText("see below", attachments=3)


def test_several_inline_texts_are_joined():
    content = (
        b"Content-Type: multipart/mixed; boundary=B\n\npreamble\n--B\n\none\n"
        b"--B\nContent-Type: text/html\n\n<b>two</b>\n--B--\nepilogue\n"
    )
    assert _read(content) == BodyText("one\ntwo")


def test_a_boundary_that_begins_another_is_not_taken_for_it():
    content = (
        b'Content-Type: multipart/mixed; boundary="B"\n\n--B\nContent-Type: multipart/alternative; boundary=BB\n\n'
        b"--BB\n\ninner\n--BB--\n--B\n\nouter\n--B--\n"
    )
    assert _read(content) == BodyText("inner\nouter")


def test_long_boundary_in_sections():
    content = b'Content-Type: multipart/mixed; boundary*0="B";\n boundary*1="C"\n\n--BC\n\ntext\n--BC--\n'
    assert _read(content) == BodyText("text")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"Content-Type: multipart/mixed\n\nno boundary", "no boundary"),
        (b"Content-Type: multipart/mixed; boundary=B\n\nnever comes", "never comes"),
        (b"Content-Type: multipart/mixed; boundary=B\n\n--B\n\ncut off", "cut off"),
        (b"Content-Type: text\n\nold", "old"),
        (b"Content-Type: text/x-patch; name=a.patch\n\n+line", "+line"),
        (b"Content-Type:\n\nempty", "empty"),
    ],
)
def test_broken_structure_still_gives_text(content, text):
    assert _read(content).text == text


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"Content-Type: text/plain; charset=x-none\n\ncaf\xc3\xa9", "café"),
        (b"Content-Type: text/plain; charset=utf-8\n\ncaf\xe9", "caf�"),
        (b"Content-Transfer-Encoding: x-none\n\nas is", "as is"),
    ],
)
def test_undecodable_bodies_are_replaced_and_counted(content, text):
    assert _read(content) == BodyText(text, undecodable=True)


def test_escaped_from_lines_lose_one_mark_in_an_mbox_only():
    content = b"Subject: a\n\n>From me\n>>From you\nnot >From here\n"
    assert _read(content, escaped=True).text == "From me\n>From you\nnot >From here"
    assert _read(content).text == ">From me\n>>From you\nnot >From here"


def test_html_text():
    source = (
        "<head><title>t</title><style>p{}</style></head><p>a&nbsp;&lt;b</p>"
        "<script>x<y</SCRIPT>c<br/>d <!-- <p>no</p> --> e"
    )
    assert strip_html(source) == "a <b\nc\nd e"
    assert strip_html("<td>a</td><td>b</td>") == "a b"
    assert strip_html("1 < 2 & 3 > 2") == "1 < 2 & 3 > 2"


@pytest.mark.parametrize(
    "unit", ["<!--", "<a ", '<a href="', "<![", "</", "<script>", "<script></script", "<p", "&#9", "&", "\n", "<"]
)
def test_long_broken_html_gives_text(unit):
    # Each of these takes minutes where any expression searches the rest of the text again and again.
    assert strip_html("start " + unit * (1_000_000 // len(unit))).startswith("start")


def test_deep_nesting_ends():
    content = b"".join(
        b"Content-Type: multipart/mixed; boundary=%d\n\n--%d\n" % (depth, depth) for depth in range(3000)
    )
    assert _read(content + b"\ntext") == BodyText("", attachments=1)


_TOKENS = st.sampled_from(
    [b"\n", b"\r\n", b"--B", b"--B--", b"--", b"Content-Type: multipart/alternative; boundary=B\n", b"text", b"<p>",
     b"Content-Type: text/html\n", b"Content-Transfer-Encoding: base64\n", b"charset=utf-7", b"+2AA-", b"=E9",
     b"\x00", b"\xff", b">From "]
)  # fmt: skip


@given(st.lists(_TOKENS | st.binary(max_size=5), max_size=25), st.booleans())
def test_any_body_gives_text(pieces, escaped):
    read = _read(b"Content-Type: multipart/mixed; boundary=B\n\n" + b"".join(pieces), escaped=escaped)
    assert read.text.encode("utf-8").decode("utf-8") == read.text
    assert read.attachments >= 0
    assert read.undecodable in (False, True)
