"""Sums with and without a rare large loss, bounded apart: never below the truth, and precise where one tilt is not."""

import dataclasses
import math

import numpy as np
import pytest
from scipy.stats import norm
from tests.accounting.test_numerical import OneStep

from coowned.accounting.numerical import Composition, Steps
from coowned.accounting.parted_composition import PartedTail, Parts, plan_parts

# Expected draws about 1, delta small: neither part decides alone.
RARE = {"copies": 1, "probability": 1e-3, "noise_multiplier": 0.9, "repetitions": 1000}


def composition(adjacency="zero-out", **steps):
    return Composition([Steps(**steps)], adjacency)


def parts_with(cut, core_tilt, jump_tilt, *, counts=True):
    return Parts(
        cut=cut,
        core_tilt=core_tilt,
        core_counts=counts,
        jump_tilt=jump_tilt,
        width=1.0,
        core_share=0.5,
        jump_slope=1.0,
    )


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0, 30.0, 1e4])
@pytest.mark.parametrize(("copies", "probability", "noise"), [(6, 0.375, 0.25), (1, 0.01, 0.5), (2, 0.2, 2.0)])
def test_no_parts_give_less_than_the_truth(copies, probability, noise, share, counts):
    # Unfit parts may make the bound useless, never wrong.
    step = OneStep(copies, probability, noise, "zero-out")
    whole = composition(copies=copies, probability=probability, noise_multiplier=noise, repetitions=1)
    loss = whole.losses(log_delta=-25.0, spacing=0.01, growth=0.05)["upper"]
    near = 0.6 * loss.largest
    tilt = share * loss.tilt_for_mean(near)
    for cut in (0.05 * near, 0.5 * near, 0.95 * near):
        tail = PartedTail(loss, parts_with(cut, tilt, 0.3 * tilt, counts=counts), near, -25.0)
        for epsilon in (0.01, 0.1 * near, 0.4 * near, 0.9 * near, near, 1.3 * near):
            exact = step.delta(epsilon, "upper")
            assert tail.at(epsilon).log_delta >= (math.log(exact) - 1e-9 if exact > 1e-14 else -math.inf)


@pytest.mark.parametrize(
    ("adjacency", "epsilon"), [("zero-out", 1.0), ("zero-out", 3.0), ("zero-out", 5.0), ("replace", 3.0)]
)
def test_never_below_two_steps_by_quadrature(adjacency, epsilon):
    step = OneStep(1, 0.05, 0.6, adjacency)
    whole = composition(adjacency, copies=1, probability=0.05, noise_multiplier=0.6, repetitions=2)
    loss = whole.losses(log_delta=-16.0, spacing=1e-3, growth=0.01)["upper"]
    bound = PartedTail(loss, parts_with(1.0, 3.0, 0.5), 3.0, -16.0).at(epsilon)
    exact = step.delta_of_two(epsilon, "upper")
    assert exact * (1 - 1e-6) <= math.exp(bound.log_delta) <= exact * 1.03
    assert 0 <= bound.error_share <= 0.03


@pytest.mark.parametrize("adjacency", ["zero-out", "replace"])
@pytest.mark.parametrize("epsilon", [0.3, 0.35])
def test_both_parts_make_the_whole(adjacency, epsilon):
    loss = composition(adjacency, **RARE).losses(log_delta=-18.0, spacing=1e-4, growth=0.02)["upper"].capped(13.0)
    whole = loss.tail(loss.tilt_for_mean(epsilon), epsilon, -18.0, 0.0).at(epsilon)
    for cut in (0.3, 0.6):
        core = loss.up_to(cut * epsilon)
        assert core is not None
        parts = parts_with(cut * epsilon, core.tilt_for_mean(epsilon), 5.0)
        tail = PartedTail(loss, parts, epsilon, -18.0)
        assert tail.at(epsilon).log_delta == pytest.approx(whole.log_delta, abs=1e-4)
        # The reference would notice if sums without a jump were forgotten, or those with one.
        assert tail._core is not None
        forgotten = [tail._core.at(epsilon).log_delta, tail._jumps.at(epsilon).log_delta]
        assert max(forgotten) < whole.log_delta - 1e-3


