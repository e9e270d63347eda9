"""One Spark session for all tests of this folder, and graphs of every awkward shape in one table."""

import random
from collections.abc import Iterator
from typing import Any

import polars as pl
import pytest

import coowned as co
from coowned.spark.session import session


@pytest.fixture(scope="package")
def spark() -> Iterator[Any]:
    """Two threads, tasks tried three times, and none of what pays only on large tables."""
    options = {
        "spark__sql__shuffle__partitions": 2,
        "spark__sql__adaptive__enabled": "false",
        "spark__sql__codegen__wholeStage": "false",
        "spark__driver__memory": "1g",
        "spark__driver__defaultJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    with session("local[2,3]", **options) as started:
        yield started


def lists_of_users(seed: int) -> list[list[str]]:
    """Random (some of nobody), skewed, path, star, one-hub and repeated examples, each kind with users of its own."""
    draw = random.Random(seed)
    random_ = [[f"r{draw.randrange(40)}" for _ in range(draw.randrange(0, 5))] for _ in range(120)]
    skewed = [[f"k{int(30 * draw.random() ** 3)}" for _ in range(draw.randrange(1, 4))] for _ in range(120)]
    path = [[f"p{i}", f"p{i + 1}"] for i in range(60)]
    star = [["s0", f"s{i}"] for i in range(1, 60)]
    hub = [["hub", f"h{draw.randrange(20)}", f"h{draw.randrange(20)}"] for _ in range(90)]
    same = [["t1", "t2", "t3"] for _ in range(12)]
    return [sorted(set(row)) for row in [*random_, *skewed, *path, *star, *hub, *same]]


def make_table(seed: int, *, numbers: bool) -> pl.DataFrame:
    """The table of `lists_of_users`, with ids and users as text or as numbers."""
    lists = lists_of_users(seed)
    if not numbers:
        return pl.DataFrame({"example_id": [f"m{i}" for i in range(len(lists))], "users": lists})
    labels = {user: at - 7 for at, user in enumerate(sorted({user for row in lists for user in row}))}
    ids = pl.Series("example_id", [3 * i - 200 for i in range(len(lists))], dtype=pl.Int32)
    return pl.DataFrame({"example_id": ids, "users": [[labels[user] for user in row] for row in lists]})


def local_examples(table: pl.DataFrame) -> co.AttributedExamples:
    return co.from_table(table, example_id="example_id", user_keys=co.UserKeyRules.exact())


def chosen_locally(examples: co.AttributedExamples, selector: Any, seed: int) -> dict[Any, int]:
    copies = selector.select(examples.graph, seed=seed).copies
    return {own: int(count) for own, count in zip(examples.ids.to_pylist(), copies, strict=True) if count}


def as_dict(selection: Any) -> dict[Any, int]:
    rows = selection.collect()
    found = {row.example_id: row.copies for row in rows}
    assert len(found) == len(rows)
    return found
