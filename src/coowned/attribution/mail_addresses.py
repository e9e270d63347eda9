"""Parsing of address headers: every address of From, To, Cc and the like, well-formed or not."""

import re
import urllib.parse
from typing import NamedTuple

from coowned.attribution.mail_headers import decode_words

_FRAME = "'`{}\u2018\u2019\u201a\u201b\u201c\u201d\u201e\u201f\xab\xbb\u2039\u203a"  # quotes around an address
_ATOM = rf"[^\s<>@,;:\"()\[\]\\{_FRAME}]+"
# One well-formed mailbox without comment, route or quoted local part, up to the next comma: nearly all there are.
_PLAIN_MAILBOX = re.compile(
    rf"\s*+(?:(?:\"[^\"\\]*\"|[^<>@,;:\"()\[\]\\]+)*+<\s*+({_ATOM}@{_ATOM})\s*+>|({_ATOM}@{_ATOM}))\s*+(?:,|$)"
)
_WRITTEN_AT = re.compile(r"(\S+) at (\S+\.\S+)", re.IGNORECASE)  # how list archives hide addresses from robots
_NO_LIST_GIVEN = re.compile(
    r"(?:undisclosed|unlisted|suppressed|hidden)[\s_-]*(?:recipients?|list)|recipients? list not shown", re.I
)
_QUOTED_END = re.compile(r'(?:[^"\\]|\\.)*+"', re.DOTALL)
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*+)"', re.DOTALL)
_ALL_CLOSED = re.compile(r'[^"]*+(?:"(?:[^"\\]|\\.)*+"[^"]*+)*+', re.DOTALL)
_WORD = re.compile(r'(?:"(?:[^"\\]|\\.)*+"|[^\s"])++', re.DOTALL)  # up to white space outside of quotes
_LONE_QUOTE = "\ue000"  # stands for a quote in a word that never closes
_LOCAL_WORD = r'(?:"(?:[^"\\]|\\.)*+"|[^\s<>@,;:"()\[\].]++)'
_WITH_QUOTES = re.compile(rf"({_LOCAL_WORD}(?:\.{_LOCAL_WORD})*+)@([^\s@\"]+)", re.DOTALL)
_PAIR = re.compile(r"\\(.)", re.DOTALL)
# The relays of a source route, in front of the address: they carry a message and are nobody.
_ROUTE = re.compile(r"(?:(?<=[\s,;<])|^)@[^\s@,:;<>]++(?:\s*+,\s*+@[^\s@,:;<>]++)*+\s*+:(?=\s*+[^\s@,:;<>]++@)")
_LINK = re.compile(r"mailto:([^\s<>@]*+@?[^\s<>?]*+)(?:\?[^\s<>]*+)?", re.IGNORECASE)
_PARENTHESIS = re.compile(r"\\.|[()]", re.DOTALL)
_GLUED = re.compile(r"[^\s<>@,;:.]")
_DOT_ATOM = re.compile(r"[^\s<>@,;:\"()\[\]\\]+")


class AddressList(NamedTuple):
    """The addresses of one header value, and what in it could not be read."""

    addresses: tuple[str, ...]  # the addresses as written; anything else is kept as lower-case text
    unreadable: int  # how many of them are not addresses
    unnamed: bool  # the header says that there are recipients it does not list


def parse_addresses(value: str) -> AddressList:
    """Parses every address of a header value; nobody is dropped because of how the value is written.

    Guarantees:
      - An entry that is no address is kept as its own text, unless it says that it
        names nobody.                                   (test_unparsable_entries_are_kept)
      - Damage around an address does not hide it.      (test_damage_hides_nobody)
    Cost: linear in the value.

    Example:
      >>> parse_addresses('"Doe, Ann" <ann@x.org>, team: bob@x.org, carol@x.org;, broken@').addresses
      ('ann@x.org', 'bob@x.org', 'carol@x.org', 'broken@')
      >>> parse_addresses("undisclosed-recipients:;")
      AddressList(addresses=(), unreadable=0, unnamed=True)

    References: RFC 5322, section 3.4.
    """
    found: list[str] = []
    at = 0
    value = _without_routes(value)
    while at < len(value):
        match = _PLAIN_MAILBOX.match(value, at)
        if match is None:
            return _Reader(value).read()
        found.append(match.group(1) or match.group(2))
        at = match.end()
    if any(address[-1] == "." for address in found):
        return _Reader(value).read()
    return AddressList(tuple(found), 0, False)


def named_addresses(value: str) -> list[tuple[str, str]]:
    """Returns (display name, address) of each address of a header value that stands with a name.

    Guarantees:
      - The addresses are among those of `parse_addresses`.   (test_named_addresses_are_those_parsed)

    >>> named_addresses('"Doe, Ann" <ann@x.org>, bob@x.org (Bob Lee), carol@x.org')
    [('Doe, Ann', 'ann@x.org'), ('Bob Lee', 'bob@x.org')]
    """
    reader = _Reader(_without_routes(value))
    reader.read()
    return reader.names


