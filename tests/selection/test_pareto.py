"""The 80 settings of the paper against the selector itself."""

import numpy as np
import polars as pl
import pytest

from coowned.attribution.graph import AttributionGraph
from coowned.errors import InputError
from coowned.selection.bias_mitigating import BiasMitigating
from coowned.selection.pareto import SETTINGS, pareto


@pytest.fixture(scope="module")
def graph():
    rng = np.random.default_rng(3)
    rows = [rng.choice(60, size=rng.integers(0, 7), replace=False).tolist() for _ in range(300)]
    return AttributionGraph.from_users_per_example(rows, num_users=60)


def test_settings_are_those_of_the_paper():
    assert len(SETTINGS) == 80
    assert len(set(SETTINGS)) == 76
    assert all(min(few, many) == 1 and max(few, many) <= 10 for _, few, many in SETTINGS)


def test_rows_are_the_selector(graph):
    table = pareto(graph, contribution_bound=3, seed=4)
    columns = [
        "threshold",
        "few_user_run",
        "many_user_run",
        "size",
        "num_distinct",
        "mean_users_per_example",
        "dominated",
    ]
    assert table.columns == columns
    assert list(table.select(columns[:3]).iter_rows()) == list(SETTINGS)
    for row in table.iter_rows(named=True):
        setting = {name: row[name] for name in columns[:3]}
        selection = BiasMitigating(contribution_bound=3, **setting).select(graph, seed=4)
        assert (row["size"], row["num_distinct"]) == (selection.size, selection.num_distinct)
        users = (selection.copies * graph.users_per_example).sum()
        assert row["mean_users_per_example"] == users / selection.size


def test_dominated(graph):
    rows = list(pareto(graph, contribution_bound=2).select("size", "mean_users_per_example", "dominated").iter_rows())
    for size, mean, dominated in rows:
        better = any(s >= size and m >= mean and (s > size or m > mean) for s, m, _ in rows)
        assert dominated == better
    assert {dominated for _, _, dominated in rows} == {True, False}


def test_no_examples():
    table = pareto(AttributionGraph.from_users_per_example([[], []]), contribution_bound=2)
    assert table["size"].sum() == 0
    assert table["mean_users_per_example"].null_count() == 80
    assert not table["dominated"].any()
    assert table.schema["mean_users_per_example"] == pl.Float64


def test_progress_and_bad_input(graph):
    seen = []
    pareto(graph, contribution_bound=1, progress=lambda done, message: seen.append(done))
    assert seen == sorted(seen)
    assert len(seen) == 80

    def interrupt(done, message):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pareto(graph, contribution_bound=1, progress=interrupt)
    with pytest.raises(InputError, match="contribution_bound"):
        pareto(graph, contribution_bound=0)
    with pytest.raises(InputError, match="AttributionGraph"):
        pareto([[0]], contribution_bound=1)
