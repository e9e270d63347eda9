"""What does privacy cost in test loss on abstracts that belong to all their authors? (beyond the paper)

Public pre-training on other abstracts (arXiv math.AP, declared public), then fine-tuning BERT-Tiny from that checkpoint
at two epsilons and without privacy, three times each with selections, coins and noise of their own.
"""

import dataclasses
import functools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import altair as alt
import polars as pl

from coowned.content.splits import split_examples
from coowned.files import cache_folder
from coowned.runs.config import TrainConfig
from coowned.runs.configured_run import run_configuration
from coowned.runs.run_folder import RunFolder
from coowned.training.evaluate import evaluate
from experiments.framework.graphs import data_file
from experiments.framework.rows import Point, Row
from experiments.framework.verdicts import Verdict, combine, judge, unrun, with_interval

DATA = ("ACL", "math.AP", "vocabulary")
CLAIMS = ("Private fine-tuning improves on the public checkpoint, more so at a larger epsilon (ours).",)
PAGE = "docs/results.md"
PUBLIC, PRIVATE, WITHOUT = "public checkpoint", "private", "without privacy"
PRETRAINING = {"batch_size": 256, "iterations": 300, "learning_rate": 1e-3}
FINE_TUNING = {"batch_size": 256, "iterations": 200, "learning_rate": 1e-3}  # the same for all: nothing was tuned
SEQUENCE_LENGTH, BOUND, CLIP_NORM, DELTA = 32, 1, 0.5, 1e-6

GRID = {
    "ci": [{"data": "made up", "arm": PRIVATE, "epsilon": 8.0, "repetition": 0}],
    "small": [
        {"data": "ACL", "arm": PUBLIC, "repetition": 0},
        *(
            {"data": "ACL", "arm": arm, "epsilon": epsilon, "repetition": repetition}
            for repetition in range(3)
            for arm, epsilon in ((PRIVATE, 8.0), (PRIVATE, 64.0), (WITHOUT, None))
        ),
    ],
    "paper": [],
}


def run(point: Point) -> Row:
    """One training run and its test loss; the checkpoint alone is evaluated without training."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if point["data"] == "made up":
            made_up_corpus(folder)
            return trained(
                folder, made_up(folder, privacy=f"epsilon = {point['epsilon']}\ndelta = 1e-5", bound=2), folder / "run"
            )
        if point["arm"] == PUBLIC:
            return untrained(folder, fine_tuning({"epsilon": 8, "repetition": 0}))
        return trained(folder, fine_tuning(point), folder / "run")


def fine_tuning(point: Point) -> str:
    """The configuration of one private or non-private run from the public checkpoint."""
    epsilon = point["epsilon"]
    privacy = 'epsilon = "none"' if epsilon is None else f"epsilon = {epsilon}\ndelta = {DELTA}"
    return configuration(
        path=data_file("ACL"),
        privacy=privacy,
        bound=BOUND,
        seed=point["repetition"],
        clip_norm=None if epsilon is None else CLIP_NORM,
        model=f'checkpoint = "{public_checkpoint()}"',
        **FINE_TUNING,
    )


@functools.cache
def public_checkpoint(texts: str = "math.AP", sequence_length: int = SEQUENCE_LENGTH) -> Path:
    """The folder of the run on public abstracts; made once and kept, since all runs start there."""
    text = configuration(
        path=data_file(texts),
        privacy="public = true",
        bound=100_000,
        seed=0,
        clip_norm=None,
        model=f'vocabulary = "{data_file("vocabulary")}"',
        sequence_length=sequence_length,
        **PRETRAINING,
    )
    config = TrainConfig.from_toml(text + "[run]\nseed = 0\n")  # the same checkpoint on machines of one kind
    kept = cache_folder()
    folder = (kept or Path(tempfile.mkdtemp())) / "experiments" / f"checkpoint-{config.digest[:16]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with RunFolder.open(folder) as opened:
        if not opened.is_finished:
            run_configuration(config, opened)
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
    microbatch: int = 64,
    selector: str = 'selector = "greedy"',
    mechanism: str = 'kind = "dp-sgd"',
    options: str = "",
) -> str:
    """A configuration of `coowned train`; `selector` and `mechanism` are lines of their sections.

    A bound of 0 leaves it out, for a schedule.
    """
    limit = f"contribution_bound = {bound}" if bound else ""
    clipping = "" if clip_norm is None else f"clip_norm = {clip_norm}"
    return f"""
