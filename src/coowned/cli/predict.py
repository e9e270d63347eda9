"""`coowned predict`: a trained model's predictions for new data."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coowned.cli import show
from coowned.cli.options import Json, RunFolder, VerifyKey, check_signature, files_of, reads_data, refuse_to_overwrite
from coowned.files import whole_files

if TYPE_CHECKING:
    from coowned.attribution.sources import DataSource


@reads_data
def run(
    folder: RunFolder,
    source: "DataSource",
    output: Annotated[Path, typer.Option("--output", "-o", metavar="P.parquet", help="The file to write.")],
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Also write the probability of every class, a column each.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    verify_key: VerifyKey = None,
    json: Json = False,
) -> None:
    """Writes what the model predicts for every example: id, prediction and probability.

    The data need neither labels nor users. A row with a value that is missing or not finite has no prediction.

    Examples:

        coowned predict RUN new.parquet -o P.parquet

        coowned predict RUN new.csv --example-id message_id --probabilities -o P.parquet
    """
    from coowned.finished_run import open_run

    refuse_to_overwrite([folder, *files_of(source)], [output], replace=overwrite)
    check_signature(folder, verify_key)
    trained = open_run(folder)
    with whole_files(output) as (temporary,), show.progress("predicting"):
        found = trained.predict(source.read_rows(), probabilities=probabilities)
        found.write_parquet(temporary)
    missing = found["prediction"].null_count()
    if json:
        show.as_json({"predictions": str(output), "rows": found.height, "without_prediction": missing})
        return
    show.written(output)
    if missing:
        show.line(f"{missing:,} of {found.height:,} rows have no prediction: a value is missing or not finite")
