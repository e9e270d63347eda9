"""The plan tries what it is told to, and marks the choice with the best predicted signal-to-noise."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coowned import CyclicGroups, CyclicPoisson, certify, max_min_separation
from coowned.accounting.calculators import calibrate
from coowned.accounting.choices import Plan
from coowned.accounting.planning import COPIES, default_bounds, plan, training_sizes
from coowned.attribution.graph import AttributionGraph
from coowned.errors import InputError
from coowned.mechanism.banded_strategy import BandedStrategy
from coowned.selection.greedy import Greedy
from coowned.selection.priced import Priced
from coowned.selection.registry import selector_class

TARGET = {"epsilon": 4.0, "delta": 1e-6, "batch_size": 64, "iterations": 20, "adjacency": "zero-out"}


@pytest.fixture(scope="module")
def made(regular_graph):
    return plan(regular_graph, contribution_bounds=(1, 3), **TARGET)


def test_every_choice_is_there(made, regular_graph):
    rows = made.to_rows()
    assert {(row["selector"], row["contribution_bound"]) for row in rows if row["mechanism"] == "poisson"} == {
        (word, bound) for word in ("greedy", "greedy-with-duplicates", "priced") for bound in (1, 3)
    }
    groups = [(row["contribution_bound"], row["allow_duplicates"]) for row in rows if row["mechanism"] == "cyclic"]
    assert groups == [(1, False), (3, False), (3, True)]
    separations = [row["min_separation"] for row in rows if row["selector"] == "greedy-min-separation"]
    largest = max_min_separation(regular_graph, batch_size=64, iterations=20)
    assert separations == list(dict.fromkeys([largest, largest // 2, largest // 4]))


def test_sizes_are_the_selectors(made, regular_graph):
    for choice in made.choices:
        if choice.mechanism == "poisson":
            selection = selector_class(choice.selector)(contribution_bound=choice.contribution_bound).select(
                regular_graph
            )
            assert (choice.size, choice.num_distinct) == (selection.size, selection.num_distinct)


def test_least_error_of_each_mechanism(made):
    """The error is that of the noise itself: C^-1 z summed up, root mean squared over the steps."""
    for kind in ("poisson", "min-separation", "cyclic"):
        own = [choice for choice in made.choices if choice.mechanism == kind]
        (marked,) = [choice for choice in own if choice.least_error]
        assert marked.prefix_error == min(choice.prefix_error for choice in own)
        bands = marked.sampling.num_bands or 1
        inverse = np.linalg.inv(BandedStrategy(num_bands=bands, iterations=20).matrix())
        sums = np.cumsum(inverse, axis=0)  # (steps, steps): row t has the weights of z in the first t + 1 steps
        expected = marked.noise_multiplier / 64 * np.sqrt((sums**2).sum() / 20)
        assert marked.prefix_error == pytest.approx(expected)


def test_few_participations_where_examples_suffice():
    """1,200 slots in one epoch: nothing is repeated, and nobody takes part more often than the smallest bound says."""
    graph = AttributionGraph.from_users_per_example([[user, 400 + (7 * user + day) % 400] for user in range(400)
                                                     for day in range(6)])  # fmt: skip
    asked = {
        **TARGET,
        "batch_size": 30,
        "iterations": 40,
        "contribution_bounds": (1, 2, 4),
        "mechanism": "min-separation",
    }
    choices = plan(graph, **asked).choices
    (bounded,) = [choice for choice in choices if choice.selector == "priced-min-separation"]
    greedy = [choice for choice in choices if choice.selector == "greedy-min-separation"]
    assert bounded.selected.recounted_bound <= 4
    assert bounded.num_distinct == bounded.size == 1200
    assert all(bounded.prefix_error < choice.prefix_error for choice in greedy if choice.num_distinct >= 1200)
    assert not any(
        choice.selector == "priced-min-separation" for choice in plan(graph, **{**asked, "iterations": 100}).choices
    )


def test_rows_of_groups(made, regular_graph):
    """The number of groups is the one with the least error on greedy's S; the noise is for the worst group."""
    for choice in (choice for choice in made.choices if choice.mechanism == "cyclic"):
        selector = CyclicGroups(
            num_groups=choice.sampling.num_groups,
            contribution_bound=choice.contribution_bound,
            allow_duplicates=choice.allow_duplicates,
        )
        certificate = certify(regular_graph, selector.select(regular_graph))
        mechanism = CyclicPoisson.from_certificate(certificate, batch_size=64, iterations=20)
        target = {"epsilon": 4.0, "delta": 1e-6, "adjacency": "zero-out"}
        assert choice.noise_multiplier == calibrate(mechanism, **target)
        assert (choice.size, choice.sampling.num_bands) == (certificate.size, choice.sampling.num_groups)
        probabilities = mechanism.group_probabilities
        assert choice.sampling.least_group_probability == min(probabilities)
        assert choice.sampling.sampling_probability == max(probabilities)


