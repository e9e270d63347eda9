"""What closes the gap between a private model and one without privacy, at the same epsilon? (beyond the paper)

Everything here follows the noise, is covered by the clip, or touches public numbers alone: options of the optimizer,
averages of the iterates, a larger batch for fewer steps at the same number of examples, scaled gradients. Three tasks:
words hidden in ACL abstracts, the paper's logistic world, and the period of a mailing list's messages, from their date.
"""

import functools
import itertools
import json
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import altair as alt
import numpy as np
import polars as pl
from scipy import stats

import coowned as co
from coowned.content.data import FeatureTable, TrainingData, with_norms
from coowned.content.splits import split_examples
from coowned.files import cache_folder, write_file
from coowned.models.model import Model
from coowned.runs.config import TrainConfig
from coowned.runs.configured_run import make_plan, run_configuration
from coowned.runs.run_folder import RunFolder
from coowned.synthetic.toy_emails import hashed_words
from coowned.training.evaluate import example_losses
from coowned.training.loop import Trainer
from experiments import private_abstracts
from experiments.framework import logistic
from experiments.framework.graphs import FILES, data_file
from experiments.framework.rows import Point, Row, read_rows
from experiments.framework.verdicts import LEVEL, UNRESOLVED, Effect, Verdict, combine, judge, unrun, with_interval

DATA = ("ACL", "math.AP", "mailing list", "vocabulary")
CLAIMS = (
    "A decaying learning rate and averaged iterates never cost accuracy at the same epsilon (ours).",
    "Larger batches in fewer steps, at the same number of examples, lower the loss (ours).",
    "Half of the gap at epsilon 8 on ACL abstracts is closed (ours).",
    "Training the output bias alone is better than training every parameter, at less compute (ours).",
)
PAGE = "docs/results.md"
ACL, LOGISTIC, MAIL, MADE_UP = "ACL", "logistic", "mailing list", "made up"
LAST, TAIL, EXPONENTIAL = "last", "tail", "exponential"
WINDOW = 0.25

DECAY = 'warmup = 0.05\ndecay = "cosine"'


class TextArm(NamedTuple):
    """A way to train on text.

    Attributes:
      public_text: how far the public checkpoint is trained on further public text, as an index of `FURTHER`; 0: not.
      trainable: patterns of the parameters that are trained; all of them by default.
    """

    batch_size: int
    iterations: int
    learning_rate: float
    options: str
    public_text: int = 0
    trainable: tuple[str, ...] = ("*",)


# Rates of the arms that train everything were chosen beforehand, so that noise moves a parameter about as far as it did
# before. Optimizer and rate of the output bias were chosen on validation at epsilon 8, from "more public text" and one
# seed; like the paper's tuning, this is not counted in epsilon.
BIAS = TextArm(2048, 50, 6.0, f'{DECAY}\nname = "yogi"', trainable=("cls.predictions.bias",))
TEXT_ARMS = {
    "cosine": TextArm(256, 200, 2e-3, DECAY),
    "batch 2048, cosine": TextArm(2048, 25, 3e-3, DECAY),
    "batch 2048, cosine, scaled": TextArm(2048, 25, 3e-3, f"{DECAY}\nscale_gradients = true"),
    "batch 2048, cosine, more public text": TextArm(2048, 25, 3e-3, DECAY, 1),
    "output bias": BIAS,
    "output bias, more public text": BIAS._replace(public_text=1),
    "output bias, most public text": BIAS._replace(public_text=2),
}
ALL_PARAMETERS = {  # what each arm of the output bias is compared with: the same public checkpoint
    "output bias": ("cosine", "batch 2048, cosine", "batch 2048, cosine, scaled"),
    "output bias, more public text": ("batch 2048, cosine, more public text",),
}
DECIDING = "output bias, most public text"
FURTHER = (  # public pre-training: file of texts, every n-th message in it, steps, batch size, learning rate
    ("public-texts.parquet", 7, 350, 256, 2e-3),
    ("public-texts-2.parquet", 2, 1800, 128, 3e-3),
)
LINEAR_BATCHES, DRAWN, FEATURES = (256, 2048), 204_800, 256
RATES, CLIP_NORMS = (0.003, 0.01, 0.03, 0.1), (1.0, 0.3, 0.1, 0.03)
LATER = "2013"  # the year from which a message counts as later: about half of the archive