class _Reader:
    """A parser that reads one header value character by character, each once; brackets that never close are text."""

    def __init__(self, value: str, *, decoded: bool = False):
        self.value = value
        self.decoded = decoded  # encoded words have been decoded already
        self.found: list[str] = []
        self.names: list[tuple[str, str]] = []  # display name and address
        self.unreadable = 0
        self.unnamed = False
        self.quotes_close = self.comments_close = True  # until one does not
        self.last_angle, self.last_bracket = value.rfind(">"), value.rfind("]")
        self.group_start: int | None = None  # addresses found when the group began
        self.clear()

    def clear(self) -> None:
        self.text: list[str] = []  # outside of angle brackets and comments, quotes kept
        self.angles: list[str] = []
        self.comments: list[str] = []

    def read(self) -> AddressList:
        at = 0
        while at < len(self.value):
            at = self.take(self.value[at], at)
        self.finish()
        return AddressList(tuple(self.found), self.unreadable, self.unnamed)

    def take(self, character: str, at: int) -> int:
        """Consumes the construct that begins with this character; returns the position after it."""
        value, after = self.value, at + 1
        if character == '"':
            return self.take_quoted(at)
        if character == "(" and self.comments_close:
            return self.take_comment(at)
        if character == "<" and after <= self.last_angle:
            return self.take_angle(after)
        if character == "[" and after <= self.last_bracket and value[at - 1 : at] == "@":
            after = value.find("]", after) + 1
            self.text.append(value[at:after])
        elif character == ":":
            self.begin_group()
        elif character in ",;":
            self.finish()
            if character == ";" and self.group_start is not None:
                self.unnamed |= self.group_start == len(self.found)
                self.group_start = None
        elif character in "<>" or (character in "()" and not _is_inside_a_word(value, at, after)):
            self.text.append(" ")
        else:
            self.text.append(character)
        return after

    def take_quoted(self, at: int) -> int:
        value, after = self.value, at + 1
        closed = _QUOTED_END.match(value, after) if self.quotes_close else None
        if closed is None:
            self.quotes_close = False
            self.text.append(_LONE_QUOTE if _is_inside_a_word(value, at, after) else " ")
            return after
        self.text.append(value[at : closed.end()])
        return closed.end()

    def take_comment(self, at: int) -> int:
        """Consumes a comment and the comments directly after it."""
        value, after = self.value, at + 1
        end = _end_of_comment(value, at)
        if end is None:
            self.comments_close = False
            self.text.append("(" if _is_inside_a_word(value, at, after) else " ")
            return after
        self.comments.append(value[after : end - 1])
        while value[end : end + 1] == "(" and (following := _end_of_comment(value, end)) is not None:
            self.comments.append(value[end + 1 : following - 1])
            end = following
        if _is_inside_a_word(value, at, end):  # b(o)b@x.org is not bb@x.org
            self.text.append(value[at:end])
        return end

    def take_angle(self, after: int) -> int:
        following = self.value.find("<", after)
        end = self.value.find(">", after, following if following >= 0 else len(self.value))
        if end < 0:
            self.text.append(" ")
            return after
        self.angles.append(self.value[after:end])
        return end + 1

    def begin_group(self) -> None:
        """Drops the name of a group, which is not a person, unless it contains an address."""
        name = "".join(self.text)
        if "@" in name or self.angles:
            self.finish()
        else:
            self.unnamed |= _NO_LIST_GIVEN.search(name) is not None
        self.clear()
        self.group_start = len(self.found)

    def finish(self) -> None:
        """Parses the text between two separators as one entry, which may still contain several addresses."""
        text, angles, comments = "".join(self.text), self.angles, self.comments
        self.clear()
        before = len(self.found)
        for angle in angles:
            self.take_words(_without_route(angle))
        if angles:
            # A display name in quotes is well-formed and ignored; an address outside the brackets is not.
            self.take_words(_QUOTED.sub(" ", text))
        else:
            text = _close_up(text)
            self.take_words(text)
            if len(self.found) == before:  # '"ann@x.org"'
                self.take_words(" ".join(_PAIR.sub(r"\1", quoted) for quoted in _QUOTED.findall(text)))
            if len(self.found) == before:  # "Bob (bob@x.org)"
                self.take_words(" ".join(comments))
        if len(self.found) == before:
            self.take_unreadable(" ".join(angles).strip() or text, comments)
        elif len(self.found) == before + 1 and (name := _display_name(text, comments, bracketed=bool(angles))):
            self.names.append((name, self.found[-1]))

    def take_words(self, text: str) -> None:
        """Takes every word with an @: an address, or a word of its own where quotes are in the middle of one."""
        for word in _WORD.findall(_with_closed_quotes(_close_up(text))):
            if '"' in word:
                parts = [_without_quotes(word)] if "@" in _QUOTED.sub("", word) else []
            else:
                parts = [part for part in word.replace(",", " ").replace(";", " ").split() if "@" in part]
            for part in parts:
                self.take_address(part)

    def take_address(self, word: str) -> None:
        address = word.strip(_FRAME).rstrip(".").strip(_FRAME)
        if address.startswith("[") or "@[" not in address:  # "Bob [bob@x.org]", "Bob [SMTP:bob@x.org]"
            address = address.strip("[]")
        malformed = _LONE_QUOTE in address
        address = address.replace(_LONE_QUOTE, '"')
        local, _, domain = address.rpartition("@")
        if "\\" in local and _DOT_ATOM.fullmatch(plain := _PAIR.sub(r"\1", local)):
            local, address = plain, f"{plain}@{domain}"
        well_formed = _QUOTED.fullmatch(local) if '"' in local else not {"@", "(", ")"} & set(local)
        if malformed or not local or not domain or not well_formed or '"' in domain:
            self.unreadable += 1
            address = address.lower()
        self.found.append(address)

    def take_unreadable(self, text: str, comments: list[str]) -> None:
        """Takes an entry without any address: its text becomes the key, so that whoever it names is still counted."""
        text = " ".join(text.replace('"', " ").replace(_LONE_QUOTE, '"').split())
        if not text and not self.found and not self.unnamed:
            text = " ".join(" ".join(comments).split())
        if not text:
            return
        if "=?" in text and not self.decoded:
            # Some senders encode whole addresses, against the standard.
            inner = _Reader(decode_words(text), decoded=True).read()
            self.found.extend(inner.addresses)
            self.unreadable += inner.unreadable
            self.unnamed |= inner.unnamed
            return
        written = _WRITTEN_AT.fullmatch(text)
        if written:
            self.found.append(f"{written.group(1)}@{written.group(2)}")
        elif _NO_LIST_GIVEN.fullmatch(text):
            self.unnamed = True
        elif any(character.isalnum() for character in text):
            self.found.append(text.lower())
            self.unreadable += 1


