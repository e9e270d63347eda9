"""BERT: the clipped sum is that of the examples' own gradients, and no example can add more or touch the sum."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_privacy.clipping import clipped_grad
from tests.exact.lengths import squared_radius
from tests.models.any_company import check_any_company
from tests.models.model_sums import integer_sum, joined, parameters

from coowned.errors import InputError
from coowned.models import bert_model
from coowned.models.bert_files import BertConfig
from coowned.models.bert_model import BertModel
from coowned.models.embedding_gradients import Embedding

CONFIG = BertConfig(vocab_size=50, hidden_size=8, intermediate_size=12, max_position_embeddings=9)
MODEL = BertModel.masked_lm(config=CONFIG, sequence_length=6, max_predictions=3, microbatch=4)
SIZE = 10  # not a multiple of the microbatch


def make_batch(model=MODEL, size=SIZE, seed=0):
    """Short and long examples; few different tokens, so that they repeat and are targets too."""
    generator = np.random.default_rng(seed)
    length, places = model.sequence_length, model.head.max_predictions
    batch = {
        "tokens": generator.integers(0, 7, (size, length), np.int32),
        "lengths": generator.integers(1, length + 1, size).astype(np.int32),
        "positions": np.zeros((size, places), np.int32),
        "targets": np.zeros((size, places), np.int32),
        "weights": np.zeros((size, places), np.float32),
    }
    for row in range(size):
        own = int(generator.integers(1, min(places, batch["lengths"][row]) + 1))
        batch["tokens"][row, batch["lengths"][row] :] = 0
        batch["positions"][row, :own] = generator.choice(batch["lengths"][row], own, replace=False)
        batch["targets"][row, :own] = generator.integers(0, 7, own)
        batch["weights"][row, :own] = 1 / own
    batch["positions"][0] = 0  # one place twice
    batch["weights"][0] = 1 / places
    return batch


# Compiling is most of what these tests cost.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
plain_sum = jit(MODEL.gradient_sum)
example_gradients = jit(jax.vmap(jax.grad(MODEL.example_loss), in_axes=(None, 0)))
all_losses = jit(MODEL.losses)
ONE_LAYER = BertModel.masked_lm(
    config=BertConfig(
        vocab_size=50, hidden_size=8, num_hidden_layers=1, intermediate_size=12, max_position_embeddings=9
    ),
    sequence_length=6,
    max_predictions=3,
)


def clipped_sum(own, batch, mask, clip_norm, model=MODEL):
    sums, clipped, grid = integer_sum(model, own, batch, mask, clip_norm)
    return {name: total * grid.unit for name, total in sums.items()}, clipped


def reference_sum(own, batch, mask, clip_norm, trained=None):
    """The clipped gradients that JAX gives for every example, in float64, of all parameters or of the trained ones."""
    found = example_gradients(own, batch)
    gradients = {name: np.float64(found[name]) for name in trained or found}
    squares = sum((array.reshape(len(mask), -1) ** 2).sum(axis=1) for array in gradients.values())
    factors = np.minimum(1, clip_norm / np.sqrt(squares)) * mask
    summed = {name: np.tensordot(factors, array, axes=1) for name, array in gradients.items()}
    return summed, int(((np.sqrt(squares) > clip_norm) & mask).sum())


def length(gradient) -> float:
    return float(np.linalg.norm(joined(gradient)))


def assert_same(found, expected, tolerance=1e-6):
    scale = np.abs(joined(expected)).max()
    assert set(found) == set(expected)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=2e-4, atol=tolerance * scale, err_msg=name)


# ---- the sum ---------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("clip_norm", [1e-6, 0.3, 2.0, 30.0])
def test_equals_the_mechanism(clip_norm):
    mask = np.arange(SIZE) != 4
    found, clipped = clipped_sum(parameters(MODEL), make_batch(), mask, clip_norm)
    expected, expected_clipped = reference_sum(parameters(MODEL), make_batch(), mask, clip_norm)
    assert_same(found, expected)
    assert int(clipped) == int(expected_clipped)


@pytest.mark.full
@pytest.mark.parametrize("patterns", [["bert.encoder.*", "cls.*"], ["*.bias"], ["bert.embeddings.word_embeddings.*"]])
def test_the_clip_is_that_of_the_trained_part(patterns):
    """The norm of the trained part counts, not the whole gradient's, which would clip more."""
    own, batch, mask, clip_norm = parameters(MODEL), make_batch(), np.arange(SIZE) != 4, 0.3
    model, trained = MODEL.training_only(patterns, own)
    assert model.shapes() == {name: array.shape for name, array in trained.items()}
    found, _ = clipped_sum(trained, batch, mask, clip_norm, model)
    assert_same(found, reference_sum(own, batch, mask, clip_norm, trained)[0])
    counting_all, _ = reference_sum(own, batch, mask, clip_norm)
    assert length(found) > 1.01 * length({name: counting_all[name] for name in found})
    plain = jit(model.gradient_sum)(trained, batch, mask)
    assert_same(plain, {name: array for name, array in plain_sum(own, batch, mask).items() if name in found})


