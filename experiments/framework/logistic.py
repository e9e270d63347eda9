"""The paper's logistic regression: worlds, full sweeps over (learning rate, clip norm), tuned on validation."""

import functools
from typing import Any, NamedTuple

import numpy as np
import polars as pl

import coowned as co
from coowned.mechanism.mechanism import Mechanism
from coowned.synthetic.logistic_data import LogisticData, LogisticWorld
from coowned.training.data import TrainingData, WorldData
from experiments.framework.graphs import synthetic_graph
from experiments.framework.rows import Row

LEARNING_RATES = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3)
CLIP_NORMS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
DELTA, ADJACENCY = 1e-10, "zero-out"

# By scale: features, batch size times iterations, epsilons. The paper does not state the number of features; 1000
# shows its effects and 100 hides them. `small` draws a quarter of the paper's examples; experiments with many arms a
# tenth, at epsilons whose noise is quick to make.
FEATURES = {"ci": 8, "small": 1000, "paper": 1000}
DRAWN = {"ci": 2_048, "small": 2_560_000, "paper": 10_240_000}
DRAWN_BY_MANY = DRAWN | {"small": 1_024_000}
EPSILONS = {"ci": (2.0, 64.0), "small": (0.5, 2.0, 8.0, 64.0), "paper": tuple(2.0**power for power in range(-1, 7))}
LISTS = ("noise_multiplier", "learning_rate", "clip_norm", "validation", "test", "expected")  # an entry an epsilon
EPSILONS_OF_MANY = EPSILONS | {"small": (2.0, 8.0, 64.0)}
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
def train_part(world: LogisticWorld) -> WorldData | co.FeatureTable:
    """80% of the examples; validation and test have 10% each."""
    return WorldData.part(world, world.examples_in("train"))


class HeldOut(NamedTuple):
    """A split that is not trained on; `chances` of label 1, where they are known."""

    features: np.ndarray  # (examples, features)
    labels: np.ndarray  # (examples,)
    chances: np.ndarray  # (examples,)


def held_out(world: LogisticWorld, split: str) -> HeldOut:
    examples = world.examples_in(split)
    return HeldOut(*world.batch(examples), world.probabilities(examples))


def tuned(
    data: TrainingData,
    selected: co.Selection | co.Schedule,
    mechanism: Mechanism,
    *,
    validation: HeldOut,
    test: HeldOut,
    seed: int = 0,
    **noise: Any,
) -> Row:
    """Trains every (learning rate, clip norm) at every noise and keeps the best on validation, for each noise.

    Test results are those of the one kept: `test`, the accuracy; `expected`, the mean probability that a fresh label
    of a test example is predicted, which has no noise of labels. `noise` is `epsilons` or `noise_multipliers`.
    """
    plans = co.grid(
        co.certify(data.graph, selected),
        selected,
        mechanism,
        learning_rates=LEARNING_RATES,
        clip_norms=CLIP_NORMS,
        delta=DELTA,
        adjacency=ADJACENCY,
        run_key=co.RunKey.from_seed(seed),
        **noise,
    )
    swept = co.sweep(plans, co.LogisticRegression(num_features=test.features.shape[1]), data)
    coefficients = swept.parameters["coefficients"].reshape(len(plans), -1)
    validated, _ = _accuracies(validation, coefficients)
    tested, expected = _accuracies(test, coefficients)
    members = len(LEARNING_RATES) * len(CLIP_NORMS)
    best = validated.reshape(-1, members).argmax(axis=1) + members * np.arange(len(plans) // members)
    return {
        "size": selected.size,
        "num_distinct": selected.num_distinct,
        "contribution_bound_of_selected": plans[0].certificate.contribution_bound,
        "noise_multiplier": [plans[i].noise_multiplier for i in best],
        "learning_rate": [plans[i].learning_rate for i in best],
        "clip_norm": [plans[i].clip_norm for i in best],
        "validation": validated[best].tolist(),
        "test": tested[best].tolist(),
        "expected": expected[best].tolist(),
    }


def tuned_in_world(
    world: LogisticWorld,
    data: TrainingData,
    selected: co.Selection | co.Schedule,
    mechanism: Mechanism,
    **settings: Any,
) -> Row:
    """`tuned`, on the validation and test examples of the data's world."""
    validation, test = held_out(world, "validation"), held_out(world, "test")
    return tuned(data, selected, mechanism, validation=validation, test=test, **settings)


def _accuracies(split: HeldOut, coefficients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """((models,) accuracy, (models,) its expectation over labels) on a split."""
    ones = split.features @ coefficients[:, :-1].T + coefficients[:, -1] > 0  # (examples, models)
    expected = np.where(ones, split.chances[:, None], 1 - split.chances[:, None]).mean(axis=0)
    return (ones == (split.labels[:, None] > 0)).mean(axis=0), expected


def by_epsilon(rows: list[Row]) -> pl.DataFrame:
    """One line a row and epsilon, with what was best on validation there."""
    return pl.DataFrame(rows, infer_schema_length=None).explode("epsilon", *LISTS)


def best(table: pl.DataFrame, arm: list[str]) -> pl.DataFrame:
    """For every arm and epsilon the line with the best validation accuracy, over whatever else was swept."""
    ordered = table.sort("validation", descending=True, maintain_order=True)
    return ordered.unique([*arm, "epsilon"], keep="first", maintain_order=True).sort(*arm, "epsilon")
