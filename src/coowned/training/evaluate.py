"""Evaluation on held-out examples: overall, by the number of users per example, and against a trivial answer."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from coowned import validate
from coowned.content.data import TrainingData, content_pieces
from coowned.errors import InputError
from coowned.models.model import Model, compiled_for

if TYPE_CHECKING:
    import polars as pl

NOT_COVERED = (
    "Not covered by the guarantee: computed from examples outside the training set, without noise. Tune on "
    "validation, report on test, and show both only to people who may see the data."
)
_Z = 1.959963984540054  # 97.5% of a standard normal lie below
_LABELS, _WORDS, _WEIGHTS = "labels", "targets", "weights"  # arrays of the data that say what is to be predicted


def evaluate(
    model: Model,
    parameters: Mapping[str, npt.NDArray[np.float32]],
    data: TrainingData,
    *,
    split: str,
    baseline: Mapping[str, npt.NDArray[np.float32]] | None = None,
    largest_group: int = 10,
) -> "pl.DataFrame":
    """Computes loss and accuracy with 95% confidence intervals: a row for all examples, then one per number of users.

    Accuracy has Wilson's score interval, loss the normal interval mean ± 1.96 s/sqrt(n) (none below two examples). Both
    take examples for independent draws; examples of one user are alike, so that the truth is somewhat wider. Beside
    them stands the best answer that looks at no example (`trivial_answer`), made from the same split.

    Guarantees:
      - Counts, losses and accuracies are those of a plain loop.   (test_equals_a_plain_loop)
      - The intervals hold the truth about as often as they say.   (test_intervals_cover)
      - A loss that is not finite counts as wrong and is left out of the loss, and it is said how many there are.
        (test_not_finite_counts_as_wrong)
      - The trivial answer and the baseline are scored on the same examples.   (test_trivial_and_baseline_stand_beside)
      - Declared classes that no label matches are named.   (test_classes_without_examples_are_named)
    Cost: two passes over the data, in pieces; one more for a baseline.

    Args:
      model, parameters: as `train` gives them.
      data: the examples of one split, with their graph.
      split: "validation", "test" or another name; a column of the result, so that splits cannot be mixed up.
      baseline: parameters of the same model trained without privacy.
      largest_group: examples with at least so many users are one group.

    Returns:
      split, users_per_example ("all", "1", ..., "10+"), examples, without_loss (those of them that have none), loss,
      loss_low, loss_high, accuracy, accuracy_low, accuracy_high (null where no class is predicted), trivial (what it
      is), trivial_loss, trivial_accuracy, with a baseline its loss and accuracy with their intervals, measure (which
      of "accuracy" and "loss" tells more), classes, unmatched_classes (those that no label of the split matches; both
      null where no class is predicted), covered_by_guarantee (false).

    Example:
      >>> from coowned import AttributionGraph, LogisticRegression
      >>> from coowned.synthetic.logistic_data import LogisticData
      >>> from coowned.synthetic.logistic_data import WorldData
      >>> graph = AttributionGraph.from_users_per_example([[0], [0, 1], [1]])
      >>> model = LogisticRegression(num_features=2)
      >>> data = WorldData.part(LogisticData(num_features=2).attach(graph, seed=0))
      >>> evaluate(model, model.initial(), data, split="test")["examples"].to_list()
      [3, 2, 1]
    """
    import polars as pl

    validate.positive(largest_group=largest_group)
    model.check_data(data.shapes())
    trivial = trivial_answer(model, data)
    # A number is not right or wrong; hidden words are, though they are no classes; nothing is where no label is known.
    has_accuracy = trivial is not None and trivial.right is not None
    models = {"": parameters} if baseline is None else {"": parameters, "baseline_": baseline}
    scored = {prefix: example_losses(model, arrays, data) for prefix, arrays in models.items()}
    rows = []
    for name, members in _groups(data.graph.users_per_example, largest_group).items():
        row: dict[str, Any] = {"split": split, "users_per_example": name}
        losses = scored[""][0][members]
        row |= {"examples": len(losses), "without_loss": int(np.count_nonzero(~np.isfinite(losses)))}
        for prefix, (losses, right) in scored.items():
            row |= _figures(prefix, losses[members], right[members] if has_accuracy else None)
        if trivial is not None:
            right = None if trivial.right is None else trivial.right[members]
            found = _figures("trivial_", trivial.losses[members], right)
            row |= {"trivial": trivial.name, **{key: found[key] for key in ("trivial_loss", "trivial_accuracy")}}
        rows.append(row)
    measure = "accuracy" if has_accuracy and model.classes is not None else "loss"
    # Looking at all rows: a first one of nulls has no type.
    unmatched = None if trivial is None else trivial.unmatched
    return pl.DataFrame(rows, infer_schema_length=None).with_columns(
        measure=pl.lit(measure),
        classes=_listed(None if unmatched is None else model.classes),
        unmatched_classes=_listed(unmatched),
        covered_by_guarantee=pl.lit(False),
    )


def _groups(users_per_example: npt.NDArray[np.integer], largest: int) -> dict[str, Any]:
    """Returns the examples of each row of the result by name: all, then those of each number of users."""
    groups: dict[str, Any] = {"all": slice(None)}
    for count in np.unique(np.minimum(users_per_example, largest)).tolist():
        if count == largest:
            groups[f"{count}+"] = users_per_example >= count
        else:
            groups[str(count)] = users_per_example == count
    return groups


def check_labels(splits: "Mapping[str, pl.DataFrame]") -> None:
    """Raises InputError if no class of a finished model occurs as a label in any held-out split.

    It is asked of the evaluations of a finished run, whose owner sees them anyway: what stops a training, or lets it go
    on, may not follow from content. The folder is that of any other run, and training it cost what any other does.

    Guarantees:
      - Only where no label of any split matches a class.   (test_classes_that_match_nothing_are_refused)
    """
    rows = [table.row(0, named=True) for table in splits.values() if not table.is_empty()]
    rows = [row for row in rows if row["examples"]]
    if rows and all(row.get("classes") and row["classes"] == row["unmatched_classes"] for row in rows):
        raise InputError(
            f"none of the {sum(row['examples'] for row in rows):,} held-out examples has a label among the classes "
            f"{', '.join(map(repr, rows[0]['classes']))}: this run is finished, but its model is of no use. Correct "
            "the label column or the classes, as the data spell them, and train again in another folder"
        )


def example_losses(
    model: Model, parameters: Mapping[str, npt.NDArray[np.float32]], data: TrainingData
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Computes ((n,) loss, (n,) whether predicted correctly) of every example; a further axis for several models."""
    loss, correct = _of_every_example(functools.partial(compiled_method(model, "losses"), dict(parameters)), data)
    loss = loss.astype(np.float64)
    return loss, correct.astype(bool) & np.isfinite(loss)