def test_frozen_parameters_are_part_of_the_model():
    own = parameters(MODEL)
    model, trained = MODEL.training_only(["*.bias"], own)
    stored = model.to_arrays(trained)
    assert all(np.array_equal(stored[name], own[name]) for name in own)
    assert set(model.from_arrays(stored)) == set(trained) == set(model.initial())
    moved = stored | {"bert.embeddings.word_embeddings.weight": stored["bert.embeddings.word_embeddings.weight"] + 1}
    with pytest.raises(InputError, match="is frozen and has other values"):
        model.from_arrays(moved)
    other, _ = MODEL.training_only(["*.bias"], moved)
    assert model.describe() != other.describe() != MODEL.describe()
    assert model == MODEL.training_only(["*.bias"], own)[0] != other
    with pytest.raises(
        InputError, match=r"no parameter matches 'bert.encoders.\*'; the parameters are bert.embeddings"
    ):
        MODEL.training_only(["bert.encoders.*"], own)


def test_members_of_a_sweep_have_their_own_sums():
    own, batch, mask = [parameters(MODEL), parameters(MODEL, seed=2)], make_batch(), np.ones(SIZE, bool)
    together = {name: np.stack([one[name] for one in own]) for name in MODEL.shapes()}
    sums, clipped = MODEL.clipped_sum(together, batch, mask, [MODEL.grid(0.3), MODEL.grid(2.0)])
    alone = [integer_sum(MODEL, one, batch, mask, clip_norm) for one, clip_norm in zip(own, (0.3, 2.0), strict=True)]
    assert clipped == sum(count for _, count, _ in alone)
    for name, array in sums.items():
        assert all(np.array_equal(array[number], alone[number][0][name]) for number in range(2))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning")  # in jax_privacy
def test_equals_jax_privacy():
    batch = make_batch()
    peer = clipped_grad(MODEL.example_loss, l2_clip_norm=2.0, batch_argnums=1, keep_batch_dim=False)
    expected = jit(lambda own, batch, padding: peer(own, batch, is_padding_example=padding))(
        parameters(MODEL), batch, np.arange(SIZE) == 4
    )
    found, clipped = clipped_sum(parameters(MODEL), batch, np.arange(SIZE) != 4, 2.0)
    assert_same(found, expected)
    assert 0 < int(clipped) <= SIZE - 1


def test_every_parameter_has_a_gradient():
    found, _ = clipped_sum(parameters(MODEL), make_batch(), np.ones(SIZE, bool), 1.0)
    assert {name: array.shape for name, array in found.items()} == MODEL.shapes()
    # What each row adds to all its scores alike changes nothing: the keys' bias has no gradient.
    assert [name for name, array in found.items() if np.abs(array).max() < 1e-6] == [
        name for name in found if name.endswith("key.bias")
    ]


@pytest.mark.full
def test_without_clipping_it_is_the_plain_gradient():
    mask = np.arange(SIZE) != 4
    expected, _ = reference_sum(parameters(MODEL), make_batch(), mask, 1e6)
    assert_same(plain_sum(parameters(MODEL), make_batch(), mask), expected)


