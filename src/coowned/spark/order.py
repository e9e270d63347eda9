"""The order that the rounds follow, as two columns; equal ones are ordered by the id's bytes.

Greedy: users per example, then Spark's xxhash64 of (seed, id), which `coowned.selection.order` repeats. Interleaved:
the place of a run, then the rank within the list. Spark compares hashes as signed numbers and text by its bytes, as
the local order does, so both are total and depend on nothing but the graph's ids, its users per example and the seed.
"""

from typing import TYPE_CHECKING

from coowned.selection.bias_mitigating import BiasMitigating
from coowned.spark.checkpoints import Checkpoints

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_LONGEST_RUN = 1 << 62  # longer ones hold the whole list too


def ordered(examples: "DataFrame", seed: int) -> "DataFrame":
    """id, users, num_users, first, second of the examples that have users, fewest users first."""
    from pyspark.sql import functions as F

    size = F.size("users")
    return examples.where(size > 0).select(
        "id",
        "users",
        size.alias("num_users"),
        size.cast("bigint").alias("first"),
        F.xxhash64(F.lit(seed).cast("bigint"), F.col("id").cast("string")).alias("second"),
    )


def order_columns() -> "list[Column]":
    """What to sort by."""
    from pyspark.sql import functions as F

    return [F.col("first"), F.col("second"), F.col("id").cast("string")]


def interleaved(examples: "DataFrame", seed: int, selector: BiasMitigating, checkpoints: Checkpoints) -> "DataFrame":
    """The same columns in the order of `BiasMitigating`: runs of few-user and many-user examples in turn.

    Rank r of a list visited in runs of c is in run r div c; runs of equal number go few-user first. Ranks come from a
    distributed sort: a row's place in its sorted part, and the sizes of the parts before it. The sorted table is a
    checkpoint, so that a part computed again later cannot shift them.
    """
    from pyspark.sql import functions as F

    walk = ordered(examples, seed)
    place = F.monotonically_increasing_id()  # part * 2^33 + place in the part
    table = walk.select("id", "num_users", "first", "second").orderBy(*order_columns()).select(
        "id", "num_users", place.alias("place")
    )  # fmt: skip
    placed = checkpoints.save(table, "rounds/sorted").withColumn("part", F.shiftrightunsigned("place", 33))
    sizes = sorted(map(tuple, placed.groupBy("part").count().collect()))
    begins, total = [], 0
    for part, size in sizes:
        begins.append((part, total))
        total += size
    num_few = placed.where(F.col("num_users") <= selector.threshold).count()
    offsets = F.broadcast(examples.sparkSession.createDataFrame(begins, "part bigint, begin bigint"))
    within = F.col("place").bitwiseAND(F.lit((1 << 33) - 1))
    ranked = placed.join(offsets, "part").select("id", "num_users", (F.col("begin") + within).alias("rank"))
    many = F.col("num_users") > selector.threshold
    in_list = F.col("rank") - F.when(many, F.lit(num_few)).otherwise(F.lit(0)).cast("bigint")
    few_run, many_run = min(selector.few_user_run, _LONGEST_RUN), min(selector.many_user_run, _LONGEST_RUN)
    run = F.when(many, F.lit(many_run)).otherwise(F.lit(few_run)).cast("bigint")
    keys = ranked.select("id", in_list.alias("second"), run.alias("run"), many.cast("bigint").alias("list"))
    keys = keys.select("id", F.expr("2 * (second div run) + list").alias("first"), "second")
    joined = walk.drop("first", "second").join(keys, "id").select("id", "users", "num_users", "first", "second")
    saved = checkpoints.save(joined, "rounds/interleaved")
    checkpoints.remove("rounds/sorted")
    return saved