def _display_name(text: str, comments: list[str], *, bracketed: bool) -> str:
    """Returns the name before an address in brackets, else what its comments say; "" for none."""
    before = _QUOTED.sub(lambda quoted: _PAIR.sub(r"\1", quoted[1]), text) if bracketed else ""
    return " ".join((before.replace(_LONE_QUOTE, '"').strip(" ()") or " ".join(comments)).split())


def _close_up(text: str) -> str:
    """Removes spaces around the @: `ann @ x.org` becomes ann@x.org."""
    return " ".join(text.split()).replace(" @", "@").replace("@ ", "@")


def _with_closed_quotes(text: str) -> str:
    """Balances quotes: an unclosed one is marked inside a word, and becomes a space elsewhere."""
    closed = _ALL_CLOSED.match(text).end()  # type: ignore[union-attr]
    if closed == len(text):
        return text
    marked = [
        character if character != '"' else _LONE_QUOTE if _is_inside_a_word(text, at, at + 1) else " "
        for at, character in enumerate(text[closed:], start=closed)
    ]
    return text[:closed] + "".join(marked)


def _without_quotes(word: str) -> str:
    r"""Removes quotes: `"b\ob".x@y.org` becomes bob.x@y.org; a word with quotes elsewhere stays as it is."""
    found = _WITH_QUOTES.fullmatch(word)
    if found is None:
        return word
    local = _QUOTED.sub(lambda quoted: _PAIR.sub(r"\1", quoted[1]), found[1])
    if not _DOT_ATOM.fullmatch(local):
        local = '"' + local.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"{local}@{found[2]}"


def _is_inside_a_word(value: str, begin: int, end: int) -> bool:
    """Returns whether the word continues on both sides, where neither a comment nor a quote is allowed."""
    return all(_GLUED.fullmatch(character) for character in (value[max(begin - 1, 0) : begin], value[end : end + 1]))


def _without_routes(value: str) -> str:
    """Removes routes, and makes of a link (`mailto:ann%2Btag@x.org`) the address that it names."""
    if ":" not in value:
        return value
    return _ROUTE.sub("", _LINK.sub(lambda link: urllib.parse.unquote(link[1]), value))


def _without_route(angle: str) -> str:
    """Removes a route: `@relay:ann@x.org` becomes ann@x.org."""
    if angle.lstrip().startswith("@"):
        return angle.rpartition(":")[2] if angle.rpartition(":")[2].strip() else angle
    return angle


def _end_of_comment(value: str, at: int) -> int | None:
    """Returns the position after the comment that opens at `at`, nested comments included; None if it never closes."""
    depth = 0
    for found in _PARENTHESIS.finditer(value, at):
        if found.group() == "(":
            depth += 1
        elif found.group() == ")":
            depth -= 1
            if not depth:
                return found.end()
    return None