def _text(arms: list[str], epsilons: tuple, repetitions: range, task: str = ACL) -> list[Point]:
    return [
        {"task": task, "arm": arm, "epsilon": epsilon, "repetition": repetition}
        for repetition, epsilon, arm in itertools.product(repetitions, epsilons, arms)
    ]


GRID = {
    "ci": [
        *_text(["batch 2048, cosine, scaled"], (8.0,), range(1), MADE_UP),
        {"task": LOGISTIC, "arm": "batch 32", "epsilon": 8.0, "repetition": 0, "examples": 2_000},
    ],
    "small": [
        *(
            {"task": task, "arm": f"batch {size}", "epsilon": epsilon, "repetition": repetition, "examples": examples}
            for task, examples in ((LOGISTIC, 50_000), (MAIL, 400_000))
            for repetition, epsilon, size in itertools.product(range(3), (8.0, 64.0), LINEAR_BATCHES)
        ),
        *_text(list(TEXT_ARMS), (8.0,), range(1)),
        *_text([DECIDING], (64.0,), range(1)),
        *_text([DECIDING], (8.0, 64.0), range(1, 3)),
    ],
    "paper": [],
}


def run(point: Point) -> Row:
    """One training, or one sweep; lists have an entry for every variant that it gives."""
    if point["task"] in (ACL, MADE_UP):
        return _train_text(point)
    return _sweep_linear(point)


# ---- text ------------------------------------------------------------------------------------------------------------


def _train_text(point: Point) -> Row:
    arm = TEXT_ARMS[point["arm"]]
    with tempfile.TemporaryDirectory() as temporary:
        working = Path(temporary)
        privacy = f"epsilon = {point['epsilon']}\ndelta = {private_abstracts.DELTA}"
        settings: dict[str, Any] = {
            "privacy": privacy,
            "bound": 1,
            "seed": point["repetition"],
            "learning_rate": arm.learning_rate,
            "options": arm.options,
        }
        if point["task"] == MADE_UP:
            private_abstracts.made_up_corpus(working)
            text = private_abstracts.made_up(working, **settings)
        else:
            checkpoint = public_checkpoint(arm.public_text)
            text = private_abstracts.configuration(
                **settings,
                path=data_file(ACL),
                clip_norm=private_abstracts.CLIP_NORM,
                batch_size=arm.batch_size,
                iterations=arm.iterations,
                model=f'checkpoint = "{checkpoint}"\ntrainable = {json.dumps(arm.trainable)}',
            )
        config = TrainConfig.from_toml(text, folder=working)
        examples = config.source().read()
        splits = split_examples(examples.graph, config.splits)
        plan = make_plan(config, examples.graph.subgraph(splits["train"]), co.RunKey.from_operating_system())
        task = config.task(examples.payload.schema)
        content = task.load(examples, splits, plan.selected.copies)
    averages = Averages(plan.iterations)
    trainer = Trainer([plan], content.model)
    start = trainer.initial_state(task.initial or content.model.initial())
    trainer.run(with_norms(content.parts["train"]), start, [], start=0, after=averages)
    kept = averages.kept()
    losses = [_mean_loss(content.model, kept[name], content.parts["test"]) for name in kept]
    return {
        "variant": list(kept),
        "test_loss": losses,
        "start_loss": _mean_loss(content.model, task.initial or content.model.initial(), content.parts["test"]),
        "accuracy": [None] * len(kept),
        "size": plan.certificate.size,
        "noise_multiplier": round(plan.noise_multiplier, 4),
    }


