"""Texts as tokens: a vocabulary that is given, WordPiece, and a file of tokens that is mapped into memory.

A text is tokenized by itself, so that its tokens are a function of it and of the vocabulary alone. A vocabulary that
was learned from the texts to be protected would carry words of theirs into every other example and, as a file beside
the model, to whoever gets that: it is an input.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from coowned import validate
from coowned.attribution.identifiers import check_valid, is_text
from coowned.cache import cache_folder, keep
from coowned.errors import InputError
from coowned.files import whole_files

pc: Any = pyarrow.compute  # its functions are made when it is imported: no checker sees them

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
FORMAT = "coowned-tokens-1"  # raise it whenever the tokens of a text, or the file, may change
_AT_ONCE = 4096  # texts
_CHARACTERS_A_TOKEN = 6  # most texts reach their limit within so many; the others are read again, whole
_LONGEST_WORD = 100  # characters; beyond, BERT takes a word for unknown


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The tokens a model knows; a token's id is its place.

    Guarantees:
      - The five special tokens are there, and no token is there twice.   (test_bad_vocabularies)
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
        """Reads a vocab.txt as BERT has it: one token a line, in the order of their ids."""
        place = Path(path)
        try:
            # Only line feeds end a token: others may hold characters that Python takes for ends of lines.
            lines = place.read_bytes().decode("utf-8").split("\n")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
            raise InputError(
                f"{place}: the vocabulary cannot be read ({error.strerror}); name a vocab.txt, one token a line, such "
                "as the one that comes with a BERT checkpoint"
            ) from None
        except UnicodeDecodeError:
            raise InputError(f"{place}: not UTF-8 text; name a vocab.txt, one token a line") from None
        if lines[-1] == "":
            lines.pop()
        tokens = tuple(line.removesuffix("\r") for line in lines)
        _check_tokens(tokens, str(place), "line")
        return cls(tokens)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes a vocab.txt, whole or not at all."""
        with whole_files(path) as (temporary,):
            temporary.write_bytes("".join(f"{token}\n" for token in self.tokens).encode())

    @property
    def size(self) -> int:
        """How many tokens there are."""
        return len(self.tokens)

    @functools.cached_property
    def ids(self) -> dict[str, int]:
        """The id of every token."""
        return {token: number for number, token in enumerate(self.tokens)}

    @property
    def pad_id(self) -> int:
        return self.ids["[PAD]"]

    @property
    def unk_id(self) -> int:
        return self.ids["[UNK]"]

    @property
    def cls_id(self) -> int:
        return self.ids["[CLS]"]

    @property
    def sep_id(self) -> int:
        return self.ids["[SEP]"]

    @property
    def mask_id(self) -> int:
        return self.ids["[MASK]"]

    @property
    def special_ids(self) -> tuple[int, ...]:
        """The ids of `SPECIAL_TOKENS`."""
        return tuple(self.ids[token] for token in SPECIAL_TOKENS)

    @functools.cached_property
    def digest(self) -> str:
        """Names the tokens and their order."""
        content = json.dumps(self.tokens).encode()
        return hashlib.blake2b(content, digest_size=32, person=b"coowned-vocab-1").hexdigest()


