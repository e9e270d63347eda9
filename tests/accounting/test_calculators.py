"""Laws of epsilon, agreement with dp-accounting, composition, and the golden file."""

import dataclasses
import importlib.util
import json
import math
import pathlib

import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant, privacy_loss_distribution
from dp_accounting.privacy_accountant import NeighboringRelation
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom
from tests.accounting.mechanisms import poisson

from coowned import CyclicPoisson, MinSeparation
from coowned.accounting.calculators import (
    composed_epsilon,
    epsilon,
    epsilon_details,
    epsilon_of_copies,
    sweep_noise_multiplier,
)
from coowned.accounting.gaussian import gaussian_epsilon
from coowned.errors import InputError, UncertifiableError

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "epsilons.json"
_spec = importlib.util.spec_from_file_location("golden_epsilons", GOLDEN.with_suffix(".py"))
assert _spec is not None
assert _spec.loader is not None
golden = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(golden)
adjacencies = pytest.mark.parametrize("adjacency", ["zero-out", "replace"])


# -- laws ----------------------------------------------------------------------------------------------------------


@settings(max_examples=12)
@given(
    copies=st.integers(1, 6),
    probability=st.floats(0.001, 0.4),
    noise=st.floats(1.0, 8.0),
    iterations=st.integers(1, 200),
    log_delta=st.floats(-11, -4),
    adjacency=st.sampled_from(["zero-out", "replace"]),
    field=st.sampled_from(["noise", "copies", "probability", "iterations"]),
    factor=st.floats(1.1, 3.0),
)
def test_laws_of_epsilon(copies, probability, noise, iterations, log_delta, adjacency, field, factor):
    delta = 10**log_delta
    base = poisson(copies, probability, iterations)
    before = epsilon(base, noise_multiplier=noise, delta=delta, adjacency=adjacency)
    worse = {
        "noise": base,
        "copies": dataclasses.replace(base, contribution_bound=copies + 1),
        "probability": dataclasses.replace(base, sampling_probability=min(1.0, probability * factor)),
        "iterations": dataclasses.replace(base, iterations=math.ceil(iterations * factor)),
    }[field]
    other_noise = noise / factor if field == "noise" else noise
    after = epsilon(worse, noise_multiplier=other_noise, delta=delta, adjacency=adjacency)
    assert after >= before * (1 - 3e-4)  # both are within the grid's looseness of the truth, which is ordered
    assert epsilon(base, noise_multiplier=noise, delta=delta, adjacency="replace") >= before * (1 - 3e-4)


@adjacencies
@settings(max_examples=10)
@given(copies=st.integers(1, 1000), iterations=st.integers(1, 10**6), scale=st.floats(0.3, 10))
def test_certain_coins_are_a_gaussian(adjacency, copies, iterations, scale):
    noise = copies * math.sqrt(iterations) * scale
    mu = (2 if adjacency == "replace" else 1) / scale
    found = epsilon(poisson(copies, 1.0, iterations), noise_multiplier=noise, delta=1e-9, adjacency=adjacency)
    assert found == pytest.approx(gaussian_epsilon(mu, 1e-9), rel=1e-9)


@adjacencies
def test_probability_near_one_is_nearly_a_gaussian(adjacency):
    near = epsilon(poisson(3, 1 - 1e-12, 50), noise_multiplier=20.0, delta=1e-8, adjacency=adjacency)
    at_one = epsilon(poisson(3, 1.0, 50), noise_multiplier=20.0, delta=1e-8, adjacency=adjacency)
    assert at_one * (1 - 1e-9) <= near * (1 + 1e-9) <= at_one * (1 + 3e-4)


@adjacencies
def test_cyclic_with_one_group_is_poisson(adjacency):
    cyclic = CyclicPoisson(contribution_bound=3, sampling_probability=0.02, iterations=200, num_groups=1, num_bands=1)
    question = {"noise_multiplier": 1.0, "delta": 1e-8, "adjacency": adjacency}
    assert epsilon(cyclic, **question) == epsilon(poisson(3, 0.02, 200), **question)