@functools.cache
def public_checkpoint(public_text: int) -> Path:
    """The public checkpoint, trained further on math.AP and the mailing list, both declared public for this purpose."""
    if not public_text:
        return private_abstracts.public_checkpoint()
    file, every, iterations, batch_size, rate = FURTHER[public_text - 1]
    folder = (cache_folder() or Path(tempfile.mkdtemp())) / "experiments"
    folder.mkdir(parents=True, exist_ok=True)
    texts = folder / file
    if not texts.exists():
        parts = [_texts("math.AP", 1), _texts(MAIL, every)]
        write_file(texts, pl.concat(parts).with_columns(users=pl.concat_list("example_id")).write_parquet)
    text = private_abstracts.configuration(
        path=texts,
        privacy="public = true",
        bound=1,
        seed=0,
        clip_norm=None,
        batch_size=batch_size,
        iterations=iterations,
        learning_rate=rate,
        model=f'checkpoint = "{public_checkpoint(public_text - 1)}"',
        options=DECAY,
    )
    config = TrainConfig.from_toml(text)
    with RunFolder.open(folder / f"checkpoint-{config.digest[:16]}") as opened:
        if not opened.is_finished:
            run_configuration(config, opened)
    return opened.path


def _texts(name: str, every: int) -> pl.DataFrame:
    texts = pl.read_parquet(data_file(name), columns=["text"]).with_row_index("row").gather_every(every)
    return texts.select(pl.format("{}-{}", pl.lit(FILES[name]), "row").alias("example_id"), "text")


class Averages:
    """The last iterate and both averages of one training, which any of them would have released."""

    def __init__(self, iterations: int):
        self._window = max(1, round(WINDOW * iterations))
        self._begin = iterations - self._window
        self._sums: dict[str, dict[str, Any]] = {}

    def __call__(self, step: int, state: Any, rows: list) -> None:
        own = {name: np.array(array[0], np.float64) for name, array in state[0].items()}
        decay = (self._window - 1) / (self._window + 1)
        weights = {LAST: (0.0, 1.0), TAIL: (1.0, 1.0 if step >= self._begin else 0.0), EXPONENTIAL: (decay, 1.0)}
        for name, (old, new) in weights.items():
            sums = self._sums.setdefault(name, {"weight": 0.0, **dict.fromkeys(own, 0.0)})
            sums["weight"] = old * sums["weight"] + new
            for parameter, array in own.items():
                sums[parameter] = old * sums[parameter] + new * array

    def kept(self) -> dict[str, dict[str, np.ndarray]]:
        return {
            name: {
                key: np.asarray(array / sums["weight"], np.float32) for key, array in sums.items() if key != "weight"
            }
            for name, sums in self._sums.items()
        }


def _mean_loss(model: Model, parameters: Mapping[str, np.ndarray], data: TrainingData) -> float:
    losses, _ = example_losses(model, parameters, data)
    return round(float(losses[np.isfinite(losses)].mean()), 4)


# ---- linear models ---------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _linear_data(task: str, num_examples: int) -> tuple[co.AttributionGraph, np.ndarray, np.ndarray]:
    """(graph, features, labels) of so many examples."""
    if task == LOGISTIC:
        world = logistic.make_world("skewed", num_examples, 2, FEATURES)
        return world.graph, *world.batch(np.arange(num_examples))
    table = pl.read_parquet(data_file(MAIL), columns=["users", "text", "date"])
    table = table.sample(num_examples, seed=0)
    graph = co.from_table(table, users="users").graph
    words = hashed_words(table["text"].fill_null(""), FEATURES)
    return graph, words, (table["date"] >= LATER).to_numpy().astype(np.int8)


