"""What is NOT promised: that a user exists. The counterexample of docs/privacy-definition.md, run."""

from coowned.attribution.graph import AttributionGraph
from coowned.selection.greedy import Greedy


def test_a_users_existence_decides_whether_another_example_is_used():
    rows, keys = [[0, 1], [1, 2]], ["a", "b", "c"]
    with_a = AttributionGraph.from_users_per_example(rows, example_ids=["e1", "e2"], user_keys=keys)
    without_a = with_a.subgraph([1])  # node adjacency takes a away with every example she is in
    chosen_with = Greedy(contribution_bound=1, ties="input").select(with_a)
    chosen_without = Greedy(contribution_bound=1, ties="input").select(without_a)
    assert chosen_with.copies.tolist() == [1, 0]
    assert chosen_without.copies.tolist() == [1]  # e2 now is in S: its content reaches the model because a is gone
