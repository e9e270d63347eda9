"""`coowned report`: the page of a run, for an engineer and her privacy officer."""

from pathlib import Path
from typing import Annotated

import typer

from coowned.cli import show
from coowned.cli.overwriting import refuse_to_replace


def run(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where the page goes (default: in RUN).")
    ] = None,
    release: Annotated[
        bool, typer.Option("--release", help="Leave out what was computed from private content, and graph statistics.")
    ] = False,
    graph_statistics: Annotated[
        bool,
        typer.Option(
            "--graph-statistics", help="Keep graph statistics in a release: only where the graph may be known."
        ),
    ] = False,
    compare: Annotated[
        list[Path] | None, typer.Option(metavar="RUN", help="Another run to compare accuracies with; repeatable.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Writes one HTML file that opens offline: what is promised, what it cost, how well it learned.

    Every figure says whether the guarantee covers it. Without --release the page holds numbers that it does not cover;
    only the file's owner can read it.

    Examples:

        coowned report RUN

        coowned report RUN --compare RUN2 --compare RUN3

        coowned report RUN --release -o public.html
    """
    from coowned.report.contents import read_run
    from coowned.report.page import RELEASE, REPORT, write_report

    refuse_to_replace([folder, *(compare or ())], output, except_for=(REPORT, RELEASE))
    place = write_report(folder, output, release=release, graph_statistics=graph_statistics, also=compare or ())
    if json:
        made = read_run(folder, release=True)
        show.as_json(
            {
                "report": str(place),
                "bytes": place.stat().st_size,
                "release": release,
                "guarantee": made.claims,
                "claim": made.headline,
            }
        )
        return
    show.written(place)
    if not release:
        show.line("it holds numbers that no guarantee covers; --release leaves them out")
