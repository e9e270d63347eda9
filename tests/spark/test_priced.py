"""`Priced` on Spark: near its bound, which holds, for any partitioning."""

import dataclasses

import numpy as np
import pytest
from tests.spark.conftest import as_dict, local_examples, make_table

import coowned as co
from coowned.spark import attribute, certify, priced
from coowned.spark.selection import choose

pytestmark = pytest.mark.full
EXACT = co.UserKeyRules.exact()


@pytest.fixture(scope="module")
def numbers(spark):
    """(what one machine has, what Spark has)."""
    table = make_table(1, numbers=True)
    graph = attribute(spark.createDataFrame(table.to_arrow()).repartition(3), user_keys=EXACT)
    yield local_examples(table), graph
    graph.release()


def checked(examples, graph, selector, chosen):
    """The S of Spark on one machine, recounted on both; nothing can be added to it."""
    found = as_dict(chosen.table)
    copies = np.array([found.get(own, 0) for own in examples.ids.to_pylist()])
    selection = co.Selection.from_copies(examples.graph, copies)
    selection = dataclasses.replace(selection, user_bounds=selector.contribution_bounds)
    certificate = certify(graph, chosen.table, selector=selector, seed=0, upper_bound=chosen.upper_bound)
    certificate.check_recount(co.certify(examples.graph, selection))
    assert certificate.origin.upper_bound == chosen.upper_bound
    assert certificate.origin.proven_optimal == (selection.size == chosen.upper_bound)
    capacities = selector.capacities(examples.graph)
    room = capacities - np.bincount(
        examples.graph.users, weights=np.repeat(copies, examples.graph.users_per_example), minlength=len(capacities)
    )
    assert room.min() >= 0
    for row in np.flatnonzero((copies == 0) & (examples.graph.users_per_example > 0)):
        assert room[examples.graph.users[examples.graph.indptr[row] : examples.graph.indptr[row + 1]]].min() == 0
    return selection


@pytest.mark.parametrize(("contribution_bound", "residue"), [(2, 0), (1, 10**6), (3, 10**6)])
def test_priced_is_near_its_bound(numbers, contribution_bound, residue):
    """By rounds alone, and with the last pairs on the driver."""
    examples, graph = numbers
    selector = co.Priced(contribution_bound=contribution_bound)
    chosen = choose(graph, selector, residue=residue, heavy_user=25)
    selection = checked(examples, graph, selector, chosen)
    best = co.IntegerProgram(contribution_bound=contribution_bound).select(examples.graph)
    assert best.proven_optimal
    assert chosen.upper_bound >= best.size >= selection.size
    assert selection.size >= 0.99 * chosen.upper_bound
    assert selection.size > co.Greedy(contribution_bound=contribution_bound).select(examples.graph).size


def test_bounds_of_single_users(numbers):
    examples, graph = numbers
    bounds = {key: place % 4 for place, key in enumerate(examples.user_keys.to_pylist()) if place % 3}
    selector = co.Priced(contribution_bound=2, contribution_bounds=bounds)
    best = co.IntegerProgram(contribution_bound=2, contribution_bounds=bounds).select(examples.graph)
    chosen = choose(graph, selector, residue=10**6)
    selection = checked(examples, graph, selector, chosen)
    assert chosen.upper_bound >= best.size >= selection.size >= 0.99 * best.size


def test_examples_of_nobody_are_in_the_bound(numbers):
    examples, graph = numbers
    nobody = int((examples.graph.users_per_example == 0).sum())
    dropped, kept = (
        choose(graph, co.Priced(contribution_bound=1, unattributed=what)).upper_bound for what in ("drop", "keep")
    )
    assert kept - dropped == nobody > 0


def test_priced_for_any_partitioning(spark, numbers, monkeypatch):
    """Few iterations, so that order and sums are those of prices that are not settled."""
    monkeypatch.setattr(priced, "ITERATIONS", 3)
    examples, graph = numbers
    selector = co.Priced(contribution_bound=2)
    settings = {"spark.sql.shuffle.partitions": "5", "spark.sql.autoBroadcastJoinThreshold": "-1"}
    before = {name: spark.conf.get(name) for name in settings}
    one = choose(graph, selector, residue=0, heavy_user=25)
    try:
        for name, value in settings.items():
            spark.conf.set(name, value)
        other = choose(graph, selector, residue=0)
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)
    assert (as_dict(one.table), one.upper_bound) == (as_dict(other.table), other.upper_bound)
    assert checked(examples, graph, selector, one).size <= one.upper_bound


def test_bound_is_that_of_the_prices(numbers, monkeypatch):
    """With prices that are not settled, the bound is poor and still holds."""
    monkeypatch.setattr(priced, "ITERATIONS", 1)
    examples, graph = numbers
    chosen = choose(graph, co.Priced(contribution_bound=2), residue=0)
    best = co.IntegerProgram(contribution_bound=2).select(examples.graph)
    assert chosen.upper_bound > best.size
