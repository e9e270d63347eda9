"""Training curves: what is measured at some steps of a run, and covered by no guarantee."""

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import polars as pl

NOT_COVERED = (
    "Not covered by the guarantee: losses, clipped shares and batch sizes depend on raw content and on the secret "
    "coins. Show them only to people who may see the data."
)

OnMetrics = Callable[[dict[str, Any]], object]
"""Called as on_metrics({"step": 20, "loss": 0.41, "clipped_share": 0.9, "copies": 251}) at some steps."""


class StepMetrics(NamedTuple):
    """Of one step; its numbers may still be on their way from a device."""

    step: int
    loss: Any  # mean over the batch, before the step
    clipped: Any  # how many copies were
    copies: int

    def row(self) -> dict[str, Any]:
        """As a table and `OnMetrics` have it."""
        share = float(self.clipped) / max(1, self.copies)
        return {"step": self.step, "loss": float(self.loss), "clipped_share": share, "copies": self.copies}


def metrics_table(metrics: Sequence[StepMetrics]) -> "pl.DataFrame":
    """One row a step."""
    import polars as pl

    schema = {"step": pl.Int64, "loss": pl.Float64, "clipped_share": pl.Float64, "copies": pl.Int64}
    table = pl.DataFrame([step.row() for step in metrics], schema=schema)
    return table.with_columns(covered_by_guarantee=pl.lit(False))


def parquet_bytes(table: "pl.DataFrame", note: str) -> bytes:
    """A Parquet file with a note in its metadata."""
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    pq.write_table(table.to_arrow().replace_schema_metadata({"coowned": note}), buffer)
    return buffer.getvalue()