def test_the_choice_is_explained(made):
    (best,) = [choice for choice in made.choices if choice.best]
    assert best.why in made.advice
    assert [choice.why for choice in made.choices if not choice.best] == [""] * (len(made.choices) - 1)
    assert best.label in best.why
    assert f"{best.num_distinct:,} distinct examples" in best.why
    for title in ("DP-SGD (", "DP-MF with min separation (", "cyclic DP-MF (", "random allocation ("):
        assert title in best.why
    least = min(choice.prefix_error for choice in made.choices if choice.prefix_error)
    assert ("no row has less error" in best.why) == (best.prefix_error == least)
    assert Plan.from_json(made.to_json()).choices == made.choices


def test_several_batch_sizes(regular_graph):
    asked = {**TARGET, "batch_size": (32, 64), "contribution_bounds": (1,), "selectors": ("greedy",)}
    choices = plan(regular_graph, **asked).choices
    assert sorted({choice.target.batch_size for choice in choices}) == [32, 64]
    for size in (32, 64):
        alone = plan(regular_graph, **{**asked, "batch_size": size}).choices
        shown = [choice for choice in choices if choice.target.batch_size == size]
        assert [choice.noise_multiplier for choice in shown] == [choice.noise_multiplier for choice in alone]
    assert sum(choice.best for choice in choices) == 1


def test_best_has_the_most_signal(made):
    (best,) = [choice for choice in made.choices if choice.best]
    assert best.signal_to_noise == max(choice.signal_to_noise or 0.0 for choice in made.choices)


def test_many_more_examples_are_worth_a_little_noise():
    """Twice the distinct examples for 4% more noise."""
    rows = [[user, (user + day) % 400] for day in range(1, 9) for user in range(400)]
    graph = AttributionGraph.from_users_per_example([*rows, *([user] for user in range(0, 400, 3))])
    target = {"epsilon": 8.0, "delta": 1e-6, "batch_size": 64, "iterations": 200, "adjacency": "zero-out"}
    few, many = plan(graph, contribution_bounds=(4, 8), selectors=("greedy",), mechanism="poisson", **target).choices
    assert few.noise.effective_noise < many.noise.effective_noise < 1.05 * few.noise.effective_noise
    assert many.num_distinct > 1.9 * few.num_distinct
    assert many.best


def test_no_good_choice_is_said():
    graph = AttributionGraph.from_users_per_example([[user] for user in range(2000)])
    asked = {
        "delta": 1e-6,
        "iterations": 10,
        "adjacency": "zero-out",
        "contribution_bounds": (1,),
        "mechanism": "poisson",
    }
    weak = plan(graph, selectors=("greedy",), epsilon=0.1, batch_size=2, **asked)
    assert any(line.startswith("No choice is good") for line in weak.advice)
    cure = re.search(r"Try --batch-size (\d+)", " ".join(weak.advice))
    assert cure
    better = plan(graph, selectors=("greedy",), epsilon=0.1, batch_size=int(cure[1]), **asked)
    assert not any("No choice" in line for line in better.advice)
    assert "noise swamps the signal at this batch size" in " ".join(weak.advice)


def test_verdict_before_training():
    """The cure is true: planning with what the advice names gives the noise it names."""
    graph = AttributionGraph.from_users_per_example([[user] for user in range(20_000)])
    asked = {"epsilon": 8.0, "delta": 1e-6, "adjacency": "zero-out", "iterations": 400, "contribution_bounds": (1,)}
    asked |= {"selectors": ("greedy",), "mechanism": "poisson"}
    _, clear = plan(graph, batch_size=64, num_parameters=65, **asked).advice
    assert clear.startswith("With the best choice, a step's signal-to-noise ratio is at most 17 (batch size 64 over")
    assert clear.endswith("the signal is well above the noise.")
    small = plan(graph, batch_size=64, num_parameters=2**16, **asked)
    _, weak = small.advice
    assert "a step is mostly noise, which 400 steps average out. Try --batch-size" in weak
    cure = re.search(
        r"--batch-size (\d+) \(64 -> ([\d,]+) lowers the noise in the mean gradient by (\d+)%; noise multiplier "
        r"([\d.]+) -> ([\d.]+)\)\.$",
        weak,
    )
    assert cure
    large = plan(graph, batch_size=int(cure[1]), num_parameters=2**16, **asked)
    before, after = small.choices[0], large.choices[0]
    assert f"{before.noise_multiplier:.3g} {after.noise_multiplier:.3g}" == f"{cure[4]} {cure[5]}"
    assert after.ratio.per_step >= 1 > before.ratio.per_step
    lower = 1 - before.ratio.per_step / after.ratio.per_step
    assert f"{lower:.0%}" == f"{cure[3]}%"
    assert large.advice[1].endswith("the signal is well above the noise.")


