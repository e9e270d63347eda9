"""Statistics of a run's graph."""

import json

import numpy as np
import pytest

from coowned import AttributionGraph, Greedy, GreedyMinSeparation, GreedyWithDuplicates, InputError, Selection, certify
from coowned.training.run_statistics import FORMAT, read_statistics, run_statistics

ROWS = [[i % 23] if i % 3 else [i % 23, (7 * i + 1) % 23, (5 * i) % 19] for i in range(150)] + [[]]


def graph_of(**more) -> AttributionGraph:
    return AttributionGraph.from_users_per_example([sorted(set(row)) for row in ROWS], num_users=25, **more)


SELECTORS = [
    Greedy(contribution_bound=4),
    GreedyWithDuplicates(contribution_bound=6),
    GreedyMinSeparation(batch_size=2, iterations=12, min_separation=2),
]


@pytest.mark.parametrize("selector", SELECTORS, ids=lambda selector: selector.name)
def test_counts_equal_a_plain_recount_of_the_run(selector):
    graph = graph_of()
    selected = selector.select(graph)
    certificate = certify(graph, selected)
    found = run_statistics(graph, selected, certificate)
    copies = selected.copies.tolist()
    users = [sorted(set(row)) for row in ROWS]
    per_user = [sum(c for c, row in zip(copies, users, strict=True) if u in row) for u in range(25)]
    examples = [sum(u in row for row in users) for u in range(25)]
    lengths = [len(row) for row in users]
    chosen = [len(row) for c, row in zip(copies, users, strict=True) for _ in range(c)]
    assert found["num_users_left"] == sum(count > 0 for count in per_user)
    assert (found["size"], found["num_distinct"]) == (sum(copies), sum(c > 0 for c in copies))
    assert found["num_duplicated"] == found["size"] - found["num_distinct"]
    assert found["mean_users_per_copy"] == pytest.approx(np.mean(chosen))
    for key, before, after in (
        ("users_per_example", lengths, chosen),
        ("examples_per_user", examples, per_user),
    ):
        for row in found[key]:
            assert row["before"] == sum(row["from"] <= value <= row["to"] for value in before)
            assert row["after"] == sum(row["from"] <= value <= row["to"] for value in after)
        assert sum(row["before"] for row in found[key]) == len(before)
        assert sum(row["after"] for row in found[key]) == len(after)
    if certificate.min_separation is None:
        assert found["upper_bound"] >= found["size"]
    else:
        assert found["upper_bound"] is None


@pytest.mark.parametrize("selector", SELECTORS, ids=lambda selector: selector.name)
def test_one_row_is_chosen(selector):
    graph = graph_of()
    selected = selector.select(graph)
    certificate = certify(graph, selected)
    rows = run_statistics(graph, selected, certificate)["trade_off"]
    (own,) = [row for row in rows if row["chosen"]]
    assert (own["selector"], own["size"], own["num_distinct"]) == (
        selector.name,
        certificate.size,
        certificate.num_distinct,
    )
    keys = [(row["selector"], row["contribution_bound"]) for row in rows]
    assert len(set(keys)) == len(keys)
    for row in rows:
        if row["selector"] == "greedy":
            other = Greedy(contribution_bound=row["contribution_bound"]).select(graph)
            assert row["size"] == other.size
            assert row["recounted_bound"] == certify(graph, other).contribution_bound


def test_no_ids_and_no_keys():
    import pyarrow as pa

    plain = graph_of()
    named = graph_of(
        example_ids=pa.array([f"secret-{i:03}" for i in range(151)], pa.large_string()),
        user_keys=pa.array([f"user-{i:03}@example" for i in range(25)], pa.large_string()),
    )
    copies = Greedy(contribution_bound=4, ties="input").select(plain).copies
    texts = []
    for graph in (plain, named):
        selected = Selection.from_copies(graph, copies)
        found = run_statistics(graph, selected, certify(graph, selected))
        assert found.pop("graph_digest") == graph.digest
        found.pop("trade_off")  # other choices break ties by id; their counts alone are kept
        texts.append(json.dumps(found))
    assert texts[0] == texts[1]
    assert "secret" not in texts[1]


def test_stored_statistics_belong_to_the_certificate(tmp_path):
    graph = graph_of()
    selected = Greedy(contribution_bound=2).select(graph)
    certificate = certify(graph, selected)
    found = run_statistics(graph, selected, certificate)
    file = tmp_path / "statistics.json"
    file.write_text(json.dumps(found), encoding="utf-8")
    assert read_statistics(file, certificate) == found
    other = certify(graph, Greedy(contribution_bound=1).select(graph))
    with pytest.raises(InputError, match="another graph or selection"):
        read_statistics(file, other)
    for text in ("{", "[]", json.dumps({**found, "format": "x"})):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(InputError, match="not "):
            read_statistics(file, certificate)
    assert found["format"] == FORMAT
