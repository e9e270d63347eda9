"""`Priced` on Spark: optimum-preserving reductions first, then prices for the rest, and an order derived from them.

    undecided   id, users, num_users, first, second    as in `rounds`; users who constrain nothing are taken out of it
    items       id, users, num_users, second, value, anchor      an undecided example, and how far it is in
    users       user, capacity, degree, price, anchor, reached   a user of the undecided examples

Values, prices and their sums are whole multiples of 2^-PRICE_BITS: addition is exact, whatever the order, so that S and
its bound do not depend on how the tables are partitioned. The method is that of `selection.price_search`, in integers.
"""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from coowned.attribution.graph import AttributionGraph
from coowned.progress import Progress, counted
from coowned.selection.price_bound import PRICE_BITS
from coowned.selection.priced import Priced
from coowned.spark import functions as F
from coowned.spark import rounds
from coowned.spark.checkpoints import Checkpoints
from coowned.spark.rounds import Electorate, winners_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ITERATIONS = 40
"""Of prices: enough for a bound within 0.2% of the lowest on the graphs that were measured (docs/spark.md)."""
_ONE = 1 << PRICE_BITS
_SHORTEST_ANCHOR = 32  # iterations for which an anchor is kept at least
_MOST_PEELS = 20
_LEAST_PEELED = 0.02  # of the pairs: a round that decides less is the last


