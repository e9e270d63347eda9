"""`coowned certify`: recounts a selection and compares it with what its certificate claims."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coowned.cli import show
from coowned.cli.engine import Engine, runs_on_engines
from coowned.cli.options import Json, Splits, read_certificate, reads_data, shares_of
from coowned.errors import CertificateMismatchError, InputError, UncertifiableError
from coowned.progress import counted

if TYPE_CHECKING:
    from coowned.attribution.graph import AttributionGraph
    from coowned.attribution.sources import DataSource
    from coowned.certificate import ContributionCertificate


@runs_on_engines
@reads_data
def run(
    source: "DataSource",
    engine: Engine,
    selection: Annotated[
        str,  # not a Path, which would turn hdfs://head/S.parquet into hdfs:/head/S.parquet
        typer.Argument(metavar="S.parquet", help="What was selected: a file, or a folder written by Spark."),
    ],
    certificate: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The claim (default: S.certificate.json, or a run's certificate.json)."),
    ] = None,
    splits: Splits = None,
    json: Json = False,
) -> None:
    """Recounts S on its data; exits with code 1 if the certificate claims something else.

    The recount shares no code with the selectors. The S of a run folder is recounted on the run's train split.

    Examples:

        coowned certify mail.mbox S.parquet

        coowned certify mail.mbox RUN/S.parquet

        coowned certify papers.parquet S.parquet --users authors --example-id id --certificate claim.json

        coowned certify hdfs://head/pairs.parquet hdfs://head/S.parquet --user user_id \\
            --example-id example_id --engine spark --master spark://head:7077
    """
    from coowned.certificate import certificate_for, separation_in_words

    run_folder = _run_folder(selection)
    certificate_path = certificate or (
        str(run_folder / "certificate.json") if run_folder else certificate_for(selection)
    )
    engine.refuse_addresses(str(source.path), selection, certificate_path)
    if "://" not in selection and not Path(selection).exists():
        raise InputError(f"{selection}: no such file or folder; give the S that `coowned select` wrote")
    if engine.on_spark and run_folder is not None:
        raise InputError(
            f"{selection}: the S of a run was selected from its train split; recount it without --engine spark"
        )
    shares = shares_of(splits)
    if shares is not None and run_folder is not None:
        raise InputError(f"{selection}: the S of a run is recounted on the run's own train split; remove --splits")
    try:
        if engine.on_spark:
            claim, recount = _on_spark(source, selection, certificate_path, shares, engine)
        else:
            claim, recount = _locally(source, selection, certificate_path, shares)
        claim.check_recount(recount)
    except CertificateMismatchError as error:
        if json:
            show.as_json({"holds": False, "reason": str(error)})
        raise
    except UncertifiableError as error:  # groups share a user, so the claim of groups does not hold
        raise CertificateMismatchError(f"{selection}: {error}") from error
    if json:
        show.line(recount.to_json())
        return
    show.line(f"holds: {counted(claim.size, 'copy', 'copies')}, no user in more than {claim.contribution_bound:,}")
    if claim.min_separation:
        show.line(f"holds: {separation_in_words(claim.min_separation)}")
    show.line(f"graph {claim.graph_digest}")
    show.line(f"selection {claim.selection_digest}")


def _locally(
    source: "DataSource", selection: str, certificate: str, shares: list[float] | None
) -> "tuple[ContributionCertificate, ContributionCertificate]":
    from coowned.certificate import certify
    from coowned.content.splits import train_graph
    from coowned.selection.selection_files import read_selection

    claim = read_certificate(Path(certificate))
    with show.progress("reading") as progress:
        graph = source.read(progress, content=False).graph
    if (run_folder := _run_folder(selection)) is not None:
        return claim, _recount_run(run_folder, claim, graph)
    graph = graph if shares is None else train_graph(graph, shares)
    claim.check_graph(graph.digest)
    return claim, certify(graph, read_selection(selection, graph))


def _run_folder(selection: str) -> Path | None:
    """Returns the folder of the run that S belongs to, if any."""
    file = Path(selection)
    if "://" in selection or file.name != "S.parquet":
        return None
    return file.parent if all(file.with_name(name).is_file() for name in ("config.toml", "run.json")) else None


def _recount_run(
    folder: Path, claim: "ContributionCertificate", graph: "AttributionGraph"
) -> "ContributionCertificate":
    """Recounts the S of a run on the train split of its configuration."""
    from coowned.certificate import certify
    from coowned.content.splits import train_graph
    from coowned.runs.stored_run import StoredRun

    run = StoredRun.open(folder, finished=False)
    train = train_graph(graph, run.config(folder).splits)
    claim.check_graph(train.digest)
    return certify(train, run.selection(train))


def _on_spark(
    source: "DataSource", selection: str, certificate: str, shares: list[float] | None, engine: Engine
) -> "tuple[ContributionCertificate, ContributionCertificate]":
    from coowned.certificate import ContributionCertificate
    from coowned.spark.certificate import certify
    from coowned.spark.selection_files import read_certificate as read_text
    from coowned.spark.selection_files import read_selection
    from coowned.spark.session import check_machine
    from coowned.spark.sources import attribute_source, check_source

    check_source(source)
    claim = None if "://" in certificate else read_certificate(Path(certificate))
    check_machine()
    with engine.session(source.path, "recounting") as (spark, progress):
        if claim is None:
            claim = ContributionCertificate.from_json(read_text(spark, certificate), name=certificate)
        chosen = read_selection(spark, selection)
        progress(0.1, "reading")
        graph = attribute_source(spark, source)
        graph = graph if shares is None else graph.train_split(shares)
        claim.check_graph(graph.digest)
        progress(0.5, "counting")
        recount = certify(graph, chosen)
        graph.release()
    return claim, recount
