"""`coowned spark-package`: the package as a zip that executors import from."""

import zipfile
from pathlib import Path
from typing import Annotated, Any

import typer

import coowned
from coowned.cli import show
from coowned.cli.options import Json
from coowned.files import check_target, write_file


def run(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE.zip", help="The zip to write.")] = Path(
        "coowned.zip"
    ),
    json: Json = False,
) -> None:
    """Writes this package as a zip for `--py-files`: for executors whose Python has all that it needs but not itself.

    Not in it are the packages that it needs (numpy, pyarrow, polars, numba, …); where executors lack these too, give
    them an archive of an environment (venv-pack, conda-pack) with `--conf spark.archives=…`.

    Examples:

        coowned spark-package -o coowned.zip
    """
    check_target(output)
    package = Path(__file__).parents[1]

    def write(file: Any) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(package.rglob("*")):
                if path.is_file() and "__pycache__" not in path.parts:
                    # Without times: the same bytes for the same code.
                    entry = zipfile.ZipInfo(str(Path(package.name) / path.relative_to(package)))
                    archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)

    write_file(output, write)
    if json:
        show.as_json({"path": str(output), "version": coowned.__version__})
    else:
        show.written(output)
