"""`coowned demo`: all stages on a synthetic e-mail world, from a mailbox to a report."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import coowned as co
from coowned.accounting.terms import UNIT
from coowned.cli import show
from coowned.cli.options import Json
from coowned.codec import encode_toml
from coowned.errors import InputError
from coowned.extras import require
from coowned.files import check_writable, remove

if TYPE_CHECKING:
    import pyarrow as pa

    from coowned.accounting.choices import Choice, Plan
    from coowned.audit.bob import Measured
    from coowned.runs.stored_run import StoredRun

_EPSILONS = (0.5, 2.0, 8.0)  # the last is that of the report
_TARGET: dict[str, Any] = {"delta": 1e-8, "adjacency": "zero-out"}
_BATCHES: dict[str, Any] = {"batch_size": 64, "iterations": 200}
_NUM_FEATURES = 64
_CLIP_NORM = 0.4  # at 1 hardly any gradient would be clipped, and the noise be larger than it needs to be
_MARKER = ".coowned-demo"  # in a folder whose files a further demo may replace
_WRITTEN = ("mailbox.mbox", "emails.parquet", "S.parquet", "S.certificate.json", "guarantee.json", "report.html")


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
    from coowned.accounting.statement import rounded_down
    from coowned.audit.bob import ATTRIBUTIONS, BobTest
    from coowned.audit.run_audit import audit_run
    from coowned.certificate import certificate_path_of
    from coowned.cli.select import make_selector
    from coowned.report.page import write_report
    from coowned.selection.selection_files import write_selection
    from coowned.synthetic.toy_emails import EmailWorld, write_mbox

    say = (lambda text="": None) if json else show.line
    bob = BobTest(trials=trials)
    _prepare_folder(output)
    world, mailbox = EmailWorld(num_people=1000, num_emails=5000), output / "mailbox.mbox"
    with show.progress("writing e-mails"):
        emails = world.generate(seed=0)
        write_mbox(emails, mailbox)
    say(f"1. A synthetic world of {world.num_people:,} people: their {emails.num_rows:,} e-mails are in {mailbox}.")

    by_sender, graph = co.read_mail(mailbox, attribute_to="sender").graph, co.read_mail(mailbox).graph
    say(
        f"2. Attributed to its sender alone, an e-mail has {by_sender.num_pairs / by_sender.num_examples:.2f} owners; "
        f"attributed to everyone in it, {graph.num_pairs / graph.num_examples:.2f}.\n"
        "   What is written to Bob is about Bob: only the second protects him."
    )

    with show.progress("selecting and calibrating"):
        plans = {epsilon: _plan(graph, epsilon) for epsilon in _EPSILONS}
    planned, best = plans[_EPSILONS[-1]]
    terms = f"delta {_TARGET['delta']:g}; adjacency: {_TARGET['adjacency']}"
    say(f"3. Sets of e-mails with nobody in more than k of them, and the noise for epsilon {_EPSILONS[-1]:g}")
    say(f"   (unit: {UNIT}; contribution bound k; {terms}):")
    if not json:
        columns = ("   selector", "k", "copies", "distinct", "proven bound", "noise multiplier", "")
        show.table("", columns, [_row(choice) for choice in planned.choices], left=(0, 6))

    selection = make_selector(best.selector, {"contribution_bound": best.contribution_bound}).select(graph)
    certificate = co.certify(graph, selection)
    mechanism = co.PoissonSampling.from_certificate(certificate, **_BATCHES)
    claim = co.guarantee(certificate, mechanism, epsilon=_EPSILONS[-1], **_TARGET)
    selected = output / "S.parquet"
    write_selection(selected, graph, selection)
    certificate_path_of(selected).write_text(certificate.to_json() + "\n", encoding="utf-8")
    (output / "guarantee.json").write_text(claim.to_json() + "\n", encoding="utf-8")
    say(
        f"4. Selected from all {graph.num_examples:,} e-mails, recounted and accounted for ({selected}, "
        f"{certificate_path_of(selected).name}, guarantee.json). Training on this set gives:\n\n"
        f"{claim.statement()}\n"
    )

    _write_features(output, emails)
    with show.progress("training at several epsilons"):
        runs = {epsilon: _train(output, epsilon, choice) for epsilon, (_, choice) in plans.items()}
    tests = {epsilon: run.evaluations()["test"].row(0, named=True) for epsilon, run in runs.items()}
    main, at_main = runs[_EPSILONS[-1]], tests[_EPSILONS[-1]]
    trained = main.claim
    split = trained.certificate.num_examples
    say("5. Is an e-mail about work or private life? Accuracy on e-mails kept out of training, by epsilon")
    say(f"   (unit: {UNIT}; {terms}), and on the same batches without privacy. Each run uses the best choice for")
    say(f"   its own epsilon and selects again, from the {split:,} e-mails of its train split:")
    for epsilon, row in tests.items():
        accuracies = f"{row['accuracy']:6.1%}, without privacy {row['baseline_accuracy']:6.1%}"
        say(f"   epsilon {epsilon:<4g} {accuracies}   ({plans[epsilon][1].label})")
    say(f"   Always answering {at_main['trivial']} gives {at_main['trivial_accuracy']:.1%}.")

    with show.progress("trying to break the claim"):
        audit = audit_run(main.path, seconds=6.0)
    say(f"6. Trying to break the claim of {main.path}: {audit.verdict()}")

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

    others = [run.path for run in runs.values() if run is not main]
    page = write_report(main.path, output / "report.html", also=others, bob=measured)
    say(
        f"\nThe page with all of this: {page}\n"
        f"The model on it was trained on {trained.certificate.num_distinct:,} of the {split:,} e-mails of the train "
        "split. They were selected by who wrote to whom, not by what they say, and a recount found nobody in more "
        f"than {trained.contribution_bound} copies.\n"
        "Noise in training then hides the content of any one person's e-mails, sent or received:\n"
        f"epsilon {trained.shown_epsilon} ({trained.terms()}).\n"
        "With the sender as the only owner of an e-mail, the sender would be protected, but not Bob."
    )
    if json:
        claimed = ("epsilon", "delta", "adjacency", "unit", "contribution_bound", "noise_multiplier")
        show.as_json(
            {
                "folder": str(output),
                "plan": planned.to_rows(),
                **{name: getattr(trained, name) for name in claimed},
                "accuracy_by_epsilon": {
                    **{f"{epsilon:g}": row["accuracy"] for epsilon, row in tests.items()},
                    "none": at_main["baseline_accuracy"],
                },
                "audit": {
                    "holds": audit.holds,
                    "verdict": audit.verdict(),
                    "epsilon_lower_bound": audit.epsilon_lower_bound,
                },
                "bob": [_bob(one) for one in measured],
                "report": str(page),
            }
        )


def _prepare_folder(output: Path) -> None:
    """Creates the folder and removes the files of an earlier demo; other files are not touched.

    Guarantees:
      - Files of the demo's names that no demo wrote are kept, and the folder refused.   (test_others_files_are_kept)
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{output}: cannot create the folder ({error.strerror}); choose another with -o") from None
    check_writable(output)
    paths = [output / name for name in _WRITTEN]
    for epsilon in _EPSILONS:
        paths += _paths(output, epsilon)
    marker = output / _MARKER
    if not marker.exists():
        for path in paths:
            if os.path.lexists(path):
                raise InputError(f"{path}: already exists and was not written by a demo; choose another folder with -o")
        marker.write_text("Written by `coowned demo`, which replaces its own files here.\n", encoding="utf-8")
    for path in paths:
        remove(path)


