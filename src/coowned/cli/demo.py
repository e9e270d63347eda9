"""`coowned demo`: the whole road on a made-up e-mail world, from a mailbox to a page."""

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coowned.cli import show
from coowned.errors import InputError
from coowned.files import check_writable

if TYPE_CHECKING:
    import pyarrow as pa

    from coowned.audit.bob import Measured

_TARGET: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-8, "adjacency": "zero-out"}
_BATCHES: dict[str, Any] = {"batch_size": 64, "iterations": 200}
_EPSILONS = (0.5, 2.0, 8.0)
_NUM_FEATURES = 64
_MARKER = ".coowned-demo"  # in a folder whose files a further demo may replace
_OURS = ("mailbox.mbox", "emails.parquet", "S.parquet", "S.certificate.json", "guarantee.json", "report.html")


def run(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the demo's files go.")] = Path(
        "coowned-demo"
    ),
    trials: Annotated[int, typer.Option(metavar="N", help="Models trained for each half of Bob's story.")] = 200,
    json: Annotated[bool, typer.Option("--json", help="One JSON object for machines.")] = False,
) -> None:
    """Walks from made-up e-mails to private models, an audit and a page about them; needs no input.

    Plan, select, certify, calibrate, train at three epsilons, try to break the claim, and report. In between it tells
    the story of Bob: a secret about him is in e-mails he received, and attributing them to their senders does not
    protect him.

    Example:

        coowned demo
    """
    from coowned.accounting.guarantee import UNIT, guarantee
    from coowned.accounting.planning import plan
    from coowned.accounting.statement import rounded_down, rounded_up
    from coowned.attribution.mail import read_mail
    from coowned.audit.bob import ATTRIBUTIONS, BobTest
    from coowned.certificate import certify
    from coowned.cli.certificates import certificate_path_of
    from coowned.cli.select import make_selector
    from coowned.files import whole_files
    from coowned.mechanism.poisson_sampling import PoissonSampling
    from coowned.selection.selection_files import write_selection
    from coowned.synthetic.toy_emails import EmailWorld, write_mbox
    from coowned.training.run import Run

    say = (lambda text="": None) if json else show.line
    bob = BobTest(trials=trials)
    _make_room(output)
    world = EmailWorld(num_people=1000, num_emails=5000)
    mailbox = output / "mailbox.mbox"
    with show.progress("writing e-mails"):
        emails = world.generate(seed=0)
        write_mbox(emails, mailbox)
    say(f"1. A made-up world of {world.num_people:,} people: their {emails.num_rows:,} e-mails are in {mailbox}.")

    by_sender = read_mail(mailbox, attribute_to="sender").graph
    graph = read_mail(mailbox).graph
    say(
        f"2. Attributed to senders alone an e-mail has {by_sender.num_pairs / by_sender.num_examples:.2f} owners; "
        f"attributed to everyone in it, {graph.num_pairs / graph.num_examples:.2f}."
    )
    say("   What is written to Bob is about Bob: only the second protects him.")

    with show.progress("selecting and calibrating"):
        made = plan(graph, contribution_bounds=(1, 3, 10), mechanism="poisson", **_TARGET, **_BATCHES)
    terms = f"delta {_TARGET['delta']:g}; adjacency: {_TARGET['adjacency']}"
    say(f"3. Sets of e-mails in which nobody is in more than k, and the noise for epsilon {_TARGET['epsilon']:g}")
    say(f"   (unit: {UNIT}; contribution bound k; {terms}):")
    if not json:
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
        f"4. Chosen from all {graph.num_examples:,} e-mails, recounted and accounted ({chosen}, "
        f"{certificate_path_of(chosen).name}, {claimed.name}). Whoever trains on these promises:"
    )
    say()
    say(claim.statement())
    say()

    with show.progress("training at several epsilons"):
        runs = _train(output, emails, best.selector, best.contribution_bound, say)
    accuracies = {epsilon: _accuracy(folder) for epsilon, folder in runs.items()}
    main = runs[_EPSILONS[-1]]
    trained = Run.open(main).claim
    split = trained.certificate.num_examples
    say("5. Is an e-mail about work or private life? Accuracy on e-mails kept out of training, by epsilon")
    say(f"   (unit: {UNIT}; contribution bound {trained.contribution_bound}; {terms}). Each run chose")
    say(f"   anew, from the {split:,} e-mails of its train split, and has a certificate of its own:")
    for epsilon, accuracy in accuracies.items():
        say(f"   {'without privacy' if epsilon is None else f'epsilon {epsilon:g}':<16} {accuracy:6.1%}")

    with show.progress("trying to break the claim"):
        audit = _audit(main)
    say(f"6. Trying to break the claim of {main}: {audit['verdict']}")

    with show.progress("training with and without Bob") as done:
        measured = []
        for number, attribution in enumerate(ATTRIBUTIONS):
            done(number / len(ATTRIBUTIONS), f"training with and without Bob, attributed to {attribution}")
            measured.append(bob.measure(attribution))
    say("7. A secret about Bob is in e-mails he received. The same claim twice, and what an attacker measured for Bob:")
    for one in measured:
        # That an attack failed proves nothing: a claim is broken or it is not, and never confirmed.
        verdict = f"not refuted by {one.leak.trials:,} models" if one.claim_holds else "is NOT true for Bob"
        say(
            f"   attributed to {one.attribution:<9} claimed epsilon {rounded_up(one.epsilon)} (unit: {UNIT}; "
            f"contribution bound {one.contribution_bound}; delta {one.delta:g}; adjacency: zero-out), measured at "
            f"least {rounded_down(one.leak.epsilon_lower_bound)}: {verdict}"
        )

    page = _report(output, runs, measured)
    say()
    say(f"The page with all of this: {page}")
    say(
        f"For the model on it {trained.certificate.num_distinct:,} of the {split:,} e-mails of the train split were "
        "chosen from who wrote to whom, not from what they say, and a recount found nobody in more than "
        f"{trained.contribution_bound} copies."
    )
    say("Noise in training then hides whether any one person's e-mails, sent or received, said what they said:")
    say(f"epsilon {rounded_up(trained.epsilon)} ({trained.terms()}).")
    say("Naming only the sender of an e-mail as its owner would have protected the sender, and not Bob.")
    if json:
        show.as_json(
            {
                "folder": str(output),
                "plan": made.to_rows(),
                "epsilon": trained.epsilon,
                "delta": trained.delta,
                "adjacency": trained.adjacency,
                "unit": UNIT,
                "contribution_bound": trained.contribution_bound,
                "noise_multiplier": trained.noise_multiplier,
                "accuracy_by_epsilon": {"none" if e is None else f"{e:g}": value for e, value in accuracies.items()},
                "audit": audit,
                "bob": [
                    {
                        "attribution": one.attribution,
                        "claimed_epsilon": one.epsilon,
                        "delta": one.delta,
                        "adjacency": "zero-out",
                        "unit": UNIT,
                        "contribution_bound": one.contribution_bound,
                        "measured_epsilon": one.leak.epsilon_lower_bound,
                        "models": one.leak.trials,
                        "refuted": not one.claim_holds,
                    }
                    for one in measured
                ],
                "report": str(page),
            }
        )


