"""Suggestions of keys that may belong to one person, from metadata alone, as an alias file to review by hand.

A merge that is missed breaks privacy: each key is bounded separately, and the person is in more examples than the
guarantee says. A wrong merge costs only data: two people share one bound. When in doubt, keep a proposal.
"""

import collections
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import polars as pl
from rapidfuzz import fuzz

from coowned import validate
from coowned.attribution.examples import AttributedExamples
from coowned.attribution.graph import AttributionGraph
from coowned.attribution.user_keys import UserKeyRules

_SCHEMA = {
    "key": pl.String,
    "user": pl.String,
    "score": pl.Float64,
    "examples_of_key": pl.Int64,
    "examples_of_user": pl.Int64,
    "lost_if_wrongly_merged": pl.Int64,
    "exposed_if_wrongly_apart": pl.Int64,
}
_LOOK_ALIKE = 0.95  # the score of keys that look the same
# Letters of other alphabets and digits that look like a Latin letter, in lower case or in upper case.
_LATIN = {
    "a": "аαɑ", "b": "вβ", "c": "сϲ", "d": "ԁ", "e": "еεҽ", "f": "ƒ", "g": "ɡց", "h": "нһհ", "j": "јʝ", "k": "кκ",
    "l": "1iіıιӏן|", "m": "мμ", "n": "ηոп", "o": "0оοօσ", "p": "рρ", "q": "ԛզ", "r": "гɾ", "s": "ѕꜱ", "t": "тτ",
    "u": "υսʋ", "v": "νѵ", "w": "ԝωѡ", "x": "хχ", "y": "уγү", "z": "ζᴢ",
}  # fmt: skip
_SKELETON = str.maketrans({other: latin for latin, others in _LATIN.items() for other in others})
_LARGEST_BLOCK = 200  # keys that share a word; more common words carry no information
_SHORTEST_WORD = 3  # letters; shorter words are initials
# Names of offices and programs, which do not identify a person.
_IMPERSONAL = frozenset(
    (
        "abuse", "account", "accounts", "admin", "alerts", "all", "billing", "bot", "contact", "daemon", "hello",
        "help", "hostmaster", "info", "jobs", "list", "mail", "mailer", "marketing", "news", "newsletter", "noreply",
        "notification", "notifications", "office", "postmaster", "reply", "root", "sales", "security", "service",
        "staff", "support", "system", "team", "test", "user", "webmaster",
    )
)  # fmt: skip


def suggest_aliases(
    examples: AttributedExamples, *, names: Mapping[str, Iterable[str]] | None = None, threshold: float = 0.85
) -> pl.DataFrame:
    """Suggests pairs of keys that may be one person: key, user, score, and the cost of a wrong decision either way.

    Every key is compared with those that share a word of their address or name, or that look like it (a Cyrillic о in
    bоb@x.org); it is proposed as an alias of the most
    similar key with more examples. The proposals can be read by `Aliases.read` as they are.

    Args:
      names: further names of users by key, such as display names; those in the spellings of the data are known.
      threshold: the least score, from 0 to 1, of a proposal.

    Returns a table, highest score first:
      key, user: "key is another key of user".
      score: similarity of addresses and names; 1 where a full name is the same, at least 0.95 for keys that look alike.
      examples_of_key, examples_of_user: in how many examples each is.
      lost_if_wrongly_merged: if they are two people, at most so many fewer examples can be selected, at any bound.
      exposed_if_wrongly_apart: if they are one person, at most so many examples are selected beyond their bound.

    Guarantees:
      - Nothing but keys, spellings and the graph is read.       (test_suggestions_do_not_read_content)
      - No key is proposed twice, and no user is a key.          (test_suggestions_are_stars)

    Example:
      >>> from coowned import from_table
      >>> rows = [["Bob Stone <bob.stone@work.org>"], ["bob.stone@work.org"], ["bstone@home.org"], ["ann@x.org"]]
      >>> suggest_aliases(from_table({"users": rows})).select("key", "user", "score").rows()
      [('bstone@home.org', 'bob.stone@work.org', 0.9)]
    """
    validate.in_range(0, 1, threshold=threshold)
    graph = examples.graph
    keys = examples.user_keys.to_pylist()
    people = _people(keys, _names(examples, names or {}))
    weight = graph.examples_per_user
    rank = np.empty(len(keys), dtype=np.int64)  # heavier users first, ties by key
    rank[sorted(range(len(keys)), key=lambda user: (-weight[user], keys[user]))] = np.arange(len(keys))
    similar: dict[int, list[tuple[float, int]]] = collections.defaultdict(list)
    for one, other in _candidates(people):
        score = people[one].similarity(people[other])
        if score >= threshold:
            light, heavy = (one, other) if rank[one] > rank[other] else (other, one)
            similar[light].append((score, heavy))
    proposed: dict[int, tuple[float, int]] = {}
    for user in sorted(similar, key=lambda user: rank[user]):
        standing = [(score, -int(rank[heavy]), heavy) for score, heavy in similar[user] if heavy not in proposed]
        if standing:
            score, _, heavy = max(standing)
            proposed[user] = score, heavy
    rows = []
    for light, (score, heavy) in proposed.items():
        counts = int(weight[light]), int(weight[heavy])
        rows.append((keys[light], keys[heavy], round(score, 3), *counts, *_costs(graph, light, heavy)))
    return pl.DataFrame(rows, _SCHEMA, orient="row").sort(["score", "key"], descending=[True, False])


