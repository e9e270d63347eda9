"""Bounds of one's own: every form they come in, and every selector against brute force with unequal capacities."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.selection.brute_force import largest

from coowned.attribution.graph import AttributionGraph
from coowned.errors import InputError
from coowned.selection.bias_mitigating import BiasMitigating
from coowned.selection.cyclic_groups import CyclicGroups
from coowned.selection.greedy import Greedy
from coowned.selection.greedy_with_duplicates import GreedyWithDuplicates
from coowned.selection.integer_program import IntegerProgram
from coowned.selection.order import ordered_rows
from coowned.selection.price_bound import price_bound
from coowned.selection.priced import Priced
from coowned.selection.selection_files import select_once
from coowned.selection.selector import Selection
from coowned.selection.user_bounds import UserBounds
from coowned.testing.selector_checks import copies_per_user
from coowned.testing.strategies import attribution_graphs

ENDLESS = 3600
OTHERS = 2
BOUND = {"contribution_bound": OTHERS}
MIXED = {**BOUND, "threshold": 1, "few_user_run": 1, "many_user_run": 2}
SELECTORS = {
    "greedy": (Greedy, BOUND),
    "greedy-with-duplicates": (GreedyWithDuplicates, BOUND),
    "bias-mitigating": (BiasMitigating, MIXED),
    "bias-mitigating once": (BiasMitigating, MIXED | {"allow_duplicates": False}),
    "priced": (Priced, BOUND),
    "priced with duplicates": (Priced, BOUND | {"allow_duplicates": True}),
    "priced for distinct examples": (Priced, BOUND | {"allow_duplicates": True, "distinct_weight": 0.5}),
    "integer-program": (IntegerProgram, BOUND | {"time_limit": ENDLESS}),
    "integer-program with duplicates": (IntegerProgram, BOUND | {"time_limit": ENDLESS, "allow_duplicates": True}),
    "cyclic-groups": (CyclicGroups, BOUND | {"num_groups": 2}),
    "cyclic-groups priced": (CyclicGroups, BOUND | {"num_groups": 2, "within": "priced", "allow_duplicates": True}),
}
REPEATING = {name for name in SELECTORS if "with-duplicates" in name or "with duplicates" in name}
REPEATING |= {"bias-mitigating", "priced for distinct examples", "cyclic-groups priced"}

graphs = attribution_graphs(max_examples=6, max_users=5, with_ids=False)
unequal = st.dictionaries(st.integers(0, 4), st.integers(0, 4))


def capacities_of(graph, bounds):
    return np.array([bounds.get(user, OTHERS) for user in range(graph.num_users)], np.int64)


def fits(graph, copies, bounds):
    return bool((copies_per_user(graph, copies) <= capacities_of(graph, bounds)).all())


@pytest.mark.parametrize("name", SELECTORS)
@settings(max_examples=25, deadline=None)
@given(graph=graphs, bounds=unequal, seed=st.integers(0, 2))
def test_every_user_is_held_to_their_own_bound(name, graph, bounds, seed):
    kind, fields = SELECTORS[name]
    selection = kind(**fields, contribution_bounds=bounds).select(graph, seed=seed)
    assert fits(graph, selection.copies, bounds)
    if "cyclic" in name:
        return  # drops what crosses groups
    for example in np.flatnonzero(graph.users_per_example):
        if name in REPEATING or not selection.copies[example]:
            more = selection.copies.copy()
            more[example] += 1
            assert not fits(graph, more, bounds)  # nothing could be added


@pytest.mark.parametrize("most_copies", [1, 4])
@settings(max_examples=25, deadline=None)
@given(graph=attribution_graphs(max_examples=4, max_users=5, with_ids=False), bounds=unequal)
def test_optimum_of_unequal_users_is_brute_force(most_copies, graph, bounds):
    choice = {**BOUND, "contribution_bounds": bounds, "allow_duplicates": most_copies > 1}
    best = largest(graph, capacities_of(graph, bounds), most_copies)
    exact = IntegerProgram(**choice, time_limit=ENDLESS).select(graph)
    assert exact.size == exact.upper_bound == best
    priced = Priced(**choice).select(graph)
    assert priced.size <= best <= priced.upper_bound


@settings(max_examples=40, deadline=None)
@given(graph=graphs, bounds=unequal, data=st.data())
def test_any_prices_bound_every_set_of_unequal_users(graph, bounds, data):
    prices = data.draw(st.lists(st.floats(-0.5, 2), min_size=graph.num_users, max_size=graph.num_users))
    capacities = UserBounds.of(bounds, others=OTHERS).of_users(graph)
    for kind, most_copies in ((Greedy, 1), (GreedyWithDuplicates, 4)):
        found = kind(**BOUND, contribution_bounds=bounds).select(graph)
        assert price_bound(graph, prices, contribution_bound=capacities, max_copies=most_copies) >= found.size


@settings(max_examples=60, deadline=None)
@given(graph=attribution_graphs(max_examples=20, with_ids=False), bounds=unequal, seed=st.integers(0, 3))
def test_greedy_is_the_sequential_walk(graph, bounds, seed):
    room = {user: bounds.get(user, OTHERS) for user in range(graph.num_users)}
    expected = np.zeros(graph.num_examples, int)
    for example in ordered_rows(graph, seed=seed, ties="hash", progress=lambda done, message: None).examples:
        users = graph.users[graph.indptr[example] : graph.indptr[example + 1]].tolist()
        if users and all(room[user] for user in users):
            expected[example] = 1
            room |= {user: room[user] - 1 for user in users}
    found = Greedy(**BOUND, contribution_bounds=bounds).select(graph, seed=seed)
    assert found.copies.tolist() == expected.tolist()


def test_equal_bounds_change_nothing():
    rng = np.random.default_rng(5)
    rows = [rng.choice(60, size=1 + rng.integers(0, 4), replace=False).tolist() for _ in range(300)]
    graph = AttributionGraph.from_users_per_example(rows, num_users=60)
    for name, (kind, fields) in SELECTORS.items():
        if "program" not in name:
            one = kind(**fields).select(graph, seed=1).copies
            several = kind(**fields, contribution_bounds=dict.fromkeys(range(60), OTHERS)).select(graph, seed=1).copies
            if "cyclic" not in name:  # its users are labelled by their bounds too
                assert one.tolist() == several.tolist(), name


ROWS = [{"user": "ann", "bound": 1, "tier": "careful"}, {"user": "Bob", "bound": 0, "tier": "out"}]


def test_every_form_is_the_same(tmp_path):
    table = pl.DataFrame(ROWS)
    table.write_csv(tmp_path / "tiers.csv")
    table.write_parquet(tmp_path / "tiers.parquet")
    forms = [tmp_path / "tiers.csv", str(tmp_path / "tiers.parquet"), table, table.to_pandas(), table.to_arrow(), ROWS]
    found = [UserBounds.of(form, others=3) for form in forms]
    assert len(set(found)) == 1
    assert found[0].tiers == {"bound 3": 3, "careful": 1, "out": 0}
    unnamed = [UserBounds.of(form, others=3) for form in ({"ann": 1, "Bob": 0}, table.drop("tier"))]
    assert len(set(unnamed)) == 1
    assert unnamed[0] != found[0]
    assert unnamed[0].tiers == {"bound 3": 3, "bound 1": 1, "bound 0": 0}
    assert "ann" not in repr(found[0])


def test_a_rule_and_an_integer():
    graph = AttributionGraph.from_users_per_example([[0, 1], [1], [1]], user_keys=["ann@x.org", "bob@y.org"])
    inside = Greedy(contribution_bound=2, contribution_bounds=lambda key: 2 if key.endswith("@y.org") else 0)
    assert inside.select(graph).copies.tolist() == [0, 1, 1]
    with pytest.raises(InputError, match="for_graph"):
        inside.settings()
    assert Greedy(contribution_bound=3, contribution_bounds=1) == Greedy(contribution_bound=1)


def test_keys_are_read_like_those_of_the_data():
    graph = AttributionGraph.from_users_per_example([[0], [1], [2]], user_keys=["ann@x.org", "jean luc muller", "7"])
    bounds = UserBounds.of({"Ann <Ann+news@X.org>": 1, "Müller, Jean-Luc": 0, 7: 4, "stranger": 1}, others=3)
    assert bounds.of_users(graph).tolist() == [1, 0, 4]
    twice = UserBounds.of({"ann@x.org": 3, "ANN@x.org": 1}, others=3)
    assert twice.of_users(graph).tolist() == [1, 3, 3]  # one person: the smaller bound


def test_digest_ignores_order():
    one, other = ({"a": 1, "b": 0}, {"b": 0, "a": 1})
    assert UserBounds.of(one, others=2).digest == UserBounds.of(other, others=2).digest
    different = [UserBounds.of(one, others=3), UserBounds.of({"a": 1, "b": 1}, others=2), UserBounds.of({}, others=2)]
    assert len({UserBounds.of(one, others=2).digest, *(bounds.digest for bounds in different)}) == 4


@pytest.mark.parametrize(
    ("given_bounds", "says"),
    [
        ({"a": -1}, "row 0 needs a user and a bound from 0"),
        ({"a": 2**31}, "row 0 needs"),
        ({"a": 1.5}, "must contain integers"),
        ({"a": True}, "must contain integers"),
        ({"a": "1", "b": "one"}, "row 1 needs .* not 'one'"),
        ({"a": None}, "must contain integers"),
        ([{"user": None, "bound": 1}], "row 0 needs a user"),
        ({None: 0}, "row 0 needs a user"),
        ({" ": 0}, "row 0 needs a user"),
        ([{"key": "a", "bound": 1}], "'user' is missing"),
        ([{"user": "a", "bound": 1, "tier": "x"}, {"user": "b", "bound": 2, "tier": "x"}], "tier 'x' has two bounds"),
        ([{"user": "a", "bound": 1, "tier": "bound 2"}], "tier 'bound 2' has two bounds"),
        ("no-such-file.csv", "no-such-file.csv"),
        (3.5, "is not a table"),
        (0, "contribution_bounds"),
    ],
)
def test_wrong_bounds_are_refused(given_bounds, says):
    with pytest.raises(InputError, match=says):
        Greedy(contribution_bound=2, contribution_bounds=given_bounds)


def test_settings_hold_no_keys_and_selections_keep_bounds(tmp_path, monkeypatch):
    graph = AttributionGraph.from_users_per_example([[0, 1], [1], [1]], user_keys=["ann@x.org", "bob@y.org"])
    selector = Greedy(contribution_bound=2, contribution_bounds={"ann@x.org": 0})
    selection = selector.select(graph)
    assert "ann" not in str(selector.settings())
    assert selection.selector == selector.settings()
    assert Selection.from_json(selection.to_json(), graph) == selection
    assert '"user_bounds"' not in Greedy(contribution_bound=2).select(graph).to_json()
    monkeypatch.setenv("COOWNED_CACHE", str(tmp_path))
    assert select_once(graph, selector) == select_once(graph, selector) == selection
    with pytest.raises(InputError, match="call `fit` again"):
        Greedy(contribution_bound=2, contribution_bounds=selector.settings()["contribution_bounds"])