def predictions(
    model: Model,
    parameters: Mapping[str, npt.NDArray[np.float32]],
    data: TrainingData,
    *,
    probabilities: bool = False,
) -> "pl.DataFrame":
    """Predicts every example: prediction (a class as the data spell it, or a number) and probability.

    With `probabilities` a column `probability_<class>` of each class follows, in the order of the classes.

    Guarantees:
      - The probabilities of all classes sum to one, and the prediction's is the largest.
        (test_probabilities_of_all_classes)
      - Labels are not looked at.   (test_labels_do_not_matter)
      - An example with a value that is missing or not finite has no prediction; others are not touched by it.
        (test_unusable_rows_have_no_prediction)
    """
    import polars as pl

    model.check_data(data.shapes())
    if model.classes is None and probabilities:
        raise InputError("this model predicts a number: there are no classes with probabilities; leave them out")
    found, probability = _of_every_example(functools.partial(compiled_method(model, "predict"), dict(parameters)), data)
    if model.classes is None:
        values = pl.Series("prediction", found.astype(np.float32)).fill_nan(None)
        return pl.DataFrame([values, pl.Series("probability", [None] * len(found), pl.Float32)])
    usable = np.isfinite(probability)
    spelled = pl.Series("prediction", list(model.classes)).gather(pl.Series(np.where(usable, found, 0), dtype=pl.Int64))
    table = pl.DataFrame([spelled, pl.Series("probability", probability.astype(np.float32))])
    if probabilities:
        compute = functools.partial(compiled_method(model, "probabilities"), dict(parameters))
        (shares,) = _of_every_example(lambda batch: [compute(batch)], data)
        names = [f"probability_{name}" for name in model.classes]
        table = table.hstack(pl.DataFrame(shares.astype(np.float32), schema=names))
    return table.with_columns(pl.when(pl.Series(usable)).then(pl.all()))


class TrivialAnswer(NamedTuple):
    """The same answer for every example of a split, made from the split itself: not covered by any guarantee."""

    name: str  # what it is, in words
    losses: npt.NDArray[np.float64]  # (examples,) NaN where an example has nothing to predict
    right: npt.NDArray[np.bool_] | None  # (examples,) whether it is right; None for numbers
    unmatched: tuple[str | int, ...] | None = None  # classes that no label is; None where there are no classes


