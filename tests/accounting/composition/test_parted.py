"""Sums with and without a rare large loss, bounded apart: never below the truth, and precise where one tilt is not."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm
from tests.accounting.composition.test_steps import OneStep

from coowned.accounting.composition import spectrum, tilted
from coowned.accounting.composition.group_mixture import LossAtoms
from coowned.accounting.composition.parted import PartedTail, Parts, plan_parts
from coowned.accounting.composition.steps import Composition, Steps
from coowned.accounting.composition.tilted import TiltedTail

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


class TwoKinds:
    """One step of either kind, by quadrature: the second's delta at what the first left over."""

    def __init__(self, adjacency, first, second):
        self.first, self.second = OneStep(*first, adjacency), OneStep(*second, adjacency)
        steps = [
            Steps(copies=copies, probability=probability, noise_multiplier=noise, repetitions=1)
            for copies, probability, noise in (first, second)
        ]
        loss = Composition(steps, adjacency).losses(log_delta=-16.0, spacing=1e-3, growth=0.01)["upper"]
        self.tail = PartedTail(loss, parts_with(1.0, 3.0, 0.5), 3.0, -16.0)
        self.whole = TiltedTail(loss, 1.5, 3.0, -16.0, 0.0)

    def delta(self, epsilon):
        pieces = np.linspace(-8.0, 9.0, 12)
        return sum(
            quad(
                lambda x: self.first.densities(x)[0] * self.second.delta(epsilon - self.first.loss(x), "upper"),
                low,
                high,
                epsabs=1e-13,
                epsrel=1e-7,
            )[0]
            for low, high in itertools.pairwise(pieces)
        )


SAME = ((1, 0.05, 0.6), (1, 0.05, 0.6))
OTHERS = ((1, 0.05, 0.6), (2, 0.1, 0.9))


@pytest.mark.parametrize(
    ("adjacency", "kinds", "epsilon"),
    [
        ("zero-out", OTHERS, 3.0),
        ("replace", OTHERS, 1.0),
        pytest.param("zero-out", SAME, 1.0, marks=pytest.mark.full),
        pytest.param("replace", SAME, 3.0, marks=pytest.mark.full),
    ],
)
def test_never_below_two_steps_by_quadrature(adjacency, kinds, epsilon):
    two = TwoKinds(adjacency, *kinds)
    exact, bound = two.delta(epsilon), two.tail.at(epsilon)
    assert exact * (1 - 1e-6) <= math.exp(bound.log_delta) <= exact * 1.001
    assert bound.log_delta == pytest.approx(two.whole.at(epsilon).log_delta, abs=1e-6)
    assert 0 <= bound.error_share <= 1e-6


@pytest.mark.parametrize("bug", ["core", "jumps", "one kind"])
def test_the_quadrature_would_notice(monkeypatch, bug):
    """Sums without a jump forgotten; half of the jumps lost; the jumps of one kind of step counted as 0."""
    original = tilted.step_spectrum
    calls = itertools.count()

    def fewer(atoms, tilt, size, transform_error, cut):
        step = original(atoms, tilt, size, transform_error, cut)
        if step.jumps is None or (bug == "one kind" and next(calls) % 2):
            return step
        ratio = np.expm1(step.jumps.log_ratio) * (0.5 if bug == "jumps" else 0.0)
        return dataclasses.replace(step, jumps=dataclasses.replace(step.jumps, log_ratio=np.log1p(ratio)))

    if bug != "core":
        monkeypatch.setattr(tilted, "step_spectrum", fewer)
    two = TwoKinds("zero-out", *OTHERS)
    if bug == "core":
        two.tail._core = None
    assert math.exp(two.tail.at(1.0).log_delta) < two.delta(1.0) * (1 - 1e-4)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("cut", [0.5, 4.5, 20.0])
def test_errors_cover_a_rest_whose_spectrum_vanishes(cut, count):
    """Differences of small powers, taken as such: exact but for 1e-14."""
    size = 16
    laws = [
        {0: 0.4, 4: 0.4, 7: 0.1, 9: 0.1},  # up to 4.5 its spectrum is 0 at the frequencies 2 and 6
        {0: 0.3, 1: 0.3, 9: 0.2, 11: 0.2},  # and this one's at 8
        {0: 0.96, 3: 0.01, 6: 0.03},
        {-1: 0.1, 2: 0.05, 11: 0.85},  # the largest atom is a jump
    ]
    counted = []
    exact = [np.ones(size // 2 + 1, dtype=complex), np.ones(size // 2 + 1, dtype=complex)]
    for law in laws:
        index = np.array(sorted(law))
        mass = np.array([law[int(i)] for i in index])
        none = np.zeros(0)
        atoms = LossAtoms(
            spacing=1.0,
            index=index,
            log_mass=np.log(mass),
            log_infinity=-math.inf,
            loss_error=0.0,
            bin_loss=none,
            bin_log_mass=none,
            bin_spread=none,
            bin_is_wide=none,
        )
        step = spectrum.step_spectrum(atoms, 0.0, size, 1e-14, cut)
        placed = [np.bincount((index - step.shift) % size, mass * keep, size) for keep in (True, index <= cut)]
        scale = math.exp(-step.log_scale * count)
        exact = [product * np.fft.rfft(law) ** count * scale for product, law in zip(exact, placed, strict=True)]
        counted.append(step)
    log_modulus = count * sum(step.log_modulus for step in counted)
    bound = np.exp(log_modulus + count * sum(step.log_growth for step in counted))
    rest = np.exp(log_modulus + 1j * count * sum(step.angle for step in counted))
    relative = np.full(len(rest), 1e-12)
    found, _, error = spectrum.with_a_jump(rest, bound, relative, [(step.jumps, count) for step in counted])
    assert np.all(np.abs(found - (exact[0] - exact[1])) <= error + 1e-14)
    assert set(np.flatnonzero(error > 1e-10)) == ({2, 6, 8} if cut == 4.5 else set())
    assert np.all(error <= 3 * np.exp(sum(count * step.jumps.log_largest for step in counted)))


@pytest.mark.parametrize("adjacency", ["zero-out", "replace"])
@pytest.mark.parametrize("epsilon", [0.3, 0.35])
def test_both_parts_make_the_whole(adjacency, epsilon):
    loss = composition(adjacency, **RARE).losses(log_delta=-18.0, spacing=1e-4, growth=0.02)["upper"].capped(13.0)
    whole = TiltedTail(loss, loss.tilt_for_mean(epsilon), epsilon, -18.0, 0.0).at(epsilon)
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
    one_tilt = TiltedTail(loss, loss.tilt_for_mean(answer.epsilon), answer.epsilon, math.log(1e-12), 0.0)
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
