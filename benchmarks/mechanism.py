"""How fast coins, noise and clipping are: ratios against jax_privacy, numpy and the plain gradient in one run.

python -m benchmarks mechanism
"""

import functools
import os
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numba
import numpy as np
from jax_privacy.clipping import clipped_grad

from benchmarks.timing import Figure
from coowned.exact.coins import PoissonCoins
from coowned.exact.grid import Grid
from coowned.exact.keys import WORD_STREAM, WORDS, Purpose, RunKey, fill_words_of_keys, random_words
from coowned.exact.linear_sums import clipped_linear_sums, norms_of
from coowned.exact.noise import NoiseStream, release
from coowned.exact.normals import approximate
from coowned.mechanism import banded_strategy
from coowned.mechanism.banded_strategy import BandedStrategy

BATCH, NUM_FEATURES = 4096, 1000
BLOCK = 8  # steps timed together: rows of correlated noise are made so many at a time
KEY = RunKey.from_seed(0)


def run() -> list[Figure]:
    rows = (
        clipping_rows(),
        many_models_rows(),
        correlated_noise_rows(),
        large_noise_rows(),
        sampler_rows(),
        stream_rows(),
    )
    return [row for own in rows for row in own]


def clipping_rows() -> list[Figure]:
    weights, intercept, features, labels, mask = logistic_batch()

    def loss(parameters, x, y):
        logits = x @ parameters[0] + parameters[1]
        return jnp.sum(jnp.logaddexp(0, logits) - y * logits)

    plain = jax.jit(jax.grad(loss))
    peer = clipped_grad(loss, l2_clip_norm=1.0, batch_argnums=(1, 2), keep_batch_dim=False)
    peer = jax.jit(peer.fun)
    peer_batch = jax.jit(clipped_grad(loss, l2_clip_norm=1.0, batch_argnums=(1, 2)).fun)
    coefficients = np.append(np.asarray(weights), np.asarray(intercept))[None]
    rows, targets, real = (np.asarray(array) for array in (features, labels, mask))
    norms, grids = norms_of(rows), [Grid.for_linear(1.0)]
    seconds = interleaved(
        {
            "ours": lambda: clipped_linear_sums(coefficients, rows, targets, real, grids, norms),
            "norms too": lambda: clipped_linear_sums(coefficients, rows, targets, real, grids),
            "plain": lambda: plain((weights, intercept), features, labels),
            "peer": lambda: peer((weights, intercept), features, labels),
            "peer, batch axis kept": lambda: peer_batch((weights, intercept), features, labels),
        },
        in_a_row=8,
    )
    peer_seconds = min(seconds["peer"], seconds["peer, batch axis kept"])  # whichever way of calling it is faster
    against_peer = peer_seconds / seconds["ours"]
    against_plain = seconds["plain"] / seconds["ours"]
    at = f"batch {BATCH}, d = {NUM_FEATURES}"
    return [
        Figure(f"clipped gradient, {at}", BATCH / seconds["ours"], "examples/s"),
        Figure("clipped gradient against jax_privacy's clipped_grad", against_peer, "x", ">= 2.5"),
        Figure("clipped gradient against the plain gradient", against_plain, "x"),
        Figure("  the plain gradient against clipped_grad", peer_seconds / seconds["plain"], "x"),
        Figure("  the rows' norms made in the step: against clipped_grad", peer_seconds / seconds["norms too"], "x"),
    ]


