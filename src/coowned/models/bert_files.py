"""BERT files in the layout of Hugging Face: `config.json`, `model.safetensors`, `vocab.txt`."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from coowned import validate
from coowned.accounting.privacy_guarantee import NO_GUARANTEE, PUBLIC, stated_origins
from coowned.errors import InputError

if TYPE_CHECKING:
    from coowned.models.bert_network import Head

ACTIVATIONS = ("gelu", "gelu_new", "relu")
CONFIG_FILE, WEIGHTS_FILE, VOCABULARY_FILE = "config.json", "model.safetensors", "vocab.txt"
_WORDS, _BIAS = "bert.embeddings.word_embeddings.weight", "cls.predictions.bias"
_DECODER_WEIGHT, _DECODER_BIAS = "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"
_UNUSED = "bert.embeddings.position_ids"
GET_A_CHECKPOINT = (
    f"a checkpoint is a folder with {CONFIG_FILE}, {VOCABULARY_FILE} and {WEIGHTS_FILE}, as transformers' "
    "save_pretrained writes it: get one from Hugging Face, such as the public BERT-Tiny "
    "google/bert_uncased_L-2_H-128_A-2"
)
GET_A_VOCABULARY = (
    f"a vocabulary is a {VOCABULARY_FILE} that was not made from the texts to be protected: take that of a public "
    "checkpoint, such as google/bert_uncased_L-2_H-128_A-2 on Hugging Face, or learn one from public texts with "
    "coowned.content.text.learn_vocabulary"
)
_NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertConfig:
    """Sizes of a BERT, under the names of Hugging Face's `config.json`; the default is BERT-Tiny.

    Example:
      >>> BertConfig(hidden_size=100, num_attention_heads=3)
      Traceback (most recent call last):
        ...
      coowned.errors.InputError: hidden_size (100) must be a multiple of num_attention_heads (3)
    """

    vocab_size: int = 30522
    hidden_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 2
    intermediate_size: int = 512
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    hidden_act: str = "gelu"

    def __post_init__(self) -> None:
        sizes = (*_NEEDED, "max_position_embeddings", "type_vocab_size")
        validate.positive(**{name: getattr(self, name) for name in sizes})
        validate.positive_number(layer_norm_eps=self.layer_norm_eps)
        validate.one_of(ACTIVATIONS, hidden_act=self.hidden_act)
        if self.hidden_size % self.num_attention_heads:
            raise InputError(
                f"hidden_size ({self.hidden_size}) must be a multiple of num_attention_heads "
                f"({self.num_attention_heads})"
            )


def read_bert_folder(
    folder: str | os.PathLike[str], head: "Head"
) -> tuple[BertConfig, dict[str, npt.NDArray[np.float32]]]:
    """Reads (sizes, parameters for this head) from a folder written by transformers, or from a finished run.

    Older names (gamma, beta) are understood; other heads are left, and a head that may start anew may be missing; the
    decoder, where it is stored, must be the word embedding.

    Guarantees:
      - It reads what `describe_config` and `BertModel.to_arrays` give, and so does transformers, with the same
        logits, padding or not.   (test_folder_round_trip, test_transformers_opens_what_is_written,
        test_transformers_opens_a_classifier)
      - Raises InputError with the file and the remedy for a missing or damaged file, a model that is not a BERT, an
        unsupported setting and tensors of other shapes.   (test_bad_folders)
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = Path(folder)
    check_bert_folder(path)
    config = read_config(path / CONFIG_FILE)
    vocabulary, weights = path / VOCABULARY_FILE, path / WEIGHTS_FILE
    with vocabulary.open("rb") as file:
        words = sum(1 for _ in file)
    validate.positive(**{f"words in {vocabulary}": words})
    if words > config.vocab_size:
        raise InputError(
            f"{vocabulary}: {words} words, but the model has {config.vocab_size}; give the vocab.txt that belongs to it"
        )
    try:
        arrays = load_file(weights)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{weights}: not a readable safetensors file ({error}); copy or save it again") from None
    try:
        return config, parameters_from(config, head, arrays)
    except InputError as error:
        raise InputError(f"{weights}: {error}") from None


def check_bert_folder(path: Path) -> None:
    """Raises InputError if a checkpoint does not exist or lacks a file, without reading any."""
    if not path.is_dir():
        raise InputError(f"{path}: no such folder; {GET_A_CHECKPOINT}")
    for name in (CONFIG_FILE, WEIGHTS_FILE, VOCABULARY_FILE):
        if not (path / name).is_file():
            raise InputError(f"{path}: there is no {name}; {GET_A_CHECKPOINT}")


def refuse_private_checkpoint(checkpoint: Path) -> None:
    """Raises InputError for weights that a run of this package made from data not declared public.

    The run's guarantee.json and the statement inside its weights are read: either is enough to refuse. Nothing can be
    checked for weights from elsewhere: the caller then declares that they were made without these people's data.
    """
    for statement in stated_origins(checkpoint):
        if statement == NO_GUARANTEE:
            raise InputError(
                f"{checkpoint}: trained without privacy on data not declared public: a model that starts there has no "
                "guarantee; start from a run with [privacy] public = true"
            )
        if statement != PUBLIC:
            raise InputError(
                f"{checkpoint}: has a guarantee of its own, which this run's would have to be composed with; train in "
                "Python with train(initial=...) and say what compose([...]) gives"
            )