def learn_vocabulary(texts: Iterable[str], *, size: int, public: bool) -> Vocabulary:
    """Learns WordPiece tokens from texts that are declared public; refuses any others.

    Guarantees:
      - Texts not declared public are not even looked at.   (test_private_texts_teach_no_vocabulary)
    What it is not: repeatable. Pieces that are equally frequent come in any order, so write the result to a file once.

    Example:
      >>> learn_vocabulary(["low lower lowest"] * 3, size=40, public=True).ids["low"] > 4
      True
    """
    if public is not True:
        raise InputError(
            "a vocabulary learned from private texts gives their words away, and no bound holds for that; learn it "
            "from public texts and say public=True, or take one that exists, such as BERT's vocab.txt"
        )
    validate.integer(at_least=len(SPECIAL_TOKENS) + 1, size=size)
    from tokenizers import trainers

    tokenizer = _tokenizer({token: number for number, token in enumerate(SPECIAL_TOKENS)}, lowercase=True)
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=list(SPECIAL_TOKENS), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    learned = tokenizer.get_vocab()
    return Vocabulary(tuple(sorted(learned, key=learned.__getitem__)))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenizedTexts:
    """Texts as ids, end to end: text r is ids[offsets[r]:offsets[r + 1]], that is [CLS], its tokens, [SEP].

    A text without any token is an empty row. Both arrays are read-only, and usually a mapped file.

    Attributes:
      vocabulary: whose ids these are.
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

    @functools.cached_property
    def digest(self) -> str:
        """Names the tokens of every text, in order, and what they mean."""
        about = [FORMAT, self.vocabulary.digest, self.sequence_length, len(self), str(self.ids.dtype)]
        hashed = hashlib.blake2b(json.dumps(about).encode(), digest_size=32, person=b"coowned-data-1")
        for array in (self.offsets, self.ids):
            hashed.update(array.view(np.uint8))  # pyright: ignore[reportArgumentType]
        return hashed.hexdigest()


def tokenize(
    texts: pa.ChunkedArray | pa.Array, vocabulary: Vocabulary, *, sequence_length: int, lowercase: bool = True
) -> TokenizedTexts:
    """Tokenizes as BERT does: normalized, split at spaces and punctuation, words into the longest known pieces.

    A text longer than the limit is cut. A text that is null, empty or has nothing but spaces is an empty row: an
    example without influence, since what one example holds must not decide which others there are. A special token
    spelled out in a text is ordinary text. The tokens are kept in the cache's folder (`coowned.cache`), in a file that
    its owner alone can read, and mapped from there; the file is as private as the texts, and always safe to delete.

    Guarantees:
      - The ids are those of BERT's own rules.   (test_tokens_of_words, test_special_tokens_cannot_be_written)
      - A text's tokens depend on it alone; cut texts begin like whole ones.   (test_cutting_changes_no_token)
      - What is read back equals what was made; other texts, vocabulary, length or case are another file; a file that
        is damaged is made anew.   (test_cache_hit, test_cache_key, test_damaged_file_is_made_anew)
      - The file appears whole or not at all and is readable by its owner alone; none with COOWNED_CACHE=off.
        (test_cache_file_is_private, test_failed_write_leaves_nothing, test_cache_can_be_switched_off)
    Cost: linear in the first characters of the texts, on all cores (unless TOKENIZERS_PARALLELISM says false); 2 bytes
    a token on disk.

    Args:
      texts: a column of text.
      vocabulary: of the model.
      sequence_length: most ids of a text, [CLS] and [SEP] included.
      lowercase: False for a cased vocabulary.

    Example:
      >>> vocabulary = Vocabulary((*SPECIAL_TOKENS, "hello", "##s", "!"))
      >>> tokenize(pa.array(["Hellos!", None]), vocabulary, sequence_length=8).ids.tolist()
      [2, 5, 6, 7, 3]
    """
    validate.integer(at_least=3, sequence_length=sequence_length)
    column = _as_text(texts)
    folder = cache_folder()
    if folder is None:
        return _tokenize(column, vocabulary, sequence_length, lowercase)
    key = _key(column, vocabulary, sequence_length, lowercase)
    file = folder / "tokens" / f"{key}.arrow"
    kept = _read_kept(file, key, vocabulary, sequence_length, len(column))
    if kept is not None:
        return kept
    made = _tokenize(column, vocabulary, sequence_length, lowercase)
    _keep(file, key, made)
    return _read_kept(file, key, vocabulary, sequence_length, len(column)) or made  # mapped: memory is free again


def _check_tokens(tokens: tuple[str, ...], name: str, place: str) -> None:
    if not any(tokens):
        raise InputError(f"{name}: the vocabulary is empty; it needs one token a line")
    seen: dict[str, int] = {}
    for number, token in enumerate(tokens, start=1):
        if token == "":
            raise InputError(
                f"{name}: {place} {number} is blank; a token's id is its place, so name a whole vocabulary"
            )
        if token in seen:
            raise InputError(
                f"{name}: {place} {number} and {place} {seen[token]} are both {token!r}; every token needs one id, so "
                "name a vocabulary without repeats"
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


def _as_text(texts: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray:
    column = texts if isinstance(texts, pa.ChunkedArray) else pa.chunked_array([texts])
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if not is_text(column.type) and not pa.types.is_null(column.type):
        raise InputError(f"texts must be text, not {column.type}; name a column of text")
    check_valid(column, "text")
    return column.cast(pa.large_string()).fill_null("")


def _tokenizer(ids: dict[str, int], *, lowercase: bool) -> Any:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=_LONGEST_WORD))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _tokenize(column: pa.ChunkedArray, vocabulary: Vocabulary, sequence_length: int, lowercase: bool) -> TokenizedTexts:
    tokenizer = _tokenizer(vocabulary.ids, lowercase=lowercase)
    room = sequence_length - 2
    tokenizer.enable_truncation(room + 1)  # one more than there is room for says that a text is longer
    parts: list[npt.NDArray[Any]] = []
    lengths = np.zeros(len(column), np.int64)
    at = num_truncated = 0
    for batch in _batches(column):
        flat: list[int] = []
        for row, found in enumerate(_encode(tokenizer, batch, room), start=at):
            if not found:
                continue
            num_truncated += len(found) > room
            lengths[row] = min(len(found), room) + 2
            flat += [vocabulary.cls_id, *found[:room], vocabulary.sep_id]
        parts.append(np.array(flat, _id_type(vocabulary)))
        at += len(batch)
    return TokenizedTexts(
        vocabulary=vocabulary,
        sequence_length=int(sequence_length),
        ids=np.concatenate(parts) if parts else np.zeros(0, _id_type(vocabulary)),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        num_truncated=num_truncated,
        num_empty=int(np.sum(lengths == 0)),
    )


def _encode(tokenizer: Any, texts: list[str], room: int) -> list[list[int]]:
    """The first room + 1 ids of each text, from its first words where they are enough."""
    enough = _CHARACTERS_A_TOKEN * (room + 1)
    # Words are tokenized by themselves, so that a beginning that ends before a space has the whole text's first ids.
    cuts = [text.rfind(" ", 0, enough + 1) if len(text) > enough else -1 for text in texts]
    short = [text if cut <= 0 else text[:cut] for text, cut in zip(texts, cuts, strict=True)]
    found = [encoding.ids for encoding in tokenizer.encode_batch_fast(short, add_special_tokens=False)]
    again = [row for row, cut in enumerate(cuts) if cut > 0 and len(found[row]) <= room]
    for row, encoding in zip(
        again, tokenizer.encode_batch_fast([texts[row] for row in again], add_special_tokens=False), strict=True
    ):
        found[row] = encoding.ids
    return found


def _batches(column: pa.ChunkedArray) -> Iterator[list[str]]:
    for chunk in column.chunks:
        for begin in range(0, len(chunk), _AT_ONCE):
            yield chunk.slice(begin, _AT_ONCE).to_pylist()


def _key(column: pa.ChunkedArray, vocabulary: Vocabulary, sequence_length: int, lowercase: bool) -> str:
    """Names everything the tokens follow from; however the column is cut into chunks."""
    version = importlib.metadata.version("tokenizers")
    about = [FORMAT, version, vocabulary.digest, int(sequence_length), bool(lowercase), len(column)]
    hashed = hashlib.blake2b(json.dumps(about).encode(), digest_size=32, person=b"coowned-data-1")
    for chunk in column.chunks:
        hashed.update(np.asarray(pc.binary_length(chunk), np.int64))  # pyright: ignore[reportArgumentType]
    for chunk in column.chunks:
        _, offsets_buffer, data_buffer = chunk.buffers()
        if len(chunk) and data_buffer is not None:
            offsets = np.frombuffer(offsets_buffer, np.int64)[chunk.offset : chunk.offset + len(chunk) + 1]
            hashed.update(memoryview(data_buffer)[offsets[0] : offsets[-1]])
    return hashed.hexdigest()


def _keep(file: Path, key: str, made: TokenizedTexts) -> None:
    """Writes the file whole or not at all, for its owner alone; a folder that cannot be written is no error."""
    column = pa.LargeListArray.from_arrays(pa.array(made.offsets), pa.array(made.ids))
    notes = {"key": key, "digest": made.digest, "num_truncated": made.num_truncated, "num_empty": made.num_empty}
    schema = pa.schema([pa.field("ids", column.type)], metadata={"coowned": json.dumps(notes)})

    def write(sink: BinaryIO) -> None:
        with pa.ipc.new_file(sink, schema) as writer:
            writer.write_batch(pa.record_batch([column], schema=schema))

    keep(file, write)


def _read_kept(
    file: Path, key: str, vocabulary: Vocabulary, sequence_length: int, num_texts: int
) -> TokenizedTexts | None:
    """The file's content, mapped into memory; None where there is none, or not what was written."""
    try:
        with pa.memory_map(str(file)) as source:
            reader = pa.ipc.open_file(source)
            notes = json.loads(reader.schema.metadata[b"coowned"])
            column: Any = reader.get_batch(0).column(0)
        kept = TokenizedTexts(
            vocabulary=vocabulary,
            sequence_length=int(sequence_length),
            ids=column.values.to_numpy(zero_copy_only=True),
            offsets=column.offsets.to_numpy(zero_copy_only=True),
            num_truncated=notes["num_truncated"],
            num_empty=notes["num_empty"],
        )
        # A damaged id would be another gradient under the same noise: every byte is looked at.
        whole = notes["key"] == key and notes["digest"] == kept.digest and len(kept) == num_texts
    except (OSError, pa.ArrowException, InputError, ValueError, TypeError, KeyError, IndexError, AttributeError):
        return None
    return kept if whole else None
