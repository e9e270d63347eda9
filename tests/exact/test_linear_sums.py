"""Clipped gradients of linear models as integer vectors, added up exactly."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.exact.lengths import squared_lengths, squared_radius

from coowned.errors import InputError
from coowned.exact import linear_sums
from coowned.exact.grid import Grid
from coowned.exact.linear_sums import RowsInPlace, clipped_linear_sums, norms_of

CLIP_NORMS = (0.7, 0.02, 30.0)


def world(batch: int, num_features: int, models: int | tuple[int, int], seed: int = 0, size: float = 1.0):
    """`models`: how many, or (how many, classes)."""
    shape = models if isinstance(models, tuple) else (models,)
    generator = np.random.default_rng(seed)
    features = (size * generator.standard_normal((batch, num_features))).astype(np.float32)
    labels = generator.integers(0, shape[1] if len(shape) > 1 else 2, batch).astype(np.float32)
    coefficients = (0.3 * generator.standard_normal((*shape, num_features + 1))).astype(np.float32)
    grids = [Grid.for_linear(CLIP_NORMS[m % 3]) for m in range(shape[0])]
    return coefficients, features, labels, np.ones(batch, bool), grids


def sums(*given, **settings):
    return clipped_linear_sums(*given, **settings)[0]


def contributions(coefficients, features, labels, mask, grids, **settings):
    """(batch, *shape of the coefficients) what each copy adds when it is alone."""
    return np.array(
        [
            sums(coefficients, features[i : i + 1], labels[i : i + 1], mask[i : i + 1], grids, **settings)
            for i in range(len(labels))
        ]
    )


def reference(coefficients, features, labels, clip_norms, *, squared_loss=False):
    """(batch, *shape of the coefficients) the clipped gradients of Algorithm 1, in float64."""
    rows = np.append(features.astype(np.float64), np.ones((len(features), 1)), axis=1)
    scores = np.einsum("nd,m...d->nm...", rows, coefficients.astype(np.float64))
    if coefficients.ndim == 3:
        exponentials = np.exp(scores - scores.max(axis=2, keepdims=True))
        residuals = exponentials / exponentials.sum(axis=2, keepdims=True)
        residuals[np.arange(len(labels)), :, labels.astype(int)] -= 1
    else:
        residuals = (scores if squared_loss else 1 / (1 + np.exp(-scores))) - labels[:, None]
    gradients = np.einsum("nm...,nd->nm...d", residuals, rows)
    flat = gradients.reshape(*gradients.shape[:2], -1)
    lengths = np.linalg.norm(flat, axis=2, keepdims=True)
    return (flat * np.minimum(1, np.array(clip_norms)[:, None] / lengths)).reshape(gradients.shape)


@pytest.mark.parametrize("squared_loss", [False, True])
@pytest.mark.parametrize("models", [1, 2, 50, (1, 2), (1, 3), (20, 5), (2, 60)])
@pytest.mark.parametrize("num_features", [1, 7, 100])
def test_is_close_to_the_reference(models, num_features, squared_loss):
    if squared_loss and isinstance(models, tuple):
        return
    coefficients, features, labels, mask, grids = world(90, num_features, models)
    clip_norms = [grid.clip_norm for grid in grids]
    expected = reference(coefficients, features, labels, clip_norms, squared_loss=squared_loss)
    units = np.array([grid.unit for grid in grids]).reshape(-1, *(1,) * (coefficients.ndim - 1))
    found = contributions(coefficients, features, labels, mask, grids, squared_loss=squared_loss) * units
    error = np.linalg.norm((found - expected).reshape(90, len(grids), -1), axis=2) / clip_norms
    tolerance = 2e-4 * math.sqrt(coefficients[0].size / (num_features + 1))  # each class is rounded
    if squared_loss:  # scores, which are not bounded, are float32
        tolerance += 2e-6 * num_features / min(clip_norms)
    assert error.max() < tolerance
    whole = sums(coefficients, features, labels, mask, grids, squared_loss=squared_loss) * units
    np.testing.assert_allclose(whole, expected.sum(axis=0), atol=90 * tolerance * max(clip_norms))


@pytest.mark.parametrize("models", [1, 3, (1, 3), (2, 50)])
def test_what_a_copy_adds_is_an_integer_times_its_rounded_row(models):
    """The integers, recomputed by other code."""
    coefficients, features, labels, mask, grids = world(40, 20, models, size=3.0)
    for x, added in zip(features, contributions(coefficients, features, labels, mask, grids), strict=True):
        length = math.sqrt(float(norms_of(x[None])[0]) ** 2 + 1)
        scale = 2.0 ** (19 - math.floor(math.log2(length)))
        row = np.rint(np.append(x.astype(np.float64), 1.0) * scale).astype(np.int64)
        for own in added.reshape(-1, 21):
            factor = round(own[0] / row[0])
            assert own.tolist() == (factor * row).tolist()
            assert factor != 0 or isinstance(models, tuple)


@settings(deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([1e-42, 1e-20, 1e-3, 1.0, 30.0, 1e6, 1e15, 1e19, 1e30, 3e38]),
    st.sampled_from([1, 2, 33, 700]),
    st.sampled_from([1e-25, 1e-3, 0.9999999, 1.0, 7.3, 1e20]),
    st.sampled_from([2, (2, 3), (2, 49)]),
)
def test_no_copy_adds_more(seed, size, num_features, clip_norm, models):
    """The integer vectors' lengths, in exact arithmetic, from denormal to 1e38 large features."""
    coefficients, features, labels, mask, _ = world(5, num_features, models, seed=seed)
    with np.errstate(over="ignore"):
        features = (features / abs(features).max() * np.float32(size)).astype(np.float32)
    coefficients[:] = 0  # logits of 0: the residual is 1/2, and a large one is clipped
    grids = [Grid.for_linear(clip_norm)] * 2
    for count in (1, 2):
        found = contributions(coefficients[:count], features, labels, mask, grids[:count])
        assert max(squared_lengths(found)) <= squared_radius(grids[0])
        if size >= 1e-3 * clip_norm and size < 1e38:
            assert max(squared_lengths(found)) > 0