def read_config(path: str | os.PathLike[str]) -> BertConfig:
    """Reads the sizes from a `config.json`; raises InputError for unsupported settings and ignores irrelevant ones."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a readable JSON file ({error}); save the model again") from None
    if not isinstance(found, dict) or found.get("model_type", "bert") != "bert":
        kind = found.get("model_type") if isinstance(found, dict) else type(found).__name__
        raise InputError(f"{path}: describes {kind!r}, not a BERT; only model_type 'bert' can be trained here")
    missing = [name for name in _NEEDED if name not in found]
    if missing:
        raise InputError(f"{path}: no {missing[0]}; this is not a BERT's configuration")
    supported = {
        "position_embedding_type": ("absolute",),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
        "hidden_act": ACTIVATIONS,
    }
    for name, values in supported.items():
        if found.get(name) not in (None, *values):
            raise InputError(f"{path}: {name} is {found[name]!r}; supported: {', '.join(map(repr, values))}")
    names = {field.name for field in dataclasses.fields(BertConfig)}
    try:
        return BertConfig(**{name: value for name, value in found.items() if name in names})
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


class HeadParameters(Protocol):
    """The properties of a head that `parameters_from` uses; `bert_network.Head` documents them."""

    architecture: ClassVar[str]
    optional: ClassVar[tuple[str, ...]]
    ignored: ClassVar[tuple[str, ...]]

    def shapes(self, config: Any) -> dict[str, tuple[int, ...]]: ...


def parameters_from(
    config: BertConfig, head: HeadParameters, arrays: Mapping[str, npt.ArrayLike]
) -> dict[str, npt.NDArray[np.float32]]:
    """Returns a checkpoint's parameters in float32, under current names; raises InputError where they do not fit.

    >>> from coowned.models.bert_network import MaskedLMHead
    >>> parameters_from(BertConfig(), MaskedLMHead(max_predictions=3), {})
    Traceback (most recent call last):
      ...
    coowned.errors.InputError: no tensor 'bert.embeddings.word_embeddings.weight'; a BertForMaskedLM is needed
    """
    from coowned.models.bert_network import encoder_shapes

    unused = (_UNUSED, *head.ignored)
    found = {
        name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias"): array
        for name, array in arrays.items()
        if not name.startswith(unused)
    }
    decoder_weight, decoder_bias = found.pop(_DECODER_WEIGHT, None), found.pop(_DECODER_BIAS, None)
    if decoder_bias is not None:
        found.setdefault(_BIAS, decoder_bias)
    wanted, parameters = encoder_shapes(config) | head.shapes(config), {}
    for name, shape in wanted.items():
        if name not in found:
            if name.startswith(head.optional):
                continue
            raise InputError(f"no tensor {name!r}; a {head.architecture} is needed")
        array = np.asarray(found[name])
        if array.shape != shape:
            if name.startswith("classifier."):
                wanted_by, remedy = "the declared classes need", "declare those of these weights"
            else:
                wanted_by, remedy = "the configuration asks for", "give the one that belongs to these weights"
            raise InputError(f"{name} has the shape {array.shape}, {wanted_by} {shape}; {remedy}")
        if array.dtype.kind != "f" or not np.isfinite(array).all():
            raise InputError(f"{name} must contain finite floating-point numbers; save the model again")
        parameters[name] = np.ascontiguousarray(array, dtype=np.float32)
    unknown = sorted(set(found) - set(wanted))
    if unknown:
        raise InputError(f"{unknown[0]} is not a tensor of this BERT; give the configuration that belongs to it")
    for name, tied, own in ((_DECODER_WEIGHT, _WORDS, decoder_weight), (_DECODER_BIAS, _BIAS, decoder_bias)):
        if own is not None and not np.array_equal(np.asarray(own, np.float32), parameters[tied]):
            raise InputError(f"{name} is not {tied}; only a decoder tied to the word embedding can be trained here")
    return parameters


def describe_config(config: BertConfig, head: "Head") -> str:
    """Returns the text of a `config.json`."""
    described = {
        "architectures": [head.architecture],
        "model_type": "bert",
        **dataclasses.asdict(config),
        "attention_probs_dropout_prob": 0.0,
        "hidden_dropout_prob": 0.0,
        "initializer_range": 0.02,
        "pad_token_id": 0,
        "position_embedding_type": "absolute",
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    if head.classes is not None:
        names = {str(number): str(name) for number, name in enumerate(head.classes)}
        described |= {"id2label": names, "label2id": {name: int(number) for number, name in names.items()}}
        described["problem_type"] = "single_label_classification"
    return json.dumps(described, indent=2, sort_keys=True) + "\n"
