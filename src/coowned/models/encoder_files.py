"""Files of a public text encoder, in the layout of Hugging Face and sentence-transformers, and as a run stores them."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from coowned import validate
from coowned.content.text import Vocabulary
from coowned.errors import InputError
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
