"""Optimizers by name, and what goes around them."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.small_world import NUM_FEATURES

from coowned import InputError
from coowned.content.data import with_norms
from coowned.models.logistic_regression import LogisticRegression
from coowned.training import step
from coowned.training.loop import Trainer, train
from coowned.training.optimizers import (
    OptimizerOptions,
    Rates,
    Rule,
    average_weight_at,
    learning_rate_at,
    make_optimizer,
    optimizer_names,
    row_scales,
)

MODEL = LogisticRegression(num_features=NUM_FEATURES)


def test_optimizers():
    assert {"adam", "sgd", "adamw", "rmsprop", "lion"} <= set(optimizer_names())
    with pytest.raises(InputError):
        make_optimizer("scale_by_adam", 0.1)
    for name in ("lbfgs", "noisy_sgd", "scale_by_rprop", "sm3"):
        with pytest.raises(InputError, match="optax has no optimizer"):
            make_optimizer(name, 0.1)


@pytest.mark.full
def test_every_optimizer_takes_steps():
    """Two steps downhill, as the loop takes them: compiled, the learning rate given, the state kept as arrays."""
    parameters = {"intercept": jnp.float32(0.5), "weights": jnp.arange(3, dtype=jnp.float32)}
    gradients = jax.tree.map(jnp.ones_like, parameters)

    def steps(name, learning_rate, state):
        moved = parameters
        for _ in range(2):
            updates, state = make_optimizer(name, learning_rate).update(gradients, state, moved)
            moved = optax.apply_updates(moved, updates)
        return moved, state

    for name in optimizer_names():
        before = make_optimizer(name, 0.1).init(parameters)
        moved, after = jax.jit(functools.partial(steps, name))(jnp.float32(0.1), before)
        for array in (*jax.tree.leaves(before), *jax.tree.leaves(after)):
            assert np.asarray(array).dtype.kind in "fiub", name  # what a checkpoint can hold
        assert jax.tree.structure(before) == jax.tree.structure(after), name
        for key, array in parameters.items():
            assert bool((moved[key] < array).all()), name


# ---- options ---------------------------------------------------------------------------------------------------------


def rates_of(options: OptimizerOptions, iterations: int) -> list[float]:
    rates = jax.tree.map(lambda array: array[0], Rates.of([(2.0, iterations, options)]))
    rate_at = jax.jit(learning_rate_at)
    return [float(rate_at(rates, count)) for count in range(iterations)]


def plain_rate(options: OptimizerOptions, count: int, iterations: int) -> float:
    rising = round(options.warmup * iterations)
    if count < rising:
        return 2.0 * (count + 1) / rising
    done = (count - rising) / max(1, iterations - rising)
    left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[options.decay]
    return 2.0 if options.decay == "constant" else 2.0 * (options.final_rate + (1 - options.final_rate) * left)


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_learning_rates(decay):
    for warmup, final_rate in ((0.0, 0.0), (0.25, 0.0), (0.5, 0.1), (1.0, 1.0)):
        options = OptimizerOptions(decay=decay, warmup=warmup, final_rate=final_rate)
        expected = [plain_rate(options, count, 40) for count in range(40)]
        np.testing.assert_allclose(rates_of(options, 40), expected, rtol=1e-5)
        assert min(expected) > 0
    assert rates_of(OptimizerOptions(decay=decay, warmup=0.5), 1) == [2.0]


@pytest.mark.parametrize(("average", "window"), [("tail", 0.25), ("tail", 1.0), ("exponential", 0.25)])
def test_averages(average, window):
    """Step by step, against all iterates at once."""
    iterations, iterates = 40, np.random.default_rng(0).normal(size=40)
    rates = jax.tree.map(
        lambda array: array[0],
        Rates.of([(1.0, iterations, OptimizerOptions(average=average, average_window=window))]),
    )
    found, weight_at = 0.0, jax.jit(average_weight_at)
    for count, iterate in enumerate(iterates):
        weight = float(weight_at(rates, count))
        found = (1 - weight) * found + weight * iterate
    kept = round(window * iterations)
    decay = (kept - 1) / (kept + 1)
    weights = decay ** np.arange(iterations)[::-1] if average == "exponential" else np.arange(40) >= iterations - kept
    np.testing.assert_allclose(found, np.average(iterates, weights=weights), rtol=1e-5)


def iterates_of(plan, data):
    """((steps, parameters) of every step, what is released)."""
    trainer, path = Trainer([plan], MODEL), []
    state = trainer.run(
        with_norms(data),
        trainer.initial_state(MODEL.initial()),
        [],
        start=0,
        after=lambda step, state, rows: path.append(np.array(state[0]["coefficients"][0])),
    )
    return np.stack(path), trainer.released(state)["coefficients"][0]


def test_the_average_is_released(small):
    """Averaging changes no iterate."""
    last, released = iterates_of(small.plan(), small.data)
    assert np.array_equal(last[-1], released)
    path, released = iterates_of(small.plan(average="tail", average_window=0.25), small.data)
    np.testing.assert_allclose(path, last, rtol=1e-5)
    np.testing.assert_allclose(released, path[-3:].mean(axis=0), rtol=1e-5)
    trained = train(small.plan(average="tail", average_window=0.25), MODEL, small.data)
    assert np.array_equal(trained.parameters["coefficients"], released)


def test_weight_decay_and_schedule_are_those_of_optax(small):
    """Decoupled weight decay with a cosine: optax's adamw on the same noisy gradients."""
    options = {"decay": "cosine", "weight_decay": 0.1}
    plan = small.plan(**options)
    plain, noisy = np.zeros(NUM_FEATURES + 1, np.float32), []

    def keep(sums, noise, units, batch_size, release=step.release):
        noisy.append(release(sums, noise, units, batch_size))
        return noisy[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "release", keep)
        path, _ = iterates_of(plan, small.data)
    optimizer = optax.adamw(optax.cosine_decay_schedule(plan.learning_rate, plan.iterations), weight_decay=0.1)
    state = optimizer.init(plain)
    for gradient, found in zip(noisy, path, strict=True):
        updates, state = optimizer.update(jnp.asarray(gradient["coefficients"][0]), state, plain)
        plain = optax.apply_updates(plain, updates)
        np.testing.assert_allclose(found, plain, rtol=1e-4, atol=1e-6)


