"""The best answer that looks at no example: what a model has to beat."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from coowned.training.data import TrainingData, content_pieces
from coowned.training.model import Model

_LABELS, _WORDS, _WEIGHTS = "labels", "targets", "weights"  # arrays of the data that say what is to be predicted


class TrivialAnswer(NamedTuple):
    """One answer to every example of a split, made from the split itself: not covered by any guarantee.

    Attributes:
      name: what it is, in words.
      losses: (examples,) NaN where an example has nothing to predict.
      right: (examples,) whether it is right; None for numbers.
    """

    name: str
    losses: npt.NDArray[np.float64]
    right: npt.NDArray[np.bool_] | None


def trivial_answer(model: Model, data: TrainingData) -> TrivialAnswer | None:
    """The most frequent class, the mean of a number, or how often each word occurs; None where data show none of them.

    The loss of classes and words is the cross-entropy of their frequencies: the smallest that one answer for all
    examples can have. That of a number is the squared error of the mean.

    Guarantees:
      - No constant has a smaller loss on these examples, and no class more right answers.
        (test_no_constant_is_better)
      - Words count as in the loss of a masked model: the mean over an example, then over examples.
        (test_words_count_as_in_a_masked_model)
    Cost: one pass over the data.
    """
    known = data.shapes()
    if _WORDS in known and _WEIGHTS in known:
        read = _read(data, lambda batch: (batch[_WORDS], batch[_WEIGHTS]))
        words, weights = (np.concatenate(parts) for parts in zip(*read, strict=True))
        return _most_frequent("word frequencies alone", words, weights)
    # A model whose data do not hold what it predicts as "labels" says what it is; None where no array holds it.
    parts = _read(data, getattr(model, "labels_of", lambda batch: batch.get(_LABELS)))
    if any(part is None for part in parts):
        return None
    labels = np.concatenate(parts).astype(np.float64)
    finite = np.isfinite(labels)
    if model.classes is not None:
        return _most_frequent("the most frequent class", np.where(finite, labels, 0)[:, None], finite[:, None])
    mean = float(labels[finite].mean()) if finite.any() else 0.0
    return TrivialAnswer("the mean of the targets", np.where(finite, (labels - mean) ** 2, np.nan), None)


def _most_frequent(name: str, values: npt.NDArray[Any], weights: npt.NDArray[Any]) -> TrivialAnswer:
    """Of (examples, entries) values, each example counting once, by the weights of its entries."""
    values = values.astype(np.int64)
    totals = weights.sum(axis=1, dtype=np.float64)
    shares = np.divide(weights, totals[:, None], out=np.zeros(values.shape), where=totals[:, None] > 0)
    counts = np.bincount(values.ravel(), weights=shares.ravel(), minlength=1)
    with np.errstate(divide="ignore"):
        surprise = -np.log(counts / max(1e-300, counts.sum()))
    losses = np.where(totals > 0, (shares * np.where(shares > 0, surprise[values], 0.0)).sum(axis=1), np.nan)
    right = (shares * (values == counts.argmax())).sum(axis=1) >= 0.5 - 1e-6  # shares are rounded
    return TrivialAnswer(name, losses, right)


def _read(data: TrainingData, part: Callable[[dict[str, npt.NDArray[Any]]], Any]) -> list[Any]:
    """A part of every piece of the data, in the order of the examples."""
    return [part({name: array[:count] for name, array in arrays.items()}) for count, arrays in content_pieces(data)]