def test_longest_copies_use_nearly_all_of_the_radius():
    coefficients, features, labels, mask, grids = world(1, 300, 3, size=100.0)
    coefficients[:] = 0
    found = squared_lengths(contributions(coefficients, features, labels, mask, grids))
    for length, grid in zip(found, grids, strict=True):
        assert 0.999 * grid.radius < math.sqrt(length) <= grid.radius


@pytest.mark.parametrize("models", [1, 2, 60, (1, 3), (30, 4), (3, 60)])
def test_the_sum_is_that_of_the_copies(models):
    given = world(150, 37, models)
    assert np.array_equal(sums(*given), contributions(*given).sum(axis=0))


@pytest.mark.parametrize("models", [1, 2, 60, (1, 3), (2, 60)])
def test_order_threads_and_padding_change_nothing(models, monkeypatch):
    coefficients, features, labels, mask, grids = world(3000, 90, models)
    expected = sums(coefficients, features, labels, mask, grids)
    order = np.random.default_rng(1).permutation(3000)
    assert np.array_equal(sums(coefficients, features[order], labels[order], mask, grids), expected)
    for cores in (1, 5):
        monkeypatch.setattr(linear_sums.threads, "cores", lambda cores=cores: cores)
        assert np.array_equal(sums(coefficients, features, labels, mask, grids), expected)
    scattered = np.zeros((9000, 90), np.float32)
    rows = np.random.default_rng(2).permutation(9000)[:3000]
    scattered[rows] = features
    padded = RowsInPlace(scattered, np.append(rows, np.zeros(200, np.int64)))
    more_labels, more = np.append(labels, np.full(200, np.nan)), np.append(mask, np.zeros(200, bool))
    norms = np.append(norms_of(features), np.zeros(200, np.float32))
    assert np.array_equal(sums(coefficients, padded, more_labels, more, grids, norms=norms), expected)


@pytest.mark.parametrize("models", [1, 5, (1, 3)])
def test_parts_of_many_copies_are_carried(models, monkeypatch):
    """What would be 2^19 copies and more, by a part of 10."""
    given = world(95, 5, models)
    expected = sums(*given)
    monkeypatch.setattr(linear_sums, "MOST_COPIES_OF_A_PART", 10)
    assert np.array_equal(sums(*given), expected)


def test_a_sum_of_the_most_copies_is_exact():
    """2^19 copies of the longest kind stay below 2^53."""
    assert linear_sums.MOST_COPIES_OF_A_PART * Grid.for_linear(math.nextafter(1.0, 0)).radius <= 2.0**53


