"""The certificate counted on Spark is that of one machine."""

import pytest
from tests.spark.conftest import local_examples, make_table

import coowned as co
from coowned.spark import attribute, certify, select

pytestmark = pytest.mark.full


@pytest.mark.parametrize("numbers", [False, True])
def test_certificate_is_the_local_one(spark, numbers):
    table = make_table(5, numbers=numbers)
    examples = local_examples(table)
    gone = ["hub", "s0"] if not numbers else ["-7", "3"]
    reduced = examples.without_users(gone)
    graph = attribute(
        spark.createDataFrame(table.to_arrow()).repartition(4), user_keys=co.UserKeyRules.exact(), unprotected=gone
    )
    selector = co.GreedyWithDuplicates(contribution_bound=3, unattributed="keep")
    found = select(graph, selector, seed=7)
    certificate = certify(graph, found, selector=selector, seed=7)
    expected = co.certify(reduced.graph, selector.select(reduced.graph, seed=7))
    assert certificate.to_json() == expected.to_json()
    assert certificate.num_unprotected_users == 2
    assert certificate.num_copies_without_users > 0
    assert (graph.num_examples, graph.num_pairs, graph.num_users) == (
        reduced.graph.num_examples,
        reduced.graph.num_pairs,
        reduced.graph.num_users,
    )
    graph.release()


def test_one_s_own_selection(spark):
    table = spark.createDataFrame(
        [("a", ["x", "y"]), ("b", ["y"]), ("ü", [])], "example_id string, users array<string>"
    )
    own = spark.createDataFrame([("a", 2), ("ü", 1)], "example_id string, copies int")
    certificate = certify(table, own)
    local = co.from_table({"example_id": ["a", "b", "ü"], "users": [["x", "y"], ["y"], []]}, example_id="example_id")
    expected = co.certify(local.graph, co.Selection.from_copies(local.graph, [2, 0, 1]))
    assert certificate.to_json() == expected.to_json()
    nothing = certify(table, own.limit(0))
    expected = co.certify(local.graph, co.Selection.from_copies(local.graph, [0, 0, 0]))
    assert nothing.to_json() == expected.to_json()


def test_foreign_selections_are_refused(spark):
    table = spark.createDataFrame([("a", ["x"]), ("b", ["x"])], "example_id string, users array<string>")
    graph = attribute(table, user_keys=co.UserKeyRules.exact())

    def of(*rows):
        return spark.createDataFrame(list(rows), "example_id string, copies int")

    with pytest.raises(co.CertificateMismatchError, match="example 'c' of the selection is not in the data"):
        certify(graph, of(("a", 1), ("c", 1)))
    with pytest.raises(co.InputError, match="'a' is in several rows"):
        certify(graph, of(("a", 1), ("a", 1)))
    with pytest.raises(co.InputError, match="1 rows of the selection have no example_id, or copies"):
        certify(graph, of(("a", 1), ("b", 0)))
    with pytest.raises(co.InputError, match="columns example_id and copies"):
        certify(graph, table)
    with pytest.raises(co.UncertifiableError, match="a user is in more than"):
        certify(graph, of(("a", 2**30)))
    graph.release()
