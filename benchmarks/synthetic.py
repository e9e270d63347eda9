"""How fast synthetic data are generated: graphs against a limit, features against numpy in the same run.

python benchmarks/synthetic.py
"""

import time

import numpy as np

from coowned.synthetic.kernels import fill_gaussian_rows
from coowned.synthetic.logistic_data import LogisticData
from coowned.synthetic.regular_graph import RegularGraph
from coowned.synthetic.skewed_graph import SkewedGraph

NUM_EXAMPLES = 8_000_000
SECONDS_LIMIT = 20.0
ROWS = {1000: 20_000, 100: 200_000}  # number of features: rows to time


def run() -> list[dict]:
    """Rows with name, value, unit, bar and ok; bar and ok are None where a figure is only for information."""
    rows = []
    for world in (RegularGraph, SkewedGraph):
        world(num_examples=1000).generate(seed=1)  # compile first
        for mean_examples_per_user in (8.0, 2.0):
            settings = world(num_examples=NUM_EXAMPLES, mean_examples_per_user=mean_examples_per_user)
            seconds = fastest(lambda settings=settings: settings.generate(seed=0), repetitions=1)
            name = f"{world.__name__}, 8M examples, {settings.num_users / 1e6:.0f}M users, one core"
            rows.append(figure(name, seconds, "s", bar=SECONDS_LIMIT, ok=seconds < SECONDS_LIMIT))
    graph = RegularGraph(num_examples=max(ROWS.values())).generate(seed=0)
    return rows + [
        row for num_features, num_rows in ROWS.items() for row in time_features(graph, num_features, num_rows)
    ]


def time_features(graph, num_features: int, num_rows: int) -> list[dict]:
    world = LogisticData(num_features=num_features).attach(graph, seed=0)
    examples = np.arange(num_rows)
    out = np.empty((num_rows, num_features), dtype=np.float32)
    key, scale = np.uint64(1), np.float32(1.0)
    generator = np.random.default_rng(0)
    world.batch(examples[:10])  # compile first
    peer = fastest(lambda: generator.standard_normal(out=out, dtype=np.float32), repetitions=5)
    kernel = fastest(lambda: fill_gaussian_rows(key, examples, scale, out), repetitions=5)
    features = fastest(lambda: world.features(examples), repetitions=5)
    batch = fastest(lambda: world.batch(examples), repetitions=5)
    at, ratio = f"d={num_features}", peer / kernel
    return [
        figure(f"numpy standard_normal float32, {at}", num_rows / peer, "rows/s"),
        figure(f"features kernel on one core, {at}", num_rows / kernel, "rows/s"),
        figure(f"features(examples), {at}", num_rows / features, "rows/s"),
        figure(f"batch(examples): features and labels, {at}", num_rows / batch, "rows/s"),
        figure(f"features kernel against numpy, one core each, {at}", ratio, "x", bar=1.0, ok=ratio > 1.0),
    ]


def figure(name: str, value: float, unit: str, *, bar: float | None = None, ok: bool | None = None) -> dict:
    return {"name": name, "value": value, "unit": unit, "bar": bar, "ok": ok}


def fastest(action, *, repetitions: int) -> float:
    """Seconds of the fastest repetition."""
    seconds = []
    for _ in range(repetitions):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


if __name__ == "__main__":
    for row in run():
        verdict = "" if row["ok"] is None else f"  bar {row['bar']:g} {row['unit']}: {'ok' if row['ok'] else 'MISSED'}"
        print(f"{row['name']:<60} {row['value']:>14,.2f} {row['unit']}{verdict}")
