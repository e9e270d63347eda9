"""Many models on the host: the sums of Algorithm 1 for each, and what one copy can do to them."""

import itertools
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.mechanism.test_clipping import batch, cancelling, magnitudes, reference

from coowned import threads
from coowned.errors import InputError
from coowned.mechanism.batching import MOST_OF_A_STRETCH
from coowned.mechanism.clipping import clipped_logistic_gradient_sums, squared_norms_of
from coowned.mechanism.fused_clipping import RowsInPlace
from coowned.mechanism.tiled_clipping import RAISED, TILE, tiled_clipped_logistic_sums


def tiled(*given, **more) -> np.ndarray:
    """(models, num_features + 1) both halves of a sum, in float64."""
    summed = tiled_clipped_logistic_sums(*given, **more)
    return np.float64(summed.total) + np.float64(summed.rest)


def many(size, num_features, models, seed=0):
    """Coefficients of many models, features, labels, mask, clip norms."""
    _, _, features, labels, mask = batch(size, num_features, seed)
    generator = np.random.default_rng(seed + 1)
    coefficients = generator.standard_normal((models, num_features + 1)).astype(np.float32) / np.float32(
        np.sqrt(num_features)
    )
    return coefficients, features, labels, mask, np.geomspace(0.01, 100, models).astype(np.float32)


