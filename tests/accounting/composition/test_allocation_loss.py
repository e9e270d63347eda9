"""One epoch of random allocation from below: closed forms, quadrature and trials, in both directions."""

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import ndtr

from coowned import RandomAllocation, epsilon
from coowned.accounting.composition import allocation_loss
from coowned.accounting.composition.allocation_loss import allocation_atoms
from coowned.accounting.composition.steps import Composition
from coowned.accounting.gaussian import gaussian_epsilon, gaussian_log_delta
from coowned.errors import UncertifiableError
from coowned.mechanism.mechanism import Steps


def deltas(atoms, epsilon):
    """delta(epsilon) of each direction of one epoch, straight from its atoms."""
    return {
        direction: math.exp(own.log_infinity)
        + float(np.exp(own.log_mass) @ np.maximum(-np.expm1(epsilon - own.loss - own.loss_error), 0.0))
        for direction, own in atoms.items()
    }


def epoch(rounds, run, noise_multiplier, log_tail=-60.0):
    return allocation_atoms(
        rounds=rounds, run=run, noise_multiplier=noise_multiplier, spacing=1e-6, growth=2e-3, log_tail=log_tail
    )


def _above(c, r):
    """E (M - c)+ of M = exp(r G - r^2 / 2)."""
    if c <= 0:
        return 1 - c
    d = r / 2 - math.log(c) / r
    return float(ndtr(d) - c * ndtr(d - r))


def _below(c, r):
    """E (c - M)+."""
    if c <= 0:
        return 0.0
    d = r / 2 - math.log(c) / r
    return float(c * ndtr(r - d) - ndtr(-d))


def _expected(function, count, c, r):
    """The same of a sum of `count` such M, the last one in closed form."""
    if count == 1:
        return function(c, r)
    kink = min(max(math.log(max(c, 1e-9)) / r + r / 2, -8.0), 8.0)
    return quad(
        lambda g: math.exp(-g * g / 2) * _expected(function, count - 1, c - math.exp(r * g - r * r / 2), r),
        -9.0, 9.0 + r, points=[0.0, kink], epsabs=1e-12, epsrel=1e-7, limit=200,
    )[0] / math.sqrt(2 * math.pi)  # fmt: skip


def exact(rounds, run, noise_multiplier, epsilon):
    """By quadrature of hockey-stick divergences: P is (1/t) sum of N(e_i), Q is N(0)."""
    r, a, missed = 1 / noise_multiplier, math.exp(epsilon), rounds - run
    return {
        "upper": _expected(_above, run, rounds * a - missed, r) / rounds,
        "lower": _expected(_below, run, rounds / a - missed, r) * a / rounds,
    }


CASES = [
    *((2, 2, 1.0, value) for value in (0.0, 0.5, 2.0, 4.0)),
    *((2, 2, 0.5, value) for value in (0.0, 1.0, 5.0, 9.0)),
    *((2, 2, 5.0, value) for value in (0.0, 0.1, 0.4)),
    *((2, 1, 0.7, value) for value in (0.0, 1.0, 3.0)),
    *((3, 2, 1.5, value) for value in (0.0, 0.3, 1.0)),
]
SLOW_CASES = [(3, 3, 1.0, 0.0), (3, 3, 1.0, 1.0), (3, 3, 1.0, 3.0), (3, 3, 0.6, 2.0)]


def check(rounds, run, noise_multiplier, epsilon):
    found = deltas(epoch(rounds, run, noise_multiplier), epsilon)
    truth = exact(rounds, run, noise_multiplier, epsilon)
    for direction, delta in truth.items():
        assert found[direction] >= delta * (1 - 1e-7) - 1e-11  # what quadrature may be off by
        assert found[direction] <= delta * (1 + 2e-3) + 1e-10


@pytest.mark.parametrize(("rounds", "run", "noise_multiplier", "epsilon"), CASES)
def test_never_below_quadrature_and_close(rounds, run, noise_multiplier, epsilon):
    """At most 0.2% above it in delta."""
    check(rounds, run, noise_multiplier, epsilon)


@pytest.mark.full
@pytest.mark.parametrize(("rounds", "run", "noise_multiplier", "epsilon"), SLOW_CASES)
def test_never_below_quadrature_of_three_rounds(rounds, run, noise_multiplier, epsilon):
    check(rounds, run, noise_multiplier, epsilon)


@pytest.mark.parametrize("factor", [0.998, 1.002])
def test_the_quadrature_would_notice_wrong_sums(monkeypatch, factor):
    """Sums that are 0.2% too small are optimistic in one direction, sums too large in the other."""
    honest = allocation_loss.add_masses
    monkeypatch.setattr(
        allocation_loss,
        "add_masses",
        lambda x, p, y, q, nodes, mass: honest(factor * x, p, factor * y, q, nodes, mass),
    )
    allocation_loss.mean_law.cache_clear()
    with pytest.raises(AssertionError):
        check(2, 2, 1.0, 2.0)
    allocation_loss.mean_law.cache_clear()


