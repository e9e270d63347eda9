"""The classification head: clipped sums of the examples' own gradients, predictions, and where its head comes from."""

import functools

import jax
import numpy as np
import pytest
from tests.exact.lengths import squared_radius
from tests.models.any_company import check_any_company
from tests.models.model_sums import integer_sum, joined, parameters

from coowned.errors import InputError
from coowned.models.bert_files import BertConfig
from coowned.models.bert_model import BertModel
from coowned.models.bert_network import ClassifierHead, MaskedLMHead

CONFIG = BertConfig(vocab_size=50, hidden_size=8, intermediate_size=12, max_position_embeddings=9)
MODEL = BertModel.classifier(config=CONFIG, classes=["ham", "spam", "eggs"], sequence_length=6, microbatch=4)
SIZE = 10  # not a multiple of the microbatch
NEW = {"bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias"}

# Compiling is most of what these tests cost.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
example_gradients = jit(jax.vmap(jax.grad(MODEL.example_loss), in_axes=(None, 0)))


def make_batch(seed=0):
    """Short and long texts of few different tokens, so that they repeat."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(3, 7, SIZE).astype(np.int32)
    tokens = np.where(np.arange(6) < lengths[:, None], generator.integers(0, 7, (SIZE, 6)), 0).astype(np.int32)
    labels = generator.integers(0, 3, SIZE).astype(np.float32)
    return {"tokens": tokens, "lengths": lengths, "labels": labels, "weights": np.ones(SIZE, np.float32)}


def alone(own, batch, row, clip_norm):
    return integer_sum(MODEL, own, batch, np.arange(SIZE) == row, clip_norm)


@pytest.mark.full
@pytest.mark.parametrize("clip_norm", [1e-6, 0.3, 2.0, 30.0])
def test_classifier_equals_the_mechanism(clip_norm):
    own, batch, mask = parameters(MODEL), make_batch(), np.arange(SIZE) != 4
    gradients = {name: np.float64(array) for name, array in example_gradients(own, batch).items()}
    lengths = np.sqrt(sum((array.reshape(SIZE, -1) ** 2).sum(axis=1) for array in gradients.values()))
    factors = np.minimum(1, clip_norm / lengths) * mask
    expected = {name: np.tensordot(factors, array, axes=1) for name, array in gradients.items()}
    sums, clipped, grid = integer_sum(MODEL, own, batch, mask, clip_norm)
    assert set(sums) == set(expected) == set(MODEL.shapes())
    scale = np.abs(joined(expected)).max()
    for name in expected:
        np.testing.assert_allclose(sums[name] * grid.unit, expected[name], rtol=2e-4, atol=1e-6 * scale, err_msg=name)
    assert clipped == int(((lengths > clip_norm) & mask).sum())


def test_without_clipping_it_is_the_plain_gradient():
    own, batch, mask = parameters(MODEL), make_batch(), np.arange(SIZE) != 4
    batch["labels"][2] = np.nan
    found = jit(MODEL.gradient_sum)(own, batch, mask)
    gradients = example_gradients(own, batch)
    use = mask & np.isfinite(batch["labels"])
    scale = np.abs(joined(found)).max()
    for name, array in found.items():
        expected = np.float64(gradients[name])[use].sum(axis=0)
        np.testing.assert_allclose(array, expected, rtol=2e-4, atol=1e-6 * scale, err_msg=name)


@pytest.mark.parametrize("clip_norm", [1e-12, 1e-3, 1.0])
def test_no_text_adds_more(clip_norm):
    for row in range(SIZE):
        own, clipped, grid = alone(parameters(MODEL), make_batch(), row, clip_norm)
        square = sum(int(value) ** 2 for array in own.values() for value in array.ravel())
        assert square <= squared_radius(grid)
        if clipped:
            assert square >= squared_radius(grid) * (1 - 1e-4)


def test_a_text_counts_the_same_in_any_company():
    check_any_company(MODEL, parameters(MODEL), make_batch())


def test_unknown_labels_add_zero():
    own, batch = parameters(MODEL), make_batch()
    batch["labels"][3], batch["weights"][4], batch["weights"][5] = np.nan, 0, np.inf
    for row in (3, 4, 5):
        assert not joined(alone(own, batch, row, 1.0)[0]).any()
    assert joined(alone(own, batch, 6, 1.0)[0]).any()


def test_losses_and_predictions():
    own, batch = parameters(MODEL), make_batch()
    batch["labels"][0], batch["lengths"][1], batch["weights"][1] = np.nan, 0, 0
    losses, right = map(np.asarray, jit(MODEL.losses)(own, batch))
    predicted, probability = map(np.asarray, jit(MODEL.predict)(own, batch))
    assert predicted.shape == probability.shape == losses.shape == (SIZE,)
    assert np.isnan(losses[:2]).all()
    assert np.isfinite(losses[2:]).all()
    assert np.isfinite(probability[0])  # a text without a label is predicted
    assert np.isnan(probability[1])  # no text is not
    shares = np.asarray(jit(MODEL.probabilities)(own, batch))
    assert shares.shape == (SIZE, 3)
    np.testing.assert_allclose(shares.max(axis=1), probability, rtol=1e-5)
    assert np.array_equal(right[2:], predicted[2:] == batch["labels"][2:])
    assert right[2:].any()
    np.testing.assert_allclose(np.exp(-losses[2:])[right[2:]], probability[2:][right[2:]], rtol=1e-5)
    assert MODEL.classes == ("ham", "spam", "eggs")
    with pytest.raises(InputError, match="train a bert-classifier"):
        BertModel.masked_lm(sequence_length=6, config=CONFIG).predict(own, batch)


def test_head_starts_anew_unless_the_checkpoint_has_one():
    own, start = parameters(MODEL), MODEL.initial()
    masked = BertModel.masked_lm(sequence_length=6, config=CONFIG)
    encoder = {name: array for name, array in own.items() if name not in NEW}
    other = {name: array for name, array in masked.initial().items() if name.startswith("cls.")}
    found = MODEL.from_arrays(encoder | other | {"cls.seq_relationship.weight": np.ones((2, 8), np.float32)})
    assert set(found) == set(own)
    assert all(np.array_equal(found[name], (start if name in NEW else own)[name]) for name in found)
    assert all(np.array_equal(array, own[name]) for name, array in MODEL.from_arrays(MODEL.to_arrays(own)).items())
    pooled = encoder | {name: own[name] for name in NEW if "pooler" in name}
    assert np.array_equal(MODEL.from_arrays(pooled)["bert.pooler.dense.weight"], own["bert.pooler.dense.weight"])
    with pytest.raises(InputError, match=r"weight has the shape \(2, 8\), the declared classes need \(3, 8\)"):
        MODEL.from_arrays(own | {"classifier.weight": np.ones((2, 8), np.float32)})
    with pytest.raises(InputError, match=r"no tensor 'bert.embeddings.word_emb.*a BertForSequenceClassification"):
        MODEL.from_arrays({})


def test_encoders_start_alike():
    """Both kinds of BERT, from one seed."""
    masked, own = BertModel.masked_lm(sequence_length=6, config=CONFIG).initial(), MODEL.initial()
    assert all(np.array_equal(array, masked[name]) for name, array in own.items() if name not in NEW)
    assert own["classifier.weight"].any()


def test_bad_heads():
    with pytest.raises(InputError, match="max_predictions"):
        MaskedLMHead(max_predictions=0)
    with pytest.raises(InputError, match="classes"):
        ClassifierHead(classes=("one",))
    with pytest.raises(InputError, match="labels of shape"):
        MODEL.check_data({"tokens": (6,), "lengths": ()})
