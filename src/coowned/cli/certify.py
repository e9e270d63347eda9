"""`coowned certify`: recounts a selection and compares it with what its certificate claims."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coowned.cli import show
from coowned.cli.calibrate import read_certificate
from coowned.cli.data_options import reads_data
from coowned.cli.select import certificate_path_of
from coowned.errors import CertificateMismatchError, InputError, UncertifiableError

if TYPE_CHECKING:
    from coowned.attribution.sources import DataSource


@reads_data
def run(
    source: "DataSource",
    selection: Annotated[
        Path, typer.Argument(metavar="S.parquet", help="What was selected: a file, or a folder written by Spark.")
    ],
    certificate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The claim (default: S.certificate.json beside S).")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="The recount as JSON on stdout.")] = False,
) -> None:
    """Recounts S on its data; exit code 1 where the certificate claims something else.

    Examples:

        coowned certify mail.mbox S.parquet

        coowned certify papers.parquet S.parquet --users authors --example-id id --certificate claim.json
    """
    from coowned.certificate import certify
    from coowned.selection.selection_files import read_selection

    if not selection.exists():
        raise InputError(f"{selection}: no such file or folder; name the S that `coowned select` wrote")
    path = certificate or certificate_path_of(selection)
    claim = read_certificate(path)
    with show.progress("reading") as progress:
        graph = source.read(progress).graph
    selected = read_selection(selection, graph)
    try:
        claim.check(graph, selected)
    except CertificateMismatchError as error:
        if json:
            show.as_json({"holds": False, "reason": str(error)})
        raise
    except UncertifiableError as error:  # groups that share a user: the claim of groups does not hold
        raise CertificateMismatchError(f"{selection}: {error}") from error
    if json:
        show.line(certify(graph, selected).to_json())
        return
    show.line(f"holds: {claim.size:,} copies, no user in more than {claim.contribution_bound:,}")
    if claim.min_separation is not None:
        show.line(f"holds: any {claim.min_separation:,} consecutive batches hold at most one copy of each user")
    show.line(f"graph {claim.graph_digest}")
    show.line(f"selection {claim.selection_digest}")