def _sweep_linear(point: Point) -> Row:
    """Every option with every learning rate and clip norm, in one pass; the learning rate is best on validation."""
    graph, features, labels = _linear_data(point["task"], point["examples"])
    order = np.random.default_rng(point["repetition"]).permutation(graph.num_examples)
    train, validation, test = np.split(order, [len(order) * 8 // 10, len(order) * 9 // 10])
    train = np.sort(train)
    part = graph.subgraph(train)
    selection = co.Greedy(contribution_bound=2).select(part, seed=point["repetition"])
    certificate = co.certify(part, selection)
    batch_size = int(point["arm"].split()[1])
    mechanism = co.PoissonSampling.from_certificate(
        certificate, batch_size=batch_size, iterations=max(1, min(DRAWN, 4 * len(order)) // batch_size)
    )
    plans = co.grid(
        certificate,
        selection,
        mechanism,
        epsilons=[point["epsilon"]],
        delta=1e-6,
        adjacency="zero-out",
        learning_rates=RATES,
        clip_norms=CLIP_NORMS,
        run_key=co.RunKey.from_operating_system(),
        decay=["constant", "cosine"],
        average=["none", TAIL, EXPONENTIAL],
        weight_decay=[0.0, 0.1],
    )
    swept = co.sweep(
        plans,
        co.LogisticRegression(num_features=FEATURES),
        FeatureTable(graph=part, features=features[train], labels=labels[train]),
    )
    found = {
        name: swept.compare(
            FeatureTable(graph=graph.subgraph(rows), features=features[rows], labels=labels[rows]), split=name
        )
        for name, rows in (("validation", validation), ("test", test))
    }
    variants = [_variant(plan) for plan in plans]
    table = found["test"].with_columns(
        pl.Series("variant", variants), found["validation"]["loss"].alias("validation"), clip=pl.col("clip_norm")
    )
    best = table.sort("validation").unique(["variant", "clip"], keep="first").sort("variant", "clip")
    return {
        "variant": best["variant"].to_list(),
        "test_loss": best["loss"].to_list(),
        "accuracy": best["accuracy"].to_list(),
        "clip_norm": best["clip"].to_list(),
        "learning_rate": best["learning_rate"].to_list(),
        "size": certificate.size,
        "noise_multiplier": round(plans[0].noise_multiplier, 4),
    }


def _variant(plan: co.TrainingPlan) -> str:
    average = LAST if plan.average == "none" else plan.average
    return f"{plan.decay}, {average}" + (", weight decay" if plan.weight_decay else "")


# ---- what was found --------------------------------------------------------------------------------------------------


def before() -> dict[float | None, list[float]]:
    """Test losses on ACL by epsilon, None without privacy, with a constant rate: the rows of `private_abstracts`."""
    found: dict[float | None, list[float]] = {}
    for row in read_rows("private_abstracts"):
        if row["size"]:
            found.setdefault(row["epsilon"], []).append(row["test_loss"])
    return found


BY = ["task", "epsilon", "arm", "variant"]


def _lines(rows: list[Row]) -> pl.DataFrame:
    """One line a row and variant, with a clip norm of 0 where there is one alone."""
    lists = ["variant", "test_loss", "accuracy", "clip_norm", "learning_rate"]
    filled = [row | {name: row.get(name) or [None] * len(row["variant"]) for name in lists} for row in rows]
    for row in filled:
        if row["arm"] in TEXT_ARMS:
            row["variant"] = [f"cosine, {name}" for name in row["variant"]]
    table = pl.DataFrame(filled, infer_schema_length=None).explode(lists)
    return table.with_columns(pl.col("clip_norm").cast(pl.Float64).fill_null(0.0))


def results(rows: list[Row]) -> pl.DataFrame:
    """One line a variant: the mean over repetitions, at the clip norm that is best on average."""
    means = (
        _lines(rows)
        .group_by(*BY, "clip_norm")
        .agg(
            pl.col("test_loss", "accuracy").mean(),
            pl.len().alias("runs"),
            (pl.col("test_loss").std() / pl.len().sqrt()).alias("error"),
        )
    )
    return means.sort("test_loss").unique(BY, keep="first").sort(BY)


COLUMNS = (
    "constant, last",
    "constant, tail",
    "constant, exponential",
    "cosine, last",
    "cosine, tail",
    "cosine, exponential",
    "cosine, tail, weight decay",
)


def table(rows: list[Row]) -> str:
    """A Markdown table: test loss by rate and what of the iterates is released."""
    lines = [
        f"| task | epsilon | training | runs | {' | '.join(COLUMNS)} |",
        "|---|---:|---|" + "---:|" * (len(COLUMNS) + 1),
    ]
    found = results(rows)
    for task, epsilon, arm in found.select("task", "epsilon", "arm").unique(maintain_order=True).rows():
        own = found.filter(task=task, epsilon=epsilon, arm=arm)
        losses = dict(zip(own["variant"], own["test_loss"], strict=True))
        shown = (f"{losses[name]:.4f}" if name in losses else "" for name in COLUMNS)
        lines.append(f"| {task} | {epsilon:g} | {arm} | {own['runs'].max()} | {' | '.join(shown)} |")
    return "\n".join(lines)


def draw(rows: list[Row]) -> alt.FacetChart:
    """Test loss of every variant; bars: 95% intervals over repetitions."""
    half = pl.col("error") * pl.col("runs").map_elements(lambda runs: stats.t.ppf(0.975, runs - 1), pl.Float64)
    shown = results(rows).with_columns(
        pl.format("epsilon {}", pl.col("epsilon").cast(pl.Int64)).alias("epsilon"),
        (pl.col("test_loss") - half).fill_nan(None).alias("low"),
        (pl.col("test_loss") + half).fill_nan(None).alias("high"),
    )
    base = alt.Chart(shown).encode(y=alt.Y("arm:N", title=None), color=alt.Color("variant:N", title="options"))
    points = base.mark_point(filled=True).encode(x=alt.X("test_loss:Q", title="test loss").scale(zero=False))
    return (
        (base.mark_rule().encode(x="low:Q", x2="high:Q") + points)
        .properties(width=260, height=alt.Step(22))
        .facet(row=alt.Row("task:N", title=None), column=alt.Column("epsilon:N", title=None))
        .resolve_scale(x="independent", y="independent")
    )


def _losses(rows: list[Row]) -> dict[tuple, list[float]]:
    """Test losses over repetitions, by task, epsilon, arm and variant, at the clip norm of `results`."""
    chosen = {tuple(line[:4]): line[4] for line in results(rows).select(*BY, "clip_norm").iter_rows()}
    lines = _lines(rows).sort("repetition").select(*BY, "clip_norm", "test_loss").iter_rows()
    found: dict[tuple, list[float]] = {}
    for *key, clip_norm, loss in lines:
        if clip_norm == chosen[tuple(key)]:
            found.setdefault(tuple(key), []).append(loss)
    return found


def claims(rows: list[Row]) -> list[Verdict]:
    """Repetitions of the linear tasks are compared one by one: those of a number share split and selection."""
    losses = _losses(rows)
    small, large = (f"batch {size}" for size in LINEAR_BATCHES)
    options, batches = {}, {}
    for task, epsilon, arm, variant in losses:
        key, where = (task, epsilon, arm), f"{task}, epsilon {epsilon:g}"
        if task != ACL and variant == "cosine, tail" and (*key, "constant, last") in losses:
            options[f"{where}, {arm}"] = _saved(losses[*key, "constant, last"], losses[*key, variant])
        if arm == large and variant == "cosine, tail" and (task, epsilon, small, variant) in losses:
            batches[where] = _saved(losses[task, epsilon, small, variant], losses[*key, variant])
    return [
        _judged(CLAIMS[0], options, "test loss saved by a cosine and a tail average"),
        _judged(
            CLAIMS[1], batches, "test loss saved by batches of 2,048", "Noise falls, but so does the number of steps."
        ),
        _gap(rows, losses),
        _bias_alone(rows),
    ]


def _saved(before: list[float], after: list[float]) -> Effect | None:
    """The mean difference between repetitions; None where there is one alone."""
    differences = [first - second for first, second in zip(before, after, strict=True)]
    return combine([(1.0, differences)]) if len(differences) > 1 else None


def _judged(claim: str, found: dict[str, Effect | None], what: str, why: str = "") -> Verdict:
    effects = {case: effect for case, effect in found.items() if effect is not None}
    if not effects:
        return unrun([claim])[0]
    level = LEVEL / len(effects)
    shown = "; ".join(f"{with_interval(e, level, scale=1, digits=4)} ({case})" for case, e in effects.items())
    text = f"{what}, with intervals for all cases together: {shown}"
    return judge(claim, list(effects.values()), text, above=0.0, why=why, seeds="0 to 2")


def _gap(rows: list[Row], losses: dict[tuple, list[float]]) -> Verdict:
    """Of the arm that decides: its loss less the middle between the first private runs and those without privacy."""
    known, own = before(), losses.get((ACL, 8.0, DECIDING, f"cosine, {LAST}"), [])
    if min(len(own), len(known.get(8.0, ())), len(known.get(None, ()))) < 2:
        return unrun(CLAIMS[2:3])[0]
    past_half = combine([(0.5, known[8.0]), (0.5, known[None]), (-1.0, own)])
    start, end = (statistics.fmean(known[epsilon]) for epsilon in (8.0, None))
    shares = {
        arm: (start - statistics.fmean(values)) / (start - end)
        for (task, epsilon, arm, variant), values in losses.items()
        if (task, epsilon, variant) == (ACL, 8.0, f"cosine, {LAST}")
    }
    listed = ", ".join(f"{share:.0%} ({arm})" for arm, share in shares.items())
    return judge(
        CLAIMS[2],
        [past_half],
        f"test loss below the middle of the gap with {DECIDING}: {with_interval(past_half, scale=1, digits=3)}. Share "
        f"of the gap that is closed at epsilon 8, the others with one run each: {listed}",
        above=0.0,
        why="The gap is from the first private runs to those without privacy, both from the first public checkpoint. "
        f"Test loss before any private step, by public text: {_starts(rows)}. Training without privacy from more "
        "public text was not run.",
        seeds="0 to 2",
    )


def _starts(rows: list[Row]) -> str:
    starts = {TEXT_ARMS[row["arm"]].public_text: row["start_loss"] for row in rows if row.get("start_loss")}
    names = ("the first", "more", "most")
    return ", ".join(f"{loss:.3f} ({names[number]})" for number, loss in sorted(starts.items()))


def _bias_alone(rows: list[Row]) -> Verdict:
    """The output bias against all parameters from the same public checkpoint, at epsilon 8: one run each so far."""
    own = [row for row in rows if row["task"] == ACL and row["epsilon"] == 8 and row["repetition"] == 0]
    by_arm = {row["arm"]: (row["test_loss"][0], row["processor_seconds"]) for row in own}
    pairs = [
        (arm, by_arm[arm], min(by_arm[other] for other in others if other in by_arm))
        for arm, others in ALL_PARAMETERS.items()
        if arm in by_arm and by_arm.keys() & set(others)
    ]
    if not pairs:
        return unrun(CLAIMS[3:])[0]
    shown = (
        f"{alone[0]:.3f} in {alone[1]:.0f} processor seconds, {every[0]:.3f} in {every[1]:.0f} ({arm})"
        for arm, alone, every in pairs
    )
    return Verdict(
        claim=CLAIMS[3],
        verdict=UNRESOLVED,
        found=f"test loss with the output bias and the best with all parameters: {'; '.join(shown)}",
        why="One run each has no interval. The gradient of all parameters is many clip norms long, nearly all of it in "
        "large matrices; the clip leaves little of the bias, and the noise spreads over 4.4 million numbers in place "
        "of 30,522.",
        seeds="0",
    )
