"""The verdict on a trained model."""

import polars as pl
import pytest

from coowned.report.verdict import Quality, clipping, is_useful, quality, result, sentences

ACCURATE = {
    "accuracy": 0.912, "accuracy_low": 0.889, "accuracy_high": 0.931, "trivial": "the most frequent class",
    "trivial_accuracy": 0.523, "measure": "accuracy",
}  # fmt: skip
MASKED = {
    "loss": 6.21, "loss_low": 6.1, "loss_high": 6.3, "accuracy": 0.01, "accuracy_low": 0.0, "accuracy_high": 0.02,
    "trivial": "word frequencies alone", "trivial_loss": 6.5, "trivial_accuracy": 0.02, "measure": "loss",
}  # fmt: skip


def evaluated(row):
    return {"test": pl.DataFrame([row])}


def steps(shares, copies):
    return pl.DataFrame({"clipped_share": shares, "copies": copies})


def test_figures_stand_side_by_side():
    said = result(evaluated({**ACCURATE, "baseline_accuracy": 0.93}))
    assert said == (
        "Test accuracy 91.2% (95% interval 88.9% to 93.1%); the most frequent class: 52.3%; the same model without "
        "privacy: 93.0%."
    )
    assert result(evaluated(MASKED)) == "Test loss 6.21 (95% interval 6.1 to 6.3); word frequencies alone: 6.5."


@pytest.mark.parametrize("row", [{**ACCURATE, "trivial_accuracy": 0.9}, {**MASKED, "trivial_loss": 6.2}])
def test_no_better_than_trivial(row):
    assert f"Not clearly better than {row['trivial']}" in result(evaluated(row))


def test_useful_is_clearly_better_than_trivial():
    assert quality(evaluated(ACCURATE)) == Quality(result(evaluated(ACCURATE)), covered=False, is_useful=True)
    assert quality(evaluated({**ACCURATE, "trivial_accuracy": 0.889})).is_useful is False
    assert quality(evaluated(MASKED)).is_useful
    assert quality(evaluated({**ACCURATE, "trivial_accuracy": None})).is_useful is None
    assert quality({}) is None
    beside = {"baseline_accuracy": 0.5, "baseline_accuracy_low": 0.4, "baseline_accuracy_high": 0.6}
    assert is_useful(evaluated({**ACCURATE, **beside}), "baseline_") is False
    assert is_useful(evaluated(ACCURATE), "baseline_") is None
    assert is_useful(evaluated({**ACCURATE, "examples": 9, "without_loss": 9})) is False


def test_no_example_could_be_used():
    """A label column that holds other words than the classes, say: no figure then means anything."""
    unusable = evaluated({**ACCURATE, "accuracy": 0.0, "examples": 1200, "without_loss": 1200})
    (said,) = sentences(unusable, steps([0.0], [10]))  # and no advice on the clip norm
    assert said.startswith("None of the 1,200 test examples could be used: their labels are not among the classes")
    assert "Test accuracy" in result(evaluated({**ACCURATE, "examples": 1200, "without_loss": 1199}))


def test_unmatched_classes_are_named():
    said = result(evaluated({**ACCURATE, "classes": ["work", "familly"], "unmatched_classes": ["familly"]}))
    assert said.endswith("No test example has the label 'familly': check how the data spell it.")
    many = [f"c{number}" for number in range(9)]
    said = result(evaluated({**ACCURATE, "classes": many, "unmatched_classes": many[:7]}))
    assert "'c0', 'c1', 'c2', 'c3', 'c4' or ...:" in said
    assert "label" not in result(evaluated({**ACCURATE, "classes": ["a", "b"], "unmatched_classes": []}))


def test_nothing_was_evaluated():
    assert result({}) is None
    assert result(evaluated({**ACCURATE, "accuracy": None})) is None


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ([1.0, 1.0], "All of the copies were clipped: a larger clip norm or a smaller learning rate may help."),
        ([0.9, 1.0], "98% of the copies were clipped: a larger clip norm or a smaller learning rate may help."),
        ([0.0, 1.0], "75% of the copies were clipped: the clip norm fits the gradients."),
        ([0.0, 0.04], "3% of the copies were clipped: the noise is larger than necessary; lower the clip norm."),
        ([0.0, 0.0], "None of the copies was clipped: the noise is larger than necessary; lower the clip norm."),
    ],
)
def test_words_on_clipping(shares, said):
    assert clipping(steps(shares, [10, 30])) == said


def test_nothing_was_drawn():
    assert clipping(steps([0.0], [0])) is None
    assert clipping(None) is None


def test_what_is_missing_is_left_out():
    assert len(sentences(evaluated(ACCURATE), steps([0.5], [10]))) == 2
    assert len(sentences(evaluated(ACCURATE), None)) == 1
    assert sentences({}, None) == []
