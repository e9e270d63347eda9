"""Your own model (`JaxModel`): clipped sums against jax_privacy's, memory, and the delay of the first step.

python -m benchmarks any_model
"""

import ctypes
import os
import subprocess
import sys
import tempfile
import threading
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pyarrow as pa
from jax_privacy.clipping import clipped_grad

from benchmarks.timing import Figure, interleaved
from coowned.content.example_table import KEY, USABLE
from coowned.exact.grid import Grid
from coowned.models.example_model import ExampleModel
from coowned.models.jax_model import JaxModel

INPUTS, HIDDEN, CLASSES = 784, 126, 10  # 100,180 parameters
BATCH = 1024
MICROBATCHES = (8, 16, 32, 64, 128)  # of jax_privacy; the whole batch at once takes ten times as long
LIMITS = (20, 100, 1000)  # megabytes
ROUNDS = 5


def run() -> list[Figure]:
    return [*speed_rows(), *memory_rows(), *first_step_rows()]


def loss(parameters, example, key):
    """Cross entropy of a network with one hidden layer."""
    del key
    hidden = jax.nn.relu(example["x"] @ parameters["first"]["w"] + parameters["first"]["b"])
    scores = hidden @ parameters["second"]["w"] + parameters["second"]["b"]
    return jax.nn.logsumexp(scores) - scores[example["label"]]


def make_parameters() -> dict:
    generator = np.random.default_rng(0)
    sizes = {"first": (INPUTS, HIDDEN), "second": (HIDDEN, CLASSES)}
    return {
        name: {
            "w": (generator.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32),
            "b": np.zeros(shape[1], np.float32),
        }
        for name, shape in sizes.items()
    }


def make_model(**settings) -> ExampleModel:
    schema = pa.schema({"x": pa.list_(pa.float32(), INPUTS), "label": pa.int32()})
    return JaxModel(loss=loss, parameters=make_parameters(), **settings).for_schema(schema)


def make_batch() -> dict:
    generator = np.random.default_rng(1)
    return {
        "x": generator.standard_normal((BATCH, INPUTS), np.float32),
        "label": generator.integers(0, CLASSES, BATCH, np.int32),
        KEY: generator.integers(0, 2**32, (BATCH, 2), np.uint32),
        USABLE: np.ones(BATCH, bool),
    }


def summing(model: ExampleModel, batch: dict):
    parameters = {name: jnp.asarray(array)[None] for name, array in model.initial().items()}
    mask, grids = np.ones(BATCH, bool), (Grid.for_gradients(1.0),)
    return lambda: model.clipped_sum(parameters, batch, mask, grids)


def speed_rows() -> list[Figure]:
    batch = make_batch()
    parameters = jax.tree.map(jnp.asarray, make_parameters())
    examples = {name: jnp.asarray(batch[name]) for name in ("x", "label")}

    def peer(size):
        clipped = jax.jit(
            clipped_grad(lambda p, e: loss(p, e, None), l2_clip_norm=1.0, keep_batch_dim=False, microbatch_size=size)
        )
        return lambda: jax.block_until_ready(clipped(parameters, examples))

    model = make_model()
    actions = {"ours": summing(model, batch)} | {str(size): peer(size) for size in MICROBATCHES}
    seconds = interleaved(actions, rounds=ROUNDS)
    best = min(MICROBATCHES, key=lambda size: seconds[str(size)])
    ratio = seconds[str(best)] / seconds["ours"]
    return [
        Figure(f"any model, 100k parameters, batch {BATCH}: exact clipped sum", 1e3 * seconds["ours"], "ms"),
        Figure(f"jax_privacy's clipped_grad, its best microbatch ({best})", 1e3 * seconds[str(best)], "ms"),
        Figure("against clipped_grad at its best microbatch", ratio, "x", ">= 1.0"),
        Figure("microbatch that was found", model.rows_at_once, "examples"),
    ]


def memory_rows() -> list[Figure]:
    """By how much the process grows at most while batches are summed, seen from outside, for several limits."""
    rows = []
    for limit in LIMITS:
        action = summing(make_model(memory_limit=1_000_000 * limit), make_batch())
        action()  # compiles
        used = max(_growth(action) for _ in range(ROUNDS)) / 1e6
        rows.append(Figure(f"memory of a sum under a limit of {limit} MB", used, "MB", f"<= {limit}"))
    return rows


def _growth(action) -> float:
    """Bytes by which the process grew at most while the action ran; freed memory is given back before."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    process, most, ended = psutil.Process(), 0, threading.Event()
    before = process.memory_info().rss

    def watch():
        nonlocal most
        while not ended.is_set():
            most = max(most, process.memory_info().rss)
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    action()
    ended.set()
    watcher.join()
    return max(0, most - before)


FIRST_STEP = """
import time
began = time.perf_counter()
import numpy as np
import coowned as co
from benchmarks.any_model import CLASSES, INPUTS, loss, make_parameters

count = 4096
generator = np.random.default_rng(0)
table = {
    "users": [[i] for i in range(count)],
    "x": list(generator.standard_normal((count, INPUTS), np.float32)),
    "label": generator.integers(0, CLASSES, count),
}
examples = co.from_table(table, users="users")
ready, used = time.perf_counter(), time.process_time()

class Taken(Exception):
    pass

def progress(done, text):
    if done > 0:
        raise Taken

try:
    co.fit(examples, co.JaxModel(loss=loss, parameters=make_parameters()), epsilon=8.0, delta=1e-8,
           adjacency="zero-out", selector=co.Greedy(contribution_bound=1), batch_size=1024, iterations=1000,
           progress=progress)
except Taken:
    print(time.perf_counter() - ready, time.process_time() - used, ready - began)
"""


def first_step_rows() -> list[Figure]:
    """From the call of `fit` to the end of the first step: in a first process, and in one that finds its programs."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION")}
        for which in ("nothing compiled before", "compiled once on this machine"):
            done = subprocess.run(
                [sys.executable, "-c", FIRST_STEP],
                env={**kept, "COOWNED_CACHE": folder},
                capture_output=True,
                text=True,
                check=True,
            )
            taken, processor, imported = map(float, done.stdout.split())
            bar = "" if which == "nothing compiled before" else "< 5"
            rows.append(Figure(f"fit to its first step, {which}", taken, "s", bar))
            rows.append(Figure("  of which processor time", processor, "s"))
            rows.append(Figure("  and before it: imports and making the examples", imported, "s"))
    return rows
