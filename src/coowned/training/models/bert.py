"""BERT with its masked-language-model head, at any size."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from coowned import validate
from coowned.attribution.examples import AttributedExamples
from coowned.errors import ConfigError, InputError
from coowned.mechanism.grid import Grid
from coowned.training.model import Model
from coowned.training.splits import TEXT_FRACTIONS
from coowned.training.tasks import Specification, Table, Task

ACTIVATIONS = ("gelu", "gelu_new", "relu")


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
        validate.positive(
            **{
                name: getattr(self, name)
                for name in (
                    "vocab_size",
                    "hidden_size",
                    "num_hidden_layers",
                    "num_attention_heads",
                    "intermediate_size",
                    "max_position_embeddings",
                    "type_vocab_size",
                )
            }
        )
        validate.positive_number(layer_norm_eps=self.layer_norm_eps)
        validate.one_of(ACTIVATIONS, hidden_act=self.hidden_act)
        if self.hidden_size % self.num_attention_heads:
            raise InputError(
                f"hidden_size ({self.hidden_size}) must be a multiple of num_attention_heads "
                f"({self.num_attention_heads})"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertMaskedLM:
    """A masked-language-model BERT without dropout, clipped exactly at about the cost of an ordinary step.

    Parameters are a flat dictionary under Hugging Face's names and layouts, the tied decoder once. A batch is

      tokens     (batch, sequence_length) int32: ids with some replaced by the masker
      lengths    (batch,) int32: how many of them are real; only these are seen (0 in padding)
      positions  (batch, max_predictions) int32: places to predict
      targets    (batch, max_predictions) int32: ids that were there
      weights    (batch, max_predictions) float32: one over the example's own number of places, 0 past the last

    and an example's loss the weighted sum of its cross entropies: a function of that example alone.

    Guarantees:
      - The clipped sum is that of the examples' own gradients, every parameter together, the word embedding once with
        its two uses.
        (test_equals_the_mechanism, test_equals_jax_privacy, test_without_the_cross_term_the_norm_is_another)
      - An example adds the same integers at any position of any batch, as far as XLA gives it the same gradient there.
        (test_an_example_counts_the_same_in_any_company)
      - What an example adds is an integer vector no longer than the clip norm.   (test_no_example_adds_more)
      - An example whose gradient is not finite adds exactly zero and so does padding.
        (test_not_finite_adds_zero, test_padding_adds_zero)
      - `from_arrays(to_arrays(p))` is p.   (test_arrays_round_trip)
    Cost: memory of the parameters three times and the activations of one microbatch, whatever the batch.

    Attributes:
      config: sizes.
      sequence_length: tokens of an example, padding included.
      max_predictions: places to predict in an example at most (default: 15% of the sequence, rounded up).
      microbatch: examples worked on together (default: 2048 tokens of them).
      seed: of the initial parameters; public, independent of everything secret.

    Example:
      >>> model = BertMaskedLM(config=BertConfig(vocab_size=50, hidden_size=8), sequence_length=16)
      >>> model.max_predictions, model.shapes()["bert.embeddings.word_embeddings.weight"]
      (3, (50, 8))

    Reference: Devlin et al., BERT: Pre-training of Deep Bidirectional Transformers, 2019; gradients from activations as
    in Goodfellow, Efficient Per-Example Gradient Computations, 2015.
    """

    many_models: ClassVar[bool] = False
    config: BertConfig = BertConfig()
    sequence_length: int = 512
    max_predictions: int = 0
    microbatch: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        validate.integer(at_least=1, at_most=self.config.max_position_embeddings, sequence_length=self.sequence_length)
        validate.integer(at_least=0, max_predictions=self.max_predictions, microbatch=self.microbatch)
        validate.seed(self.seed)
        if not self.max_predictions:
            # In whole numbers: 15 in a hundred of 20 is 3, which 0.15 * 20 as a float is not.
            object.__setattr__(self, "max_predictions", -(-15 * self.sequence_length // 100))
        if not self.microbatch:
            object.__setattr__(self, "microbatch", max(1, 2048 // self.sequence_length))

    @property
    def classes(self) -> tuple[Any, ...] | None:
        return None

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "bert-masked-lm",
            **dataclasses.asdict(self.config),
            "sequence_length": int(self.sequence_length),
            "max_predictions": int(self.max_predictions),
            "microbatch": int(self.microbatch),
            "seed": int(self.seed),
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        from coowned.training.models import bert_network

        return bert_network.shapes_of(self.config)

    def initial(self) -> dict[str, npt.NDArray[np.float32]]:
        """BERT's own: normals of deviation 0.02 cut off at two deviations, layer norms at one, biases at zero."""
        generator = np.random.default_rng(self.seed)
        return {name: _initial(generator, name, shape) for name, shape in self.shapes().items()}

    def check_data(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        places = (self.max_predictions,)
        wanted = {"tokens": (self.sequence_length,), "lengths": (), "positions": places, "targets": places}
        wanted["weights"] = places
        for name, shape in wanted.items():
            found = shapes.get(name)
            if found != shape:
                raise InputError(
                    f"the model takes {name} of shape {shape} for each example, the data have "
                    f"{'none' if found is None else found}; make both with the same sequence_length and max_predictions"
                )

    def grid(self, clip_norm: float) -> Grid:
        return Grid.for_gradients(clip_norm)

    def clipped_sum(
        self,
        parameters: dict[str, Any],
        batch: dict[str, Any],
        mask: Any,
        grids: Sequence[Grid],
        devices: Sequence[Any] = (),
    ) -> tuple[dict[str, npt.NDArray[np.int64]], int]:
        from coowned.mechanism.gradient_sums import clipped_gradient_sums

        (grid,) = grids
        sums, clipped = clipped_gradient_sums(
            _compiled_gradients(self.config),
            parameters,
            batch,
            mask,
            grid,
            shapes=self.shapes(),
            microbatch=self.microbatch,
            devices=devices,
        )
        return {name: array[None] for name, array in sums.items()}, clipped

    def gradient_sum(self, parameters: dict[str, Any], batch: dict[str, Any], mask: Any) -> dict[str, Any]:
        from coowned.training.models import bert_gradients

        return bert_gradients.gradient_sum(self.config, parameters, batch, mask, self.microbatch)

    def losses(self, parameters: dict[str, Any], batch: dict[str, Any]) -> tuple[Any, Any]:
        """((batch,) loss, (batch,) whether at least half of the example's own places are predicted rightly)."""
        from coowned.training.models import bert_gradients

        self._check_parameters(parameters)
        return bert_gradients.losses(self.config, parameters, batch, self.microbatch)

    def predict(self, parameters: dict[str, Any], batch: dict[str, Any]) -> tuple[Any, Any]:
        """Refuses: it fills in words, and says nothing of an example as a whole."""
        raise InputError("a masked language model has no classes to predict; train a bert-classifier")

    def example_loss(self, parameters: dict[str, Any], example: dict[str, Any]) -> Any:
        """The loss of one example (a batch without its first axis), to be differentiated by others: a reference."""
        import jax

        from coowned.training.models import bert_gradients

        batch = jax.tree.map(lambda array: array[None], example)
        return bert_gradients.example_losses(self.config, parameters, batch)[0][0]

    def to_arrays(self, parameters: dict[str, Any]) -> dict[str, npt.NDArray[np.float32]]:
        return {name: np.asarray(array, np.float32) for name, array in parameters.items()}

    def from_arrays(self, arrays: Mapping[str, npt.ArrayLike]) -> dict[str, npt.NDArray[np.float32]]:
        """Reads `to_arrays` and what Hugging Face stores: older names too; heads that are not the masked LM's are left.

        Refuses arrays of other shapes, and a decoder that is not tied, with InputError.
        """
        from coowned.training.models.bert_files import parameters_from

        return parameters_from(self.config, arrays)

    def _check_parameters(self, parameters: dict[str, Any]) -> None:
        name = "bert.embeddings.LayerNorm.weight"
        if parameters[name].ndim != 1:
            raise InputError("a sweep trains many small models on one batch; BERT is trained one at a time")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertSection(Specification):
    """A BERT that learns to fill in hidden words.

    Guarantees:
      - A run with a guarantee, or on public data, starts from no weights that a run of this package made from data it
        did not declare public, wherever they were copied.   (test_checkpoint_of_private_data_is_refused,
        test_copied_weights_of_private_data_are_refused)

    Attributes:
      text: the column, or columns that are read one after another.
      vocabulary: a vocab.txt; default: the checkpoint's.
      checkpoint: a folder in Hugging Face's layout, or a finished run on public data, to start from.
      architecture: a config.json of another size than BERT-Tiny's, to start from scratch.
      lowercase: false for a vocabulary with capitals and accents ("cased").
      sequence_length: tokens of a text that are read.
      microbatch: examples that are differentiated at once: memory grows with it, results do not depend on it.
    """

    kind: ClassVar[str] = "bert-masked-lm"
    splits: ClassVar[tuple[float, float, float]] = TEXT_FRACTIONS
    text: str | Sequence[str] = "text"
    vocabulary: str | None = None
    checkpoint: str | None = None
    architecture: str | None = None
    lowercase: bool = True
    sequence_length: int = 512
    microbatch: int | None = None

    def __post_init__(self) -> None:
        validate.integer(at_least=3, sequence_length=self.sequence_length)
        validate.column_names(text=self.text)
        if self.microbatch is not None:
            validate.positive(microbatch=self.microbatch)
        if self.vocabulary is None and self.checkpoint is None:
            raise InputError(
                "needs vocabulary: a vocab.txt that was not made from the texts to be protected (BERT's own, say), or "
                "a checkpoint that has one"
            )
        if self.architecture is not None and self.checkpoint is not None:
            raise InputError("a checkpoint has an architecture of its own; leave one of the two out")

    def task(self, schema: pa.Schema, *, folder: Path, is_private: bool, labels: bool = True) -> Task:
        from coowned.training.models.bert_files import (
            describe_config,
            read_bert_folder,
            read_config,
            refuse_private_checkpoint,
        )
        from coowned.training.text import Vocabulary
        from coowned.training.token_table import TokenTable, check_text_columns

        check_text_columns(schema, self.text)
        arrays = None
        checkpoint = None if self.checkpoint is None else folder / self.checkpoint
        vocabulary_file = folder / (self.vocabulary or f"{self.checkpoint}/vocab.txt")
        vocabulary = Vocabulary.read(vocabulary_file)
        if checkpoint is not None:
            if is_private:
                refuse_private_checkpoint(checkpoint)
            architecture, arrays = read_bert_folder(checkpoint)
        elif self.architecture is not None:
            architecture = read_config(folder / self.architecture)
        else:
            architecture = BertConfig(vocab_size=vocabulary.size)
        if architecture.vocab_size < vocabulary.size:
            raise ConfigError(
                f"{vocabulary_file}: {vocabulary.size:,} tokens, but the model has room for "
                f"{architecture.vocab_size:,}; use the vocabulary the model was made with"
            )
        if architecture.max_position_embeddings < self.sequence_length:
            raise ConfigError(
                f"[model] sequence_length is {self.sequence_length}, but the model has "
                f"{architecture.max_position_embeddings} positions; use at most that many"
            )
        model = BertMaskedLM(config=architecture, sequence_length=self.sequence_length, microbatch=self.microbatch or 0)

        def read(examples: AttributedExamples) -> tuple[Model, Table, dict[str, int]]:
            table = TokenTable.from_examples(
                examples,
                text=self.text,
                vocabulary=vocabulary,
                sequence_length=self.sequence_length,
                lowercase=self.lowercase,
            )
            return model, table, {"truncated_texts": table.texts.num_truncated, "empty_texts": table.texts.num_empty}

        files = {"config.json": describe_config(architecture).encode(), "vocab.txt": vocabulary_file.read_bytes()}
        return Task(read=read, initial=None if arrays is None else model.from_arrays(arrays), files=files)

    def from_run(self, folder: Path) -> Self:
        vocabulary, architecture = (str(folder.absolute() / name) for name in ("vocab.txt", "config.json"))
        return dataclasses.replace(self, checkpoint=None, vocabulary=vocabulary, architecture=architecture)

    @classmethod
    def from_description(cls, **described: Any) -> Model:
        sizes = {field.name for field in dataclasses.fields(BertConfig)}
        config = BertConfig(**{name: value for name, value in described.items() if name in sizes})
        return BertMaskedLM(config=config, **{name: value for name, value in described.items() if name not in sizes})


@functools.lru_cache(maxsize=8)
def _compiled_gradients(config: BertConfig) -> Callable[..., Any]:
    """(parameters with a leading axis of one model, rows) -> every row's gradients."""
    import jax

    from coowned.training.models import bert_gradients

    @jax.jit
    def gradients(parameters, rows):
        return bert_gradients.example_gradients(config, {name: array[0] for name, array in parameters.items()}, rows)

    return gradients


def _initial(generator: np.random.Generator, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    if name.endswith("bias"):
        return np.zeros(shape, np.float32)
    if "LayerNorm" in name:
        return np.ones(shape, np.float32)
    values = generator.standard_normal(math.prod(shape), np.float32)
    while (outside := np.flatnonzero(np.abs(values) > 2)).size:
        values[outside] = generator.standard_normal(outside.size, np.float32)
    return (np.float32(0.02) * values).reshape(shape)
