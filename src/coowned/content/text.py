"""Texts as tokens: WordPiece with a given vocabulary.

Each text is tokenized separately, so that its tokens are a function of it and of the vocabulary alone. The vocabulary
is an input: one learned from the protected texts would carry their words into every other example and, as a file
beside the model, to everybody who receives the model.
"""

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from coowned import validate
from coowned.attribution.identifiers import is_text
from coowned.errors import InputError
from coowned.files import write_file

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_AT_ONCE = 4096  # texts
_CHARACTERS_A_TOKEN = 6  # most texts reach their limit within so many; the others are read again, whole
_LONGEST_WORD = 100  # characters; beyond, BERT takes a word for unknown


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The `size` tokens a model knows; a token's id is its index, or `ids[token]`.

    Guarantees:
      - The five special tokens are present, and no token occurs twice.   (test_bad_vocabularies)
      - `read` gives what `write` wrote.   (test_vocabulary_round_trip)
    What it is not: proof that the tokens were not learned from the texts to be protected; nothing can tell that from
    the file. Use one that is older than the data, or `learn_vocabulary` on public texts.

    Example:
      >>> vocabulary = Vocabulary((*SPECIAL_TOKENS, "hello", "##s"))
      >>> vocabulary.size, vocabulary.mask_id, vocabulary.pad_id
      (7, 4, 0)
    """

    tokens: tuple[str, ...] = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", tuple(self.tokens))
        _check_tokens(self.tokens, "the vocabulary", "token")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Vocabulary":
        """Reads a vocab.txt in BERT's format: one token per line, in the order of their ids."""
        file = Path(path)
        try:
            # Only line feeds end a token: others may hold characters that Python takes for ends of lines.
            lines = file.read_bytes().decode("utf-8").split("\n")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
            raise InputError(
                f"{file}: the vocabulary cannot be read ({error.strerror}); give a vocab.txt, one token per line, "
                "such as the one that comes with a BERT checkpoint"
            ) from None
        except UnicodeDecodeError:
            raise InputError(f"{file}: not UTF-8 text; give a vocab.txt, one token per line") from None
        if lines[-1] == "":
            lines.pop()
        tokens = tuple(line.removesuffix("\r") for line in lines)
        _check_tokens(tokens, str(file), "line")
        return cls(tokens)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes a vocab.txt atomically."""
        write_file(Path(path), "".join(f"{token}\n" for token in self.tokens).encode())

    @property
    def size(self) -> int:
        return len(self.tokens)

    @functools.cached_property
    def ids(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self.tokens)}

    @property
    def pad_id(self) -> int:
        return self.ids["[PAD]"]

    @property
    def mask_id(self) -> int:
        return self.ids["[MASK]"]

    @functools.cached_property
    def digest(self) -> str:
        """A digest of the tokens and their order."""
        content = json.dumps(self.tokens).encode()
        return hashlib.blake2b(content, digest_size=32, person=b"coowned-vocab-1").hexdigest()


def learn_vocabulary(texts: Iterable[str], *, size: int, public: bool) -> Vocabulary:
    """Learns WordPiece tokens from texts declared public; raises an error for any others.

    Guarantees:
      - Texts not declared public are not even looked at.   (test_private_texts_teach_no_vocabulary)
    What it is not: repeatable. Pieces that are equally frequent come in any order, so write the result to a file once.

    Example:
      >>> learn_vocabulary(["low lower lowest"] * 3, size=40, public=True).ids["low"] > 4
      True
    """
    if public is not True:
        raise InputError(
            "a vocabulary learned from private texts reveals their words, which no guarantee covers; learn it from "
            "public texts with public=True, or use an existing one, such as BERT's vocab.txt"
        )
    validate.integer(at_least=len(SPECIAL_TOKENS) + 1, size=size)
    from tokenizers import trainers

    tokenizer = word_piece({token: number for number, token in enumerate(SPECIAL_TOKENS)}, lowercase=True)
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=list(SPECIAL_TOKENS), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    learned = tokenizer.get_vocab()
    return Vocabulary(tuple(sorted(learned, key=learned.__getitem__)))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenizedTexts:
    """Texts as concatenated ids: text r is ids[offsets[r]:offsets[r + 1]], that is [CLS], its tokens, [SEP].

    A text without any token is an empty row. Both arrays are read-only.

    Attributes:
      sequence_length: most ids of a text.
      ids: (total,) uint16, or int32 where the vocabulary is larger.
      offsets: (texts + 1,) int64.
      num_truncated: texts that were longer. Content: for a log that only the trainer reads, never for a release.
      num_empty: texts without any token. Content likewise.
    """

    vocabulary: Vocabulary = dataclasses.field(repr=False)
    sequence_length: int
    ids: npt.NDArray[Any] = dataclasses.field(repr=False)
    offsets: npt.NDArray[np.int64] = dataclasses.field(repr=False)
    num_truncated: int = dataclasses.field(repr=False)
    num_empty: int = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        validate.integer(at_least=3, sequence_length=self.sequence_length)
        ids = np.ascontiguousarray(self.ids, _id_type(self.vocabulary)).view()
        offsets = np.ascontiguousarray(self.offsets, np.int64).view()
        ids.flags.writeable = offsets.flags.writeable = False
        object.__setattr__(self, "ids", ids)
        object.__setattr__(self, "offsets", offsets)
        lengths = np.diff(offsets)  # (texts,)
        if offsets.ndim != 1 or ids.ndim != 1 or not len(offsets) or offsets[0] != 0 or offsets[-1] != len(ids):
            raise InputError("offsets must go from 0 to the number of ids, one more than there are texts")
        if lengths.min(initial=0) < 0 or lengths.max(initial=0) > self.sequence_length:
            raise InputError(f"a text must have 0 to {self.sequence_length} ids; offsets say otherwise")
        if len(ids) and (ids.min() < 0 or ids.max() >= self.vocabulary.size):
            raise InputError(f"ids must be in [0, {self.vocabulary.size}), the vocabulary's")

    def __len__(self) -> int:
        return len(self.offsets) - 1


def tokenize(
    texts: pa.ChunkedArray | pa.Array, vocabulary: Vocabulary, *, sequence_length: int, lowercase: bool = True
) -> TokenizedTexts:
    """Tokenizes as BERT does: normalized, split at spaces and punctuation, words into the longest known pieces.

    A text longer than the limit is cut. A text that is null, empty or has nothing but spaces is an empty row: an
    example without influence, since what one example holds must not decide which others there are. A special token
    spelled out in a text is ordinary text, and bytes that are not UTF-8 are replaced.

    Guarantees:
      - The ids are those of BERT's own rules.   (test_tokens_of_words, test_special_tokens_cannot_be_written)
      - A text's tokens depend on it alone; cut texts begin like whole ones.   (test_cutting_changes_no_token)
    Cost: linear in the first characters of the texts, on all cores (unless TOKENIZERS_PARALLELISM says false).

    Args:
      sequence_length: most ids of a text, [CLS] and [SEP] included.
      lowercase: False for a cased vocabulary.

    Example:
      >>> vocabulary = Vocabulary((*SPECIAL_TOKENS, "hello", "##s", "!"))
      >>> tokenize(pa.array(["Hellos!", None]), vocabulary, sequence_length=8).ids.tolist()
      [2, 5, 6, 7, 3]
    """
    validate.integer(at_least=3, sequence_length=sequence_length)
    tokenizer = word_piece(vocabulary.ids, lowercase=lowercase)
    max_tokens = sequence_length - 2
    tokenizer.enable_truncation(max_tokens + 1)  # one more than there is room for says that a text is longer
    first, last = vocabulary.ids["[CLS]"], vocabulary.ids["[SEP]"]
    parts: list[npt.NDArray[Any]] = [np.zeros(0, _id_type(vocabulary))]
    lengths: list[int] = [0]
    num_truncated = 0
    for batch in _batches(texts):
        flat: list[int] = []
        for found in _encode(tokenizer, batch, max_tokens):
            num_truncated += len(found) > max_tokens
            lengths.append(min(len(found), max_tokens) + 2 if found else 0)
            flat += [first, *found[:max_tokens], last] if found else []
        parts.append(np.array(flat, _id_type(vocabulary)))
    return TokenizedTexts(
        vocabulary=vocabulary,
        sequence_length=int(sequence_length),
        ids=np.concatenate(parts),
        offsets=np.cumsum(lengths),
        num_truncated=num_truncated,
        num_empty=lengths.count(0) - 1,
    )


def _check_tokens(tokens: tuple[str, ...], name: str, unit: str) -> None:
    if not any(tokens):
        raise InputError(f"{name}: the vocabulary is empty; it needs one token per line")
    seen: dict[str, int] = {}
    for number, token in enumerate(tokens, start=1):
        if token == "":
            raise InputError(f"{name}: {unit} {number} is blank; a token's id is its index: give a complete vocabulary")
        if token in seen:
            raise InputError(
                f"{name}: {unit} {number} and {unit} {seen[token]} are both {token!r}; every token needs one id: "
                "give a vocabulary without duplicates"
            )
        seen[token] = number
    for token in SPECIAL_TOKENS:
        if token not in seen:
            raise InputError(
                f"{name}: no {token} in the vocabulary; masked-language models need "
                f"{', '.join(SPECIAL_TOKENS)}: use the vocabulary of a BERT"
            )


def _id_type(vocabulary: Vocabulary) -> Any:
    return np.uint16 if vocabulary.size <= 1 << 16 else np.int32


def word_piece(ids: dict[str, int], *, lowercase: bool) -> Any:
    """Returns a WordPiece tokenizer with this vocabulary."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=_LONGEST_WORD))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _encode(tokenizer: Any, texts: list[str], max_tokens: int) -> list[list[int]]:
    """Returns the first max_tokens + 1 ids of each text, from its first words only where they are enough."""
    enough = _CHARACTERS_A_TOKEN * (max_tokens + 1)
    # Words are tokenized by themselves, so that a beginning that ends before a space has the whole text's first ids.
    cuts = [text.rfind(" ", 0, enough + 1) if len(text) > enough else -1 for text in texts]
    short = [text if cut <= 0 else text[:cut] for text, cut in zip(texts, cuts, strict=True)]
    found = [encoding.ids for encoding in tokenizer.encode_batch_fast(short, add_special_tokens=False)]
    again = [row for row, cut in enumerate(cuts) if cut > 0 and len(found[row]) <= max_tokens]
    for row, encoding in zip(
        again, tokenizer.encode_batch_fast([texts[row] for row in again], add_special_tokens=False), strict=True
    ):
        found[row] = encoding.ids
    return found


def _batches(texts: pa.ChunkedArray | pa.Array) -> Iterator[list[str]]:
    column = texts if isinstance(texts, pa.ChunkedArray) else pa.chunked_array([texts])
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if not is_text(column.type) and not pa.types.is_null(column.type):
        raise InputError(f"texts must be text, not {column.type}; name a column of text")
    for chunk in column.chunks:
        for begin in range(0, len(chunk), _AT_ONCE):
            batch = chunk.slice(begin, _AT_ONCE).cast(pa.large_string()).cast(pa.large_binary())
            yield [(text or b"").decode("utf-8", "replace") for text in batch.to_pylist()]
