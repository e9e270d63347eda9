import numpy as np
import pytest

from coowned import AttributionGraph, Greedy, GreedyMinSeparation, GreedyWithDuplicates, Selection
from coowned.codec import decode_json
from coowned.runs.records import GraphSummary

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
    found = GraphSummary.of(graph, selected)
    assert decode_json(GraphSummary, found.to_json(), name="graph.json") == found
    copies = selected.copies.tolist()
    per_user = [sum(c for c, row in zip(copies, ROWS, strict=True) if u in row) for u in range(25)]
    examples = [sum(u in row for row in ROWS) for u in range(25)]
    chosen = [len(row) for c, row in zip(copies, ROWS, strict=True) for _ in range(c)]
    assert found.num_users_left == sum(count > 0 for count in per_user)
    assert found.mean_users_per_copy == pytest.approx(np.mean(chosen))
    for classes, before, after in (
        (found.users_per_example, [len(row) for row in ROWS], chosen),
        (found.examples_per_user, examples, per_user),
    ):
        for begin, old, new in classes:
            end = begin if begin < 5 else 2 * begin - 2
            assert old == sum(begin <= value <= end for value in before)
            assert new == sum(begin <= value <= end for value in after)
        assert sum(old for _, old, _ in classes) == len(before)
        assert sum(new for _, _, new in classes) == len(after)


def test_an_s_unlike_the_data_is_warned_of():
    """8 of 10 examples have two users; S has all of one user, then as many of two."""
    graph = AttributionGraph.from_users_per_example([[0], [1], *([2 * i, 2 * i + 1] for i in range(1, 9))])
    for copies, distance, warns in (
        ([1] * 10, 0.0, False),
        ([1, 1] + [0] * 8, 0.8, True),
        ([1, 1, 1, 1] + [0] * 6, 0.3, True),
        ([1, 1] + [1] * 4 + [0] * 4, 1 / 3 - 0.2, False),
        ([0, 0] + [1] * 8, 0.2, False),
        ([4, 4] + [1] * 8, 0.3, True),  # copies count, not examples
    ):
        found = GraphSummary.of(graph, Selection.from_copies(graph, np.array(copies, np.int32)))
        assert found.distance == pytest.approx(distance)
        assert (found.warning() is not None) == warns
    assert "50% of its copies have 1 user, but 20% of the examples do" in (found.warning() or "")
