"""`coowned demo`: the whole road on a made-up e-mail world, as far as it is built."""

import os
import re
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coowned.cli import show
from coowned.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from coowned.attribution.graph import AttributionGraph
    from coowned.certificate import ContributionCertificate
    from coowned.selection.selector import Selection

_TARGET: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-8, "adjacency": "zero-out"}
_BATCHES: dict[str, Any] = {"batch_size": 64, "iterations": 200}
_EPSILONS = (0.5, 2.0, 8.0)
_NUM_FEATURES = 64


def run(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the demo's files go.")] = Path(
        "coowned-demo"
    ),
    json: Annotated[bool, typer.Option("--json", help="One JSON object for machines.")] = False,
) -> None:
    """Walks from made-up e-mails to private models and what they promise; needs no input.

    Example:

        coowned demo
    """
    from coowned.accounting.guarantee import guarantee
    from coowned.accounting.planning import plan
    from coowned.attribution.mail import read_mail
    from coowned.certificate import certify
    from coowned.cli.select import certificate_path_of, make_selector
    from coowned.files import whole_files
    from coowned.mechanism.sampling import PoissonSampling
    from coowned.selection.selection_files import write_selection
    from coowned.synthetic.toy_emails import EmailWorld, write_mbox

    say = (lambda text="": None) if json else show.line
    try:
        os.makedirs(output, exist_ok=True)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise InputError(f"{output}: no folder can be made there ({error.strerror}); name another with -o") from error
    world = EmailWorld(num_people=1000, num_emails=5000)
    emails = world.generate(seed=0)
    positions = range(emails.num_rows)
    held_out = emails.take([number for number in positions if number % 5 == 4])  # by position, never by content
    emails = emails.take([number for number in positions if number % 5 != 4])
    mailbox = output / "mailbox.mbox"
    write_mbox(emails, mailbox)
    say(f"1. A made-up world of {world.num_people:,} people: {emails.num_rows:,} e-mails to train on are in {mailbox},")
    say(f"   {held_out.num_rows:,} more are kept to test on.")

    by_sender = read_mail(mailbox, attribute_to="sender").graph
    graph = read_mail(mailbox).graph
    say(
        f"2. Attributed to senders alone an e-mail has {by_sender.num_pairs / by_sender.num_examples:.2f} owners; "
        f"attributed to everyone in it, {graph.num_pairs / graph.num_examples:.2f}."
    )
    say("   What is written to Bob is about Bob: only the second protects him.")

    made = plan(graph, contribution_bounds=(1, 3, 10), mechanism="poisson", **_TARGET, **_BATCHES)
    if not json:
        epsilon = f"{_TARGET['epsilon']:g}"
        say(f"3. Training sets in which nobody is in more than k e-mails, and the noise for epsilon {epsilon}:")
        _print_plan(made.choices)

    best = next(choice for choice in made.choices if choice.best)
    selection = make_selector(best.selector, {"contribution_bound": best.contribution_bound}).select(graph)
    certificate = certify(graph, selection)
    claim = guarantee(certificate, PoissonSampling.from_certificate(certificate, **_BATCHES), **_TARGET)
    chosen, claimed = output / "S.parquet", output / "guarantee.json"
    with whole_files(chosen, certificate_path_of(chosen), claimed) as (chosen_file, certified_file, claimed_file):
        write_selection(chosen_file, graph, selection)
        certified_file.write_text(certificate.to_json() + "\n", encoding="utf-8")
        claimed_file.write_text(claim.to_json() + "\n", encoding="utf-8")
    say(
        f"4. Chosen, recounted and accounted ({chosen}, {certificate_path_of(chosen).name}, {claimed.name}). "
        "It promises:"
    )
    say()
    say(claim.statement())
    say()

    accuracies = _train(graph, selection, certificate, emails, held_out)
    say("5. Is an e-mail about work or private life? Accuracy on e-mails that were kept out of training, by epsilon")
    say(f"   (unit: user, fixed graph; bound {certificate.contribution_bound}; delta {_TARGET['delta']:g}; zero-out):")
    for epsilon, accuracy in accuracies.items():
        say(f"   {'without privacy' if epsilon is None else f'epsilon {epsilon:g}':<16} {accuracy:6.1%}")
    say()
    say(
        f"{selection.num_distinct:,} of {graph.num_examples:,} e-mails were chosen from who wrote to whom, "
        "never from what they say."
    )
    say(f"A second program recounted them: nobody is in more than {certificate.contribution_bound}.")
    say("Try it on your own mail:  coowned inspect YOUR.mbox")
    if json:
        shown = {"none" if epsilon is None else f"{epsilon:g}": value for epsilon, value in accuracies.items()}
        show.as_json(
            {
                "folder": str(output),
                "plan": made.to_rows(),
                "epsilon": claim.epsilon,
                "noise_multiplier": claim.noise_multiplier,
                "accuracy_by_epsilon": shown,
            }
        )


