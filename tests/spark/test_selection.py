"""Spark and one machine give the same S."""

import functools
import os
import tempfile
from pathlib import Path
from urllib.parse import urlparse

import pytest
from tests.spark.conftest import as_dict, chosen_locally, local_examples, make_table

import coowned as co
from coowned.selection.selection_files import read_selection as read_locally
from coowned.spark import attribute, rounds, select, write_selection
from coowned.spark.certificate import certify
from coowned.spark.checkpoints import Checkpoints
from coowned.spark.selection_files import read_selection

pytestmark = pytest.mark.full
EXACT = co.UserKeyRules.exact()


def graph_of(spark, table, partitions=2):
    return attribute(spark.createDataFrame(table.to_arrow()).repartition(partitions), user_keys=EXACT)


@pytest.fixture(scope="module")
def text(spark):
    """(what one machine has, what Spark has) of the table with text."""
    table = make_table(0, numbers=False)
    graph = graph_of(spark, table)
    yield local_examples(table), graph
    graph.release()


@pytest.fixture(scope="module")
def numbers(spark):
    """The same with integers, other draws and another partitioning."""
    table = make_table(1, numbers=True)
    graph = graph_of(spark, table, partitions=3)
    yield local_examples(table), graph
    graph.release()


MIXED = functools.partial(co.BiasMitigating, threshold=2, few_user_run=2, many_user_run=3)
MIXED_ONCE = functools.partial(MIXED, allow_duplicates=False)


# By rounds alone where the residue is 0, else the last pairs on the driver.
@pytest.mark.parametrize(
    ("contribution_bound", "residue"), [(1, 0), (2, 40), (3, 0), (4, 60), (5, 60), (6, 60), (7, 60), (8, 60)]
)
def test_equals_one_machine(request, contribution_bound, residue):
    examples, graph = request.getfixturevalue("numbers" if contribution_bound % 2 else "text")
    selector = co.Greedy(contribution_bound=contribution_bound)
    messages = []
    found = select(
        graph,
        selector,
        seed=contribution_bound,
        residue=residue,
        heavy_user=25,
        progress=lambda done, message: messages.append((done, message)),
    )
    assert as_dict(found) == chosen_locally(examples, selector, contribution_bound)
    assert any(message.startswith("round 1: ") and "decided" in message for _, message in messages)
    assert [done for done, _ in messages] == sorted(done for done, _ in messages)
    assert messages[-1] == (1.0, "selected")


@pytest.mark.parametrize(
    ("kind", "residue", "others"),
    [(co.Greedy, 0, 2), (co.Greedy, 60, 3), (co.GreedyWithDuplicates, 150, 3), (MIXED, 60, 2), (MIXED_ONCE, 0, 3)],
)
def test_bounds_of_single_users(text, kind, residue, others):
    """Smaller, larger and no room at all, and a key of nobody: S and certificate are those of one machine."""
    examples, graph = text
    bounds = {f"r{i}": i % 4 for i in range(40)} | {f"p{i}": 0 for i in range(0, 60, 9)} | {"hub": 9, "nobody": 1}
    selector = kind(contribution_bound=others, contribution_bounds=bounds)
    found = select(graph, selector, seed=4, residue=residue, heavy_user=25)
    assert as_dict(found) == chosen_locally(examples, selector, 4)
    local = co.certify(examples.graph, selector.select(examples.graph, seed=4))
    assert certify(graph, found, selector=selector, seed=4).tiers == local.tiers
    with pytest.raises(co.UncertifiableError, match="are in more copies than"):
        certify(graph, select(graph, co.Greedy(contribution_bound=9)), selector=selector)


def test_stored_bounds_are_recounted(spark, text, tmp_path):
    """S that Spark wrote carries the bounds: both engines read them back and hold every user against them."""
    examples, graph = text
    selector = co.Greedy(contribution_bound=2, contribution_bounds={"hub": 1, "r3": 0, "nobody": 1})
    found = select(graph, selector, seed=4)
    certificate = certify(graph, found, selector=selector, seed=4)
    write_selection(found, certificate, tmp_path / "S.parquet")
    assert co.certify(examples.graph, read_locally(tmp_path / "S.parquet", examples.graph)).tiers == certificate.tiers
    assert certify(graph, read_selection(spark, tmp_path / "S.parquet")).tiers == certificate.tiers
    assert certificate.tiers is not None


@pytest.mark.parametrize(("contribution_bound", "residue"), [(3, 0), (6, 150), (8, 10**6)])
def test_duplicates(text, contribution_bound, residue):
    examples, graph = text
    selector = co.GreedyWithDuplicates(contribution_bound=contribution_bound)
    found = select(graph, selector, seed=2, residue=residue, heavy_user=25)
    expected = chosen_locally(examples, selector, 2)
    assert max(expected.values()) > 1
    assert as_dict(found) == expected


@pytest.mark.parametrize(
    ("settings", "residue"),
    [
        ({"contribution_bound": 2, "threshold": 2, "few_user_run": 2, "many_user_run": 3}, 0),
        ({"contribution_bound": 3, "threshold": 1, "few_user_run": 10**9, "many_user_run": 1}, 10**6),
        ({"contribution_bound": 1, "threshold": 9, "few_user_run": 1, "many_user_run": 2**62}, 10**6),
        ({"contribution_bound": 2, "threshold": 2, "few_user_run": 1, "many_user_run": 4}, 200),
    ],
)  # fmt: skip
def test_interleaving(numbers, settings, residue):
    examples, graph = numbers
    selector = co.BiasMitigating(**settings, allow_duplicates=residue > 0)
    found = select(graph, selector, seed=4, residue=residue, heavy_user=25)
    assert as_dict(found) == chosen_locally(examples, selector, 4)


