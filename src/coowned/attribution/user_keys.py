"""From the spellings found in data to one key a person, with the mapping kept.

Merging two people under one key is safe for privacy: both are then protected together, at the price of some data.
Splitting one person over two keys is not safe: each key is bounded on its own, and the person appears twice as often
as the guarantee says. The default rules therefore merge whatever is plausibly one person.
"""

import contextlib
import csv
import dataclasses
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from coowned.attribution.mail_addresses import parse_addresses
from coowned.errors import InputError

_ADDRESS = re.compile(r"^[^\s@<>,;]+@[^\s@<>,;]+$")
_BRACKETED = re.compile(r"<\s*([^\s@<>,;]+@[^\s@<>,;]+)\s*>\s*$")
# A local part of nothing but dots, or with nothing but dots before its tag, is left as it is: who it names is unknown.
_PLAIN = r"^[\w+-]+(?:\.[\w+-]+)*@[\w-]+(?:\.[\w-]+)*$"  # nothing to unwrap
# What nobody sees, except what counts as a space: zero-width and directional marks, variation selectors, controls.
_INVISIBLE = r"[[\p{Default_Ignorable_Code_Point}\p{Cf}\p{Cc}]--\s]"
_ENCODED_DOMAIN = r"^[^\s@<>,;]+@(?:[^\s@<>,;]*\.)?xn--"
_DOTLESS_PROVIDERS = r"^([^@]*[^@.][^@]*)@(?:gmail|googlemail)\.com$"
_TAGGED = r"^([^+@]*[^+@.][^+@]*)\+[^@]*@"


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserKeyRules:
    """Which differences between two spellings do not make two people.

    Attributes:
      case: upper and lower case are one.
      whitespace: spaces around a key are dropped, runs inside it are one space.
      unicode: compatibility forms are one (NFKC), and invisible and control characters are removed.
      bracketed_addresses: "Bob <bob@x.org>" is bob@x.org, as is whatever else names one address in the ways of mail:
        "mailto:bob@x.org", "Bob (bob@x.org)", "Bob [bob@x.org]", quotes, comments, a dot or semicolon at the end.
      plus_tags: bob+lists@x.org is bob@x.org.
      international_domains: bob@xn--mnchen-3ya.de is bob@münchen.de.
      dots: b.o.b@gmail.com is bob@gmail.com, for the providers that ignore dots.
      author_names: "Müller, Jean-Luc" is "jean luc muller": order, accents and punctuation are one; a key with an @
        in it is no name and stays.
      initials: with author_names, "Jean-Luc Müller" is "j muller": merges many people, splits hardly any.

    Guarantees:
      - The key of a key is that key.                                   (test_canonical_is_idempotent)
      - More rules switched on never split what fewer rules merged.     (test_rules_only_merge)

    Example:
      >>> UserKeyRules().canonical(["Bob <BOB+news@x.org>", " bob@X.org", "Carol  Jones"]).to_list()
      ['bob@x.org', 'bob@x.org', 'carol jones']
    """

    case: bool = True
    whitespace: bool = True
    unicode: bool = True
    bracketed_addresses: bool = True
    international_domains: bool = True
    plus_tags: bool = True
    dots: bool = True
    author_names: bool = False
    initials: bool = False

    @classmethod
    def exact(cls) -> "UserKeyRules":
        """Every spelling is a person of its own: right for keys made by a database."""
        off = {field.name: False for field in dataclasses.fields(cls)}
        return cls(**off)

    @classmethod
    def email(cls, *, plus_tags: bool = True, dots: bool = True) -> "UserKeyRules":
        """The rules for mail addresses; switch off the two a mail provider of yours does not follow."""
        return cls(plus_tags=plus_tags, dots=dots)

    @classmethod
    def authors(cls, *, initials: bool = False) -> "UserKeyRules":
        """The rules for names of authors."""
        return cls(author_names=True, initials=initials)

    def canonical(self, spellings: pl.Series | pa.Array | Sequence[str]) -> pl.Series:
        """The key of each spelling: a text series of the same length."""
        keys = pl.Series("key", spellings).cast(pl.String)
        if self.unicode:
            keys = _where(keys, keys.str.contains(_INVISIBLE), _without_invisible)
        if self.unicode or self.case:
            keys = _where_not_ascii(keys, self._fold)
        if self.case:
            keys = keys.str.to_lowercase()
        if self.whitespace:
            keys = keys.str.replace_all(r"\s+", " ").str.strip_chars()
        if self.bracketed_addresses:
            keys = _where(keys, keys.str.contains("@", literal=True) & ~keys.str.contains(_PLAIN), _unwrap_address)
        if self.international_domains:
            keys = _where(keys, keys.str.contains(_ENCODED_DOMAIN), self._decode_domain)
        if self.plus_tags or self.dots:
            keys = _where(keys, _is_address(keys), self._canonical_address)
        if self.author_names:
            keys = self._canonical_name(keys)
        return keys

    def _fold(self, part: pl.Series) -> pl.Series:
        if not self.case:
            return part.str.normalize("NFKC")
        return pl.Series("key", [_fold_case(key, self.unicode) for key in part], dtype=pl.String)

    def _decode_domain(self, addresses: pl.Series) -> pl.Series:
        decoded = []
        for key in addresses:
            while (found := _decode_domain(key)) != key:  # each time shorter
                key = _fold_case(found, self.unicode) if self.case else found
                key = unicodedata.normalize("NFKC", key) if self.unicode else key
            decoded.append(key)
        result = pl.Series("key", decoded, dtype=pl.String)
        readable = _is_address(result) & ~result.str.contains(_INVISIBLE)
        return pl.select(pl.when(readable).then(result).otherwise(addresses)).to_series()

    def _canonical_address(self, address: pl.Series) -> pl.Series:
        if self.plus_tags:
            address = address.str.replace(_TAGGED, "${1}@")
        if self.dots:
            local = address.str.extract(_DOTLESS_PROVIDERS).str.replace_all(".", "", literal=True)
            address = pl.select(pl.coalesce(local + "@gmail.com", address)).to_series()
        return address

    def _canonical_name(self, keys: pl.Series) -> pl.Series:
        name = _where_not_ascii(keys, lambda part: part.str.normalize("NFKD"))
        has_at = name.str.contains("@", literal=True)
        name = _where(name, name.str.contains(",", literal=True), _last_name_last)
        name = _where_not_ascii(name, lambda part: part.str.replace_all(r"\p{M}", ""))
        words = name.str.replace_all(r"[^\p{L}\p{N}]+", " ").str.strip_chars()
        words = _where_not_ascii(words, lambda part: part.str.normalize("NFKC"))
        if self.initials:
            words = words.str.replace(r"^(\w)\S* (?:.* )?(\S+)$", "${1} ${2}")
        # A name of nothing but marks keeps its own text: an empty key would be nobody.
        return pl.select(pl.when((words == "") | has_at).then(keys).otherwise(words)).to_series()