def _paths(output: Path, epsilon: float) -> tuple[Path, Path]:
    return output / f"run-epsilon-{epsilon:g}", output / f"epsilon-{epsilon:g}.toml"


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


def _plan(graph: "co.AttributionGraph", epsilon: float) -> "tuple[Plan, Choice]":
    """Every choice for one epsilon, and the best of them."""
    settings = {"contribution_bounds": (1, 3, 10), "mechanism": "poisson", "num_parameters": _NUM_FEATURES + 1}
    planned = co.plan(graph, epsilon=epsilon, **settings, **_TARGET, **_BATCHES)
    return planned, next(choice for choice in planned.choices if choice.best)


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


def _write_features(output: Path, emails: "pa.Table") -> None:
    """Hashed words of every e-mail, for a linear model."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from coowned.synthetic.hashed_words import hashed_words

    features = hashed_words(emails["text"].to_pylist(), _NUM_FEATURES)
    column = pa.FixedSizeListArray.from_arrays(pa.array(features.reshape(-1)), _NUM_FEATURES)
    table = emails.select(["message_id", "users", "label"]).append_column("features", column)
    pq.write_table(table, output / "emails.parquet")


def _train(output: Path, epsilon: float, choice: "Choice") -> "StoredRun":
    from coowned.runs.config import TrainConfig
    from coowned.runs.configured_run import run_configuration
    from coowned.runs.run_folder import RunFolder
    from coowned.runs.stored_run import StoredRun

    folder, config = _paths(output, epsilon)
    config.write_text(_configuration(epsilon, choice), encoding="utf-8")
    with RunFolder.open(folder) as opened:
        run_configuration(TrainConfig.read(config), opened)
    return StoredRun.open(folder)


def _configuration(epsilon: float, choice: "Choice") -> str:
    """Returns the configuration of one run of the demo."""
    sections = {
        "data": {"path": "emails.parquet", "users": "users", "example_id": "message_id", "splits": [0.8, 0.1, 0.1]},
        "selection": {"selector": choice.selector, "contribution_bound": choice.contribution_bound, "seed": 0},
        "privacy": {"epsilon": epsilon, **_TARGET},
        "mechanism": {"kind": "dp-sgd", **_BATCHES, "clip_norm": _CLIP_NORM},
        "model": {"kind": "logistic-regression", "features": "features", "label": "label"},
        "optimizer": {"name": "adam", "learning_rate": 0.05},
        "run": {"baseline": True},
        "report": {"name": "E-mail classifier of the demo", "purpose": "tells work from private life"},
    }
    return encode_toml(sections)
