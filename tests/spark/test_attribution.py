"""Tables on Spark are attributed as on one machine."""

import dataclasses

import polars as pl
import pytest

import coowned as co
from coowned.attribution.sources import DataSource
from coowned.spark import attribute
from coowned.spark.sources import attribute_source

pytestmark = pytest.mark.full
SPELLINGS = [
    "Bob <BOB+news@x.org>",
    " bob@X.org",
    "Straße",
    "STRASSE",
    "ＡＮＮ",
    "ann",
    "b.o.b@gmail.com",
    "Bob@GMail.com",
    "bob@x\u3002org",
    '"b\\ob"@x.org',
    'b"o"b@x.org',
    "bob%x.org@relay.net",
    "=?utf-8?q?Stra=C3=9Fe?=",
    "Ann\u2800",
]


def frame(spark, columns):
    return spark.createDataFrame(pl.DataFrame(columns).to_arrow())


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ({"example_id": ["a", "b"], "users": [SPELLINGS[:5], SPELLINGS[4:]]}, {}),
        ({"example_id": [5, 6, 5], "user_id": ["Ann", "team@x", "ann "]}, {"user": "user_id"}),
        (
            {"n": ["1", "2"], "from": ["Ann", None], "to": ["bob; Team@X ;", ""]},
            {"users": ["from", "to"], "example_id": "n", "separator": ";"},
        ),
        ({"example_id": ["a", "b"], "users": [["Li, Wei", "Wei Li"], []]}, {"user_keys": co.UserKeyRules.authors()}),
        ({"example_id": ["a", "b"], "users": [[7, 7, -3], [8]]}, {}),
    ],
)  # fmt: skip
def test_keys_are_the_local_ones(spark, columns, named):
    aliases = None if "users" in columns else co.Aliases.from_pairs([("team@x", "bob"), ("team@x", "carol")])
    settings = {"example_id": "example_id", "aliases": aliases, **named}
    local = co.from_table(pl.DataFrame(columns), **settings)
    graph = attribute(frame(spark, columns), **settings)
    found = {row.id: {str(user) for user in row.users} for row in graph.examples.collect()}
    keys, bounds = local.user_keys.to_pylist(), local.graph.indptr
    expected = {
        own: {keys[user] for user in local.graph.users[bounds[at] : bounds[at + 1]]}
        for at, own in enumerate(local.ids.to_pylist())
    }
    assert found == expected
    assert graph.digest == local.graph.digest
    assert graph.columns_read == local.graph.columns_read
    graph.release()


@pytest.mark.parametrize(
    ("columns", "named", "message"),
    [
        ({"example_id": ["a", None], "users": [["x"], ["y"]]}, {}, "example_id"),
        ({"example_id": ["a", "", ""], "users": [["x"], ["y"], ["z"]]}, {}, "column 'example_id' is empty"),
        ({"example_id": ["a", "b"], "users": [["x"], None]}, {}, "no list of users"),
        ({"example_id": ["a", "b"], "users": [["x"], [None]]}, {}, "null user"),
        ({"example_id": ["a", "b"], "users": [["x"], [""]]}, {}, "blank user in column 'users' at the row with id "),
        ({"example_id": ["a"], "user_id": pl.Series([None], dtype=pl.String)}, {}, "no user in column 'user_id'"),
        ({"example_id": [1.5], "users": [["x"]]}, {}, "column 'example_id' must be integers or text"),
        ({"example_id": [1], "users": [[1.5]]}, {}, "users are text, integers, or lists"),
        ({"example_id": [1], "users": [["x"]]}, {"users": "people"}, "there is no column 'people'"),
        ({"example_id": [1], "users": [["x"]]}, {"user": "users"}, "contains lists; pass it as users=, not user="),
        ({"example_id": [1], "users": [["x"]]}, {"user": "users", "users": "users"}, "not both"),
    ],
)
@pytest.mark.parametrize("exact", [False, True])
def test_bad_rows_are_refused(spark, tmp_path, columns, named, message, exact):
    rules = co.UserKeyRules.exact() if exact else None
    with pytest.raises(co.InputError, match=message):
        attribute(frame(spark, columns), **named, user_keys=rules, checkpoint_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rules", [None, co.UserKeyRules.exact()])
@pytest.mark.parametrize("partitions", [1, 3])
def test_copies_of_an_example_are_one(spark, rules, partitions):
    """The same Message-ID in a Sent folder, which names Bob in Bcc, and in inboxes, which do not."""
    columns = {"example_id": ["m1", "m2", "m1", "m1"], "users": [["ann", "dan"], ["dan"], ["ann", "bob"], []]}
    graph = attribute(frame(spark, columns).repartition(partitions), user_keys=rules)
    local = co.from_table(pl.DataFrame(columns), example_id="example_id", user_keys=rules)
    found = {row.id: set(row.users) for row in graph.examples.collect()}
    assert found == {"m1": {"ann", "bob", "dan"}, "m2": {"dan"}}
    with pytest.raises(co.InputError, match="1 unprotected key is not in the data, the first is 'nobody'"):
        attribute(frame(spark, columns), user_keys=rules, unprotected=["dan", "nobody"])
    assert graph.digest == local.graph.digest
    graph.release()


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl", "folder"])
def test_sources_are_read_as_locally(spark, tmp_path, kind):
    table = pl.DataFrame({"id": ["007", "8", "x, y"], "to": ["Ann;bob", "", 'say "hi";ann'], "text": ["a\nb", "", "c"]})
    path = tmp_path / f"mail.{kind}"
    if kind == "folder":
        (path / "year=2001").mkdir(parents=True)
        table[:2].write_parquet(path / "part-1.parquet")
        table[2:].write_parquet(path / "year=2001" / "part-2.parquet")
        (path / "_half.parquet").write_bytes(b"not data")
    else:
        {"parquet": table.write_parquet, "csv": table.write_csv, "jsonl": table.write_ndjson}[kind](path)
    unprotected = tmp_path / "robots.txt"
    unprotected.write_text("BOB\n")
    source = DataSource(path=path, users=("to",), example_id="id", separator=";", unprotected=unprotected)
    graph, local = attribute_source(spark, source), source.read().graph
    assert graph.digest == local.digest
    assert graph.num_unprotected_users == local.num_unprotected_users == 1
    assert graph.columns_read == local.columns_read
    graph.release()
    if kind == "csv":
        with pytest.raises(co.InputError, match="no row numbers"):
            attribute_source(spark, dataclasses.replace(source, example_id=None))
        with pytest.raises(co.InputError, match="Spark reads parquet, csv and jsonl, not mail"):
            attribute_source(spark, dataclasses.replace(source, format="mail"))