def many_models_rows() -> list[Figure]:
    """The sums of a sweep's models on the host against the two float32 products alone, by XLA."""
    models, num_features = 336, 100
    generator = np.random.default_rng(0)
    coefficients = (0.1 * generator.standard_normal((models, num_features + 1))).astype(np.float32)
    features = generator.standard_normal((BATCH, num_features), np.float32)
    labels, mask = (generator.random(BATCH) < 0.5).astype(np.float32), np.ones(BATCH, np.bool_)
    grids, norms = [Grid.for_linear(float(c)) for c in np.geomspace(0.05, 3.2, models)], norms_of(features)
    weights, rows = jnp.asarray(coefficients[:, :-1]), jnp.asarray(features)
    products = jax.jit(lambda weights, rows: (rows @ weights.T).T @ rows)
    seconds = interleaved(
        {
            "exact": lambda: clipped_linear_sums(coefficients, features, labels, mask, grids, norms),
            "products": lambda: products(weights, rows),
        },
        in_a_row=8,
    )
    ratio = seconds["products"] / seconds["exact"]
    return [Figure(f"exact sums of {models} models, d = {num_features}, against two float32 products", ratio, "x")]


def correlated_noise_rows() -> list[Figure]:
    weights, intercept, features, labels, mask = (np.asarray(array) for array in logistic_batch())
    coefficients, norms = np.append(weights, intercept)[None], norms_of(features)
    grid = Grid.for_linear(1.0)

    def steps(num_bands):
        strategy = BandedStrategy(num_bands=num_bands, iterations=100_000)
        stream = noise_stream(NUM_FEATURES + 1, grid, strategy.coefficients)

        def some_steps():
            for _ in range(BLOCK):
                sums, _ = clipped_linear_sums(coefficients, features, labels, mask, [grid], norms)
                release({"w": sums}, stream.next(), np.array([grid.unit]), BATCH)

        return some_steps

    seconds = interleaved({"independent": steps(1), "correlated": steps(64)}, repetitions=30)
    ratio = seconds["correlated"] / seconds["independent"]
    started = time.perf_counter()
    coefficients = banded_strategy.optimize(64, 2500)  # not from the cache
    optimized = time.perf_counter() - started
    factor = BandedStrategy(64, 2500, coefficients).error_factor()
    return [
        Figure("step with noise of 64 bands against independent noise, d = 1000", ratio, "x", "<= 1.5"),
        Figure("optimizing a strategy of 64 bands, 2500 iterations", optimized, "s"),
        Figure("error of 64 bands over that of DP-SGD, 2500 iterations", factor, "x"),
    ]


def large_noise_rows() -> list[Figure]:
    """Steps with a noise multiplier of 200 against 1: more numbers are close to a boundary of their rounding."""
    features, labels, mask = (np.asarray(array)[:1024] for array in logistic_batch()[2:])
    norms, grid, rows = norms_of(features), Grid.for_linear(1.0), []
    for models, num_bands in ((168, 1), (168, 16), (1, 1), (1, 16)):
        strategy = BandedStrategy(num_bands=num_bands, iterations=2500)
        coefficients, grids = np.zeros((models, NUM_FEATURES + 1), np.float32), [grid] * models

        def some_steps(stream, with_sums, coefficients=coefficients, grids=grids):
            for _ in range(BLOCK):
                noise = stream.next()
                if with_sums:
                    sums, _ = clipped_linear_sums(coefficients, features, labels, mask, grids, norms)
                    release({"w": sums}, noise, np.full(len(grids), grid.unit), len(mask))

        actions = {
            (sigma, with_sums): functools.partial(
                some_steps, noise_stream(NUM_FEATURES + 1, grid, strategy.coefficients, sigma, models), with_sums
            )
            for sigma in (1, 200)
            for with_sums in (True, False)
        }
        seconds = interleaved(actions, repetitions=10 if models > 1 else 100)
        step, alone = (seconds[200, with_sums] / seconds[1, with_sums] for with_sums in (True, False))
        name = f"step of {models} model{'s' * (models > 1)}, batch {len(mask)}, bands {num_bands}: sigma 200 against 1"
        rows += [Figure(name, step, "x", "<= 1.5"), Figure("  its noise alone", alone, "x")]
    return rows


def noise_stream(size: int, grid: Grid, coefficients=(1.0,), sigma: float = 1.3, models: int = 1) -> NoiseStream:
    return NoiseStream(
        KEY,
        deviations=[grid.noise_deviation(sigma)] * models,
        coefficients=coefficients,
        shapes={"w": (size,)},
        iterations=10**6,
        configurations=[str(model) for model in range(models)],
    )


