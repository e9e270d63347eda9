"""Modules of Flax and Equinox as `JaxModel`: trained in part, frozen in part, neither of them a dependency."""

import jax
import numpy as np
import optax
import pytest

import coowned as co
from coowned.errors import BatchCoupledLossError

pytestmark = pytest.mark.peers


def flax_model():
    """Two layers, with dropout between them; the first is frozen."""
    import flax.linen as nn

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x, *, train):
            x = nn.relu(nn.Dense(8, name="first")(x))
            x = nn.Dropout(0.1, deterministic=not train)(x)
            return nn.Dense(2, name="second")(x)

    network = Network()

    def loss(parameters, example, key):
        scores = network.apply({"params": parameters}, example["x"], train=True, rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(scores, example["label"])

    def predict(parameters, example):
        return jax.nn.softmax(network.apply({"params": parameters}, example["x"], train=False))

    parameters = network.init(jax.random.key(0), np.zeros(3, np.float32), train=False)["params"]
    return co.JaxModel(
        loss=loss, parameters=parameters, predict=predict, trainable=lambda path: path.startswith("second")
    )


def equinox_model():
    """The same without dropout, as a module that holds functions too."""
    import equinox as eqx

    network = eqx.nn.MLP(in_size=3, out_size=2, width_size=8, depth=1, key=jax.random.key(0))

    def loss(network, example, key):
        return optax.softmax_cross_entropy_with_integer_labels(network(example["x"]), example["label"])

    def predict(network, example):
        return jax.nn.softmax(network(example["x"]))

    return co.JaxModel(
        loss=loss, parameters=network, predict=predict, trainable=lambda path: path.startswith("layers/1")
    )


def rows(count=600):
    x = np.random.default_rng(0).normal(size=(count, 3)).astype(np.float32)
    return {
        "users": [[f"u{number % 300}"] for number in range(count)],
        "x": x,
        "label": (x[:, 0] > 0).astype(int),
    }


@pytest.mark.parametrize(
    ("make", "trained"),
    [
        (flax_model, {"second/bias": (2,), "second/kernel": (8, 2)}),
        (equinox_model, {"layers/1/bias": (2,), "layers/1/weight": (2, 8)}),
    ],
    ids=["flax", "equinox"],
)
def test_module_is_trained_but_for_its_frozen_part(make, trained, tmp_path):
    model = make()
    run = co.fit(
        co.from_table(rows()), model, epsilon=16.0, delta=1e-6, adjacency="zero-out", batch_size=100, iterations=60,
        selector=co.Greedy(contribution_bound=2), learning_rate=0.1, seed=1, folder=tmp_path / "RUN",
    )  # fmt: skip
    arrays = run.arrays()
    assert {name: array.shape for name, array in arrays.items()} == trained
    found = run.evaluate(rows())
    assert found["accuracy"][0] > 0.7  # half of the labels are either
    again = co.open_run(tmp_path / "RUN", model=model).predict(rows(5))
    assert again.equals(run.predict(rows(5)))
    before, after = (jax.tree.leaves(tree) for tree in (model.parameters, model.with_arrays(arrays)))
    pairs = [pair for pair in zip(before, after, strict=True) if hasattr(pair[0], "shape")]
    changed = [not np.array_equal(one, other) for one, other in pairs]
    assert sum(changed) == 2
    assert len(changed) == 4


def test_flax_batch_norm_is_refused():
    import flax.linen as nn

    norm = nn.BatchNorm(use_running_average=False, axis_name="batch")
    state = nn.BatchNorm(use_running_average=False).init(jax.random.key(0), np.zeros((2, 3), np.float32))

    def loss(parameters, example, key):
        found, _ = norm.apply({**state, "params": parameters}, example["x"][None], mutable=["batch_stats"])
        return found.sum()

    model = co.JaxModel(loss=loss, parameters=state["params"], shapes={"x": (3,)})
    with pytest.raises(BatchCoupledLossError, match="layer norm"):
        model.for_schema(co.from_table(rows()).payload.schema).check_independence()
