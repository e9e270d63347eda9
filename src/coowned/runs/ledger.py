"""The ledger beside the runs: the joint privacy cost of all runs on the same people's data."""

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
IN_MEMORY = ":memory:"
"""In place of a file: the runs of this process that have no folder, which count for all later ones, too."""


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a ledger."""

    graph_digest: str  # of the train split
    run: str  # its folder when it began
    guarantee: str
    data_digest: str | None = None  # of the graph of all splits

    def is_of(self, other: "_Entry") -> bool:
        """Returns whether both are on one graph: the same train split, or other splits of the same data."""
        whole = self.data_digest is not None and self.data_digest == other.data_digest
        return whole or self.graph_digest == other.graph_digest


OF_THIS_PROCESS: list[_Entry] = []  # those without a folder


def enter(
    ledger: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    claim: PrivacyGuarantee,
    data_digest: str | None = None,
) -> None:
    """Adds a run that begins to a ledger, and logs a warning with the joint guarantee of all its runs on one graph.

    The first run on a graph has no warning, nor do test runs, which promise nothing and are not entered.

    Guarantees:
      - Earlier runs count also when their folders are gone.   (test_runs_of_one_graph_count_together)
      - Runs on other splits of the same data count, also under the other adjacency.   (test_other_splits_count)
      - Runs on other graphs do not count, nor one run twice.   (test_other_graphs_do_not_count)
      - Runs of this process without a folder count.   (test_runs_without_a_folder_count)
      - A ledger that cannot be kept is a warning, never an error.   (test_a_broken_ledger_is_a_warning)

    Args:
      ledger: its file; a relative one is in the folder next to the run's. Or `IN_MEMORY`.
      folder: of the run.
      claim: of the run, or of the whole tuning that it is part of.
      data_digest: of the graph of all splits, if there are any.
    """
    if claim.test_run:
        return
    entry = _Entry(
        graph_digest=claim.certificate.graph_digest,
        run=os.path.abspath(folder),
        guarantee=claim.to_json(),
        data_digest=data_digest,
    )
    file = None if ledger == IN_MEMORY else Path(entry.run).parent / ledger
    try:
        claims = _entered(file, entry, claim)
    except (CoownedError, OSError) as error:  # the run can be trained all the same
        _LOG.warning(f"warning: {file}: the ledger could not be kept ({error})")
        return
    if len(claims) > 1:
        _LOG.warning(_together(claims, claim, file))


def _entered(file: Path | None, entry: _Entry, claim: PrivacyGuarantee) -> list[PrivacyGuarantee]:
    """Returns the claims of all runs on this one's graph, including this one, which is added if missing."""
    stored = [*OF_THIS_PROCESS, *(() if file is None else _read(file))]
    claims = {
        run.run_id: run for run in (PrivacyGuarantee.from_json(old.guarantee) for old in stored if old.is_of(entry))
    }
    if claim.run_id not in claims and file is None:
        OF_THIS_PROCESS.append(entry)
    elif claim.run_id not in claims:
        assert file is not None
        handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with open(handle, "a", encoding="utf-8") as opened:
            opened.write(codec.encode_json(entry) + "\n")
    return list({**claims, claim.run_id: claim}.values())


def _together(claims: list[PrivacyGuarantee], last: PrivacyGuarantee, file: Path | None) -> str:
    from coowned.accounting.guarantee import joint_epsilon

    where = "of this process" if file is None else f"in {file}"
    if file is not None and OF_THIS_PROCESS:
        where += " or of this process, without a folder"
    said = f"warning: with this one, {len(claims)} runs on this attribution graph are {where}; together they promise "
    try:
        total = joint_epsilon(claims, delta=last.delta, adjacency=last.adjacency)
        said += f"epsilon {rounded_up(total)} ({last.terms()})"
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
