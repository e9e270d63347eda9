"""A secret about Bob is in e-mails he received. Who is protected by a claimed epsilon?

python examples/bob.py [--trials 400] [-o bob.svg]

Trains a small classifier of e-mails again and again, with Bob's e-mails and without, under the same claim twice: with
every e-mail attributed to its sender, and to everyone in it. Then an attacker looks at the models.
"""

import argparse

import altair as alt

from coowned.audit.bob import ATTRIBUTIONS, BobTest
from coowned.report.run_figures import bob


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=400, help="models trained for each attribution")
    parser.add_argument("--seed", type=int, help="for a run that can be repeated; its models promise nothing")
    parser.add_argument("-o", "--output", default="bob.svg", help="the picture: .svg, .png or .html")
    asked = parser.parse_args(arguments)
    test = BobTest(trials=asked.trials, seed=asked.seed)
    measured = []
    for attribution in ATTRIBUTIONS:
        found = test.measure(attribution)
        measured.append(found)
        verdict = f"is not refuted by {asked.trials} models" if found.claim_holds else "IS NOT TRUE FOR BOB"
        print(
            f"attributed to {attribution}: {found.copies_with_bob} of the {found.size} chosen e-mails are Bob's; "
            f"claimed epsilon {found.epsilon:.3g} (unit: user, fixed graph; bound {found.contribution_bound}; delta "
            f"{found.delta:g}; zero-out), measured for Bob at least {found.leak.epsilon_lower_bound:.2f}: "
            f"the claim {verdict}"
        )
    figures = [bob(found) for found in measured]
    alone = ("$schema", "autosize", "background", "config", "name", "padding")  # what only a whole picture may have
    charts = ({**{key: value for key, value in f.chart.items() if key not in alone}, "title": f.title} for f in figures)
    alt.vconcat(*map(alt.Chart.from_dict, charts)).save(asked.output)
    print(f"picture: {asked.output}")


if __name__ == "__main__":
    main()
