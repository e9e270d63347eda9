"""The paper's logistic regression: worlds, sweeps over (learning rate, clip norm), the three stages of a comparison.

An arm of a comparison is tuned over candidates (batch size, and bound or separation) and pairs (learning rate, clip
norm). First pass: all pairs of every candidate with seed 0, of which a row keeps the best on validation. Tuning: the
best combinations of an arm at each epsilon with seeds 1 and 2 too. Report: the combination with the best mean on
validation, with seeds that chose nothing.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import altair as alt
import numpy as np
import polars as pl

import coowned as co
from coowned.content.data import TrainingData
from coowned.mechanism.mechanism import Mechanism
from coowned.synthetic.logistic_data import LogisticData, LogisticWorld, WorldData
from experiments.framework.graphs import synthetic_graph
from experiments.framework.rows import Point, Row
from experiments.framework.verdicts import combine

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
EPSILONS_OF_MANY = {"ci": (2.0, 64.0), "small": (2.0, 8.0, 64.0), "paper": (2.0, 8.0, 64.0)}

FINALISTS = 5  # combinations of an arm that are tuned with further seeds, at each epsilon
TUNING_SEEDS, FRESH_SEEDS = (1, 2), (3, 4, 5, 6, 7)  # the first pass has seed 0
SEEDS_SHOWN = f"{FRESH_SEEDS[0]} to {FRESH_SEEDS[-1]}"
FEWEST = 3  # seeds that must not have diverged for an arm to be judged
START_LOSS = math.log(2)  # of the model that all start from, which is 0
LISTS = ("epsilon", "noise_multiplier", "learning_rate", "clip_norm", "validation", "loss", "test", "expected")
_IN_MEMORY = 4.0  # GB of features that are kept; above, each batch is generated
_CHUNK = 50_000  # held-out examples that are predicted at a time


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
    """Examples that are not trained on; `chances` of label 1, where they are known."""

    features: np.ndarray  # (examples, features)
    labels: np.ndarray  # (examples,)
    chances: np.ndarray  # (examples,)


class Split(NamedTuple):
    """The held-out examples of a world, generated part by part."""

    world: LogisticWorld
    name: str

    def __iter__(self) -> Iterator[HeldOut]:
        examples = self.world.examples_in(self.name)
        for begin in range(0, len(examples), _CHUNK):
            part = examples[begin : begin + _CHUNK]
            yield HeldOut(*self.world.batch(part), self.world.probabilities(part))


class Setting(NamedTuple):
    """What one sweep trains, and how it is validated and tested."""

    data: TrainingData
    selected: co.Selection | co.Schedule
    mechanism: Mechanism
    epsilons: Sequence[float]
    validation: Iterable[HeldOut]
    test: Iterable[HeldOut]
    noise_multipliers: Sequence[float] | None = None  # of a run that claims nothing: what each epsilon stands for

    def describe(self) -> Row:
        certificate = co.certify(self.data.graph, self.selected)
        return {
            "size": self.selected.size,
            "num_distinct": self.selected.num_distinct,
            "contribution_bound_of_selected": certificate.contribution_bound,
        }


Combination = tuple[float, float, float]  # epsilon, learning rate, clip norm


def sweep(setting: Setting, *, seed: int, wanted: Iterable[Combination] | None = None) -> pl.DataFrame:
    """One line for each combination that is wanted, by default all, with `LISTS` for columns.

    `test` is the accuracy; `expected`, the mean probability that a fresh label of a test example is predicted, which
    has no noise of labels; `loss`, the mean log loss on validation.
    """
    every = itertools.product(setting.epsilons, LEARNING_RATES, CLIP_NORMS)
    chosen = sorted(set(every if wanted is None else wanted))
    epsilons, rates, clip_norms = (sorted({values[i] for values in chosen}) for i in range(3))
    noise = {"epsilons": epsilons}
    if setting.noise_multipliers is not None:
        by_epsilon = dict(zip(setting.epsilons, setting.noise_multipliers, strict=True))
        noise = {"noise_multipliers": [by_epsilon[epsilon] for epsilon in epsilons]}
    plans = co.grid(
        co.certify(setting.data.graph, setting.selected),
        setting.selected,
        setting.mechanism,
        learning_rates=rates,
        clip_norms=clip_norms,
        delta=DELTA,
        adjacency=ADJACENCY,
        run_key=co.RunKey.from_seed(seed),
        **noise,
    )
    levels = np.repeat(epsilons, len(plans) // len(epsilons)).tolist()
    named = [(epsilon, plan.learning_rate, plan.clip_norm) for epsilon, plan in zip(levels, plans, strict=True)]
    kept = [number for number, combination in enumerate(named) if combination in set(chosen)]
    model = co.LogisticRegression(num_features=setting.data.shapes()["features"][0])
    swept = co.sweep([plans[number] for number in kept], model, setting.data)
    coefficients = swept.parameters["coefficients"].reshape(len(kept), -1)
    validation, _, loss = _scores(setting.validation, coefficients)
    test, expected, _ = _scores(setting.test, coefficients)
    columns = zip(*(named[number] for number in kept), strict=True)
    table = dict(zip(("epsilon", "learning_rate", "clip_norm"), map(list, columns), strict=True))
    table |= {"noise_multiplier": [plans[number].noise_multiplier for number in kept], "validation": validation}
    return pl.DataFrame(table | {"loss": loss, "test": test, "expected": expected}).select(LISTS)


def _scores(parts: Iterable[HeldOut], coefficients: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each model: accuracy, its expectation over labels, and log loss."""
    sums, examples = np.zeros((3, len(coefficients))), 0
    for part in parts:
        logits = part.features @ coefficients[:, :-1].T + coefficients[:, -1]  # (examples, models)
        ones, labels = logits > 0, part.labels[:, None] > 0
        sums[0] += (ones == labels).sum(axis=0)
        sums[1] += np.where(ones, part.chances[:, None], 1 - part.chances[:, None]).sum(axis=0)
        sums[2] += np.logaddexp(0, np.where(labels, -logits, logits)).sum(axis=0)
        examples += len(part.labels)
    accuracy, expected, loss = sums / examples
    return accuracy, expected, loss