def test_momentum_is_that_of_sgd(small):
    heavy, light = (
        train(small.plan(optimizer="sgd", momentum=m), MODEL, small.data).parameters["coefficients"] for m in (0.9, 0.0)
    )
    assert np.linalg.norm(heavy) > 1.5 * np.linalg.norm(light)


ALL_OPTIONS = {"warmup": 0.5, "decay": "linear", "weight_decay": 0.1, "average": "exponential"}


def test_options_see_noisy_gradients_alone(small, monkeypatch):
    """With steps too small to move anything, every step releases the same bits whatever the options are."""
    released, honest = [], step.release

    def keep(*given):
        released[-1].append(honest(*given)["coefficients"])
        return honest(*given)

    monkeypatch.setattr(step, "release", keep)
    for options in ({}, ALL_OPTIONS):
        released.append([])
        train(small.plan(learning_rate=1e-37, **options), MODEL, small.data)
    assert np.array_equal(*released)


# ---- scaled gradients ------------------------------------------------------------------------------------------------


def released_steps(rows: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """(steps, rows, 50) gradients, one row ten times as large as the others, and noise of deviation 0.5."""
    generator = np.random.default_rng(0)
    signal = generator.standard_normal((steps, rows, 50)) * np.where(np.arange(rows) == 0, 10.0, 1.0)[:, None]
    return np.float32(signal), np.float32(0.5 * generator.standard_normal((steps, rows, 50)))


def test_scales_follow_from_what_was_released():
    """Nothing but the state, which is made of released gradients; unscaled, a gradient is what it was but for noise."""
    rule, parameters = Rule("sgd", 0.0, counts=True, scales=True), {"w": jnp.zeros((4, 50)), "b": jnp.zeros(50)}
    rates = jax.tree.map(lambda array: array[0], Rates.of([(0.1, 100, OptimizerOptions())], noise=[0.5]))
    state, moves, move, scales_of = rule.initial(parameters), [], jax.jit(rule.move), jax.jit(row_scales)
    signal, noise = released_steps(5, 40)
    for own, added in zip(signal, noise, strict=True):
        scales = scales_of(state[1], state[0])
        scaled = {"w": own[:4] * scales["w"] + added[:4], "b": own[4] * scales["b"] + added[4]}
        before = state[0]["w"]
        state = move(rates, scaled, state, scales)
        moves.append(np.asarray(before - state[0]["w"]) / 0.1)
        if len(moves) == 1:
            assert all((array == 1).all() for array in scales.values())
            np.testing.assert_allclose(moves[0], own[:4] + added[:4], rtol=1e-5)
        np.testing.assert_allclose(moves[-1], own[:4] + added[:4] / scales["w"], rtol=1e-3, atol=1e-3)
    large, others = float(scales["w"][0, 0]), np.asarray(scales["w"])[1:, 0]
    mean = (10**2 + 4) / 5  # of all rows' mean squares
    np.testing.assert_allclose(others / large, np.sqrt((100 + mean) / (1 + mean)), rtol=0.1)
    squares = np.array([100, 1, 1, 1, 1])
    found = np.array([large, *others, float(scales["b"][0])])
    np.testing.assert_allclose((found**2 * squares).sum(), squares.sum(), rtol=0.1)  # as long as before


def test_noise_alone_gives_finite_scales():
    """Then the mean of the estimates is about zero, of either sign."""
    rule, parameters = Rule("sgd", 0.0, counts=True, scales=True), {"w": jnp.zeros((40, 200))}
    rates = jax.tree.map(lambda array: array[0], Rates.of([(0.1, 100, OptimizerOptions())], noise=[1.0]))
    state, generator = rule.initial(parameters), np.random.default_rng(0)
    move, scales_of = jax.jit(rule.move), jax.jit(row_scales)
    for _ in range(60):
        released = {"w": generator.standard_normal((40, 200)).astype(np.float32)}
        state = move(rates, released, state, scales_of(state[1], state[0]))
    scales = np.asarray(row_scales(state[1], state[0])["w"])
    assert np.isfinite(scales).all()
    assert (scales > 0).all()


def test_linear_models_and_correlated_noise_are_not_scaled(small):
    for kind in ("dp-sgd", "dp-mf"):
        with pytest.raises(InputError, match="scale_gradients needs gradients computed by JAX"):
            train(small.plan(kind, scale_gradients=True), MODEL, small.data)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": "cosines"}, "decay"),
        ({"average": "mean"}, "average"),
        ({"warmup": 1.5}, "warmup"),
        ({"average_window": 0.0}, "average_window"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"momentum": 0.9}, "momentum is an option of sgd, not of adam"),
    ],
)
def test_wrong_options_are_refused(small, options, message):
    with pytest.raises(InputError, match=message):
        small.plan(**options)


def test_options_are_part_of_the_plan(small):
    plain = small.plan()
    assert plain.describe()["optimizer"] == ["adam", 0.05]  # as it was stored before there were options
    plan = dataclasses.replace(plain, **ALL_OPTIONS)
    assert plan.describe()["optimizer"] == ["adam", 0.05, ALL_OPTIONS]
    assert plan.digest != plain.digest