@pytest.mark.full
def test_a_wider_model_with_a_vocabulary_that_is_not_whole():
    """Rows longer than a panel of the product, and words that no block of rows holds."""
    config = BertConfig(
        vocab_size=2 * 2048 + 77,
        hidden_size=60,
        num_hidden_layers=1,
        num_attention_heads=3,
        intermediate_size=40,
        max_position_embeddings=8,
        hidden_act="gelu_new",
    )
    model = BertModel.masked_lm(config=config, sequence_length=8, max_predictions=4)
    own, batch = parameters(model), make_batch(model, 3)
    batch["targets"][:, 0] = config.vocab_size - 1
    batch["tokens"][:, 2] = config.vocab_size - 2
    gradient = jit(jax.grad(model.example_loss))
    for row in range(3):
        found, _ = clipped_sum(own, batch, np.arange(3) == row, 1.0, model)
        whole = gradient(own, {name: array[row] for name, array in batch.items()})
        assert_same(found, {name: np.float64(array) / length(whole) for name, array in whole.items()}, 1e-5)
        assert 1 - 1e-3 < length(found) <= 1


# ---- the bound -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip_norm", [1e-12, 1e-3, 1.0, 123.456])
def test_no_example_adds_more(clip_norm):
    """The squared length of what one example adds, in integers."""
    for seed in range(4):
        own, batch = parameters(MODEL, seed=seed), make_batch(seed=seed)
        for row in range(SIZE):
            alone, clipped, grid = integer_sum(MODEL, own, batch, np.arange(SIZE) == row, clip_norm)
            square = sum(int(value) ** 2 for array in alone.values() for value in array.ravel())
            assert square <= squared_radius(grid)
            if clipped:
                assert square >= squared_radius(grid) * (1 - 1e-4)


def test_without_the_cross_term_the_norm_is_another():
    """Two uses of one matrix have something in common: measured apart, a gradient may look shorter than it is."""
    rows = {name: array[:4] for name, array in make_batch().items()}
    own = {name: jnp.asarray(array) for name, array in parameters(ONE_LAYER).items()}
    gradients_of = functools.partial(bert_model.example_gradients, ONE_LAYER.head, ONE_LAYER.config)
    words = jit(lambda *given: gradients_of(*given)["bert.embeddings.word_embeddings.weight"])(own, rows)
    whole = Embedding(words).squares()
    parts = [
        Embedding(words._replace(**{name: 0 * getattr(words, name)})).squares() for name in ("residuals", "looked_up")
    ]
    assert (np.abs(sum(parts) / whole - 1) > 1e-3).any()
    gradients = jit(jax.vmap(jax.grad(ONE_LAYER.example_loss), in_axes=(None, 0)))(own, rows)
    exact = np.float64(gradients["bert.embeddings.word_embeddings.weight"])
    np.testing.assert_allclose(whole, (exact**2).sum(axis=(1, 2)), rtol=1e-4)


def test_repeated_tokens_are_added_before_they_are_squared():
    batch, row = make_batch(), np.arange(SIZE) == 3
    batch["tokens"][3], batch["lengths"][3] = 5, 6
    found, _ = clipped_sum(parameters(MODEL), batch, row, 0.1)
    expected, _ = reference_sum(parameters(MODEL), batch, row, 0.1)
    assert_same(found, expected)
    assert 0.1 * (1 - 1e-4) < length(found) <= 0.1


# ---- what must not count ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_finite_adds_zero(bad):
    batch, mask = make_batch(), np.ones(SIZE, bool)
    others = np.arange(SIZE) != 5
    expected, expected_clipped = clipped_sum(parameters(MODEL), batch, others, 1.0)
    batch["weights"][5, 0] = bad
    found, clipped = clipped_sum(parameters(MODEL), batch, mask, 1.0)
    np.testing.assert_array_equal(joined(found), joined(expected))
    assert int(clipped) == int(expected_clipped)


def test_weight_zero_alone_would_not_help():
    """The bug that reading no gradient of factor zero is for."""
    batch = make_batch()
    batch["weights"][5] = np.inf
    assert np.isnan(joined(plain_sum(parameters(MODEL), batch, np.arange(SIZE) != 5))).any()


