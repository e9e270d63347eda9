"""The paper's scale: 10.24 million examples drawn from a graph of 8 million; time and peak memory end to end.

Each run is a process of its own, from making the graph to the trained model. Features are all in memory (d = 100) or
made for each batch (d = 1000, where all would be 32 GB).

python -m benchmarks training_scale
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import memory
from benchmarks.timing import Figure

NUM_EXAMPLES, BATCH, ITERATIONS = 8_000_000, 4096, 2500
MEMORY_BAR = 6.0  # GB
_STAGES = ("select", "certify", "calibrate", "training", "all")


def run() -> list[Figure]:
    rows = []
    for num_features, where in ((100, "in memory"), (1000, "made for each batch")):
        command = [sys.executable, "-m", "benchmarks.training_scale", str(num_features)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent)
        found = json.loads(done.stdout.splitlines()[-1])
        at = f"{BATCH * ITERATIONS / 1e6:g}M examples, d = {num_features} {where}"
        rows += [
            *(Figure(f"{at}: {name}", found[name], "s") for name in _STAGES),
            Figure(f"{at}: peak", found["peak"], "GB", f"<= {MEMORY_BAR:g}"),
        ]
    return rows


def train_once(num_features: int) -> dict[str, float]:
    """Makes a world and trains on it; what it took."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    begun = time.perf_counter()

    from coowned import Greedy, PoissonSampling, certify, guarantee
    from coowned.exact.keys import RunKey
    from coowned.models.logistic_regression import LogisticRegression
    from coowned.synthetic.logistic_data import LogisticData, WorldData
    from coowned.synthetic.regular_graph import RegularGraph
    from coowned.training.loop import train
    from coowned.training.plan import TrainingPlan

    world = LogisticData(num_features=num_features).attach(
        RegularGraph(num_examples=NUM_EXAMPLES).generate(seed=0), seed=0
    )
    if num_features == 100:
        world = world.materialize()
    made = time.perf_counter()
    selection = Greedy(contribution_bound=3).select(world.graph)
    selected = time.perf_counter()
    certificate = certify(world.graph, selection)
    certified = time.perf_counter()
    mechanism = PoissonSampling.from_certificate(certificate, batch_size=BATCH, iterations=ITERATIONS)
    plan = TrainingPlan(
        certificate=certificate,
        selected=selection,
        mechanism=mechanism,
        guarantee=guarantee(certificate, mechanism, epsilon=8.0, delta=1e-10, adjacency="zero-out"),
        clip_norm=1.0,
        learning_rate=0.01,
        run_key=RunKey.from_operating_system(),
    )
    started = time.perf_counter()
    train(plan, LogisticRegression(num_features=num_features), WorldData.part(world))
    ended = time.perf_counter()
    return {
        "select": selected - made,
        "certify": certified - selected,
        "calibrate": started - certified,
        "training": ended - started,
        "all": ended - begun,
        "peak": memory.peak() / 1e9,
    }


if __name__ == "__main__":
    print(json.dumps(train_once(int(sys.argv[1]))))
