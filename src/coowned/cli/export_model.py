"""`coowned export-model`: what may leave the building, and nothing else."""

from pathlib import Path
from typing import Annotated

import typer

from coowned.cli import show


def run(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="A folder to make.")],
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Copies the model with its guarantee and certificate; no metrics, no selection, no keys.

    A run that has not ended, or has no guarantee, is refused, unless its data were declared public.

    Example:

        coowned export-model RUN -o DIR
    """
    from coowned.report.export import export_model

    names = export_model(folder, output)
    if json:
        show.as_json({"folder": str(output), "files": names})
        return
    show.line(f"wrote {output} ({', '.join(names)})")
