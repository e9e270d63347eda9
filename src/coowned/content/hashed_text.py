"""Texts as sparse rows: words and character n-grams, hashed to a fixed number of features.

Nothing is learned from any text: which feature a word has is fixed by a public hash. A text is normalised (Unicode
NFKC, lower case), cut into words, and each run of words and of characters within a word adds 1 or -1, by a further bit
of its hash, to its feature. A count c becomes sign(c) sqrt(|c| / sum of |c|), so that the row has length 1, rounded to
an integer in units of 1 / ONE. So a row is a function of its own text alone.

The hash is FNV-1a over code points with the finalizer of MurmurHash3, since it can be carried on from one n-gram to the
next longer one inside of a compiled loop: the same n-grams through zlib.crc32 in Python take 5 times as long.
"""

import dataclasses
import functools
import re
import unicodedata
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from coowned import threads, validate
from coowned.content.data import Draw, RowTable
from coowned.content.derived import Arrays
from coowned.errors import InputError
from coowned.exact.compiled import compiled
from coowned.exact.sparse_sums import ONE, SparseRows

_WORD = re.compile(r"\w+")
_AT_ONCE = 2048  # texts at most
_SPACE = 32
# FNV-1a over code points, then the finalizer of MurmurHash3, by which all bits of the hash depend on all of the text.
_BASIS, _PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)
_FIRST, _SECOND, _SHIFT = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53), np.uint64(33)
_WORD_KIND, _CHARACTER_KIND = np.uint64(0x110001), np.uint64(0x110002)  # beyond all code points


class HashedTexts(NamedTuple):
    """Sparse rows of texts: row r is values[offsets[r]:offsets[r + 1]] at the same part of indices."""

    indices: npt.NDArray[Any]  # (total,) uint16 or int32, increasing within a row
    values: npt.NDArray[np.int16]  # (total,) in units of 1 / ONE
    offsets: npt.NDArray[np.int64]  # (texts + 1,)
    num_truncated: int  # texts longer than max_characters: content, for a private log alone
    num_empty: int  # texts without any word: content likewise


def hash_texts(
    texts: pa.ChunkedArray | pa.Array,
    *,
    num_features: int,
    word_ngrams: tuple[int, int] | None = (1, 2),
    character_ngrams: tuple[int, int] | None = (3, 5),
    max_characters: int = 4096,
) -> HashedTexts:
    """Hashes texts to rows of length 1 (ONE in integers); a null or a text without words is a row of zeros.

    Guarantees:
      - A row depends on its own text alone.   (test_a_row_depends_on_its_own_text)
      - It is the same on every machine and in every version.   (test_hashes_are_fixed)
      - Its numbers are those of a plain loop over the same n-grams.   (test_equals_a_plain_loop)
    Cost: some microseconds a text of mail's length; memory for the result and a few thousand texts.

    Args:
      word_ngrams: the shortest and the longest run of words; None for no words.
      character_ngrams: the shortest and the longest run of characters of a word with a space on both sides; None for
        none.
      max_characters: of a text that are read.

    Example:
      >>> hashed = hash_texts(pa.array(["Hello, hello!", None]), num_features=2**14, character_ngrams=None)
      >>> hashed.offsets.tolist(), np.abs(hashed.values).tolist()
      ([0, 2, 2], [9459, 13377])
    """
    check_ngrams(num_features, word_ngrams, character_ngrams, max_characters)
    kind = np.dtype(np.uint16 if num_features <= 2**16 else np.int32)
    words, characters = np.array(word_ngrams or (1, 0)), np.array(character_ngrams or (1, 0))
    pieces = threads.over_ranges(
        lambda begin, end: _hash_piece(texts[begin:end], num_features, words, characters, max_characters, kind),
        len(texts),
        parts=len(texts) // _AT_ONCE + 1,
    )
    offsets = np.concatenate([[0], *(np.diff(piece.offsets) for piece in pieces)]).cumsum()
    return HashedTexts(
        np.concatenate([piece.indices for piece in pieces]),
        np.concatenate([piece.values for piece in pieces]),
        offsets.astype(np.int64),
        sum(piece.num_truncated for piece in pieces),
        sum(piece.num_empty for piece in pieces),
    )


