"""Clipping: no copy adds more than clip_norm, and none can touch the sum otherwise."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from coowned.mechanism.clipping import (
    _wide_block,
    clipped_gradient_sum,
    clipped_logistic_gradient_sum,
    clipped_logistic_gradient_sums,
    replace_rows,
    squared_norms_of,
)
from coowned.mechanism.noise import ROUNDING_FACTOR, most_copies, regrouping_factor

OVERSHOOT = 1 + 1e-6


def full(*values):
    """A case that is compiled anew and differs little from others: for the full suite."""
    return pytest.param(*values, marks=pytest.mark.full)


def reference(weights, intercept, features, labels, mask, clip_norm):
    """Each copy's gradient in float64, clipped, added: Algorithm 1 as it is written."""
    total = np.zeros(len(weights) + 1)
    for x, y, real in zip(np.float64(features), np.float64(labels), mask, strict=True):
        residual = 1 / (1 + np.exp(-(x @ np.float64(weights) + float(intercept)))) - y
        gradient = residual * np.append(x, 1.0)
        if real and np.isfinite(gradient).all():
            total += gradient * min(1.0, clip_norm / max(np.linalg.norm(gradient), 1e-300))
    return total


def joined(gradient) -> np.ndarray:
    return np.append(np.float64(gradient[0]), np.float64(gradient[1]))


def batch(size, num_features, seed=0):
    generator = np.random.default_rng(seed)
    features = (generator.standard_normal((size, num_features)) * generator.exponential(1, (size, 1))).astype(
        np.float32
    )
    labels = (generator.random(size) < 0.5).astype(np.float32)
    weights = generator.standard_normal(num_features).astype(np.float32) / np.float32(np.sqrt(num_features))
    return weights, np.float32(0.3), features, labels, generator.random(size) < 0.8


@pytest.mark.parametrize(("size", "num_features"), [(1, 1), (130, 31), (128, 2100)])
@pytest.mark.parametrize("clip_norm", [0.1, 1e6])
def test_equals_the_reference(size, num_features, clip_norm):
    weights, intercept, features, labels, mask = batch(size, num_features)
    mask[0] = True
    gradient, clipped = clipped_logistic_gradient_sum(weights, intercept, features, labels, mask, clip_norm)
    expected = reference(weights, intercept, features, labels, mask, clip_norm)
    np.testing.assert_allclose(joined(gradient), expected, rtol=2e-5, atol=1e-4 * min(clip_norm, 1))
    assert 0 <= int(clipped) <= mask.sum()
    assert (int(clipped) == 0) == (clip_norm == 1e6)


def test_the_intercept_counts_in_the_norm():
    gradient, _ = clipped_logistic_gradient_sum(
        jnp.zeros(1), jnp.zeros(()), jnp.array([[0.1]]), jnp.ones(1), jnp.ones(1, bool), 0.01
    )
    assert 0.0099 < np.linalg.norm(joined(gradient)) <= 0.01 * OVERSHOOT


magnitudes = st.sampled_from([0.0, 1e-45, 1e-38, 1e-30, 1e-10, 1.0, 0.3333333, 1e10, 1e19, 2e19, 1e25, 1e30, 3.4e38])


@settings(max_examples=150)
@given(
    st.lists(magnitudes, min_size=6, max_size=6),
    st.lists(st.sampled_from([-1.0, 1.0]), min_size=6, max_size=6),
    magnitudes,
    st.sampled_from([0.0, 1.0, -1e30, 1e30]),
    st.sampled_from([1e-30, 1e-6, 1.0, 123.456, 1e10]),
)
def test_no_copy_adds_more(sizes, signs, weight, label, clip_norm):
    features = (np.array(sizes) * np.array(signs)).astype(np.float32)[None]
    weights = np.float32(weight) * np.float32([1, -1, 1, 0, 0.5, 1])
    for norms in (None, squared_norms_of(features)):
        gradient, _ = clipped_logistic_gradient_sum(
            weights, np.float32(0.1), features, np.float32([label]), np.ones(1, bool), np.float32(clip_norm), norms
        )
        assert np.linalg.norm(joined(gradient)) <= float(np.float32(clip_norm)) * OVERSHOOT


