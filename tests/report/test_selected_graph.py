"""The graph a run selected from."""

import numpy as np
import pytest

from coowned import AttributionGraph, Greedy, GreedyMinSeparation, GreedyWithDuplicates, certify
from coowned.report import graph_figures
from coowned.report.selected_graph import SelectedGraph, plan_of_run, read_selected_graph
from coowned.runs.stored_run import StoredRun

ROWS = [[i % 23] if i % 3 else sorted({i % 23, (7 * i + 1) % 23, (5 * i) % 19}) for i in range(150)] + [[]]
SELECTORS = [
    Greedy(contribution_bound=4),
    GreedyWithDuplicates(contribution_bound=6),
    GreedyMinSeparation(batch_size=2, iterations=12, min_separation=2),
]


@pytest.mark.parametrize("selector", SELECTORS, ids=lambda selector: selector.name)
def test_counts_equal_a_plain_recount(selector):
    graph = AttributionGraph.from_users_per_example(ROWS, num_users=25)
    selected = selector.select(graph)
    certificate = certify(graph, selected)
    found = SelectedGraph(graph=graph, copies=np.asarray(selected.copies), certificate=certificate)
    copies = selected.copies.tolist()
    per_user = [sum(c for c, row in zip(copies, ROWS, strict=True) if u in row) for u in range(25)]
    examples = [sum(u in row for row in ROWS) for u in range(25)]
    chosen = [len(row) for c, row in zip(copies, ROWS, strict=True) for _ in range(c)]
    assert found.num_users_left == sum(count > 0 for count in per_user)
    assert found.mean_users_per_copy == pytest.approx(np.mean(chosen))
    for classes, before, after in (
        (found.users_per_example(), [len(row) for row in ROWS], chosen),
        (found.examples_per_user(), examples, per_user),
    ):
        for begin, old, new in classes:
            end = begin if begin < 5 else 2 * begin - 2
            assert old == sum(begin <= value <= end for value in before)
            assert new == sum(begin <= value <= end for value in after)
        assert sum(old for _, old, _ in classes) == len(before)
        assert sum(new for _, _, new in classes) == len(after)
    bound = found.upper_bound()
    assert (
        bound is None if certificate.min_separation is not None else bound is not None and bound[0] >= certificate.size
    )


def test_one_row_is_chosen(runs):
    run = StoredRun.open(runs["scheduled"])
    selected = read_selected_graph(run)
    rows = graph_figures.run_rows(run, selected, plan_of_run(run, selected.graph))
    (own,) = [row for row in rows if row["chosen"]]
    assert (own["selector"], own["size"]) == ("greedy-min-separation", run.certificate.size)
    keys = [(row["selector"], row["contribution_bound"]) for row in rows]
    assert len(set(keys)) == len(keys)
    for row in rows:
        if row["selector"] == "greedy":
            assert row["size"] == Greedy(contribution_bound=row["contribution_bound"]).select(selected.graph).size
