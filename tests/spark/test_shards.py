"""Shards that Spark writes are those of one machine."""

import polars as pl
import pyarrow as pa
import pytest
from tests.spark.conftest import lists_of_users

import coowned as co
from coowned.content.splits import train_graph
from coowned.runs.inputs import write_shards as write_locally
from coowned.selection.shards import read_shards
from coowned.spark import attribute, certify, select, write_shards

pytestmark = pytest.mark.full
SPLITS = (0.6, 0.2, 0.2)


@pytest.fixture
def table():
    lists = lists_of_users(3)
    columns = {"example_id": [3 * i - 200 for i in range(len(lists))], "users": lists}
    return pl.DataFrame(
        columns | {"text": [f"text {i} é" for i in range(len(lists))], "x": [i / 7 for i in range(len(lists))]}
    )


def rows_of(folder):
    found = read_shards(folder)
    graph = found.graph
    keys = graph.user_keys.to_pylist()
    pieces = [(graph.ids_of(examples), content) for examples, content in found.content.pieces(range_of(graph))]
    content = {own: row for ids, piece in pieces for own, row in zip(ids.to_pylist(), piece.to_pylist(), strict=True)}
    ends = graph.indptr.tolist()
    users = {
        own: sorted(keys[user] for user in graph.users[ends[at] : ends[at + 1]])
        for at, own in enumerate(graph.ids_of(range_of(graph)).to_pylist())
    }
    return content, users, found


def range_of(graph):
    return pa.array(range(graph.num_examples)).to_numpy()


def test_shards_are_those_of_one_machine(spark, table, tmp_path):
    """Rows, content, users, and what the manifest says of the graph."""
    data = spark.createDataFrame(table.to_arrow()).repartition(3)
    exact = co.UserKeyRules.exact()
    train = attribute(data, user_keys=exact).train_split(SPLITS)
    selector = co.Greedy(contribution_bound=2)
    chosen = select(train, selector, seed=1)
    certificate = certify(train, chosen, selector=selector, seed=1)
    manifest = write_shards(data, train, chosen, certificate, tmp_path / "spark")
    examples = co.from_table(table, example_id="example_id", user_keys=exact)
    selection = selector.select(train_graph(examples.graph, SPLITS), seed=1)
    local = write_locally(
        tmp_path / "local", examples, SPLITS, selection, co.certify(train_graph(examples.graph, SPLITS), selection)
    )
    (content, users, found), (there, owners, expected) = rows_of(tmp_path / "spark"), rows_of(tmp_path / "local")
    assert len(content) == sum(manifest.shard_rows) > manifest.absent.examples > 0
    assert (content, users) == (there, owners)
    assert found.graph.digest_sums() == expected.graph.digest_sums()
    for name in ("graph_digest", "selection_digest", "splits", "shard_rows", "absent", "types_inferred", "groups"):
        assert getattr(manifest, name) == getattr(local, name), name
    assert found.manifest == manifest
    with pytest.raises(co.InputError, match="exists already"):
        write_shards(data, train, chosen, certificate, tmp_path / "spark")


def test_rows_that_do_not_fit_are_refused(spark, table, tmp_path):
    data = spark.createDataFrame(table.head(40).to_arrow())
    graph = attribute(data, user_keys=co.UserKeyRules.exact())
    train = graph.train_split(SPLITS)
    chosen = select(train, co.Greedy(contribution_bound=1))
    certificate = certify(train, chosen)
    with pytest.raises(co.CertificateMismatchError, match="give the table that the graph was made of"):
        write_shards(data.union(data.limit(5)), train, chosen, certificate, tmp_path / "twice")
    with pytest.raises(co.InputError, match=r"select from graph\.train_split"):
        write_shards(data, graph, chosen, certificate, tmp_path / "whole")
    with pytest.raises(co.InputError, match="a column named group; rename it"):
        write_shards(data.withColumnRenamed("x", "group"), train, chosen, certificate, tmp_path / "group")
    assert list(tmp_path.iterdir()) == []
