"""Normals with full tails, and rows of correlated noise that follow from the key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax_privacy.matrix_factorization import toeplitz
from scipy import special, stats

from coowned.errors import InputError
from coowned.mechanism.banded_strategy import BandedStrategy
from coowned.mechanism.kernels import TAIL_STREAM, WORDS, fill_words, log, word_at
from coowned.mechanism.keys import Purpose, RunKey, random_words
from coowned.mechanism.noise import (
    ROUNDING_FACTOR,
    NoiseStream,
    add_noise,
    noise_from_key,
    noise_scale,
    normals_from_words,
)

KEY = RunKey.from_seed(0)
STRATEGY = BandedStrategy(num_bands=5, iterations=40)
SHAPES = {"weights": (7, 3), "intercept": ()}


def stream(**changes) -> NoiseStream:
    settings = {"coefficients": STRATEGY.coefficients, "shapes": SHAPES, "iterations": 40}
    return NoiseStream(KEY, **(settings | changes))


def unit_normals(count: int, step: int, tensor: str = "w", configuration: str = "") -> np.ndarray:
    key = KEY.derive(Purpose.NOISE, configuration=configuration, step=step, tensor=tensor)
    more = np.empty(count, np.uint64)
    fill_words(key, TAIL_STREAM, 0, more)
    return normals_from_words(random_words(key, count), more)


# ---- normals ---------------------------------------------------------------------------------------------------------


def tail_of(word: int, more: int) -> float:
    """The logarithm of the tail probability that a word stands for."""
    m = word % 2**63
    if m < 2**47:
        return float(np.log((m * 2**64 + more + 0.5) / 2.0**128))
    return float(np.log((m + 0.5) / 2.0**64))


@given(st.integers(0, 2**64 - 1), st.integers(0, 63), st.integers(0, 2**64 - 1), st.integers(0, 64))
def test_normals_are_accurate(word, zeros, more, more_zeros):
    word = word >> 63 << 63 | word % 2**63 >> zeros  # deep tails are as likely as the middle
    more >>= more_zeros
    z = float(normals_from_words([word], [more])[0])
    assert (z > 0) == (word >= 2**63)
    # relative error of the tail probability at z: density / probability * error of z
    assert special.log_ndtr(-abs(z)) == pytest.approx(tail_of(word, more), rel=3e-15, abs=3e-15)


def test_tails_of_a_long_row_have_their_own_bits():
    """Three words of this row need 64 bits more, which come from the same places of another stream, in any part."""
    size, key = 3 * 128 * WORDS + 777, RunKey.from_seed(3)
    own = key.derive(Purpose.NOISE, configuration="", step=0, tensor="w")
    words, more = random_words(own, size), np.empty(size, np.uint64)
    fill_words(own, TAIL_STREAM, 0, more)
    deep = np.flatnonzero((words & np.uint64(2**63 - 1)) < np.uint64(2**47))
    assert deep.tolist() == [18450, 58207, 182088]
    expected = np.float32(normals_from_words(words, more))
    for threads in (1, 3):
        stream = NoiseStream(key, coefficients=(1.0,), shapes={"w": (size,)}, iterations=1, threads=threads)
        assert np.array_equal(stream.next()["w"], expected)
    # Only a word far deeper than these shows its further bits in a float32 number: looked at by themselves.
    for place in (*deep, 0, WORDS - 1, WORDS, 7 * WORDS + 130):
        chunk, at = divmod(int(place), WORDS)
        assert word_at(own, TAIL_STREAM, chunk, at) == more[place] != words[place]


@given(st.floats(1e-300, 1e300))
def test_log_is_accurate(x):
    assert log(x) == pytest.approx(np.log(x), rel=5e-16, abs=5e-16)


EXTREME = [0, 1, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1]


def reach(transform) -> float:
    """The largest |z| that any of the extreme patterns gives; infinite or nan where one is not finite."""
    values = np.abs(transform(np.array(EXTREME * 2, np.uint64), np.array([0] * 6 + [2**64 - 1] * 6, np.uint64)))
    return float(values.max()) if np.isfinite(values).all() else np.nan


def test_extreme_words():
    assert 13 < reach(normals_from_words) < 13.2
    z = normals_from_words(EXTREME, [0] * 6)
    assert z[0] == -z[3] == pytest.approx(special.ndtri_exp(np.log(2.0**-129)), rel=1e-13)
    assert abs(z[2]) == abs(z[5]) < 1e-18  # next to the middle, not in it: no value occurs twice as often
    at, below = np.abs(normals_from_words([2**47, 2**47 - 1], [0, 2**64 - 1]))
    assert 0 <= below - at < 1e-12  # no gap where bits are added


def test_short_words_and_float32_uniforms_are_caught():
    def from_32_bits(words, more):
        return special.ndtri(((words >> np.uint64(32)).astype(float) + 0.5) * 2.0**-32)

    def from_float32(words, more):
        return special.ndtri((words >> np.uint64(40)).astype(float) * 2.0**-24 + 2.0**-25)

    def unguarded(words, more):
        return special.ndtri(words.astype(float) * 2.0**-64)

    assert reach(from_32_bits) < 8
    assert reach(from_float32) < 8
    assert not reach(unguarded) > 8  # infinite


def test_distribution():
    z = unit_normals(400_000, step=0)
    # Kolmogorov-Smirnov at 1e-6; then binomial tail counts, exact, two-sided 1e-7 each.
    assert stats.kstest(z, "norm").pvalue > 1e-6
    for level in (1.0, 2.0, 3.0, 4.0):
        count, p = int((np.abs(z) > level).sum()), 2 * stats.norm.sf(level)
        assert min(stats.binom.cdf(count, z.size, p), stats.binom.sf(count - 1, z.size, p)) > 5e-8
    # Neighbours, lanes and chunks are unrelated: |r| sqrt(n) > 6 has probability 2e-9 each.
    for lag in (1, 64, 512):
        assert abs(np.corrcoef(z[:-lag], z[lag:])[0, 1]) * np.sqrt(z.size) < 6


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_rows_follow_from_the_key():
    independent = stream(coefficients=(1.0,), shapes={"w": (1500,)})
    for step in range(3):
        assert np.array_equal(independent.next()["w"], unit_normals(1500, step).astype(np.float32))


def test_one_band_is_dp_sgd():
    one_band = BandedStrategy(num_bands=1, iterations=40)
    first, second = stream(coefficients=one_band.coefficients), stream(coefficients=(1.0,))
    for _ in range(5):
        a, b = first.next(), second.next()
        assert all(a[name].tobytes() == b[name].tobytes() for name in SHAPES)


def test_strategy_undoes_the_noise():
    rows_of = stream(shapes={"w": (600,)})
    rows = np.array([rows_of.next()["w"] for _ in range(40)], np.float64)  # (40, 600)
    z = np.array([unit_normals(600, step) for step in range(40)])
    error = np.abs(STRATEGY.matrix() @ rows - z)
    assert (error <= 2.0**-24 * STRATEGY.coefficients[0] * np.abs(rows) + 1e-13).all()


def test_agrees_with_jax_privacy():
    rows_of = stream(shapes={"w": (50,)})
    ours = np.array([rows_of.next()["w"] for _ in range(40)])
    z = np.array([unit_normals(50, step) for step in range(40)], np.float32)
    matrix = toeplitz.inverse_as_streaming_matrix(jnp.asarray(STRATEGY.coefficients, jnp.float32))
    np.testing.assert_allclose(ours, matrix @ jnp.asarray(z), atol=2e-5)


def test_covariance_is_that_of_the_matrix():
    strategy, count = BandedStrategy(num_bands=3, iterations=6), 200_000
    rows_of = stream(coefficients=strategy.coefficients, shapes={"w": (count,)}, iterations=6)
    rows = np.array([rows_of.next()["w"] for _ in range(6)], np.float64)
    inverse = np.linalg.inv(strategy.matrix())
    expected = inverse @ inverse.T
    deviation = np.sqrt((np.outer(np.diag(expected), np.diag(expected)) + expected**2) / count)
    # 21 entries, asymptotically normal, |z| > 6 has probability 2e-9 each.
    assert (np.abs(rows @ rows.T / count - expected) < 6 * deviation).all()
    independent = np.array([unit_normals(count, step) for step in range(6)])
    assert not (np.abs(independent @ independent.T / count - expected) < 6 * deviation).all()  # it can fail


@pytest.mark.parametrize("start", [0, 1, 3, 4, 5, 17, 40])
def test_resume_is_bit_identical(start):
    whole = stream()
    rows = []
    for step in range(40):
        if step == start:
            stored = whole.rows()
        rows.append(whole.next())
    if start == 40:
        stored = whole.rows()
    for resumed in (stream(start=start), stream(start=start, rows=stored)):
        assert resumed.step == start
        for step in range(start, 40):
            row = resumed.next()
            assert all(row[name].tobytes() == rows[step][name].tobytes() for name in SHAPES)


def test_memory_does_not_grow_with_iterations():
    assert {name: rows.shape for name, rows in stream(iterations=10**6).rows().items()} == {
        "weights": (1, 4, 21),
        "intercept": (1, 4, 1),
    }


def test_a_stream_never_goes_back():
    short = stream(iterations=5, coefficients=(1.0,))
    seen = [short.next()["weights"].tobytes() for _ in range(5)]
    assert len(set(seen)) == 5
    with pytest.raises(InputError, match="no further step"):
        short.next()
    with pytest.raises(AttributeError):
        short.step = 0  # type: ignore[misc]


def test_configurations_are_uncorrelated():
    shapes = {"w": (100_000,)}
    rows = stream(shapes=shapes, configurations=("a", "b"), coefficients=(1.0,)).next()["w"]
    assert rows.shape == (2, 100_000)
    # |r| sqrt(n) > 6 has probability 2e-9.
    assert abs(np.corrcoef(rows)[0, 1]) * np.sqrt(100_000) < 6
    alone = stream(shapes=shapes, configurations=("b",), coefficients=(1.0,)).next()["w"]
    assert np.array_equal(rows[1], alone)
    with pytest.raises(InputError, match="share noise"):
        stream(configurations=("a", "a"))


def test_threads_change_nothing():
    shapes = {"w": (150_000,), "b": (3,)}
    one, two = stream(shapes=shapes), stream(shapes=shapes, threads=2)
    for _ in range(3):
        a, b = one.next(), two.next()
        assert all(a[name].tobytes() == b[name].tobytes() for name in shapes)


def test_stored_rows_of_another_model_are_refused():
    with pytest.raises(InputError, match="shape"):
        stream(start=3, rows=stream(coefficients=(1.0, 0.5)).rows())
    with pytest.raises(InputError, match="tensors"):
        stream(start=3, rows={})


@pytest.mark.parametrize("coefficients", [(), (0.0, 1.0), (np.nan,), (-1.0,)])
def test_other_coefficients_are_refused(coefficients):
    with pytest.raises(InputError):
        stream(coefficients=coefficients)


# ---- scale and transformations ---------------------------------------------------------------------------------------


@given(st.floats(1e-3, 1e3), st.floats(1e-6, 1e6), st.integers(1, 2**20))
def test_scale_is_never_too_small(noise_multiplier, clip_norm, batch_size):
    scale = noise_scale(noise_multiplier=noise_multiplier, clip_norm=clip_norm, batch_size=batch_size)
    exact = noise_multiplier * clip_norm / batch_size * ROUNDING_FACTOR
    assert exact <= float(np.float32(scale)) == scale <= exact * (1 + 2e-7)


def test_scale_carries_the_rounding_factor():
    assert noise_scale(noise_multiplier=1.0, clip_norm=1.0, batch_size=1) >= 1.00001
    assert noise_scale(noise_multiplier=0, clip_norm=1.0, batch_size=1) == 0
    with pytest.raises(InputError):
        noise_scale(noise_multiplier=1.0, clip_norm=0.0, batch_size=1)


def test_add_noise_compiles():
    transformation = add_noise(0.5)
    gradients = {"w": jnp.arange(3.0), "b": jnp.zeros(())}
    row = {"w": np.float32([1, 2, 3]), "b": np.float32(4)}
    state = transformation.init(gradients)
    noisy, state = jax.jit(transformation.update)(gradients, state, noise=row)
    assert noisy["w"].tolist() == [0.5, 2.0, 3.5]
    assert float(noisy["b"]) == 2.0
    assert int(state.step) == 1


def test_noise_from_key_is_the_stream():
    gradients = {"w": jnp.zeros((4, 2)), "b": jnp.zeros(3)}
    settings = {"coefficients": STRATEGY.coefficients, "iterations": 40}
    transformation = noise_from_key(KEY, scale=1.0, configuration="c", **settings)
    rows_of = NoiseStream(KEY, shapes={"['b']": (3,), "['w']": (4, 2)}, configurations=("c",), **settings)
    state, states = transformation.init(gradients), []
    for _ in range(6):
        states.append(state)
        noisy, state = transformation.update(gradients, state)
        row = rows_of.next()
        assert np.array_equal(noisy["w"], row["['w']"])
        assert np.array_equal(noisy["b"], row["['b']"])
    with pytest.raises(InputError, match="given out"):
        transformation.update(gradients, states[2])
    resumed = noise_from_key(KEY, scale=1.0, configuration="c", start=6, **settings)
    again, _ = resumed.update(gradients, resumed.init(gradients))
    assert np.array_equal(again["w"], transformation.update(gradients, state)[0]["w"])


def test_scales_that_float32_loses_are_refused():
    for clip_norm in (1e-37, 1e36):
        with pytest.raises(InputError, match="float32"):
            noise_scale(noise_multiplier=1.0, clip_norm=clip_norm, batch_size=1 if clip_norm > 1 else 20)
    assert noise_scale(noise_multiplier=0.0, clip_norm=1.0, batch_size=1) == 0.0


def test_noise_is_not_rewound():
    import jax.numpy as jnp

    transformation = noise_from_key(RunKey.from_seed(0), coefficients=(1.0,), scale=1.0, iterations=3)
    zeros = {"w": jnp.zeros(2)}
    transformation.update(zeros, transformation.init(zeros))
    with pytest.raises(InputError, match="given out"):
        transformation.init(zeros)
