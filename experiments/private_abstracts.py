"""BERT-Tiny on ACL abstracts that belong to all their authors: what an epsilon costs in test loss.

Public pre-training on other abstracts (arXiv math.AP, declared public), then fine-tuning from that checkpoint at two
epsilons and without privacy, three times each with selections, coins and noise of their own. Everything goes through
`coowned train`'s configuration; the first point is a small made-up corpus that the tests run.
"""

import functools
import json
import statistics
import tempfile
import time
from pathlib import Path

import polars as pl

from coowned.cache import cache_folder
from coowned.training.checkpoint import RunFolder
from coowned.training.config import TrainConfig
from coowned.training.configured_run import run_configuration
from coowned.training.evaluate import evaluate
from coowned.training.splits import split_examples

DATA = Path(__file__).parents[2] / "shared" / "data"
PRETRAINING = {"batch_size": 256, "iterations": 300, "learning_rate": 1e-3}
FINE_TUNING = {"batch_size": 256, "iterations": 200, "learning_rate": 1e-3}  # the same for all: nothing was tuned
SEQUENCE_LENGTH, BOUND, CLIP_NORM, DELTA = 32, 1, 0.5, 1e-6

GRID = [
    {"data": "made up", "epsilon": 8, "repetition": 0},
    {"data": "ACL", "epsilon": "checkpoint", "repetition": 0},
    *(
        {"data": "ACL", "epsilon": epsilon, "repetition": repetition}
        for repetition in range(3)
        for epsilon in (8, 64, None)
    ),
]


def run(point: dict) -> dict:
    """One training run and its test loss; the checkpoint alone is evaluated without training."""
    with tempfile.TemporaryDirectory() as room:
        place = Path(room)
        if point["data"] == "made up":
            made_up_corpus(place)
            return point | _trained(place, _made_up(place, point), place / "run")
        if point["epsilon"] == "checkpoint":
            return point | _untrained(place)
        return point | _trained(place, fine_tuning(point), place / "run")


def fine_tuning(point: dict) -> str:
    """The configuration of one private or non-private run from the public checkpoint."""
    epsilon = point["epsilon"]
    privacy = 'epsilon = "none"' if epsilon is None else f"epsilon = {epsilon}\ndelta = {DELTA}"
    return configuration(
        path=DATA / "acl_anthology_abstracts.parquet",
        privacy=privacy,
        bound=BOUND,
        seed=point["repetition"],
        clip_norm=None if epsilon is None else CLIP_NORM,
        model=f'checkpoint = "{public_checkpoint()}"',
        **FINE_TUNING,
    )


@functools.cache
def public_checkpoint() -> Path:
    """The folder of the run on public abstracts; made once and kept, since all runs start there."""
    text = configuration(
        path=DATA / "arxiv_mathAP_text.parquet",
        privacy="public = true",
        bound=100_000,
        seed=0,
        clip_norm=None,
        model=f'vocabulary = "{DATA / "vocab.txt"}"',
        **PRETRAINING,
    )
    config = TrainConfig.from_toml(text)
    kept = cache_folder()
    folder = (kept or Path(tempfile.mkdtemp())) / "experiments" / f"checkpoint-{config.digest[:16]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with RunFolder.open(folder) as opened:
        if not opened.is_finished:
            run_configuration(config, opened, text=text)
    return folder


def configuration(
    *,
    path: Path,
    privacy: str,
    bound: int,
    seed: int,
    clip_norm: float | None,
    learning_rate: float,
    batch_size: int,
    iterations: int,
    model: str,
    sequence_length: int = SEQUENCE_LENGTH,
) -> str:
    clipping = "" if clip_norm is None else f"clip_norm = {clip_norm}"
    return f"""
[data]
path = "{path}"
users = "users"
example_id = "example_id"
[selection]
selector = "greedy"
contribution_bound = {bound}
seed = {seed}
[privacy]
{privacy}
[mechanism]
kind = "dp-sgd"
batch_size = {batch_size}
iterations = {iterations}
{clipping}
[model]
kind = "bert-masked-lm"
sequence_length = {sequence_length}
microbatch = 64
{model}
[optimizer]
learning_rate = {learning_rate}
"""


