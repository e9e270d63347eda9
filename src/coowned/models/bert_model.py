"""A trainable BERT of any size with one of its heads, and its per-example gradients, losses and predictions.

One forward and one backward pass give what each layer is fed and the gradient at what it gives; from these follows the
gradient of each layer's weights. The word embedding, most of a small model, is left in factors (`EmbeddingGradients`,
`LookupGradients`), which are far smaller than what they make, and so is a layer that sees one row of each example
(`OuterGradients`): a classifier's whole last layer but for keys and values.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from coowned import validate
from coowned.errors import InputError, jax, jnp
from coowned.exact.gradient_sums import FirstRowsGradients, OuterGradients
from coowned.exact.grid import Grid
from coowned.models import bert_network as network
from coowned.models import microbatches
from coowned.models.bert_files import BertConfig, parameters_from
from coowned.models.bert_network import HEADS, Arrays, ClassifierHead, Head, MaskedLMHead, Tape, encoder_shapes, product
from coowned.models.embedding_gradients import EmbeddingGradients, LookupGradients
from coowned.models.example_model import linear_stand_in
from coowned.models.model import Model, sums_of_members
from coowned.models.parameter_trees import FrozenParameters, matching_names

if TYPE_CHECKING:
    from coowned.models.probes import CanaryContent, TokenContent


def example_gradients(head: Head, config: Any, parameters: Arrays, batch: Arrays) -> Arrays:
    """Computes the gradient of every example, or its factors: by parameter, (batch, ...)."""
    tokens, targets = batch["tokens"], head.targets(batch)

    def forward(added: Arrays | None):
        tape = Tape(added)
        rows = network.encode(config, parameters, batch, targets.positions, tape)
        return head.hidden(config, parameters, rows, tape), (tape.inputs, tape.outputs)

    shapes = jax.eval_shape(lambda: forward(None)[1][1])
    added = {name: jnp.zeros(given.shape, given.dtype) for name, given in shapes.items()}
    hidden, backward, (inputs, _) = jax.vjp(forward, added, has_aux=True)  # inputs: what each layer is fed
    examples, predicted, width = hidden.shape
    scores = _scores(head, parameters, hidden.reshape(-1, width))
    powers = jnp.exp(scores - scores.max(axis=1, keepdims=True))
    norms = powers.sum(axis=1)
    # The scores' gradient is weights times residuals: softmax minus one at the target, times its norm. Changed at one
    # class a row: the difference is rounded once, where it is small.
    residuals = powers.at[jnp.arange(examples * predicted), targets.classes.reshape(-1)].add(-norms)
    weights = targets.weights.reshape(-1) / norms
    at_hidden = product(residuals, parameters[head.projection]) * weights[:, None]
    (slopes,) = backward(at_hidden.reshape(hidden.shape))  # by layer: the gradient at what it gives
    embedded = slopes.pop(network.EMBEDDED)  # (batch, sequence_length, hidden), at the sum of the three embeddings
    residuals, weights = residuals.reshape(examples, predicted, -1), weights.reshape(examples, predicted)
    projected = hidden * weights[:, :, None]
    gradients: Arrays = {
        network.POSITIONS: FirstRowsGradients(embedded),
        network.TYPES: FirstRowsGradients(jnp.sum(embedded, axis=1, keepdims=True)),
        head.bias: jnp.einsum("bm,bmv->bv", weights, residuals, precision="highest"),
    }
    if head.projection == network.WORDS:
        gradients[network.WORDS] = EmbeddingGradients(residuals, projected, tokens, embedded)
    else:
        gradients[network.WORDS] = LookupGradients(tokens, embedded)
        gradients[head.projection] = _products(residuals, projected)
    for name, own in slopes.items():
        gradients |= _layer(name, inputs[name], own)
    return gradients


def _scores(head: Head, parameters: Arrays, hidden: Any) -> Any:
    """Computes (..., classes) logits; a masked language model uses its word embedding again here."""
    return product(hidden, parameters[head.projection].T) + parameters[head.bias]


def _layer(names: str, inputs: Any, slopes: Any) -> Arrays:
    """Computes the per-example gradients of a layer's weight and bias, or of several layers computed as one product."""
    if names.endswith("LayerNorm"):
        return {f"{names}.weight": jnp.sum(inputs * slopes, axis=1), f"{names}.bias": jnp.sum(slopes, axis=1)}
    found: Arrays = {}
    for name, own in zip(names.split("+"), jnp.split(slopes, names.count("+") + 1, axis=-1), strict=True):
        found[f"{name}.weight"] = _products(own, inputs)
        found[f"{name}.bias"] = jnp.sum(own, axis=1)
    return found


def _products(left: Any, right: Any) -> Any:
    """Sums each example's outer products over rows, (batch, outputs, inputs); a single row stays as its factors."""
    if left.shape[1] == 1:
        return OuterGradients(left[:, 0], right[:, 0])
    return jnp.einsum("bto,bti->boi", left, right, precision="highest")


