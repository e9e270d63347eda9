"""Vocabularies and tokens."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coowned import InputError
from coowned.content.text import SPECIAL_TOKENS, TokenizedTexts, Vocabulary, learn_vocabulary, tokenize, word_piece

WORDS = ("the", "paper", "show", "##s", "##ed", "un", "##known", "model", ".", "[", "]", "mask", "cafe", "a", "##a")
VOCABULARY = Vocabulary((*SPECIAL_TOKENS, *WORDS))
IDS = VOCABULARY.ids
TEXTS = ["The paper showed.", "the model", None, "", "paper " * 40, "  \t ", "Café [MASK]"]


def tokens(texts, **settings):
    """The tokens of each text, as words."""
    found = tokenize(pa.array(texts, pa.string()), VOCABULARY, **{"sequence_length": 16, **settings})
    return rows_of(found, [VOCABULARY.tokens[number] for number in found.ids])


def rows_of(found, values):
    return [list(values[begin:end]) for begin, end in zip(found.offsets[:-1], found.offsets[1:], strict=True)]


# ---- vocabulary ------------------------------------------------------------------------------------------------------


def test_vocabulary_round_trip(tmp_path):
    VOCABULARY.write(tmp_path / "vocab.txt")
    assert (tmp_path / "vocab.txt").read_text(encoding="utf-8").startswith("[PAD]\n[UNK]\n")
    found = Vocabulary.read(tmp_path / "vocab.txt")
    assert found == VOCABULARY
    assert found.digest == VOCABULARY.digest
    assert [found.ids[token] for token in SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
    assert (found.pad_id, found.mask_id) == (0, 4)
    assert found.size == 20
    assert "paper" not in repr(found)


def test_ends_of_lines(tmp_path):
    """Carriage returns are none of a token; characters Python splits lines at may be."""
    (tmp_path / "vocab.txt").write_bytes("\r\n".join([*SPECIAL_TOKENS, "a", "\u2028", "b"]).encode())
    assert Vocabulary.read(tmp_path / "vocab.txt").tokens[5:] == ("a", "\u2028", "b")


def test_vocabulary_digest_follows_tokens_and_order():
    digests = [
        Vocabulary((*SPECIAL_TOKENS, *words)).digest for words in (("a", "b"), ("b", "a"), ("a",), ("ab",), ("a", "B"))
    ]
    assert len(set(digests)) == 5


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read .*No such file.*give a vocab.txt"),
        (b"", "the vocabulary is empty; it needs one token per line"),
        (b"\n\n", "the vocabulary is empty"),
        (b"\xff\xfe[PAD]", "not UTF-8"),
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\na\n", "line 8 and line 6 are both 'a'.*without duplicates"),
        (b"[PAD]\n[UNK]\n\n[CLS]\n[SEP]\n[MASK]\na\n", "line 3 is blank"),
        *(
            ("\n".join(token for token in SPECIAL_TOKENS if token != missing).encode(), rf"no \{missing[:-1]}\]")
            for missing in SPECIAL_TOKENS
        ),
    ],
)
def test_bad_vocabularies(tmp_path, content, says):
    file = tmp_path / "vocab.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError, match=says) as caught:
        Vocabulary.read(file)
    assert str(file) in str(caught.value)
    with pytest.raises(InputError, match="cannot be read"):
        Vocabulary.read(tmp_path)


def test_private_texts_teach_no_vocabulary():
    def texts():
        raise AssertionError("private texts were looked at")
        yield ""

    for public in (False, None, "yes", 1):
        with pytest.raises(InputError, match="public=True"):
            learn_vocabulary(texts(), size=100, public=public)


def test_public_texts_teach_a_vocabulary():
    corpus = ["the lowest low tower", "lower towers show"] * 5
    found = learn_vocabulary(corpus, size=40, public=True)
    assert found.tokens[:5] == SPECIAL_TOKENS
    assert len(SPECIAL_TOKENS) < found.size <= 40
    assert {"low", "##w"} <= set(found.tokens)
    assert found.ids["[UNK]"] not in tokenize(pa.array(corpus), found, sequence_length=64).ids


# ---- tokens ----------------------------------------------------------------------------------------------------------


def test_tokens_of_words():
    assert tokens(["The paper SHOWS un-known.", "unknown"]) == [
        ["[CLS]", "the", "paper", "show", "##s", "un", "[UNK]", "[UNK]", ".", "[SEP]"],
        ["[CLS]", "un", "##known", "[SEP]"],
    ]
    assert tokens(["Café model"]) == [["[CLS]", "cafe", "model", "[SEP]"]]  # accents go with capitals
    assert tokens(["The café"], lowercase=False) == [["[CLS]", "[UNK]", "[UNK]", "[SEP]"]]
    assert tokens(["a" * 100, "a" * 101], sequence_length=200)[1] == ["[CLS]", "[UNK]", "[SEP]"]


def test_special_tokens_cannot_be_written():
    """Or a text could choose what counts as padding or as hidden."""
    assert tokens(["[MASK] [PAD]"]) == [["[CLS]", "[", "mask", "]", "[", "[UNK]", "]", "[SEP]"]]


def test_empty_texts_are_empty_rows():
    found = tokenize(pa.array(TEXTS), VOCABULARY, sequence_length=16)
    lengths = np.diff(found.offsets)
    assert (lengths == 0).tolist() == [False, False, True, True, False, True, False]
    assert found.num_empty == 3
    assert len(found) == 7


def test_long_texts_are_cut():
    found = tokenize(pa.array(["paper " * 3, "paper " * 6, "paper " * 7]), VOCABULARY, sequence_length=8)
    assert np.diff(found.offsets).tolist() == [5, 8, 8]
    assert found.ids[-1] == VOCABULARY.ids["[SEP]"]
    assert found.num_truncated == 1  # six tokens just fit
    assert "truncated" not in repr(found)  # counts of content are shown to nobody by accident
    assert "ids" not in repr(found)


words = st.sampled_from(
    ["the", "papers", "un-known", "a" * 60, "café", "e\u0301", "中文", "\u0301", "[MASK]", "\x00", "…"]
)


@given(st.lists(st.lists(st.tuples(words, st.sampled_from([" ", "  ", "\n", "\u00a0", ""])), max_size=60), max_size=5))
@example([[("a" * 60, ""), ("a" * 60, "")]])  # too long a word is one unknown, its beginning is many tokens
def test_cutting_changes_no_token(pieces):
    """The first words are enough: as if whole texts were tokenized and the ids cut."""
    texts = ["".join(word + space for word, space in text) for text in pieces]
    tokenizer = word_piece(IDS, lowercase=True)
    whole = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    found = tokenize(pa.array(texts, pa.string()), VOCABULARY, sequence_length=8)
    expected = [[IDS["[CLS]"], *ids[:6], IDS["[SEP]"]] if ids else [] for ids in whole]
    assert rows_of(found, found.ids.tolist()) == expected
    assert found.num_truncated == sum(len(ids) > 6 for ids in whole)


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
)
def test_kinds_of_text(kind):
    column = pa.array(TEXTS, pa.string()).cast(kind) if kind != pa.string_view() else pa.array(TEXTS, kind)
    found = tokenize(pa.chunked_array([column]), VOCABULARY, sequence_length=16)
    plain = tokenize(pa.array(TEXTS), VOCABULARY, sequence_length=16)
    assert found.ids.tolist() == plain.ids.tolist()
    assert found.offsets.tolist() == plain.offsets.tolist()


def test_what_is_no_text():
    with pytest.raises(InputError, match="must be text, not int64; name a column of text"):
        tokenize(pa.array([1, 2]), VOCABULARY, sequence_length=16)
    broken = pa.StringArray.from_buffers(1, pa.py_buffer(np.array([0, 2], np.int32)), pa.py_buffer(b"\xff\xfe"))
    assert tokenize(broken, VOCABULARY, sequence_length=16).num_empty == 1  # replacement characters are no words
    for length in (2, 0, 8.5, True):
        with pytest.raises(InputError, match="sequence_length"):
            tokenize(pa.array(["a"]), VOCABULARY, sequence_length=length)
    assert len(tokenize(pa.array([], pa.string()), VOCABULARY, sequence_length=16)) == 0
    assert tokenize(pa.nulls(2), VOCABULARY, sequence_length=16).num_empty == 2


def test_large_vocabularies_have_wider_ids():
    large = Vocabulary((*SPECIAL_TOKENS, *(f"##{number}" for number in range(70_000)), "last"))
    found = tokenize(pa.array(["last"]), large, sequence_length=8)
    assert found.ids.dtype == np.int32
    assert found.ids.tolist() == [2, 70_005, 3]
    assert tokenize(pa.array(["a"]), VOCABULARY, sequence_length=8).ids.dtype == np.uint16


@pytest.mark.parametrize(
    ("ids", "offsets"),
    [
        ([2, 5, 3], [0, 2]),
        ([2, 5, 3], [1, 3]),
        ([2, 5, 3], [0, 4, 3]),
        ([2, 20, 3], [0, 3]),
        ([2] * 9, [0, 9]),
        ([], []),
    ],
)
def test_bad_arrays_of_tokens(ids, offsets):
    with pytest.raises(InputError):
        TokenizedTexts(
            vocabulary=VOCABULARY,
            sequence_length=8,
            ids=np.array(ids, np.uint16),
            offsets=np.array(offsets, np.int64),
            num_truncated=0,
            num_empty=0,
        )
