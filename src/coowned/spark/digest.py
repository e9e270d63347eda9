"""The sums of `coowned.attribution.digest` as SQL: SHA-256 and decimal sums, in any order and partitioning."""

from typing import TYPE_CHECKING

from coowned.attribution.digest import RowSums

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def sum_rows(table: "DataFrame", text: "Column") -> RowSums:
    """The sums of one text a row. A decimal of 38 digits holds the sum of 10^18 lanes of 64 bits."""
    from pyspark.sql import functions as F

    hashed = table.select(F.sha2(text, 256).alias("hash"))  # 64 hexadecimal digits
    lanes = [F.conv(F.substring("hash", 1 + 16 * lane, 16), 16, 10).cast("decimal(20, 0)") for lane in range(4)]
    row = hashed.agg(F.count(F.lit(1)), *(F.sum(lane.cast("decimal(38, 0)")) for lane in lanes)).collect()[0]
    return RowSums(row[0], tuple(int(value or 0) % 2**64 for value in row[1:]))