# ---- losses ----------------------------------------------------------------------------------------------------------


def example_losses(head: Head, config: Any, parameters: Arrays, batch: Arrays) -> tuple[Any, Any]:
    """Computes ((batch,) loss, (batch,) whether at least half of the targets are predicted right)."""
    _, classes, weights = head.targets(batch)
    scores = scores_of(head, config, parameters, batch)
    at_targets = jnp.take_along_axis(scores, classes[:, :, None], axis=2)[:, :, 0]
    entropies = jax.nn.logsumexp(scores, axis=2) - at_targets
    right = jnp.sum(weights * (scores.argmax(axis=2) == classes), axis=1)
    # A text without words has no loss; counted as 0 it would make the mean look better.
    some = jnp.any(weights > 0, axis=1)
    return jnp.where(some, jnp.sum(weights * entropies, axis=1), jnp.nan), right >= 0.5 - 1e-6  # weights are rounded


def predictions(head: Head, config: Any, parameters: Arrays, batch: Arrays) -> tuple[Any, Any]:
    """Returns ((batch,) class at the first position, (batch,) its probability, NaN for an empty text)."""
    shares = probabilities(head, config, parameters, batch)
    return shares.argmax(axis=-1).astype(jnp.int32), shares.max(axis=-1)


def probabilities(head: Head, config: Any, parameters: Arrays, batch: Arrays) -> Any:
    """Computes the (batch, classes) probabilities at the first position, NaN for an empty text."""
    shares = jax.nn.softmax(scores_of(head, config, parameters, batch)[:, 0], axis=-1)
    return jnp.where(batch["lengths"][:, None] > 0, shares, jnp.nan)


def scores_of(head: Head, config: Any, parameters: Arrays, batch: Arrays) -> Any:
    """Computes (batch, m, classes) logits."""
    tape = Tape()
    rows = network.encode(config, parameters, batch, head.targets(batch).positions, tape)
    return _scores(head, parameters, head.hidden(config, parameters, rows, tape))


