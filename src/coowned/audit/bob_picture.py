"""The picture of the Bob test: what the attacker saw, with Bob's e-mails and without, for both attributions."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from coowned.audit.bob import Measured

if TYPE_CHECKING:
    import altair as alt

TITLES = {"sender": "attributed to the sender", "everyone": "attributed to everyone in it"}
COLOURS = {"Bob's e-mails in": "#b5442e", "Bob's e-mails out": "#2b6cb0"}


def bob_rows(measured: Sequence[Measured]) -> list[dict]:
    """One row a trained model: attribution, whether Bob was in, and the model's answer."""
    return [
        {"attribution": TITLES[one.attribution], "models": name, "answer": score}
        for one in measured
        for name, scores in zip(COLOURS, (one.scores_with, one.scores_without), strict=True)
        for score in scores
    ]


def bob_picture(measured: Sequence[Measured]) -> "alt.VConcatChart":
    """One panel an attribution: every trained model is a tick, placed by its answer to the attacker's question.

    Where the two rows of ticks lie apart, a look at the model tells whether Bob's e-mails were in it.
    """
    import altair as alt

    rows = bob_rows(measured)
    panels = []
    for one in measured:
        claim = (
            f"claimed: epsilon {one.epsilon:.2g} at delta {one.delta:g} (unit: user, fixed graph; bound "
            f"{one.contribution_bound}; zero-out)"
        )
        found = f"measured for Bob: at least {one.leak.epsilon_lower_bound:.2f}"
        verdict = "the claim holds" if one.claim_holds else "the claim is not true for Bob"
        title = alt.TitleParams(
            text=f"E-mails {TITLES[one.attribution]}: {verdict}",
            subtitle=[claim, f"{found} ({one.leak.trials} models, wrong with probability {one.leak.alpha:g})"],
            anchor="start",
        )
        mine = [row for row in rows if row["attribution"] == TITLES[one.attribution]]
        panels.append(
            alt.Chart(alt.Data(values=mine), title=title, width=560, height=90)
            .mark_tick(thickness=1.5, opacity=0.6)
            .encode(
                x=alt.X("answer:Q", title="how much the model takes the sentence with the secret for work (log-odds)"),
                y=alt.Y("models:N", title=None, sort=list(COLOURS)),
                color=alt.Color(
                    "models:N", legend=None, scale=alt.Scale(domain=list(COLOURS), range=list(COLOURS.values()))
                ),
                tooltip=[alt.Tooltip("models:N"), alt.Tooltip("answer:Q", format=".3f")],
            )
        )
    return alt.vconcat(*panels)
