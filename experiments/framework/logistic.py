"""The paper's logistic regression: worlds, full sweeps over (learning rate, clip norm), tuned on validation."""

import functools
from typing import Any

import numpy as np
import polars as pl

import coowned as co
from coowned.mechanism.mechanism import Mechanism
from coowned.synthetic.logistic_data import LogisticData, LogisticWorld
from coowned.training.data import WorldData
from experiments.framework.graphs import synthetic_graph
from experiments.framework.rows import Row

LEARNING_RATES = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3)
CLIP_NORMS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
DELTA, ADJACENCY = 1e-10, "zero-out"

# By scale: features, batch size times iterations, epsilons. The paper does not state the number of features; 1000
# shows its effects and 100 hides them. `small` draws a quarter of the paper's examples.
FEATURES = {"ci": 8, "small": 1000, "paper": 1000}
DRAWN = {"ci": 2_048, "small": 2_560_000, "paper": 10_240_000}
EPSILONS = {"ci": (2.0, 64.0), "small": (0.5, 2.0, 8.0, 64.0), "paper": tuple(2.0**power for power in range(-1, 7))}
LISTS = ("noise_multiplier", "learning_rate", "clip_norm", "validation", "test", "expected")  # an entry an epsilon
_IN_MEMORY = 4.0  # GB of features that are kept; above, each batch is generated


@functools.lru_cache(maxsize=1)
def make_world(
    kind: str, num_examples: int, examples_per_user: int, num_features: int, bias_strength: float = 1.0
) -> LogisticWorld:
    """A graph with features and labels; in memory where that fits."""
    graph = synthetic_graph(kind, num_examples, examples_per_user)
    world = LogisticData(num_features=num_features, bias_strength=bias_strength).attach(graph, seed=0)
    return world.materialize() if 4e-9 * num_examples * num_features <= _IN_MEMORY else world


@functools.lru_cache(maxsize=1)
def train_part(world: LogisticWorld) -> WorldData:
    """80% of the examples; validation and test have 10% each."""
    return WorldData.part(world, world.examples_in("train"))


def tuned(
    data: WorldData,
    selected: co.Selection | co.Schedule,
    mechanism: Mechanism,
    *,
    pairs: tuple[tuple[float, ...], tuple[float, ...]] = (LEARNING_RATES, CLIP_NORMS),
    seed: int = 0,
    **noise: Any,
) -> Row:
    """Trains every (learning rate, clip norm) at every noise and keeps the best on validation, for each noise.

    Test results are those of the one kept: `test`, the accuracy; `expected`, the mean probability that a fresh label
    of a test example is predicted, which has no noise of labels. `noise` is `epsilons` or `noise_multipliers`.
    """
    world = data.world
    rates, clip_norms = pairs
    plans = co.grid(
        co.certify(data.graph, selected),
        selected,
        mechanism,
        learning_rates=rates,
        clip_norms=clip_norms,
        delta=DELTA,
        adjacency=ADJACENCY,
        run_key=co.RunKey.from_seed(seed),
        **noise,
    )
    swept = co.sweep(plans, co.LogisticRegression(num_features=world.data.num_features), data)
    coefficients = swept.parameters["coefficients"].reshape(len(plans), -1)
    validation, _ = _accuracies(world, "validation", coefficients)
    test, expected = _accuracies(world, "test", coefficients)
    members = len(rates) * len(clip_norms)
    best = validation.reshape(-1, members).argmax(axis=1) + members * np.arange(len(plans) // members)
    return {
        "size": selected.size,
        "num_distinct": selected.num_distinct,
        "contribution_bound_of_selected": plans[0].certificate.contribution_bound,
        "noise_multiplier": [plans[i].noise_multiplier for i in best],
        "learning_rate": [plans[i].learning_rate for i in best],
        "clip_norm": [plans[i].clip_norm for i in best],
        "validation": validation[best].tolist(),
        "test": test[best].tolist(),
        "expected": expected[best].tolist(),
    }


def _accuracies(world: LogisticWorld, split: str, coefficients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """((models,) accuracy, (models,) its expectation over labels) on a split."""
    examples = world.examples_in(split)
    features, labels = world.batch(examples)
    ones = features @ coefficients[:, :-1].T + coefficients[:, -1] > 0  # (examples, models)
    chance = world.probabilities(examples)[:, None]
    return (ones == (labels[:, None] > 0)).mean(axis=0), np.where(ones, chance, 1 - chance).mean(axis=0)


def by_epsilon(rows: list[Row]) -> pl.DataFrame:
    """One line a row and epsilon, with what was best on validation there."""
    return pl.DataFrame(rows, infer_schema_length=None).explode("epsilon", *LISTS)


def best(table: pl.DataFrame, arm: list[str]) -> pl.DataFrame:
    """For every arm and epsilon the line with the best validation accuracy, over whatever else was swept."""
    ordered = table.sort("validation", descending=True, maintain_order=True)
    return ordered.unique([*arm, "epsilon"], keep="first", maintain_order=True).sort(*arm, "epsilon")
