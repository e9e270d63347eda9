"""A model of one's own: a small network with dropout, written in JAX, trained with a guarantee for every user.

python examples/own_model.py

The same from a file: `[model] kind = "python"`, `factory = "own_model:make_model"`.
"""

import jax
import jax.numpy as jnp
import numpy as np

import coowned as co

HIDDEN = 16


def hidden_units(parameters, x):
    return jax.nn.relu(x @ parameters["hidden"]["w"] + parameters["hidden"]["b"])


def scores(parameters, hidden):
    return hidden @ parameters["out"]["w"] + parameters["out"]["b"]


def loss(parameters, example, key):
    """Cross entropy of ONE example; a tenth of the hidden units is left out, others in every step."""
    hidden = hidden_units(parameters, example["x"])
    kept = jax.random.bernoulli(key, 0.9, hidden.shape)
    given = scores(parameters, jnp.where(kept, hidden / 0.9, 0))
    return jax.nn.logsumexp(given) - given[example["label"]]


def predict(parameters, example):
    """The probabilities of the classes."""
    return jax.nn.softmax(scores(parameters, hidden_units(parameters, example["x"])))


def make_model(num_features=2, hidden=HIDDEN):
    """A model that has seen nothing: its start is drawn, not learned."""
    generator = np.random.default_rng(0)
    parameters = {
        "hidden": {"w": generator.normal(size=(num_features, hidden)), "b": np.zeros(hidden)},
        "out": {"w": generator.normal(size=(hidden, 2)) / np.sqrt(hidden), "b": np.zeros(2)},
    }
    return co.JaxModel(loss=loss, parameters=parameters, predict=predict, columns={"x": "point", "label": "same_sign"})


def make_examples(count=4000, users=2000):
    """Points in a square, each of two users; those whose coordinates have the same sign are to be told from others."""
    generator = np.random.default_rng(1)
    points = generator.uniform(-2, 2, size=(count, 2))
    owners = generator.integers(0, users, size=(count, 2))
    table = {
        "users": [[f"user{one}", f"user{two}"] for one, two in owners],
        "point": points,
        "same_sign": points.prod(axis=1) > 0,
    }
    return co.from_table(table, users="users")


def main() -> None:
    run = co.fit(
        make_examples(),
        make_model(),
        epsilon=8.0,
        delta=1e-6,
        adjacency="zero-out",
        selector=co.Priced(contribution_bound=3),
        batch_size=256,
        iterations=100,
        learning_rate=0.02,
    )
    print(run.statement().splitlines()[0])
    for split, table in run.evaluations().items():
        print(f"{split}: {table['accuracy'][0]:.0%} right, {table['trivial_accuracy'][0]:.0%} by {table['trivial'][0]}")
    points = {"point": [[1.0, 1.0], [1.0, -1.0], [None, 0.0]]}
    print(run.predict(points))


if __name__ == "__main__":
    main()
