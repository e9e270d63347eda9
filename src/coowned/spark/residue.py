"""What is left when it is small enough for one machine, finished by the local kernel."""

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute

from coowned.selection import kernels

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pc: Any = pyarrow.compute  # its functions are made when it is imported: no checker sees them


def finish_locally(
    undecided: "DataFrame", taken: "DataFrame", *, contribution_bound: int, copies: int, to_the_end: bool
) -> pa.Table:
    """Walks the undecided examples in order with the room that is left, on the driver.

    Args:
      copies: what an example has that this pass takes.
      to_the_end: further passes follow here, until one adds nothing.

    Returns the examples taken, columns as `undecided` and `copies`.
    """
    from pyspark.sql import functions as F

    rows = pl.DataFrame(undecided.toArrow())
    walk = rows.with_columns(pl.col("id").cast(pl.String).alias("text")).sort("first", "second", "text").drop("text")
    entries = walk["users"].explode()
    keys = entries.unique(maintain_order=True)
    users = pl.DataFrame({"user": entries}).join(
        pl.DataFrame({"user": keys}).with_row_index("label"), on="user", how="left", maintain_order="left"
    )["label"].to_numpy().astype(np.int64)  # fmt: skip
    owners = undecided.select(F.explode("users").alias("user")).distinct()
    used = pl.DataFrame(taken.join(owners, "user", "left_semi").select("user", "copies").toArrow())
    used = pl.DataFrame({"user": keys}).join(used, on="user", how="left", maintain_order="left")["copies"].fill_null(0)
    room = (contribution_bound - used.to_numpy().astype(np.int64)).astype(np.min_scalar_type(contribution_bound))
    indptr = np.concatenate([[0], np.cumsum(walk["num_users"].to_numpy(), dtype=np.int64)])
    order = np.arange(len(walk), dtype=np.int64)
    taken_copies = np.zeros(len(walk), np.int32)
    kept, number = len(walk), copies
    while kept:
        kept = kernels.greedy_pass(order, indptr, users, 0, kept, 0, room)
        taken_copies[order[:kept]] = number
        number += 1
        if not to_the_end:
            break
    chosen = walk.with_columns(pl.Series("copies", taken_copies)).filter(pl.col("copies") > 0)
    return chosen.select("id", "users", "num_users", "first", "second", "copies").to_arrow()
