"""The plan tries what it is told to, and marks the choice with the least noise."""

import pytest

from coowned.accounting.planning import plan
from coowned.attribution.graph import AttributionGraph
from coowned.errors import InputError
from coowned.selection.registry import selector_class

TARGET = {"epsilon": 4.0, "delta": 1e-6, "batch_size": 64, "iterations": 20, "adjacency": "zero-out"}


@pytest.fixture(scope="module")
def made(regular_graph):
    return plan(regular_graph, contribution_bounds=(1, 3), **TARGET)


def test_every_choice_is_there(made):
    rows = made.to_rows()
    assert {(row["selector"], row["contribution_bound"]) for row in rows if row["mechanism"] == "poisson"} == {
        (word, bound) for word in ("greedy", "greedy-with-duplicates", "priced") for bound in (1, 3)
    }
    assert sum(row["mechanism"] == "min-separation" for row in rows) == 1


def test_sizes_are_the_selectors(made, regular_graph):
    for choice in made.choices:
        if choice.mechanism == "poisson":
            selection = selector_class(choice.selector)(contribution_bound=choice.contribution_bound).select(
                regular_graph
            )
            assert (choice.size, choice.num_distinct) == (selection.size, selection.num_distinct)


def test_best_has_least_noise(made):
    poisson = [choice for choice in made.choices if choice.mechanism == "poisson"]
    best = [choice for choice in made.choices if choice.best]
    assert len(best) == 1
    assert min(poisson, key=lambda choice: choice.effective_noise).effective_noise >= best[0].effective_noise


def test_one_mechanism_only(regular_graph):
    rows = plan(regular_graph, contribution_bounds=(1,), mechanism="poisson", **TARGET).to_rows()
    assert {row["mechanism"] for row in rows} == {"poisson"}


def test_too_small_a_training_set_is_said(regular_graph):
    made = plan(regular_graph, contribution_bounds=(1,), selectors=("greedy",), **{**TARGET, "batch_size": 1500})
    assert all(choice.noise_multiplier is None and choice.note for choice in made.choices)
    assert not any(choice.best for choice in made.choices)


def test_heavy_users_are_told():
    graph = AttributionGraph.from_users_per_example([[0, user] for user in range(1, 200)])
    made = plan(graph, contribution_bounds=(1,), selectors=("greedy",), **{**TARGET, "batch_size": 1})
    assert any("--unprotected" in sentence for sentence in made.advice)


@pytest.mark.parametrize(
    "wrong", [{"selectors": ("greed",)}, {"contribution_bounds": (0,)}, {"mechanism": "shuffling"}, {"batch_size": 0}]
)
def test_bad_input(regular_graph, wrong):
    with pytest.raises(InputError):
        plan(regular_graph, **{**TARGET, **wrong})
