"""Texts as training data."""

import collections
import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from tests.arrays import filled, same
from tests.small_world import part_of

from coowned import InputError, from_table, read_mail
from coowned.attribution.graph import read_only
from coowned.content import token_table
from coowned.content.columns import read_labels
from coowned.content.data import Draw, random_streams
from coowned.content.text import SPECIAL_TOKENS, Vocabulary
from coowned.content.token_table import (
    Copies,
    LabelledTokenTable,
    Masked,
    Texts,
    Tokens,
    TokenTable,
    mask_texts,
    max_predictions,
)
from coowned.exact.keys import LANES, WORDS, Purpose, RunKey, fill_words
from coowned.models.bert import BertMaskedLM
from coowned.runs.config import TrainConfig

VOCABULARY_WORDS = tuple(f"w{number}" for number in range(60))
VOCABULARY = Vocabulary((*SPECIAL_TOKENS, *VOCABULARY_WORDS))
LENGTH = 40
KEY = RunKey.from_seed(3)


def corpus(count=30, seed=0):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(VOCABULARY_WORDS, rng.integers(1, 60))) for _ in range(count)]


def table(texts, **columns):
    users = [[f"u{number % 7}", f"u{number % 3}"] for number in range(len(texts))]
    columns = {"users": users, "text": pa.array(texts, pa.string()), **columns}
    return from_examples(from_table(pa.table(columns), example_id="id" if "id" in columns else None))


def from_examples(examples, text="text"):
    return TokenTable.from_examples(examples, text=text, vocabulary=VOCABULARY, sequence_length=LENGTH)


def draw(step=0, copies=0, count=1, key=KEY):
    return Draw(key, step, np.broadcast_to(np.asarray(copies, np.int32), count))


def restored(found):
    """Tokens as they were before some were hidden."""
    rows = []
    for tokens, length, positions, targets, weights in zip(*found.values(), strict=True):
        whole = tokens.copy()
        whole[positions[weights > 0]] = targets[weights > 0]
        assert (whole[length:] == VOCABULARY.pad_id).all()
        rows.append([VOCABULARY.tokens[number] for number in whole[:length]])
    return rows


def test_shapes_and_types():
    data = table(corpus())
    assert data.shapes() == {"tokens": (40,), "lengths": (), "positions": (6,), "targets": (6,), "weights": (6,)}
    assert data.dtypes()["weights"] == np.float32
    assert {data.dtypes()[name] for name in ("tokens", "lengths", "positions", "targets")} == {np.dtype(np.int32)}
    assert list(data.dtypes()) == list(data.shapes())


def test_fill_gives_the_tokens():
    texts = [*corpus(), None, "", "w1"]
    data = table(texts)
    expected = [["[CLS]", *text.split()[: LENGTH - 2], "[SEP]"] if text else [] for text in texts]
    assert restored(filled(data, np.arange(33))) == expected
    assert restored(filled(data, [4, 4, 31], draw(copies=[0, 1, 0], count=3))) == [expected[4], expected[4], []]
    assert data.texts.num_empty == 2


def test_masks_are_new_for_every_step_and_copy():
    data = table(corpus())
    long = np.flatnonzero(np.diff(data.texts.offsets) == LENGTH)[:8]
    masks = [
        filled(data, long, which)["positions"].tobytes()
        for which in (
            draw(0, 0, 8), draw(1, 0, 8), draw(0, 1, 8), draw(1, 1, 8), draw(0, 0, 8, RunKey.from_seed(4)), None,
        )
    ]  # fmt: skip
    assert len(set(masks)) == 6
    assert filled(data, long, draw(1, 1, 8))["positions"].tobytes() == masks[3]
    assert filled(data, long)["positions"].tobytes() == masks[5]  # outside training there is nothing to be drawn


