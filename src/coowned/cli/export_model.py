"""`coowned export-model`: exports what may be published, and nothing else."""

from pathlib import Path
from typing import Annotated

import typer

from coowned.cli import show
from coowned.cli.options import Json, RunFolder


def run(
    folder: RunFolder,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The folder to create.")],
    json: Json = False,
) -> None:
    """Copies the model with its guarantee and certificate; no metrics, no selection, no keys.

    A run that has not finished or has no guarantee is refused, unless its data were declared public.

    Example:

        coowned export-model RUN -o DIR
    """
    from coowned.report.export import export_model

    names = export_model(folder, output)
    if json:
        show.as_json({"folder": str(output), "files": names})
        return
    show.line(f"wrote {output} ({', '.join(names)})")
