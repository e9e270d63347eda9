"""The interleaved greedy against a plain transcription of its reading of Section 5.5, and the check-suite."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coowned.attribution.graph import AttributionGraph
from coowned.errors import InputError
from coowned.selection.bias_mitigating import SETTINGS, BiasMitigating, pareto
from coowned.selection.greedy_with_duplicates import GreedyWithDuplicates
from coowned.selection.order import ordered_rows
from coowned.testing.selector_checks import check_selector
from coowned.testing.strategies import attribution_graphs


def plain_bias_mitigating(graph, walk, bound, threshold, few_run, many_run, allow_duplicates):
    users_of = [graph.users[graph.indptr[i] : graph.indptr[i + 1]].tolist() for i in range(graph.num_examples)]
    few = [example for example in walk if 1 <= len(users_of[example]) <= threshold]
    many = [example for example in walk if len(users_of[example]) > threshold]
    one_pass = []
    while few or many:
        one_pass += few[:few_run] + many[:many_run]
        few, many = few[few_run:], many[many_run:]
    copies = [0] * graph.num_examples
    count = [0] * graph.num_users
    while True:
        before = sum(copies)
        for example in one_pass:
            if all(count[user] < bound for user in users_of[example]):
                copies[example] += 1
                for user in users_of[example]:
                    count[user] += 1
        if sum(copies) == before or not allow_duplicates:
            return copies


@settings(max_examples=300)
@given(
    graph=attribution_graphs(max_examples=30, max_users=12),
    bound=st.integers(1, 4),
    threshold=st.integers(1, 4),
    few_run=st.integers(1, 4),
    many_run=st.integers(1, 4),
    allow_duplicates=st.booleans(),
    ties=st.sampled_from(["hash", "input"]),
)
def test_equals_the_paper(graph, bound, threshold, few_run, many_run, allow_duplicates, ties):
    order = ordered_rows(graph, seed=1, ties=ties, progress=lambda done, message: None)
    selection = BiasMitigating(
        contribution_bound=bound,
        threshold=threshold,
        few_user_run=few_run,
        many_user_run=many_run,
        allow_duplicates=allow_duplicates,
        ties=ties,
    ).select(graph, seed=1)
    walk = order.examples.tolist()
    expected = plain_bias_mitigating(graph, walk, bound, threshold, few_run, many_run, allow_duplicates)
    assert selection.copies.tolist() == expected


@pytest.mark.parametrize("allow_duplicates", [True, False])
def test_check_suite(allow_duplicates):
    check_selector(
        lambda bound: BiasMitigating(
            contribution_bound=bound,
            threshold=1,
            few_user_run=3,
            many_user_run=2,
            allow_duplicates=allow_duplicates,
        ),
        duplicates=allow_duplicates,
        maximal=True,
    )


@given(graph=attribution_graphs(max_examples=20), bound=st.integers(1, 3))
def test_a_threshold_above_all_is_greedy_with_duplicates(graph, bound):
    plain = GreedyWithDuplicates(contribution_bound=bound).select(graph)
    all_few = BiasMitigating(contribution_bound=bound, threshold=99, few_user_run=2, many_user_run=1).select(graph)
    assert all_few.copies.tolist() == plain.copies.tolist()


def test_runs_count_visited_examples():
    """The two visits of the first run find no room for the second; a run of taken ones would go on to the third."""
    graph = AttributionGraph.from_users_per_example([[0], [0], [1], [1, 2]])
    fair = BiasMitigating(contribution_bound=1, threshold=1, few_user_run=2, many_user_run=1, ties="input")
    assert fair.select(graph).copies.tolist() == [1, 0, 0, 1]


def test_unattributed_are_in_neither_list():
    rows = [[], [0], [1], [], [0, 1], [1, 2]]
    graph = AttributionGraph.from_users_per_example(rows)
    settings_ = {"contribution_bound": 2, "threshold": 1, "few_user_run": 1, "many_user_run": 1}
    dropped = BiasMitigating(**settings_).select(graph).copies
    kept = BiasMitigating(**settings_, unattributed="keep").select(graph).copies
    assert (kept - dropped).tolist() == [1, 0, 0, 1, 0, 0]


@pytest.mark.parametrize("field", ["contribution_bound", "threshold", "few_user_run", "many_user_run"])
def test_bad_settings(field):
    values = {"contribution_bound": 2, "threshold": 1, "few_user_run": 1, "many_user_run": 1} | {field: 0}
    with pytest.raises(InputError, match=f"{field} must be an integer of at least 1"):
        BiasMitigating(**values)


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
