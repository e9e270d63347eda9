"""BERT with its masked-language-model head, at any size."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from coowned import validate
from coowned.errors import InputError
from coowned.mechanism.grid import Grid

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