def test_part_equals_the_whole():
    data = table(corpus())
    part = part_of(part_of(data, np.arange(10, 25)), np.array([5, 3, 9]))
    assert part.graph.num_examples == 3
    assert same(filled(part, [1, 0, 2]), filled(data, [13, 15, 19]))
    which = draw(7, [0, 2, 1], 3)
    assert same(filled(part, [1, 0, 2], which), filled(data, [13, 15, 19], which))
    assert np.shares_memory(part.texts.ids, data.texts.ids)


def test_examples_do_not_depend_on_each_other():
    texts = corpus()
    data, other = table(texts), table([*corpus(seed=1)[:12], texts[12], *[None] * 17])
    for which in (None, draw(2, 1)):
        alone = filled(data, [12], which)
        assert same(alone, filled(other, [12], which))
    together = filled(data, [3, 12, 5], draw(2, [0, 1, 0], 3))
    assert all(np.array_equal(together[name][1], alone[name][0]) for name in alone)


def test_text_without_tokens_adds_nothing():
    found = filled(table(["w1 w2", None, " \n"]), [0, 1, 2], draw(count=3))
    assert found["lengths"].tolist() == [4, 0, 0]
    assert found["weights"].sum(axis=1).tolist() == [1, 0, 0]
    assert (found["tokens"][1:] == VOCABULARY.pad_id).all()


def test_several_columns_are_read_one_after_another():
    columns = {"users": [["a"], ["b"], ["c"]], "subject": ["w1", None, "w3"], "body": ["w4 w5", "w6", None]}
    data = from_examples(from_table(pa.table(columns)), ["subject", "body"])
    assert [row[1:-1] for row in restored(filled(data, [0, 1, 2]))] == [["w1", "w4", "w5"], ["w6"], ["w3"]]


def test_example_files_name_columns_there_are(tmp_path):
    folder = Path(__file__).parents[2] / "examples"
    configs = [TrainConfig.read(folder / name) for name in ("abstracts.toml", "mailbox.toml")]
    (tmp_path / "mail.mbox").write_text("From a\nFrom: a@x.org\nMessage-ID: <1@x>\nSubject: w1\n\nw2 w3\n")
    abstracts = from_table(pa.table({"users": [["a"]], "text": ["w1 w2 w3"], "example_id": ["p1"]}))
    for config, examples in zip(configs, (abstracts, read_mail(tmp_path / "mail.mbox")), strict=True):
        assert isinstance(config.model, BertMaskedLM)
        assert restored(filled(from_examples(examples, config.model.text), [0]))[0][1:-1] == ["w1", "w2", "w3"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("body", "no column 'body', which the model reads; they have .*text"),
        ("number", "column 'number' must contain text, not int64; name a column of text"),
        (["text", "number"], "column 'number' must contain text"),
        ([], "must name one or more columns"),
    ],
)
def test_bad_text_columns(text, says):
    columns = {"text": ["w1", "w2"], "number": [1, 2], "nothing": pa.nulls(2), "blank": ["", " "]}
    examples = from_table(pa.table({"users": [["a"], ["b"]], **columns}))
    with pytest.raises(InputError, match=says):
        from_examples(examples, text)


def test_empty_texts_do_not_refuse():
    examples = from_table(pa.table({"users": [["a"], ["b"]], "nothing": pa.nulls(2), "blank": ["", " "]}))
    for text in ("nothing", "blank", ["blank", "nothing"]):
        assert from_examples(examples, text).texts.num_empty == 2


def test_bad_rows_and_arrays():
    data = table(corpus(3))
    for rows in ([0, 0, 1], [0, 1, 3], [0, 1]):
        with pytest.raises(InputError, match="rows must"):
            dataclasses.replace(data, rows=np.array(rows))
    with pytest.raises(InputError, match="examples must be in"):
        filled(data, [3])
    with pytest.raises(InputError, match="copy_numbers must have 2 entries"):
        filled(data, [0, 1], draw(count=1))
    out = {name: np.zeros((2, *shape), data.dtypes()[name]) for name, shape in data.shapes().items()}
    out["tokens"] = out["tokens"][:, :-1]
    with pytest.raises(InputError, match="'tokens'"):
        data.fill(np.array([0, 1]), out)


