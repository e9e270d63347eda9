"""A run on one screen."""

import math
import re

import polars as pl
import pytest

from coowned import calibrate
from coowned.mechanism.poisson_sampling import PoissonSampling
from coowned.report.summary import (
    Part,
    Quality,
    as_html,
    as_text,
    clipping,
    is_useful,
    next_steps,
    quality,
    result,
    sentences,
    summary,
)
from coowned.runs.records import GraphSummary
from coowned.runs.stored_run import StoredRun


@pytest.mark.parametrize("name", ["simulated", "scheduled", "seeded", "none", "public"])
def test_summary_of_every_kind(runs, name):
    run = StoredRun.open(runs[name])
    promised, quality, *_ = summary(run)
    assert promised.heading == "What is promised"
    if run.claims:
        shown = promised.sentences[0]
        for term in (run.claim.shown_epsilon, "unit: user, fixed graph", "contribution bound", "delta", "zero-out"):
            assert term in shown
        assert len(promised.sentences) == 2
    else:
        (said,) = promised.sentences
        assert said.startswith("No guarantee (")
        assert not any(character.isdigit() for character in said)
    assert quality.heading == "How good it is (NOT covered by a guarantee)"
    assert quality.sentences[0].startswith("Test accuracy ")
    assert "the most frequent class" in quality.sentences[0]


def test_text_is_narrow_and_markup_is_escaped():
    parts = [Part("Heading", ("a long <b>sentence</b> " * 20,)), Part("Other", ("short", "two"))]
    text = as_text(parts)
    assert max(map(len, text.splitlines())) <= 100
    assert text.count("<b>") == 20
    assert text.endswith("Other\n  short\n  two")
    assert "<b>" not in as_html(parts)
    assert as_html(parts).count("<dd>") == 3


def test_what_was_chosen_is_said(runs):
    class Chosen(StoredRun):
        reasons = ("[mechanism] clip_norm = 0.5: because.",)

    shown = as_text(summary(Chosen.open(runs["none"])))
    assert "Chosen from the graph and public numbers alone\n  [mechanism] clip_norm = 0.5: because." in shown
    assert "Chosen" not in as_text(summary(StoredRun.open(runs["none"])))


def test_nothing_was_evaluated(runs):
    class Unknown(StoredRun):
        def evaluations(self):
            return {}

    assert [part.heading for part in summary(Unknown.open(runs["none"]))] == ["What is promised"]


ROW = {
    "accuracy": 0.6, "accuracy_low": 0.55, "accuracy_high": 0.65, "trivial": "the most frequent class",
    "trivial_accuracy": 0.5, "measure": "accuracy", "examples": 400, "without_loss": 0,
}  # fmt: skip
BASELINE = {"baseline_accuracy": 0.9, "baseline_accuracy_low": 0.87, "baseline_accuracy_high": 0.93}


@pytest.fixture(scope="module")
def noisy(runs):
    """So much noise that it outweighs what few examples leave unknown."""
    return runs.make("noisy", ("epsilon = 8.0 ", "epsilon = 2.0 "), ("batch_size = 32", "batch_size = 4"))


@pytest.fixture
def advice(runs, noisy):
    """Of a run whose evaluation was another."""

    def told(name=noisy.name, clipped=0.5, **row):
        class Told(StoredRun):
            def evaluations(self):
                return {"test": pl.DataFrame([ROW | row])}

            def metrics(self):
                return pl.DataFrame({"clipped_share": [clipped], "copies": [100]})

        run = Told.open(runs[name])
        return run, next_steps(run)

    return told


def test_ratios_are_those_of_the_changed_mechanism(advice):
    run, said = advice()
    found = re.search(r"A batch size of 8 would raise .* ratio from (\S+) to (\S+),", said[0])
    claim, certificate = run.claim, run.certificate
    assert run.mechanism.batch_size == 4
    for batch_size, stated in ((4, found[1]), (8, found[2])):
        changed = PoissonSampling.from_certificate(certificate, batch_size=batch_size, iterations=20)
        noise = calibrate(changed, epsilon=claim.epsilon, delta=claim.delta, adjacency=claim.adjacency)
        ratio = batch_size / (noise * math.sqrt(run.record.num_parameters))
        assert float(stated) == pytest.approx(ratio, rel=0.06)
    assert "at a weaker promise" in said[1]
    assert any("baseline = true" in step for step in said)


def test_noise_is_not_always_the_limit(advice):
    _, hopeless = advice(baseline_accuracy=0.5, baseline_accuracy_low=0.4, baseline_accuracy_high=0.6)
    assert hopeless[0].startswith("Without privacy this model is not clearly better than the trivial answer either")
    _, alike = advice(baseline_accuracy=0.62, baseline_accuracy_low=0.57, baseline_accuracy_high=0.67)
    assert alike == ["Without privacy this model is not clearly better: another model or more examples may help."]
    _, dear = advice(**BASELINE)
    assert any("signal-to-noise" in step for step in dear)
    for said in (hopeless, alike):
        assert not any("signal-to-noise" in step for step in said)


def test_advice_on_the_clip_norm(advice):
    assert "All of the copies were clipped" in advice(clipped=1.0, **BASELINE)[1][-1]
    assert not any("clipped" in step for step in advice(clipped=0.5, **BASELINE)[1])


def test_an_s_unlike_the_data_is_said(advice, monkeypatch):
    """First of all, and only of a model that is of little use."""
    monkeypatch.setattr(GraphSummary, "warning", lambda self: "S is not like the data.")
    poor = {"accuracy_low": 0.4}
    assert advice(**poor)[1][0] == "S is not like the data."
    no_better = {"baseline_accuracy": 0.5, "baseline_accuracy_low": 0.4, "baseline_accuracy_high": 0.6}
    assert advice(**poor, **no_better)[1][0] == "S is not like the data."
    assert "S is not like the data." not in advice()[1]


def test_a_poor_model_is_compared_first(advice):
    """Whether privacy is to blame is not known without a baseline."""
    assert advice(accuracy_low=0.4)[1][0].startswith("Train with a baseline")
    assert not advice()[1][0].startswith("Train with a baseline")


def test_nothing_is_advised_of_a_model_without_mistakes(advice):
    assert advice(accuracy=1.0, accuracy_low=0.97, accuracy_high=1.0, clipped=0.01)[1] == []
    assert advice(accuracy=0.99, accuracy_low=0.96, accuracy_high=1.0, clipped=0.01)[1] != []


def test_no_label_was_usable(advice):
    (said,) = advice(without_loss=400)[1]
    assert said.startswith("Check the label column and the classes")


def test_with_little_noise_none_less_is_advised(advice):
    run, said = advice("simulated", **BASELINE)
    assert run.signal_to_noise.whole_training**2 > run.certificate.num_distinct
    assert not any("signal-to-noise" in step for step in said)


@pytest.mark.parametrize("name", ["none", "public", "seeded", "scheduled"])
def test_other_runs_have_no_ratio_of_another_batch(advice, name):
    """A run without a claim has no epsilon, and another batch size would need another schedule."""
    assert not any("would raise" in step for step in advice(name)[1])


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


def test_nothing_was_evaluated_for_verdict():
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
