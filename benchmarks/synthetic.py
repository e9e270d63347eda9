"""How fast synthetic data are generated: graphs against a limit, features against numpy in the same run.

python -m benchmarks synthetic
"""

import numpy as np

from benchmarks.timing import Figure, timed
from coowned.synthetic.kernels import fill_gaussian_rows
from coowned.synthetic.logistic_data import LogisticData
from coowned.synthetic.regular_graph import RegularGraph
from coowned.synthetic.skewed_graph import SkewedGraph

NUM_EXAMPLES = 8_000_000
SECONDS_LIMIT = 20.0
ROWS = {1000: 20_000, 100: 200_000}  # number of features: rows to time


def run() -> list[Figure]:
    rows = []
    for world in (RegularGraph, SkewedGraph):
        world(num_examples=1000).generate(seed=1)  # compile first
        for mean_examples_per_user in (8.0, 2.0):
            settings = world(num_examples=NUM_EXAMPLES, mean_examples_per_user=mean_examples_per_user)
            seconds, _ = timed(lambda settings=settings: settings.generate(seed=0))
            name = f"{world.__name__}, 8M examples, {settings.num_users / 1e6:.0f}M users, one core"
            rows.append(Figure(name, seconds, "s", f"< {SECONDS_LIMIT:g}"))
    graph = RegularGraph(num_examples=max(ROWS.values())).generate(seed=0)
    return rows + [
        row for num_features, num_rows in ROWS.items() for row in time_features(graph, num_features, num_rows)
    ]


def time_features(graph, num_features: int, num_rows: int) -> list[Figure]:
    world = LogisticData(num_features=num_features).attach(graph, seed=0)
    examples = np.arange(num_rows)
    out = np.empty((num_rows, num_features), dtype=np.float32)
    key, scale = np.uint64(1), np.float32(1.0)
    generator = np.random.default_rng(0)
    world.batch(examples[:10])  # compile first
    peer, _ = timed(lambda: generator.standard_normal(out=out, dtype=np.float32), runs=5)
    kernel, _ = timed(lambda: fill_gaussian_rows(key, examples, scale, out), runs=5)
    features, _ = timed(lambda: world.features(examples), runs=5)
    batch, _ = timed(lambda: world.batch(examples), runs=5)
    at, ratio = f"d={num_features}", peer / kernel
    return [
        Figure(f"numpy standard_normal float32, {at}", num_rows / peer, "rows/s"),
        Figure(f"features kernel on one core, {at}", num_rows / kernel, "rows/s"),
        Figure(f"features(examples), {at}", num_rows / features, "rows/s"),
        Figure(f"batch(examples): features and labels, {at}", num_rows / batch, "rows/s"),
        Figure(f"features kernel against numpy, one core each, {at}", ratio, "x", "> 1"),
    ]