def test_many_rows_that_are_not_finite():
    batch = make_batch()
    batch["weights"][:8] = np.nan
    found, clipped = clipped_sum(parameters(MODEL), batch, np.ones(SIZE, bool), 1.0)
    expected, _ = clipped_sum(parameters(MODEL), make_batch(), np.arange(SIZE) >= 8, 1.0)
    assert_same(found, expected)
    assert int(clipped) == 2
    batch["weights"][:] = np.nan
    found, clipped = clipped_sum(parameters(MODEL), batch, np.ones(SIZE, bool), 1.0)
    assert not joined(found).any()
    assert int(clipped) == 0


def test_parameters_that_make_padding_infinite_do_not_take_others_with_it():
    """A bad row must not be what decides whether others count, whatever the parameters make of zeros."""
    own, batch = parameters(MODEL), make_batch()
    own["bert.embeddings.word_embeddings.weight"][0] = 2e19  # its square is infinite; nobody here has that token
    own["cls.predictions.bias"][0] = -1e30
    batch["tokens"] = np.maximum(1, batch["tokens"])
    batch["targets"] = np.maximum(1, batch["targets"])
    mask = np.arange(SIZE) < 8
    first, _ = clipped_sum(own, batch, mask, 1.0)
    batch["weights"][5] = np.nan
    second, _ = clipped_sum(own, batch, mask, 1.0)
    assert length(first) > 1.5
    assert length({name: first[name] - second[name] for name in first}) <= 1 + 1e-5


def test_parameters_that_are_not_finite_give_zero():
    own = parameters(MODEL)
    own["bert.embeddings.LayerNorm.weight"][2] = np.nan
    found, clipped = clipped_sum(own, make_batch(), np.ones(SIZE, bool), 1.0)
    assert not joined(found).any()
    assert int(clipped) == 0


@pytest.mark.parametrize("content", [0, 1, np.nan])
def test_padding_adds_zero(content):
    batch, mask = make_batch(), np.arange(SIZE) < 6
    expected, _ = reference_sum(parameters(MODEL), batch, mask, 1.0)
    for name in batch:
        batch[name][6:] = content if name == "weights" or np.isfinite(content) else -7
    found, clipped = clipped_sum(parameters(MODEL), batch, mask, 1.0)
    assert_same(found, expected)
    assert 0 < int(clipped) <= 6
    nothing, clipped = clipped_sum(parameters(MODEL), batch, np.zeros(SIZE, bool), 1.0)
    assert not joined(nothing).any()
    assert int(clipped) == 0


def test_what_lies_past_the_end_does_not_count():
    batch = make_batch()
    batch["lengths"] = np.minimum(batch["lengths"], 4)
    batch["positions"] = np.minimum(batch["positions"], batch["lengths"][:, None] - 1)
    first, _ = clipped_sum(parameters(MODEL), batch, np.ones(SIZE, bool), 1.0)
    for row in range(SIZE):
        batch["tokens"][row, batch["lengths"][row] :] = 33
    second, _ = clipped_sum(parameters(MODEL), batch, np.ones(SIZE, bool), 1.0)
    assert_same(second, first)


def test_an_example_counts_the_same_in_any_company():
    check_any_company(MODEL, parameters(MODEL), make_batch())


# ---- the rest --------------------------------------------------------------------------------------------------------


def test_losses():
    batch, own = make_batch(), parameters(MODEL)
    losses, right = all_losses(own, batch)
    assert losses.shape == right.shape == (SIZE,)
    assert right.dtype == bool
    sure = {**own, "cls.predictions.bias": np.where(np.arange(50) == 7, 1e4, 0).astype(np.float32)}
    batch["weights"][:2], batch["targets"][:2] = np.float32([1 / 3] * 3), [[7, 7, 8], [7, 8, 9]]
    batch["weights"][2:4], batch["targets"][2:4] = np.float32([0.5, 0.5, 0]), [[7, 8, 7], [8, 8, 7]]
    assert all_losses(sure, batch)[1][:4].tolist() == [True, False, True, False]