def test_cyclic_is_the_worst_group():
    cyclic = CyclicPoisson(
        contribution_bound=4,
        iterations=103,
        num_groups=4,
        num_bands=3,
        group_probabilities=(0.05, 0.1, 0.02, 0.04),
        group_bounds=(2, 1, 4, 1),
    )
    question = {"noise_multiplier": 1.5, "delta": 1e-7, "adjacency": "zero-out"}
    groups = [(2, 0.05, 26), (1, 0.1, 26), (4, 0.02, 26), (1, 0.04, 25)]
    each = [epsilon(poisson(*group), **question) for group in groups]
    assert epsilon(cyclic, **question) == max(each)
    assert epsilon_of_copies(cyclic, copies=1, group=3, **question) == each[3]
    assert epsilon_of_copies(cyclic, copies=1, group=1, **question) == each[1]


@adjacencies
def test_min_separation_is_one_gaussian(adjacency):
    m = MinSeparation(contribution_bound=8, min_separation=16, num_bands=16, iterations=2500)
    mu = math.sqrt(8) / 3.0 * (2 if adjacency == "replace" else 1)
    found = epsilon(m, noise_multiplier=3.0, delta=1e-10, adjacency=adjacency)
    assert found == pytest.approx(gaussian_epsilon(mu, 1e-10), rel=1e-12)
    overridden = dataclasses.replace(m, sensitivity=2.0)
    assert epsilon(overridden, noise_multiplier=2.0, delta=1e-6, adjacency="zero-out") == gaussian_epsilon(1.0, 1e-6)


# -- levels --------------------------------------------------------------------------------------------------------


def test_epsilon_by_copies_ends_at_the_bound():
    question = {"noise_multiplier": 1.0, "delta": 1e-8, "adjacency": "zero-out"}
    for m in (
        poisson(3, 0.02, 100),
        MinSeparation(contribution_bound=3, min_separation=4, num_bands=2, iterations=100),
        CyclicPoisson(contribution_bound=3, sampling_probability=0.1, iterations=40, num_groups=3, num_bands=2),
    ):
        levels = [epsilon_of_copies(m, copies=copies, **question) for copies in (1, 2, 3)]
        assert levels == sorted(levels)
        assert levels[0] < levels[2] == epsilon(m, **question)
        for wrong in (0, 4):
            with pytest.raises(InputError):
                epsilon_of_copies(m, copies=wrong, **question)
    with pytest.raises(InputError, match="group"):
        epsilon_of_copies(poisson(3, 0.02, 100), copies=1, group=0, **question)


# -- peers ---------------------------------------------------------------------------------------------------------


def test_close_to_dp_accounting():
    # dp-accounting discretizes from above as well; at these deltas its round-off is harmless.
    for copies, probability, noise, iterations, delta in ((2, 0.05, 1.5, 100, 1e-6), (1, 0.01, 0.8, 500, 1e-6)):
        weights = [float(w) for w in binom.pmf(range(copies + 1), copies, probability)]
        theirs = (
            privacy_loss_distribution.from_mixture_gaussian_mechanism(
                noise, list(range(copies + 1)), weights, value_discretization_interval=2e-3
            )
            .self_compose(iterations)
            .get_epsilon_for_delta(delta)
        )
        ours = epsilon(
            poisson(copies, probability, iterations), noise_multiplier=noise, delta=delta, adjacency="zero-out"
        )
        assert ours <= theirs * (1 + 2e-4)
        assert ours >= theirs * (1 - 5e-3)  # theirs is on a coarse grid to be quick


@pytest.mark.parametrize(("probability", "noise", "iterations"), [(0.01, 1.0, 300), (0.3, 3.0, 40)])
def test_one_copy_replaced_agrees_with_dp_accounting(probability, noise, iterations):
    event = dp_event.SelfComposedDpEvent(
        dp_event.PoissonSampledDpEvent(probability, dp_event.GaussianDpEvent(noise)), iterations
    )
    accountant = PLDAccountant(NeighboringRelation.REPLACE_ONE, value_discretization_interval=5e-4).compose(event)
    theirs = accountant.get_epsilon(1e-6)
    ours = epsilon(poisson(1, probability, iterations), noise_multiplier=noise, delta=1e-6, adjacency="replace")
    assert ours == pytest.approx(theirs, rel=1e-3)