def has_diverged() -> pl.Expr:
    """Whether a model is worse on validation than the one it started from."""
    return ~(pl.col("loss").fill_null(0.0) <= START_LOSS) | pl.col("loss").is_nan().fill_null(False)


def first_pass(setting: Setting, *, seed: int = 0, keep: int = FINALISTS) -> Row:
    """Every pair at every epsilon; the row has the best on validation that did not diverge, and how many did."""
    table = sweep(setting, seed=seed)
    usable = table.filter(~has_diverged()).sort("epsilon", "validation", descending=[False, True])
    kept = usable.group_by("epsilon", maintain_order=True).head(keep)
    return setting.describe() | kept.select(LISTS).to_dict(as_series=False) | {"diverged": table.height - usable.height}


class Design(NamedTuple):
    """The columns of an experiment that name an arm, and those over which an arm is tuned."""

    arm: list[str]
    candidate: list[str]

    def name(self, row: Row) -> str:
        """A candidate in words."""
        return ", ".join(f"{name} {row[name]:g}" for name in self.candidate if row.get(name) is not None)

    def later_points(self, points: Sequence[Point]) -> list[Point]:
        """Tuning and report of the arms of these points: a point for every arm and seed."""
        columns = ["num_examples", "num_features", "drawn", "num_epsilons", *self.arm]
        arms = list(dict.fromkeys(tuple(point[name] for name in columns) for point in points))
        return [
            dict(zip(columns, arm, strict=True)) | {"seed": seed}
            for seeds in (TUNING_SEEDS, FRESH_SEEDS)
            for seed, arm in itertools.product(seeds, arms)
        ]

    def lines(self, rows: Iterable[Row]) -> pl.DataFrame:
        """One line a trained model that was stored."""
        found = []
        for number, row in enumerate(rows):
            lists = {name: row.get(name) or [None] * len(row["epsilon"]) for name in LISTS}
            lists["candidate"] = row.get("candidate") or [self.name(row)] * len(row["epsilon"])
            plain = {name: value for name, value in row.items() if name not in lists}
            plain |= {"row": number, "seed": row.get("seed") or 0}
            found += [plain | dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
        names = dict.fromkeys([*self.arm, "row", "seed", "candidate", *LISTS], None)
        table = pl.DataFrame([names, *(names | line for line in found)], infer_schema_length=None)
        return table.drop_nulls("epsilon").with_columns(pl.col("loss").cast(pl.Float64))

    def finalists(self, lines: pl.DataFrame) -> pl.DataFrame:
        """The best combinations of the first pass, for every arm and epsilon."""
        first = lines.filter(pl.col("seed") == 0, ~has_diverged())
        ordered = first.sort("validation", descending=True, maintain_order=True)
        return ordered.group_by(*self.arm, "epsilon", maintain_order=True).head(FINALISTS)

    def winners(self, lines: pl.DataFrame) -> pl.DataFrame:
        """The finalist with the best mean on validation over the seeds of tuning, for every arm and epsilon.

        None where tuning has not ended. A finalist that diverged with any of these seeds is not chosen.
        """
        on = [*self.arm, "epsilon", "candidate", "learning_rate", "clip_norm"]
        finalists = self.finalists(lines)
        tuned = lines.filter(pl.col("seed").is_in([0, *TUNING_SEEDS])).join(finalists.select(on), on=on, how="semi")
        diverged = has_diverged().any().alias("diverged")
        found = tuned.group_by(on).agg(pl.col("validation").mean(), diverged, pl.col("seed").n_unique().alias("seeds"))
        whole = (pl.col("seeds") == 1 + len(TUNING_SEEDS)).all().over([*self.arm, "epsilon"])
        ordered = found.filter(whole).filter(~pl.col("diverged")).sort("validation", *on, descending=True)
        best = ordered.unique([*self.arm, "epsilon"], keep="first", maintain_order=True)
        return finalists.drop("validation").join(best.select(*on, "validation"), on=on).sort(*self.arm, "epsilon")

    def run_again(self, point: Point, lines: pl.DataFrame, setting: Callable[[Row, int], Setting]) -> Row:
        """Trains what a later stage of an arm needs, with the point's seed; `setting` makes that of a candidate."""
        seed = point["seed"]
        own = lines.filter(pl.col(name) == value for name, value in point.items() if name != "seed")
        chosen = self.finalists(own) if seed in TUNING_SEEDS else self.winners(own)
        parts = [pl.DataFrame(schema=dict.fromkeys(LISTS, pl.Float64) | {"candidate": pl.String})]
        for part in chosen.partition_by("candidate", maintain_order=True):
            combinations = part.select("epsilon", "learning_rate", "clip_norm").iter_rows()
            trained = sweep(setting(part.row(0, named=True), seed), seed=seed, wanted=list(combinations))
            parts.append(trained.with_columns(pl.lit(part["candidate"][0]).alias("candidate")))
        table = pl.concat(parts)
        return table.to_dict(as_series=False) | {"diverged": table.filter(has_diverged()).height}

    def reported(self, lines: pl.DataFrame) -> pl.DataFrame:
        """Every arm and epsilon whose fresh seeds all ran: `values`, those that did not diverge, and how many did.

        `expected` is their mean; `low` and `high` bound its 95% interval.
        """
        by = [*self.arm, "epsilon"]
        fresh = (
            lines.filter(pl.col("seed").is_in(FRESH_SEEDS))
            .group_by(by)
            .agg(
                pl.col("expected").filter(~has_diverged()).alias("values"),
                has_diverged().sum().alias("diverged"),
                pl.col("seed").n_unique().alias("seeds"),
            )
        )
        fresh = fresh.filter(pl.col("seeds") == len(FRESH_SEEDS), pl.col("values").list.len() >= FEWEST)
        effects = [combine([(1.0, values)]) for values in fresh["values"].to_list()]
        columns = {"expected": [e.estimate for e in effects], "error": [e.error for e in effects]}
        columns |= {name: [e.interval()[i] for e in effects] for i, name in enumerate(("low", "high"))}
        return fresh.with_columns(*(pl.Series(name, own, pl.Float64) for name, own in columns.items())).sort(by)


Contrast = list[tuple[float, Sequence[float]]]  # (weight, values of the seeds) of independent samples


def differences(table: pl.DataFrame, column: str, higher: str, lower: str) -> dict[tuple, Contrast]:
    """Accuracy of one arm of `reported` less that of another, by the other columns of the arm and epsilon."""
    found: dict[tuple, dict[str, Sequence[float]]] = {}
    for line in table.drop("diverged", "seeds", "expected", "error", "low", "high").to_dicts():
        arm, values = line.pop(column), line.pop("values")
        found.setdefault(tuple(line.values()), {})[arm] = values
    return {
        case: [(1.0, arms[higher]), (-1.0, arms[lower])]
        for case, arms in sorted(found.items())
        if {higher, lower} <= arms.keys()
    }


def weighted(parts: Iterable[tuple[float, Contrast]]) -> Contrast:
    """The weighted sum of contrasts."""
    return [(factor * weight, values) for factor, contrast in parts for weight, values in contrast]


def mean(contrasts: Iterable[Contrast]) -> Contrast:
    every = list(contrasts)
    return weighted((1 / len(every), contrast) for contrast in every)


def at_the_edge(winners: pl.DataFrame) -> str:
    """In how many cases the paper's largest learning rate won: a larger one, or more steps, might have been better."""
    edge = winners.filter(pl.col("learning_rate") == max(LEARNING_RATES)).height
    return f"The largest learning rate of the paper's won in {edge} of {winners.height} cases." if edge else ""


def divergence(table: pl.DataFrame) -> str:
    """Names the arms of `reported` of which a fresh seed diverged; empty where none did."""
    arms = table.filter(pl.col("diverged") > 0).drop("values", "seeds", "expected", "error", "low", "high")
    named = [
        f"{line.pop('diverged')} of {len(FRESH_SEEDS)} ({', '.join(str(value) for value in line.values())})"
        for line in arms.to_dicts()
    ]
    return f"Diverged and left out, of the fresh seeds: {'; '.join(named)}." if named else ""


def draw(table: pl.DataFrame, colour: str, panel: str, width: int) -> alt.FacetChart:
    """Test accuracy by epsilon, with 95% intervals over the fresh seeds."""
    base = alt.Chart(table).encode(
        x=alt.X("epsilon:Q").scale(type="log", base=2), color=alt.Color(f"{colour}:N", title=None)
    )
    lines = base.mark_line(point=True).encode(y=alt.Y("expected:Q", title="test accuracy").scale(zero=False))
    bars = base.mark_rule().encode(y="low:Q", y2="high:Q")
    return (
        (bars + lines)
        .properties(width=width, height=170)
        .facet(column=alt.Column(f"{panel}:N", title=None))
        .resolve_scale(y="independent")
    )
