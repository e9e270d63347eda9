"""The readable text of a message: plain text, else HTML without its tags. Attachments are counted, never read."""

import binascii
import contextlib
import html
import re
from collections.abc import Iterator
from typing import NamedTuple

from coowned.attribution.mail_headers import decode_text, first_value, from_base64, header_fields, split_message

BODY_FIELDS = (b"content-type", b"content-transfer-encoding", b"content-disposition")
_WANTED = frozenset(BODY_FIELDS)
_DEEPEST = 20  # nesting depth of multiparts; deeper parts count as attachments
_PARAMETER = re.compile(r';\s*([\w*-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*+)"?|([^;\s"]*))', re.DOTALL)
_ESCAPED_FROM = re.compile(rb"^>(>*From )", re.MULTILINE)
# Each of these takes an unclosed comment or tag to be closed by the end, so that no text is searched twice.
_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
_NO_TEXT = re.compile(r"<(script|style|title)\b.*?(?:(?=</\1)|\Z)", re.DOTALL | re.IGNORECASE)
_NEW_LINE = re.compile(
    r"</?(?:p|div|br|tr|table|li|ul|ol|dl|dt|dd|h[1-6]|blockquote|hr|pre)\b[^>]*+(?:>|\Z)", re.IGNORECASE
)
_NEW_CELL = re.compile(r"</?t[dh]\b[^>]*+(?:>|\Z)", re.IGNORECASE)
_TAG = re.compile(r"<[a-zA-Z/!?][^>]*+(?:>|\Z)")


class BodyText(NamedTuple):
    """The text of a body, with counts of what could not be read."""

    text: str
    attachments: int = 0  # parts that were not read
    undecodable: bool = False  # some of the text did not decode cleanly


class _Part(NamedTuple):
    kind: str  # text/plain, multipart/mixed, ...
    parameters: dict[str, str]
    encoding: str
    disposition: str
    body: bytes


def body_text(fields: dict[bytes, list[bytes]], body: bytes, *, escaped: bool) -> BodyText:
    """Returns the text of a message with these header fields; every body yields some text.

    Guarantees:
      - No body raises or takes more than linear time: what cannot be decoded is replaced and
        counted.   (test_any_body_gives_text)

    Example:
      >>> body_text({b"content-type": [b"text/html"]}, b"<p>Dear <b>Bob</b>,<br>see&nbsp;you", escaped=False)
      BodyText(text='Dear Bob,\\nsee you', attachments=0, undecodable=False)
    """
    part = _part(fields, body, "text/plain")
    if part.kind.startswith("text/") and part.disposition != "attachment":
        part = part._replace(kind="text/html" if part.kind == "text/html" else "text/plain", disposition="")
        part.parameters.pop("name", None)
    leaves, attachments = _texts(part, 0)
    read = [_leaf_text(leaf, escaped) for leaf in leaves]
    pieces = [text for text, _ in read]
    text = "\n".join(piece for piece in pieces if piece.strip()) if len(pieces) > 1 else "".join(pieces)
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return BodyText(text.rstrip("\n"), attachments, not all(clean for _, clean in read))


def strip_html(source: str) -> str:
    """Returns the text of an HTML page, one line per block, in time linear in its length.

    The standard library's HTML parser takes quadratic time on unclosed tags, which a stranger's mail may hold.

    >>> strip_html("<style>p {}</style><p>a &lt; b</p><!-- no --><p>c")
    'a < b\\nc'
    """
    text = _NO_TEXT.sub(" ", _COMMENT.sub("", source))
    text = _NEW_LINE.sub("\x00", " ".join(text.replace("\x00", " ").split()))
    text = _TAG.sub("", _NEW_CELL.sub(" ", text))
    with contextlib.suppress(ValueError):  # a character number of thousands of digits
        text = html.unescape(text)
    lines = (" ".join(line.split()) for line in text.split("\x00"))
    return "\n".join(line for line in lines if line)


