"""The plan binds what runs to what is claimed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.training.conftest import forged

from coowned import InputError
from coowned.errors import CertificateMismatchError
from coowned.mechanism.banded_strategy import BandedStrategy
from coowned.mechanism.keys import RunKey
from coowned.training.optimizers import make_optimizer, optimizer_names


def test_parts_must_agree(small):
    plan, other = small.plan(), small.plan("dp-mf")
    with pytest.raises(CertificateMismatchError, match="another certificate"):
        dataclasses.replace(plan, certificate=other.certificate)
    longer = dataclasses.replace(plan.mechanism, iterations=13)
    with pytest.raises(CertificateMismatchError, match="another mechanism"):
        dataclasses.replace(plan, mechanism=longer)
    claims = forged(plan.guarantee, test_run=False)
    with pytest.raises(InputError, match="given seed"):
        dataclasses.replace(plan, guarantee=claims)
    assert dataclasses.replace(plan, guarantee=claims, run_key=RunKey.from_operating_system()).guarantee is claims


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"clip_norm": None}, "clip_norm"),
        ({"clip_norm": float("inf")}, "clip_norm"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"learning_rate": 1e40}, "learning_rate"),
        ({"learning_rate": 1e-50}, "learning_rate"),
        ({"optimizer": "adem"}, "did you mean 'adam'"),
        ({"optimizer": "lbfgs2"}, "optax has no optimizer"),
        ({"run_key": b"secret"}, "RunKey"),
        ({"guarantee": 8.0}, "must come from guarantee"),
        ({"public": True}, "public"),
        ({"strategy": BandedStrategy(2, 12, (0.8, 0.6))}, "independent noise"),
    ],
)
def test_bad_plans(small, changes, says):
    with pytest.raises(InputError, match=says):
        small.plan(**changes)


def test_strategy_must_fit(small):
    with pytest.raises(InputError, match="must agree"):
        small.plan("dp-mf", strategy=BandedStrategy(2, 12, (0.8, 0.6)))
    nameless = dataclasses.replace(small.plan().mechanism, batch_size=None)
    with pytest.raises(InputError, match="batch_size"):
        dataclasses.replace(small.plan(), guarantee=None, mechanism=nameless)


def test_digest_names_every_choice(small):
    run_id = small.plan().guarantee
    base = small.plan(guarantee=run_id)
    changes = [{}, {"learning_rate": 0.1}, {"clip_norm": 0.4}, {"optimizer": "sgd"}, {"configuration": "x"}]
    plans = [dataclasses.replace(base, **change) for change in changes]
    assert len({plan.digest for plan in plans}) == len(changes)
    assert (
        base.digest == dataclasses.replace(base, run_key=RunKey.from_seed(9)).digest
    )  # the key is compared on its own


def test_secret_is_not_shown(small):
    assert "RunKey" not in repr(small.plan())


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