def _make_room(output: Path) -> None:
    """The folder, without what an earlier demo left in it; anybody else's files are not touched.

    Guarantees:
      - Files of the demo's names that no demo wrote are kept, and the folder refused.   (test_others_files_are_kept)
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{output}: no folder can be made there ({error.strerror}); name another with -o") from None
    check_writable(output)
    places = [output / name for name in _OURS]
    for epsilon in (*_EPSILONS, None):
        places += _places(output, epsilon)
    marker = output / _MARKER
    if not marker.exists():
        for place in places:
            if os.path.lexists(place):
                raise InputError(f"{place}: is there already, and no demo wrote it; name another folder with -o")
        marker.write_text("Made by `coowned demo`, which replaces its own files here.\n", encoding="utf-8")
    for place in places:
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)


def _places(output: Path, epsilon: float | None) -> tuple[Path, Path]:
    name = "without-privacy" if epsilon is None else f"epsilon-{epsilon:g}"
    return output / f"run-{name}", output / f"{name}.toml"


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
                "<- best" if choice.best else "",
            )
            for choice in choices
        ],
        left=(0, 6),
    )


def _train(
    output: Path, emails: "pa.Table", selector: str, contribution_bound: int, say: Any
) -> dict[float | None, Path]:
    """The folders of the runs by epsilon, None without privacy."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from coowned.synthetic.hashed_words import hashed_words
    from coowned.training.checkpoint import RunFolder
    from coowned.training.config import TrainConfig
    from coowned.training.configured_run import run_configuration

    features = hashed_words(emails["text"].to_pylist(), _NUM_FEATURES)
    table = emails.select(["message_id", "users", "label"]).append_column(
        "features", pa.FixedSizeListArray.from_arrays(pa.array(features.reshape(-1)), _NUM_FEATURES)
    )
    pq.write_table(table, output / "emails.parquet")
    folders: dict[float | None, Path] = {}
    for epsilon in (*_EPSILONS, None):
        folder, config = _places(output, epsilon)
        text = _configuration(epsilon, selector, contribution_bound)
        config.write_text(text, encoding="utf-8")
        with RunFolder.open(folder) as opened:
            run_configuration(TrainConfig.read(config), opened, text=text)
        folders[epsilon] = folder
    return folders


def _configuration(epsilon: float | None, selector: str, contribution_bound: int) -> str:
    privacy = 'epsilon = "none"' if epsilon is None else f"epsilon = {epsilon}\ndelta = {_TARGET['delta']}"
    return f"""# coowned train {"without-privacy" if epsilon is None else f"epsilon-{epsilon:g}"}.toml -o RUN
[data]
path = "emails.parquet"
users = "users"
example_id = "message_id"

[selection]
selector = "{selector}"
contribution_bound = {contribution_bound}

[privacy]
{privacy}

[mechanism]
kind = "dp-sgd"
batch_size = {_BATCHES["batch_size"]}
iterations = {_BATCHES["iterations"]}
clip_norm = 1.0

[model]
kind = "logistic-regression"
features = "features"
label = "label"

[optimizer]
learning_rate = 0.05
"""


def _accuracy(folder: Path) -> float:
    import polars as pl

    return float(pl.read_parquet(folder / "test.parquet")["accuracy"][0])


def _audit(folder: Path) -> dict[str, Any]:
    from coowned.audit.run_audit import audit_run

    found = audit_run(folder, seconds=6.0)
    return {"holds": found.holds, "verdict": found.verdict(), "epsilon_lower_bound": found.epsilon_lower_bound}


def _report(output: Path, runs: dict[float | None, Path], measured: list["Measured"]) -> Path:
    from coowned.report.page import write_report

    main, others = runs[_EPSILONS[-1]], [folder for epsilon, folder in runs.items() if epsilon != _EPSILONS[-1]]
    return write_report(main, output / "report.html", also=others, bob=measured)
