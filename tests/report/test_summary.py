"""A run on one screen."""

import pytest

from coowned.report.summary import Part, as_html, as_text, summary
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
