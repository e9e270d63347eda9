"""Texts as training data: tokens with a label, or masked anew for every copy of every step.

Which tokens are hidden is a pure function of a key, the example and the copy. As in BERT: 15% of a text's own tokens
are to be predicted; of those 80% are replaced by [MASK], 10% by a token drawn from the whole vocabulary, 10% left as
they are. Nothing of any other example matters, so that masks are part of an example's own gradient and need no
accounting.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from coowned import validate
from coowned.attribution.examples import AttributedExamples
from coowned.attribution.graph import AttributionGraph
from coowned.content.columns import text_column
from coowned.content.data import Draw, RowTable, random_streams
from coowned.content.derived import Arrays, MappedFiles
from coowned.content.text import TokenizedTexts, Vocabulary, tokenize
from coowned.errors import InputError
from coowned.exact.compiled import compiled
from coowned.exact.keys import WORDS, Purpose, StreamKey, fill_words

_PUBLIC_SEED = 1_810_048_050  # held-out examples are scored under reproducible masks


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenizedExamples(RowTable):
    """Tokens of every example of a graph.

    Attributes:
      texts: tokens of every row.
    """

    texts: TokenizedTexts

    def __post_init__(self) -> None:
        self._check_rows(texts=self.texts)

    @classmethod
    def from_examples(
        cls,
        examples: AttributedExamples,
        *,
        text: str | Sequence[str],
        vocabulary: Vocabulary,
        sequence_length: int,
        lowercase: bool = True,
        **more: Any,
    ) -> Self:
        """Tokenizes text columns of the payload, joined by newlines; `more`: the other attributes."""
        column = text_column(examples.payload, text)
        texts = tokenize(column, vocabulary, sequence_length=sequence_length, lowercase=lowercase)
        return cls(graph=examples.graph, texts=texts, **more)

    def stored(self) -> Arrays:
        return {"ids": self.texts.ids, "offsets": self.texts.offsets}

    def with_stored(self, graph: AttributionGraph, arrays: Arrays, mapped: MappedFiles | None) -> Self:
        texts = dataclasses.replace(self.texts, ids=arrays["ids"], offsets=arrays["offsets"])
        return dataclasses.replace(self, graph=graph, texts=texts, mapped=mapped, **self._beside_texts(arrays))

    def _beside_texts(self, arrays: Arrays) -> Arrays:
        return {}

    def counts(self) -> dict[str, int]:
        """Returns counts of what the texts hold: for a private log only."""
        return {"truncated_texts": self.texts.num_truncated, "empty_texts": self.texts.num_empty}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"tokens": (self.texts.sequence_length,), "lengths": ()}

    def dtypes(self) -> dict[str, np.dtype[Any]]:
        return dict.fromkeys(self.shapes(), np.dtype(np.int32)) | {"weights": np.dtype(np.float32)}

    @property
    def digest(self) -> str:
        return self._digest(self.texts.vocabulary.digest, self.texts.sequence_length)

    def _rows_in(self, examples: npt.NDArray[np.int64], out: dict[str, npt.NDArray[Any]]) -> npt.NDArray[np.int64]:
        """Returns the rows of examples, which must have been read and fit `out`: compiled code checks no bounds."""
        rows = self._rows_of(np.ascontiguousarray(examples, np.int64))
        if len(rows) and (rows.min() < 0 or rows.max() >= len(self.texts)):
            raise InputError(f"examples must be in [0, {self.graph.num_examples})")
        for name, shape in self.shapes().items():
            if len(out[name]) < len(rows) or out[name].shape[1:] != shape:
                raise InputError(f"out[{name!r}] must be of shape ({len(rows)} or more, *{shape})")
        return rows


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenTable(TokenizedExamples):
    """Token data for masked language modelling: `fill` masks the tokens.

    Masks of a training step follow from (run key, step, row in the whole table, copy number), those of an evaluation
    from the row alone: every model is then compared on the same ones. A text without tokens has length 0 and weights 0:
    its example is drawn and counted like any other, and adds nothing.

    Guarantees:
      - `fill` writes the tokens of row `rows[i]` for example i, in whatever part of the table.
        (test_fill_gives_the_tokens, test_part_equals_the_whole)
      - Masks are new in every step and every copy, and the same whenever they are asked for.
        (test_masks_are_new_for_every_step_and_copy)
      - What one example gets does not depend on what others hold.   (test_examples_do_not_depend_on_each_other)
      - Two tables with other tokens, rows, ids or attribution have other digests.   (test_token_digest_follows_content)
    Cost: `fill` takes some microseconds a copy, without Python's lock.

    Example:
      >>> from coowned import from_table
      >>> examples = from_table({"users": [["a"], ["b"]], "text": ["hello there", "hello"]})
      >>> vocabulary = Vocabulary(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "there"))
      >>> table = TokenTable.from_examples(examples, text="text", vocabulary=vocabulary, sequence_length=8)
      >>> table.shapes()
      {'tokens': (8,), 'lengths': (), 'positions': (2,), 'targets': (2,), 'weights': (2,)}
    """

    def shapes(self) -> dict[str, tuple[int, ...]]:
        most = max_predictions(self.texts.sequence_length)
        return {**super().shapes(), "positions": (most,), "targets": (most,), "weights": (most,)}

    def fill(self, examples: npt.NDArray[np.int64], out: dict[str, npt.NDArray[Any]], draw: Draw | None = None) -> None:
        rows = self._rows_in(examples, out)
        key, copy_numbers = random_streams(draw, Purpose.MASKS, count=len(rows), public_seed=_PUBLIC_SEED)
        vocabulary = self.texts.vocabulary
        tokens = Tokens(vocabulary.mask_id, vocabulary.pad_id, vocabulary.size)
        masked = Masked(**{name: out[name] for name in self.shapes()})
        mask_texts(key, Texts(self.texts.ids, self.texts.offsets), Copies(rows, copy_numbers), tokens, masked)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LabelledTokenTable(TokenizedExamples):
    """Tokens with the index of a class.

    An example without a text, or whose label is none of the classes, has the weight 0: it is drawn and counted like any
    other, and adds nothing.

    Guarantees:
      - `fill` gives tokens and label of row `rows[i]` for example i, in every step alike.
        (test_labelled_fill_gives_tokens_and_labels)
      - Two tables with other labels have other digests.   (test_labelled_digest_follows_the_labels)

    Attributes:
      labels: (rows of texts,) float32, NaN where it is none of the classes.

    Example:
      >>> from coowned import from_table
      >>> from coowned.content.columns import read_labels
      >>> examples = from_table({"users": [["a"], ["b"]], "text": ["hello", "there"], "y": ["ham", "eggs"]})
      >>> vocabulary = Vocabulary(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "there"))
      >>> labels = read_labels(examples.payload, "y", ["spam", "ham"])
      >>> table = LabelledTokenTable.from_examples(
      ...     examples, text="text", vocabulary=vocabulary, sequence_length=8, labels=labels
      ... )
      >>> table.labels, table.counts()["unusable_labels"]
      (array([ 1., nan], dtype=float32), 1)
    """

    labels: npt.NDArray[np.float32] = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "labels", np.ascontiguousarray(self.labels, np.float32))
        validate.same_length(len(self.texts), labels=self.labels)

    def stored(self) -> Arrays:
        return {**super().stored(), "labels": self.labels}

    def _beside_texts(self, arrays: Arrays) -> Arrays:
        return {"labels": arrays["labels"]}

    def counts(self) -> dict[str, int]:
        return {**super().counts(), "unusable_labels": int(np.isnan(self.labels).sum())}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {**super().shapes(), "labels": (), "weights": ()}

    def dtypes(self) -> dict[str, np.dtype[Any]]:
        return {**super().dtypes(), "labels": np.dtype(np.float32)}

    def fill(self, examples: npt.NDArray[np.int64], out: dict[str, npt.NDArray[Any]], draw: Draw | None = None) -> None:
        rows = self._rows_in(examples, out)
        batch = {name: array[: len(rows)] for name, array in out.items()}
        texts = self.texts
        copy_texts(texts.ids, texts.offsets, rows, texts.vocabulary.pad_id, batch["tokens"], batch["lengths"])
        batch["labels"][:] = self.labels[rows]
        batch["weights"][:] = np.isfinite(batch["labels"]) & (batch["lengths"] > 0)


CHUNKS_A_COPY = np.int64(1 << 26)  # a copy number has 31 bits, a chunk's number 58: no two copies share a chunk

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
            cursor[0], cursor[1] = WORDS, np.int64(copies.numbers[i]) * CHUNKS_A_COPY
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
        if below(key, nonce, words, cursor, candidates - j) >= hidden - found:
            continue
        positions[found] = j + 1
        targets[found] = tokens[j + 1]
        found += 1
        way = below(key, nonce, words, cursor, 10)
        if way < 8:
            tokens[j + 1] = vocabulary.mask_id
        elif way == 8:
            tokens[j + 1] = below(key, nonce, words, cursor, vocabulary.size)
        if found == hidden:
            break


@_njit
def below(key, nonce, words, cursor, bound):
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