@pytest.mark.full
def test_the_measured_mechanism_agrees_with_dp_accounting():
    weights = [float(w) for w in binom.pmf(range(4), 3, 0.002)]
    event = dp_event.SelfComposedDpEvent(dp_event.MixtureOfGaussiansDpEvent(1.0, list(range(4)), weights), 10_000)
    theirs = PLDAccountant(NeighboringRelation.REPLACE_SPECIAL, 1e-4).compose(event).get_epsilon(1e-10)
    ours = epsilon(poisson(3, 0.002, 10_000), noise_multiplier=1.0, delta=1e-10, adjacency="zero-out")
    assert ours == pytest.approx(theirs, rel=1e-3)


# -- several runs --------------------------------------------------------------------------------------------------


@adjacencies
def test_composition_of_a_run_with_itself(adjacency):
    m = poisson(2, 0.03, 100)
    twice = composed_epsilon([(m, 1.2), (m, 1.2)], delta=1e-8, adjacency=adjacency)
    long = epsilon(poisson(2, 0.03, 200), noise_multiplier=1.2, delta=1e-8, adjacency=adjacency)
    assert twice == pytest.approx(long, rel=3e-4)


def test_composition_of_different_kinds():
    sampled, scheduled = (
        poisson(2, 0.03, 100),
        MinSeparation(contribution_bound=4, min_separation=8, num_bands=8, iterations=100),
    )
    question = {"delta": 1e-8, "adjacency": "zero-out"}
    both = composed_epsilon([(sampled, 1.5), (scheduled, 4.0)], **question)
    one = epsilon(sampled, noise_multiplier=1.5, **question)
    other = epsilon(scheduled, noise_multiplier=4.0, **question)
    assert max(one, other) < both < one + other
    gaussians = composed_epsilon([(scheduled, 4.0), (scheduled, 4.0)], **question)
    assert gaussians == pytest.approx(gaussian_epsilon(math.sqrt(2) / 2, 1e-8), rel=1e-9)
    with pytest.raises(InputError):
        composed_epsilon([], **question)


def test_models_of_one_sweep_are_one_mechanism():
    assert sweep_noise_multiplier([3.0, 4.0]) == pytest.approx(2.4)
    assert sweep_noise_multiplier([3.0, 4.0]) < 2.4
    m = poisson(1, 0.01, 1000)
    shared = epsilon(m, noise_multiplier=sweep_noise_multiplier([1.0] * 4), delta=1e-6, adjacency="zero-out")
    independent = composed_epsilon([(m, 1.0)] * 4, delta=1e-6, adjacency="zero-out")
    assert shared == pytest.approx(15.5, abs=0.1)  # privacy-notes n1: composing them as independent would say 4.2
    assert independent == pytest.approx(4.2, abs=0.1)


# -- refusals ------------------------------------------------------------------------------------------------------


def test_bad_questions_are_refused():
    m = poisson(1, 0.1, 10)
    good = {"noise_multiplier": 1.0, "delta": 1e-6, "adjacency": "zero-out"}
    for wrong in (
        {"noise_multiplier": 0.0},
        {"noise_multiplier": math.inf},
        {"delta": 0.0},
        {"delta": 1.0},
        {"delta": -1e-6},
        {"adjacency": "add-remove"},
    ):
        with pytest.raises(InputError, match=next(iter(wrong))):
            epsilon(m, **{**good, **wrong})
    with pytest.raises(TypeError):
        epsilon(m, noise_multiplier=1.0, adjacency="zero-out")  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError):
        epsilon(m, noise_multiplier=1.0, delta=1e-6)  # pyright: ignore[reportCallIssue]


def test_an_epsilon_that_protects_nobody_is_refused():
    with pytest.raises(UncertifiableError, match="larger noise multiplier"):
        epsilon(poisson(300, 0.2, 100_000), noise_multiplier=0.3, delta=1e-6, adjacency="zero-out")


def test_details_say_how():
    details = epsilon_details(poisson(2, 0.03, 100), noise_multiplier=1.0, delta=1e-8, adjacency="zero-out")
    assert details.spacing > 0
    assert details.transform_size > 0
    assert 0 < details.error_share <= 0.01
    assert 0 < details.looseness < 3e-4 * details.epsilon


# -- golden --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(golden.CASES))
def test_golden_epsilons(name):
    """A changed value needs a Privacy line in the changelog; `python tests/golden/epsilons.py` writes the file."""
    stored = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert set(stored) == set(golden.CASES)
    assert golden.CASES[name]() == pytest.approx(stored[name], rel=1e-6)
