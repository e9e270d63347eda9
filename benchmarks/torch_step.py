"""A private step of a small PyTorch transformer against every mode of Opacus that runs it: speed and memory.

Batch 256, sequences of 64 tokens. Both sides clip, add noise and take a step of plain gradient descent, on one core, in
turn; seconds are of processor time. Everything runs where `.venv-peers` is (`make test-peers` builds it).

python -m benchmarks torch_step
"""

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import memory
from benchmarks.timing import Figure, interleaved

PEERS_PYTHON = Path(".venv-peers/bin/python")
WORDS, WIDTH, LAYERS, HEADS, LENGTH = 1000, 128, 2, 4, 64
BATCH, MODES = 256, ("hooks", "functorch", "ew", "ghost")
LIMIT, BATCHES = 200, (256, 2048)  # megabytes that a microbatch may take, and logical batches


def run() -> list[Figure]:
    if not PEERS_PYTHON.exists():
        print(f"  (left out: no {PEERS_PYTHON}; make .venv-peers/peers.stamp)", flush=True)
        return []
    rows = []
    found = in_peers("speed")
    for name, value in found.items():
        rows.append(
            Figure(f"{name}: {value}", float("nan"), "")
            if isinstance(value, str)
            else Figure(f"{name}, batch {BATCH}", BATCH / value, "examples/s")
        )
    fastest = min(value for name, value in found.items() if name != "ours" and not isinstance(value, str))
    ratio = fastest / found["ours"]
    rows.append(Figure("private step against Opacus' fastest mode", ratio, "x", ">= 0.9"))
    for batch in BATCHES:
        taken = in_peers("memory", str(batch))
        rows.append(Figure(f"memory of a step, batch {batch}", taken, "MB", f"<= {LIMIT}"))
    return rows


def in_peers(*words: str, module: str = "benchmarks.torch_step") -> Any:
    command = [PEERS_PYTHON, "-m", module, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


# ---- the module and its loss -----------------------------------------------------------------------------------------


def make_module() -> Any:
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.attention, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x):
            count, length, _ = x.shape
            split = self.attention(self.before(x)).reshape(count, length, 3, HEADS, WIDTH // HEADS)
            query, key, value = split.permute(2, 0, 3, 1, 4)
            seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.project(seen.transpose(1, 2).reshape(count, length, WIDTH))
            return x + self.down(nn.functional.gelu(self.up(self.after(x))))

    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
            self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

        def forward(self, tokens, positions):
            x = self.words(tokens) + self.positions(positions)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    torch.manual_seed(0)
    return Transformer()


def loss(module: Any, example: Any) -> Any:
    import torch

    scores = module(example["tokens"][None], torch.arange(LENGTH)[None])[0]
    return torch.nn.functional.cross_entropy(scores, example["targets"])


def make_batch(count: int) -> dict[str, np.ndarray]:
    from coowned.content.example_table import KEY, USABLE

    words = np.random.default_rng(0).integers(0, WORDS, (count, LENGTH + 1), np.int32)
    return {
        "tokens": np.ascontiguousarray(words[:, :-1]),
        "targets": np.ascontiguousarray(words[:, 1:]),
        KEY: np.zeros((count, 2), np.uint32),
        USABLE: np.ones(count, bool),
    }


def make_model(memory_limit: str = "1GB") -> Any:
    import pyarrow as pa

    from coowned.torch import TorchModel

    kind = pa.list_(pa.int32(), LENGTH)
    model = TorchModel(module=make_module(), loss=loss, columns=["tokens", "targets"], memory_limit=memory_limit)
    return model.for_schema(pa.schema({"tokens": kind, "targets": kind}))


# ---- speed -----------------------------------------------------------------------------------------------------------


def our_steps() -> Callable[[], object]:
    """Whole steps as the loop takes them: clipped sum, noise, optimizer."""
    from coowned.exact.keys import RunKey
    from coowned.exact.noise import NoiseStream, release

    model, batch = make_model(), make_batch(BATCH)
    grid = model.grid(1.0)
    noise = NoiseStream(
        RunKey.from_seed(0),
        deviations=[grid.noise_deviation(1.0)],
        coefficients=(1.0,),
        shapes=model.shapes(),
        iterations=10**6,
    )
    parameters = {name: array[None] for name, array in model.initial().items()}
    mask, units = np.ones(BATCH, bool), np.array([grid.unit])

    def go():
        sums, _ = model.clipped_sum(parameters, batch, mask, [grid])
        for name, slope in release(sums, noise.next(), units, BATCH).items():
            parameters[name] = parameters[name] - np.float32(0.0) * slope

    return go


def opacus_steps(mode: str) -> Callable[[], object]:
    import torch
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    class MeanOverTokens(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.reduction = "mean"

        def forward(self, scores, targets):
            flat = torch.nn.functional.cross_entropy(scores.reshape(-1, WORDS), targets.reshape(-1), reduction="none")
            own = flat.reshape(targets.shape).mean(1)
            return own if self.reduction == "none" else own.mean()

    batch = make_batch(BATCH)
    tokens, targets = (torch.tensor(batch[name]).long() for name in ("tokens", "targets"))
    positions = torch.arange(LENGTH).repeat(BATCH, 1)
    module, criterion = make_module().train(), MeanOverTokens()
    private, optimizer, *rest = PrivacyEngine(accountant="rdp").make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(tokens), batch_size=BATCH),
        criterion=criterion,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    used = rest[0] if mode == "ghost" else criterion

    def go():
        optimizer.zero_grad()
        used(private(tokens, positions), targets).backward()
        optimizer.step()

    return go


def measure_speed(rounds: int = 3) -> None:
    """Prints {"ours" or "Opacus, mode": seconds of a step, or the exception} as JSON."""
    warnings.simplefilter("ignore")
    actions: dict[str, Callable[[], object]] = {"ours": our_steps()}
    failed = {}
    for mode in MODES:
        try:
            action = opacus_steps(mode)
            action()
            actions[f"Opacus, {mode}"] = action
        except Exception as error:  # whatever it is, it is the result
            failed[f"Opacus, {mode}"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    print(json.dumps(interleaved(actions, rounds=rounds, clock=time.process_time) | failed))


# ---- memory ----------------------------------------------------------------------------------------------------------


def measure_memory(count: int) -> None:
    """Prints by how many megabytes a clipped sum raises the peak, with everything that finds its microbatch."""
    warnings.simplefilter("ignore")
    batch, small = make_batch(count), make_model()
    mask = np.ones(count, bool)
    tiny = {name: array[None] for name, array in small.initial().items()}
    small.clipped_sum(tiny, make_batch(2), np.ones(2, bool), [small.grid(1.0)])  # kernels are compiled
    del small, tiny
    model = make_model(f"{LIMIT}MB")
    parameters = {name: array[None] for name, array in model.initial().items()}
    memory.restart_peak()
    before = memory.resident()
    model.clipped_sum(parameters, batch, mask, [model.grid(1.0)])
    print((memory.peak() - before) / 1e6)


if __name__ == "__main__":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # threads that wait for one another would be counted
    if sys.argv[1] == "speed":
        measure_speed()
    else:
        measure_memory(int(sys.argv[2]))
