"""Texts as sparse rows of hashed n-grams."""

import collections
import dataclasses
import math
import unicodedata

import numpy as np
import pyarrow as pa
import pytest
from tests.arrays import filled

from coowned import AttributionGraph
from coowned.content.data import rows_in_place, with_norms
from coowned.content.hashed_text import SparseTable, hash_texts, normalised
from coowned.errors import InputError
from coowned.exact.sparse_sums import ONE

TEXTS = [
    "Dear Ann, the budget of the BUDGET is attached.",
    "re: lunch?",
    "",
    None,
    "!!! ...",
    "Ｆｕｌｌ width, cafe\u0301 and café; ﬁne. Straße",
    "日本語 テキスト a",
    "word " * 3000,
    "\ud800 lone surrogates are kept".encode("utf-16", "surrogatepass").decode("utf-16", "replace"),
]


def plain_hash(points: list[int], kind: int) -> int:
    state = 0xCBF29CE484222325
    for point in [kind, *points]:
        state = (state ^ point) * 0x100000001B3 % 2**64
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        state ^= state >> 33
        state = state * factor % 2**64
    return state ^ state >> 33


def plain_row(text, num_features, words, characters, most=4096):
    """By other code, in Python's integers."""
    tokens = "".join(
        c if c.isalnum() or c == "_" else " " for c in unicodedata.normalize("NFKC", (text or "")[:most]).lower()
    ).split()
    grams = []
    if words:
        for n in range(words[0], words[1] + 1):
            grams += [(" ".join(tokens[i : i + n]), 0x110001) for i in range(len(tokens) - n + 1)]
    for token in tokens if characters else ():
        padded = f" {token} "
        for n in range(characters[0], characters[1] + 1):
            starts = range(min(len(padded) - n + 1, len(token) + 1))
            grams += [(padded[i : i + n], 0x110002) for i in starts]
    counts = collections.Counter()
    for gram, kind in grams:
        found = plain_hash([ord(c) for c in gram], kind)
        counts[(found >> 1) % num_features] += 1 if found & 1 else -1
    total = sum(abs(count) for count in counts.values())
    row = {}
    for index, count in counts.items():
        value = round(ONE * math.sqrt(abs(count) / max(1, total)))
        if value:
            row[index] = value if count > 0 else -value
    return row


def rows_of(hashed):
    ends = zip(hashed.offsets[:-1], hashed.offsets[1:], strict=True)
    return [dict(zip(hashed.indices[a:b].tolist(), hashed.values[a:b].tolist(), strict=True)) for a, b in ends]


@pytest.mark.parametrize("num_features", [7, 1000, 2**14, 2**17])
@pytest.mark.parametrize(("words", "characters"), [((1, 2), (3, 5)), ((1, 1), None), (None, (4, 4)), ((2, 3), (1, 2))])
def test_equals_a_plain_loop(num_features, words, characters):
    texts = TEXTS[:5] + TEXTS[6:]
    settings = {"word_ngrams": words, "character_ngrams": characters}
    hashed = hash_texts(pa.array(texts), num_features=num_features, **settings)
    for text, row in zip(texts, rows_of(hashed), strict=True):
        assert row == plain_row(text, num_features, words, characters)


def test_rows_are_what_the_mechanism_reads():
    """Increasing indices, length 1."""
    hashed = hash_texts(pa.array(TEXTS), num_features=2**14)
    for row in rows_of(hashed):
        assert list(row) == sorted(row)
        if row:
            assert math.sqrt(sum(value**2 for value in row.values())) == pytest.approx(ONE, rel=0.01)
    assert hashed.num_truncated == 1
    assert hashed.num_empty == 3


def test_hashes_are_fixed():
    """A model's features mean the same for ever: these numbers may not change."""
    hashed = hash_texts(pa.array(["Hello world"]), num_features=2**14, character_ngrams=None)
    assert hashed.indices.tolist() == [6520, 11136, 11299]
    assert np.abs(hashed.values).tolist() == [round(ONE / math.sqrt(3))] * 3
    assert np.sign(hashed.values).tolist() == [1, 1, -1]


def test_spelling_does_not_matter():
    one = hash_texts(pa.array(["CAFÉ, ﬁne"]), num_features=2**14)
    other = hash_texts(pa.array(["cafe\u0301 fine"]), num_features=2**14)
    assert rows_of(one) == rows_of(other)
    assert normalised("A_b-c  1", 100) == ("a_b c 1", False)