@dataclasses.dataclass(frozen=True)
class Aliases:
    """Keys that stand for other users: several addresses of one person, or a list address for its members.

    Example:
      >>> aliases = Aliases.from_pairs([("bob@home", "bob@work"), ("team@x", "ann@x"), ("team@x", "bob@work")])
      >>> aliases.users_of["team@x"]
      ('ann@x', 'bob@work')
    """

    users_of: Mapping[str, tuple[str, ...]]

    @classmethod
    def from_pairs(cls, pairs: Iterable[tuple[str, str]]) -> "Aliases":
        """From (key, user) pairs; a key in several pairs stands for all their users."""
        users_of: dict[str, list[str]] = {}
        for key, user in pairs:
            if not str(key).strip() or not str(user).strip():
                raise InputError(f"an alias needs a key and a user, not ({key!r}, {user!r}); give both or remove it")
            users_of.setdefault(str(key), []).append(str(user))
        return cls({key: tuple(users) for key, users in users_of.items()})

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Aliases":
        """Reads a CSV file with the columns `key,user`; a key on several lines stands for all their users."""
        file = Path(path)
        try:
            with file.open(newline="", encoding="utf-8-sig") as opened:
                rows = csv.DictReader(opened, strict=True)
                if rows.fieldnames is None or not {"key", "user"} <= set(rows.fieldnames):
                    found = ",".join(rows.fieldnames or [])
                    raise InputError(f"{file}, line 1: expected the header key,user, not {found!r}")
                pairs = []
                for row in rows:
                    key, user = row["key"], row["user"]
                    if not key or not key.strip() or not user or not user.strip():
                        raise InputError(
                            f"{file}, line {rows.line_num}: the key or user is missing; give both or remove the line"
                        )
                    pairs.append((key, user))
        except OSError as error:
            raise InputError(f"{file}: cannot be read ({error.strerror}); check the path of the alias file") from error
        except UnicodeDecodeError as error:
            raise InputError(f"{file}: not UTF-8 ({error.reason}); save the aliases as CSV in UTF-8") from error
        except csv.Error as error:
            raise InputError(f"{file}: not CSV ({error}); save the aliases as CSV in UTF-8") from error
        return cls.from_pairs(pairs)

    def canonical(self, rules: UserKeyRules) -> "Aliases":
        """The same aliases between canonical keys, chains followed to their end; a circle is an error."""
        pairs = [(key, user) for key, users in self.users_of.items() for user in users]
        keys = rules.canonical(pl.Series([key for key, _ in pairs], dtype=pl.String))
        users = rules.canonical(pl.Series([user for _, user in pairs], dtype=pl.String))
        return Aliases(_resolve(Aliases.from_pairs(zip(keys, users, strict=True)).users_of))