def test_given_norms_change_nothing_else():
    weights, intercept, features, labels, mask = batch(128, 6)
    for broken in (False, True):
        if broken:
            features[3], features[4, 2], features[5], mask[3:6] = 1e30, np.nan, -np.inf, True
        norms = squared_norms_of(features)
        given_, clipped = clipped_logistic_gradient_sum(weights, intercept, features, labels, mask, 0.5, norms)
        own, own_clipped = clipped_logistic_gradient_sum(weights, intercept, features, labels, mask, 0.5)
        np.testing.assert_allclose(joined(given_), joined(own), rtol=1e-5, atol=1e-5)
        assert int(clipped) == int(own_clipped)


def test_norms_of_other_rows_would_void_the_bound():
    """Why the norms must be those of the rows: shorter ones let a gradient through."""
    features = np.float32([[30.0, 40.0]])
    inputs = np.zeros(2, np.float32), np.float32(0), features, np.ones(1, np.float32), np.ones(1, bool), 1.0
    gradient, _ = clipped_logistic_gradient_sum(*inputs, squared_norms_of(features / 100))
    assert np.linalg.norm(joined(gradient)) > 20
    gradient, _ = clipped_logistic_gradient_sum(*inputs, squared_norms_of(features))
    assert np.linalg.norm(joined(gradient)) <= OVERSHOOT


@given(st.lists(magnitudes, min_size=1, max_size=8))
def test_norms_are_rounded_up(values):
    row = np.array([values], np.float32)
    (square,) = squared_norms_of(row)
    exact = sum(Fraction(float(value)) ** 2 for value in row[0])
    assert np.isinf(square) or exact <= Fraction(float(square)) <= exact * (1 + Fraction(1, 2**21)) + Fraction(
        1, 2**148
    )


@pytest.mark.parametrize("num_features", [2048, 2049, 20_011, 100_000])
def test_long_rows_do_not_add_more(num_features):
    """Equal entries make every rounding of a sum go the same way."""
    for value in (0.3333333, 1.0000001, 0.7071068):
        features = np.full((2, num_features), value, np.float32)
        gradient, _ = clipped_logistic_gradient_sum(
            np.zeros(num_features, np.float32),
            np.float32(0),
            features,
            np.ones(2, np.float32),
            np.array([True, False]),
            1.0,
        )
        assert 1 - 6e-3 < np.linalg.norm(joined(gradient)) <= OVERSHOOT


def test_huge_rows_are_clipped_not_lost():
    features = np.float32([[3e30, 4e30], [0.3, 0.4]])
    gradient, clipped = clipped_logistic_gradient_sum(
        np.zeros(2, np.float32), np.float32(0), features, np.ones(2, np.float32), np.ones(2, bool), 1.0
    )
    small = np.append(features[1], 1.0) * -0.5
    np.testing.assert_allclose(joined(gradient), np.array([-0.6, -0.8, 0]) + small, rtol=1e-5, atol=1e-6)
    assert int(clipped) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["feature", "label", "weights"])
def test_not_finite_adds_zero(bad, where):
    weights, intercept, features, labels, mask = batch(128, 6)
    mask[17] = True
    others = mask.copy()
    others[17] = False
    expected, _ = clipped_logistic_gradient_sum(weights, intercept, features, labels, others, 1.0)
    if where == "feature":
        features[17, 3] = bad
    elif where == "label":
        labels[17] = bad
    else:
        features[17] = [3e38, -3e38, 3e38, 0, 0, 0]
        weights, expected = np.float32([bad, 1, 1, 1, 1, 1]), (np.zeros(6), 0.0)
    gradient, _ = clipped_logistic_gradient_sum(weights, intercept, features, labels, mask, 1.0)
    if where == "weights" and not np.isnan(bad):
        assert np.isfinite(joined(gradient)).all()
    else:
        np.testing.assert_allclose(joined(gradient), joined(expected), atol=1e-5)