def test_token_digest_follows_content():
    texts = corpus(6)
    data = table(texts, id=list("abcdef"))
    assert data.digest == table(texts, id=list("abcdef")).digest
    changed = [*texts[:5], texts[5] + " w1" if len(texts[5].split()) < 38 else "w1"]
    swapped = pa.table({"users": [["u"]] * 2, "text": ["w1", "w2"], "id": ["a", "b"]})
    backwards = swapped.set_column(2, "id", pa.array(["b", "a"]))
    digests = [
        data.digest,
        table(changed, id=list("abcdef")).digest,
        table(texts[::-1], id=list("abcdef")).digest,
        table(texts, id=list("abcdeg")).digest,
        table(texts).digest,
        part_of(data, np.arange(5)).digest,
        part_of(data, np.arange(6)[::-1]).digest,
        # One set of ids and users, one list of texts; but whose text is whose differs.
        from_examples(from_table(swapped, example_id="id")).digest,
        from_examples(from_table(backwards, example_id="id")).digest,
    ]
    assert len(set(digests)) == 9


# ---- with labels -----------------------------------------------------------------------------------------------------


def labelled(labels, texts=("w1 w2", "", "w3 w4 w5")):
    users = [[f"u{number}"] for number in range(len(texts))]
    examples = from_table(pa.table({"users": users, "text": list(texts), "kind": labels}))
    known = read_labels(examples.payload, "kind", ("a", "b"))
    return LabelledTokenTable.from_examples(
        examples, text="text", vocabulary=VOCABULARY, sequence_length=LENGTH, labels=known
    )


def test_labelled_fill_gives_tokens_and_labels():
    data = labelled(["b", "a", "c"])
    found = filled(data, [2, 0, 1])
    ids = VOCABULARY.ids
    assert found["tokens"][0, :5].tolist() == [ids["[CLS]"], ids["w3"], ids["w4"], ids["w5"], ids["[SEP]"]]
    assert found["lengths"].tolist() == [5, 4, 0]
    np.testing.assert_array_equal(found["labels"], [np.nan, 1, 0])
    assert found["weights"].tolist() == [0, 1, 0]  # of no class; usable; no text
    assert all(
        np.array_equal(array, found[name], equal_nan=name == "labels")
        for name, array in filled(data, [2, 0, 1], draw(step=5, copies=1, count=3)).items()
    )
    part = part_of(data, [2, 0])
    np.testing.assert_array_equal(filled(part, [1])["tokens"], found["tokens"][1:2])
    assert data.counts() == {"truncated_texts": 0, "empty_texts": 1, "unusable_labels": 1}


def test_labelled_digest_follows_the_labels():
    assert labelled(["b", "a", "c"]).digest == labelled(["b", "a", "x"]).digest
    assert labelled(["b", "a", "c"]).digest != labelled(["a", "a", "c"]).digest


PAD, CLS, SEP, MASK, FIRST, SIZE = 0, 2, 3, 4, 5, 50  # a vocabulary of 50, five of them special
MASKS_KEY = RunKey.from_seed(1).derive(Purpose.MASKS, step=0)
NEXT = RunKey.from_seed(1).derive(Purpose.MASKS, step=1)
FALSE_ALARM = 1e-6  # of every chi-square below; seeds are fixed, so that a pass is a pass for good


def texts(lengths, seed=0):
    """Ids and offsets of random texts of so many candidates each; 0 is an empty row."""
    rng = np.random.default_rng(seed)
    rows = [[CLS, *rng.integers(FIRST, SIZE, count), SEP] if count else [] for count in lengths]
    offsets = np.cumsum([0, *map(len, rows)])
    return np.array([token for row in rows for token in row], np.uint16), offsets


