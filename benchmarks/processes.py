"""Two processes against one of one thread each, what the engine costs at one, and the bytes of a step.

python -m benchmarks processes
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import numpy.typing as npt

from benchmarks.timing import Figure, timed
from coowned import AttributionGraph, Greedy, LogisticRegression, PoissonSampling, certify, guarantee
from coowned.content.data import FeatureTable, TrainingData, with_norms
from coowned.content.text import SPECIAL_TOKENS, TokenizedTexts, Vocabulary
from coowned.content.token_table import TokenTable
from coowned.exact.keys import RunKey
from coowned.models.bert_model import BertModel
from coowned.models.model import Model, num_parameters
from coowned.runs.launch import launch, workers_from
from coowned.training.loop import Trainer
from coowned.training.plan import TrainingPlan
from coowned.training.workers import ALONE, Workers, summed

ONE_THREAD = {
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
}
ROUNDS = 3
SEQUENCE = 64
LINEAR = {
    "linear model": (100_000, 1024, 32_768),
    "small linear model": (40_000, 512, 8192),
}  # examples, features, batch
LARGE, HOSTS = 110_000_000, 8  # parameters, of BERT-base


class Counting:
    """Workers that count the bytes of what they sum."""

    def __init__(self, workers: Workers):
        self._workers, self.rank, self.count, self.bytes = workers, workers.rank, workers.count, 0

    def sum(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        self.bytes += numbers.nbytes
        return self._workers.sum(numbers)


def run() -> list[Figure]:
    rows = []
    for name, bar in (("linear model", ">= 1.5"), ("small linear model", ""), ("BERT-Tiny", ">= 1.7")):
        found: dict[int, list[dict[str, float]]] = {1: [], 2: []}
        for _ in range(ROUNDS):  # in turn, so that a busy moment hits both
            for processes, rounds in found.items():
                rounds.append(_measured(name, processes))
        one, two = (min(round["seconds"] for round in found[processes]) for processes in (1, 2))
        rows += [
            Figure(f"{name}: a step of one process of one thread", one, "s"),
            Figure(f"{name}: two such processes against one", one / two, "x", bar),
            Figure(f"{name}: if one process packed its sums as several do", 1 + packing(name) / one, "x", "<= 1.02"),
            Figure(f"{name}: bytes a step, worker and parameter", found[2][0]["bytes"], ""),
        ]
    ring = 2 * (HOSTS - 1) / HOSTS * 8 * LARGE / 1e9
    return [*rows, Figure(f"on paper: sent by each of {HOSTS} hosts a step, {LARGE / 1e6:.0f}M parameters", ring, "GB")]


def packing(name: str) -> float:
    """Seconds to join the sums of a step to one vector, and to take them apart: the engine's share at one process.

    A single process does not even do this: it asks how many workers there are.
    """
    model = _model(name)
    sums = {name: np.ones((1, *shape), np.int64) for name, shape in model.shapes().items()}
    return timed(lambda: summed(ALONE, sums, 0, np.ones(8, bool), 8), runs=10)[0]


def _measured(name: str, processes: int) -> dict[str, float]:
    said: list[str] = []
    command = [sys.executable, "-m", "benchmarks.processes", name]
    os.environ.update(ONE_THREAD)
    if processes == 1:
        said.append(_alone(command))
    elif launch(command, processes, told=said.append):
        raise RuntimeError(f"{name}: a worker has failed")
    return json.loads(said[-1])


def _alone(command: list[str]) -> str:
    core = min(os.sched_getaffinity(0))
    done = subprocess.run(command, capture_output=True, text=True, check=True, preexec_fn=lambda: _pin(core))
    return done.stdout.strip().splitlines()[-1]


def _pin(core: int) -> None:
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, [core])


def work(name: str) -> None:
    """Trains as one of the workers; worker 0 tells the seconds of a step, and the bytes by parameter."""
    workers = Counting(workers_from(os.environ))
    model = _model(name)
    plan, data = _bert(model.config.vocab_size) if isinstance(model, BertModel) else _linear(*LINEAR[name])
    trainer = Trainer([plan], model, workers=workers)
    seconds = _seconds_a_step(trainer, plan, model, data)
    if workers.rank == 0:
        found = workers.bytes / plan.iterations / num_parameters(model)
        print(json.dumps({"seconds": seconds, "bytes": found}), flush=True)
    os._exit(0)  # threads may still wait for the other worker


def _seconds_a_step(trainer: Trainer, plan: TrainingPlan, model: Model, data: TrainingData) -> float:
    """Seconds of a step in the middle of a run, of the fastest third."""
    times: list[float] = []

    def after(step: int, state: Any, rows: Any) -> None:
        jax.block_until_ready(state)
        times.append(time.perf_counter())

    trainer.run(with_norms(data), trainer.initial_state(model.initial()), [], start=0, after=after)
    steps = np.diff(times)[2:]  # the first ones compile
    return float(np.mean(np.sort(steps)[: max(1, len(steps) // 3)]))


def _plan(graph: AttributionGraph, batch_size: int, iterations: int) -> TrainingPlan:
    selected = Greedy(contribution_bound=1).select(graph)
    certificate = certify(graph, selected)
    mechanism = PoissonSampling.from_certificate(certificate, batch_size=batch_size, iterations=iterations)
    claim = guarantee(certificate, mechanism, noise_multiplier=1.0, delta=1e-6, adjacency="zero-out", test_run=True)
    return TrainingPlan(
        certificate=certificate,
        selected=selected,
        mechanism=mechanism,
        guarantee=claim,
        clip_norm=1.0,
        learning_rate=0.01,
        run_key=RunKey.from_seed(0),
    )


def _model(name: str) -> Model:
    if name in LINEAR:
        return LogisticRegression(num_features=LINEAR[name][1])
    return BertModel.masked_lm(sequence_length=SEQUENCE)


def _linear(examples: int, num_features: int, batch_size: int) -> tuple[TrainingPlan, TrainingData]:
    graph = AttributionGraph.from_users_per_example([[user] for user in range(examples)])
    features = np.random.default_rng(0).standard_normal((examples, num_features), np.float32)
    table = FeatureTable(graph=graph, features=features, labels=(features[:, 0] > 0).astype(np.float32))
    return _plan(graph, batch_size, 60), table


def _bert(size: int) -> tuple[TrainingPlan, TrainingData]:
    graph = AttributionGraph.from_users_per_example([[user] for user in range(2000)])
    vocabulary = Vocabulary((*SPECIAL_TOKENS, *(f"w{number}" for number in range(size - len(SPECIAL_TOKENS)))))
    ids = np.random.default_rng(0).integers(len(SPECIAL_TOKENS), size, 2000 * SEQUENCE)
    texts = TokenizedTexts(
        vocabulary=vocabulary,
        sequence_length=SEQUENCE,
        ids=ids,
        offsets=np.arange(2001) * SEQUENCE,
        num_truncated=0,
        num_empty=0,
    )
    return _plan(graph, 128, 12), TokenTable(graph=graph, texts=texts)


if __name__ == "__main__":
    work(sys.argv[1])
