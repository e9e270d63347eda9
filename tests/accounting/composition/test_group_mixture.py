"""One step: exact weights, an inverse that is one, and atoms that keep both masses."""

import math
from fractions import Fraction

import numpy as np
import pytest
from dp_accounting.pld import pld_pmf
from scipy.stats import norm

from coowned.accounting.composition.group_mixture import (
    binomial_log_weights,
    discretize,
    gaussian_pair,
    loss_and_slope,
    mixture_pair,
)
from coowned.accounting.composition.tilted import ComposedLoss, TiltedTail


@pytest.mark.parametrize(("copies", "probability"), [(1, 0.3), (5, 1e-6), (40, 0.5), (1000, 0.999), (1000, 1e-6)])
def test_binomial_weights_are_accurate(copies, probability):
    logs = binomial_log_weights(copies, probability)
    p = Fraction(probability)
    for i in {0, 1, copies // 2, copies}:
        exact = math.comb(copies, i) * p**i * (1 - p) ** (copies - i)
        log_exact = math.log(exact.numerator >> 0) - math.log(exact.denominator)
        # The reference itself subtracts two logarithms of thousands of digits.
        assert logs[i] == pytest.approx(log_exact, abs=1e-9 * (1 + abs(log_exact)))
    assert math.fsum(np.exp(logs)) == pytest.approx(1.0, abs=1e-13)


def test_certain_coins_leave_one_component():
    pair = mixture_pair(copies=5, probability=1.0, noise_multiplier=2.0, adjacency="zero-out", log_cut=-50.0)
    np.testing.assert_array_equal(pair.upper.means, [2.5])
    assert pair.log_cut == -math.inf


def test_cut_weights_are_charged():
    pair = mixture_pair(copies=100, probability=0.01, noise_multiplier=1.0, adjacency="replace", log_cut=math.log(1e-9))
    assert 0 < math.exp(pair.log_cut) <= 1e-9
    assert np.exp(pair.upper.log_weights).sum() + math.exp(pair.log_cut) == pytest.approx(1.0, abs=1e-14)


@pytest.mark.parametrize("adjacency", ["zero-out", "replace"])
def test_loss_is_the_log_ratio_of_densities(adjacency):
    pair = mixture_pair(copies=3, probability=0.2, noise_multiplier=1.5, adjacency=adjacency, log_cut=-60.0)
    x = np.linspace(-4, 6, 31)
    upper = np.exp(pair.upper.log_weights) @ norm.pdf(x[None, :], pair.upper.means[:, None])
    lower = np.exp(pair.lower.log_weights) @ norm.pdf(x[None, :], pair.lower.means[:, None])
    loss, slope = loss_and_slope(pair, x)
    np.testing.assert_allclose(loss, np.log(upper / lower), atol=1e-12)
    np.testing.assert_allclose(slope, (loss_and_slope(pair, x + 1e-6)[0] - loss) / 1e-6, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("adjacency", ["zero-out", "replace"])
@pytest.mark.parametrize(("spacing", "growth"), [(1e-3, 0.02), (1e-6, 0.05), (0.05, 0.5)])
def test_atoms_keep_both_masses(adjacency, spacing, growth):
    pair = mixture_pair(copies=4, probability=0.1, noise_multiplier=1.0, adjacency=adjacency, log_cut=-60.0)
    for atoms in discretize(pair, spacing=spacing, growth=growth, log_tail=-50.0).values():
        mass = np.exp(atoms.log_mass)
        assert 1 <= mass.sum() + math.exp(atoms.log_infinity) <= 1 + 1e-11  # never less than 1: errors only add
        assert float(mass @ np.exp(-atoms.loss)) == pytest.approx(1.0, abs=1e-9)  # the mass of Q
        assert np.all(np.diff(atoms.index) > 0)
        assert atoms.loss_error < 1e-12


def test_a_coarser_grid_is_never_smaller():
    pair = mixture_pair(copies=3, probability=0.05, noise_multiplier=0.8, adjacency="zero-out", log_cut=-60.0)

    def delta(atoms, epsilon):
        above = atoms.loss > epsilon
        return math.fsum(np.exp(atoms.log_mass[above]) * -np.expm1(epsilon - atoms.loss[above]))

    fine = discretize(pair, spacing=1e-4, growth=0.005, log_tail=-50.0)
    coarse = discretize(pair, spacing=1e-2, growth=0.3, log_tail=-50.0)
    for direction, atoms in fine.items():
        for epsilon in (0.0, 0.03, 0.5, 2.0, 6.0):
            assert delta(coarse[direction], epsilon) >= delta(atoms, epsilon) * (1 - 1e-5)  # the grids are not nested


def test_capping_moves_mass_to_infinity():
    atoms = discretize(gaussian_pair(shift=1.0, adjacency="zero-out"), spacing=0.01, growth=0.02, log_tail=-40.0)[
        "upper"
    ]
    capped = atoms.capped(1.0)
    assert capped.loss[-1] <= 1.0
    total = np.exp(capped.log_mass).sum() + math.exp(capped.log_capped)
    assert total == pytest.approx(np.exp(atoms.log_mass).sum(), abs=1e-14)
    assert atoms.capped(1e9) is atoms


@pytest.mark.parametrize("adjacency", ["zero-out", "replace"])
def test_dp_accounting_composes_our_atoms_to_the_same(adjacency):
    pair = mixture_pair(copies=3, probability=0.05, noise_multiplier=1.0, adjacency=adjacency, log_cut=-50.0)
    for direction, atoms in discretize(pair, spacing=2e-3, growth=0.01, log_tail=-45.0).items():
        masses = {int(i): float(m) for i, m in zip(atoms.index, np.exp(atoms.log_mass), strict=True)}
        theirs = pld_pmf.create_pmf(masses, atoms.spacing, math.exp(atoms.log_infinity), True).self_compose(50)
        loss = ComposedLoss([atoms], [50])
        for epsilon in (0.5, 2.0, 6.0):
            their_delta = float(theirs.get_delta_for_epsilon(epsilon))
            tail = TiltedTail(loss, loss.tilt_for_mean(epsilon), epsilon, math.log(their_delta), 0.95)
            assert math.exp(tail.at(epsilon).log_delta) == pytest.approx(their_delta, rel=1e-4), direction
