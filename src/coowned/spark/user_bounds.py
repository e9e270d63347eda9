"""Bounds of single users on Spark: matching them to users, selecting and certifying with them."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import polars as pl
import pyarrow as pa

from coowned.codec import encode_json
from coowned.errors import UncertifiableError
from coowned.selection.selection_files import BOUNDS, decode_bounds
from coowned.selection.user_bounds import UserBounds
from coowned.spark import functions as F
from coowned.spark.attribution import SparkGraph
from coowned.tier_counts import CertifiedTiers, tiers_of_keys

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def with_bounds(selected: "DataFrame", bounds: UserBounds | None) -> "DataFrame":
    """Returns the table with the bounds in the metadata of its column `copies`, which is stored in files."""
    return selected if bounds is None else selected.withMetadata("copies", {BOUNDS: encode_json(bounds.to_dict())})


def bounds_of(selected: "DataFrame") -> UserBounds | None:
    """Returns the bounds in a table's metadata, or in that of the files that it was read from.

    Guarantees:
      - What was selected with bounds is recounted against them, on either engine.   (test_stored_bounds_are_recounted)
    """
    text = selected.schema["copies"].metadata.get(BOUNDS)
    return None if text is None else decode_bounds(text, "the selection")


def taken_before(graph: SparkGraph, bounds: UserBounds, most: int) -> "DataFrame":
    """Returns user, copies, new: the copies that users with a bound below the largest one start with.

    A user with bound b and room for `most` copies of which most - b are gone is a user with room for b: the rounds'
    proof is for any capacities that are left.
    """
    users = _users(graph)
    own = bounds.for_keys(pl.Series("key", _listed(users, bounds), dtype=pl.String)).select("key", "bound")
    table = users.sparkSession.createDataFrame(own.cast({"bound": pl.Int32}).to_arrow(), "key string, bound int")
    gone = F.lit(most) - F.coalesce("bound", F.lit(bounds.others))
    held = users.join(F.broadcast(table), "key", "left").select("user", gone.cast("int").alias("copies"))
    return held.where("copies > 0").withColumn("new", F.lit(False))


def count_tiers(graph: SparkGraph, joined: "DataFrame", bounds: UserBounds, *, levels: int) -> CertifiedTiers:
    """Checks every user against their own bound, as on one machine; raises an error for a user in more copies.

    joined: users, copies of what was selected. levels: one more than the most copies of one user.
    """
    users = _users(graph)
    keys = _listed(users, bounds)
    found, num_unknown = tiers_of_keys(keys, bounds)
    names = list(bounds.tiers)
    table = users.sparkSession.createDataFrame(_texts(key=keys, tier=found), "key string, tier string")
    tier = F.coalesce("tier", F.lit(f"bound {bounds.others}")).alias("tier")
    of_user = users.join(F.broadcast(table), "key", "left").select("user", tier)
    per_user = joined.select(F.explode("users").alias("user"), "copies").groupBy("user").agg(F.sum("copies").alias("n"))
    counts = of_user.join(per_user, "user", "left").groupBy("tier", F.coalesce("n", F.lit(0)).alias("n")).count()
    histogram = {(row[0], int(row[1])): row[2] for row in counts.collect()}
    for name, bound in bounds.tiers.items():
        over = sum(count for (tier_name, n), count in histogram.items() if tier_name == name and n > bound)
        if over:
            raise UncertifiableError(f"{over:,} users of tier {name!r} are in more copies than {bound}; select again")
    out = [name for name, bound in bounds.tiers.items() if bound == 0]
    lost = graph.pairs.join(of_user.where(F.col("tier").isin(out)), "user", "left_semi").select("id").distinct()
    return CertifiedTiers(
        names=tuple(names),
        bounds=tuple(bounds.tiers.values()),
        copies_per_user=tuple(histogram.get((name, n), 0) for name in names for n in range(levels)),
        num_examples_opted_out=lost.count(),
        num_unknown_keys=num_unknown,
        digest=bounds.digest,
    )


def _users(graph: SparkGraph) -> "DataFrame":
    """Returns user, and key: the user as text."""
    return graph.pairs.select("user").distinct().withColumn("key", F.col("user").cast("string"))


def _listed(users: "DataFrame", bounds: UserBounds) -> list[str]:
    """Returns the keys of the users that the bounds may be for: at most three spellings of a listed key."""
    spellings = users.sparkSession.createDataFrame(_texts(key=list(bounds.spellings())), "key string")
    return [row[0] for row in users.select("key").join(F.broadcast(spellings), "key", "left_semi").collect()]


def _texts(**columns: Iterable[str]) -> pa.Table:
    """Returns columns of text as Spark takes them without Python on the executors."""
    return pa.table({name: pa.array(list(values), pa.string()) for name, values in columns.items()})
