"""Greedy selection in rounds: every user votes for their first undecided examples, and unanimous ones are selected.

One round: a user who has room for c more copies votes for the first c of their undecided examples in the common order.
An example that all its users vote for is selected; one with a user who has no room left is dropped. The
result is that of the sequential walk; docs/spark.md has the proof.

    undecided   id, users, num_users, first, second    one row per example, none with a user without room
    taken       user, copies, new                      copies each user is in; new: the last round added to them
    ballots     user, part, id, num_users, first, second     one row per pair
    winners     id, users, num_users, first, second, copies  what was selected, with its number of copies so far

The order is two columns, `first` and `second`; equal ones are ordered by the id's bytes. Greedy: users per example,
then Spark's xxhash64 of (seed, id), which `coowned.selection.order` repeats. Interleaved: the number of a run, then the
rank within the list. Spark compares hashes as signed numbers and text by its bytes, as the local order does, so both
are total and depend on nothing but the graph's ids, its users per example and the seed.
"""

import dataclasses
import itertools
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import pyarrow as pa

from coowned.selection.bias_mitigating import BiasMitigating
from coowned.selection.greedy import greedy_pass
from coowned.spark import functions as F
from coowned.spark.checkpoints import Checkpoints

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_LONGEST_RUN = 1 << 62  # longer ones hold the whole list too


def ordered(examples: "DataFrame", seed: int) -> "DataFrame":
    """Returns id, users, num_users, first, second of the examples that have users, fewest users first."""
    size = F.size("users")
    return examples.where(size > 0).select(
        "id",
        "users",
        size.alias("num_users"),
        size.cast("bigint").alias("first"),
        F.xxhash64(F.lit(seed).cast("bigint"), F.col("id").cast("string")).alias("second"),
    )


def order_columns() -> "list[Column]":
    """Returns the columns to sort by."""
    return [F.col("first"), F.col("second"), F.col("id").cast("string")]


def interleaved(examples: "DataFrame", seed: int, selector: BiasMitigating, checkpoints: Checkpoints) -> "DataFrame":
    """Returns the same columns in the order of `BiasMitigating`: alternating runs of few-user and many-user examples.

    Rank r of a list visited in runs of c is in run r div c; runs of equal number go few-user first. Ranks come from a
    distributed sort: a row's index in its sorted part, and the sizes of the parts before it. The sorted table is a
    checkpoint, so that a part computed again later cannot shift them.
    """
    walk = ordered(examples, seed)
    index = F.monotonically_increasing_id()  # part * 2^33 + index in the part
    table = walk.select("id", "num_users", "first", "second").orderBy(*order_columns()).select(
        "id", "num_users", index.alias("index")
    )  # fmt: skip
    indexed = checkpoints.save(table, "rounds/sorted").withColumn("part", F.shiftrightunsigned("index", 33))
    sizes = dict(sorted(map(tuple, indexed.groupBy("part").count().collect())))
    begins = list(itertools.accumulate(sizes.values(), initial=0))[: len(sizes)]
    num_few = indexed.where(F.col("num_users") <= selector.threshold).count()
    offsets = F.broadcast(examples.sparkSession.createDataFrame(table_of(part=list(sizes), begin=begins)))
    within = F.col("index").bitwiseAND(F.lit((1 << 33) - 1))
    ranked = indexed.join(offsets, "part").select("id", "num_users", (F.col("begin") + within).alias("rank"))
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Electorate:
    """The settings that stay the same in all rounds."""

    contribution_bound: int  # most copies that contain one user
    # Columns user, parts: users with so many examples that their votes are found in parts; None if there are none.
    heavy: "DataFrame | None"


def find_heavy(pairs: "DataFrame", heavy_user: int, checkpoints: Checkpoints) -> "DataFrame | None":
    """Returns the users with more than `heavy_user` pairs, and how many parts to divide them into, if any."""
    counts = pairs.groupBy("user").count().where(F.col("count") > heavy_user)
    parts = F.ceil(F.col("count") / heavy_user).cast("int")
    heavy = checkpoints.save(counts.select("user", parts.alias("parts")), "rounds/heavy")
    return None if heavy.isEmpty() else heavy


def table_of(**columns: list[int]) -> pa.Table:
    """Returns columns of integers as Spark takes them without Python on the executors."""
    return pa.table({name: pa.array(values, pa.int64()) for name, values in columns.items()})


def cast_ballots(undecided: "DataFrame", electorate: Electorate) -> "DataFrame":
    """Returns one row per pair, spread so that no task has more than a part of a heavy user's."""
    pairs = undecided.select("id", "num_users", "first", "second", F.explode("users").alias("user"))
    if electorate.heavy is None:
        return pairs.withColumn("part", F.lit(0)).repartition("user")
    spread = pairs.join(F.broadcast(electorate.heavy), "user", "left")
    # By a separate hash: with the order's hash, every part would have the same stretch of the order.
    part = F.coalesce(F.pmod(F.xxhash64(F.lit("part"), F.col("id")), F.col("parts")).cast("int"), F.lit(0))
    return spread.withColumn("part", part).drop("parts").repartition("user", "part")