@dataclasses.dataclass(frozen=True)
class UserMapping:
    """Which spelling became which users: the answer to "why are these two the same user?".

    Example:
      >>> from coowned import from_table
      >>> examples = from_table({"users": [["Bob@x.org"], ["bob@x.org "], ["carol@x.org"]]})
      >>> examples.user_mapping.spellings_of("bob@x.org")
      ['Bob@x.org', 'bob@x.org ']
    """

    spellings: pa.Array  # (num_spellings,) large_string, each once, as found
    indptr: np.ndarray  # (num_spellings + 1,) int64
    users: np.ndarray  # (…,) the users each spelling stands for: one, or several for a list address
    user_keys: pa.Array  # (num_users,) large_string

    def users_of(self, spelling: str) -> list[str]:
        """The keys that a spelling became; empty where the data do not have it."""
        row = self.spellings.index(pa.scalar(spelling, self.spellings.type)).as_py()
        if row < 0:
            return []
        return self.user_keys.take(pa.array(self.users[self.indptr[row] : self.indptr[row + 1]])).to_pylist()

    def spellings_of(self, user_key: str) -> list[str]:
        """Every spelling that became this user, in the order found."""
        user = self.user_keys.index(pa.scalar(str(user_key), self.user_keys.type)).as_py()
        if user < 0:
            return []
        rows = np.searchsorted(self.indptr, np.flatnonzero(self.users == user), side="right") - 1
        return self.spellings.take(pa.array(rows)).to_pylist()

    def without(self, stays: np.ndarray) -> "UserMapping":
        """The mapping with only the users for which stays (num_users,) is true."""
        kept = stays[self.users]
        before = np.concatenate([[0], np.cumsum(kept)])
        labels = np.cumsum(stays) - 1
        return UserMapping(
            self.spellings, before[self.indptr], labels[self.users[kept]], self.user_keys.filter(pa.array(stays))
        )