_MICROBATCH_TOKENS = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertModel:
    """A BERT without dropout, with exact per-example clipping at about the cost of an ordinary step.

    Parameters are a flat dictionary under Hugging Face's names and layouts, a tied decoder once. A batch is

      tokens     (batch, sequence_length) int32: ids; the masked model's with some replaced by the masker
      lengths    (batch,) int32: how many of them are real; only these are seen (0 in padding)

    and what the head reads. Of the masked model that is

      positions  (batch, max_predictions) int32: which tokens to predict
      targets    (batch, max_predictions) int32: ids that were there
      weights    (batch, max_predictions) float32: one over the example's own number of positions, 0 past the last

    and of the classifier

      labels     (batch,) float32: index of the class, NaN where it is not known
      weights    (batch,) float32: 1, or 0 for an example that is not to count

    An example's loss is the weighted sum of its cross entropies: a function of that example alone.

    Guarantees:
      - The clipped sum is that of the examples' own gradients, every parameter together, a word embedding once with
        both of its uses.   (test_equals_the_mechanism, test_equals_jax_privacy, test_classifier_equals_the_mechanism,
        test_without_the_cross_term_the_norm_is_another)
      - An example adds the same integers at any position of any batch, as far as XLA gives it the same gradient there.
        (test_an_example_counts_the_same_in_any_company, test_a_text_counts_the_same_in_any_company)
      - What an example adds is an integer vector no longer than the clip norm.   (test_no_example_adds_more,
        test_no_text_adds_more)
      - An example whose gradient is not finite adds exactly zero, as do padding and a label that is not known.
        (test_not_finite_adds_zero, test_padding_adds_zero, test_unknown_labels_add_zero)
      - Frozen parameters stay as they are, bit for bit: they are neither clipped nor noised, and no norm counts them.
        (test_frozen_weights_stay, test_the_clip_is_that_of_the_trained_part)
      - `from_arrays(to_arrays(p))` is p.   (test_arrays_round_trip)
    Cost: memory of the parameters three times and the activations of two microbatches, whatever the batch.

    Attributes:
      config: sizes.
      head: what is predicted.
      sequence_length: tokens of an example, padding included.
      microbatch: examples worked on together (default: 2048 tokens of them).
      seed: of the initial parameters; public, independent of everything secret.
      frozen: parameters that are not trained (`training_only`).

    Example:
      >>> model = BertModel.masked_lm(config=BertConfig(vocab_size=50, hidden_size=8), sequence_length=16)
      >>> model.head, model.shapes()["bert.embeddings.word_embeddings.weight"]
      (MaskedLMHead(max_predictions=3), (50, 8))

    Reference: Devlin et al., BERT: Pre-training of Deep Bidirectional Transformers, 2019; gradients from activations as
    in Goodfellow, Efficient Per-Example Gradient Computations, 2015.
    """

    many_models: ClassVar[bool] = False
    runs_in_jax: ClassVar[bool] = True
    config: BertConfig = dataclasses.field(default_factory=BertConfig)
    head: Head
    sequence_length: int = 512
    microbatch: int = 0
    seed: int = 0
    frozen: FrozenParameters = dataclasses.field(default_factory=FrozenParameters, repr=False)

    def __post_init__(self) -> None:
        validate.integer(at_least=1, at_most=self.config.max_position_embeddings, sequence_length=self.sequence_length)
        validate.integer(at_least=0, microbatch=self.microbatch)
        validate.seed(self.seed)
        if not self.microbatch:
            object.__setattr__(self, "microbatch", max(1, _MICROBATCH_TOKENS // self.sequence_length))

    @classmethod
    def masked_lm(cls, *, sequence_length: int, max_predictions: int = 0, **settings: Any) -> "BertModel":
        """Returns a masked language model; by default 15% of a sequence is predicted, rounded up."""
        head = MaskedLMHead(max_predictions=max_predictions or max(1, -(-3 * sequence_length // 20)))
        return cls(head=head, sequence_length=sequence_length, **settings)

    @classmethod
    def classifier(cls, *, classes: Any, **settings: Any) -> "BertModel":
        """Returns a text classifier."""
        return cls(head=ClassifierHead(classes=classes), **settings)

    @classmethod
    def from_description(cls, kind: str, **described: Any) -> "BertModel":
        """Builds a model from `describe`. It has only a digest of frozen parameters, and takes those of a new model."""
        trained, _ = described.pop("trained", None), described.pop("frozen", None)

        def made(part: Any) -> Any:
            names = [field.name for field in dataclasses.fields(part)]
            return part(**{name: described.pop(name) for name in names if name in described})

        model = cls(config=made(BertConfig), head=made(HEADS[kind]), **described)
        return model if trained is None else model.training_only(list(trained), model.initial())[0]

    def training_only(
        self, patterns: Sequence[str], start: Mapping[str, npt.NDArray[np.float32]]
    ) -> "tuple[BertModel, dict[str, npt.NDArray[np.float32]]]":
        """Returns (the model that trains the parameters whose names match a pattern, their starting values).

        The others keep their values in `start`, which must be public. Refuses patterns that match nothing.
        """
        trained = matching_names(list(start), patterns)
        frozen = {name: array for name, array in start.items() if name not in trained}
        model = dataclasses.replace(self, frozen=FrozenParameters(frozen))
        return model, {name: start[name] for name in trained}

    @property
    def classes(self) -> tuple[Any, ...] | None:
        return self.head.classes

    def stand_in(self) -> "Model":
        """Returns the model itself, or a linear stand-in if its last bias is frozen: no gradient is known then."""
        return linear_stand_in(self.shapes(), self.microbatch) if self.head.bias in self.frozen.arrays else self

    @functools.cached_property
    def zeroed(self) -> "BertModel":
        """The model with frozen parameters of zero: if the trained ones are zero too, audits know its gradients."""
        zeros = {name: np.zeros_like(array) for name, array in self.frozen.arrays.items()}
        return dataclasses.replace(self, frozen=FrozenParameters(zeros))

    def worst_case(self) -> "TokenContent":
        from coowned.models.probes import TokenContent

        return TokenContent(self)

    def with_canaries(self, users: int, per_user: int, clip_norm: float) -> "tuple[BertModel, CanaryContent]":
        from coowned.models.probes import labelled_token_canaries, token_canaries

        del clip_norm
        make = token_canaries if self.classes is None else labelled_token_canaries
        size, length = self.config.vocab_size, self.sequence_length
        return self, make(users, per_user, vocabulary_size=size, sequence_length=length, seed=0)

    def describe(self) -> dict[str, Any]:
        described = {
            "kind": self.head.kind,
            **dataclasses.asdict(self.config),
            "sequence_length": int(self.sequence_length),
            **self.head.describe(),
            "microbatch": int(self.microbatch),
            "seed": int(self.seed),
        }
        if self.frozen.arrays:
            trained = {name: list(shape) for name, shape in self.shapes().items()}
            described |= {"trained": trained, "frozen": self.frozen.digest}
        return described

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._trained(encoder_shapes(self.config) | self.head.shapes(self.config))

    def initial(self) -> dict[str, npt.NDArray[np.float32]]:
        """Returns BERT's initialization: normals of deviation 0.02 truncated at two, layer norms one, biases zero."""
        generator = np.random.default_rng(self.seed)
        shapes = encoder_shapes(self.config) | self.head.shapes(self.config)
        return self._trained({name: _initial(generator, name, shape) for name, shape in shapes.items()})

    def _trained(self, whole: dict[str, Any]) -> dict[str, Any]:
        """Returns the trained parameters only."""
        return {name: value for name, value in whole.items() if name not in self.frozen.arrays}

    def _whole(self, trained: Mapping[str, Any]) -> dict[str, Any]:
        """Returns all parameters, the frozen ones as constants of a program."""
        return {**jax.tree.map(jnp.asarray, self.frozen.arrays), **trained}

    def arrays(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Returns the shape and type of each array of a batch, per example."""
        return {"tokens": ((self.sequence_length,), np.int32), "lengths": ((), np.int32), **self.head.arrays()}

    def check_data(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        for name, (shape, _) in self.arrays().items():
            found = shapes.get(name)
            if found != shape:
                raise InputError(
                    f"the model takes {name} of shape {shape} for each example, the data have "
                    f"{'none' if found is None else found}; make both with the same sequence_length and head"
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
        scales: Mapping[str, Any] | None = None,
    ) -> tuple[dict[str, npt.NDArray[np.int64]], int]:
        return sums_of_members(
            _compiled_gradients(self.head, self.config, frozenset(parameters)),
            lambda member: {**self.frozen.placed, **member},
            parameters,
            batch,
            mask,
            grids,
            scales=scales,
            shapes=self.shapes(),
            microbatch=self.microbatch,
            devices=devices,
            ahead=1,
        )

    def gradient_sum(self, parameters: dict[str, Any], batch: dict[str, Any], mask: Any) -> dict[str, Any]:
        def loss(own: dict[str, Any], rows: dict[str, Any]) -> Any:
            losses, _ = example_losses(self.head, self.config, self._whole(own), rows)
            return jnp.where(rows["real"], losses, 0.0).sum()

        return microbatches.gradient_sum(loss, parameters, {**batch, "real": mask}, self.microbatch, spread=True)

    def losses(self, parameters: dict[str, Any], batch: dict[str, Any]) -> tuple[Any, Any]:
        """Computes ((batch,) loss, (batch,) whether at least half of the targets are predicted right)."""
        return self._over_parts(example_losses, parameters, batch)

    def predict(self, parameters: dict[str, Any], batch: dict[str, Any]) -> tuple[Any, Any]:
        """Returns class and probability; raises an error for a masked language model, which has no classes."""
        self._check_classes()
        return self._over_parts(predictions, parameters, batch)

    def probabilities(self, parameters: dict[str, Any], batch: dict[str, Any]) -> Any:
        self._check_classes()
        return self._over_parts(probabilities, parameters, batch)

    def _check_classes(self) -> None:
        if self.classes is None:
            raise InputError("a masked language model has no classes to predict; train a bert-classifier")

    def _over_parts(self, function: Callable[..., Any], parameters: dict[str, Any], batch: dict[str, Any]) -> Any:
        whole = self._whole(parameters)
        return microbatches.over_parts(
            lambda rows: function(self.head, self.config, whole, rows), batch, self.microbatch, spread=True
        )

    def example_loss(self, parameters: dict[str, Any], example: dict[str, Any]) -> Any:
        """Computes the loss of one example (a batch without its first axis), as a reference to differentiate."""
        batch = jax.tree.map(lambda array: array[None], example)
        return example_losses(self.head, self.config, self._whole(parameters), batch)[0][0]

    def to_arrays(self, parameters: dict[str, Any]) -> dict[str, npt.NDArray[np.float32]]:
        """Returns all parameters, frozen ones included."""
        return {name: np.asarray(array, np.float32) for name, array in {**self.frozen.arrays, **parameters}.items()}

    def from_arrays(self, arrays: Mapping[str, npt.ArrayLike]) -> dict[str, npt.NDArray[np.float32]]:
        """Reads `to_arrays` and checkpoints of Hugging Face, older names included; other heads are ignored.

        A classifier's head that is not there starts anew. Refuses arrays of other shapes, a decoder that is not tied,
        and other values of what is frozen, with InputError.
        """
        found = parameters_from(self.config, self.head, arrays)
        for name, array in self.frozen.arrays.items():
            if name in found and not np.array_equal(found[name], array):
                raise InputError(f"{name} is frozen and has other values here; give the arrays of this model")
        found = self._trained(found)
        return found if len(found) == len(self.shapes()) else self.initial() | found


@functools.lru_cache(maxsize=8)
def _compiled_gradients(head: Head, config: BertConfig, trained: frozenset[str]) -> Callable[..., Any]:
    """Compiles (all parameters with a leading axis of one model, rows) -> every row's gradients of the trained ones."""

    @jax.jit
    def gradients(parameters, rows):
        own = {name: array[0] for name, array in parameters.items()}
        found = example_gradients(head, config, own, rows)
        return {name: found[name] for name in trained}  # XLA leaves out what the others need

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
