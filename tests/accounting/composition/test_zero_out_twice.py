"""Replace from zero-out: never below the truth, and never above what holds where rounds are known."""

import math

import numpy as np
import pytest

from coowned import PoissonSampling, RandomAllocation, calibrate, epsilon, epsilon_curve
from coowned.accounting.calculators import composed_epsilon
from coowned.accounting.composition import ZeroOutTwice, compose_steps
from coowned.accounting.composition.steps import Composition
from coowned.accounting.gaussian import gaussian_epsilon
from coowned.mechanism.mechanism import Steps

ALLOCATED = Steps(copies=1, probability=0.5, noise_multiplier=1.0, repetitions=2, rounds_per_epoch=2)


def test_only_allocation_under_replace():
    plain = Steps(copies=1, probability=0.5, noise_multiplier=1.0, repetitions=2)
    assert isinstance(compose_steps([plain, ALLOCATED], "replace"), ZeroOutTwice)
    assert isinstance(compose_steps([plain, ALLOCATED], "zero-out"), Composition)
    assert isinstance(compose_steps([plain], "replace"), Composition)


def _exact_replace(noise_multiplier, value):
    """Two rounds, one epoch: sum of (P - e^eps Q)+ over a fine grid of both outputs, off by less than 1e-4."""
    x = np.arange(-9.0, 9.0, 0.01) * noise_multiplier
    density = np.exp(-(x**2) / (2 * noise_multiplier**2)) / math.sqrt(2 * math.pi) / noise_multiplier
    up, down = (np.exp((sign * x - 0.5) / noise_multiplier**2) for sign in (1, -1))
    p, q = ((own[:, None] + own[None, :]) / 2 for own in (up, down))
    cell = (0.01 * noise_multiplier) ** 2 * density[:, None] * density[None, :]
    return float((np.maximum(p - math.exp(value) * q, 0.0) * cell).sum())


@pytest.mark.parametrize("noise_multiplier", [0.8, 2.0])
def test_never_below_the_truth(noise_multiplier):
    steps = Steps(copies=1, probability=0.5, noise_multiplier=noise_multiplier, repetitions=2, rounds_per_epoch=2)
    points = [0.0, 0.5, 1.0, 2.0]
    for value, answer in zip(points, ZeroOutTwice([steps]).deltas(points), strict=True):
        assert answer.delta >= _exact_replace(noise_multiplier, value) - 1e-4


def test_epsilon_and_deltas_agree():
    mechanism = RandomAllocation(contribution_bound=1, rounds_per_epoch=6, iterations=60)
    found = epsilon(mechanism, noise_multiplier=2.0, delta=1e-6, adjacency="replace")
    curve = epsilon_curve(mechanism, noise_multiplier=2.0, adjacency="replace", epsilons=[found / 2, found])
    assert curve[0] > curve[1]
    assert 1e-7 < curve[1] < 1e-5
    zero_out = epsilon(mechanism, noise_multiplier=2.0, delta=1e-6, adjacency="zero-out")
    assert 1.5 * zero_out < found < 3 * zero_out


def test_never_above_known_rounds():
    for rounds, noise_multiplier in ((2, 1.0), (5, 0.1), (3, 4.0)):
        mechanism = RandomAllocation(contribution_bound=1, rounds_per_epoch=rounds, iterations=2 * rounds)
        found = epsilon(mechanism, noise_multiplier=noise_multiplier, delta=1e-8, adjacency="replace")
        assert found <= gaussian_epsilon(2 * math.sqrt(2) / noise_multiplier, 1e-8)


def test_calibration_meets_the_target():
    mechanism = RandomAllocation(contribution_bound=1, rounds_per_epoch=6, iterations=60)
    noise = calibrate(mechanism, epsilon=6.0, delta=1e-8, adjacency="replace", cache=False)
    assert epsilon(mechanism, noise_multiplier=noise, delta=1e-8, adjacency="replace") <= 6.0
    assert epsilon(mechanism, noise_multiplier=0.999 * noise, delta=1e-8, adjacency="replace") > 6.0


@pytest.mark.parametrize("adjacency", ["zero-out", "replace"])
def test_composition_with_another_run(adjacency):
    allocation = RandomAllocation(contribution_bound=1, rounds_per_epoch=6, iterations=60)
    poisson = PoissonSampling(contribution_bound=1, sampling_probability=1 / 6, iterations=60)
    settings = {"delta": 1e-8, "adjacency": adjacency}
    both = composed_epsilon([(allocation, 2.0), (poisson, 2.0)], **settings)
    assert both > max(epsilon(run, noise_multiplier=2.0, **settings) for run in (allocation, poisson))
    twice = RandomAllocation(contribution_bound=1, rounds_per_epoch=6, iterations=120)
    again = composed_epsilon([(allocation, 2.0)] * 2, **settings)
    assert again == pytest.approx(epsilon(twice, noise_multiplier=2.0, **settings), rel=2e-3)
