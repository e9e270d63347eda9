"""Masking of texts: the choice of hidden tokens is a pure function of a key, the example and the copy.

As in BERT: 15% of a text's own tokens are to be predicted; of those 80% are replaced by [MASK], 10% by a token drawn
from the whole vocabulary, 10% left as they are. Nothing of any other example matters, so that masks are part of an
example's own gradient and need no accounting.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from coowned import validate
from coowned.exact.compiled import compiled
from coowned.exact.keys import WORDS, StreamKey, fill_words

_CHUNKS_A_COPY = np.int64(1 << 26)  # a copy number has 31 bits, a chunk's number 58: no two copies share a chunk

_njit = compiled()


def max_predictions(sequence_length: int) -> int:
    """Returns the maximum number of hidden tokens in a sequence: 15% of its length, rounded up.

    >>> max_predictions(128), max_predictions(512)
    (20, 77)
    """
    validate.integer(at_least=3, sequence_length=sequence_length)
    return -(-3 * int(sequence_length) // 20)


class Texts(NamedTuple):
    """Tokenized texts: text r is ids[offsets[r]:offsets[r + 1]]."""

    ids: npt.NDArray[np.uint16] | npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]


class Copies(NamedTuple):
    """The text of each copy, and the number of the copy among those of its text."""

    rows: npt.NDArray[np.int64]  # (n,)
    numbers: npt.NDArray[np.int32]  # (n,)


class Tokens(NamedTuple):
    """The parts of the vocabulary that masking uses."""

    mask_id: int
    pad_id: int
    size: int


class Masked(NamedTuple):
    """The output, one copy per row: positions of hidden tokens (increasing), the tokens, and 1 / their number.

    All three are 0 where there is no more.
    """

    tokens: npt.NDArray[np.int32]  # (n, sequence_length), padded after the text
    lengths: npt.NDArray[np.int32]  # (n,)
    positions: npt.NDArray[np.int32]  # (n, max_predictions)
    targets: npt.NDArray[np.int32]  # (n, max_predictions)
    weights: npt.NDArray[np.float32]  # (n, max_predictions)


def mask_texts(key: StreamKey, texts: Texts, copies: Copies, vocabulary: Tokens, out: Masked) -> None:
    """Writes the masked texts of some copies; `key` is that of the step, or of evaluation.

    A text is [CLS], its tokens, [SEP]; the tokens between are the candidates. max(1, 0.15 candidates rounded, half up)
    of them are hidden, but never more than there is room for; each set of so many is as likely as any other. A text
    without candidates has length 0 and hides nothing.

    Guarantees:
      - What a copy gets follows from the key, its row, its copy number and its text alone.
        (test_masks_follow_from_the_key, test_other_copies_do_not_matter)
      - No two (row, copy number) read the same random words.   (test_streams_of_copies_are_disjoint)
      - 15% of the candidates, every set of positions alike; 80/10/10.   (test_number_hidden,
        test_positions_are_uniform, test_what_hides_a_token)
      - The weights of a text that hides anything sum to 1.   (test_weights_sum_to_one)
    Cost: one chunk of ChaCha20 (4 KB) a copy of up to about 400 tokens, without Python's lock.
    """
    copy_texts(texts.ids, texts.offsets, copies.rows, vocabulary.pad_id, out.tokens, out.lengths)
    _hide_tokens(key, copies, vocabulary, out)


@_njit
def copy_texts(ids, offsets, rows, pad_id, tokens, lengths):
    """Writes texts into rows of tokens, padded at the end, and their lengths: 0 for a text without tokens."""
    for i in range(rows.size):
        begin, length = offsets[rows[i]], offsets[rows[i] + 1] - offsets[rows[i]]
        if length < 3:  # nothing between [CLS] and [SEP]
            length = 0
        lengths[i] = length
        for j in range(length):
            tokens[i, j] = ids[begin + j]
        for j in range(length, tokens.shape[1]):
            tokens[i, j] = pad_id


class _Stream(NamedTuple):
    """The stream of random words of one copy."""

    key: StreamKey
    nonce: np.uint64
    words: npt.NDArray[np.uint64]  # (WORDS,) the chunk that was read last
    cursor: npt.NDArray[np.int64]  # (2,) the next of `words`, and the chunk to read when they are used up


@_njit
def _hide_tokens(key, copies, vocabulary, out):
    words, cursor = np.empty(WORDS, np.uint64), np.empty(2, np.int64)
    for i in range(copies.rows.size):
        hidden = 0
        if out.lengths[i] > 0:
            candidates = np.int64(out.lengths[i]) - 2
            hidden = min(max(1, (3 * candidates + 10) // 20), out.positions.shape[1])
            cursor[0], cursor[1] = WORDS, np.int64(copies.numbers[i]) * _CHUNKS_A_COPY
            stream = _Stream(key, np.uint64(copies.rows[i]), words, cursor)
            _hide(stream, candidates, hidden, vocabulary, out.tokens[i], out.positions[i], out.targets[i])
        for j in range(hidden):
            out.weights[i, j] = np.float32(1.0 / hidden)
        for j in range(hidden, out.positions.shape[1]):
            out.positions[i, j] = 0
            out.targets[i, j] = 0
            out.weights[i, j] = 0


@_njit
def _hide(stream, candidates, hidden, vocabulary, tokens, positions, targets):
    """Hides `hidden` of the tokens from 1 to `candidates` by selection sampling (Knuth, TAOCP 2, algorithm S)."""
    key, nonce, words, cursor = stream
    found = 0
    for j in range(candidates):
        if _below(key, nonce, words, cursor, candidates - j) >= hidden - found:
            continue
        positions[found] = j + 1
        targets[found] = tokens[j + 1]
        found += 1
        way = _below(key, nonce, words, cursor, 10)
        if way < 8:
            tokens[j + 1] = vocabulary.mask_id
        elif way == 8:
            tokens[j + 1] = _below(key, nonce, words, cursor, vocabulary.size)
        if found == hidden:
            break


@_njit
def _below(key, nonce, words, cursor, bound):
    """Returns an unbiased integer in [0, bound); words in the incomplete part of 2^64 are skipped."""
    range_ = np.uint64(bound)
    excess = (np.uint64(0) - range_) % range_  # 2^64 mod bound
    while True:
        if cursor[0] == words.size:
            fill_words(key, nonce, cursor[1], words)
            cursor[0] = 0
            cursor[1] += 1
        word = words[cursor[0]]
        cursor[0] += 1
        if word >= excess:
            return np.int64(word % range_)
