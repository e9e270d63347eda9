"""How fast the text classifier is: from 100,000 e-mails in memory to a private model, and against no privacy.

E-mails are those of the public mailing list in ../shared/data (256 characters of each), where it is there; else texts
of as many made-up words. Without privacy the same model is trained twice: by our loop, in which XLA then sums plain
gradients, and by what one writes first, scipy's sparse matrices; the faster one counts.

python -m benchmarks text_classifier
"""

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import polars as pl
import scipy.sparse

import coowned as co
from benchmarks.timing import Figure, interleaved
from benchmarks.training import with_noise
from coowned.content.hashed_text import SparseTable
from coowned.exact.keys import RunKey
from coowned.exact.sparse_sums import ONE
from coowned.training.loop import Trainer
from coowned.training.optimizers import make_optimizer
from coowned.training.plan import TrainingPlan

MAIL = Path("../shared/data/git_mailing_list.parquet")
EXAMPLES, BATCH, STEPS, FEATURES = 100_000, 1024, 1000, 2**14
MODEL = co.TextClassifier(text="text", label="label", num_features=FEATURES)


def run() -> list[Figure]:
    examples = make_examples()
    began = time.perf_counter()
    co.fit(
        examples,
        MODEL,
        privacy=co.PrivacySettings(noise_multiplier=1.0, delta=1e-6, adjacency="zero-out"),
        selector=co.Greedy(contribution_bound=1),
        batch_size=BATCH,
        iterations=STEPS,
        clip_norm=1.0,
        learning_rate=0.01,
        seed=0,
    )
    whole = time.perf_counter() - began
    began = time.perf_counter()
    table = read(examples)
    reading = time.perf_counter() - began
    plan = make_plan(table)
    seconds = interleaved(
        {
            "private": trainer_run(plan, table),
            "plain": trainer_run(dataclasses.replace(plan, guarantee=None, clip_norm=None), table),
            "scipy": scipy_loop(plan, table),
        },
        rounds=2,
    )
    free = min(seconds["plain"], seconds["scipy"])
    at = f"{STEPS} steps of {BATCH}, 2^14 features"
    return [
        Figure(f"end to end, {EXAMPLES:,} e-mails, {at}", whole, "s", "<= 60"),
        Figure(f"hashing {EXAMPLES:,} e-mails, {len(table.values) / EXAMPLES:.0f} features each", reading, "s"),
        Figure(f"private, {at}", seconds["private"], "s"),
        Figure(
            "against the faster without privacy",
            free / seconds["private"],
            "x",
            ">= 0.7",
        ),
        Figure("our loop without privacy", seconds["plain"], "s"),
        Figure("scipy's sparse matrices and Adam", seconds["scipy"], "s"),
    ]


def make_examples() -> co.AttributedExamples:
    """Every e-mail has a user of its own: all are selected."""
    if MAIL.is_file():
        texts = pl.read_parquet(MAIL, columns=["text"], n_rows=EXAMPLES)["text"]
    else:
        generator = np.random.default_rng(0)
        words = np.array(["".join(chr(97 + c) for c in generator.integers(0, 26, 6)) for _ in range(20_000)])
        texts = pl.Series([" ".join(words[generator.zipf(1.3, 40) % words.size]) for _ in range(EXAMPLES)])
    table = pl.DataFrame({"text": texts, "label": texts.str.starts_with("Re:").cast(pl.Int8)})
    users = pl.Series("users", [[f"user {row}"] for row in range(len(table))])
    return co.from_table(table.with_columns(users))


def read(examples: co.AttributedExamples) -> SparseTable:
    _, table, _ = MODEL.task(examples.payload.schema, folder=Path(), is_private=True).read(examples)
    return table  # pyright: ignore[reportReturnType]


def make_plan(table: SparseTable) -> TrainingPlan:
    selection = co.Greedy(contribution_bound=1).select(table.graph)
    certificate = co.certify(table.graph, selection)
    first = TrainingPlan(
        certificate=certificate,
        selected=selection,
        mechanism=co.PoissonSampling.from_certificate(certificate, batch_size=BATCH, iterations=STEPS),
        guarantee=None,
        clip_norm=1.0,
        learning_rate=0.01,
        run_key=RunKey.from_seed(0),
    )
    return dataclasses.replace(first, guarantee=with_noise(first, 1.0))


def trainer_run(plan: TrainingPlan, table: SparseTable) -> Callable[[], object]:
    trainer = Trainer([plan], MODEL)
    return lambda: trainer.train(table, MODEL.initial())


def scipy_loop(plan: TrainingPlan, table: SparseTable) -> Callable[[], object]:
    """The same batches without clipping and noise: two sparse products a step."""
    values = table.values.astype(np.float32) / ONE
    matrix = scipy.sparse.csr_matrix((values, table.indices.astype(np.int32), table.offsets), (EXAMPLES, FEATURES))
    optimizer, batches = make_optimizer("adam", plan.learning_rate), plan.batches()
    update = jax.jit(lambda gradient, state: optimizer.update(gradient, state))

    def go():
        coefficients = np.zeros(FEATURES + 1, np.float32)
        state = optimizer.init(coefficients)
        for batch in batches:
            drawn = batch.examples[: batch.num_copies]
            rows = matrix[drawn]
            residuals = 1 / (1 + np.exp(-(rows @ coefficients[:-1] + coefficients[-1]))) - table.labels[drawn]
            gradient = np.append(rows.T @ residuals, residuals.sum()).astype(np.float32) / BATCH
            change, state = update(gradient, state)
            coefficients = coefficients + np.asarray(change)
        return coefficients

    return go