@pytest.mark.parametrize(
    ("size", "num_features", "models"), [(1, 1, 1), (3, 5, 2), (130, 31, 49), (300, 7, 100), (1030, 150, 5)]
)
def test_equals_the_reference(size, num_features, models):
    coefficients, features, labels, mask, clip_norms = many(size, num_features, models)
    mask[0] = True
    weights, intercepts = coefficients[:, :-1], coefficients[:, -1]
    shorter = clip_norms / np.float32(RAISED)  # what is left of a clip norm when roundings have their share
    compiled, _ = clipped_logistic_gradient_sums(weights, intercepts, features, labels, mask, shorter)
    compiled = np.column_stack([np.float64(part) for part in compiled])
    close = {"rtol": 2e-5, "atol": 2e-4 * np.minimum(clip_norms, 1)[:, None].max()}
    stretches = np.sort(np.random.default_rng(0).integers(0, max(1, size // 20), size))
    for norms, of in itertools.product((squared_norms_of(features), None), (stretches, None)):
        sums = tiled(coefficients, features, labels, mask, clip_norms, norms, of)
        np.testing.assert_allclose(sums, compiled, **close)
        for model in range(0, models, 7):
            expected = reference(weights[model], intercepts[model], features, labels, mask, shorter[model])
            np.testing.assert_allclose(sums[model], expected, **close)


def test_a_residual_is_accurate():
    """The sigmoid's series, over all that float32 holds of a logit: 3e-7 off at most."""
    logits = np.concatenate([np.linspace(-100, 100, 20_001), [-1e30, 1e30, 0.0, 1e-30]]).astype(np.float32)
    coefficients = np.column_stack([np.zeros_like(logits), logits])  # the intercept is the logit
    nothing, zero, one = np.zeros((1, 1), np.float32), np.zeros(1, np.float32), np.ones(1, bool)
    sums = tiled(coefficients, nothing, zero, one, np.full(len(logits), 1e3, np.float32))
    exact = 1 / (1 + np.exp(-np.float64(logits).clip(-700, 700)))
    assert np.abs(sums[:, 1] - exact).max() < 3e-7
    middle = np.abs(logits) < 79
    np.testing.assert_allclose(sums[middle, 1], exact[middle], rtol=2e-6)


@settings(max_examples=300)
@given(
    st.lists(magnitudes, min_size=6, max_size=6),
    st.lists(st.sampled_from([-1.0, 1.0]), min_size=6, max_size=6),
    magnitudes,
    st.sampled_from([0.0, 1.0, -1e30, 1e30]),
)
def test_no_copy_adds_more(sizes, signs, weight, label):
    features = (np.array(sizes) * np.array(signs)).astype(np.float32)[None]
    clip_norms = np.float32([1e-38, 1e-30, 1e-21, 1e-6, 1.0, 123.456, 1e10, 1e38])
    row = np.append(np.float32(weight) * np.float32([1, -1, 1, 0, 0.5, 1]), np.float32(0.1))
    coefficients = np.tile(row, (len(clip_norms), 1))
    sums = tiled(coefficients, features, np.float32([label]), np.ones(1, bool), clip_norms, squared_norms_of(features))
    # Below float32's normal numbers, half a step of the smallest is what a sum is rounded to.
    # A copy leaves room for what its being there does to the roundings of others.
    allowed = np.float64(clip_norms) * (1 - 2.0**-11 + 2.0**-20) + 8 * 2.0**-150
    assert (np.linalg.norm(sums, axis=1) <= allowed).all()


def test_small_clip_norms_of_long_rows():
    """Products below float32's normal numbers are rounded by a fixed step each, which for many of them could add up."""
    generator = np.random.default_rng(0)
    clip_norms = np.geomspace(1e-38, 1e-30, 100).astype(np.float32)
    for scale in (1.0, 1e-3, 1e3):
        features = (generator.uniform(0.5, 4, (1, 20_000)) * scale / np.sqrt(20_000)).astype(np.float32)
        sums = tiled(np.zeros((100, 20_001), np.float32), features, np.ones(1), np.ones(1, bool), clip_norms)
        assert (np.linalg.norm(sums, axis=1) <= clip_norms).all()
        assert np.linalg.norm(sums[-1]) > 0.999 * clip_norms[-1]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["feature", "label", "weights"])
def test_not_finite_adds_zero(bad, where):
    coefficients, features, labels, mask, clip_norms = many(128, 6, 50)
    mask[17] = True
    others = mask & (np.arange(128) != 17)
    expected = tiled(coefficients, features, labels, others, clip_norms)
    if where == "feature":
        features[17, 3] = bad
    elif where == "label":
        labels[17] = bad
    else:
        coefficients[4, 2] = bad
    sums = tiled(coefficients, features, labels, mask, clip_norms, squared_norms_of(features))
    if where != "weights":
        assert sums.tolist() == expected.tolist()
        return
    before = tiled(many(128, 6, 50)[0], features, labels, mask, clip_norms)
    assert np.delete(sums, 4, axis=0).tolist() == np.delete(before, 4, axis=0).tolist()
    if np.isnan(bad):
        assert not sums[4].any()
    else:
        assert np.linalg.norm(sums[4]) <= mask.sum() * clip_norms[4]


@pytest.mark.parametrize("content", [0.0, 1.0, np.nan, np.inf, 3e38])
def test_padding_adds_zero(content):
    coefficients, features, labels, _, clip_norms = many(256, 6, 50)
    expected = tiled(coefficients, features[:62], labels[:62], np.ones(62, bool), clip_norms)
    features[62:], labels[62:] = content, content
    norms = squared_norms_of(features)
    sums = tiled(coefficients, features, labels, np.arange(256) < 62, clip_norms, norms)
    assert sums.tolist() == expected.tolist()


def test_an_empty_batch_is_zero():
    coefficients, features, labels, _, clip_norms = many(128, 6, 50)
    for size in (128, 0):
        assert not tiled(coefficients, features[:size], labels[:size], np.zeros(size, bool), clip_norms).any()


def test_huge_and_tiny_rows_are_clipped_not_lost():
    zeros, ones, real = np.zeros((1, 3), np.float32), np.ones(2, np.float32), np.ones(2, bool)
    features = np.float32([[3e30, 4e30], [0.3, 0.4]])
    small = np.append(features[1], 1.0) * -0.5
    sums = tiled(zeros, features, ones, real, ones[:1])
    np.testing.assert_allclose(sums[0], np.array([-0.6, -0.8, 0]) / RAISED + small, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("size", "num_features"), [(64, 3), (4160, 100)])
def test_a_bad_row_changes_no_other(size, num_features):
    features = np.tile(np.float32(3) * np.arange(1, num_features + 1, dtype=np.float32), (size, 1))
    features[:, -1] = 0
    zeros, clip_norms = np.zeros((3, num_features + 1), np.float32), np.float32([0.5, 1, 2])

    def total(features, mask):
        return tiled(zeros, features, np.zeros(size, np.float32), mask, clip_norms, squared_norms_of(features))

    left_out, everyone = total(features, np.arange(size) != 5), np.ones(size, bool)
    for bad in (np.nan, np.inf, -np.inf):
        changed = features.copy()
        changed[5, 1] = bad
        assert (total(changed, everyone) == left_out).all()
    changed = features.copy()
    changed[5], changed[5, -1] = 0, 1e30  # along an axis that no other has anything on
    difference = total(changed, everyone) - left_out
    assert not difference[:, :-2].any()
    np.testing.assert_allclose(np.abs(difference[:, -2]), clip_norms / RAISED, rtol=2e-6)


@pytest.mark.parametrize("num_features", [1, 2, 3, 16, 100])
def test_a_bad_row_changes_no_logit(num_features):
    coefficients, features = cancelling(1024, num_features, 30)
    labels, clip_norms = np.zeros(1024, np.float32), np.full(30, 1e3, np.float32)

    def total(rows, mask):
        return tiled(coefficients, rows, labels, mask, clip_norms).tolist()

    left_out = total(features, np.arange(1024) != 7)
    for bad in (np.nan, np.inf, -np.inf):
        changed = features.copy()
        changed[7, -1] = bad
        assert total(changed, np.ones(1024, bool)) == left_out


@pytest.mark.parametrize("num_features", [1, 7, 100])
def test_a_row_adds_the_same_in_every_place(num_features):
    generator = np.random.default_rng(4)
    # Logits of about 1: where a sigmoid is nearly 0 or 1, another order of additions would not be seen.
    coefficients = generator.standard_normal((50, num_features + 1)) / np.sqrt(num_features)
    coefficients, row = coefficients.astype(np.float32), generator.standard_normal(num_features).astype(np.float32)
    clip_norms = np.geomspace(0.1, 1e6, 50).astype(np.float32)

    def alone(size, place):
        features, mask = np.tile(row, (size, 1)), np.arange(size) == place
        return tiled(coefficients, features, np.zeros(size, np.float32), mask, clip_norms).tobytes()

    sizes = (1, 3, 8, 13, TILE, TILE + 1, 5 * TILE)
    assert len({alone(size, place) for size in sizes for place in range(0, size, 7)}) == 1


def test_a_model_alone_has_the_same_sum():
    coefficients, *given = many(700, 20, 130)
    *given, clip_norms = given
    whole = tiled(coefficients, *given, clip_norms)
    for some in (np.s_[:1], np.s_[47:49], np.s_[100:], np.s_[::-1]):
        assert np.array_equal(tiled(coefficients[some], *given, clip_norms[some]), whole[some])


def moved_up(of_a_stretch, size, stretches=True):
    """What a copy at the beginning of a stretch, and those behind it with it, move the sum by.

    Of 200 random tiles the one is repeated whose sum changes most when it is turned by a place.
    """

    def total(values, of):
        features = np.zeros((len(values), 3), np.float32)
        features[:, 0] = values
        nothing, ones = np.zeros((2, 4), np.float32), np.ones(2, np.float32)
        zeros, real = np.zeros(len(values), np.float32), np.ones(len(values), bool)
        return tiled(nothing, features, zeros, real, ones, None, of if stretches else None)[0, 0]

    blocks = np.random.default_rng(0).uniform(1.2, 1.7, (200, TILE)).astype(np.float32)
    everyone = np.zeros(TILE, np.int64)
    worst = max(blocks, key=lambda values: total(np.roll(values, 1), everyone) - total(values, everyone))
    drawn = np.append(np.float32(1e6), np.tile(worst, size // TILE))
    of = np.append(0, np.arange(size) // of_a_stretch)
    return total(drawn, of) - total(drawn[1:], of[1:])


@pytest.mark.parametrize("of_a_stretch", [32, TILE - 1, TILE, MOST_OF_A_STRETCH - 1])
@pytest.mark.parametrize("size", [1 << 12, 1 << 16])
def test_copies_that_move_up_change_nothing(of_a_stretch, size):
    """Her copy is drawn first or not at all: all others are a place further up, but of the stretch they are of."""
    assert 0.999 < moved_up(of_a_stretch, size) <= 1


def test_without_stretches_copies_that_move_up_change_much():
    """The comparison above can fail."""
    assert moved_up(32, 1 << 14, stretches=False) > 1 + 2e-4
    assert moved_up(32, 1 << 16, stretches=False) > 1 + 2e-3


def test_what_adds_nothing_changes_no_other():
    """A copy that is zero in its place, one that the mask leaves out, and one that is not there: all the same bits."""
    coefficients, features, labels, everyone, clip_norms = many(300, 7, 50)
    everyone[:], labels[95] = True, np.nan
    others, stretches = np.arange(300) != 95, np.arange(300) // 30
    whole = tiled(coefficients, features, labels, everyone, clip_norms, None, stretches)
    assert tiled(coefficients, features, labels, others, clip_norms, None, stretches).tolist() == whole.tolist()
    fewer = features[others], labels[others], everyone[others], clip_norms, None, stretches[others]
    assert tiled(coefficients, *fewer).tolist() == whole.tolist()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("coefficients", np.zeros((2, 8), np.float32)),
        ("coefficients", np.zeros(7, np.float32)),
        ("labels", np.zeros(3, np.float32)),
        ("mask", np.ones(9, bool)),
        ("clip_norms", np.float32([1, np.nan])),
        ("clip_norms", np.float32([1, 0])),
        ("clip_norms", np.ones(3, np.float32)),
        ("squared_norms", np.zeros(2, np.float32)),
        ("stretches", np.zeros(2, np.int64)),
        ("features", RowsInPlace(np.zeros((4, 6), np.float32), np.array([0, 1, 2, 4]))),
        ("features", RowsInPlace(np.zeros((4, 6), np.float32), np.array([0, -1, 2, 3]))),
        ("features", RowsInPlace(np.zeros((4, 6), np.float64), np.arange(4))),  # pyright: ignore[reportArgumentType]
        ("features", RowsInPlace(np.zeros((6, 4), np.float32).T, np.arange(4))),
    ],
)
def test_what_does_not_fit_is_refused(name, value):
    """The compiled loop would read what lies beside the arrays."""
    given = {
        "coefficients": np.zeros((2, 7), np.float32),
        "features": np.zeros((4, 6), np.float32),
        "labels": np.zeros(4, np.float32),
        "mask": np.ones(4, bool),
        "clip_norms": np.ones(2, np.float32),
    }
    tiled_clipped_logistic_sums(**given)
    with pytest.raises(InputError):
        tiled_clipped_logistic_sums(**(given | {name: value}))


def test_threads_and_places_change_nothing(monkeypatch):
    coefficients, features, labels, mask, clip_norms = many(3000, 40, 60)
    norms = squared_norms_of(features)
    order = np.random.default_rng(3).permutation(3000)
    scattered = np.empty_like(features)
    scattered[order] = features
    found = []
    for process, cores in enumerate((1, 2, 5)):
        monkeypatch.setattr(threads, "cores", lambda cores=cores: cores)
        number = os.getpid() + 10**8 + process  # so that it has threads of its own
        monkeypatch.setattr(os, "getpid", lambda number=number: number)
        for rows in (features, RowsInPlace(scattered, order)):
            found.append(tiled(coefficients, rows, labels, mask, clip_norms, norms))
    assert all(sums.tolist() == found[0].tolist() for sums in found)
