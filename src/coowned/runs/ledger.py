"""The ledger beside the runs: what all runs on one attribution graph promise together, said to whoever trains again."""

import os
from pathlib import Path

import msgspec

from coowned import codec
from coowned.accounting.guarantee import PrivacyGuarantee, compose
from coowned.accounting.statement import rounded_up
from coowned.errors import CoownedError

NAME = "coowned-ledger.jsonl"


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a ledger."""

    graph_digest: str
    run: str  # its folder when it ended
    guarantee: str


def ledger_of(folder: str | os.PathLike[str]) -> Path:
    """Returns the ledger next to a run's folder."""
    return Path(os.path.abspath(folder)).parent / NAME


def enter(ledger: str | os.PathLike[str], folder: str | os.PathLike[str], claim: PrivacyGuarantee) -> str | None:
    """Adds a finished run to a ledger, and says what all runs in it on the same graph promise together.

    Guarantees:
      - Earlier runs count also when their folders are gone.   (test_runs_of_one_graph_count_together)
      - Runs on other graphs do not count, nor one run twice.   (test_other_graphs_do_not_count)
      - A ledger that cannot be kept is a warning, never an error.   (test_a_broken_ledger_is_a_warning)

    Returns:
      One sentence to warn with; None for the first run on a graph, and for test runs, which promise nothing.
    """
    if claim.test_run:
        return None
    file = Path(ledger)
    try:
        claims = _entered(file, folder, claim)
    except (CoownedError, OSError) as error:  # the run is finished all the same
        return f"warning: {file}: the ledger could not be kept ({error})"
    return None if len(claims) == 1 else _together(claims, claim, file)


def _entered(file: Path, folder: str | os.PathLike[str], claim: PrivacyGuarantee) -> list[PrivacyGuarantee]:
    """Returns the claims of all runs on this one's graph, this one included, which is added where it is missing."""
    digest = claim.certificate.graph_digest
    stored = [PrivacyGuarantee.from_json(entry.guarantee) for entry in _read(file) if entry.graph_digest == digest]
    claims = {run.run_id: run for run in stored}
    if claim.run_id not in claims:
        entry = _Entry(graph_digest=digest, run=os.path.abspath(folder), guarantee=claim.to_json())
        handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with open(handle, "a", encoding="utf-8") as opened:
            opened.write(codec.encode_json(entry) + "\n")
    return list({**claims, claim.run_id: claim}.values())


def _together(claims: list[PrivacyGuarantee], last: PrivacyGuarantee, file: Path) -> str:
    said = f"warning: {len(claims)} runs on this attribution graph are in {file}; together "
    try:
        total = compose(claims, delta=last.delta, allow_large_delta=True)
        said += f"epsilon {rounded_up(total.epsilon)} ({last.terms()})"
    except CoownedError as error:
        said += f"they promise less than any of them alone ({error})"
    return (
        f"{said}. Choosing among them is covered only by what they promise together; `coowned tune` (co.tune) tries "
        "settings at one epsilon that is fixed in advance"
    )


def _read(file: Path) -> list[_Entry]:
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return [
        codec.decode_json(_Entry, line, name=f"{file} line {number}", remedy="name another ledger with --ledger")
        for number, line in enumerate(lines, start=1)
    ]