def count_votes(ballots: "DataFrame", taken: "DataFrame", electorate: Electorate) -> "DataFrame":
    """Returns the winners of a round, without their copies.

    A user's first c in two levels: the first k of each of their parts, then the first c of those.
    """
    from pyspark.sql import Window

    bound = electorate.contribution_bound
    group = ["user"] if electorate.heavy is None else ["user", "part"]
    in_part = F.row_number().over(Window.partitionBy(*group).orderBy(*order_columns()))
    leading = ballots.withColumn("rank", in_part).where(F.col("rank") <= bound).drop("rank", "part")
    overall = F.row_number().over(Window.partitionBy("user").orderBy(*order_columns()))
    room = F.lit(bound) - F.coalesce("copies", F.lit(0))
    votes = leading.join(taken.select("user", "copies"), "user", "left").withColumn("rank", overall)
    votes = votes.where(F.col("rank") <= room)
    counted = votes.groupBy("id").agg(
        F.count(F.lit(1)).alias("votes"),
        F.collect_list("user").alias("users"),
        *(F.max(name).alias(name) for name in ("num_users", "first", "second")),
    )
    return counted.where(F.col("votes") == F.col("num_users")).select("id", "users", "num_users", "first", "second")


def add_taken(taken: "DataFrame", winners: "DataFrame") -> "DataFrame":
    """Returns the number of copies of each user after one more copy of every winner."""
    added = winners.select(F.explode("users").alias("user"), F.lit(1).alias("copies"), F.lit(True).alias("new"))
    return (
        taken.withColumn("new", F.lit(False))
        .unionByName(added)
        .groupBy("user")
        .agg(F.sum("copies").cast("int").alias("copies"), F.max("new").alias("new"))
    )


def full_users(taken: "DataFrame", electorate: Electorate, *, new: bool) -> "DataFrame":
    """Returns the users without room; new: only those whom the last round left without."""
    full = taken.where(F.col("copies") >= electorate.contribution_bound)
    return (full.where("new") if new else full).select("user")


def join_by_part(
    ballots: "DataFrame", users: "DataFrame", electorate: Electorate, *, how: str = "inner"
) -> "DataFrame":
    """Joins the ballots with a table of users; a heavy user's pairs stay spread."""
    if electorate.heavy is None:
        return ballots.join(users, "user", how)
    last = F.coalesce(F.col("parts") - 1, F.lit(0))
    parted = users.join(F.broadcast(electorate.heavy), "user", "left")
    parted = parted.select(*users.columns, F.explode(F.sequence(F.lit(0), last)).alias("part"))
    return ballots.join(parted, ["user", "part"], how)


def drop_decided(
    undecided: "DataFrame", ballots: "DataFrame", full: "DataFrame", winners: "DataFrame | None", electorate: Electorate
) -> "DataFrame":
    """Returns the examples that neither won nor have a full user."""
    vetoes = join_by_part(ballots, full, electorate, how="left_semi").select("id")
    decided = vetoes if winners is None else vetoes.union(winners.select("id"))
    return undecided.join(decided.distinct(), "id", "left_anti")


def size_of(undecided: "DataFrame") -> tuple[int, int]:
    """Returns the numbers of examples and of pairs."""
    row = undecided.agg(F.count(F.lit(1)), F.sum(F.col("num_users").cast("bigint"))).collect()[0]
    return row[0], row[1] or 0


def winners_schema(examples: "DataFrame") -> str:
    """Returns the columns of winners, with ids and users as in a table of examples."""
    kinds = {field.name: field.dataType.simpleString() for field in examples.schema}
    return f"id {kinds['id']}, users {kinds['users']}, num_users int, first bigint, second bigint, copies int"


def finish_locally(
    undecided: "DataFrame", taken: "DataFrame", *, contribution_bound: int, copies: int, to_the_end: bool
) -> pa.Table:
    """Selects greedily from the undecided examples on the driver, in order, with the room that is left.

    Args:
      copies: what an example has that this pass takes.
      to_the_end: further passes follow here, until one adds nothing.

    Returns the selected examples, columns as `undecided` and `copies`.
    """
    rows = pl.DataFrame(undecided.toArrow())
    walk = rows.sort("first", "second", pl.col("id").cast(pl.String))
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
        kept = greedy_pass(order, indptr, users, 0, kept, 0, room)
        taken_copies[order[:kept]] = number
        number += 1
        if not to_the_end:
            break
    chosen = walk.with_columns(pl.Series("copies", taken_copies)).filter(pl.col("copies") > 0)
    return chosen.select("id", "users", "num_users", "first", "second", "copies").to_arrow()
