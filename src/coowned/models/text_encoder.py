"""A frozen public encoder that embeds each text as a row of length 1, computed by `bert_network`.

Its files are those of Hugging Face and sentence-transformers, or what a run has stored of them.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from coowned import threads, validate
from coowned.content.text import TokenizedTexts, Vocabulary, tokenize
from coowned.errors import InputError, jax, jnp
from coowned.files import cache_folder, keep_compiled_programs
from coowned.models import bert_network
from coowned.models.bert_files import CONFIG_FILE, VOCABULARY_FILE, WEIGHTS_FILE, BertConfig, parameters_from
from coowned.models.bert_files import read_config as read_bert_config

STORED_RECIPE, STORED_WEIGHTS = "encoder.json", "encoder.safetensors"  # in the folder of a run, beside vocab.txt
POOLINGS = ("mean", "cls")
GET_AN_ENCODER = (
    f"an encoder is a folder with {CONFIG_FILE}, {WEIGHTS_FILE} and tokenizer.json or {VOCABULARY_FILE}, as "
    "sentence-transformers or transformers save a BERT: get one from Hugging Face, such as "
    "sentence-transformers/all-MiniLM-L6-v2"
)
_MODULES = {"Transformer", "Pooling", "Normalize"}


class _EncoderAlone:
    """A head without parameters of its own, for reading an encoder with `parameters_from`."""

    architecture: ClassVar[str] = "BertModel"
    optional: ClassVar[tuple[str, ...]] = ()
    ignored: ClassVar[tuple[str, ...]] = ("bert.pooler.", "cls.", "classifier.")

    def shapes(self, config: Any) -> dict[str, tuple[int, ...]]:
        del config
        return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderFiles:
    """All files and settings on which an encoder's embeddings depend.

    Guarantees:
      - Of a folder whose files ask for something else than a BERT, WordPiece, and the mean of all tokens or the first
        one, nothing is used.   (test_what_is_not_supported_is_refused)
      - What `stored` gives is read back, and is the same encoder.   (test_a_run_keeps_its_encoder)

    Attributes:
      config: sizes of the network.
      pooling: "mean" of all tokens' rows, or "cls", the first token's.
      sequence_length: tokens of a text that are read.
      lowercase: whether texts are put in small letters.
      vocabulary: of the tokenizer.
      weights: the bytes of the safetensors file.
    """

    config: BertConfig
    pooling: str
    sequence_length: int
    lowercase: bool
    vocabulary: Vocabulary
    weights: bytes = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        validate.one_of(POOLINGS, pooling=self.pooling)
        most = self.config.max_position_embeddings
        validate.integer(at_least=3, at_most=most, sequence_length=self.sequence_length)
        if self.vocabulary.size > self.config.vocab_size:
            raise InputError(
                f"the vocabulary has {self.vocabulary.size:,} tokens, the network {self.config.vocab_size:,}; give the "
                "tokenizer that belongs to it"
            )

    @classmethod
    def read(cls, folder: Path, *, sequence_length: int | None = None) -> "EncoderFiles":
        """Reads a folder from Hugging Face, or that of a run; InputError names what is missing or not supported.

        Args:
          sequence_length: tokens of a text that are read; default: as the files say.
        """
        if (folder / STORED_RECIPE).is_file():
            recipe = _json(folder / STORED_RECIPE)
            config, weights = BertConfig(**recipe.pop("config")), folder / STORED_WEIGHTS
            vocabulary = Vocabulary.read(folder / VOCABULARY_FILE)
        else:
            check_encoder_folder(folder)
            config, weights = read_bert_config(folder / CONFIG_FILE), folder / WEIGHTS_FILE
            vocabulary, lowercase = _tokenizer(folder)
            length = _sequence_length(folder, config.max_position_embeddings)
            recipe = {"pooling": _pooling(folder), "sequence_length": length, "lowercase": lowercase}
        recipe["sequence_length"] = sequence_length or recipe["sequence_length"]
        try:
            return cls(config=config, vocabulary=vocabulary, weights=weights.read_bytes(), **recipe)
        except (InputError, OSError) as error:
            raise InputError(f"{folder}: {error}") from None

    @functools.cached_property
    def sha256(self) -> str:
        """The SHA-256 of the file with the weights, which identifies the encoder."""
        return hashlib.sha256(self.weights).hexdigest()

    @functools.cached_property
    def digest(self) -> str:
        """A digest of everything that an embedding depends on besides the text."""
        return hashlib.sha256(f"{self._recipe()}{self.vocabulary.digest}{self.sha256}".encode()).hexdigest()

    def parameters(self) -> dict[str, npt.NDArray[np.float32]]:
        """Returns the network's parameters, under the names of a BERT with a head."""
        from safetensors import SafetensorError
        from safetensors.numpy import load

        try:
            arrays = load(self.weights)
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"the encoder's weights are not readable as safetensors of float32 ({error}); copy or save them again"
            ) from None
        return parameters_from(self.config, _EncoderAlone(), _with_prefix(arrays))

    def stored(self) -> dict[str, bytes]:
        """Returns the files as a run stores them, by name."""
        words = "".join(f"{token}\n" for token in self.vocabulary.tokens)
        return {
            STORED_RECIPE: self._recipe().encode(),
            STORED_WEIGHTS: self.weights,
            VOCABULARY_FILE: words.encode(),
        }

    def _recipe(self) -> str:
        names = ("pooling", "sequence_length", "lowercase")
        recipe = {"config": dataclasses.asdict(self.config), **{name: getattr(self, name) for name in names}}
        return json.dumps(recipe, indent=2, sort_keys=True) + "\n"