def _print_plan(choices: Any) -> None:
    show.table(
        "",
        ("   selector", "k", "copies", "distinct", "proven bound", "noise multiplier", ""),
        [
            (
                f"   {choice.selector}",
                choice.contribution_bound,
                choice.size,
                choice.num_distinct,
                "" if choice.upper_bound is None else choice.upper_bound,
                "-" if choice.noise_multiplier is None else f"{choice.noise_multiplier:.3f}",
                "<- least noise" if choice.best else "",
            )
            for choice in choices
        ],
        left=(0, 6),
    )


def _train(
    graph: "AttributionGraph",
    selection: "Selection",
    certificate: "ContributionCertificate",
    emails: "pa.Table",
    held_out: "pa.Table",
) -> dict[float | None, float]:
    """Accuracy on the held-out e-mails by epsilon, None without privacy."""
    from coowned.accounting.guarantee import guarantee
    from coowned.attribution.tables import from_table
    from coowned.mechanism.keys import RunKey
    from coowned.mechanism.sampling import PoissonSampling
    from coowned.training.data import FeatureTable
    from coowned.training.evaluate import evaluate
    from coowned.training.loop import train
    from coowned.training.models.logistic_regression import LogisticRegression
    from coowned.training.plan import TrainingPlan

    data = FeatureTable(graph=graph, features=_hashed_words(emails), labels=emails["label"].to_numpy())
    test_graph = from_table(held_out, users="users").graph
    test = FeatureTable(graph=test_graph, features=_hashed_words(held_out), labels=held_out["label"].to_numpy())
    model = LogisticRegression(num_features=_NUM_FEATURES)
    mechanism = PoissonSampling.from_certificate(certificate, **_BATCHES)
    accuracies: dict[float | None, float] = {}
    for epsilon in (*_EPSILONS, None):
        claim = None if epsilon is None else guarantee(certificate, mechanism, **{**_TARGET, "epsilon": epsilon})
        trained = train(
            TrainingPlan(
                certificate=certificate,
                selected=selection,
                mechanism=mechanism,
                guarantee=claim,
                clip_norm=1.0,
                learning_rate=0.05,
                run_key=RunKey.from_operating_system(),
            ),
            model,
            data,
        )
        accuracies[epsilon] = float(evaluate(model, trained.parameters, test, split="test")["accuracy"][0])
    return accuracies


def _hashed_words(emails: "pa.Table") -> "np.ndarray":
    """(emails, _NUM_FEATURES) float32 of norm 1: words counted by a fixed hash, each e-mail by itself."""
    import numpy as np

    counts = np.zeros((emails.num_rows, _NUM_FEATURES), np.float32)
    for row, text in enumerate(emails["text"].to_pylist()):
        for word in re.findall(r"[a-z]+", text.lower()):
            counts[row, zlib.crc32(word.encode()) % _NUM_FEATURES] += 1
    return counts / np.maximum(1, np.linalg.norm(counts, axis=1, keepdims=True))
