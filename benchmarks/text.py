"""Private BERT-Tiny against itself without privacy, jax_privacy and Opacus: speed and memory.

Sequence 128, 20 positions to predict or one class. Opacus is measured where `.venv-peers` is (`make test-peers` builds
it), ours beside it in the same process, so that the ratio is of one run.

python -m benchmarks text
"""

import functools
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import memory
from benchmarks.timing import Figure, interleaved
from coowned.exact.keys import RunKey
from coowned.exact.noise import NoiseStream
from coowned.models.bert_model import BertModel
from coowned.training.optimizers import OptimizerOptions, Rates, Rule, make_optimizer
from coowned.training.step import Step

BATCH, PEER_BATCH = 128, 32
MICROBATCHES = (1, 4, 32)  # of jax_privacy, the best of which counts
SEQUENCE = 128
PEERS_PYTHON = Path(".venv-peers/bin/python")
MEMORY_BATCH, MEMORY_SEQUENCE, MEMORY_BAR = 2048, 32, 3.0  # so many gradients at once would take 36 GB


def run() -> list[Figure]:
    masked = BertModel.masked_lm(sequence_length=SEQUENCE)
    classifier = BertModel.classifier(classes=2, sequence_length=SEQUENCE)
    steps = [*step_rows("BERT-Tiny", masked), *step_rows("a BERT-Tiny classifier", classifier)]
    return [*steps, *jax_privacy_rows(), *opacus_rows(), *memory_rows()]


def step_rows(name: str, model: BertModel) -> list[Figure]:
    """Whole steps as the loop takes them: gradient, noise, Adam."""
    batch, mask, grid = make_batch(model, BATCH), np.ones(BATCH, bool), model.grid(1.0)
    noise = NoiseStream(
        RunKey.from_seed(0),
        deviations=[grid.noise_deviation(1.0)],
        coefficients=(1.0,),
        shapes=model.shapes(),
        iterations=10**6,
    )

    rule = Rule("adam")

    def steps(private: bool) -> Callable[[], object]:
        step = Step(model, rule, Rates.of([(1e-4, 1, OptimizerOptions())]), BATCH, (grid,) if private else None)
        state = [jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], rule.initial(initial(model)))]

        def go():
            state[0], clipped = step(state[0], batch, mask, noise.next() if private else None)
            return jax.block_until_ready((state[0], clipped))

        return go

    seconds = interleaved(
        {
            "private": steps(private=True),
            "not private": steps(private=False),
            "jax.grad": automatic_steps(model, batch),
        },
        rounds=3,
    )
    plain = min(seconds["not private"], seconds["jax.grad"])  # whichever way of writing it is faster
    ratio = plain / seconds["private"]
    return [
        Figure(f"private step of {name}, batch {BATCH}", BATCH / seconds["private"], "examples/s"),
        Figure("the same without clipping and noise", BATCH / seconds["not private"], "examples/s"),
        Figure("that with jax.grad of the mean loss", BATCH / seconds["jax.grad"], "examples/s"),
        Figure("private step against the faster of these two", ratio, "x", ">= 0.6"),
    ]


def automatic_steps(model: BertModel, batch: dict[str, jax.Array]) -> Callable[[], object]:
    """A step without privacy as anybody would write it."""
    optimizer, parameters = make_optimizer("adam", 1e-4), initial(model)
    state = [(parameters, optimizer.init(parameters))]

    @jax.jit
    def step(parameters, momenta):
        slope = jax.grad(lambda own: model.losses(own, batch)[0].mean())(parameters)
        updates, momenta = optimizer.update(slope, momenta, parameters)
        return jax.tree.map(jnp.add, parameters, updates), momenta

    def go():
        state[0] = step(*state[0])
        return jax.block_until_ready(state[0])

    return go


def jax_privacy_rows() -> list[Figure]:
    """Each microbatch once to find the best, then that one and ours in turn."""
    from jax_privacy.clipping import clipped_grad

    model = BertModel.masked_lm(sequence_length=SEQUENCE)
    own, batch = initial(model), make_batch(model, BATCH)

    def peer(microbatch: int) -> Callable[[], object]:
        summed = clipped_grad(
            model.example_loss, l2_clip_norm=1.0, batch_argnums=1, keep_batch_dim=False, microbatch_size=microbatch
        )
        compiled = jax.jit(summed)
        return lambda: jax.block_until_ready(compiled(own, batch))

    actions = {f"microbatch {size}": peer(size) for size in MICROBATCHES}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # jax_privacy's, of optax
        once = interleaved(actions, rounds=1)
        best = min(once, key=lambda name: once[name])
        seconds = interleaved({"ours": clipped_sum(model, BATCH), best: actions[best]}, rounds=3)
    ratio = min(once[best], seconds[best]) / seconds["ours"]
    return [
        Figure(f"jax_privacy's clipped_grad, {name}", BATCH / taken, "examples/s") for name, taken in once.items()
    ] + [
        Figure("clipped sum", BATCH / seconds["ours"], "examples/s"),
        Figure(f"clipped sum against clipped_grad, {best}", ratio, "x", ">= 1.8"),
    ]


# ---- Opacus: in its own environment ----------------------------------------------------------------------------------