def check_ngrams(
    num_features: int,
    word_ngrams: tuple[int, int] | None,
    character_ngrams: tuple[int, int] | None,
    max_characters: int,
) -> None:
    """Raises InputError for meaningless settings of `hash_texts`."""
    validate.integer(at_least=2, at_most=2**24, num_features=num_features)
    validate.integer(at_least=1, at_most=2**20, max_characters=max_characters)
    if word_ngrams is None and character_ngrams is None:
        raise InputError("word_ngrams and character_ngrams are both missing: there would be no features")
    for name, lengths in (("word_ngrams", word_ngrams), ("character_ngrams", character_ngrams)):
        if lengths is not None and not (len(lengths) == 2 and 1 <= lengths[0] <= lengths[1] <= 10):
            raise InputError(f"{name} must be the shortest and the longest n-gram, from 1 to 10, not {lengths!r}")


def normalised(text: str | None, max_characters: int) -> tuple[str, bool]:
    """Returns (the words of a text in lower case, separated by single spaces; whether it was cut).

    >>> normalised("Ｆull  WIDTH, and more", 12)
    ('full width', True)
    """
    text = text or ""
    cut = len(text) > max_characters
    text = text[:max_characters]
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    return " ".join(_WORD.findall(text.lower())), cut


def _hash_piece(texts: Any, num_features: int, words: Any, characters: Any, most: int, kind: Any) -> HashedTexts:
    read = [normalised(text, most) for text in texts.to_pylist()]
    points = np.frombuffer("".join(text for text, _ in read).encode("utf-32-le", "surrogatepass"), np.uint32)
    ends = np.cumsum([0] + [len(text) for text, _ in read])
    counts = max(0, words[1] - words[0] + 1) + max(0, characters[1] - characters[0] + 1)
    capacity = (points.size + 2 * len(read)) * max(1, counts)
    indices, values = np.empty(capacity, kind), np.empty(capacity, np.int16)
    offsets = np.zeros(len(read) + 1, np.int64)
    filled = hash_rows(points, ends, num_features, words, characters, indices, values, offsets)
    num_truncated, num_empty = sum(cut for _, cut in read), sum(not text for text, _ in read)
    return HashedTexts(indices[:filled].copy(), values[:filled].copy(), offsets, num_truncated, num_empty)


@compiled()
def hash_rows(points, ends, num_features, words, characters, indices, values, offsets):
    """Fills the rows of texts points[ends[r]:ends[r + 1]]; returns how many numbers they have."""
    counts, noted = np.zeros(num_features, np.int32), np.zeros(num_features, np.bool_)
    touched = np.empty(num_features, np.int64)
    filled = 0
    for row in range(ends.size - 1):
        text = points[ends[row] : ends[row + 1]]
        number = _count_words(text, words, counts, noted, touched, 0)
        number = _count_characters(text, characters, counts, noted, touched, number)
        filled = _finish(np.sort(touched[:number]), counts, noted, indices, values, filled)
        offsets[row + 1] = filled
    return filled


@compiled()
def _count_words(text, lengths, counts, noted, touched, number):
    """Counts every run of lengths[0] to lengths[1] words."""
    begin = 0
    while begin < text.size and lengths[1] >= lengths[0]:
        state, at = (_BASIS ^ _WORD_KIND) * _PRIME, begin
        following = text.size
        for length in range(1, lengths[1] + 1):
            while at < text.size and text[at] != _SPACE:
                state = (state ^ np.uint64(text[at])) * _PRIME
                at += 1
            if length == 1:
                following = at + 1
            if length >= lengths[0]:
                number = _count(state, counts, noted, touched, number)
            if at >= text.size:
                break
            state = (state ^ np.uint64(_SPACE)) * _PRIME
            at += 1
        begin = following
    return number


@compiled()
def _count_characters(text, lengths, counts, noted, touched, number):
    """Counts every run of lengths[0] to lengths[1] characters of a word with a space before and behind it."""
    space = np.uint64(_SPACE)
    begin = -1  # the space before a word; there is one before the first and behind the last
    while begin < text.size - 1 and lengths[1] >= lengths[0]:
        end = begin + 1
        while end < text.size and text[end] != _SPACE:
            end += 1
        for first in range(begin, end):
            state = (_BASIS ^ _CHARACTER_KIND) * _PRIME
            for at in range(first, min(first + lengths[1], end + 1)):
                point = space if at in (begin, end) else np.uint64(text[at])
                state = (state ^ point) * _PRIME
                if at - first + 1 >= lengths[0]:
                    number = _count(state, counts, noted, touched, number)
        begin = end
    return number


