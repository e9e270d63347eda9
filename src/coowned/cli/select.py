"""`coowned select`: chooses the training set from the graph alone, and certifies it."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from coowned.cli import show
from coowned.cli.engine import Engine, runs_on_engines
from coowned.cli.options import (
    Json,
    Seed,
    Splits,
    complete_with,
    declared_parameter,
    files_of,
    raise_exists,
    reads_data,
    refuse_to_overwrite,
    shares_of,
    with_parameters,
)
from coowned.errors import InputError
from coowned.files import whole_files
from coowned.progress import counted, one_of
from coowned.selection.registry import CLASSES, declared_settings, make_selector

if TYPE_CHECKING:
    from coowned.attribution.sources import DataSource
    from coowned.certificate import ContributionCertificate
    from coowned.selection.selector import Selector

    # The certificate, and advice if a few users keep most examples out.
    _Certified: TypeAlias = tuple[ContributionCertificate, str | None]


def _with_settings(verb: Callable[..., Any]) -> Callable[..., Any]:
    parameters = [
        declared_parameter(name, kind, option, "Selector") for name, (kind, option) in declared_settings().items()
    ]
    return with_parameters(verb, "settings", parameters, _given)


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


@_with_settings
@runs_on_engines
@reads_data
def run(
    source: "DataSource",
    settings: dict[str, Any],
    engine: Engine,
    output: Annotated[
        str,  # not a Path, which would turn hdfs://head/S.parquet into hdfs:/head/S.parquet
        typer.Option(
            "--output", "-o", metavar="S.parquet", help="The file to write; the certificate is written next to it."
        ),
    ],
    selector: Annotated[
        str,
        typer.Option(help=f"{one_of(CLASSES)}.", autocompletion=complete_with(CLASSES)),
    ] = "greedy",
    seed: Seed = 0,
    splits: Splits = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace S and its certificate if they exist.")
    ] = False,
    shards: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Also write the selected and held-out rows with their content, for [data] shards; needs --splits.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Selects a training set S in which no user is in more than K copies, and writes it with its certificate.

    Only ids and users are read, never content.

    Examples:

        coowned select mail.mbox --contribution-bound 3 -o S.parquet

        coowned select papers.parquet --users authors --selector priced --contribution-bound 1 -o S.parquet

        coowned select mail.mbox --selector greedy-min-separation --batch-size 256 \\
            --iterations 100 --min-separation 4 -o S.parquet

        coowned select papers.parquet --users authors --contribution-bound 2 --splits 0.8,0.1,0.1 -o S.parquet

        coowned select pairs.parquet --user user_id --example-id example_id --contribution-bound 3 \\
            --engine spark --master spark://head:7077 -o S.parquet
    """
    from coowned.certificate import certificate_for

    chooser = make_selector(selector, settings)
    engine.refuse_addresses(str(source.path), output, *([] if shards is None else [shards]))
    certificate_path = certificate_for(output)
    refuse_to_overwrite(files_of(source), (output, certificate_path, shards), replace=overwrite)
    shares = shares_of(splits)
    if shards is not None and shares is None:
        raise InputError("--shards needs --splits, the shares that training uses, such as 0.8,0.1,0.1")
    if engine.on_spark:
        certificate, advice = _run_on_spark(source, chooser, seed, shares, (output, shards), engine, overwrite)
    else:
        certificate, advice = _run_locally(source, chooser, seed, shares, (output, shards), overwrite)
    if advice is not None:
        sys.stderr.write(f"{advice}\n")
    if json:
        show.line(certificate.to_json())
    else:
        _show(certificate)
        if "://" in output:
            show.line(f"wrote {output} and {certificate_path}")
        else:
            show.written(Path(output), Path(certificate_path))
        if shards is not None:
            show.line(f"wrote the rows for training to {shards}")