def read_keys(path: str | os.PathLike[str]) -> list[str]:
    """Reads user keys, one a line; blank lines and lines that start with # are passed over."""
    file = Path(path)
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror}); check the path of the key file") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: not UTF-8 at byte {error.start}; save the keys as plain UTF-8 text") from error
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def _resolve(direct: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Follows every key to the users who stand for nobody else; a key may be its own member."""
    resolved: dict[str, tuple[str, ...]] = {}
    for start in direct:
        path = (
            {} if start in resolved else {start: iter(direct[start])}
        )  # what is being followed, with members still to see
        while path:
            at, members = next(reversed(path.items()))
            deeper = next((user for user in members if user != at and user in direct and user not in resolved), None)
            if deeper is None:
                found = [(user,) if user == at else resolved.get(user, (user,)) for user in direct[at]]
                resolved[at] = tuple(dict.fromkeys(user for part in found for user in part))
                del path[at]
            elif deeper in path:
                circle = " -> ".join([*list(path)[list(path).index(deeper) :], deeper])
                raise InputError(f"the aliases form a cycle: {circle}; remove one of these lines")
            else:
                path[deeper] = iter(direct[deeper])
    return resolved


def _fold_case(key: str, unicode: bool) -> str:
    """Full case folding: ß is ss, every sigma is one, and so is every i, with a dot (İ) or without (ı).

    With unicode, until neither folding nor NFKC changes the key.
    """
    if not unicode:
        return _one_i(key.casefold())
    # The order of the Unicode standard's compatibility caseless match (section 3.13, D146).
    folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFD", key).casefold()).casefold()
    folded = _one_i(unicodedata.normalize("NFKC", folded))
    return folded if folded == key else _fold_case(folded, unicode)


def _one_i(key: str) -> str:
    return key.replace("i\u0307", "i").replace("\u0131", "i")


def _decode_domain(address: str) -> str:
    """The domain's labels as people write them (RFC 3492); one that cannot be decoded stays."""
    local, _, domain = address.rpartition("@")
    labels = domain.split(".")
    for position, label in enumerate(labels):
        if label.startswith("xn--"):
            with contextlib.suppress(UnicodeError):
                labels[position] = label[4:].encode("ascii").decode("punycode")
    return f"{local}@{'.'.join(labels)}"


def _is_address(keys: pl.Series) -> pl.Series:
    """Whether a key is an address, and is one still once its compatibility forms are one."""
    compatible = _where_not_ascii(keys, lambda part: part.str.normalize("NFKC"))
    return keys.str.contains(_ADDRESS.pattern) & compatible.str.contains(_ADDRESS.pattern)


def _where(keys: pl.Series, mask: pl.Series, change: Callable[[pl.Series], pl.Series]) -> pl.Series:
    """Applies a change to the masked part only: most keys need none of the dearer rules."""
    if not mask.any():
        return keys
    return keys.clone().scatter(mask.arg_true(), change(keys.filter(mask)))  # scatter writes in place


def _where_not_ascii(keys: pl.Series, change: Callable[[pl.Series], pl.Series]) -> pl.Series:
    return _where(keys, keys.str.len_bytes() != keys.str.len_chars(), change)


def _without_invisible(keys: pl.Series) -> pl.Series:
    # A key of nothing else keeps its own text: an empty key would be nobody.
    return pl.select(
        pl.when((left := keys.str.replace_all(_INVISIBLE, "")) == "").then(keys).otherwise(left)
    ).to_series()


def _unwrap_address(keys: pl.Series) -> pl.Series:
    return pl.Series("key", [_address_in(key) for key in keys], dtype=pl.String)


def _address_in(key: str) -> str:
    """The one address that a key names; the key itself where it names none or several."""
    bracketed = _BRACKETED.search(key)
    found = {bracketed[1]} if bracketed else set(parse_addresses(key).addresses)
    address = found.pop() if len(found) == 1 else key
    return _address_in(address) if len(address) < len(key) and _ADDRESS.fullmatch(address) else key


def split_addresses(spellings: pl.Series) -> tuple[np.ndarray, pl.Series]:
    """The (spellings + 1,) ends and the names of everyone in each spelling, read as the value of an address header.

    >>> ends, names = split_addresses(pl.Series(["Ann <ann@x>, bob@x", "Smith, John"]))
    >>> ends.tolist(), names.to_list()
    ([0, 2, 3], ['ann@x', 'bob@x', 'Smith, John'])
    """
    several = spellings.str.contains("@", literal=True) & ~spellings.str.contains(_PLAIN)
    names: list[Any] = [[spelling] for spelling in spellings]
    for row in several.arg_true():
        names[row] = list(parse_addresses(names[row][0]).addresses) or names[row]
    ends = np.concatenate([[0], np.cumsum([len(entry) for entry in names], dtype=np.int64)])
    return ends, pl.Series([name for entry in names for name in entry], dtype=pl.String)


def _last_name_last(names: pl.Series) -> pl.Series:
    return names.str.replace(r"(?s)^([^,]*),\s*([^,]*)(.*)$", "${2} ${1}${3}").str.strip_chars()