def check_encoder_folder(folder: Path) -> None:
    """Raises InputError if an encoder does not exist or lacks a file, without reading any."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; {GET_AN_ENCODER}")
    if (folder / STORED_RECIPE).is_file():
        return
    for names in ((CONFIG_FILE,), (WEIGHTS_FILE,), ("tokenizer.json", VOCABULARY_FILE)):
        if not any((folder / name).is_file() for name in names):
            raise InputError(f"{folder}: there is no {' or '.join(names)}; {GET_AN_ENCODER}")


def _with_prefix(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Adds the prefix that the names of a headless BERT lack."""
    alone = ("embeddings.", "encoder.", "pooler.")
    return {f"bert.{name}" if name.startswith(alone) else name: array for name, array in arrays.items()}


def _pooling(folder: Path) -> str:
    """Returns the pooling of modules.json; a plain transformers folder has none, for which the mean is used."""
    if not (folder / "modules.json").is_file():
        return "mean"
    listed = _json(folder / "modules.json")
    modules = {str(module.get("type", "")).rpartition(".")[2]: module for module in listed}
    if not {"Transformer", "Pooling"} <= modules.keys() <= _MODULES or len(modules) != len(listed):
        raise InputError(
            f"{folder / 'modules.json'}: the modules are {', '.join(modules)}; only a Transformer, a Pooling and "
            "perhaps a Normalize are supported"
        )
    settings = folder / str(modules["Pooling"].get("path", "")) / CONFIG_FILE
    found = _json(settings)
    if "pooling_mode" in found:
        chosen = [str(found["pooling_mode"])]
    else:
        names = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
        chosen = [
            names.get(str(name), str(name))
            for name, on in found.items()
            if name.startswith("pooling_mode") and on is True
        ]
    if len(chosen) != 1 or chosen[0] not in POOLINGS:
        raise InputError(f"{settings}: pooling by {' and '.join(chosen) or 'nothing'}; supported: mean, or cls")
    about = folder / "config_sentence_transformers.json"
    if about.is_file() and _json(about).get("default_prompt_name"):
        raise InputError(f"{about}: a prompt is put before every text; only encoders without one are supported")
    return chosen[0]


def _sequence_length(folder: Path, positions: int) -> int:
    lengths = [positions]
    for name, key in (("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length")):
        if (folder / name).is_file() and (length := _json(folder / name).get(key)):
            return int(min(positions, length))
    return lengths[0]


def _tokenizer(folder: Path) -> tuple[Vocabulary, bool]:
    """Returns (vocabulary, whether texts are lowercased) from tokenizer.json, else from vocab.txt."""
    about = folder / "sentence_bert_config.json"
    small = about.is_file() and _json(about).get("do_lower_case") is True
    file = folder / "tokenizer.json"
    if not file.is_file():
        settings = folder / "tokenizer_config.json"
        found = _json(settings) if settings.is_file() else {}
        return Vocabulary.read(folder / VOCABULARY_FILE), small or found.get("do_lower_case", True) is True
    found = _json(file)
    model, normalizer, splitter = (found.get(part) or {} for part in ("model", "normalizer", "pre_tokenizer"))
    words: Any = model.get("vocab")
    usual = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None}
    supported = (
        model.get("type", "WordPiece") == "WordPiece"
        and isinstance(words, dict)
        and normalizer.get("type") == "BertNormalizer"
        and all(normalizer.get(name, value) == value for name, value in usual.items())
        and splitter.get("type") == "BertPreTokenizer"
    )
    if not supported or sorted(words.values()) != list(range(len(words))):
        raise InputError(f"{file}: only BERT's own WordPiece tokenizer is supported; give a BERT-type encoder")
    return Vocabulary(tuple(sorted(words, key=words.__getitem__))), small or normalizer.get("lowercase", True) is True


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a readable JSON file ({error}); copy or save it again") from None


