"""`coowned calibrate`: the noise multiplier and statement for a certificate and a mechanism."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from coowned.cli import show
from coowned.cli.options import (
    Adjacency,
    AllowLargeDelta,
    Delta,
    Json,
    read_certificate,
    refuse_to_overwrite,
    targets_of,
)
from coowned.files import whole_files
from coowned.mechanism.registry import MECHANISMS, mechanism_class, mechanism_class_for
from coowned.progress import one_of


def run(
    certificate: Annotated[Path, typer.Option(metavar="C", help="The certificate that `coowned select` wrote.")],
    delta: Delta,
    epsilon: Annotated[
        str | None,
        typer.Option(metavar="E", help="The target, or one for each tier: staff=8,customers=2; or --noise-multiplier."),
    ] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(metavar="S", help="The noise to use; its epsilon is computed.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(metavar="B", help="Expected batch size (a schedule has its own).")
    ] = None,
    iterations: Annotated[
        int | None, typer.Option(metavar="T", help="Number of steps (a schedule has its own).")
    ] = None,
    mechanism: Annotated[
        str | None, typer.Option(help=f"{one_of(MECHANISMS)} (default: what the certificate is for).")
    ] = None,
    num_bands: Annotated[
        int | None, typer.Option(help="Bands of the correlated noise (default: as many as the certificate allows).")
    ] = None,
    adjacency: Adjacency = "zero-out",
    simulated_batch_size: Annotated[
        int | None, typer.Option(help="Calibrate as if batches were this large; labelled a simulated epsilon.")
    ] = None,
    allow_large_delta: AllowLargeDelta = False,
    graph_statistics: Annotated[
        bool,
        typer.Option("--graph-statistics", help="Also show how many users have which epsilon; do not publish."),
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="guarantee.json", help="Where to write the guarantee.")
    ] = None,
    json: Json = False,
) -> None:
    """Finds the noise for a target epsilon, or the epsilon of a given noise, and states what it means.

    Give either --epsilon or --noise-multiplier.

    Examples:

        coowned calibrate --certificate S.certificate.json --epsilon 8 --delta 1e-10 --batch-size 1024 --iterations 2500

        coowned calibrate --certificate S.certificate.json --noise-multiplier 2 --delta 1e-10 --adjacency replace

        coowned calibrate --certificate S.certificate.json --epsilon "bound 3=8,careful=2" --delta 1e-10
    """
    from coowned.accounting.guarantee import guarantee

    refuse_to_overwrite([certificate], [output])
    proof = read_certificate(certificate)
    kind = mechanism_class_for(proof) if mechanism is None else mechanism_class(mechanism)
    chosen = kind.from_certificate(proof, batch_size=batch_size, iterations=iterations, num_bands=num_bands)
    # The file is opened first: one that cannot be written is refused before the work.
    with whole_files(*([] if output is None else [output])) as files, show.progress("calibrating"):
        claim = guarantee(
            proof,
            chosen,
            epsilon=targets_of(epsilon),
            noise_multiplier=noise_multiplier,
            delta=delta,
            adjacency=adjacency,
            simulated_batch_size=simulated_batch_size,
            allow_large_delta=allow_large_delta,
        )
        for file in files:
            file.write_text(claim.to_json() + "\n", encoding="utf-8")
    if json:
        for warning in claim.warnings():
            sys.stderr.write(f"{warning}\n")
        show.line(claim.to_json())
        return
    show.line(f"noise multiplier {claim.noise_multiplier:.6g}")
    show.line()
    show.line(claim.statement(graph_statistics=graph_statistics))
    if output is not None:
        show.line()
        show.written(output)