def masked(ids, offsets, rows=None, copies=0, *, key=MASKS_KEY, sequence_length=32):
    rows = np.arange(len(offsets) - 1) if rows is None else np.asarray(rows, np.int64)
    most = max_predictions(sequence_length)
    out = {
        "tokens": np.full((len(rows), sequence_length), -1, np.int32),
        "lengths": np.full(len(rows), -1, np.int32),
        "positions": np.full((len(rows), most), -1, np.int32),
        "targets": np.full((len(rows), most), -1, np.int32),
        "weights": np.full((len(rows), most), -1, np.float32),
    }
    copies = read_only(np.broadcast_to(np.asarray(copies, np.int32), len(rows)).copy())  # as those of a batch
    mask_texts(key, Texts(ids, offsets), Copies(rows, copies), Tokens(MASK, PAD, SIZE), Masked(**out))
    return out


def is_likely(observed, expected):
    return scipy.stats.chisquare(observed, expected).pvalue > FALSE_ALARM


@pytest.mark.parametrize(("length", "most"), [(3, 1), (20, 3), (21, 4), (100, 15), (128, 20), (512, 77)])
def test_room_for_predictions(length, most):
    assert max_predictions(length) == most


def test_a_sequence_needs_room_for_a_token():
    with pytest.raises(InputError, match="sequence_length must be an integer of at least 3"):
        max_predictions(2)


def test_masks_follow_from_the_key():
    ids, offsets = texts([30] * 20)
    first = masked(ids, offsets)
    assert same(first, masked(ids, offsets))
    evaluation, _ = random_streams(None, Purpose.MASKS, count=20, public_seed=1)
    for key in (NEXT, RunKey.from_seed(2).derive(Purpose.MASKS, step=0), evaluation):
        other = masked(ids, offsets, key=key)
        assert not np.any(np.all(first["positions"] == other["positions"], axis=1))  # 30 choose 5 sets of positions
    assert same(masked(ids, offsets, key=evaluation), masked(ids, offsets, key=evaluation))


def test_copies_have_masks_of_their_own():
    ids, offsets = texts([30])
    found = masked(ids, offsets, [0] * 200, np.arange(200))["positions"]
    assert len(np.unique(found, axis=0)) > 195  # of 142,506 sets, 200 draws: 0.14 repeats expected
    # Equal texts in two rows are as different as two copies of one.
    twice = np.concatenate([ids, ids]), np.array([0, len(ids), 2 * len(ids)])
    assert not same(masked(*twice, [0]), masked(*twice, [1]))


def test_other_copies_do_not_matter():
    ids, offsets = texts([30, 7, 0, 25, 12])
    rows, copies = np.array([3, 0, 4, 2, 3, 1]), np.array([1, 0, 7, 0, 0, 2])
    together = masked(ids, offsets, rows, copies)
    for i in range(len(rows)):
        alone = masked(ids, offsets, rows[i : i + 1], copies[i])
        assert all(np.array_equal(together[name][i], alone[name][0]) for name in alone)
    # Nor what other rows hold: only this row's own tokens are kept.
    others = ids.copy()
    begin, end = offsets[3], offsets[4]
    others[:begin] = others[end:] = FIRST
    changed = masked(others, offsets, [3], [1])
    assert all(np.array_equal(changed[name][0], together[name][0]) for name in changed)


@given(
    st.tuples(st.integers(0, 2**40), st.integers(0, 2**31 - 1), st.integers(0, 1000)),
    st.tuples(st.integers(0, 2**40), st.integers(0, 2**31 - 1), st.integers(0, 1000)),
)
def test_streams_of_copies_are_disjoint(one, other):
    def blocks(row, copy, chunk):
        """(nonce, first block) of a chunk of a copy's stream: what ChaCha20 sees beside the key."""
        first = (copy * int(token_table.CHUNKS_A_COPY) + chunk) * LANES
        assert first + LANES <= 2**64
        return row, first

    assert (blocks(*one) == blocks(*other)) == (one == other)


