"""One pass on the host: the sums of Algorithm 1, and what one copy can do to them, roundings included."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.mechanism.test_clipping import batch, cancelling, joined, magnitudes, reference

from coowned import threads
from coowned.errors import InputError
from coowned.mechanism.clipping import clipped_logistic_gradient_sum, squared_norms_of
from coowned.mechanism.fused_clipping import RowsInPlace, fused_clipped_logistic_sum

MOST = 1.0  # clip norms that one copy moves a sum by, exactly


def exact(parts) -> np.ndarray:
    """(num_features + 1,) both halves of a sum, in float64."""
    return np.concatenate([np.atleast_1d(np.float64(part.total) + np.float64(part.rest)) for part in parts])


def fused(*given, **more) -> tuple[np.ndarray, int]:
    parts, clipped = fused_clipped_logistic_sum(*given, **more)
    return exact(parts), clipped


@pytest.mark.parametrize(("size", "num_features"), [(1, 1), (3, 5), (130, 31), (128, 2100), (4099, 100)])
@pytest.mark.parametrize("clip_norm", [0.1, 1e6])
def test_equals_the_reference(size, num_features, clip_norm):
    weights, intercept, features, labels, mask = batch(size, num_features)
    mask[0] = True
    expected = reference(weights, intercept, features, labels, mask, clip_norm)
    compiled, compiled_clipped = clipped_logistic_gradient_sum(
        weights, intercept, features, labels, mask, np.float32(clip_norm)
    )
    for norms in (squared_norms_of(features), None):
        gradient, clipped = fused(weights, intercept, features, labels, mask, clip_norm, norms)
        np.testing.assert_allclose(gradient, expected, rtol=2e-5, atol=1e-4 * min(clip_norm, 1))
        np.testing.assert_allclose(gradient, joined(compiled), rtol=2e-5, atol=2e-4 * min(clip_norm, 1))
        assert clipped == int(compiled_clipped)
        assert (clipped == 0) == (clip_norm == 1e6)


@settings(max_examples=300)
@given(
    st.lists(magnitudes, min_size=6, max_size=6),
    st.lists(st.sampled_from([-1.0, 1.0]), min_size=6, max_size=6),
    magnitudes,
    st.sampled_from([0.0, 1.0, -1e30, 1e30]),
    st.sampled_from([1e-38, 1e-30, 1e-6, 1.0, 123.456, 1e10, 1e38]),
)
def test_no_copy_adds_more(sizes, signs, weight, label, clip_norm):
    features = (np.array(sizes) * np.array(signs)).astype(np.float32)[None]
    weights = np.float32(weight) * np.float32([1, -1, 1, 0, 0.5, 1])
    gradient, _ = fused(
        weights, 0.1, features, np.float32([label]), np.ones(1, bool), clip_norm, squared_norms_of(features)
    )
    # Below float32's normal numbers, half a step of the smallest is what a sum is rounded to.
    # A copy leaves room for what its being there does to the roundings of others.
    assert np.linalg.norm(gradient) <= float(np.float32(clip_norm)) * (1 - 2.0**-21) + 3 * 2.0**-150


@pytest.mark.parametrize("num_features", [2048, 2049, 20_011])
def test_long_rows_are_clipped_tightly(num_features):
    for value in (0.3333333, 1.0000001, 0.7071068):
        features = np.full((1, num_features), value, np.float32)
        weights, ones = np.zeros(num_features, np.float32), np.ones(1, np.float32)
        gradient, _ = fused(weights, 0.0, features, ones, np.ones(1, bool), 1.0, squared_norms_of(features))
        assert 1 - 2e-6 < np.linalg.norm(gradient) <= 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["feature", "label", "weights"])
def test_not_finite_adds_zero(bad, where):
    weights, intercept, features, labels, mask = batch(128, 6)
    mask[17] = True
    others = mask & (np.arange(128) != 17)
    expected, _ = fused(weights, intercept, features, labels, others, 1.0)
    if where == "feature":
        features[17, 3] = bad
    elif where == "label":
        labels[17] = bad
    else:
        weights[2] = bad
    gradient, _ = fused(weights, intercept, features, labels, mask, 1.0, squared_norms_of(features))
    if where != "weights":
        assert gradient.tolist() == expected.tolist()
    elif np.isnan(bad):
        assert not gradient.any()
    else:
        assert np.linalg.norm(gradient) <= mask.sum()


@pytest.mark.parametrize("content", [0.0, 1.0, np.nan, np.inf, 3e38])
def test_padding_adds_zero(content):
    weights, intercept, features, labels, _ = batch(128, 6)
    expected, clipped = fused(weights, intercept, features[:62], labels[:62], np.ones(62, bool), 0.5)
    features[62:], labels[62:] = content, content
    norms = squared_norms_of(features)
    gradient, also_clipped = fused(weights, intercept, features, labels, np.arange(128) < 62, 0.5, norms)
    assert gradient.tolist() == expected.tolist()
    assert clipped == also_clipped


def test_an_empty_batch_is_zero():
    weights, intercept, features, labels, _ = batch(128, 6)
    for size in (128, 0):
        nobody = np.zeros(size, bool)
        gradient, clipped = fused(weights, intercept, features[:size], labels[:size], nobody, 0.5)
        assert gradient.tolist() == [0.0] * 7
        assert clipped == 0


def test_huge_and_tiny_rows_are_clipped_not_lost():
    features = np.float32([[3e30, 4e30], [0.3, 0.4]])
    gradient, clipped = fused(np.zeros(2, np.float32), 0.0, features, np.ones(2, np.float32), np.ones(2, bool), 1.0)
    small = np.append(features[1], 1.0) * -0.5
    np.testing.assert_allclose(gradient, np.array([-0.6, -0.8, 0]) + small, rtol=1e-5, atol=1e-6)
    assert clipped == 1
    # A factor of 1e-45 as a float32 is one of 1.4e-45: 40% too much.
    features = np.float32([[1e15, 0.0]])
    gradient, clipped = fused(np.zeros(2, np.float32), 0.0, features, np.ones(1, np.float32), np.ones(1, bool), 1e-30)
    np.testing.assert_allclose(gradient, [-1e-30, 0, 0], rtol=2e-6, atol=1e-40)
    assert clipped == 1


def total(features, mask, norms=None):
    """The sum of gradients at weights and labels of zero, clip norm 1."""
    size, num_features = features.shape
    zeros = np.zeros(size, np.float32)
    norms = squared_norms_of(features) if norms is None else norms
    return fused(np.zeros(num_features, np.float32), 0.0, features, zeros, mask, 1.0, norms)[0]


@pytest.mark.parametrize(("size", "num_features"), [(64, 3), (4096, 16), (4160, 100), (512, 1000)])
def test_a_bad_row_changes_no_other(size, num_features):
    features = np.tile(np.float32(3) * np.arange(1, num_features + 1, dtype=np.float32), (size, 1))
    features[:, -1] = 0
    without = np.arange(size) != 5
    left_out = total(features, without)
    for bad in (np.nan, np.inf, -np.inf):
        changed = features.copy()
        changed[5, 1] = bad
        assert (total(changed, np.ones(size, bool)) == left_out).all()
    changed = features.copy()
    changed[5], changed[5, -1] = 0, 1e30  # along an axis that no other has anything on
    difference = total(changed, np.ones(size, bool)) - left_out
    assert np.abs(difference[:-2]).max() == 0
    assert abs(abs(difference[-2]) - 1) < 2e-6


@pytest.mark.parametrize("num_features", [1, 2, 3, 16, 100])
def test_a_bad_row_changes_no_logit(num_features):
    (own,), features = cancelling(1024, num_features, 1)

    def whole(rows, mask):
        return fused(own[:-1], own[-1], rows, np.zeros(1024, np.float32), mask, 1e3)[0].tolist()

    left_out = whole(features, np.arange(1024) != 7)
    for bad in (np.nan, np.inf, -np.inf):
        changed = features.copy()
        changed[7, -1] = bad
        assert whole(changed, np.ones(1024, bool)) == left_out


@pytest.mark.parametrize(("size", "num_features"), [(4096, 3), (4096, 100), (1 << 16, 3), (1 << 16, 30)])
@pytest.mark.parametrize("others", ["equal", "random"])
def test_one_copy_of_many_moves_the_sum_by_itself(size, num_features, others):
    """Less, or another in its place: never more than one clip norm, or two."""
    generator = np.random.default_rng(0)
    features = 3 * generator.standard_normal((size, num_features)).astype(np.float32)
    if others == "equal":
        features[:] = features[0]
    everyone, norms = np.ones(size, bool), squared_norms_of(features)
    whole = total(features, everyone, norms)
    for place in (0, 1, 7, size // 2, size - 1):
        moved = np.linalg.norm(whole - total(features, np.arange(size) != place, norms))
        assert 0.99 < moved <= MOST
        other = features[place].copy()
        features[place] = 3 * generator.standard_normal(num_features)
        norms[place] = squared_norms_of(features[place : place + 1])[0]
        moved = np.linalg.norm(whole - total(features, everyone, norms))
        assert moved <= 2 * MOST
        features[place] = other
        norms[place] = squared_norms_of(features[place : place + 1])[0]


@pytest.mark.parametrize("kind", ["chosen", "random"])
@pytest.mark.parametrize(("size", "num_features"), [(1 << 19, 1), (1 << 16, 3), (1 << 14, 64)])
def test_copies_that_move_up_change_nothing(size, num_features, kind):
    """Her copy is drawn first or not at all: all others are a place further up, and grouped otherwise.

    The chosen gradients, 0.84375 + m 2^-24 for m = 0, 0, 2, 3 again and again, are the worst known for sums of four.
    """
    generator = np.random.default_rng(1)
    features = np.zeros((size + 1, num_features), np.float32)
    grid = 0.84375 + np.array([0, 0, 2, 3]) * 2.0**-24
    features[1:, 0] = 2 * np.tile(grid, size // 4) if kind == "chosen" else generator.uniform(1.2, 1.7, size)
    features[0, 0] = 1e6
    rows = np.arange(size + 1)
    with_her = total(features, np.ones(size + 1, bool))
    without = total(features[rows[1:]], np.ones(size, bool))
    moved = np.linalg.norm(with_her - without)
    assert 0.999 < moved <= MOST
    if kind == "chosen":  # the comparison can fail: by fours in float32 the sum moves by far more
        gradients = (features[:, 0] / 2).clip(max=1)

        def by_fours(values):
            fours = np.pad(values, (0, -len(values) % 4)).reshape(-1, 4)
            return np.float64((fours[:, 0] + fours[:, 1]) + (fours[:, 2] + fours[:, 3])).sum()

        assert by_fours(gradients) - by_fours(gradients[1:]) > 1 + 5e-4


@pytest.mark.parametrize("num_features", [1, 7, 100, 300])
def test_a_row_adds_the_same_in_every_place(num_features):
    """Also the logit, of about 1, whose additions are in an order of the compiler's: it must be one for all."""
    generator = np.random.default_rng(4)
    weights = generator.standard_normal(num_features).astype(np.float32) / np.float32(np.sqrt(num_features))
    row = generator.standard_normal(num_features).astype(np.float32)

    def alone(size, place):
        features, mask = np.tile(row, (size, 1)), np.arange(size) == place
        zeros = np.zeros(size, np.float32)
        (slope, intercept), _ = fused_clipped_logistic_sum(weights, 0.3, features, zeros, mask, 1e6)
        return b"".join(np.asarray(part).tobytes() for part in (*slope, *intercept))

    assert len({alone(size, place) for size in (1, 3, 8, 13, 4096) for place in range(min(size, 13))}) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weights", np.zeros(7, np.float32)),
        ("labels", np.zeros(3, np.float32)),
        ("mask", np.ones(9, bool)),
        ("clip_norm", np.nan),
        ("clip_norm", 0.0),
        ("squared_norms", np.zeros(2, np.float32)),
        ("features", RowsInPlace(np.zeros((4, 6), np.float32), np.array([0, 1, 2, 4]))),
        ("features", RowsInPlace(np.zeros((4, 6), np.float32), np.array([0, -1, 2, 3]))),
        ("features", RowsInPlace(np.zeros((4, 6), np.float64), np.arange(4))),  # pyright: ignore[reportArgumentType]
        ("features", RowsInPlace(np.zeros((6, 4), np.float32).T, np.arange(4))),
        ("features", RowsInPlace(np.zeros((4, 12), np.float32)[:, ::2], np.arange(4))),
        ("features", RowsInPlace(np.zeros((4, 6), np.float32)[:, ::-1], np.arange(4))),
    ],
)
def test_what_does_not_fit_is_refused(name, value):
    """The compiled loop would read what lies beside the arrays."""
    given = {
        "weights": np.zeros(6, np.float32),
        "intercept": 0.0,
        "features": np.zeros((4, 6), np.float32),
        "labels": np.zeros(4, np.float32),
        "mask": np.ones(4, bool),
        "clip_norm": 1.0,
    }
    fused_clipped_logistic_sum(**given)
    with pytest.raises(InputError):
        fused_clipped_logistic_sum(**(given | {name: value}))


def test_threads_and_places_change_nothing(monkeypatch):
    weights, intercept, features, labels, mask = batch(5000, 150)
    norms = squared_norms_of(features)
    order = np.random.default_rng(3).permutation(5000)
    scattered = np.empty_like(features)
    scattered[order] = features
    found = []
    for cores in (1, 2, 5):
        monkeypatch.setattr(threads, "cores", lambda cores=cores: cores)
        for rows in (features, RowsInPlace(scattered, order), jnp.asarray(features)):
            found.append(fused(weights, intercept, rows, labels, mask, 0.7, norms))
    assert all(gradient.tolist() == found[0][0].tolist() and n == found[0][1] for gradient, n in found)
    assert RowsInPlace(scattered, order).gathered().tolist() == features.tolist()
