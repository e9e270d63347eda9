"""`coowned demo`: all stages on a synthetic e-mail world, from a mailbox to a report."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coowned.accounting.terms import UNIT
from coowned.cli import show
from coowned.cli.options import Json
from coowned.errors import require

if TYPE_CHECKING:
    import pyarrow as pa

    from coowned.accounting.choices import Choice, Plan
    from coowned.accounting.privacy_guarantee import PrivacyGuarantee
    from coowned.attribution.graph import AttributionGraph
    from coowned.audit.bob import BobTest, Measured
    from coowned.audit.run_audit import RunAudit
    from coowned.demo import Demo
    from coowned.runs.stored_run import StoredRun


def run(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where to write the demo's files.")
    ] = Path("coowned-demo"),
    trials: Annotated[
        int, typer.Option(metavar="N", help="Models to train for each attribution in Bob's story.")
    ] = 200,
    json: Json = False,
) -> None:
    """Goes from synthetic e-mails to private models, an audit and a report; needs no input.

    Plans, selects, certifies, calibrates, trains at three epsilons with the best choice for each, tries to break the
    claim, and reports. It also tells the story of Bob: a secret about him is in e-mails he received, and attributing
    them to their senders does not protect him.

    Example:

        coowned demo
    """
    require("train", "the demo")
    from coowned.audit.bob import BobTest
    from coowned.audit.run_audit import audit_run
    from coowned.demo import EPSILONS, Demo

    say: Callable[[str], object] = (lambda text: None) if json else show.line
    bob = BobTest(trials=trials)
    demo = Demo(output)
    demo.prepare()
    emails, graph = _attribute(demo, say)
    with show.progress("selecting and calibrating"):
        plans = {epsilon: demo.plan(graph, epsilon) for epsilon in EPSILONS}
    planned, best = plans[EPSILONS[-1]]
    if not json:
        _show_plan(planned)
    _show_claim(demo, graph, demo.select(graph, best), say)
    demo.write_features(emails)
    with show.progress("training at several epsilons"):
        runs = {epsilon: demo.train(epsilon, choice) for epsilon, (_, choice) in plans.items()}
    tests = {epsilon: run.evaluations()["test"].row(0, named=True) for epsilon, run in runs.items()}
    main = runs[EPSILONS[-1]]
    _show_accuracies(main, tests, {epsilon: choice for epsilon, (_, choice) in plans.items()}, say)
    with show.progress("trying to break the claim"):
        audit = audit_run(main.path, seconds=6.0)
    say(f"6. Trying to break the claim of {main.path}: {audit.verdict()}")
    measured = _measure(bob, say)
    page = demo.report(main, [run for run in runs.values() if run is not main], measured)
    _show_end(main, page, say)
    if json:
        show.as_json(
            {
                "folder": str(output),
                "plan": planned.to_rows(),
                **_figures(main, tests, audit),
                "bob": [_bob(one) for one in measured],
                "report": str(page),
            }
        )


def _attribute(demo: "Demo", say: Callable[[str], object]) -> "tuple[pa.Table, AttributionGraph]":
    from coowned.attribution.mail import read_mail

    with show.progress("writing e-mails"):
        emails = demo.write_mailbox()
    say(
        f"1. A synthetic world of {demo.world.num_people:,} people: their {emails.num_rows:,} e-mails are in "
        f"{demo.mailbox}."
    )
    by_sender, graph = read_mail(demo.mailbox, attribute_to="sender").graph, read_mail(demo.mailbox).graph
    say(
        f"2. Attributed to its sender alone, an e-mail has {by_sender.num_pairs / by_sender.num_examples:.2f} owners; "
        f"attributed to everyone in it, {graph.num_pairs / graph.num_examples:.2f}.\n"
        "   What is written to Bob is about Bob: only the second protects him."
    )
    return emails, graph


def _terms() -> str:
    from coowned.demo import TARGET

    return f"delta {TARGET['delta']:g}; adjacency: {TARGET['adjacency']}"


def _show_plan(planned: "Plan") -> None:
    from coowned.demo import EPSILONS

    show.line(f"3. Sets of e-mails with nobody in more than k of them, and the noise for epsilon {EPSILONS[-1]:g}")
    show.line(f"   (unit: {UNIT}; contribution bound k; {_terms()}):")
    columns = ("   selector", "k", "copies", "distinct", "proven bound", "noise multiplier", "")
    show.table("", columns, [_row(choice) for choice in planned.choices], left=(0, 6))


def _row(choice: "Choice") -> tuple[str | int, ...]:
    return (
        f"   {choice.selector}",
        choice.contribution_bound or "-",
        choice.size,
        choice.num_distinct,
        "" if choice.selected.upper_bound is None else choice.selected.upper_bound,
        "-" if choice.noise_multiplier is None else f"{choice.noise_multiplier:.3f}",
        "<- best" if choice.best else "",
    )


def _show_claim(
    demo: "Demo", graph: "AttributionGraph", claim: "PrivacyGuarantee", say: Callable[[str], object]
) -> None:
    say(
        f"4. Selected from all {graph.num_examples:,} e-mails, recounted and accounted for ({demo.selected}, "
        f"S.certificate.json, guarantee.json). Training on this set gives:\n\n"
        f"{claim.statement()}\n"
    )


def _show_accuracies(
    main: "StoredRun",
    tests: Mapping[float, Mapping[str, Any]],
    choices: "Mapping[float, Choice]",
    say: Callable[[str], object],
) -> None:
    say("5. Is an e-mail about work or private life? Accuracy on e-mails kept out of training, by epsilon")
    say(f"   (unit: {UNIT}; {_terms()}), and on the same batches without privacy. Each run uses the best choice for")
    say(f"   its own epsilon and selects again, from the {main.certificate.num_examples:,} e-mails of its train split:")
    for epsilon, row in tests.items():
        accuracies = f"{row['accuracy']:6.1%}, without privacy {row['baseline_accuracy']:6.1%}"
        say(f"   epsilon {epsilon:<4g} {accuracies}   ({choices[epsilon].label})")
    trivial = tests[max(tests)]
    say(f"   Always answering {trivial['trivial']} gives {trivial['trivial_accuracy']:.1%}.")


def _measure(bob: "BobTest", say: Callable[[str], object]) -> "Sequence[Measured]":
    from coowned.accounting.statement import rounded_down
    from coowned.audit.bob import ATTRIBUTIONS

    measured = []
    with show.progress("training with and without Bob") as done:
        for number, attribution in enumerate(ATTRIBUTIONS):
            done(number / len(ATTRIBUTIONS), f"training with and without Bob, attributed to {attribution}")
            measured.append(bob.measure(attribution))
    say("7. A secret about Bob is in e-mails he received. The same claim twice, and what an attacker measured for Bob")
    say(f"   ({measured[0].terms}):")
    for one in measured:
        # That an attack failed proves nothing: a claim is broken or it is not, and never confirmed.
        verdict = f"not refuted by {one.leak.trials:,} models" if one.claim_holds else "is NOT true for Bob"
        say(
            f"   attributed to {one.attribution:<9} claimed epsilon {one.shown_epsilon}, measured at least "
            f"{rounded_down(one.leak.epsilon_lower_bound)}: {verdict}"
        )
    return measured


def _show_end(main: "StoredRun", page: Path, say: Callable[[str], object]) -> None:
    trained, certificate = main.claim, main.certificate
    say(
        f"\nThe page with all of this: {page}\n"
        f"The model on it was trained on {certificate.num_distinct:,} of the {certificate.num_examples:,} e-mails of "
        "the train split. They were selected by who wrote to whom, not by what they say, and a recount found nobody "
        f"in more than {trained.contribution_bound} copies.\n"
        "Noise in training then hides the content of any one person's e-mails, sent or received:\n"
        f"epsilon {trained.shown_epsilon} ({trained.terms()}).\n"
        "With the sender as the only owner of an e-mail, the sender would be protected, but not Bob."
    )


def _figures(main: "StoredRun", tests: Mapping[float, Mapping[str, Any]], audit: "RunAudit") -> dict[str, Any]:
    claimed = ("epsilon", "delta", "adjacency", "unit", "contribution_bound", "noise_multiplier")
    return {
        **{name: getattr(main.claim, name) for name in claimed},
        "accuracy_by_epsilon": {
            **{f"{epsilon:g}": row["accuracy"] for epsilon, row in tests.items()},
            "none": tests[max(tests)]["baseline_accuracy"],
        },
        "audit": {
            "holds": audit.holds,
            "verdict": audit.verdict(),
            "epsilon_lower_bound": audit.epsilon_lower_bound,
        },
    }


def _bob(found: "Measured") -> dict[str, Any]:
    return {
        **{name: getattr(found, name) for name in ("attribution", "delta", "contribution_bound")},
        "claimed_epsilon": found.target_epsilon,
        "proven_epsilon": found.epsilon,
        "measured_epsilon": found.leak.epsilon_lower_bound,
        "adjacency": "zero-out",
        "unit": UNIT,
        "models": found.leak.trials,
        "refuted": not found.claim_holds,
    }
