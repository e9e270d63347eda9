"""The ledger beside the runs: the joint privacy cost of all runs on one attribution graph."""

import logging
import os
from pathlib import Path

import msgspec

from coowned import codec
from coowned.accounting.privacy_guarantee import PrivacyGuarantee
from coowned.accounting.statement import rounded_up
from coowned.errors import CoownedError

_LOG = logging.getLogger(__name__)
NAME = "coowned-ledger.jsonl"


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a ledger."""

    graph_digest: str
    run: str  # its folder when it began
    guarantee: str


def enter(ledger: str | os.PathLike[str], folder: str | os.PathLike[str], claim: PrivacyGuarantee) -> None:
    """Adds a run that begins to a ledger, and logs a warning with the joint guarantee of all its runs on one graph.

    The first run on a graph has no warning, nor do test runs, which promise nothing and are not entered.

    Guarantees:
      - Earlier runs count also when their folders are gone.   (test_runs_of_one_graph_count_together)
      - Runs on other graphs do not count, nor one run twice.   (test_other_graphs_do_not_count)
      - A ledger that cannot be kept is a warning, never an error.   (test_a_broken_ledger_is_a_warning)

    Args:
      ledger: its file; a relative one is in the folder next to the run's.
      folder: of the run.
      claim: of the run, or of the whole tuning that it is part of.
    """
    if claim.test_run:
        return
    file = Path(os.path.abspath(folder)).parent / ledger
    try:
        claims = _entered(file, folder, claim)
    except (CoownedError, OSError) as error:  # the run can be trained all the same
        _LOG.warning(f"warning: {file}: the ledger could not be kept ({error})")
        return
    if len(claims) > 1:
        _LOG.warning(_together(claims, claim, file))


def _entered(file: Path, folder: str | os.PathLike[str], claim: PrivacyGuarantee) -> list[PrivacyGuarantee]:
    """Returns the claims of all runs on this one's graph, including this one, which is added if missing."""
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
    from coowned.accounting.guarantee import compose

    said = f"warning: with this one, {len(claims)} runs on this attribution graph are in {file}; together they promise "
    try:
        total = compose(claims, delta=last.delta, allow_large_delta=True)
        said += f"epsilon {rounded_up(total.epsilon)} ({last.terms()})"
    except CoownedError as error:
        said += f"less than any of them alone ({error})"
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
