"""Kept selections."""

import os
from pathlib import Path

from coowned.selection.greedy import Greedy
from coowned.selection.selection_files import select_once
from coowned.synthetic.regular_graph import RegularGraph


def test_kept_selection_equals_a_fresh_one(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("COOWNED_CACHE", str(tmp_path))
    graph = RegularGraph(num_examples=300).generate(seed=0)
    selector = Greedy(contribution_bound=2)
    fresh = selector.select(graph, seed=5)
    assert select_once(graph, selector, seed=5) == fresh
    (file,) = (tmp_path / "selections").iterdir()
    assert select_once(graph, selector, seed=5) == fresh
    file.write_text("spoilt", encoding="utf-8")
    assert select_once(graph, selector, seed=5) == fresh
    assert file.read_text(encoding="utf-8") != "spoilt"


def test_other_settings_seeds_and_orders_are_other_files(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("COOWNED_CACHE", str(tmp_path))
    graph = RegularGraph(num_examples=300).generate(seed=0)
    shuffled = graph.subgraph(list(reversed(range(300))))  # the same digest, another order of rows
    assert shuffled.digest == graph.digest
    kept = [
        select_once(graph, Greedy(contribution_bound=2), seed=5),
        select_once(graph, Greedy(contribution_bound=2), seed=6),
        select_once(graph, Greedy(contribution_bound=3), seed=5),
        select_once(shuffled, Greedy(contribution_bound=2), seed=5),
    ]
    assert len(list((tmp_path / "selections").iterdir())) == 4
    assert kept[3].copies.tolist() == kept[0].copies[::-1].tolist()


def test_off(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("COOWNED_CACHE", "off")
    monkeypatch.chdir(tmp_path)
    graph = RegularGraph(num_examples=50).generate(seed=0)
    assert select_once(graph, Greedy(contribution_bound=1)) == Greedy(contribution_bound=1).select(graph)
    assert os.listdir(tmp_path) == []