@pytest.mark.parametrize("noise_multiplier", [0.05, 0.5, 3.0])
def test_one_round_is_the_gaussian(noise_multiplier):
    for value in (0.0, 1.0, 3.0):
        found = deltas(epoch(1, 1, noise_multiplier), value)
        truth = math.exp(gaussian_log_delta(1 / noise_multiplier, value))
        for direction in ("upper", "lower"):
            assert truth * (1 - 1e-9) <= found[direction] <= truth * (1 + 2e-3) + 1e-12


def test_both_directions_hold_whole_laws():
    """P and Q have mass 1 each, at least, and the mean of exp(-loss) is 1 up to what was cut."""
    for rounds, run, noise_multiplier in ((7, 7, 0.8), (46, 46, 1.0), (46, 13, 2.0)):
        for own in epoch(rounds, run, noise_multiplier).values():
            mass = np.exp(own.log_mass)
            assert 1 - 1e-12 <= mass.sum() + math.exp(own.log_infinity) <= 1 + 1e-8
            assert mass @ np.exp(-own.loss) == pytest.approx(1.0, abs=1e-7)


@pytest.mark.parametrize(
    ("rounds", "epochs", "noise_multiplier"), [(46, 1, 0.5), pytest.param(46, 6, 0.8, marks=pytest.mark.full)]
)
def test_large_epochs_against_trials(rounds, epochs, noise_multiplier):
    """delta = E_P (1 - e^eps / L)+ by 1e5 trials; Hoeffding's bounds, false-alarm probability 1e-7 for each of 6."""
    trials, r = 100_000, 1 / noise_multiplier
    generator = np.random.default_rng(3)
    loss = np.zeros(trials)
    for _ in range(epochs):
        own = np.zeros(trials)
        for number in range(rounds):  # the copy's round is the first: all are alike
            g = generator.standard_normal(trials, dtype=np.float32).astype(np.float64) + (r if number == 0 else 0.0)
            own += np.exp(r * g - r * r / 2)
        loss += np.log(own / rounds)
    slack = math.sqrt(math.log(2e7) / (2 * trials))
    steps = Steps(
        copies=1,
        probability=1 / rounds,
        noise_multiplier=noise_multiplier,
        repetitions=rounds * epochs,
        rounds_per_epoch=rounds,
    )
    for value in (0.0, 0.3, 1.0):
        measured = float(np.maximum(-np.expm1(value - loss), 0.0).mean())
        found = Composition([steps], "zero-out").deltas([value])[0].delta
        assert measured - slack <= found <= measured + slack


def test_no_worse_than_known_rounds():
    """Not knowing the round never costs: epsilon is at most that of a Gaussian for each epoch."""
    for rounds, noise_multiplier in ((2, 5.0), (3, 1.0), (8, 0.3), (40, 0.06), (4, 0.02)):
        mechanism = RandomAllocation(contribution_bound=1, rounds_per_epoch=rounds, iterations=2 * rounds)
        found = epsilon(mechanism, noise_multiplier=noise_multiplier, delta=1e-6, adjacency="zero-out")
        known = gaussian_epsilon(math.sqrt(2) / noise_multiplier, 1e-6)
        assert found <= known * (1 + 2e-4)


@pytest.mark.parametrize(("rounds", "noise_multiplier", "delta"), [(6, 0.9, 1e-10), (46, 3.0, 1e-10)])
def test_finer_nodes_change_little(monkeypatch, rounds, noise_multiplier, delta):
    """Half the distance of nodes gives 0.05% less at most, a quarter next to nothing more; double never gives less."""
    mechanism = RandomAllocation(contribution_bound=1, rounds_per_epoch=rounds, iterations=10 * rounds)
    found = []
    for fineness in (0.02, 0.01, 0.005):
        monkeypatch.setattr(allocation_loss, "FINENESS", fineness)
        found.append(epsilon(mechanism, noise_multiplier=noise_multiplier, delta=delta, adjacency="zero-out"))
    assert found[0] >= found[1] * (1 - 1e-4)
    assert found[1] * (1 - 5e-4) <= found[2] <= found[1] * (1 + 1e-4)


def test_any_tail_is_an_upper_bound():
    """What is cut is charged: a short range makes delta larger, never smaller."""
    truth = exact(2, 2, 1.0, 2.0)
    for log_tail in (-3.0, -10.0, -200.0):
        found = deltas(epoch(2, 2, 1.0, log_tail), 2.0)
        assert all(found[direction] >= truth[direction] * (1 - 1e-7) for direction in truth)


def test_more_than_one_copy_is_not_composed():
    steps = Steps(copies=2, probability=0.5, noise_multiplier=1.0, repetitions=4, rounds_per_epoch=2)
    with pytest.raises(UncertifiableError, match="one copy"):
        Composition([steps], "zero-out")
    one = Steps(copies=1, probability=0.5, noise_multiplier=1.0, repetitions=4, rounds_per_epoch=2)
    with pytest.raises(UncertifiableError, match="zero-out only"):
        Composition([one], "replace")