def opacus_rows() -> list[Figure]:
    if not PEERS_PYTHON.exists():
        print(f"  (Opacus is left out: no {PEERS_PYTHON}; make .venv-peers/peers.stamp)", flush=True)
        return []
    done = subprocess.run([PEERS_PYTHON, "-m", "benchmarks.text", "opacus"], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    rows = [
        Figure(f"Opacus, {mode}", value, "examples/s")
        if isinstance(value, float)
        else Figure(f"Opacus, {mode}: {value}", float("nan"), "")
        for mode, value in found["modes"].items()
    ]
    speeds = [value for value in found["modes"].values() if isinstance(value, float)]
    ratio = found["ours"] / max(speeds)
    return [*rows, Figure("clipped sum against Opacus' fastest mode that runs", ratio, "x", "> 1")]


def compare_with_opacus() -> None:
    """Prints {"ours": examples/s, "modes": {mode: examples/s or the exception}} as JSON."""
    warnings.simplefilter("ignore")
    model = BertModel.masked_lm(sequence_length=SEQUENCE)
    batch = make_batch(model, PEER_BATCH)
    actions: dict[str, Callable[[], object]] = {"ours": clipped_sum(model, PEER_BATCH)}
    failed = {}
    for mode in ("hooks", "functorch", "ew", "ghost"):
        try:
            actions[mode] = opacus_step(mode, batch)
            actions[mode]()
        except Exception as error:  # whatever it is, it is the result
            actions.pop(mode, None)
            failed[mode] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    seconds = interleaved(actions, rounds=3)
    speeds = {name: PEER_BATCH / taken for name, taken in seconds.items()}
    print(json.dumps({"ours": speeds.pop("ours"), "modes": {**speeds, **failed}}))


def opacus_step(mode: str, batch: dict) -> Callable[[], object]:
    """Forward, backward, clip and sum on transformers' model, its head only at the places to predict."""
    import torch
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}

    class AtPlaces(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = BertForMaskedLM(BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
            del self.model.cls.predictions.bias  # the decoder has the same; with both names most modes fail

        def forward(self, tokens, orders, places):
            rows = self.model.bert(
                input_ids=tokens,
                position_ids=orders,
                token_type_ids=torch.zeros_like(tokens),
                attention_mask=torch.ones_like(tokens),
            ).last_hidden_state
            return self.model.cls(torch.gather(rows, 1, places[:, :, None].expand(-1, -1, rows.shape[-1])))

    class MeanOverPlaces(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.reduction = "mean"

        def forward(self, scores, targets):
            own = torch.nn.functional.cross_entropy(scores.transpose(1, 2), targets, reduction="none").mean(1)
            return own if self.reduction == "none" else own.mean()

    tokens, places, targets = (
        torch.tensor(np.asarray(batch[name])).long() for name in ("tokens", "positions", "targets")
    )
    module, loss = AtPlaces().train(), MeanOverPlaces()
    private, optimizer, *rest = PrivacyEngine(accountant="rdp").make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(tokens), batch_size=len(tokens)),
        criterion=loss,
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    criterion = rest[0] if mode == "ghost" else loss
    orders = torch.arange(tokens.shape[1]).repeat(len(tokens), 1)

    def go():
        optimizer.zero_grad()
        criterion(private(tokens, orders, places), targets).backward()
        optimizer.step()

    return go


# ---- memory: in a process of its own ---------------------------------------------------------------------------------


def memory_rows() -> list[Figure]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.text", "memory"], capture_output=True, text=True, check=True
    )
    gigabytes = json.loads(done.stdout.splitlines()[-1])
    name = f"memory of one step beyond the model, batch {MEMORY_BATCH}, sequence {MEMORY_SEQUENCE}"
    return [Figure(name, gigabytes, "GB", f"<= {MEMORY_BAR:g}")]


def measure_memory(count: int) -> None:
    """Prints by how much a clipped sum raises the peak over what the process has with the model and its data.

    Of the second one: the first may compile.
    """
    model = BertModel.masked_lm(sequence_length=MEMORY_SEQUENCE)
    ours = clipped_sum(model, count)
    before = memory.resident()
    ours()
    memory.restart_peak()
    ours()
    print((memory.peak() - before) / 1e9)


# ---- what all of them use --------------------------------------------------------------------------------------------


def clipped_sum(model: BertModel, count: int) -> Callable[[], object]:
    own = {name: array[None] for name, array in initial(model).items()}
    batch, mask, grid = make_batch(model, count), np.ones(count, bool), model.grid(1.0)
    return lambda: model.clipped_sum(own, batch, mask, [grid])


def initial(model: BertModel) -> dict[str, jax.Array]:
    return {name: jnp.array(array) for name, array in model.initial().items()}


def make_batch(model: BertModel, count: int) -> dict[str, jax.Array]:
    """Full sequences of random words, every position to predict used: the most work an example can be."""
    generator = np.random.default_rng(0)
    length, words = model.sequence_length, model.config.vocab_size
    batch: dict[str, np.ndarray] = {
        "tokens": generator.integers(1, words, (count, length), np.int32),
        "lengths": np.full(count, length, np.int32),
    }
    if model.classes is not None:
        labels = generator.integers(0, len(model.classes), count).astype(np.float32)
        batch |= {"labels": labels, "weights": np.ones(count, np.float32)}
    else:
        (places,), _ = model.arrays()["positions"]
        order = np.tile(np.arange(length, dtype=np.int32), (count, 1))
        batch |= {
            "positions": generator.permuted(order, axis=1)[:, :places],
            "targets": generator.integers(1, words, (count, places), np.int32),
            "weights": np.full((count, places), 1 / places, np.float32),
        }
    return {name: jnp.asarray(array) for name, array in batch.items()}


if __name__ == "__main__":
    tasks = {"opacus": compare_with_opacus, "memory": functools.partial(measure_memory, MEMORY_BATCH)}
    tasks[sys.argv[1]]()