@compiled()
def _count(state, counts, noted, touched, number):
    """Adds 1 or -1 to the feature of a hash; returns how many features were touched."""
    state ^= state >> _SHIFT
    state *= _FIRST
    state ^= state >> _SHIFT
    state *= _SECOND
    state ^= state >> _SHIFT
    index = np.int64((state >> np.uint64(1)) % np.uint64(counts.size))
    counts[index] += 1 if state & np.uint64(1) else -1
    if not noted[index]:
        noted[index] = True
        touched[number] = index
        number += 1
    return number


@compiled()
def _finish(touched, counts, noted, indices, values, filled):
    """Appends the row of these counts and resets them to 0; returns the end of the row."""
    total = 0
    for index in touched:
        total += abs(counts[index])
    for index in touched:
        count = counts[index]
        value = np.rint(ONE * np.sqrt(abs(count) / max(1, total)))  # both roots and quotients are the same everywhere
        if value:
            indices[filled] = index
            values[filled] = np.int16(value if count > 0 else -value)
            filled += 1
        counts[index], noted[index] = 0, False
    return filled


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SparseTable(RowTable):
    """Sparse integer rows and labels: row r is values[offsets[r]:offsets[r + 1]].

    As arrays of a batch rows are padded to the longest one; a run with clipped gradients reads them where they lie.

    Guarantees:
      - `fill` gives row `rows[i]` for example i, and `in_place` the same.   (test_fill_gives_the_rows,
        test_rows_in_place_are_those_of_fill)
      - Two tables with other content, rows, graph or order of ids have other digests.   (test_digest_follows_content)

    Attributes:
      indices: (total,) integers, increasing within a row.
      values: (total,) integers, in units of 1 / ONE (`coowned.exact.sparse_sums`).
      offsets: (n + 1,) int64.
      labels: (n,) float32: 0 or 1, or the index of the class; NaN where it is none.
    """

    indices: npt.NDArray[Any] = dataclasses.field(repr=False)
    values: npt.NDArray[Any] = dataclasses.field(repr=False)
    offsets: npt.NDArray[np.int64] = dataclasses.field(repr=False)
    labels: npt.NDArray[np.float32] = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        count, lengths = len(self.offsets) - 1, np.diff(self.offsets)
        if count < 0 or self.offsets[0] != 0 or lengths.min(initial=0) < 0 or self.offsets[-1] != self.values.size:
            raise InputError("offsets must increase from 0 to the number of values")
        validate.same_length(count, labels=self.labels)
        validate.same_length(self.values.size, indices=self.indices)
        self._check_rows(labels=self.labels)

    def stored(self) -> Arrays:
        return {name: getattr(self, name) for name in ("indices", "values", "offsets", "labels")}

    @functools.cached_property
    def _width(self) -> int:
        return max(1, int(np.diff(self.offsets).max(initial=1)))

    @property
    def num_unusable(self) -> int:
        """The number of rows with an unknown label: for a private log only."""
        return int(np.count_nonzero(~np.isfinite(self.labels)))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"indices": (self._width,), "values": (self._width,), "labels": ()}

    def dtypes(self) -> dict[str, np.dtype[Any]]:
        return {"indices": self.indices.dtype, "values": self.values.dtype, "labels": np.dtype(np.float32)}

    def in_place(self, examples: npt.NDArray[np.int64]) -> SparseRows:
        """Returns the rows of these examples in place."""
        return SparseRows(self.indices, self.values, self.offsets, self._rows_or_first(examples), self._width)

    def fill(self, examples: npt.NDArray[np.int64], out: dict[str, npt.NDArray[Any]], draw: Draw | None = None) -> None:
        rows = self._rows_of(examples)
        out["labels"][: rows.size] = self.labels[rows]
        if "indices" in out:
            for name, array in self.in_place(examples).arrays().items():
                out[name][: rows.size] = array

    @property
    def digest(self) -> str:
        return self._digest()
