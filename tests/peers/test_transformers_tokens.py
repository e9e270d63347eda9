"""The ids of a text are those of transformers' BertTokenizerFast."""

import random

import pyarrow as pa
import pytest

from coowned.content.text import SPECIAL_TOKENS, Vocabulary, tokenize

PIECES = ["the", "cat", "sat", "##s", "un", "##able", "naive", "Ünal", "unal", "é", "e", "中", "文", "!", ".", "-", "'"]
LETTERS = [f"{mark}{chr(code)}" for code in range(ord("a"), ord("z") + 1) for mark in ("", "##")]
PARTS = [
    *PIECES,
    "The CAT sats, unable.",
    "naïve",
    "ÜNAL",
    "e\u0301",  # an accent of its own
    "中文cat",
    "\u200b",
    "\u00a0",
    "\t\n",
    "\ufffd",
    "\x00",
    "emoji \U0001f600",
    "x" * 120,  # longer than a word may be
    "don't-stop...now",
    "ΑΣ İstanbul ﬁ",
]


def texts(seed: int, count: int) -> list[str]:
    draw = random.Random(seed)
    return [draw.choice(["", " "]).join(draw.choices(PARTS, k=draw.randrange(1, 30))) for _ in range(count)]


@pytest.mark.peers
@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("sequence_length", [12, 512])
def test_ids_are_theirs(tmp_path, monkeypatch, lowercase, sequence_length):
    from transformers import BertTokenizerFast

    monkeypatch.setenv("COOWNED_CACHE", "off")
    vocabulary = Vocabulary(tuple(dict.fromkeys([*SPECIAL_TOKENS, *PIECES, *LETTERS])))
    vocabulary.write(tmp_path / "vocab.txt")
    theirs = BertTokenizerFast(vocab=str(tmp_path / "vocab.txt"), do_lower_case=lowercase)
    given = texts(0, 2000)
    found = tokenize(pa.array(given), vocabulary, sequence_length=sequence_length, lowercase=lowercase)
    wanted = theirs(given, truncation=True, max_length=sequence_length)["input_ids"]
    empty = 0
    for number, ids in enumerate(wanted):
        own = found.ids[found.offsets[number] : found.offsets[number + 1]].tolist()
        if len(ids) == 2:  # [CLS] [SEP]: for us a text without any token is an empty row
            ids, empty = [], empty + 1
        assert own == ids, given[number]
    assert empty < 200
    assert found.num_truncated == sum(len(ids) > sequence_length for ids in theirs(given)["input_ids"])
