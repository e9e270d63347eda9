"""`coowned aliases`: suggests keys that may belong to one person, for manual review."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coowned.cli import show
from coowned.cli.options import Json, files_of, reads_data, refuse_to_overwrite
from coowned.files import check_writable, refusing_unwritable, write_file

if TYPE_CHECKING:
    from coowned.attribution.sources import DataSource


@reads_data
def run(
    source: "DataSource",
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="aliases.csv", help="Where to write the proposals.")
    ],
    threshold: Annotated[float, typer.Option(help="Minimum similarity of a proposal, from 0 to 1.")] = 0.85,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    json: Json = False,
) -> None:
    """Suggests keys that may belong to one person, from addresses and names alone; content is not read.

    Review the file, delete wrong lines, add missing ones, and pass it to the other commands with
    --aliases. A missed merge breaks privacy: the person is in more examples than the guarantee says. A wrong one costs
    only data. When in doubt, keep the line. The file names people: keep it private.

    Example:

        coowned aliases mail.mbox -o aliases.csv
        coowned select mail.mbox --aliases aliases.csv --contribution-bound 3 -o S.parquet
    """
    from coowned.attribution.alias_suggestions import suggest_aliases

    refuse_to_overwrite(files_of(source), [output], replace=overwrite)
    check_writable(output.parent, output)
    with show.progress("reading") as progress:
        examples = source.read(progress)
        found = suggest_aliases(examples, names=source.display_names(), threshold=threshold)
    with refusing_unwritable(output):
        write_file(output, found.write_csv().encode(), mode=0o600)
    if json:
        show.as_json({"proposals": len(found), "users": examples.graph.num_users, "output": str(output)})
        return
    keys = "1 key" if len(found) == 1 else f"{len(found):,} keys"
    show.line(f"{keys} of {examples.graph.num_users:,} may belong to a person who has another key.")
    show.line("Delete the lines that are wrong: a missed merge breaks privacy, a wrong one costs only data.")
    show.written(output)
