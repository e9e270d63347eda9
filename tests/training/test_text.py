"""Vocabularies, tokens, and the file they are kept in."""

import os
import stat

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coowned import InputError
from coowned.training import text as module
from coowned.training.text import SPECIAL_TOKENS, TokenizedTexts, Vocabulary, learn_vocabulary, tokenize

WORDS = ("the", "paper", "show", "##s", "##ed", "un", "##known", "model", ".", "[", "]", "mask", "cafe", "a", "##a")
VOCABULARY = Vocabulary((*SPECIAL_TOKENS, *WORDS))
IDS = VOCABULARY.ids
TEXTS = ["The paper showed.", "the model", None, "", "paper " * 40, "  \t ", "Café [MASK]"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache's folder that nothing has been kept in."""
    monkeypatch.setenv("COOWNED_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept" / "tokens"


def tokens(texts, **settings):
    """The tokens of each text, as words."""
    found = tokenize(pa.array(texts, pa.string()), VOCABULARY, **{"sequence_length": 16, **settings})
    return rows_of(found, [VOCABULARY.tokens[number] for number in found.ids])


def rows_of(found, values):
    return [list(values[begin:end]) for begin, end in zip(found.offsets[:-1], found.offsets[1:], strict=True)]


def no_tokenizing(monkeypatch):
    def refuse(*_):
        raise AssertionError("tokenized where a file was kept")

    monkeypatch.setattr(module, "_tokenize", refuse)


# ---- vocabulary ------------------------------------------------------------------------------------------------------


def test_vocabulary_round_trip(tmp_path):
    VOCABULARY.write(tmp_path / "vocab.txt")
    assert (tmp_path / "vocab.txt").read_text(encoding="utf-8").startswith("[PAD]\n[UNK]\n")
    found = Vocabulary.read(tmp_path / "vocab.txt")
    assert found == VOCABULARY
    assert found.digest == VOCABULARY.digest
    assert found.special_ids == (0, 1, 2, 3, 4)
    assert (found.pad_id, found.unk_id, found.cls_id, found.sep_id, found.mask_id) == found.special_ids
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
        (None, "cannot be read .*No such file.*name a vocab.txt"),
        (b"", "the vocabulary is empty; it needs one token a line"),
        (b"\n\n", "the vocabulary is empty"),
        (b"\xff\xfe[PAD]", "not UTF-8"),
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\na\n", "line 8 and line 6 are both 'a'.*without repeats"),
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
    assert found.unk_id not in tokenize(pa.array(corpus), found, sequence_length=64).ids


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
    assert found.ids[-1] == VOCABULARY.sep_id
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
    tokenizer = module._tokenizer(IDS, lowercase=True)
    whole = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    found = module._tokenize(module._as_text(pa.array(texts, pa.string())), VOCABULARY, 8, True)
    expected = [[IDS["[CLS]"], *ids[:6], IDS["[SEP]"]] if ids else [] for ids in whole]
    assert rows_of(found, found.ids.tolist()) == expected
    assert found.num_truncated == sum(len(ids) > 6 for ids in whole)


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
)
def test_kinds_of_text(kind):
    column = pa.array(TEXTS, pa.string()).cast(kind) if kind != pa.string_view() else pa.array(TEXTS, kind)
    found = tokenize(pa.chunked_array([column]), VOCABULARY, sequence_length=16)
    assert found.digest == tokenize(pa.array(TEXTS), VOCABULARY, sequence_length=16).digest


def test_what_is_no_text():
    with pytest.raises(InputError, match="must be text, not int64; name a column of text"):
        tokenize(pa.array([1, 2]), VOCABULARY, sequence_length=16)
    broken = pa.StringArray.from_buffers(1, pa.py_buffer(np.array([0, 2], np.int32)), pa.py_buffer(b"\xff\xfe"))
    with pytest.raises(InputError, match="not UTF-8 at row 0"):
        tokenize(broken, VOCABULARY, sequence_length=16)
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


# ---- the file --------------------------------------------------------------------------------------------------------


def test_cache_hit(cache, monkeypatch):
    monkeypatch.setenv("COOWNED_CACHE", "off")
    plain = tokenize(pa.array(TEXTS), VOCABULARY, sequence_length=16)
    monkeypatch.setenv("COOWNED_CACHE", str(cache.parent))
    made = tokenize(pa.array(TEXTS), VOCABULARY, sequence_length=16)
    no_tokenizing(monkeypatch)
    halves = pa.chunked_array([pa.array(TEXTS[:3]), pa.array([], pa.string()), pa.array(["x", *TEXTS[3:]]).slice(1)])
    for found in (made, tokenize(halves, VOCABULARY, sequence_length=16)):  # however it is cut into chunks
        assert found.digest == plain.digest
        assert np.array_equal(found.ids, plain.ids)
        assert np.array_equal(found.offsets, plain.offsets)
        assert (found.num_truncated, found.num_empty) == (plain.num_truncated, plain.num_empty) == (1, 3)
        assert not found.ids.flags.owndata
        with pytest.raises(ValueError, match="read-only"):
            found.ids[0] = 1
    assert len(list(cache.iterdir())) == 1


def test_cache_key(cache, monkeypatch):
    def ask(texts=TEXTS, vocabulary=VOCABULARY, **settings):
        tokenize(pa.array(texts), vocabulary, **{"sequence_length": 16, **settings})

    ask()
    ask(["The paper showed.", "the model", None, "", "paper " * 40, "  \t ", "Café [MASK"])
    ask(["The paper", " showed.the model", None, "", "paper " * 40, "  \t ", "Café [MASK]"])  # the same letters
    ask([*TEXTS, None])
    ask(vocabulary=Vocabulary((*SPECIAL_TOKENS, *reversed(WORDS))))
    ask(sequence_length=17)
    ask(lowercase=False)
    assert len(list(cache.iterdir())) == 7
    monkeypatch.setattr(module.importlib.metadata, "version", lambda name: "0")
    ask()
    assert len(list(cache.iterdir())) == 8


def test_cache_file_is_private(cache):
    before = os.umask(0)
    try:
        tokenize(pa.array(TEXTS), VOCABULARY, sequence_length=16)
    finally:
        os.umask(before)
    (file,) = cache.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


@pytest.mark.parametrize("damage", ["empty", "half", "bit", "other"])
def test_damaged_file_is_made_anew(cache, damage):
    made = tokenize(pa.array(TEXTS), VOCABULARY, sequence_length=16)
    (file,) = cache.iterdir()
    content = file.read_bytes()
    if damage == "empty":
        file.write_bytes(b"")
    elif damage == "half":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "bit":
        place = content.index(made.ids.tobytes()) + 2
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    else:
        tokenize(pa.array(["the paper"] * len(TEXTS)), VOCABULARY, sequence_length=16)
        (other,) = (path for path in cache.iterdir() if path != file)
        file.write_bytes(other.read_bytes())
    found = tokenize(pa.array(TEXTS), VOCABULARY, sequence_length=16)
    assert found.ids.tolist()[:6] == [2, 5, 6, 7, 9, 13]
    assert file.read_bytes() == content


def test_failed_write_leaves_nothing(cache, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("coowned.files.os.replace", full)
    assert len(tokenize(pa.array(TEXTS), VOCABULARY, sequence_length=16)) == 7
    assert list(cache.iterdir()) == []


def test_cache_can_be_switched_off(tmp_path, monkeypatch):
    monkeypatch.setenv("COOWNED_CACHE", "off")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "_keep", None)
    assert len(tokenize(pa.array(TEXTS), VOCABULARY, sequence_length=16)) == 7
    assert list(tmp_path.iterdir()) == []