def one_draw_epsilon(probability, noise, repetitions, delta, adjacency):
    """An epsilon that is certainly not above the true one: of the event that some step's output exceeds a threshold."""
    thresholds = np.linspace(0.5, 1 + 12 * noise, 4000)

    def log_chance(first, second):  # of the event, where a step exceeds the threshold by either draw
        tail = np.exp(np.logaddexp(math.log1p(-probability) + first, math.log(probability) + second))
        return np.log(-np.expm1(repetitions * np.log1p(-tail)))

    blank = norm.logsf(thresholds / noise)
    with_user = log_chance(blank, norm.logsf((thresholds - 1) / noise))
    other = norm.logsf((thresholds + 1) / noise) if adjacency == "replace" else blank
    without = log_chance(blank, other)
    above = np.exp(with_user) > delta
    return float(np.max(np.log(np.exp(with_user[above]) - delta) - without[above]))


@pytest.mark.parametrize("adjacency", ["zero-out", "replace"])
@pytest.mark.parametrize(
    ("probability", "repetitions", "noise", "delta"),
    [
        (1e-6, 10**6, 0.5, 1e-12),
        (1e-6, 10**6, 0.6, 1e-12),
        (4.9e-6, 204343, 0.6, 1.4e-10),
        (1e-6, 1500, 0.15, 1e-3),
        (1e-6, 1010, 0.1, 1e-3),
    ],
)
def test_never_below_one_draw(probability, repetitions, noise, delta, adjacency):
    steps = {"copies": 1, "probability": probability, "noise_multiplier": noise, "repetitions": repetitions}
    found = composition(adjacency, **steps).epsilon(delta, looseness=1e-3).epsilon
    below = one_draw_epsilon(probability, noise, repetitions, delta, adjacency)
    assert below <= found <= 1.1 * below


def test_precise_where_one_tilt_is_not():
    """A user who is drawn about once at a tiny delta: round-off under one tilt takes a third of delta and more."""
    rare = composition(copies=1, probability=1e-6, noise_multiplier=0.6, repetitions=10**6)
    answer = rare.epsilon(1e-12, looseness=1e-3)
    assert answer.error_share < 1e-3
    loss = rare.losses(log_delta=math.log(1e-12), spacing=1e-5, growth=0.02)["upper"].capped(13.0)
    one_tilt = loss.tail(loss.tilt_for_mean(answer.epsilon), answer.epsilon, math.log(1e-12), 0.0)
    assert one_tilt.at(answer.epsilon).error_share > 0.1


def test_a_plan_is_made_for_the_place_asked():
    loss = composition(**RARE).coarse(-21.0)["upper"].capped(13.0)
    plan = plan_parts(loss, 0.5, -21.0)
    assert plan is not None
    assert 0 < plan.cut < 0.5
    assert plan.core_tilt > plan.jump_tilt > 0
    assert plan_parts(loss, 0.0, -21.0) is None
    assert plan_parts(loss, 2 * loss.largest, -21.0) is None


def test_losses_up_to_a_cut_are_a_part_of_the_law():
    loss = composition(**RARE).coarse(-21.0)["upper"]
    core = loss.up_to(0.2)
    assert core is not None
    assert core.log_infinity == core.log_capped == -math.inf
    assert core.atoms[0].loss.max() <= 0.2
    assert core.atoms[0].bin_loss.max() <= 0.2
    assert np.exp(core.atoms[0].log_mass).sum() < np.exp(loss.atoms[0].log_mass).sum()
    assert loss.up_to(2 * float(loss.atoms[0].loss[0])) is None  # below the smallest loss
    assert dataclasses.replace(core.atoms[0]).loss_error == loss.atoms[0].loss_error
