"""Optimizers by name."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from coowned import InputError
from coowned.training.optimizers import make_optimizer, optimizer_names


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
