"""The paper's logistic regression: worlds, full sweeps over (learning rate, clip norm), tuned on validation."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import polars as pl

import coowned as co
from coowned.content.data import TrainingData
from coowned.mechanism.mechanism import Mechanism
from coowned.synthetic.logistic_data import LogisticData, LogisticWorld
from coowned.synthetic.world_data import WorldData
from experiments.framework.graphs import synthetic_graph
from experiments.framework.rows import Point, Row

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
SEEDS = (1, 2)  # with which the best settings of seed 0 are trained again
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


class Setting(NamedTuple):
    """What one sweep trains, and its noise by epsilon."""

    world: LogisticWorld
    data: WorldData | co.FeatureTable
    selected: co.Selection | co.Schedule
    mechanism: Mechanism
    epsilons: tuple[float, ...]
    noise_multipliers: tuple[float, ...] | None = None  # of a run that claims nothing: what each epsilon stands for

    def noise(self, epsilons: Sequence[float]) -> dict[str, list[float]]:
        """These epsilons as `tuned` takes them."""
        if self.noise_multipliers is None:
            return {"epsilons": list(epsilons)}
        return {"noise_multipliers": [self.noise_multipliers[self.epsilons.index(epsilon)] for epsilon in epsilons]}


def tuned(
    data: TrainingData,
    selected: co.Selection | co.Schedule,
    mechanism: Mechanism,
    *,
    validation: HeldOut,
    test: HeldOut,
    seed: int = 0,
    pairs: Sequence[tuple[float, float]] = (),
    **noise: Any,
) -> Row:
    """Trains every (learning rate, clip norm) at every noise and keeps the best on validation, for each noise.

    Test results are those of the one kept: `test`, the accuracy; `expected`, the mean probability that a fresh label
    of a test example is predicted, which has no noise of labels. `noise` is `epsilons` or `noise_multipliers`; `pairs`,
    if given, are the one (learning rate, clip norm) to train at each.
    """
    plans = co.grid(
        co.certify(data.graph, selected),
        selected,
        mechanism,
        learning_rates=sorted({rate for rate, _ in pairs}) or LEARNING_RATES,
        clip_norms=sorted({clip_norm for _, clip_norm in pairs}) or CLIP_NORMS,
        delta=DELTA,
        adjacency=ADJACENCY,
        run_key=co.RunKey.from_seed(seed),
        **noise,
    )
    (levels,) = (len(values) for values in noise.values())
    groups = [plans[level * len(plans) // levels :][: len(plans) // levels] for level in range(levels)]
    if pairs:
        groups = [
            [plan for plan in group if (plan.learning_rate, plan.clip_norm) == pair]
            for group, pair in zip(groups, pairs, strict=True)
        ]
    plans = [plan for group in groups for plan in group]
    swept = co.sweep(plans, co.LogisticRegression(num_features=test.features.shape[1]), data)
    coefficients = swept.parameters["coefficients"].reshape(len(plans), -1)
    validated, _ = _accuracies(validation, coefficients)
    tested, expected = _accuracies(test, coefficients)
    members = len(plans) // levels
    best = validated.reshape(levels, members).argmax(axis=1) + members * np.arange(levels)
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


def tuned_in_world(setting: Setting, *, epsilons: Sequence[float] | None = None, **options: Any) -> Row:
    """`tuned`, on the validation and test examples of the data's world."""
    return tuned(
        setting.data,
        setting.selected,
        setting.mechanism,
        validation=held_out(setting.world, "validation"),
        test=held_out(setting.world, "test"),
        **setting.noise(setting.epsilons if epsilons is None else epsilons),
        **options,
    )


def repetitions(points: list[Point], arm: list[str]) -> list[Point]:
    """A point for every arm and further seed; it has no batch size, since each epsilon has its own best one."""
    common = ["num_examples", "num_features", "drawn", "num_epsilons"]
    arms = {tuple(point[name] for name in (*common, *arm)) for point in points}
    return [
        dict(zip((*common, *arm), values, strict=True)) | {"seed": seed} for values in sorted(arms) for seed in SEEDS
    ]


def repeated(point: Point, table: pl.DataFrame, arm: list[str], setting: Callable[[Row, int], Setting]) -> Row:
    """Trains again, with the point's seed, what was best on validation for its arm at each epsilon."""
    seed, found = point["seed"], {}
    own = best(table.filter(pl.col(name) == value for name, value in point.items() if name != "seed"), arm)
    for _, lines in own.group_by("row", maintain_order=True):
        epsilons, pairs = lines["epsilon"].to_list(), list(zip(lines["learning_rate"], lines["clip_norm"], strict=True))
        trained = tuned_in_world(setting(lines.row(0, named=True), seed), epsilons=epsilons, seed=seed, pairs=pairs)
        found |= {epsilon: [trained[name][i] for name in LISTS] for i, epsilon in enumerate(epsilons)}
    columns = zip(*(found[epsilon] for epsilon in sorted(found)), strict=True) if found else [()] * len(LISTS)
    return {"epsilon": sorted(found)} | {name: list(column) for name, column in zip(LISTS, columns, strict=True)}


def _accuracies(split: HeldOut, coefficients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """((models,) accuracy, (models,) its expectation over labels) on a split."""
    ones = split.features @ coefficients[:, :-1].T + coefficients[:, -1] > 0  # (examples, models)
    expected = np.where(ones, split.chances[:, None], 1 - split.chances[:, None]).mean(axis=0)
    return (ones == (split.labels[:, None] > 0)).mean(axis=0), expected


def by_epsilon(rows: list[Row]) -> pl.DataFrame:
    """One line a row and epsilon, with what was best on validation there."""
    return pl.DataFrame(rows, infer_schema_length=None).with_row_index("row").explode("epsilon", *LISTS)


def best(table: pl.DataFrame, arm: list[str]) -> pl.DataFrame:
    """For every arm and epsilon the line with the best validation accuracy, over whatever else was swept.

    Where it was trained again with other seeds, `expected` is the mean over all seeds, and `deviation` the standard
    deviation of one of them.
    """
    ordered = table.drop_nulls("batch_size").sort("validation", descending=True, maintain_order=True)
    first = ordered.unique([*arm, "epsilon"], keep="first", maintain_order=True)
    again = table.filter(pl.col("batch_size").is_null())
    by_seed = pl.concat([part.select(*arm, "epsilon", "expected") for part in (first, again)])
    over_seeds = by_seed.group_by(*arm, "epsilon").agg(
        pl.col("expected").mean(), pl.col("expected").std().alias("deviation"), pl.len().alias("seeds")
    )
    return first.drop("expected").join(over_seeds, on=[*arm, "epsilon"]).sort(*arm, "epsilon")


def seeds_shown(table: pl.DataFrame) -> str:
    """What follows figures of `best` where they are means over seeds."""
    error = (table["deviation"] / table["seeds"].sqrt()).max()
    if error is None:
        return ""
    return f"; means over {table['seeds'].max()} seeds with a standard error of at most {100 * error:.2f} points"  # type: ignore[operator]
