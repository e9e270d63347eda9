"""Groups of users: no user in two, the bound held, and little of the greedy selection lost."""

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings

from coowned import (
    AttributionGraph,
    CyclicGroups,
    Greedy,
    GreedyWithDuplicates,
    InputError,
    IntegerProgram,
    Priced,
    certify,
)
from coowned.testing.selector_checks import check_selector
from coowned.testing.strategies import attribution_graphs


@pytest.fixture(params=[pytest.param("mt-kahypar", marks=pytest.mark.full), "label-propagation"])
def partitioner(request, monkeypatch):
    if request.param == "label-propagation":
        found = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mtkahypar" else found(name))
    return request.param


@pytest.mark.parametrize(("within", "duplicates"), [("greedy", False), ("greedy", True), ("priced", False)])
def test_check_suite(partitioner, within, duplicates):
    def make(bound):
        return CyclicGroups(num_groups=3, contribution_bound=bound, within=within, allow_duplicates=duplicates)

    check_selector(make, contribution_bounds=(1, 3), duplicates=duplicates)


@settings(max_examples=40)
@given(graph=attribution_graphs(max_examples=30, max_users=20))
def test_groups_share_no_user(graph):
    selection = CyclicGroups(num_groups=3, contribution_bound=2, unattributed="keep").select(graph)
    certificate = certify(graph, selection)  # refuses a user in two groups
    assert certificate.contribution_bound <= 2
    assert certificate.groups == tuple(selection.groups[selection.copies > 0].tolist())
    assert set(selection.groups[selection.copies == 0].tolist()) <= {-1}
    assert selection.copies[graph.users_per_example == 0].tolist() == [1] * int((graph.users_per_example == 0).sum())


WITHIN = [
    ({}, Greedy(contribution_bound=2)),
    ({"allow_duplicates": True}, GreedyWithDuplicates(contribution_bound=2)),
    ({"within": "priced"}, Priced(contribution_bound=2)),
    ({"within": "priced", "allow_duplicates": True}, Priced(contribution_bound=2, allow_duplicates=True)),
]


@settings(max_examples=40)
@given(graph=attribution_graphs(max_examples=30))
def test_one_group_is_the_selector_within(graph):
    for fields, selector in WITHIN:
        one, alone = (
            chosen.select(graph, seed=4)
            for chosen in (CyclicGroups(num_groups=1, contribution_bound=2, **fields), selector)
        )
        assert one.copies.tolist() == alone.copies.tolist()
        assert one.upper_bound == alone.upper_bound
        assert set(one.groups[one.copies > 0].tolist()) <= {0}


@settings(max_examples=20)
@given(graph=attribution_graphs(max_examples=20, max_users=12))
def test_bound_holds_without_groups(graph):
    for unattributed in ("drop", "keep"):
        grouped = CyclicGroups(num_groups=3, contribution_bound=2, within="priced", unattributed=unattributed)
        free = IntegerProgram(contribution_bound=2, unattributed=unattributed).select(graph)
        selection = grouped.select(graph)
        assert selection.size <= free.size <= selection.upper_bound
        assert certify(graph, selection).contribution_bound <= 2


@pytest.mark.parametrize("duplicates", [False, True])
def test_little_is_lost_and_groups_are_even(partitioner, duplicates):
    """Four communities, with one example in twenty between two of them; copies are counted, not examples."""
    rng = np.random.default_rng(3)
    community = rng.integers(0, 4, 4000)
    other = np.where(rng.random(4000) < 0.05, rng.integers(0, 4, 4000), community)
    rows = np.stack([community * 500 + rng.integers(0, 500, 4000), other * 500 + rng.integers(0, 500, 4000)], axis=1)
    graph = AttributionGraph.from_users_per_example(rows.tolist(), num_users=2000)
    selection = CyclicGroups(num_groups=4, contribution_bound=2, allow_duplicates=duplicates).select(graph)
    assert selection.selector["partitioner"] == partitioner
    greedy = GreedyWithDuplicates if duplicates else Greedy
    assert selection.size >= 0.9 * greedy(contribution_bound=2).select(graph).size
    sizes = certify(graph, selection).groups.sizes
    assert len(sizes) == 4
    assert max(sizes) <= 1.3 * min(sizes)


@pytest.mark.full
def test_threads():
    """The partition does not depend on the number of cores, each process having initialized the library once."""
    code = (
        "import os, sys; os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[1])])\n"
        "import hashlib, numpy as np, coowned as co\n"
        "users = np.sort(np.random.default_rng(0).integers(0, 900, (2000, 2)), axis=1)\n"
        "graph = co.AttributionGraph.from_users_per_example(users.tolist(), num_users=900)\n"
        "found = co.CyclicGroups(num_groups=4, contribution_bound=3).select(graph, seed=1)\n"
        "print(hashlib.sha256(found.groups.tobytes()).hexdigest())"
    )
    cores = len(os.sched_getaffinity(0))
    answers = {
        subprocess.run([sys.executable, "-c", code, str(n)], capture_output=True, text=True, check=True).stdout
        for n in {1, cores}
    }
    assert len(answers) == 1


@pytest.mark.parametrize("number", [0, -1, 1.5, 2**15])
def test_bad_number_of_groups(number):
    with pytest.raises(InputError, match="num_groups must be an integer of at least 1 and at most 32767"):
        CyclicGroups(num_groups=number, contribution_bound=1)


def test_unknown_selector_within():
    with pytest.raises(InputError, match="within must be one of 'greedy', 'priced', not 'best'"):
        CyclicGroups(num_groups=2, contribution_bound=1, within="best")
