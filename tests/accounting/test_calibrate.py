"""The noise multiplier: private, tight, over the whole range, or refused by name."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.accounting.mechanisms import poisson

from coowned import CyclicPoisson, MinSeparation
from coowned.accounting import calibrate as module
from coowned.accounting.calculators import epsilon as proven
from coowned.accounting.calculators import epsilon_details
from coowned.accounting.calibrate import calibrate
from coowned.errors import InputError, UncertifiableError

FULL = pytest.mark.full


def check(mechanism, epsilon, delta, adjacency):
    noise = calibrate(mechanism, epsilon=epsilon, delta=delta, adjacency=adjacency, cache=False)
    assert proven(mechanism, noise_multiplier=noise, delta=delta, adjacency=adjacency) <= epsilon
    assert proven(mechanism, noise_multiplier=0.999 * noise, delta=delta, adjacency=adjacency) > epsilon
    return noise


@pytest.mark.parametrize(
    ("mechanism", "epsilon", "delta", "adjacency"),
    [
        (poisson(3, 0.002, 10_000), 6.0, 1e-10, "zero-out"),
        (poisson(1, 0.5, 1), 0.1, 1e-3, "zero-out"),
        (poisson(1, 0.5, 1), 100.0, 1e-12, "replace"),
        (poisson(1000, 0.001, 100), 8.0, 1e-6, "zero-out"),
        (poisson(1, 1e-6, 1000), 1.0, 1e-12, "zero-out"),
        (poisson(2, 0.999, 50), 0.1, 1e-12, "replace"),
        (poisson(5, 1.0, 10**6), 100.0, 1e-12, "zero-out"),
        (MinSeparation(contribution_bound=8, min_separation=16, num_bands=16, iterations=2500), 8.0, 1e-10, "replace"),
        (
            CyclicPoisson(
                contribution_bound=3,
                iterations=400,
                num_groups=4,
                num_bands=4,
                group_probabilities=(0.02, 0.05, 1.0, 0.01),
                group_bounds=(3, 2, 1, 1),
            ),
            4.0,
            1e-8,
            "zero-out",
        ),
    ],
)
def test_calibration_is_private_and_tight(mechanism, epsilon, delta, adjacency):
    assert check(mechanism, epsilon, delta, adjacency) > 0


@settings(max_examples=8)
@given(
    log_copies=st.floats(0, 2),
    log_probability=st.floats(-4, -0.01),
    log_iterations=st.floats(0, 4),
    log_epsilon=st.floats(-1, 2),
    log_delta=st.floats(-12, -3),
    adjacency=st.sampled_from(["zero-out", "replace"]),
)
def test_calibration_over_the_range(log_copies, log_probability, log_iterations, log_epsilon, log_delta, adjacency):
    mechanism = poisson(int(10**log_copies), 10**log_probability, int(10**log_iterations))
    chance = -math.expm1(int(10**log_copies) * int(10**log_iterations) * math.log1p(-(10**log_probability)))
    if chance <= 10**log_delta:
        with pytest.raises(InputError, match="ever drawn"):
            check(mechanism, 10**log_epsilon, 10**log_delta, adjacency)
    else:
        check(mechanism, 10**log_epsilon, 10**log_delta, adjacency)


@pytest.mark.parametrize(
    ("iterations", "epsilon", "adjacency"),
    [
        (1500, 1.0, "zero-out"),
        (1100, 0.1, "replace"),
        pytest.param(1500, 1.0, "replace", marks=FULL),
        pytest.param(1100, 0.1, "zero-out", marks=FULL),
        pytest.param(1010, 8.0, "zero-out", marks=FULL),
        pytest.param(1010, 8.0, "replace", marks=FULL),
        pytest.param(1001, 100.0, "zero-out", marks=FULL),
        pytest.param(1001, 100.0, "replace", marks=FULL),
    ],
)
def test_a_delta_just_below_the_chance_of_being_drawn(iterations, epsilon, adjacency):
    # Little noise is needed: where it is a little larger, epsilon is 0, and the search starts there.
    noise = check(poisson(1, 1e-6, iterations), epsilon, 1e-3, adjacency)
    assert 0.03 < noise < 0.3


@FULL
@settings(max_examples=12)
@given(
    log_probability=st.floats(-7, -2),
    log_iterations=st.floats(0, 6),
    log_excess=st.floats(-2, 0.5),
    log_epsilon=st.floats(-1, 2),
    adjacency=st.sampled_from(["zero-out", "replace"]),
)
def test_calibration_near_the_chance_of_being_drawn(
    log_probability, log_iterations, log_excess, log_epsilon, adjacency
):
    iterations = int(10**log_iterations)
    probability = min(10**log_probability, 0.1 / iterations)
    chance = -math.expm1(iterations * math.log1p(-probability))
    check(poisson(1, probability, iterations), 10**log_epsilon, min(chance / (1 + 10**log_excess), 1e-3), adjacency)


@FULL
@pytest.mark.parametrize("adjacency", ["zero-out", "replace"])
@pytest.mark.parametrize(
    ("copies", "probability", "iterations", "epsilon", "delta"),
    [
        (1, 1e-6, 10**6, 1.0, 1e-12),
        (1000, 1e-6, 10**6, 0.1, 1e-12),
        (1000, 0.5, 10**6, 100.0, 1e-12),
        (30, 0.01, 10**6, 0.1, 1e-3),
        (3, 1e-4, 10**6, 8.0, 1e-12),
    ],
)
def test_calibration_at_the_corners(copies, probability, iterations, epsilon, delta, adjacency):
    check(poisson(copies, probability, iterations), epsilon, delta, adjacency)


def test_more_privacy_needs_more_noise():
    m = poisson(2, 0.02, 200)
    noises = [calibrate(m, epsilon=e, delta=1e-8, adjacency="zero-out", cache=False) for e in (1.0, 2.0, 4.0)]
    assert noises == sorted(noises, reverse=True)


def test_a_delta_above_the_chance_of_being_drawn_is_refused():
    with pytest.raises(InputError, match="much smaller delta"):
        calibrate(poisson(1, 1e-6, 10), epsilon=1.0, delta=1e-3, adjacency="zero-out", cache=False)


@pytest.mark.parametrize(
    "wrong",
    [{"epsilon": 0.0}, {"epsilon": -1.0}, {"epsilon": math.inf}, {"delta": 0.0}, {"delta": 1.5}, {"adjacency": "x"}],
)
def test_bad_targets_are_refused(wrong):
    good = {"epsilon": 1.0, "delta": 1e-6, "adjacency": "zero-out"}
    with pytest.raises(InputError, match=next(iter(wrong))):
        calibrate(poisson(1, 0.1, 10), **{**good, **wrong})


def test_results_are_kept(tmp_path, monkeypatch):
    m = poisson(2, 0.02, 100)
    monkeypatch.setenv("COOWNED_CACHE", str(tmp_path))
    first = calibrate(m, epsilon=2.0, delta=1e-8, adjacency="zero-out")
    assert len(list(tmp_path.rglob("*.txt"))) == 1

    def fail(*arguments, **named):
        raise AssertionError("computed again")

    monkeypatch.setattr(module, "calibrate_sampled", fail)
    assert calibrate(m, epsilon=2.0, delta=1e-8, adjacency="zero-out") == first
    with pytest.raises(AssertionError, match="computed again"):
        calibrate(m, epsilon=2.0, delta=1e-8, adjacency="replace")


def test_closed_forms_are_not_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("COOWNED_CACHE", str(tmp_path))
    m = MinSeparation(contribution_bound=8, min_separation=16, num_bands=16, iterations=2500)
    calibrate(m, epsilon=8.0, delta=1e-10, adjacency="zero-out")
    assert not list(tmp_path.iterdir())


@FULL
@pytest.mark.parametrize("adjacency", ["zero-out", "replace"])
def test_the_least_noise_is_certified_for_a_user_who_is_drawn_about_once(adjacency):
    assert check(poisson(1, 4.9e-6, 204343), 0.13, 1.4e-10, adjacency) == pytest.approx(0.664, abs=0.002)


@FULL
@pytest.mark.parametrize("adjacency", ["zero-out", "replace"])
def test_the_least_noise_is_certified_for_a_user_who_is_drawn_about_once_in_a_million(adjacency):
    assert check(poisson(1, 1e-6, 10**6), 0.1, 1e-12, adjacency) == pytest.approx(0.6537, abs=0.002)


def test_noise_is_raised_where_the_least_cannot_be_certified():
    raised = module.least_certified(lambda noise: noise >= 2.0, 1.0)
    assert 2.0 <= raised <= 2.0 * (1 + 2 * module.RELATIVE_TOLERANCE)
    with pytest.raises(UncertifiableError, match="larger delta"):
        module.least_certified(lambda noise: False, 1.0)


def test_imprecise_answers_are_not_returned(monkeypatch):
    """With a stricter limit on errors than the least noise keeps, more noise comes back, within the limit."""
    m, claim = poisson(3, 0.002, 10_000), {"delta": 1e-10, "adjacency": "zero-out"}
    least = calibrate(m, epsilon=6.0, cache=False, **claim)
    limit = 0.9 * epsilon_details(m, noise_multiplier=least, **claim).error_share
    monkeypatch.setattr(module, "ALLOWED_ERROR_SHARE", limit)
    raised = calibrate(m, epsilon=6.0, cache=False, **claim)
    answer = epsilon_details(m, noise_multiplier=raised, **claim)
    assert raised > least
    assert answer.epsilon <= 6.0
    assert answer.error_share <= limit


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("exact", [1e-3, 0.2, 1.0, 50.0, 1e9])
def test_the_search_finds_any_root(near, exact):
    """Whatever the start: on a smooth fall, on one that is 0 beyond the root, and on one that jumps there."""
    for falling in (
        lambda noise: (exact / noise) ** 2,
        lambda noise: max(0.0, 1 + 30 * math.log(exact / noise)),
        lambda noise: 0.0 if noise >= exact else math.inf,
    ):
        found = module.narrow(falling, falling, 1.0, 1.0, near=near)
        assert exact * (1 - 1e-12) <= found <= exact * (1 + 2 * module.RELATIVE_TOLERANCE)


@pytest.mark.parametrize("near", [True, False])
def test_the_search_ends_at_its_limits(near):
    assert module.narrow(lambda noise: 0.0, lambda noise: 0.0, 1.0, 1.0, near=near) == module.SMALLEST
    with pytest.raises(UncertifiableError, match="1e12"):
        module.narrow(lambda noise: 2.0, lambda noise: 2.0, 1.0, 1.0, near=near)
