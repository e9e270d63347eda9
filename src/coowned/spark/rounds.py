"""Greedy by rounds: every user votes for her first undecided examples, and the unanimous ones are selected.

One round, for a user who has room for c more copies: she votes for the first c of her undecided examples in the common
order. An example that all its users vote for is selected; one with a user who has no room left is dropped. The
result is that of the sequential walk; docs/spark.md has the proof.

    undecided   id, users, num_users, first, second    one row an example, none with a user without room
    taken       user, copies, new                      copies each user is in; new: the last round added to them
    ballots     user, part, id, num_users, first, second     one row a pair
    winners     id, users, num_users, first, second, copies  what was selected, with its number of copies so far
"""

import dataclasses
from typing import TYPE_CHECKING

from coowned.spark.checkpoints import Checkpoints
from coowned.spark.order import order_columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclasses.dataclass(frozen=True, kw_only=True)
class Electorate:
    """What does not change from round to round.

    Attributes:
      contribution_bound: most copies that contain one user.
      heavy: user, parts: users with so many examples that their votes are found in parts; None where nobody is.
    """

    contribution_bound: int
    heavy: "DataFrame | None"


def find_heavy(pairs: "DataFrame", heavy_user: int, checkpoints: Checkpoints) -> "DataFrame | None":
    """The users with more than `heavy_user` pairs, and in how many parts to look through those."""
    from pyspark.sql import functions as F

    counts = pairs.groupBy("user").count().where(F.col("count") > heavy_user)
    parts = F.ceil(F.col("count") / heavy_user).cast("int")
    heavy = checkpoints.save(counts.select("user", parts.alias("parts")), "rounds/heavy")
    return None if heavy.isEmpty() else heavy


def cast_ballots(undecided: "DataFrame", electorate: Electorate) -> "DataFrame":
    """One row a pair, spread so that no task has more than a part of a heavy user's."""
    from pyspark.sql import functions as F

    pairs = undecided.select("id", "num_users", "first", "second", F.explode("users").alias("user"))
    if electorate.heavy is None:
        return pairs.withColumn("part", F.lit(0)).repartition("user")
    spread = pairs.join(F.broadcast(electorate.heavy), "user", "left")
    # By a hash of its own: the order's hash would give every part the same stretch of the order.
    part = F.coalesce(F.pmod(F.xxhash64(F.lit("part"), F.col("id")), F.col("parts")).cast("int"), F.lit(0))
    return spread.withColumn("part", part).drop("parts").repartition("user", "part")


def count_votes(ballots: "DataFrame", taken: "DataFrame", electorate: Electorate) -> "DataFrame":
    """The winners of a round, without their copies.

    A user's first c in two levels: the first k of each of her parts, then the first c of those.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    bound = electorate.contribution_bound
    group = ["user"] if electorate.heavy is None else ["user", "part"]
    in_part = F.row_number().over(Window.partitionBy(*group).orderBy(*order_columns()))
    leading = ballots.withColumn("place", in_part).where(F.col("place") <= bound).drop("place", "part")
    overall = F.row_number().over(Window.partitionBy("user").orderBy(*order_columns()))
    room = F.lit(bound) - F.coalesce("copies", F.lit(0))
    votes = leading.join(taken.select("user", "copies"), "user", "left").withColumn("place", overall)
    votes = votes.where(F.col("place") <= room)
    counted = votes.groupBy("id").agg(
        F.count(F.lit(1)).alias("votes"),
        F.collect_list("user").alias("users"),
        *(F.max(name).alias(name) for name in ("num_users", "first", "second")),
    )
    return counted.where(F.col("votes") == F.col("num_users")).select("id", "users", "num_users", "first", "second")


def add_taken(taken: "DataFrame", winners: "DataFrame") -> "DataFrame":
    """The copies each user is in after one more copy of every winner."""
    from pyspark.sql import functions as F

    added = winners.select(F.explode("users").alias("user"), F.lit(1).alias("copies"), F.lit(True).alias("new"))
    return (
        taken.withColumn("new", F.lit(False))
        .unionByName(added)
        .groupBy("user")
        .agg(F.sum("copies").cast("int").alias("copies"), F.max("new").alias("new"))
    )


def full_users(taken: "DataFrame", electorate: Electorate, *, new: bool) -> "DataFrame":
    """The users without room; new: only those the last round left without."""
    from pyspark.sql import functions as F

    full = taken.where(F.col("copies") >= electorate.contribution_bound)
    return (full.where("new") if new else full).select("user")


def drop_decided(
    undecided: "DataFrame", ballots: "DataFrame", full: "DataFrame", winners: "DataFrame | None", electorate: Electorate
) -> "DataFrame":
    """The examples that neither won nor have a full user."""
    from pyspark.sql import functions as F

    if electorate.heavy is None:
        vetoes = ballots.join(full, "user", "left_semi").select("id")
    else:  # a row for each part of a heavy user, so that her pairs stay spread
        last = F.coalesce(F.col("parts") - 1, F.lit(0))
        parted = full.join(F.broadcast(electorate.heavy), "user", "left")
        parted = parted.select("user", F.explode(F.sequence(F.lit(0), last)).alias("part"))
        vetoes = ballots.join(parted, ["user", "part"], "left_semi").select("id")
    decided = vetoes if winners is None else vetoes.union(winners.select("id"))
    return undecided.join(decided.distinct(), "id", "left_anti")