def test_a_row_depends_on_its_own_text(monkeypatch):
    """In any company, any order, any number of threads and at any position among pieces."""
    from coowned.content import hashed_text

    texts = [f"{text} {number}" for number, text in enumerate(TEXTS * 3)]
    alone = [rows_of(hash_texts(pa.array([text]), num_features=500))[0] for text in texts]
    assert rows_of(hash_texts(pa.array(texts), num_features=500)) == alone
    assert rows_of(hash_texts(pa.array(texts[::-1]), num_features=500)) == alone[::-1]
    monkeypatch.setattr(hashed_text, "_AT_ONCE", 4)
    monkeypatch.setattr(hashed_text.threads, "cores", lambda: 3)
    chunks = pa.chunked_array([texts[:5], texts[5:]])
    assert rows_of(hash_texts(chunks, num_features=500)) == alone


def test_no_texts():
    assert hash_texts(pa.array([], pa.string()), num_features=10).offsets.tolist() == [0]


@pytest.mark.parametrize(
    "settings",
    [
        {"num_features": 1},
        {"word_ngrams": (2, 1)},
        {"word_ngrams": (0, 1)},
        {"character_ngrams": (3,)},
        {"character_ngrams": (3, 11)},
        {"word_ngrams": None, "character_ngrams": None},
        {"max_characters": 0},
    ],
)
def test_bad_settings(settings):
    with pytest.raises(InputError):
        hash_texts(pa.array(["a"]), **{"num_features": 64, **settings})


GRAPH = AttributionGraph.from_users_per_example([[0], [1], [2]])
TABLE = SparseTable(
    graph=GRAPH,
    indices=np.array([1, 5, 2], np.uint16),
    values=np.array([7, -8, 9], np.int16),
    offsets=np.array([0, 2, 2, 3]),
    labels=np.float32([1, 0, np.nan]),
)


def test_fill_gives_the_rows():
    out = filled(TABLE, [2, 0, 1, 0])
    assert out["indices"].tolist() == [[2, 0], [1, 5], [0, 0], [1, 5]]
    assert out["values"].tolist() == [[9, 0], [7, -8], [0, 0], [7, -8]]
    np.testing.assert_array_equal(out["labels"], np.float32([np.nan, 1, 0, 1]))
    part = dataclasses.replace(TABLE, graph=GRAPH.subgraph([0, 1]), rows=np.array([2, -1]))
    assert filled(part, [0])["values"].tolist() == [[9, 0]]
    with pytest.raises(InputError, match="not selected"):
        filled(part, [1])


def test_rows_in_place_are_those_of_fill():
    part = dataclasses.replace(TABLE, rows=np.array([1, 2, 0]))
    for data in (TABLE, part):
        examples = np.array([2, 1, 1, 0])
        place = rows_in_place(with_norms(data), examples)
        assert place is not None
        out = filled(data, examples)
        for name, array in place.arrays().items():
            assert np.array_equal(array, out[name])
            assert array.dtype == data.dtypes()[name]


def test_digest_follows_content():
    other_ids = AttributionGraph.from_users_per_example([[0], [1], [2]], example_ids=["b", "a", "c"])
    changed = [
        dataclasses.replace(TABLE, values=TABLE.values + np.int16(1)),
        dataclasses.replace(TABLE, indices=TABLE.indices + np.uint16(1)),
        dataclasses.replace(TABLE, labels=TABLE.labels[::-1].copy()),
        dataclasses.replace(TABLE, offsets=np.array([0, 1, 2, 3])),
        dataclasses.replace(TABLE, rows=np.array([0, 1, 2])),
        dataclasses.replace(TABLE, graph=other_ids),
    ]
    digests = [table.digest for table in [TABLE, *changed]]
    assert len(set(digests)) == len(digests)
    assert dataclasses.replace(TABLE).digest == TABLE.digest


def test_unusable_labels_are_counted():
    assert TABLE.num_unusable == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"offsets": np.array([0, 2, 1, 3])},
        {"offsets": np.array([0, 2, 2])},
        {"offsets": np.array([1, 2, 2, 3])},
        {"labels": np.zeros(2, np.float32)},
        {"indices": np.array([1, 5])},
        {"rows": np.array([0, 0, 1])},
    ],
)
def test_bad_tables(changed):
    with pytest.raises(InputError):
        dataclasses.replace(TABLE, **changed)