def test_loss_is_the_mean_over_own_places():
    """Of two halves of its places, an example's loss is the mean: nothing of the batch is in it."""
    batch, own = make_batch(), parameters(MODEL)
    batch["positions"][1], batch["targets"][1] = [0, 1, 2], [3, 4, 5]
    parts = []
    for weights in ([0.5, 0.5, 0], [1, 0, 0], [0, 1, 0]):
        batch["weights"][1] = weights
        parts.append(float(all_losses(own, batch)[0][1]))
    assert parts[0] == pytest.approx((parts[1] + parts[2]) / 2, rel=1e-5)


def test_initial_is_that_of_bert():
    model = BertModel.masked_lm(config=BertConfig(vocab_size=1000), sequence_length=16)
    first, second = model.initial(), model.initial()
    assert {name: array.shape for name, array in first.items()} == model.shapes()
    assert all(np.array_equal(first[name], second[name]) and first[name].dtype == np.float32 for name in first)
    words = first["bert.embeddings.word_embeddings.weight"]
    assert np.abs(words).max() <= 0.04 * (1 + 1e-6)
    assert abs(words.std() / (0.02 * 0.8796) - 1) < 0.02  # of a normal cut off at two; 1.28e5 draws, 6 deviations
    assert (first["bert.embeddings.LayerNorm.weight"] == 1).all()
    assert not first["cls.predictions.bias"].any()
    other = BertModel.masked_lm(config=model.config, sequence_length=16, seed=1).initial()
    assert not np.array_equal(other["bert.embeddings.word_embeddings.weight"], words)


def test_defaults_are_those_of_bert_tiny():
    model = BertModel.masked_lm(sequence_length=128)
    assert model.head.max_predictions == 20
    assert sum(np.prod(shape) for shape in model.shapes().values()) == 4_416_698
    for length, most in ((1, 1), (6, 1), (7, 2), (20, 3), (32, 5), (512, 77)):
        assert BertModel.masked_lm(sequence_length=length).head.max_predictions == most
    assert hash(model) == hash(BertModel.masked_lm(sequence_length=128))
    assert model.describe()["kind"] == "bert-masked-lm"


def test_arrays_round_trip():
    own = parameters(MODEL)
    back = MODEL.from_arrays(MODEL.to_arrays(own))
    assert set(back) == set(own)
    assert all(np.array_equal(back[name], own[name]) for name in own)


def test_bad_settings_and_data():
    for settings in ({"sequence_length": 10}, {"sequence_length": 0}, {"microbatch": -1}, {"seed": -1}):
        with pytest.raises(InputError, match=next(iter(settings))):
            BertModel.masked_lm(**{"config": CONFIG, "sequence_length": 6, **settings})
    with pytest.raises(InputError, match="hidden_act"):
        BertConfig(hidden_act="swish")
    with pytest.raises(InputError, match="multiple of num_attention_heads"):
        BertConfig(hidden_size=9)
    shapes = {name: array.shape[1:] for name, array in make_batch().items()}
    MODEL.check_data(shapes)
    with pytest.raises(InputError, match=r"tokens of shape \(6,\).*the data have \(7,\)"):
        MODEL.check_data({**shapes, "tokens": (7,)})
    with pytest.raises(InputError, match="the data have none"):
        MODEL.check_data({"features": (3,)})


SHORT_MODEL = BertModel.masked_lm(
    config=BertConfig(
        vocab_size=20, hidden_size=4, num_hidden_layers=1, intermediate_size=4, max_position_embeddings=8
    ),
    sequence_length=8,
)


def test_a_text_without_words_has_no_loss():
    rows = 2
    batch = {
        "tokens": np.full((rows, 8), 5, np.int32),
        "lengths": np.array([8, 0], np.int32),
        "positions": np.ones((rows, SHORT_MODEL.head.max_predictions), np.int32),
        "targets": np.full((rows, SHORT_MODEL.head.max_predictions), 6, np.int32),
        "weights": np.zeros((rows, SHORT_MODEL.head.max_predictions), np.float32),
    }
    batch["weights"][0] = 1 / SHORT_MODEL.head.max_predictions
    parameters = {name: jnp.asarray(array) for name, array in SHORT_MODEL.initial().items()}
    losses, right = SHORT_MODEL.losses(parameters, batch)
    assert np.isfinite(losses[0])
    assert np.isnan(losses[1])  # left out of every mean
    assert not right[1]