[data]
path = "{path}"
users = "users"
example_id = "example_id"
[selection]
{selector}
{limit}
seed = {seed}
[privacy]
{privacy}
[mechanism]
{mechanism}
batch_size = {batch_size}
iterations = {iterations}
{clipping}
[model]
kind = "bert-masked-lm"
sequence_length = {sequence_length}
microbatch = {microbatch}
{model}
[optimizer]
learning_rate = {learning_rate}
{options}
"""


def trained(working: Path, text: str, folder: Path) -> Row:
    started = time.perf_counter()
    with RunFolder.open(folder) as opened:
        trained = run_configuration(TrainConfig.from_toml(text, folder=working), opened)
    seconds = time.perf_counter() - started
    tested = pl.read_parquet(folder / "test.parquet").row(0, named=True)
    validated = pl.read_parquet(folder / "validation.parquet").row(0, named=True)
    guarantee = trained.plan.guarantee
    return {
        "test_loss": round(tested["loss"], 4),
        "validation_loss": round(validated["loss"], 4),
        "test_examples": tested["examples"],
        "train_examples": trained.plan.selected.copies.size,
        "size": trained.plan.certificate.size,
        "noise_multiplier": None if guarantee is None else round(guarantee.noise_multiplier, 4),
        "true_epsilon": None if guarantee is None else guarantee.epsilon,
        "seconds": round(seconds),
    }


def untrained(working: Path, text: str) -> Row:
    """What the model that a configuration starts from is worth."""
    config = TrainConfig.from_toml(text, folder=working)
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


def made_up(working: Path, **settings: Any) -> str:
    """The configuration of three steps on the made-up corpus."""
    architecture = {"vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    architecture |= {"intermediate_size": 16, "max_position_embeddings": 16, "model_type": "bert"}
    (working / "config.json").write_text(json.dumps(architecture), encoding="utf-8")
    fields = {
        "path": working / "texts.parquet",
        "seed": 0,
        "clip_norm": 1.0,
        "learning_rate": 1e-3,
        "batch_size": 8,
        "iterations": 3,
        "model": f'vocabulary = "{working / "vocab.txt"}"\narchitecture = "{working / "config.json"}"',
        "sequence_length": 12,
    }
    return configuration(**(fields | settings))


def made_up_corpus(working: Path) -> None:
    """texts.parquet and vocab.txt: sentences of twenty words by forty authors."""
    words = ["data", "privacy", "model", "user", "noise", "graph", "bound", "paper", "loss", "text"]
    words += ["the", "a", "of", "in", "we", "show", "that", "is", "and", "for"]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    (working / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    rows = [
        {
            "example_id": f"paper-{number}",
            "users": [f"author {number % 40}", f"author {(7 * number + 1) % 40}"],
            "text": " ".join(words[(number * (position + 1) + position) % len(words)] for position in range(9)),
        }
        for number in range(200)
    ]
    pl.DataFrame(rows).write_parquet(working / "texts.parquet")


def table(rows: list[Row]) -> str:
    """A Markdown table: test loss by epsilon, with the standard error over repetitions."""
    lines = [
        "| abstracts | | runs | train examples | copies in S | noise multiplier | test examples | test loss "
        "| standard error | seconds a run |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for data, arm, epsilon in dict.fromkeys((row["data"], row["arm"], row["epsilon"]) for row in rows):
        own = [row for row in rows if (row["data"], row["arm"], row["epsilon"]) == (data, arm, epsilon)]
        losses = [row["test_loss"] for row in own]
        error = f"{statistics.stdev(losses) / len(losses) ** 0.5:.4f}" if len(losses) > 1 else ""
        noise = "" if own[0]["noise_multiplier"] is None else f"{own[0]['noise_multiplier']:.3f}"
        lines.append(
            f"| {data} | {arm if epsilon is None else f'epsilon {epsilon:g}'} | {len(own)} | "
            f"{own[0]['train_examples']} | {own[0]['size']} | {noise} | {own[0]['test_examples']} | "
            f"{statistics.mean(losses):.4f} | {error} | {max(row['seconds'] for row in own):.0f} |"
        )
    return "\n".join(lines)


def _named(rows: list[Row]) -> pl.DataFrame:
    names = [row["arm"] if row["epsilon"] is None else f"epsilon {row['epsilon']:g}" for row in rows]
    return pl.DataFrame({"run": names, "test_loss": [row["test_loss"] for row in rows]})


def draw(rows: list[Row]) -> alt.LayerChart:
    """Test loss; bars: 95% intervals over runs."""
    lines = []
    for (run,), own in _named(rows).group_by("run", maintain_order=True):
        effect = combine([(1.0, own["test_loss"].to_list())]) if own.height > 1 else None
        low, high = effect.interval() if effect else (None, None)
        lines.append({"run": run, "test_loss": own["test_loss"].mean(), "low": low, "high": high})
    base = alt.Chart(pl.DataFrame(lines, infer_schema_length=None)).encode(y=alt.Y("run:N", title=None, sort="-x"))
    points = base.mark_point(filled=True).encode(x=alt.X("test_loss:Q", title="test loss").scale(zero=False))
    return (base.mark_rule().encode(x="low:Q", x2="high:Q") + points).properties(width=320, height=alt.Step(24))


def claims(rows: list[Row]) -> list[Verdict]:
    """Both steps: from the checkpoint, which is one model, to epsilon 8, and from there to 64."""
    groups = _named(rows).group_by("run", maintain_order=True)
    losses = {run: own["test_loss"].to_list() for (run,), own in groups}
    small, large = (losses.get(f"epsilon {epsilon}", []) for epsilon in (8, 64))
    if PUBLIC not in losses or min(len(small), len(large)) < 2:
        return unrun(CLAIMS)
    start = combine([(-1.0, small)])
    steps = [dataclasses.replace(start, estimate=start.estimate + losses[PUBLIC][0])]
    steps.append(combine([(1.0, small), (-1.0, large)]))
    shown = " and ".join(with_interval(step, scale=1, digits=3) for step in steps)
    found = f"test loss saved from the public checkpoint to epsilon 8, and from there to 64: {shown}"
    return [judge(CLAIMS[0], steps, found, above=0.0, seeds="0 to 2")]