def test_bounds_reach_what_users_have():
    light = AttributionGraph.from_users_per_example([[user % 50] for user in range(200)])
    heavy = AttributionGraph.from_users_per_example([[user % 50] for user in range(5000)])
    assert default_bounds(light) == (1, 2, 3, 5, 8)
    assert default_bounds(heavy) == (1, 2, 3, 5, 8, 16, 32, 64)


def test_random_allocation_is_planned_at_bound_one(made, regular_graph):
    """In one group and in several; its noise counts in batches of the size that its rounds really have."""
    rows = [choice for choice in made.choices if choice.mechanism == "random-allocation"]
    assert [(choice.selector, choice.contribution_bound) for choice in rows] == [("greedy", 1), ("cyclic-groups", 1)]
    for choice in rows:
        assert choice.sampling.sampling_probability is not None
        drawn = choice.size / (choice.sampling.num_groups or 1) * choice.sampling.sampling_probability
        factor = BandedStrategy(num_bands=choice.sampling.num_bands or 1, iterations=20).error_factor()
        assert choice.noise.effective_noise == pytest.approx(choice.noise_multiplier * factor * 64 / drawn)
    larger = plan(regular_graph, contribution_bounds=(3,), selectors=("greedy",), **TARGET)
    assert not any(choice.mechanism == "random-allocation" for choice in larger.choices)


@pytest.mark.parametrize("mechanism", ["poisson", "min-separation", "cyclic", "random-allocation"])
def test_one_mechanism_only(regular_graph, mechanism):
    rows = plan(regular_graph, contribution_bounds=(1,), mechanism=mechanism, **TARGET).to_rows()
    assert {row["mechanism"] for row in rows} == {mechanism}
    assert sum(row["best"] for row in rows) == 1


def test_groups_need_a_batch_each():
    graph = AttributionGraph.from_users_per_example([[user] for user in range(100)])
    asked = {**TARGET, "contribution_bounds": (1,), "mechanism": "cyclic"}
    for size, says in (
        (60, "fewer copies than two groups' batches of 60"),
        (101, "fewer copies than one batch of 101"),
    ):
        made = plan(graph, **{**asked, "batch_size": size})
        assert not any(choice.best for choice in made.choices)
        assert says in made.notes()[0]


def test_a_choice_that_leaves_nobody_has_a_note():
    """The only two users are in different groups, so that no example is left; the other mechanisms are not harmed."""
    graph = AttributionGraph.from_users_per_example([[0, 1], [0, 1]])
    made = plan(graph, **{**TARGET, "contribution_bounds": (2,), "batch_size": 1})
    (cyclic,) = (choice for choice in made.choices if choice.mechanism == "cyclic" and not choice.allow_duplicates)
    assert cyclic.size == 0
    assert cyclic.note.startswith("no protected user is in the training set")
    assert any(choice.best for choice in made.choices)


def test_too_small_a_training_set_is_said(regular_graph):
    made = plan(regular_graph, contribution_bounds=(1,), selectors=("greedy",), **{**TARGET, "batch_size": 1500})
    assert all(choice.noise_multiplier is None and choice.note for choice in made.choices)
    assert not any(choice.best for choice in made.choices)


def test_too_small_choices_share_one_sentence(regular_graph):
    made = plan(regular_graph, mechanism="poisson", **{**TARGET, "batch_size": 9000})
    assert len(made.choices) == 15
    (note,) = made.notes()
    assert note.startswith("15 choices have fewer copies than one batch of 9,000")
    assert any(line.startswith("No choice can be used; a batch size of at most") for line in made.advice)


def test_heavy_users_are_told():
    graph = AttributionGraph.from_users_per_example([[0, user] for user in range(1, 200)])
    made = plan(graph, contribution_bounds=(1,), selectors=("greedy",), **{**TARGET, "batch_size": 1})
    assert any("--unprotected" in sentence for sentence in made.advice)