_PROGRAM = 1  # of `text_encoder`: another number where other bits come out
_AT_ONCE = 500  # keys of a query
_CHECK = 8  # bytes


@dataclasses.dataclass(frozen=True)
class EmbeddingCache:
    """A file per encoder with one entry per text: a digest of its tokens, and its embedding.

    An entry is written when a text is embedded, and texts are embedded when their content is read: after S was chosen,
    certified and accounted for. It is looked up by the text's own digest, so it says nothing that the text does not.

    Guarantees:
      - The file is readable by its owner alone, as are those that SQLite makes beside it.
        (test_the_cache_is_its_owners)
      - An entry of another text, encoder, processor or version of JAX is never used, nor one that was damaged.
        (test_another_encoder_has_another_cache, test_damaged_entries_are_made_anew)
      - A cache that cannot be read or written, or is deleted, is no error.   (test_the_cache_changes_no_bit)
    What it is not: covered by any guarantee. Delete the folder `embeddings` of the cache when the texts are deleted.

    Attributes:
      encoder: its digest.
      width: numbers of an embedding.
    """

    encoder: str
    width: int

    @property
    def path(self) -> Path | None:
        """The cache file; None if caching is off."""
        folder = cache_folder()
        about = [self.encoder, _PROGRAM, importlib.metadata.version("jaxlib"), platform.machine(), os.cpu_count()]
        name = hashlib.sha256(repr(about).encode()).hexdigest()[:32]
        return None if folder is None else folder / "embeddings" / f"{name}.sqlite"

    def read(self, texts: Sequence[bytes]) -> dict[bytes, npt.NDArray[np.float32]]:
        """Reads the cached embeddings, by tokens."""
        found: dict[bytes, npt.NDArray[np.float32]] = {}
        keys = {_key(tokens): tokens for tokens in texts}
        wanted = list(keys)

        def look_up(table: sqlite3.Connection) -> None:
            for begin in range(0, len(wanted), _AT_ONCE):
                some = wanted[begin : begin + _AT_ONCE]
                query = f"SELECT key, entry FROM embeddings WHERE key IN ({','.join('?' * len(some))})"
                for key, entry in table.execute(query, some):
                    content, check = entry[:-_CHECK], entry[-_CHECK:]
                    if len(content) == 4 * self.width and check == _check(key, content):
                        found[keys[key]] = np.frombuffer(content, np.float32)

        path = self.path
        if path is not None and path.exists():
            _with_table(path, look_up)
        return found

    def keep(self, embeddings: Mapping[bytes, npt.NDArray[np.float32]]) -> None:
        """Adds entries, all or none."""
        entries = []
        for tokens, embedding in embeddings.items():
            key, content = _key(tokens), np.ascontiguousarray(embedding, np.float32).tobytes()
            entries.append((key, content + _check(key, content)))
        if (path := self.path) is not None:
            _with_table(
                path, lambda table: table.executemany("INSERT OR REPLACE INTO embeddings VALUES (?, ?)", entries)
            )