class _Person(NamedTuple):
    """The key, digits and names by which a user is compared with others."""

    looks: str  # the key in Latin letters that look like its own
    number: str  # the digits of the key
    own: tuple[str, ...]  # the words of the key; empty if it contains no name
    names: set[tuple[str, ...]]  # the words of full names

    @property
    def known_as(self) -> set[tuple[str, ...]]:
        return self.names | ({self.own} if self.own else set())

    def blocks(self) -> Iterator[str]:
        """Yields the blocking keys: only users who share one (the look of the key, or a word) are compared."""
        yield f"{self.looks} (all of it)"
        for words in self.known_as:
            yield from (word for word in words if len(word) >= _SHORTEST_WORD)
            yield from _shortened(words)

    def similarity(self, other: "_Person") -> float:
        if self.names & other.names:
            return 1.0
        if self.looks == other.looks:
            return _LOOK_ALIKE
        if self.number and other.number and self.number != other.number:
            return 0.0
        pairs = itertools.product(self.known_as, other.known_as)
        return max((_similarity(one, two) for one, two in pairs), default=0.0)


def look_of(key: str) -> str:
    """Returns the key with lookalike characters replaced by Latin letters; equal for keys that a reader may confuse.

    >>> look_of("b\u043eb@x.org") == look_of("bob@x.org") != look_of("ann@x.org")
    True
    """
    return key.translate(_SKELETON).replace("rn", "m").replace("vv", "w")


def _people(keys: list[str], names: list[set[str]]) -> list[_Person]:
    locals_ = [key.rpartition("@")[0] or key for key in keys]
    texts = list({*locals_, *itertools.chain.from_iterable(names)})
    plain = UserKeyRules.authors().canonical([text.replace("@", " ") for text in texts])
    # The words of a name in alphabetical order, without accents, marks and digits.
    words = {text: tuple(sorted(re.findall(r"[^\W\d_]+", name))) for text, name in zip(texts, plain, strict=True)}
    people = []
    for key, local, known in zip(keys, locals_, names, strict=True):
        number = "".join(re.findall(r"\d+", local))
        made_by_a_database = bool(number) and local == local.upper()
        own = () if made_by_a_database or _IMPERSONAL.intersection(words[local]) else words[local]
        people.append(_Person(look_of(key), number, own, {words[name] for name in known if len(words[name]) > 1}))
    return people


@functools.lru_cache(maxsize=1 << 16)
def _shortened(words: tuple[str, ...]) -> frozenset[str]:
    """Returns the ways to write a person's names in an address: bobstone, stonebob, bstone, bobs, ..."""
    if len(words) == 1:
        return frozenset(words if len(words[0]) >= _SHORTEST_WORD else ())
    pairs = itertools.permutations(words, 2)
    return frozenset(form for a, b in pairs for form in (a + b, a[0] + b, a + b[0]) if len(form) > _SHORTEST_WORD)


def _similarity(one: tuple[str, ...], other: tuple[str, ...]) -> float:
    if one == other:
        return 1.0 if len(one) > 1 else 0.9  # one word, at two providers, is weaker evidence
    # Two full names with one initial and one surname are two people; a full name and its short form are one.
    if min(map(len, (one, other, *one, *other))) == 1 and _shortened(one) & _shortened(other):
        return 0.9
    if len(one) == len(other) > 1:
        return fuzz.ratio(" ".join(one), " ".join(other)) / 100
    return 0.9 * fuzz.ratio(" ".join(one), " ".join(other)) / 100


def _names(examples: AttributedExamples, known: Mapping[str, Iterable[str]]) -> list[set[str]]:
    """Returns the names of each user: those given, and those beside an address in the data ("Bob <bob@x.org>")."""
    mapping = examples.user_mapping
    found = [set(known.get(key, ())) for key in mapping.user_keys.to_pylist()]
    for row in np.flatnonzero(np.diff(mapping.indptr) == 1):
        name = re.match(r'\s*"?([^"<(\[]+?)"?\s*[<(\[].*@', mapping.spellings[int(row)].as_py())
        if name:
            found[int(mapping.users[mapping.indptr[row]])].add(name[1])
    return found


def _candidates(people: list[_Person]) -> set[tuple[int, int]]:
    """Returns pairs of users that share a blocking key which is not too common."""
    blocks: dict[str, list[int]] = collections.defaultdict(list)
    for user, person in enumerate(people):
        for word in set(person.blocks()):
            blocks[word].append(user)
    rare = (members for members in blocks.values() if len(members) <= _LARGEST_BLOCK)
    return {pair for members in rare for pair in itertools.combinations(members, 2)}


def _costs(graph: AttributionGraph, one: int, other: int) -> tuple[int, int]:
    """Returns upper bounds on the examples that a wrong merge would lose, and that a missed merge would expose."""
    indptr, by_user = graph.by_user
    own, theirs = (by_user[indptr[user] : indptr[user + 1]] for user in (one, other))
    smaller = min(len(own), len(theirs))
    return smaller, smaller - len(np.intersect1d(own, theirs, assume_unique=True))