def _trained(place: Path, text: str, folder: Path) -> dict:
    started = time.perf_counter()
    with RunFolder.open(folder) as opened:
        trained = run_configuration(TrainConfig.from_toml(text, folder=place), opened, text=text)
    seconds = time.perf_counter() - started
    tested = pl.read_parquet(folder / "test.parquet").row(0, named=True)
    validated = pl.read_parquet(folder / "validation.parquet").row(0, named=True)
    made = trained.plan.guarantee
    return {
        "test_loss": round(tested["loss"], 4),
        "validation_loss": round(validated["loss"], 4),
        "test_examples": tested["examples"],
        "train_examples": trained.plan.selected.copies.size,
        "size": trained.plan.certificate.size,
        "noise_multiplier": None if made is None else round(made.noise_multiplier, 4),
        "seconds": round(seconds),
    }


def _untrained(place: Path) -> dict:
    config = TrainConfig.from_toml(fine_tuning({"epsilon": 8, "repetition": 0}), folder=place)
    examples = config.source().read()
    parts = split_examples(examples.graph, config.splits)
    task = config.task(examples.payload.schema)
    content = task.load(examples, parts)
    losses = {}
    for name in ("test", "validation"):
        found = evaluate(content.model, task.initial or {}, content.parts[name], split=name)
        losses[name] = found.row(0, named=True)
    return {
        "test_loss": round(losses["test"]["loss"], 4),
        "validation_loss": round(losses["validation"]["loss"], 4),
        "test_examples": losses["test"]["examples"],
        "train_examples": len(parts["train"]),
        "size": 0,
        "noise_multiplier": None,
        "seconds": 0,
    }


def _made_up(place: Path, point: dict) -> str:
    architecture = {"vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    architecture |= {"intermediate_size": 16, "max_position_embeddings": 16, "model_type": "bert"}
    (place / "config.json").write_text(json.dumps(architecture), encoding="utf-8")
    return configuration(
        path=place / "texts.parquet",
        privacy=f"epsilon = {point['epsilon']}\ndelta = 1e-5",
        bound=2,
        seed=0,
        clip_norm=1.0,
        learning_rate=1e-3,
        batch_size=8,
        iterations=3,
        model=f'vocabulary = "{place / "vocab.txt"}"\narchitecture = "{place / "config.json"}"',
        sequence_length=12,
    )


def made_up_corpus(place: Path) -> None:
    """texts.parquet and vocab.txt: sentences of twenty words by forty authors."""
    words = ["data", "privacy", "model", "user", "noise", "graph", "bound", "paper", "loss", "text"]
    words += ["the", "a", "of", "in", "we", "show", "that", "is", "and", "for"]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    (place / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    rows = [
        {
            "example_id": f"paper-{number}",
            "users": [f"author {number % 40}", f"author {(7 * number + 1) % 40}"],
            "text": " ".join(words[(number * (place_in + 1) + place_in) % len(words)] for place_in in range(9)),
        }
        for number in range(200)
    ]
    pl.DataFrame(rows).write_parquet(place / "texts.parquet")


def draw(rows: list[dict]) -> str:
    """A Markdown table: test loss by epsilon, with the standard error over repetitions."""
    lines = [
        "| abstracts | | runs | train examples | copies in S | noise multiplier | test examples | test loss "
        "| standard error | seconds a run |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    names = {"checkpoint": "the public checkpoint", None: "without privacy"}
    for data, epsilon in dict.fromkeys((row["data"], row["epsilon"]) for row in rows):
        own = [row for row in rows if (row["data"], row["epsilon"]) == (data, epsilon)]
        losses = [row["test_loss"] for row in own]
        error = f"{statistics.stdev(losses) / len(losses) ** 0.5:.4f}" if len(losses) > 1 else ""
        noise = "" if own[0]["noise_multiplier"] is None else f"{own[0]['noise_multiplier']:.3f}"
        lines.append(
            f"| {data} | {names.get(epsilon, f'epsilon {epsilon}')} | {len(own)} | {own[0]['train_examples']} | "
            f"{own[0]['size']} | {noise} | {own[0]['test_examples']} | {statistics.mean(losses):.4f} | {error} | "
            f"{max(row['seconds'] for row in own)} |"
        )
    return "\n".join(lines)