def test_stream_is_read_from_the_copys_place():
    def first_of(row, copy):
        words, cursor = np.empty(WORDS, np.uint64), np.array([WORDS, copy << 26])
        token_table.below(MASKS_KEY, np.uint64(row), words, cursor, 7)
        return words[0]

    expected = np.empty(1, np.uint64)
    for row, copy in ((0, 0), (5, 0), (5, 3)):
        fill_words(MASKS_KEY, np.uint64(row), copy << 26, expected)
        assert first_of(row, copy) == expected[0]


def test_words_of_the_incomplete_part_are_passed_over():
    words = np.array([0, 1, 2, 3, 2**64 - 1, 9], np.uint64)  # 2^64 mod 10 = 6: below 6 is passed over
    cursor = np.array([0, 0])
    assert token_table.below(MASKS_KEY, np.uint64(0), words, cursor, 10) == 5
    assert token_table.below(MASKS_KEY, np.uint64(0), words, cursor, 10) == 9
    assert cursor.tolist() == [6, 0]
    assert (
        0 <= token_table.below(MASKS_KEY, np.uint64(0), words, cursor, 10) < 10
    )  # used up: the next words of the stream
    assert cursor[1] == 1


@pytest.mark.parametrize(
    ("candidates", "hidden"), [(1, 1), (2, 1), (9, 1), (10, 2), (16, 2), (17, 3), (30, 5), (100, 15), (126, 19)]
)
def test_number_hidden(candidates, hidden):
    ids, offsets = texts([candidates])
    found = masked(ids, offsets, sequence_length=128)
    assert np.count_nonzero(found["weights"][0]) == hidden == max(1, int(0.15 * candidates + 0.5))


def test_never_more_than_there_is_room_for():
    ids, offsets = texts([30])
    out = {
        "tokens": np.zeros((1, 32), np.int32),
        "lengths": np.zeros(1, np.int32),
        "positions": np.zeros((1, 2), np.int32),
        "targets": np.zeros((1, 2), np.int32),
        "weights": np.zeros((1, 2), np.float32),
    }
    rows, copies = np.zeros(1, np.int64), np.zeros(1, np.int32)
    mask_texts(MASKS_KEY, Texts(ids, offsets), Copies(rows, copies), Tokens(MASK, PAD, SIZE), Masked(**out))
    assert out["weights"].tolist() == [[0.5, 0.5]]


def test_everything_else_stays_as_it_was():
    ids, offsets = texts([30, 1, 17, 3], seed=4)
    found = masked(ids, offsets)
    for row in range(4):
        text = ids[offsets[row] : offsets[row + 1]]
        count = np.count_nonzero(found["weights"][row])
        positions, targets = found["positions"][row], found["targets"][row]
        assert found["lengths"][row] == len(text)
        assert np.all(np.diff(positions[:count]) > 0)
        assert np.all((positions[:count] >= 1) & (positions[:count] <= len(text) - 2))
        assert np.array_equal(targets[:count], text[positions[:count]])
        assert not positions[count:].any()
        assert not targets[count:].any()
        restored = found["tokens"][row].copy()
        restored[positions[:count]] = targets[:count]
        assert restored.tolist() == [*text.tolist(), *[PAD] * (32 - len(text))]


def test_weights_sum_to_one():
    found = masked(*texts(range(1, 31)))
    assert np.allclose(found["weights"].sum(axis=1), 1, atol=1e-6)
    for row in found["weights"]:
        assert len(set(row[row > 0])) == 1


