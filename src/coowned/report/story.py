"""The Bob test as a section of a page: two claims, and what was measured beside them."""

from collections.abc import Sequence

from coowned.accounting.guarantee import UNIT
from coowned.accounting.statement import rounded_down, rounded_up
from coowned.audit.bob import Measured
from coowned.audit.bob_picture import COLOURS, TITLES, bob_rows
from coowned.report import charts
from coowned.report.contents import Mark
from coowned.report.elements import element, join, table
from coowned.report.figures import Figure
from coowned.report.sections import Section


def bob_section(measured: Sequence[Measured]) -> Section:
    """Both attributions: the claim, the measured lower bound, and every model's answer.

    Guarantees:
      - Every trained model is one mark and one row.   (test_one_mark_a_model)
    """
    summary = table(
        ["e-mails attributed to", "e-mails with Bob in S", "claimed epsilon", "measured for Bob, at least", ""],
        [
            [
                TITLES[one.attribution].removeprefix("attributed to "),
                f"{one.copies_with_bob} of {one.size}",
                _claimed(one),
                rounded_down(one.leak.epsilon_lower_bound),
                f"not refuted by {one.leak.trials:,} models" if one.claim_holds else "not true for Bob",
            ]
            for one in measured
        ],
        caption="What is claimed, and what an attacker found",
    )
    figures = tuple(_figure(one) for one in measured)
    alpha, trials = measured[0].leak.alpha, measured[0].leak.trials
    return Section(
        name="bob",
        title="A secret about Bob, in e-mails he received",
        short="Bob",
        body=join(
            element(
                "p",
                "A made-up world: others mention Bob’s knee surgery in e-mails to him. A small classifier of e-mails "
                f"was trained {trials:,} times for each attribution, with Bob’s e-mails and without them, and an "
                "attacker looked at one answer of each model. Where the two rows of a picture lie apart, the model "
                f"tells; where they do not, that this attack failed proves nothing. The measured bounds are wrong with "
                f"probability at most {alpha:g} each.",
            ),
            summary,
            *(figure.html() for figure in figures),
        ),
        figures=figures,
    )


def _figure(one: Measured) -> Figure:
    rows = bob_rows([one])
    verdict = "the claim is not refuted" if one.claim_holds else "the claim is not true for Bob"
    return Figure(
        name=f"bob-{one.attribution}",
        title=f"E-mails {TITLES[one.attribution]}: {verdict}",
        mark=Mark.PRIVATE,
        chart=charts.ticks(
            rows,
            x="answer",
            y="models",
            title_x="how much the model takes the sentence with the secret for work (log-odds)",
            colours=COLOURS,
            tooltip=(("models", "models"), ("answer", "answer")),
        ),
        columns=(("models", "models"), ("answer", "answer")),
        rows=rows,
        reading=f"Each mark is one trained model. Claimed: epsilon {_claimed(one)}; measured with Bob as the "
        f"unit: at least {rounded_down(one.leak.epsilon_lower_bound)}.",
    )


def _claimed(one: Measured) -> str:
    return (
        f"{rounded_up(one.epsilon)} (unit: {UNIT}; contribution bound {one.contribution_bound:,}; delta "
        f"{one.delta:.12g}; adjacency: zero-out)"
    )
