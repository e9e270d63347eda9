"""Draws the pictures of the explanations, from the package's own results.

python docs/theme/pictures.py
"""

from pathlib import Path

import altair as alt
import numpy as np
from scipy.stats import binom, norm

import coowned as co
from coowned.synthetic.toy_emails import five_emails

PICTURES = Path(__file__).parents[1] / "pictures"
IN_S, LEFT_OUT = "in S", "left out"


def five_emails_and_s() -> alt.Chart:
    """Who is part of which of the five e-mails, and which of them a bound of 2 selects."""
    examples = co.from_table(five_emails(), users="users", example_id="example_id")
    copies = co.Greedy(contribution_bound=2).select(examples.graph, seed=0).copies
    rows = [
        {"e-mail": row["example_id"], "person": person, "state": IN_S if copies[number] else LEFT_OUT}
        for number, row in enumerate(five_emails().to_pylist())
        for person in row["users"]
    ]
    colour = alt.Color("state:N", title=None, scale=alt.Scale(domain=[IN_S, LEFT_OUT], range=["#00796b", "#c9c9c9"]))
    chart = alt.Chart(alt.Data(values=rows)).mark_circle(size=420, opacity=1)
    return chart.encode(
        x=alt.X("e-mail:N", axis=alt.Axis(orient="top", labelAngle=0, title=None, domain=False, ticks=False)),
        y=alt.Y("person:N", axis=alt.Axis(title=None, domain=False, ticks=False)),
        color=colour,
    ).properties(width=alt.Step(70), height=alt.Step(44))


def one_step(copies: int = 2, probability: float = 1 / 3, noise: float = 1.0) -> alt.Chart:
    """The two densities that one Poisson step is dominated by: a user's copies drawn, and all of them zeroed."""
    x = np.linspace(-3.5, 6, 191)
    drawn = np.arange(copies + 1)
    mixture = (binom.pmf(drawn, copies, probability)[:, None] * norm.pdf(x, drawn[:, None], noise)).sum(axis=0)
    worlds = {"with the user: 0, 1 or 2 copies drawn": mixture, "their texts blank": norm.pdf(x, 0, noise)}
    rows = [
        {"x": float(at), "density": float(value), "world": world}
        for world, values in worlds.items()
        for at, value in zip(x, values, strict=True)
    ]
    colour = alt.Color("world:N", title=None, sort=list(worlds), scale=alt.Scale(range=["#00796b", "#d9822b"]))
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_line()
        .encode(
            x=alt.X("x:Q", title="what a step releases along the user's gradient, in clip norms"),
            y=alt.Y("density:Q", axis=alt.Axis(labels=False, ticks=False), title="density"),
            color=colour.legend(orient="top", direction="vertical", labelLimit=300),
        )
        .properties(width=520, height=180)
    )


def main() -> None:
    for draw in (five_emails_and_s, one_step):
        draw().properties(background="white").save(str(PICTURES / f"{draw.__name__}.svg"))


if __name__ == "__main__":
    main()