def sampler_rows() -> list[Figure]:
    expected = 1024
    seconds, step = {}, iter(range(10**9))
    draws = {}
    for size in (10**5, 10**7):
        coins = PoissonCoins(expected / size)
        coins.draw(KEY.derive(Purpose.COINS, step=0), size)  # set up
        draws[size] = lambda coins=coins, size=size: coins.draw(KEY.derive(Purpose.COINS, step=next(step)), size)
    seconds = interleaved(draws, repetitions=200)
    ratio = seconds[10**7] / seconds[10**5]
    return [
        Figure("coins of one step, 1024 of 10^5 copies", seconds[10**5] * 1e6, "us"),
        Figure("coins of one step, 1024 of 10^7 copies", seconds[10**7] * 1e6, "us"),
        Figure("coins: 10^7 copies against 10^5, same batch", ratio, "x", "<= 3"),
    ]


def stream_rows() -> list[Figure]:
    count = 4_400_000
    philox = np.random.Generator(np.random.Philox(0))
    stream = noise_stream(count, Grid.for_gradients(1.0))
    key = KEY.derive(Purpose.MASKS, step=0)
    seconds = interleaved(
        {
            "words": lambda: random_words(key, count),
            "philox": lambda: philox.bit_generator.random_raw(count),
            "exact": stream.next,
            "float32": lambda: float32_row(key, np.empty(count, np.float32)),
            "numpy": lambda: philox.standard_normal(count).astype(np.float32),
        },
        repetitions=10,
    )
    words, exact = seconds["philox"] / seconds["words"], seconds["exact"] / seconds["float32"]
    return [
        Figure("ChaCha20 words against numpy Philox, one core", words, "x"),
        Figure("exactly rounded normals on one core", count / seconds["exact"], "numbers/s"),
        Figure("row of 4.4M exactly rounded normals: time over that as float32", exact, "x", "<= 1.3"),
        Figure("exactly rounded normals against numpy Philox ziggurat", seconds["numpy"] / seconds["exact"], "x"),
    ]


@numba.njit(nogil=True)
def float32_row(key, out):
    """The same normals in float32, without rounding to a grid: what a row of floating-point noise costs."""
    words, normals = np.empty((1, WORDS), np.uint64), np.empty(WORDS)
    keys = key.reshape(1, 8)
    for begin in range(0, out.size, WORDS):
        length = min(WORDS, out.size - begin)
        fill_words_of_keys(keys, WORD_STREAM, begin // 8, words[:, :length])
        approximate(words[0, :length], normals[:length])
        for j in range(length):
            out[begin + j] = np.float32(normals[j])


def logistic_batch():
    generator = np.random.default_rng(0)
    features = generator.standard_normal((BATCH, NUM_FEATURES)).astype(np.float32)
    labels = (generator.random(BATCH) < 0.5).astype(np.float32)
    weights = 0.1 * generator.standard_normal(NUM_FEATURES).astype(np.float32)
    arrays = weights, np.float32(0.1), features, labels, np.ones(BATCH, bool)
    return tuple(jnp.asarray(array) for array in arrays)


def interleaved(actions: dict, *, repetitions: int = 100, in_a_row: int = 1) -> dict:
    """Seconds of each action's fastest repetition; taken in turn, so that a busy moment hits all of them.

    Each is run once more just before it is timed, so that none starts with a cache another has filled, or while the
    threads of another still wait for work. As in training, an action may be timed several times in a row.
    """
    best = {name: float("inf") for name in actions}
    for action in actions.values():
        jax.block_until_ready(action())  # compile first
    for _ in range(repetitions):
        for name, action in actions.items():
            jax.block_until_ready(action())
            for _ in range(in_a_row):
                started = time.perf_counter()
                jax.block_until_ready(action())
                best[name] = min(best[name], time.perf_counter() - started)
    return best