@pytest.mark.parametrize(
    "settings",
    [
        {"spark.sql.shuffle.partitions": "1"},
        {
            "spark.sql.shuffle.partitions": "7",
            "spark.sql.adaptive.enabled": "true",
            "spark.sql.autoBroadcastJoinThreshold": "-1",
        },
    ],
)
def test_partitioning_changes_nothing(spark, text, settings):
    examples, graph = text
    before = {name: spark.conf.get(name) for name in settings}
    selector = co.Greedy(contribution_bound=2)
    try:
        for name, value in settings.items():
            spark.conf.set(name, value)
        found = as_dict(select(graph, selector, seed=9, residue=20, heavy_user=40))
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)
    assert found == chosen_locally(examples, selector, 9)


def test_unattributed(spark, text):
    examples, graph = text
    empty = {
        own for own, count in zip(examples.ids.to_pylist(), examples.graph.users_per_example, strict=True) if not count
    }
    assert empty
    kept = as_dict(select(graph, co.GreedyWithDuplicates(contribution_bound=2, unattributed="keep"), seed=0))
    assert kept == chosen_locally(examples, co.GreedyWithDuplicates(contribution_bound=2, unattributed="keep"), 0)
    assert {kept[own] for own in empty} == {1}
    with pytest.raises(co.InputError, match=f"{len(empty)} examples have no users"):
        select(graph, co.Greedy(contribution_bound=2, unattributed="error"))


def test_pairs_and_types(spark):
    pairs = [(1, "a"), (2, "a"), (2, "b"), (3, "b"), (2, "b"), (4, "c")]
    table = spark.createDataFrame(pairs, "example_id smallint, user_id string")
    found = select(table, co.Greedy(contribution_bound=1))
    assert dict(found.dtypes) == {"example_id": "smallint", "copies": "int"}
    assert as_dict(found) == {1: 1, 3: 1, 4: 1}
    nothing = select(table.limit(0), co.Greedy(contribution_bound=1))
    assert as_dict(nothing) == {}


def test_refuses_what_spark_cannot_do(text):
    _, graph = text
    with pytest.raises(co.InputError, match="integer-program does not run on Spark; greedy, greedy-with-d"):
        select(graph, co.IntegerProgram(contribution_bound=1))
    with pytest.raises(co.InputError, match="priced has neither duplicates nor a time limit on Spark"):
        select(graph, co.Priced(contribution_bound=1, allow_duplicates=True))
    with pytest.raises(co.InputError, match='ties="input" does not apply to Spark'):
        select(graph, co.Greedy(contribution_bound=1, ties="input"))
    with pytest.raises(co.InputError, match="residue must be"):
        select(graph, co.Greedy(contribution_bound=1), residue=-1)
    with pytest.raises(co.InputError, match="data must be a Spark table or a SparkGraph, not list"):
        select([], co.Greedy(contribution_bound=1))


@pytest.fixture(scope="module")
def path_run(spark):
    """A path that the order runs along, by rounds alone: the plans of all that was saved, and what was cached then."""
    lists = [[f"p{i}", f"p{i + 1}", *(f"q{i}.{j}" for j in range(i))] for i in range(10)]  # each with one user more
    table = spark.createDataFrame([(i, row) for i, row in enumerate(lists)], "example_id int, users array<string>")
    graph = attribute(table, user_keys=EXACT)
    plans, cached = {}, []
    save = Checkpoints.save

    def recording(self, frame, name):
        plans[name] = frame._jdf.queryExecution().optimizedPlan().toString()
        cached.append(spark.sparkContext._jsc.getPersistentRDDs().size())
        return save(self, frame, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", recording)
        found = select(graph, co.Greedy(contribution_bound=1), residue=0)
    yield graph, found, plans, cached
    graph.release()


def test_plans_are_truncated(path_run):
    _, _, plans, _ = path_run
    rounds_run = sorted(int(name.split("/")[2]) for name in plans if name.endswith("undecided"))
    assert rounds_run == [1, 2, 3, 4, 5]  # each decides one link of the path
    for table in ("winners", "taken", "undecided"):
        lines = {len(plans[f"rounds/1/{number}/{table}"].splitlines()) for number in rounds_run[1:]}
        assert len(lines) == 1, (table, lines)  # the plan of round n is that of round 2
    assert all(plan.count("Relation [") <= 8 for plan in plans.values())


def test_nothing_is_left_behind(spark, path_run):
    _, found, _, cached = path_run
    assert max(cached) > 0  # the ballots were cached while they were needed
    assert spark.sparkContext._jsc.getPersistentRDDs().size() == 0
    assert spark._jsparkSession.sharedState().cacheManager().isEmpty()
    folder = Path(urlparse(os.path.dirname(found.inputFiles()[0])).path)
    assert folder.name == "selected"
    assert folder.is_relative_to(tempfile.gettempdir())
    assert [entry.name for entry in folder.parent.iterdir()] == ["selected"]
    own = Checkpoints(spark, folder.parent)
    own.save(found, "copy")
    own.clear()
    assert [entry.name for entry in folder.parent.iterdir()] == ["selected"]


def test_a_failure_leaves_no_files(spark, text, monkeypatch, tmp_path):
    _, graph = text

    def fails(*given, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr(rounds, "add_taken", fails)
    with pytest.raises(KeyboardInterrupt):
        select(graph, co.Greedy(contribution_bound=1), residue=0, checkpoint_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert spark.sparkContext._jsc.getPersistentRDDs().size() == 0