def _part(fields: dict[bytes, list[bytes]], body: bytes, default: str) -> _Part:
    kind, parameters = default, {}
    if b"content-type" in fields:
        value = first_value(fields, b"content-type")
        kind = value.partition(";")[0].strip().lower()
        if ";" in value:
            parameters = _parameters(value)
        if "/" not in kind:  # "text", or nothing: both were common once
            kind = "text/plain" if kind in ("", "text") else f"{kind}/"
    disposition = first_value(fields, b"content-disposition").lower()
    if "filename" in disposition:
        parameters["name"] = "named"
    encoding = first_value(fields, b"content-transfer-encoding").strip().lower()
    return _Part(kind, parameters, encoding, disposition.partition(";")[0].strip(), body)


def _parameters(value: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, quoted, plain in _PARAMETER.findall(value):
        base, _, section = name.lower().partition("*")
        text = re.sub(r"\\(.)", r"\1", quoted) or plain
        if section.rstrip("*").isdigit():  # a long value cut in numbered sections (RFC 2231)
            found[base] = found.get(base, "") + text
        else:
            found.setdefault(base, text)
    return found


def _texts(part: _Part, depth: int) -> tuple[list[_Part], int]:
    """Returns the leaves that make up this part's text, and the number of attachments."""
    if part.kind.startswith("multipart/"):
        return _multipart_texts(part, depth)
    if part.disposition == "attachment" or "name" in part.parameters or part.kind not in ("text/plain", "text/html"):
        return [], 1
    return [part], 0


def _multipart_texts(part: _Part, depth: int) -> tuple[list[_Part], int]:
    boundary = part.parameters.get("boundary", "").rstrip().encode("utf-8", "replace")
    if not boundary:
        return [part._replace(kind="text/plain")], 0
    if depth == _DEEPEST:
        return [], 1
    default = "message/rfc822" if part.kind == "multipart/digest" else "text/plain"
    pieces = [_texts(_child(piece, default), depth + 1) for piece in _pieces(part.body, boundary)]
    if not pieces:  # the boundary never comes: all there is, is text
        return [part._replace(kind="text/plain")], 0
    children = [read for read, _ in pieces if read]
    attachments = sum(ignored for _, ignored in pieces)
    if part.kind == "multipart/alternative" and children:
        # Alternatives of the same text: use the plainest one that is not empty.
        plain = [read for read in children if all(leaf.kind == "text/plain" for leaf in read)]
        spoken = [read for read in (*plain, *children) if any(leaf.body.strip() for leaf in read)]
        return (spoken or children)[0], attachments
    return [leaf for read in children for leaf in read], attachments


def _child(piece: bytes, default: str) -> _Part:
    if piece.startswith((b"\n", b"\r\n")):  # a part without a header
        return _Part(default, {}, "", "", piece[piece.index(b"\n") + 1 :])
    header, body = split_message(piece)
    return _part(header_fields(header, _WANTED), body, default)


def _pieces(body: bytes, boundary: bytes) -> Iterator[bytes]:
    """Yields the pieces between the boundary lines; the last piece may lack its end."""
    marker = b"--" + boundary
    start = None  # of the piece being read
    at = 0 if body.startswith(marker) else body.find(b"\n" + marker) + 1
    if at == 0 and not body.startswith(marker):
        return
    while True:
        line_end = body.find(b"\n", at)
        line_end = len(body) if line_end < 0 else line_end
        rest = body[at + len(marker) : line_end].strip() if line_end - at < len(marker) + 1000 else b"?"
        if rest in (b"", b"--"):
            if start is not None:
                yield body[start : at - 1]
            if rest:
                return
            start = line_end + 1
        following = body.find(b"\n" + marker, line_end)
        if following < 0:
            break
        at = following + 1
    if start is not None and start < len(body):
        yield body[start:]


def _leaf_text(part: _Part, escaped: bool) -> tuple[str, bool]:
    raw, clean = part.body, True
    if escaped and b">From " in raw:
        raw = _ESCAPED_FROM.sub(rb"\1", raw)
    if part.encoding == "quoted-printable":
        raw = binascii.a2b_qp(raw)
    elif part.encoding == "base64":
        raw = from_base64(raw)
    elif part.encoding not in ("", "7bit", "8bit", "binary"):
        clean = False
    text, decoded = decode_text(raw, part.parameters.get("charset", "").strip("'\" ").lower())
    return strip_html(text) if part.kind == "text/html" else text, clean and decoded
