"""Features and labels for a synthetic graph; labels depend on the number of users of an example."""

import dataclasses
import functools
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from coowned import threads, validate
from coowned.attribution.graph import AttributionGraph, indices
from coowned.content.data import Draw, FeatureTable, RowTable, row_order
from coowned.content.derived import Arrays
from coowned.errors import InputError
from coowned.exact.linear_kernels import fill_norms
from coowned.synthetic.kernels import GAMMA, draw_at, exp, fill_gaussian_rows, mix, stream_key, unit

FEATURES_TAG, BASE_TAG, BIAS_TAG, LABELS_TAG, SPLIT_TAG = 3, 4, 5, 6, 7  # one random stream each
SPLITS = ("train", "validation", "test")  # 80%, 10%, 10%
NUMBERS_A_THREAD = 500_000  # below this a thread costs more than it saves


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogisticData:
    """Data of the paper's logistic regression: label ~ Bernoulli(sigmoid(s·⟨2/(1+beta)·(a + beta·|e|·b), z⟩)).

    z are the features of an example, |e| its number of users, a a vector common to all examples, b one that makes
    examples with many users differ from those with few; s is `steepness`, beta `bias_strength`. At beta = 0 the
    number of users has no influence on the label.

    z, a and b are Gaussian with covariance I/d, so that their mean squared norm is 1. The paper writes
    1/sqrt(d)·I beside the same mean squared norm, which is a slip. It does not state d either: the default of 1000
    is ours.

    Example:
      >>> from coowned.synthetic.regular_graph import RegularGraph
      >>> world = LogisticData(num_features=8).attach(RegularGraph(num_examples=100).generate(seed=0), seed=0)
      >>> features, labels = world.batch([3, 1, 4])
      >>> features.shape, features.dtype, labels.shape
      ((3, 8), dtype('float32'), (3,))

    References: Ganesh et al. (2025), https://arxiv.org/abs/2503.03622, Section 5.1.
    """

    num_features: int = 1000
    steepness: float = 20.0
    bias_strength: float = 1.0

    def __post_init__(self):
        validate.positive(num_features=self.num_features)
        validate.positive_number(steepness=self.steepness)
        validate.in_range(0.0, np.inf, open_high=True, bias_strength=self.bias_strength)

    def attach(self, graph: AttributionGraph, *, seed: int) -> "LogisticWorld":
        """Returns this data for the examples of a graph, at no cost: features are generated on request."""
        return LogisticWorld(data=self, graph=graph, seed=seed)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LogisticWorld:
    """A graph with features, labels and a split, all pure functions of (seed, index of the example in `graph`).

    Guarantees:
      - An example has the same features, label and split in every batch and order.  (test_batching_changes_nothing)
      - Features are independent N(0, 1/d) numbers.                                  (test_features_are_gaussian)
      - Labels are Bernoulli of `probabilities`.                                     (test_labels_follow_probabilities)
      - The same bits for the same seed, on every platform.                          (test_same_bits_everywhere)
    Cost: a row of 1000 features takes a few microseconds of one core (benchmarks/synthetic.py); large batches
    use every core. Nothing is stored unless `materialize` is called.
    Not for a subgraph of `graph` by its own indices: keep the world and pass the indices of the whole graph.

    Example:
      >>> world = LogisticData(num_features=8).attach(AttributionGraph.from_users_per_example([[0], [0, 1]]), seed=1)
      >>> bool((world.features([1, 0])[1] == world.features([0])[0]).all())
      True
    """

    data: LogisticData
    graph: AttributionGraph
    seed: int
    stored: tuple[np.ndarray, np.ndarray] | None = dataclasses.field(default=None, repr=False)  # features, labels

    def __post_init__(self):
        validate.seed(self.seed)

    @property
    def num_examples(self) -> int:
        return self.graph.num_examples

    @functools.cached_property
    def base_vector(self) -> np.ndarray:
        """The (num_features,) float64 vector a, which acts on every example."""
        return self._vector(BASE_TAG)

    @functools.cached_property
    def bias_vector(self) -> np.ndarray:
        """The (num_features,) float64 vector b, which acts in proportion to the number of users."""
        return self._vector(BIAS_TAG)

    def features(self, examples: Any) -> np.ndarray:
        """(n, num_features) float32."""
        rows = self._rows(examples)
        return self._generate(rows, with_probabilities=False)[0] if self.stored is None else self.stored[0][rows]

    def labels(self, examples: Any) -> np.ndarray:
        """(n,) int8, 0 or 1."""
        rows = self._rows(examples)
        return self.stored[1][rows] if self.stored is not None else self._flip(rows, self.probabilities(rows))

    def batch(self, examples: Any) -> tuple[np.ndarray, np.ndarray]:
        """Returns features and labels of these examples, in the order given, faster than two calls."""
        rows = self._rows(examples)
        if self.stored is not None:
            return self.stored[0][rows], self.stored[1][rows]
        features, probabilities = self._generate(rows, with_probabilities=True)
        return features, self._flip(rows, probabilities)

    def probabilities(self, examples: Any) -> np.ndarray:
        """Returns the (n,) float64 probabilities of label 1; the mean of max(p, 1 - p) bounds any model's accuracy."""
        rows = self._rows(examples)
        probabilities = np.empty(rows.size)
        step = max(1, 8_000_000 // self.data.num_features)  # features pass through memory in pieces
        for start in range(0, rows.size, step):
            piece = rows[start : start + step]
            probabilities[start : start + step] = self._generate(piece, with_probabilities=True)[1]
        return probabilities

    def split(self, examples: Any) -> np.ndarray:
        """Returns (n,) uint8: 0 train (80%), 1 validation (10%), 2 test (10%), by a hash of (seed, example)."""
        drawn = draw_at(stream_key(self.seed, SPLIT_TAG), self._rows(examples))
        return (drawn >= np.uint64(2**64 * 8 // 10)).astype(np.uint8) + (drawn >= np.uint64(2**64 * 9 // 10))

    def examples_in(self, split: str) -> np.ndarray:
        """Returns the (n,) int64 examples of "train", "validation" or "test", in increasing order."""
        validate.one_of(SPLITS, split=split)
        return np.flatnonzero(self.split(np.arange(self.num_examples)) == SPLITS.index(split))

    def materialize(self, *, limit_gigabytes: float = 4.0) -> "LogisticWorld":
        """Returns the same world with every feature and label in memory; refused where that passes the limit."""
        self._check_size("materialize", limit_gigabytes)
        return dataclasses.replace(self, stored=self.batch(np.arange(self.num_examples)))

    def to_table(self, *, limit_gigabytes: float = 4.0) -> pa.Table:
        """Returns all examples as one Arrow table: example_id, users, features, label, split.

        >>> graph = AttributionGraph.from_users_per_example([[0], [0, 1]])
        >>> LogisticData(num_features=2).attach(graph, seed=0).to_table().column_names
        ['example_id', 'users', 'features', 'label', 'split']
        """
        self._check_size("to_table", limit_gigabytes)
        everyone = np.arange(self.num_examples)
        features, labels = self.batch(everyone)
        users = pa.LargeListArray.from_arrays(pa.array(self.graph.indptr), pa.array(self.graph.users))
        return pa.table(
            {
                "example_id": self.graph.ids_of(everyone),
                "users": users,
                "features": pa.FixedSizeListArray.from_arrays(pa.array(features.ravel()), self.data.num_features),
                "label": labels,
                "split": pa.array(SPLITS).take(pa.array(self.split(everyone))),
            }
        )

    def _rows(self, examples: Any) -> np.ndarray:
        return np.ascontiguousarray(indices(examples, "examples", self.num_examples), dtype=np.int64)

    def _generate(self, rows: np.ndarray, *, with_probabilities: bool) -> tuple[np.ndarray, np.ndarray]:
        d = self.data.num_features
        features = np.empty((rows.size, d), dtype=np.float32)
        probabilities = np.empty(rows.size if with_probabilities else 0)
        beta = float(self.data.bias_strength)
        slope = float(self.data.steepness) * 2.0 / (1.0 + beta)
        key, scale = stream_key(self.seed, FEATURES_TAG), np.float32(1.0 / np.sqrt(d))

        def piece(start: int, stop: int) -> None:
            fill_gaussian_rows(key, rows[start:stop], scale, features[start:stop])
            if with_probabilities:
                fill_probabilities(
                    features[start:stop],
                    self.graph.users_per_example[rows[start:stop]],
                    self.base_vector,
                    self.bias_vector,
                    slope,
                    beta,
                    probabilities[start:stop],
                )

        parts = max(1, min(threads.cores(), rows.size * d // NUMBERS_A_THREAD))
        threads.over_ranges(piece, rows.size, parts=parts)
        return features, probabilities

    def _flip(self, rows: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
        return flip_coins(stream_key(self.seed, LABELS_TAG), rows, probabilities)

    def _vector(self, tag: int) -> np.ndarray:
        d = self.data.num_features
        rows = np.empty((1, d), dtype=np.float32)
        fill_gaussian_rows(stream_key(self.seed, tag), np.zeros(1, np.int64), np.float32(1.0 / np.sqrt(d)), rows)
        vector = rows[0].astype(np.float64)
        vector.flags.writeable = False
        return vector

    def _check_size(self, name: str, limit_gigabytes: float) -> None:
        validate.positive_number(limit_gigabytes=limit_gigabytes)
        needed = 4e-9 * self.num_examples * self.data.num_features
        if needed > limit_gigabytes:
            raise InputError(
                f"{name} would hold {needed:.1f} GB of features, past limit_gigabytes={limit_gigabytes}; use "
                "`batch(examples)` instead, or raise the limit"
            )


@numba.njit(cache=True, nogil=True, error_model="numpy")
def fill_probabilities(features, users_per_example, base_vector, bias_vector, slope, beta, out):
    """out[i] = sigmoid(slope·(⟨a, z⟩ + beta·|e|·⟨b, z⟩)).

    The sums go column by column in a fixed order, unlike BLAS, whose last bits depend on the size of the batch.
    """
    d = features.shape[1]
    whole = d - d % 4
    for i in range(features.shape[0]):
        row = features[i]
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = 0.0  # four sums each, to fill the processor's pipeline
        for j in range(0, whole, 4):
            a0 += row[j] * base_vector[j]
            a1 += row[j + 1] * base_vector[j + 1]
            a2 += row[j + 2] * base_vector[j + 2]
            a3 += row[j + 3] * base_vector[j + 3]
            b0 += row[j] * bias_vector[j]
            b1 += row[j + 1] * bias_vector[j + 1]
            b2 += row[j + 2] * bias_vector[j + 2]
            b3 += row[j + 3] * bias_vector[j + 3]
        for j in range(whole, d):
            a0 += row[j] * base_vector[j]
            b0 += row[j] * bias_vector[j]
        logit = slope * (((a0 + a1) + (a2 + a3)) + beta * users_per_example[i] * ((b0 + b1) + (b2 + b3)))
        out[i] = 1.0 / (1.0 + exp(-logit))


@numba.njit(cache=True, nogil=True, error_model="numpy")
def flip_coins(key, rows, probabilities):
    """(n,) int8: one coin per example, at its own index in the stream."""
    labels = np.empty(rows.size, dtype=np.int8)
    for i in range(rows.size):
        labels[i] = unit(mix(key + np.uint64(rows[i] + 1) * GAMMA)) < probabilities[i]
    return labels


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WorldData(RowTable):
    """A `LogisticWorld`'s examples, or a part of them; features, and norms if asked for, are made with a batch.

    Guarantees:
      - A part gives the same content as the whole.   (test_world_part_equals_the_whole)

    Example:
      >>> from coowned import AttributionGraph
      >>> from coowned.synthetic.logistic_data import LogisticData
      >>> graph = AttributionGraph.from_users_per_example([[0], [0, 1]])
      >>> WorldData.part(LogisticData(num_features=4).attach(graph, seed=0), [1]).graph.num_examples
      1
    """

    world: LogisticWorld
    norms: bool = False

    @classmethod
    def part(cls, world: LogisticWorld, examples: Any = None) -> "WorldData | FeatureTable":
        """Returns all examples of a world, or those given by their indices in its graph; a table of those in memory."""
        rows = None if examples is None else np.asarray(examples, np.int64)
        graph = world.graph if rows is None else world.graph.subgraph(rows)
        if world.stored is None:
            return cls(graph=graph, world=world, rows=rows)
        features, labels = world.stored
        return FeatureTable(graph=graph, features=features, labels=labels, rows=rows)

    def stored(self) -> Arrays:
        return dict(zip(("lengths", "ids"), row_order(self.world.graph), strict=True))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"features": (self.world.data.num_features,), "labels": (), **({"norms": ()} if self.norms else {})}

    def dtypes(self) -> dict[str, np.dtype[Any]]:
        return dict.fromkeys(self.shapes(), np.dtype(np.float32))

    def fill(self, examples: npt.NDArray[np.int64], out: dict[str, npt.NDArray[Any]], draw: Draw | None = None) -> None:
        rows = self._rows_of(examples)
        out["features"][: rows.size], out["labels"][: rows.size] = self.world.batch(rows)
        if self.norms:
            fill_norms(out["features"], np.arange(rows.size), out["norms"])

    def with_norms(self) -> "WorldData":
        """Features together with their rows' norms."""
        return dataclasses.replace(self, norms=True)

    @property
    def digest(self) -> str:
        world = self.world
        return self._digest(dataclasses.asdict(world.data), world.seed, world.graph.digest)