def trivial_answer(model: Model, data: TrainingData) -> TrivialAnswer | None:
    """Returns the most frequent class, the mean of a number, or word frequencies; None if there are no labels.

    The loss of classes and words is the cross-entropy of their frequencies: the smallest that one answer for all
    examples can have. That of a number is the squared error of the mean.

    Guarantees:
      - No constant has a smaller loss on these examples, and no class more right answers.
        (test_no_constant_is_better)
      - Words count as in the loss of a masked model: the mean over an example, then over examples.
        (test_words_count_as_in_a_masked_model)
    Cost: one pass over the data.
    """
    if {_WORDS, _WEIGHTS} <= data.shapes().keys():
        words, weights = _of_every_example(lambda batch: (batch[_WORDS], batch[_WEIGHTS]), data)
        return _most_frequent("word frequencies alone", words, weights)
    # A model whose data do not hold what it predicts as "labels" says what it is; None where no array holds it.
    labels_of = getattr(model, "labels_of", lambda batch: batch.get(_LABELS))
    known = _of_every_example(lambda batch: [part for part in (labels_of(batch),) if part is not None], data)
    if not known:
        return None
    labels = known[0].astype(np.float64)
    finite = np.isfinite(labels)
    if model.classes is not None:
        answer = _most_frequent("the most frequent class", np.where(finite, labels, 0)[:, None], finite[:, None])
        matched = set(labels[finite].tolist())
        return answer._replace(
            unmatched=tuple(name for place, name in enumerate(model.classes) if place not in matched)
        )
    mean = float(labels[finite].mean()) if finite.any() else 0.0
    return TrivialAnswer("the mean of the targets", np.where(finite, (labels - mean) ** 2, np.nan), None)


def _listed(names: Iterable[Any] | None) -> Any:
    import polars as pl

    return pl.lit(None if names is None else list(map(str, names)), dtype=pl.List(pl.String))


def _most_frequent(name: str, values: npt.NDArray[Any], weights: npt.NDArray[Any]) -> TrivialAnswer:
    """Returns the most frequent of (examples, entries) values, each example counting once, by its entries' weights."""
    values = values.astype(np.int64)
    totals = weights.sum(axis=1, dtype=np.float64)
    shares = np.divide(weights, totals[:, None], out=np.zeros(values.shape), where=totals[:, None] > 0)
    counts = np.bincount(values.ravel(), weights=shares.ravel(), minlength=1)
    with np.errstate(divide="ignore"):
        surprise = -np.log(counts / max(1e-300, counts.sum()))
    losses = np.where(totals > 0, (shares * np.where(shares > 0, surprise[values], 0.0)).sum(axis=1), np.nan)
    right = (shares * (values == counts.argmax())).sum(axis=1) >= 0.5 - 1e-6  # shares are rounded
    return TrivialAnswer(name, losses, right)


def _of_every_example(
    compute: Callable[[dict[str, npt.NDArray[Any]]], Iterable[Any]], data: TrainingData
) -> list[npt.NDArray[Any]]:
    """Applies a function of a batch to all examples, and returns its arrays."""
    pieces = [[np.asarray(values)[:count] for values in compute(arrays)] for count, arrays in content_pieces(data)]
    return [np.concatenate(parts) for parts in zip(*pieces, strict=True)]


@functools.lru_cache(maxsize=64)
def compiled_method(model: Model, method: str) -> Any:
    """Returns a compiled method of the model, cached because compiling takes longer than most evaluations."""
    return compiled_for(model, getattr(model, method))


def _figures(
    prefix: str, losses: npt.NDArray[np.float64], right: npt.NDArray[np.bool_] | None
) -> dict[str, float | None]:
    """Computes mean loss and accuracy with their intervals; null where undefined."""
    finite = losses[np.isfinite(losses)]
    mean = float(finite.mean()) if len(finite) else None
    half = _Z * float(finite.std(ddof=1)) / math.sqrt(len(finite)) if len(finite) > 1 else None
    share = None if right is None or not len(right) else float(right.mean())
    low, high = (None, None) if share is None else wilson_interval(int(right.sum()), len(right))  # type: ignore[union-attr, arg-type]
    return {
        f"{prefix}loss": mean,
        f"{prefix}loss_low": None if mean is None or half is None else mean - half,
        f"{prefix}loss_high": None if mean is None or half is None else mean + half,
        f"{prefix}accuracy": share,
        f"{prefix}accuracy_low": low,
        f"{prefix}accuracy_high": high,
    }


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """Computes Wilson's 95% score interval for a proportion; importing scipy.stats for it takes seconds.

    >>> [round(end, 3) for end in wilson_interval(8, 10)]
    [0.49, 0.943]
    """
    if not 0 <= successes <= trials or trials == 0:
        raise InputError(f"there must be 0 to {trials} successes in at least one trial, not {successes}")
    share, square = successes / trials, _Z**2 / trials
    half = _Z * math.sqrt(share * (1 - share) / trials + square / (4 * trials))
    low, high = ((share + square / 2 + side) / (1 + square) for side in (-half, half))
    return (low if successes else 0.0), (high if successes < trials else 1.0)