def _with_table(path: Path, work: Callable[[sqlite3.Connection], object]) -> None:
    """Runs work on the table in a file in one transaction; problems with the file are ignored."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite's own files get the same permissions
        with contextlib.closing(sqlite3.connect(path, timeout=30)) as table, table:  # one transaction
            table.execute("CREATE TABLE IF NOT EXISTS embeddings (key BLOB PRIMARY KEY, entry BLOB) WITHOUT ROWID")
            work(table)
    except sqlite3.OperationalError:  # full, locked, not writable
        pass
    except sqlite3.DatabaseError:  # not a table, or not any more
        with contextlib.suppress(OSError):
            path.unlink()
    except OSError:
        pass


def _key(tokens: bytes) -> bytes:
    return hashlib.blake2b(tokens, digest_size=32, person=b"coowned-embed-1").digest()


def _check(key: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(key + content, digest_size=_CHECK).digest()


_LOG = logging.getLogger(__name__)
_STEPS = ((64, 16), (256, 32), (1 << 30, 128))  # up to so many tokens a length is rounded up to a multiple
_KEPT_TOGETHER = 512  # embeddings


@dataclasses.dataclass(frozen=True, eq=False)
class TextEncoder:
    """A text encoder: its network, then the mean of all tokens or the first one, scaled to length 1.

    Guarantees:
      - A text's embedding is the same bits whatever other texts there are, and in whatever order: every text is run by
        itself, padded to a length that follows from its own.   (test_a_text_has_the_same_bits_in_any_company)
      - It is that of transformers and of sentence-transformers' recipe.   (test_embeddings_are_those_of_transformers)
      - A row has length 1, or is NaN where there is no text.   (test_rows_have_length_one)
      - What the cache holds is what would be computed; a damaged or missing one changes nothing.
        (test_the_cache_changes_no_bit)
    Cost: one pass of the network for each text that differs, once on a machine: embeddings are kept (`EmbeddingCache`).
    """

    files: EncoderFiles

    @classmethod
    def read(cls, folder: Path | str, *, sequence_length: int | None = None) -> "TextEncoder":
        """Reads an encoder's folder, that of a run, or an exported one."""
        return cls(EncoderFiles.read(Path(folder), sequence_length=sequence_length))

    @property
    def width(self) -> int:
        """The length of an embedding."""
        return self.files.config.hidden_size

    def tokenize(self, texts: pa.ChunkedArray | pa.Array) -> TokenizedTexts:
        length, lowercase = self.files.sequence_length, self.files.lowercase
        return tokenize(texts, self.files.vocabulary, sequence_length=length, lowercase=lowercase)

    def embed(self, texts: Sequence[str | None]) -> npt.NDArray[np.float32]:
        """Computes (texts, width) embeddings of length 1; NaN for a text without words."""
        return self.embed_tokens(self.tokenize(pa.array(texts, pa.large_string())))

    def embed_tokens(self, texts: TokenizedTexts) -> npt.NDArray[np.float32]:
        """Computes (texts, width) embeddings of texts tokenized by `tokenize`."""
        found = np.full((len(texts), self.width), np.nan, np.float32)
        cache = EmbeddingCache(self.files.digest, self.width)
        places: dict[bytes, list[int]] = {}
        for row, (begin, end) in enumerate(zip(texts.offsets[:-1], texts.offsets[1:], strict=True)):
            if end > begin:
                places.setdefault(texts.ids[begin:end].astype(np.int32).tobytes(), []).append(row)
        for tokens, embedding in self._embeddings(list(places), cache):
            found[places[tokens]] = embedding
        return found

    def _embeddings(self, texts: list[bytes], cache: EmbeddingCache) -> Iterator[tuple[bytes, npt.NDArray[np.float32]]]:
        """Yields (tokens, embedding) of each text, from the cache or computed and cached."""
        missing, kept = [], cache.read(texts)
        for tokens in texts:
            if tokens in kept:
                yield tokens, kept[tokens]
            else:
                missing.append(tokens)
        missing.sort(key=len)  # texts of one length after another: a program is compiled when it is first needed
        for begin in range(0, len(missing), _KEPT_TOGETHER):
            some = missing[begin : begin + _KEPT_TOGETHER]
            made = dict(zip(some, self._compute(some), strict=True))
            cache.keep(made)
            _LOG.info("embedded %s of %s texts", f"{begin + len(some):,}", f"{len(missing):,}")
            yield from made.items()

    def _compute(self, texts: list[bytes]) -> list[npt.NDArray[np.float32]]:
        embed, parameters = _program(self.files.config, self.files.pooling), self._parameters

        def of_one(tokens: bytes) -> npt.NDArray[np.float32]:
            ids = np.frombuffer(tokens, np.int32)
            padded = np.zeros(_padded(ids.size, self.files.config.max_position_embeddings), np.int32)
            padded[: ids.size] = ids
            return np.asarray(embed(parameters, padded, np.int32(ids.size)))

        return threads.run_all([functools.partial(of_one, tokens) for tokens in texts])

    @functools.cached_property
    def _parameters(self) -> Any:
        keep_compiled_programs()
        return jax.device_put(self.files.parameters())


def _padded(length: int, most: int) -> int:
    """Returns the padded length for a text of this length: a function of the text alone."""
    step = next(step for upto, step in _STEPS if length <= upto)
    return min(most, -(-length // step) * step)


@functools.lru_cache(maxsize=8)
def _program(config: BertConfig, pooling: str) -> Callable[..., Any]:
    """Returns (parameters, (padded length,) ids, real length) -> (width,) of length 1, for one text at a time."""

    @jax.jit
    def embed(parameters, tokens, length):
        places = jnp.arange(tokens.size if pooling == "mean" else 1)
        batch = {"tokens": tokens[None], "lengths": length[None]}
        rows = bert_network.encode(config, parameters, batch, places[None], bert_network.Tape())[0]
        pooled = jnp.where((places < length)[:, None], rows, 0.0).sum(axis=0)  # a mean, but for its length
        largest = jnp.maximum(jnp.abs(pooled).max(), jnp.finfo(jnp.float32).tiny)
        pooled /= largest  # whose square neither overflows nor vanishes
        return pooled / jnp.sqrt((pooled * pooled).sum())

    return embed