def _show(certificate: "ContributionCertificate") -> None:
    from coowned.certificate import separation_in_words

    bound = certificate.origin.upper_bound
    proven = "" if bound is None else f"; {certificate.size / max(1, bound):.2%} of the proven maximum {bound:,}"
    copies = counted(certificate.size, "copy", "copies")
    show.line(f"{copies} of {certificate.num_distinct:,} of {certificate.num_examples:,} examples{proven}")
    show.line(f"no user is in more than {certificate.contribution_bound:,} of them")
    if certificate.groups is not None:
        sizes = certificate.groups.sizes
        low, high = min(sizes, default=0), max(sizes, default=0)
        show.line(f"no user is in two of the {len(sizes):,} groups of {low:,} to {high:,} copies")
        if certificate.origin.selector.get("partitioner") == "label-propagation":
            show.line(
                "users were partitioned by label propagation; coowned[cyclic] installs a partitioner that loses less"
            )
    if certificate.min_separation:
        show.line(separation_in_words(certificate.min_separation))
    if tiers := certificate.tiers:
        for name, bound, users in zip(tiers.names, tiers.bounds, tiers.users, strict=True):
            show.line(f"{counted(users, 'user is', 'users are')} of tier {name!r}: none in more than {bound:,}")
        if tiers.num_opted_out:
            lost = counted(tiers.num_examples_opted_out, "example")
            show.line(f"{counted(tiers.num_opted_out, 'user')} opted out (bound 0), and with them {lost}")
        if tiers.num_unknown_keys:
            show.line(tiers.unknown_keys_advice())
    if unprotected := certificate.num_unprotected_users:
        without = counted(certificate.num_copies_without_users, "copy has", "copies have")
        show.line(f"{counted(unprotected, 'user is', 'users are')} not protected; {without} no protected user")


def _run_locally(
    source: "DataSource",
    chooser: "Selector",
    seed: int,
    shares: list[float] | None,
    outputs: tuple[str, str | None],
    overwrite: bool,
) -> "_Certified":
    from coowned.attribution.statistics import heavy_users_advice
    from coowned.certificate import certificate_path_of, certify
    from coowned.content.splits import train_graph
    from coowned.runs.inputs import write_shards
    from coowned.selection.selection_files import write_selection

    output, shards = Path(outputs[0]), outputs[1]
    targets = output, certificate_path_of(output), *([] if shards is None else [shards])
    with whole_files(*targets) as (selection_file, certificate_file, *shard_folder):
        with show.progress("reading") as progress:
            examples = source.read(progress, content=False)
        graph = examples.graph if shares is None else train_graph(examples.graph, shares)
        with show.progress(f"selecting with {chooser.name}") as progress:
            selected = chooser.select(graph, seed=seed, progress=progress)
        with show.progress("certifying"):
            certificate = certify(graph, selected)
        write_selection(selection_file, graph, selected)
        certificate_file.write_text(certificate.to_json() + "\n", encoding="utf-8")
        if shard_folder and shares is not None:
            with show.progress("writing shards"):
                write_shards(shard_folder[0], examples, shares, selected, certificate)
        # Another process may have written there while this one was selecting.
        refuse_to_overwrite((), (output, certificate_path_of(output)), replace=overwrite)
    return certificate, heavy_users_advice(graph, certificate.contribution_bound)


def _run_on_spark(
    source: "DataSource",
    chooser: "Selector",
    seed: int,
    shares: list[float] | None,
    outputs: tuple[str, str | None],
    engine: Engine,
    overwrite: bool,
) -> "_Certified":
    from coowned.certificate import certificate_for
    from coowned.spark.certificate import certify
    from coowned.spark.selection import check_selector, choose
    from coowned.spark.selection_files import exists, write_parts, write_selection
    from coowned.spark.session import check_machine
    from coowned.spark.shards import write_shards
    from coowned.spark.sources import attribute_source, check_rows, check_source, read_rows

    output, shards = outputs
    check_selector(chooser)
    check_source(source)
    if shards is not None:
        check_rows(source)
    check_machine()
    is_remote = "://" in output
    title = f"selecting with {chooser.name}"
    targets = [] if is_remote else [output, certificate_for(output)]
    targets += [] if shards is None or "://" in shards else [shards]
    with whole_files(*targets) as files:
        with engine.session(source.path, title) as (spark, progress):
            if is_remote and not overwrite and exists(spark, output):
                raise_exists(output)
            graph = attribute_source(spark, source)
            graph = graph if shares is None else graph.train_split(shares)
            chosen = choose(graph, chooser, seed=seed, progress=progress)
            certificate = certify(graph, chosen.table, selector=chooser, seed=seed, upper_bound=chosen.upper_bound)
            if shards is not None:
                folder = shards if "://" in shards else files[-1]
                progress(0.9, "writing shards")
                rows = read_rows(spark, source)
                write_shards(rows, graph, chosen.table, certificate, folder, example_id=source.example_id or "")
            if is_remote:
                write_selection(chosen.table, certificate, output)
            else:
                write_parts(chosen.table, certificate, files[0])
            advice = graph.heavy_users().advice(certificate.contribution_bound)
            graph.release()
        if not is_remote:
            folder, certificate_file, *others = files
            for written in (folder, *others):
                written.chmod(0o700)  # still in a folder that is private
            certificate_file.write_text(certificate.to_json() + "\n", encoding="utf-8")
    return certificate, advice
