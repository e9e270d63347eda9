"""Masks: what hides, how often, and that it follows from the key alone."""

import collections

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from tests.arrays import same

from coowned import InputError
from coowned.attribution.graph import read_only
from coowned.content import masking
from coowned.content.data import random_streams
from coowned.content.masking import Copies, Masked, Texts, Tokens, mask_texts, max_predictions
from coowned.exact.keys import LANES, WORDS, Purpose, RunKey, fill_words

PAD, CLS, SEP, MASK, FIRST, SIZE = 0, 2, 3, 4, 5, 50  # a vocabulary of 50, five of them special
KEY = RunKey.from_seed(1).derive(Purpose.MASKS, step=0)
NEXT = RunKey.from_seed(1).derive(Purpose.MASKS, step=1)
FALSE_ALARM = 1e-6  # of every chi-square below; seeds are fixed, so that a pass is a pass for good


def texts(lengths, seed=0):
    """Ids and offsets of random texts of so many candidates each; 0 is an empty row."""
    rng = np.random.default_rng(seed)
    rows = [[CLS, *rng.integers(FIRST, SIZE, count), SEP] if count else [] for count in lengths]
    offsets = np.cumsum([0, *map(len, rows)])
    return np.array([token for row in rows for token in row], np.uint16), offsets


def masked(ids, offsets, rows=None, copies=0, *, key=KEY, sequence_length=32):
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
        first = (copy * int(masking._CHUNKS_A_COPY) + chunk) * LANES
        assert first + LANES <= 2**64
        return row, first

    assert (blocks(*one) == blocks(*other)) == (one == other)


def test_stream_is_read_from_the_copys_place():
    def first_of(row, copy):
        words, cursor = np.empty(WORDS, np.uint64), np.array([WORDS, copy << 26])
        masking._below(KEY, np.uint64(row), words, cursor, 7)
        return words[0]

    expected = np.empty(1, np.uint64)
    for row, copy in ((0, 0), (5, 0), (5, 3)):
        fill_words(KEY, np.uint64(row), copy << 26, expected)
        assert first_of(row, copy) == expected[0]


def test_words_of_the_incomplete_part_are_passed_over():
    words = np.array([0, 1, 2, 3, 2**64 - 1, 9], np.uint64)  # 2^64 mod 10 = 6: below 6 is passed over
    cursor = np.array([0, 0])
    assert masking._below(KEY, np.uint64(0), words, cursor, 10) == 5
    assert masking._below(KEY, np.uint64(0), words, cursor, 10) == 9
    assert cursor.tolist() == [6, 0]
    assert 0 <= masking._below(KEY, np.uint64(0), words, cursor, 10) < 10  # used up: the next words of the stream
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
    mask_texts(KEY, Texts(ids, offsets), Copies(rows, copies), Tokens(MASK, PAD, SIZE), Masked(**out))
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