@dataclasses.dataclass(frozen=True, kw_only=True)
class Core:
    """The undecided rest, and the decisions made before."""

    undecided: "DataFrame"  # in the order to walk it in
    taken: "DataFrame"  # user, copies, new: of the users who are left
    won: list[str]  # the tables of winners so far
    upper_bound: int  # on the copies of all examples with users


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pricing:
    """Peeling and pricing, before the rounds of votes.

    Guarantees:
      - What is peeled off costs no optimum, and the bound holds for every S.   (test_priced_is_near_its_bound)
      - The same for any partitioning.                                          (test_priced_for_any_partitioning)
    """

    selector: Priced
    electorate: Electorate
    seed: int
    residue: int
    report: Progress
    checkpoints: Checkpoints

    def core(self, undecided: "DataFrame", taken: "DataFrame") -> Core:
        """Peels, then prices the rest, or decides it on the driver if it fits there."""
        undecided, taken, won = self._peel(undecided, taken)
        size = self.checkpoints.read(won, winners_schema(undecided)).count()
        _, pairs = rounds.size_of(undecided)
        if not pairs:
            return Core(undecided=undecided, taken=taken, won=won, upper_bound=size)
        if pairs <= self.residue:
            self.report(0.5, f"{pairs:,} pairs left, priced on the driver")
            chosen, bound = self._solve_locally(undecided, taken)
            name = "rounds/priced/local"
            self.checkpoints.save(chosen, name)
            return Core(undecided=undecided.limit(0), taken=taken, won=[*won, name], upper_bound=size + bound)
        ordered, bound = self._price(undecided, taken)
        return Core(undecided=ordered, taken=taken, won=won, upper_bound=size + bound)

    def _peel(self, undecided: "DataFrame", taken: "DataFrame") -> "tuple[DataFrame, DataFrame, list[str]]":
        """Applies the rules of `selection.packing`, each to all users at once, until a round decides little.

        A user all of whose undecided examples fit is free, and taken out of the examples' users; an example without
        another user is selected. A user without room is full: their examples are out. Of the examples with one
        user left, each user has as many as fit, the first in the order.
        """
        save, before, won = self.checkpoints.save, None, []
        for number in range(1, _MOST_PEELS + 1):
            folder = f"rounds/peel/{number}"
            if number > 1:
                single = undecided.where("num_users = 1")
                votes = rounds.count_votes(rounds.cast_ballots(single, self.electorate), taken, self.electorate)
                winners = save(votes.withColumn("copies", F.lit(1)), f"{folder}/single")
                won.append(f"{folder}/single")
                taken = save(rounds.add_taken(taken, winners), f"{folder}/taken")
                undecided = undecided.join(winners.select("id"), "id", "left_anti")
            left = save(self._marked(undecided, taken), f"{folder}/left")
            self.checkpoints.remove(f"rounds/peel/{number - 1}/left", f"rounds/peel/{number - 1}/taken")
            save(left.where(F.size("users") == 0).withColumn("copies", F.lit(1)), f"{folder}/free")
            won.append(f"{folder}/free")
            undecided = left.where(F.size("users") > 0)
            examples, pairs = rounds.size_of(undecided)
            self.report(0.1 + 0.02 * number, f"peeling, round {number}: {counted(examples, 'example')} left")
            if not pairs or (before is not None and pairs > (1 - _LEAST_PEELED) * before):
                break
            before = pairs
        return undecided, taken, won

    def _marked(self, undecided: "DataFrame", taken: "DataFrame") -> "DataFrame":
        """Returns the undecided examples without a full user, each with its users who are not free."""
        ballots = rounds.cast_ballots(undecided, self.electorate)
        degrees = ballots.groupBy("user").count().join(taken.select("user", "copies"), "user", "left")
        room = F.lit(self.electorate.contribution_bound) - F.coalesce("copies", F.lit(0))
        states = degrees.select("user", (room <= 0).alias("full"), (F.col("count") <= room).alias("free"))
        marked = rounds.join_by_part(ballots, states.where("full or free"), self.electorate, how="left")
        open_user = F.when(F.coalesce("free", F.lit(False)), None).otherwise(F.col("user"))
        left = marked.groupBy("id").agg(
            F.collect_list(open_user).alias("users"),
            F.max(F.coalesce("full", F.lit(False))).alias("out"),
            *(F.max(name).alias(name) for name in ("first", "second")),
        )
        return left.where("not out").select("id", "users", F.size("users").alias("num_users"), "first", "second")

    def _solve_locally(self, undecided: "DataFrame", taken: "DataFrame") -> "tuple[DataFrame, int]":
        """Returns the winners among the undecided examples, by `Priced` on the driver, and the bound on them."""
        rows = pl.DataFrame(undecided.toArrow()).sort(pl.col("id").cast(pl.String))
        entries = rows.select("users", example=pl.int_range(pl.len())).explode("users")
        keys = entries["users"].unique(maintain_order=True)
        labels = pl.DataFrame({"users": keys}).with_row_index("label")
        owned = entries.join(labels, on="users", how="left", maintain_order="left")
        graph = AttributionGraph.from_pairs(
            owned["example"].to_numpy(),
            owned["label"].to_numpy().astype(np.int64),
            num_examples=len(rows),
            num_users=len(keys),
            example_ids=rows["id"].cast(pl.String).to_arrow(),
        )
        bound = self.electorate.contribution_bound
        owners = undecided.select(F.explode("users").alias("user")).distinct()
        used = pl.DataFrame(taken.join(owners, "user", "left_semi").select("user", "copies").toArrow())
        room = labels.join(used, left_on="users", right_on="user", how="left")["copies"].fill_null(0)
        selector = dataclasses.replace(
            self.selector,
            contribution_bound=bound,
            contribution_bounds={label: bound - gone for label, gone in enumerate(room.to_list()) if gone} or None,
        )
        selection = selector.select(graph, seed=self.seed)
        chosen = rows.filter(pl.Series(selection.copies > 0)).with_columns(copies=pl.lit(1, pl.Int32))
        assert selection.upper_bound is not None
        found = self.checkpoints.spark.createDataFrame(chosen.to_arrow(), winners_schema(undecided))
        return found, selection.upper_bound

    def _price(self, undecided: "DataFrame", taken: "DataFrame") -> "tuple[DataFrame, int]":
        """Returns the undecided examples in the order of their worth, and the bound that the prices prove.

        Prices go up where more is wanted than fits, and examples come in where they are worth more than their users'
        prices: the primal-dual method of `selection.price_search`, for a fixed number of iterations.
        """
        from pyspark import StorageLevel

        save, remove = self.checkpoints.save, self.checkpoints.remove
        bound = F.lit(self.electorate.contribution_bound)
        ballots = rounds.cast_ballots(undecided, self.electorate).persist(StorageLevel.MEMORY_AND_DISK)
        try:
            degrees = ballots.groupBy("user").agg(F.count("id").alias("degree"))
            users = degrees.join(taken.select("user", "copies"), "user", "left").select(
                "user",
                (bound - F.coalesce("copies", F.lit(0))).cast("bigint").alias("capacity"),
                "degree",
                *(F.lit(0).cast("bigint").alias(name) for name in ("price", "anchor", "reached")),
            )
            users = save(users, "rounds/prices/0/users")
            zeros = (F.lit(0).cast("bigint").alias(name) for name in ("value", "anchor"))
            items = save(undecided.select("id", "users", "num_users", "second", *zeros), "rounds/prices/0/items")
            last_anchor = 0
            for number in range(1, ITERATIONS + 1):
                since = number - last_anchor
                moves = since >= max(_SHORTEST_ANCHOR, 2 * number // 5)
                folder = f"rounds/prices/{number}"
                items = save(_move_items(items, self._paid(ballots, users, "price"), since, moves), f"{folder}/items")
                users = save(_move_users(users, items, since, moves), f"{folder}/users")
                remove(f"rounds/prices/{number - 1}")
                last_anchor = number if moves else last_anchor
                self.report(0.2 + 0.6 * number / ITERATIONS, f"prices, round {number} of {ITERATIONS}")
            paid = self._paid(ballots, users.withColumn("reached", F.least("reached", F.lit(_ONE))), "reached")
            items = save(items.join(paid, "id"), "rounds/prices/items")
        finally:
            ballots.unpersist(blocking=True)
        reduced = F.lit(_ONE) - F.col("paid")
        whole = "decimal(38, 0)"
        of_items = items.agg(F.sum(F.greatest(reduced, F.lit(0)).cast(whole))).collect()[0][0]
        of_users = users.agg(F.sum((F.col("capacity") * F.least("reached", F.lit(_ONE))).cast(whole))).collect()[0][0]
        worth = -(reduced + F.col("value"))
        ordered = items.select("id", "users", "num_users", worth.alias("first"), "second")
        return save(ordered, "rounds/priced/ordered"), int(of_items + of_users) >> PRICE_BITS

    def _paid(self, ballots: "DataFrame", users: "DataFrame", price: str) -> "DataFrame":
        """Returns id, paid: the sum of the prices of each example's users."""
        priced = rounds.join_by_part(ballots, users.select("user", F.col(price).alias("paid")), self.electorate)
        return priced.groupBy("id").agg(F.sum("paid").alias("paid"))


def _move_items(items: "DataFrame", paid: "DataFrame", since: int, moves: bool) -> "DataFrame":
    """Takes one primal step of the examples; reflected: twice the new value less the old one."""
    step = f"(2 * ({_ONE} - paid)) div num_users"
    stepped = items.join(paid, "id").withColumn("reached", F.expr(f"greatest(least(value + {step}, {_ONE}), 0)"))
    reflected = stepped.withColumn("reflected", F.expr("2 * reached - value"))
    moved = reflected.withColumn("value", F.expr(f"({since} * reflected + anchor) div {since + 1}"))
    moved = moved.withColumn("anchor", F.col("value")) if moves else moved
    return moved.select("id", "users", "num_users", "second", "value", "anchor", "reflected")


def _move_users(users: "DataFrame", items: "DataFrame", since: int, moves: bool) -> "DataFrame":
    """Takes one dual step of the users: prices rise where demand exceeds the capacity, and never fall below 0."""
    demand = items.select(F.explode("users").alias("user"), "reflected").groupBy("user")
    joined = users.join(demand.agg(F.sum("reflected").alias("demand")), "user")
    reached = f"greatest(price + (demand - capacity * {_ONE}) div (2 * degree), 0)"
    stepped = joined.withColumn("reached", F.expr(reached))
    moved = stepped.withColumn("price", F.expr(f"({since} * (2 * reached - price) + anchor) div {since + 1}"))
    moved = moved.withColumn("anchor", F.col("price")) if moves else moved
    return moved.select("user", "capacity", "degree", "price", "anchor", "reached")
