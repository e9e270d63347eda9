"""`coowned report`: the page of a run, for engineers and privacy officers."""

from pathlib import Path
from typing import Annotated

import typer

from coowned.cli import show
from coowned.cli.options import Json, RunFolder, VerifyKey, check_signature, refuse_to_replace


def run(
    folder: RunFolder,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to write the page (default: in RUN).")
    ] = None,
    release: Annotated[
        bool,
        typer.Option(
            "--release",
            help="Leave out what was computed from private content, and graph statistics beyond the claim's.",
        ),
    ] = False,
    graph_statistics: Annotated[
        bool,
        typer.Option("--graph-statistics", help="Keep all graph statistics in a release, if the graph may be known."),
    ] = False,
    compare: Annotated[
        list[Path] | None, typer.Option(metavar="RUN", help="Another run to compare accuracies with; repeatable.")
    ] = None,
    verify_key: VerifyKey = None,
    json: Json = False,
) -> None:
    """Writes one HTML page that opens offline: what is promised, what it cost, how well the model learned.

    Every figure says whether the guarantee covers it. Without --release the page contains numbers that it does not
    cover, and only the file's owner can read it.

    Examples:

        coowned report RUN

        coowned report RUN --compare RUN2 --compare RUN3

        coowned report RUN --release -o public.html
    """
    from coowned.report.page import RELEASE, REPORT, write_report
    from coowned.runs.stored_run import StoredRun

    check_signature(folder, verify_key)
    refuse_to_replace([folder, *(compare or ())], output, except_for=(REPORT, RELEASE))
    page = write_report(folder, output, release=release, graph_statistics=graph_statistics, also=compare or ())
    if json:
        reported = StoredRun.open(folder)
        show.as_json(
            {
                "report": str(page),
                "bytes": page.stat().st_size,
                "release": release,
                "guarantee": reported.claims,
                "claim": reported.headline,
            }
        )
        return
    show.written(page)
    if not release:
        show.line("The page contains numbers that no guarantee covers; --release leaves them out.")