@pytest.mark.parametrize(
    "wrong",
    [
        {"selectors": ("greed",)},
        {"contribution_bounds": (0,)},
        {"mechanism": "shuffling"},
        {"batch_size": 0},
        {"num_parameters": 0},
    ],
)
def test_bad_input(regular_graph, wrong):
    with pytest.raises(InputError):
        plan(regular_graph, **{**TARGET, **wrong})


def test_an_unknown_keyword_is_refused(regular_graph):
    with pytest.raises(TypeError, match="unexpected keyword argument 'selector'"):
        plan(regular_graph, selector="greedy", **TARGET)


def test_large_delta_of_a_plan():
    graph = AttributionGraph.from_users_per_example([[user] for user in range(200)])
    settings = {"epsilon": 4.0, "batch_size": 20, "iterations": 5, "adjacency": "zero-out", "selectors": ("greedy",)}
    found = plan(graph, delta=0.01, contribution_bounds=(1,), mechanism="poisson", **settings)
    assert found.advice[0].startswith("Warning: delta 0.01 is above 1 / (users")
    with pytest.raises(InputError, match="allow-large-delta"):
        plan(graph, delta=0.1, contribution_bounds=(1,), mechanism="poisson", **settings)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"size": ', '"size": "many", "was": ', r"\[0\] has no key 'was'"),
        ('"mechanism": "poisson"', '"mechanism": 3', r"\[0\]\.mechanism must be a string, not 3; plan again"),
        ('"delta": 1e-06', '"delta": "small"', r"\[0\]\.delta must be a number, not 'small'; plan again"),
        ('"unit": ', '"units": ', r"\[0\] has no key 'units'; did you mean 'unit'"),
        ("[", "{", "is not JSON"),
    ],
)
def test_a_damaged_plan_is_refused_by_the_field(made, old, new, message):
    text = made.to_json()
    assert old in text
    with pytest.raises(InputError, match=f"^plan: {message}"):
        Plan.from_json(text.replace(old, new, 1))


def test_bounds_of_single_users_are_kept():
    graph = AttributionGraph.from_users_per_example([[user % 40, (user * 7 + 1) % 40] for user in range(400)])
    bounds = {str(user): user % 2 for user in range(30)}
    asked = {"batch_size": 4, "iterations": 20, "contribution_bounds": [1, 3], "selectors": ["greedy", "priced"]}
    found = plan(graph, epsilon=8.0, delta=1e-6, adjacency="zero-out", user_bounds=bounds, **asked)
    assert {choice.mechanism for choice in found.choices} == {"poisson", "cyclic", "random-allocation"}
    for choice in found.choices:
        if choice.mechanism == "poisson":
            kind = {"greedy": Greedy, "priced": Priced}[choice.selector]
            selector = kind(contribution_bound=choice.contribution_bound, contribution_bounds=bounds)
            assert choice.size == selector.select(graph).size
    free = plan(graph, epsilon=8.0, delta=1e-6, adjacency="zero-out", **asked)
    assert max(choice.size for choice in found.choices) < min(choice.size for choice in free.choices if choice.size)
    with pytest.raises(InputError, match="cannot hold bounds of single users"):
        plan(
            graph,
            epsilon=8.0,
            delta=1e-6,
            adjacency="zero-out",
            user_bounds=bounds,
            mechanism="min-separation",
            **asked,
        )


def test_nothing_to_try_is_refused(regular_graph):
    with pytest.raises(InputError, match="'poisson' with 0 selectors, 5 bounds and 1 batch size"):
        plan(regular_graph, mechanism="poisson", selectors=(), **TARGET)
    for nothing in ({"selectors": ()}, {"contribution_bounds": ()}):
        with pytest.raises(InputError, match="nothing to try for mechanism 'poisson'"):
            plan(regular_graph, mechanism="poisson", **nothing, **TARGET)
    for make in (lambda: Plan.from_json("[]"), lambda: Plan(choices=(), advice=())):
        with pytest.raises(InputError, match="needs at least one choice; plan again"):
            make()


SIZES = st.integers(1, 10**7)


@given(size=SIZES, budget=st.integers(1_000, COPIES), batch_size=st.none() | SIZES, iterations=st.none() | SIZES)
def test_sizes_fit(size, budget, batch_size, iterations):
    found = training_sizes(size, budget=budget, batch_size=batch_size, iterations=iterations)
    assert found.batch_size == batch_size or (batch_size is None and 1 <= found.batch_size <= size)
    assert found.iterations == iterations or (iterations is None and 200 <= found.iterations <= 500)
    if batch_size is None:
        assert found.batch_size == 1 or found.batch_size * found.iterations <= budget