@pytest.mark.parametrize("models", [1, 4, (1, 3)])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_a_copy_adds_the_same_in_any_company(models, bad):
    """Its neighbours are zeroed, replaced, not finite or huge; one batch is shorter than the other."""
    coefficients, features, labels, mask, grids = world(70, 33, models)
    own = contributions(coefficients, features, labels, mask, grids)
    others = features.copy()
    others[::3, 5] = bad
    kept = np.arange(70) % 3 != 0
    found = sums(coefficients, others, labels, mask, grids) - sums(coefficients, others, labels, mask & ~kept, grids)
    assert np.array_equal(found, own[kept].sum(axis=0))
    for number in (1, 2, 34, 69):
        for begin in (0, number // 2, number):
            less = sums(coefficients, features[begin:number], labels[begin:number], mask[begin:number], grids)
            more = sums(
                coefficients, features[begin:], labels[begin:], mask[begin:] & (np.arange(70)[begin:] <= number), grids
            )
            assert np.array_equal(more - less, own[number])


@pytest.mark.parametrize(("models", "some"), [(60, [0, 7, 47, 48, 59]), ((30, 4), [29]), ((30, 4), [0, 11, 12, 13])])
def test_a_model_alone_has_the_same_sum(models, some):
    coefficients, features, labels, mask, grids = world(200, 50, models)
    together = sums(coefficients, features, labels, mask, grids)
    apart = sums(coefficients[some], features, labels, mask, [grids[m] for m in some])
    assert np.array_equal(together[some], apart)


@pytest.mark.parametrize("models", [1, 2, (1, 3), (2, 3)])
def test_not_finite_adds_zero(models):
    for bad in (np.nan, np.inf, -np.inf):
        coefficients, features, labels, mask, grids = world(3, 20, models)
        features[0, 3] = bad
        labels[1] = bad
        found = contributions(coefficients, features, labels, mask, grids)
        assert not found[:2].any()
        assert found[2].any()
    coefficients[..., 2] = np.nan  # what a step that went wrong leaves behind
    assert not sums(coefficients, features, labels, mask, grids).any()


@pytest.mark.parametrize("models", [1, 2, (1, 3)])
def test_padding_adds_zero(models):
    coefficients, features, labels, mask, grids = world(9, 20, models)
    mask[:] = False
    features[:] = np.nan
    assert not sums(coefficients, features, labels, mask, grids).any()
    assert sums(coefficients, features[:0], labels[:0], mask[:0], grids).shape == coefficients.shape


@pytest.mark.parametrize("models", [1, 2])
def test_rows_beyond_float32_are_clipped_like_others(models):
    coefficients, features, labels, mask, grids = world(1, 20, models)
    coefficients[:] = 0
    usual = contributions(coefficients, features * 1e10, labels, mask, grids)[0, 0] * grids[0].unit
    huge = contributions(coefficients, features * 1e30, labels, mask, grids)[0, 0] * grids[0].unit
    np.testing.assert_allclose(huge, usual, atol=2e-4 * grids[0].clip_norm)


def test_norms_of_other_rows_would_void_the_bound():
    coefficients, features, labels, mask, grids = world(1, 20, 1, size=100.0)
    coefficients[:] = 0
    found = sums(coefficients, features, labels, mask, grids, norms=[1.0])
    assert max(squared_lengths(found[None])) > squared_radius(grids[0])


@pytest.mark.parametrize("models", [1, (1, 3)])
def test_clipped_copies_are_counted(models):
    coefficients, features, labels, mask, _ = world(500, 20, models)
    lengths = np.linalg.norm(reference(coefficients, features, labels, [math.inf])[:, 0].reshape(500, -1), axis=1)
    for clip_norm in (0.1, 1.0, 10.0):
        _, clipped = clipped_linear_sums(coefficients, features, labels, mask, [Grid.for_linear(clip_norm)])
        assert abs(clipped - (lengths > clip_norm).sum()) <= 2


def test_norms_are_rounded_up():
    generator = np.random.default_rng(0)
    features = (generator.standard_normal((300, 40)) * 10.0 ** generator.integers(-20, 15, (300, 1))).astype(np.float32)
    exact = [sum(int(v * 2.0**120) ** 2 for v in row.astype(np.float64).tolist()) for row in features]
    for found, square in zip(norms_of(features).tolist(), exact, strict=True):
        assert int(found * 2.0**120) ** 2 >= square
        assert int(found * 2.0**120) ** 2 <= square * (1 + 1e-6) + 2**100
    assert norms_of([[np.nan], [np.inf], [-np.inf]]).tolist() == [np.inf] * 3
    assert norms_of([[3e38, 3e38, 0.0], [3e38, 0.0, 0.0]]).tolist() == pytest.approx([np.inf, 3e38])


def test_labels_that_are_no_class_add_zero():
    coefficients, features, labels, mask, grids = world(5, 20, (1, 3))
    labels[:] = [-1, 3, 0.5, 2, 1e30]
    found = contributions(coefficients, features, labels, mask, grids)
    assert [bool(own.any()) for own in found] == [False, False, False, True, False]


def test_bad_arguments_are_refused():
    coefficients, features, labels, mask, grids = world(4, 3, 1)
    for changed in (
        (coefficients[0], features, labels, mask, grids),
        (coefficients, features[:, :2], labels, mask, grids),
        (coefficients, features, labels[:2], mask, grids),
        (coefficients, features, labels, mask, grids * 2),
        (coefficients, features, labels, mask, [Grid(1.0, 40)]),
        (coefficients[:, None], features, labels, mask, grids),
        (coefficients, RowsInPlace(features, np.array([0, 1, 2, 4])), labels, mask, grids),
        (coefficients, RowsInPlace(features, np.array([0.0, 1, 2, 3])), labels, mask, grids),
        (coefficients, RowsInPlace(features[:, ::-1], np.arange(4)), labels, mask, grids),
    ):
        with pytest.raises(InputError):
            clipped_linear_sums(*changed)
