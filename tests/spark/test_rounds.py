"""What one round does, and where the pairs of a heavy user are."""

import pytest

import coowned as co
from coowned.spark import attribute, rounds
from coowned.spark.rounds import ordered

pytestmark = pytest.mark.full
PAIRS_TOGETHER = 100


@pytest.fixture(scope="module")
def hub(spark):
    """One user in every one of 2,000 examples, each with another user of its own."""
    from pyspark.sql import functions as F

    table = spark.range(2000).select(
        F.col("id").alias("example_id"), F.array(F.lit(0).cast("bigint"), F.col("id") + 1).alias("users")
    )
    graph = attribute(table)
    yield graph
    graph.release()


def test_heavy_users_are_spread(spark, hub):
    from pyspark.sql import functions as F

    heavy = rounds.find_heavy(hub.pairs, PAIRS_TOGETHER, hub.checkpoints)
    assert [tuple(row) for row in heavy.collect()] == [(0, 20)]
    electorate = rounds.Electorate(contribution_bound=3, heavy=heavy)
    spark.conf.set("spark.sql.shuffle.partitions", "8")
    try:
        ballots = rounds.cast_ballots(ordered(hub.examples, 0), electorate)
        task = F.spark_partition_id().alias("task")
        of_hub = ballots.where("user = 0")
        together = [row["count"] for row in of_hub.groupBy("part").count().collect()]
        by_task = [row["count"] for row in of_hub.groupBy(task).count().collect()]
        # What the second level sees of her: the first three of each part.
        plan = rounds.count_votes(
            ballots, spark.createDataFrame([], "user bigint, copies int, new boolean"), electorate
        )
        winners = plan.collect()
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", "2")
    # 2,000 pairs over 20 parts: a part above 200 has a probability below 1e-15 (the hash is fixed: no alarm at all).
    assert sum(together) == 2000
    assert max(together) <= 2 * PAIRS_TOGETHER
    assert len(by_task) >= 5
    assert max(by_task) <= 1000
    assert len(winners) == 3


def test_without_parts_she_would_be_on_one_task(spark, hub):
    from pyspark.sql import functions as F

    ballots = rounds.cast_ballots(ordered(hub.examples, 0), rounds.Electorate(contribution_bound=3, heavy=None))
    by_task = ballots.where("user = 0").groupBy(F.spark_partition_id()).count().collect()
    assert [row["count"] for row in by_task] == [2000]


def test_one_round(spark):
    table = [("a", ["x"]), ("b", ["x", "y"]), ("c", ["y", "z"]), ("d", ["z", "w"])]
    graph = attribute(
        spark.createDataFrame(table, "example_id string, users array<string>"), user_keys=co.UserKeyRules.exact()
    )
    walk = ordered(graph.examples, 0)
    electorate = rounds.Electorate(contribution_bound=1, heavy=None)
    ballots = rounds.cast_ballots(walk, electorate)
    winners = rounds.count_votes(ballots, spark.createDataFrame([], "user string, copies int, new boolean"), electorate)
    won = {row.id for row in winners.collect()}
    first = walk.orderBy("first", "second").first()
    assert first.id == "a"
    assert "a" in won
    taken = rounds.add_taken(spark.createDataFrame([], "user string, copies int, new boolean"), winners)
    assert {row.user: row.copies for row in taken.collect()}["x"] == 1
    left = rounds.drop_decided(walk, ballots, rounds.full_users(taken, electorate, new=True), winners, electorate)
    assert "b" not in {row.id for row in left.collect()}
    assert not won & {row.id for row in left.collect()}
    graph.release()
