"""The best answer that looks at no example."""

import numpy as np
import pyarrow as pa
import pytest

from coowned import AttributionGraph, from_table
from coowned.content.data import FeatureTable
from coowned.content.example_table import ExampleTable
from coowned.content.text import SPECIAL_TOKENS, Vocabulary
from coowned.content.token_table import TokenTable
from coowned.models.example_model import ExampleModel
from coowned.models.logistic_regression import LogisticRegression
from coowned.training.evaluate import trivial_answer

CLASSES = LogisticRegression(num_features=2)
LABELS = np.array([0, 1, 1, 2, 1, 0, np.nan], np.float32)


class Numbers:
    classes = None


def table(labels) -> FeatureTable:
    graph = AttributionGraph.from_users_per_example([[user] for user in range(len(labels))])
    return FeatureTable(graph=graph, features=np.zeros((len(labels), 2), np.float32), labels=labels)


def test_no_constant_is_better():
    found = trivial_answer(CLASSES, table(LABELS))
    assert found.name == "the most frequent class"
    assert found.right.tolist() == [False, True, True, False, True, False, False]
    assert np.isnan(found.losses[-1])
    known = LABELS[:-1].astype(int)
    for shares in np.random.default_rng(0).dirichlet([2.0, 3.0, 1.0], 200):
        assert np.nanmean(found.losses) <= -np.log(shares[known]).mean() + 1e-12
    numbers = trivial_answer(Numbers(), table(LABELS))
    assert numbers.right is None
    for constant in np.linspace(-1, 3, 41):
        assert np.nanmean(numbers.losses) <= ((LABELS[:-1] - constant) ** 2).mean() + 1e-6


def test_words_count_as_in_a_masked_model():
    """Each text counts once, whatever number of its words is hidden; a text without words not at all."""
    words = ("a", "b", "c")
    texts = ["a a a a a a a a a a a a a a a a a a a a", "b", "a", "", "c"]
    rows = from_table(pa.table({"users": [[f"u{n}"] for n in range(5)], "text": texts}))
    vocabulary = Vocabulary((*SPECIAL_TOKENS, *words))
    data = TokenTable.from_examples(rows, text="text", vocabulary=vocabulary, sequence_length=40)
    found = trivial_answer(Numbers(), data)
    assert found.name == "word frequencies alone"
    # Frequencies: a 1/2, b 1/4, c 1/4.
    assert found.losses == pytest.approx([np.log(2), np.log(4), np.log(2), np.nan, np.log(4)], nan_ok=True)
    assert found.right.tolist() == [True, False, True, False, False]


def test_nothing_to_answer():
    empty = trivial_answer(CLASSES, table(LABELS[:0]))
    assert empty.losses.shape == empty.right.shape == (0,)
    assert np.isnan(trivial_answer(CLASSES, table(LABELS[-1:])).losses).all()
    assert np.isnan(trivial_answer(Numbers(), table(LABELS[-1:])).losses).all()


@pytest.mark.parametrize(("classes", "right"), [(("a", "b"), [False, True, True, False]), (None, None)])
def test_labels_by_another_name(classes, right):
    """Of a JAX model: rows that cannot be used have no label, and the loss of a number is not known."""
    graph = AttributionGraph.from_users_per_example([[user] for user in range(4)])
    arrays = {"x": np.zeros(4, np.float32), "kind": np.array([0, 1, 1, 0])}
    data = ExampleTable(graph=graph, arrays=arrays, usable=np.array([True, True, True, False]))
    model = ExampleModel(loss=lambda *given: 0.0, tree=None, entries=(), predictor=print, classes=classes, label="kind")
    found = trivial_answer(model, data)
    assert (found and found.right.tolist()) == right


def test_data_without_labels(small):
    data = ExampleTable(graph=small.graph, arrays={"x": np.zeros(300)})
    assert trivial_answer(CLASSES, data) is None
