"""`coowned select`: chooses the training set from the graph alone, and certifies it."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from coowned.cli import show
from coowned.cli.options import (
    Engine,
    Json,
    Master,
    Seed,
    check_engine,
    complete_with,
    declared_parameter,
    reads_data,
    with_parameters,
)
from coowned.cli.paths import files_of, raise_exists, refuse_to_overwrite
from coowned.errors import InputError
from coowned.files import whole_files
from coowned.progress import counted, nearest, one_of
from coowned.selection.registry import CLASSES, declared_settings, selector_class

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
@reads_data
def run(
    source: "DataSource",
    settings: dict[str, Any],
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
    engine: Engine = "local",
    master: Master = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace S and its certificate if they exist.")
    ] = False,
    json: Json = False,
) -> None:
    """Selects a training set S in which no user is in more than K copies, and writes it with its certificate.

    Only ids and users are read, never content.

    Examples:

        coowned select mail.mbox --contribution-bound 3 -o S.parquet

        coowned select papers.parquet --users authors --selector priced --contribution-bound 1 -o S.parquet

        coowned select mail.mbox --selector greedy-min-separation --batch-size 256 \\
            --iterations 100 --min-separation 4 -o S.parquet

        coowned select pairs.parquet --user user_id --example-id example_id --contribution-bound 3 \\
            --engine spark --master spark://head:7077 -o S.parquet
    """
    from coowned.certificate import certificate_for, separation_in_words

    check_engine(engine, master)
    chooser = make_selector(selector, settings)
    check_engine(engine, master, str(source.path), output)
    certificate_path = certificate_for(output)
    refuse_to_overwrite(files_of(source), (output, certificate_path), replace=overwrite)
    if engine == "spark":
        certificate, advice = _run_on_spark(source, chooser, seed, master, output, overwrite)
    else:
        certificate, advice = _run_locally(source, chooser, seed, Path(output), overwrite)
    if advice is not None:
        sys.stderr.write(f"{advice}\n")
    if json:
        show.line(certificate.to_json())
        return
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
            keys = counted(tiers.num_unknown_keys, "listed key is", "listed keys are")
            show.line(f"{keys} of nobody in the data; `coowned inspect --show-keys` lists the keys that there are")
    if unprotected := certificate.num_unprotected_users:
        without = counted(certificate.num_copies_without_users, "copy has", "copies have")
        show.line(f"{counted(unprotected, 'user is', 'users are')} not protected; {without} no protected user")
    if "://" in output:
        show.line(f"wrote {output} and {certificate_path}")
    else:
        show.written(Path(output), Path(certificate_path))


def _run_locally(source: "DataSource", chooser: "Selector", seed: int, output: Path, overwrite: bool) -> "_Certified":
    from coowned.attribution.statistics import heavy_users_advice
    from coowned.certificate import certificate_path_of, certify
    from coowned.selection.selection_files import write_selection

    with whole_files(output, certificate_path_of(output)) as (selection_file, certificate_file):
        with show.progress("reading") as progress:
            graph = source.read(progress).graph
        with show.progress(f"selecting with {chooser.name}") as progress:
            selected = chooser.select(graph, seed=seed, progress=progress)
        certificate = certify(graph, selected)
        write_selection(selection_file, graph, selected)
        certificate_file.write_text(certificate.to_json() + "\n", encoding="utf-8")
        # Another process may have written there while this one was selecting.
        refuse_to_overwrite((), (output, certificate_path_of(output)), replace=overwrite)
    return certificate, heavy_users_advice(graph, certificate.contribution_bound)


def _run_on_spark(
    source: "DataSource", chooser: "Selector", seed: int, master: str | None, output: str, overwrite: bool
) -> "_Certified":
    from coowned.certificate import certificate_for
    from coowned.spark.certificate import certify
    from coowned.spark.selection import check_selector, select
    from coowned.spark.selection_files import exists, write_parts, write_selection
    from coowned.spark.session import check_machine, session, spark_errors
    from coowned.spark.sources import attribute_source, check_source

    check_selector(chooser)
    check_source(source)
    check_machine()
    is_remote = "://" in output
    title = f"selecting with {chooser.name}"
    with whole_files(*([] if is_remote else [output, certificate_for(output)])) as files:
        with session(master) as spark, spark_errors(str(source.path)), show.progress(title) as progress:
            if is_remote and not overwrite and exists(spark, output):
                raise_exists(output)
            graph = attribute_source(spark, source)
            selected = select(graph, chooser, seed=seed, progress=progress)
            certificate = certify(graph, selected, selector=chooser, seed=seed)
            if is_remote:
                write_selection(selected, certificate, output)
            else:
                write_parts(selected, certificate, files[0])
            advice = graph.heavy_users().advice(certificate.contribution_bound)
            graph.release()
        if not is_remote:
            folder, certificate_file = files
            folder.chmod(0o700)  # still in a folder that is private
            certificate_file.write_text(certificate.to_json() + "\n", encoding="utf-8")
    return certificate, advice


def make_selector(word: str, settings: dict[str, Any]) -> "Selector":
    """The selector of this name with these settings; an unknown or missing setting is an error."""
    if word not in CLASSES:
        raise InputError(f"Unknown selector {word!r}{nearest(word, CLASSES)}")
    kind = selector_class(word)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name in settings:
        if name not in fields:
            raise InputError(f"The selector {word} has no option --{name.replace('_', '-')}; remove it")
    for name, field in fields.items():
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if needed and name not in settings:
            raise InputError(f"The selector {word} needs --{name.replace('_', '-')}")
    return kind(**settings)