def test_text_without_tokens_hides_nothing():
    ids, offsets = np.array([CLS, SEP, CLS, 9, SEP], np.uint16), np.array([0, 0, 2, 5])
    found = masked(ids, offsets)
    assert found["lengths"].tolist() == [0, 0, 3]
    assert (found["tokens"][:2] == PAD).all()
    for name in ("positions", "targets", "weights"):
        assert not found[name][:2].any()
    assert found["positions"][2, 0] == 1


def test_positions_are_uniform():
    ids, offsets = texts([20])  # 3 of 20
    found = masked(ids, offsets, np.zeros(20_000), np.arange(20_000))["positions"][:, :3] - 1
    assert is_likely(np.bincount(found.ravel(), minlength=20), np.full(20, 3_000))
    sets = collections.Counter(map(tuple, found.tolist()))
    assert is_likely([sets[a, b, c] for a in range(20) for b in range(a + 1, 20) for c in range(b + 1, 20)],
                     np.full(1140, 20_000 / 1140))  # fmt: skip


def test_what_hides_a_token():
    ids, offsets = texts([20])
    found = masked(ids, offsets, np.zeros(40_000), np.arange(40_000))
    positions, targets = found["positions"][:, :3], found["targets"][:, :3]
    shown = np.take_along_axis(found["tokens"], positions, axis=1)
    total = shown.size
    # A random token is [MASK], or the token itself, one time in 50.
    masks, kept = np.sum(shown == MASK), np.sum(shown == targets)
    parts = np.array([0.8 + 0.1 / SIZE, 0.1 + 0.1 / SIZE, 0.1 - 0.2 / SIZE])
    assert is_likely([masks, kept, total - masks - kept], parts * total)
    others = np.bincount(shown[(shown != MASK) & (shown != targets)], minlength=SIZE)
    expected = np.full(SIZE, 0.1 / SIZE * total)  # special tokens too
    expected[MASK] = 0
    for token in ids[1:-1]:
        expected[token] -= 0.1 / SIZE * total / 20
    few = expected > 0
    assert not others[~few].any()
    assert is_likely(others[few], expected[few] * others.sum() / expected.sum())
    # The three ways do not depend on the place.
    ways = np.where(shown == MASK, 0, np.where(shown == targets, 1, 2))
    table = np.histogram2d(positions.ravel(), ways.ravel(), bins=(np.arange(0.5, 21), np.arange(-0.5, 3)))[0]
    assert scipy.stats.chi2_contingency(table).pvalue > FALSE_ALARM


@pytest.mark.parametrize("way", ["copies", "steps", "rows"])
def test_masks_are_independent(way):
    """Whether a token is hidden in one says nothing about another: how many positions two masks share."""
    ids, offsets = texts([20] * 10_001)
    if way == "copies":
        found = masked(ids, offsets, np.zeros(10_001), np.arange(10_001))["positions"][:, :3]
        one, other = found[:-1], found[1:]
    elif way == "rows":
        found = masked(ids, offsets)["positions"][:, :3]
        one, other = found[:-1], found[1:]
    else:
        one = masked(ids, offsets)["positions"][:-1, :3]
        other = masked(ids, offsets, key=NEXT)["positions"][:-1, :3]
    shared = np.sum(one[:, :, None] == other[:, None, :], axis=(1, 2))
    expected = scipy.stats.hypergeom(20, 3, 3).pmf(np.arange(4)) * 10_000
    expected[2:] = expected[2:].sum(), 0  # all three are shared too rarely for a cell of its own
    assert is_likely(np.bincount(np.minimum(shared, 2)), expected[:3])


def test_long_texts_read_more_than_one_chunk():
    ids, offsets = texts([1000])
    found = masked(ids, offsets, sequence_length=1002)
    count = np.count_nonzero(found["weights"])
    assert count == 150
    assert found["positions"][0, count - 1] > 900  # not all among the first


def test_large_vocabularies():
    ids, offsets = texts([30] * 5)
    assert same(masked(ids, offsets), masked(ids.astype(np.int32), offsets))