# Wide rows and large batches are compiled to other code than narrow ones: there the maximum of a row of numbers and
# not-numbers is a number, and a test of that maximum alone let the row through.
@pytest.mark.parametrize(("size", "width"), [(8, 1), (64, 64), (72, 16), (256, 1000)])
def test_not_finite_adds_zero_in_every_shape(size, width):
    weights, intercept, features, labels, mask = batch(size, width)
    mask[3:6] = True
    others = mask.copy()
    others[3:6] = False
    expected, _ = clipped_logistic_gradient_sum(weights, intercept, features, labels, others, 1.0)
    features[3], features[4, width // 2], features[5, -1] = np.nan, np.nan, np.inf
    gradient, _ = clipped_logistic_gradient_sum(weights, intercept, features, labels, mask, 1.0)
    np.testing.assert_allclose(joined(gradient), joined(expected), atol=1e-4)
    several, _ = clipped_logistic_gradient_sums(
        np.stack([weights] * 3), np.stack([intercept] * 3), features, labels, mask, np.ones(3, np.float32)
    )
    assert np.isfinite(several[0]).all()
    generic, _ = compiled_sum(product_loss, weights, features, mask, 1.0)
    alone, _ = compiled_sum(product_loss, weights, features, others, 1.0)
    np.testing.assert_allclose(generic, alone, atol=1e-4)


def test_weight_zero_alone_would_not_help():
    """The bug that the replacement is for: zero times infinity in a weighted product."""
    features = jnp.array([[1.0], [jnp.inf]])
    assert np.isnan(np.asarray(jnp.array([1.0, 0.0]) @ features)).all()
    gradient, _ = clipped_logistic_gradient_sum(
        jnp.zeros(1), jnp.zeros(()), features, jnp.ones(2), jnp.array([True, True]), 10.0
    )
    assert joined(gradient).tolist() == [-0.5, -0.5]


@pytest.mark.parametrize("content", [0.0, 1.0, np.nan, np.inf, 3e38])
def test_padding_adds_zero(content):
    weights, intercept, features, labels, _ = batch(128, 6)
    mask = np.arange(128) < 64
    expected, clipped = clipped_logistic_gradient_sum(
        weights, intercept, features[:64], labels[:64], np.ones(64, bool), 0.5
    )
    features[64:], labels[64:] = content, content
    gradient, also_clipped = clipped_logistic_gradient_sum(weights, intercept, features, labels, mask, 0.5)
    np.testing.assert_allclose(joined(gradient), joined(expected), rtol=1e-5, atol=1e-6)
    assert int(clipped) == int(also_clipped)


def test_an_empty_batch_is_zero():
    weights, intercept, features, labels, _ = batch(128, 6)
    gradient, clipped = clipped_logistic_gradient_sum(weights, intercept, features, labels, np.zeros(128, bool), 0.5)
    assert joined(gradient).tolist() == [0.0] * 7
    assert int(clipped) == 0


def test_order_does_not_matter():
    size = 4096
    weights, intercept, features, labels, mask = batch(size, 20)
    order = np.random.default_rng(1).permutation(size)
    first, _ = clipped_logistic_gradient_sum(weights, intercept, features, labels, mask, 1.0)
    second, _ = clipped_logistic_gradient_sum(weights, intercept, features[order], labels[order], mask[order], 1.0)
    # Rounding: at most (8 + 7) 2^-24 of the sum of norms, which is at most the batch.
    assert np.abs(joined(first) - joined(second)).max() <= 2 * 15 * 2.0**-24 * size


def test_sum_is_accurate_where_a_running_sum_is_not():
    """2^16 equal terms of 1: a float32 sum in a row drifts; blocks and halves do not."""
    size = 1 << 16
    features = np.full((size, 1), 0.1, np.float32)
    gradient, _ = clipped_logistic_gradient_sum(
        np.zeros(1, np.float32), np.float32(0), features, np.ones(size, np.float32), np.ones(size, bool), 100.0
    )
    exact = -0.5 * float(np.float32(0.1)) * size
    assert abs(float(gradient[0][0]) / exact - 1) < 43 * 2.0**-24


@pytest.mark.parametrize("kind", ["random", "equal"])
def test_rounding_of_the_sum(kind):
    """Against the float64 sum of what each copy adds, in units of clip_norm = 1.

    Weights of zero and given norms make what a copy adds the same number alone and in the batch.
    """
    size, num_features = 4096, 100
    generator = np.random.default_rng(0)
    features = 100 * generator.standard_normal((size, num_features)).astype(np.float32)
    labels = (generator.random(size) < 0.5).astype(np.float32)
    if kind == "equal":
        features[:], labels[:] = features[0], 0
    mask, norms = np.ones(size, bool), squared_norms_of(features)
    weights, intercept = np.zeros(num_features, np.float32), np.float32(0)

    def alone(x, y, norm):
        return clipped_logistic_gradient_sum(weights, intercept, x[None], y[None], mask[:1], 1.0, norm[None])[0]

    slopes, intercepts = jax.vmap(alone)(features, labels, norms)
    each = np.column_stack([np.float64(slopes), np.float64(intercepts)])  # (size, num_features + 1)
    lengths = np.linalg.norm(each, axis=1)
    assert (lengths <= OVERSHOOT).all()
    assert lengths.min() > 0.999  # all are clipped
    one, _ = clipped_logistic_gradient_sum(weights, intercept, features, labels, mask, 1.0, norms)
    many, _ = clipped_logistic_gradient_sums(
        np.stack([weights] * 8), np.zeros(8, np.float32), features, labels, mask, np.ones(8, np.float32), norms
    )
    found = {8: joined(one), 64: joined((many[0][5], many[1][5]))}  # by rows of a block
    for block, total in found.items():
        error = np.linalg.norm(total - each.sum(axis=0))
        assert error <= (block + 1) * 2.0**-24 * lengths.sum()
        assert error < {"random": {8: 1e-5, 64: 1e-5}, "equal": {8: 5e-4, 64: 4e-3}}[kind][block]
    if kind == "equal":  # the comparison can fail: a sum in a row is worse than either
        running = np.add.accumulate(np.float32(each), axis=0)[-1]
        assert np.linalg.norm(running - each.sum(axis=0)) > 2e-2


def moved(features, changed, *, models, norms, mask=None):
    """By how much the sum moves, in clip norms, if the features become others; weights of zero, labels of zero."""
    size, num_features = features.shape
    summed = clipped_logistic_gradient_sum if models == 1 else clipped_logistic_gradient_sums
    leading = () if models == 1 else (models,)

    def total(rows, mask):
        parts, _ = summed(
            np.zeros((*leading, num_features), np.float32),
            np.zeros(leading, np.float32),
            rows,
            np.zeros(size, np.float32),
            mask,
            np.ones(leading, np.float32),
            squared_norms_of(rows) if norms else None,
            compensated=True,
        )
        slope, intercept = (np.float64(part.total) + np.float64(part.rest) for part in parts)
        return np.concatenate([slope, intercept[..., None]], axis=-1)

    everyone = np.ones(size, bool)
    return total(features, everyone) - total(changed, everyone if mask is None else mask)


@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("models", [1, 8])
@pytest.mark.parametrize(("size", "num_features"), [(64, 3), full(4096, 16), (4160, 100), full(512, 1000)])
def test_a_bad_row_changes_no_other(size, num_features, models, norms):
    """All others have equal gradients, so that a change of each by 1e-7 would add up to be seen."""
    features = np.tile(np.float32(3) * np.arange(1, num_features + 1, dtype=np.float32), (size, 1))
    features[:, -1] = 0
    without = np.arange(size) != 5
    for bad in (np.nan, np.inf, -np.inf):
        changed = features.copy()
        changed[5, 1] = bad
        left_out = moved(features, features, models=models, norms=norms, mask=without)
        assert (moved(features, changed, models=models, norms=norms) == left_out).all()
    changed = features.copy()
    changed[5], changed[5, -1] = 0, 1e30  # along an axis that no other has anything on
    difference = moved(changed, features, models=models, norms=norms, mask=without)
    assert np.abs(difference[..., :-2]).max() == 0
    assert np.abs(np.abs(difference[..., -2]) - 1).max() < 1e-4


def cancelling(size, num_features, models):
    """Coefficients (models, num_features + 1) and equal rows, whose logits are small sums of large numbers.

    Any other order of operations gives other logits, and no gradient is clipped that would hide it.
    """
    generator = np.random.default_rng(num_features)
    row = generator.uniform(0.5, 2, num_features).astype(np.float32)
    weights = generator.uniform(5e3, 6e4, (models, num_features)).astype(np.float32)
    intercepts = generator.uniform(-1.5, 1.5, models) - weights.astype(np.float64) @ row.astype(np.float64)
    return np.column_stack([weights, intercepts.astype(np.float32)]), np.tile(row, (size, 1))


@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("models", [0, 2, full(8)])
@pytest.mark.parametrize("num_features", [1, full(2), full(3), full(8), 100])
def test_a_bad_row_changes_no_logit(num_features, models, norms):
    """Among many rows of one feature, one that was infinite once moved the sum of the others by 147 clip norms."""
    size = 1024
    coefficients, features = cancelling(size, num_features, models or 1)
    summed = clipped_logistic_gradient_sums if models else clipped_logistic_gradient_sum
    own = coefficients if models else coefficients[0]
    clip_norms = np.full(models, 1e3, np.float32) if models else np.float32(1e3)

    def total(rows, mask):
        given = own[..., :-1], own[..., -1], rows, np.zeros(size, np.float32), mask, clip_norms
        parts, _ = summed(*given, squared_norms_of(rows) if norms else None, compensated=True)
        return b"".join(np.asarray(half).tobytes() for part in parts for half in part)

    left_out = total(features, np.arange(size) != 7)
    for bad in (np.nan, np.inf, -np.inf):
        changed = features.copy()
        changed[7, -1] = bad
        assert total(changed, np.ones(size, bool)) == left_out


@pytest.mark.parametrize("models", [1, 8])
@pytest.mark.parametrize(("size", "num_features"), [(4096, 3), full(4096, 100), full(1 << 16, 3), (1 << 16, 30)])
def test_one_copy_of_many_moves_the_sum_by_itself(size, num_features, models):
    """Equal gradients: where a float32 sum as such would move by up to 1.004 clip norms."""
    row = 3 * np.random.default_rng(0).standard_normal(num_features).astype(np.float32)
    features = np.tile(row, (size, 1))
    for place in (0, 7, size // 2, size - 1):
        gone = np.arange(size) != place
        difference = moved(features, features, models=models, norms=True, mask=gone)
        assert (np.linalg.norm(np.atleast_2d(difference), axis=1) <= ROUNDING_FACTOR).all()


@pytest.mark.parametrize(("models", "block"), [(1, 8), (8, 64)])
def test_regrouped_blocks_are_covered(models, block):
    """A copy that is not drawn leaves its place to the next, and every block behind it is another one.

    Of 200 random blocks the one is repeated whose sum changes most when it is turned by a place: worse than what the
    factor 1 + 1e-5 is for, and a fifth at most of what the factor for regrouping adds.
    """
    summed = clipped_logistic_gradient_sum if models == 1 else clipped_logistic_gradient_sums
    leading = () if models == 1 else (models,)

    def total(values):
        size = -(-len(values) // block) * block
        features = np.zeros((size, 3), np.float32)
        features[: len(values), 0] = values
        zeros, mask = np.zeros(size, np.float32), np.arange(size) < len(values)
        given = np.zeros((*leading, 3), np.float32), np.zeros(leading, np.float32), features, zeros, mask
        (slope, _), _ = summed(*given, np.ones(leading, np.float32), squared_norms_of(features), compensated=True)
        return np.ravel(np.float64(slope.total) + np.float64(slope.rest))[0]

    generator = np.random.default_rng(0)
    blocks = generator.uniform(1.2, 1.7, (200, block)).astype(np.float32)
    worst = max(blocks, key=lambda values: total(np.roll(values, 1)) - total(values))
    size = 1 << 14
    drawn = np.append(np.float32(1e6), np.tile(worst, size // block))
    moved = total(drawn) - total(drawn[1:])
    factor = regrouping_factor(expected_copies=size, rows_together=block)
    assert ROUNDING_FACTOR < moved <= 1 + (factor - 1) / 5


@pytest.mark.parametrize("block", [8, 64])
@pytest.mark.parametrize("order", ["in a row", "pairs", "random"])
def test_any_order_of_additions_is_covered(block, order):
    """Products and sums of float32 in any order, against exact ones: half of the factor is for each of two sums."""
    generator = np.random.default_rng(3)
    for _ in range(20):
        rows, factors = (generator.standard_normal((block, 5)) ** 3).astype(np.float32), np.float32(1 / 3)
        terms, exact = list(rows * factors), (rows.astype(np.float64) * np.float64(factors)).sum(axis=0)
        while len(terms) > 1:
            one, two = (0, 0) if order != "random" else generator.integers(99, size=2)
            added = terms.pop(one % len(terms)) + terms.pop(two % len(terms))
            terms.insert(len(terms) if order == "pairs" else 0, added)
        longest = np.linalg.norm(rows.astype(np.float64), axis=1).max() / 3  # a clip norm that all could have
        off = np.linalg.norm(terms[0] - exact) / (block * longest)  # a copy
        factor = regrouping_factor(expected_copies=4096, rows_together=block)
        assert 0 < off <= (factor - 1) / 2 / most_copies(4096)


def test_so_many_copies_are_not_drawn():
    for batch_size in (1, 5, 64, 1024, 4096, 65536, 10**7):
        most = most_copies(batch_size)
        assert stats.poisson.logsf(most, batch_size) < np.log(1e-20)  # coins of less than certain ones spread less
        assert most < batch_size + 10 * np.sqrt(batch_size) + 62


@pytest.mark.parametrize(
    ("models", "num_features"),
    [(0, 100), (40, 30)]
    + [pytest.param(m, d, marks=pytest.mark.full) for m in (0, 3, 40) for d in (1, 3, 8, 30, 100, 257)],
)
def test_a_row_is_clipped_alike_in_every_place(models, num_features):
    """What XLA makes of the batch gives a row the same bits wherever it is and however many others there are."""
    generator = np.random.default_rng(0)
    leading = (models,) if models else ()
    # Logits of about 1: where a sigmoid is nearly 0 or 1, another order of additions would not be seen.
    weights = generator.standard_normal((*leading, num_features)).astype(np.float32) / np.float32(np.sqrt(num_features))
    intercepts = generator.standard_normal(leading).astype(np.float32)
    row = generator.standard_normal(num_features).astype(np.float32)
    summed = clipped_logistic_gradient_sums if models else clipped_logistic_gradient_sum

    def alone(size, place):
        features, mask = np.tile(row, (size, 1)), np.arange(size) == place
        given = weights, intercepts, features, np.zeros(size, np.float32), mask
        clip_norms = np.full(leading, 1e6, np.float32)
        sums, _ = summed(*given, clip_norms, squared_norms_of(features), compensated=True)
        return b"".join(np.asarray(part).tobytes() for total in sums for part in total)

    sizes = [128, 256, 4224]
    places = [(size, place) for size in sizes for place in (0, 1, 2, 3, 5, 15, 63, 64, 100, size // 2 + 1, size - 1)]
    assert len({alone(size, place) for size, place in [*places, *((128, place) for place in range(128))]}) == 1


@pytest.mark.parametrize(("length", "block"), [(4096, 64), (4160, 64), (4200, 60), (300, 60), (50, 50), (1021, 64)])
def test_wide_blocks_come_out_even(length, block):
    assert _wide_block(length) == block


def test_many_models_equal_each_alone():
    weights, intercept, features, labels, mask = batch(300, 12)
    scales, clip_norms = np.float32([0.0, 0.5, 1.0, 3.0]), np.float32([0.1, 1.0, 5.0, 0.01])
    for broken in (False, True):
        if broken:
            features[5], features[6], mask[5:7] = np.inf, 1e30, True
        sums, clipped = clipped_logistic_gradient_sums(
            scales[:, None] * weights, scales * intercept, features, labels, mask, clip_norms
        )
        for i, scale in enumerate(scales):
            alone, alone_clipped = clipped_logistic_gradient_sum(
                scale * weights, scale * intercept, features, labels, mask, clip_norms[i]
            )
            np.testing.assert_allclose(joined((sums[0][i], sums[1][i])), joined(alone), rtol=1e-4, atol=1e-4)
            assert int(clipped[i]) == int(alone_clipped)


def test_stays_float32():
    weights, intercept, features, labels, mask = batch(128, 6)
    half = jnp.asarray(features, jnp.bfloat16)
    gradient, _ = clipped_logistic_gradient_sum(weights, intercept, half, labels, mask, 1.0)
    assert gradient[0].dtype == gradient[1].dtype == jnp.float32


# ---- any loss --------------------------------------------------------------------------------------------------------


compiled_sum = jax.jit(clipped_gradient_sum, static_argnums=0)


def product_loss(weights, example):
    return weights @ example


def logistic_loss(parameters, example):
    logit = example[0] @ parameters[0] + parameters[1]
    return jnp.logaddexp(0.0, logit) - example[1] * logit


@pytest.mark.parametrize("clip_norm", [0.05, 1.0])
def test_generic_equals_the_closed_form(clip_norm):
    weights, intercept, features, labels, mask = batch(128, 6)
    generic, generic_clipped = compiled_sum(logistic_loss, (weights, intercept), (features, labels), mask, clip_norm)
    closed, clipped = clipped_logistic_gradient_sum(weights, intercept, features, labels, mask, clip_norm)
    np.testing.assert_allclose(joined(generic), joined(closed), rtol=2e-5, atol=2e-5)
    assert int(generic_clipped) == int(clipped)


@settings(max_examples=100)
@given(st.lists(magnitudes, min_size=4, max_size=4), st.sampled_from([1e-30, 1e-6, 1.0, 123.456, 1e30]))
def test_generic_overshoot(sizes, clip_norm):
    gradient = np.array(sizes, np.float32)[None]
    total, _ = compiled_sum(product_loss, jnp.zeros(4), jnp.asarray(gradient), jnp.ones(1, bool), np.float32(clip_norm))
    length = np.linalg.norm(np.float64(gradient))
    bound = float(np.float32(clip_norm))
    found = np.linalg.norm(np.float64(total))
    assert found <= bound * OVERSHOOT
    assert found >= min(length, bound) * (1 - 1e-5) - 1e-37  # what is not too long is not shortened


def test_generic_not_finite_adds_zero():
    examples = jnp.array([[1.0, 2.0], [jnp.nan, 0.0], [jnp.inf, 1.0], [jnp.nan, jnp.nan]])
    total, clipped = compiled_sum(product_loss, jnp.zeros(2), examples, jnp.array([True, True, True, False]), 100.0)
    assert total.tolist() == [1.0, 2.0]
    assert int(clipped) == 0


def test_generic_gradient_that_is_not_finite_though_the_example_is():
    total, _ = compiled_sum(
        lambda w, x: jnp.sqrt(x @ x) * w[0], jnp.zeros(2), jnp.array([[3e38, 3e38], [3.0, 4.0]]), jnp.ones(2, bool), 9.0
    )
    assert total.tolist() == [5.0, 0.0]


def test_replace_rows():
    kept = replace_rows(
        {"a": jnp.array([[1.0, jnp.nan], [2.0, 3.0]]), "b": jnp.array([1, 2])}, jnp.array([False, True])
    )
    assert kept["a"].tolist() == [[0.0, 0.0], [2.0, 3.0]]
    assert kept["b"].tolist() == [0, 2]
