"""The accountant is never below the truth. The references here share no code with it."""

import itertools
import math

import hypothesis
import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.special import logsumexp
from scipy.stats import binom, norm

from coowned.accounting.composition import tilted
from coowned.accounting.composition.steps import Composition, Steps
from coowned.accounting.composition.tilted import TiltedTail
from coowned.errors import UncertifiableError


def composition(copies, probability, noise, repetitions, adjacency="zero-out", **options):
    steps = Steps(copies=copies, probability=probability, noise_multiplier=noise, repetitions=repetitions)
    return Composition([steps], adjacency, **options)


# -- references ----------------------------------------------------------------------------------------------------


def gaussian_delta(mu, epsilon):
    """Closed form in 60 digits."""
    with mpmath.workdps(60):
        mu, epsilon = mpmath.mpf(mu), mpmath.mpf(epsilon)
        return mpmath.ncdf(mu / 2 - epsilon / mu) - mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)


class OneStep:
    """delta of one step by its definition: P(A) - e^eps Q(A) on the best half line A."""

    def __init__(self, copies, probability, noise, adjacency):
        self.counts = np.arange(copies + 1)
        self.weights = binom.pmf(self.counts, copies, probability)
        self.noise, self.replace = noise, adjacency == "replace"

    def densities(self, x):
        first = float(self.weights @ norm.pdf(x, self.counts, self.noise))
        second = self.weights @ norm.pdf(x, -self.counts, self.noise) if self.replace else norm.pdf(x, 0, self.noise)
        return first, float(second)

    def loss(self, x):
        def log_density(sign):
            exponent = (sign * self.counts * x - self.counts**2 / 2) / self.noise**2
            return logsumexp(exponent, b=self.weights)

        return float(log_density(1) - (log_density(-1) if self.replace else 0.0))

    def delta(self, epsilon, direction):
        """For any real epsilon."""
        if direction == "lower":  # base against mixture: A is a lower half line
            lowest = math.log(self.weights[0]) if self.weights[0] > 0 and not self.replace else -math.inf
            if -epsilon <= lowest:
                return 0.0
            x = brentq(lambda y: self.loss(y) + epsilon, -4000, 4000, xtol=1e-13)
            return float(
                norm.cdf(x, 0, self.noise) - math.exp(epsilon) * (self.weights @ norm.cdf(x, self.counts, self.noise))
            )
        lowest = math.log(self.weights[0]) if not self.replace and self.weights[0] > 0 else -math.inf
        if epsilon <= lowest:
            return -math.expm1(epsilon)
        if self.loss(4000.0) <= epsilon:
            return 0.0
        x = brentq(lambda y: self.loss(y) - epsilon, -4000, 4000, xtol=1e-13)
        below = self.weights @ norm.sf(x, -self.counts, self.noise) if self.replace else norm.sf(x, 0, self.noise)
        return float(self.weights @ norm.sf(x, self.counts, self.noise) - math.exp(epsilon) * below)

    def delta_of_two(self, epsilon, direction):
        """Two steps: the second's delta at what the first left over, averaged over the first."""
        reach = self.counts[-1] + 12 * self.noise

        def integrand(x):
            first, second = self.densities(x)
            if direction == "lower":
                return second * self.delta(epsilon + self.loss(x), direction)
            return first * self.delta(epsilon - self.loss(x), direction)

        low = -reach if self.replace else -12 * self.noise
        pieces = np.linspace(low, reach, 9)
        return sum(
            quad(integrand, a, b, epsabs=1e-14, epsrel=1e-7, limit=100)[0] for a, b in itertools.pairwise(pieces)
        )


def lower_estimate(copies, probability, noise, repetitions, delta, adjacency, direction, near):
    """An epsilon that is certainly not above the true one.

    The output is rounded to cells (post-processing cannot lose privacy) and each cell's loss is rounded DOWN to a grid.
    Composed under a tilt; `near` only chooses the tilt. What could wrap around or be round-off is subtracted.
    """
    counts = np.arange(copies + 1)
    weights = binom.pmf(counts, copies, probability)
    edges = np.linspace(-9 * noise - (copies if adjacency == "replace" else 0), copies + 9 * noise, 12001)

    def cell_masses(sign):
        z = (edges[None, :] - sign * counts[:, None]) / noise
        upper, lower = norm.sf(z), norm.cdf(z)
        return weights @ np.where(z[:, :-1] > 0, upper[:, :-1] - upper[:, 1:], lower[:, 1:] - lower[:, :-1])

    first = cell_masses(1)
    second = cell_masses(-1) if adjacency == "replace" else np.diff(norm.cdf(edges / noise))
    if direction == "lower":
        first, second = second, first
    keep = (first > 1e-30) & (second > 1e-280) & (first > 0.05 * second)  # dropping mass of P only lowers delta
    mass, loss = first[keep], np.log(first[keep] / second[keep])
    spacing, size = 6e-3 / repetitions, 2**21
    index = np.floor(np.minimum(loss, near + 8) / spacing).astype(np.int64)
    loss = index * spacing

    def log_moment(tilt):
        return repetitions * math.log(float(mass @ np.exp(tilt * loss)))

    def mean(tilt):
        weight = mass * np.exp(tilt * loss)
        return repetitions * float(weight @ loss / weight.sum())

    high = 0.5
    while mean(high) < near:
        high *= 2
        if high > 100:
            return 0.0  # this direction never comes near: certainly not above the true epsilon
    tilt = 0.8 * brentq(lambda t: mean(t) - near, 0.0, high)
    half = size * spacing / 2
    outside = [
        math.exp(log_moment(tilt + step) - log_moment(tilt) - step * (near + math.copysign(half, step)))
        for step in (-1.0, -0.5, 0.5, 1.0)
    ]
    wrapped = min(outside[:2]) + min(outside[2:])
    assert wrapped < 1e-6
    weight = mass * np.exp(tilt * loss)
    weight /= weight.sum()
    law = np.fft.irfft(np.fft.rfft(np.bincount(index % size, weights=weight, minlength=size)) ** repetitions, size)
    start = round((near - half) / spacing)
    law = np.maximum(np.roll(law, -(start % size)) - 1e-14 * repetitions * law.max(), 0.0)
    total = (start + np.arange(size)) * spacing

    def excess(epsilon):
        above = total > epsilon
        untilt = np.exp(log_moment(tilt) - tilt * total[above]) * -np.expm1(epsilon - total[above])
        return float(law[above] @ untilt) - wrapped * float(untilt.max()) - delta

    if excess(0.5 * near) < 0:
        return 0.0
    return brentq(excess, 0.5 * near, 1.5 * near, xtol=1e-9)


# -- never below ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("copies", "noise", "repetitions", "delta", "adjacency"),
    [
        (1, 500.0, 10**6, 1e-12, "zero-out"),
        (1, 10_000.0, 10**6, 1e-12, "replace"),
        (3, 200.0, 10**4, 1e-10, "zero-out"),
        (1000, 1000.0, 100, 1e-6, "zero-out"),
        (1, 1.0, 1, 1e-12, "zero-out"),
        (2, 0.4, 1, 1e-3, "replace"),
        (1, 40.0, 1, 1e-3, "zero-out"),
    ],
)
def test_never_below_the_closed_form(copies, noise, repetitions, delta, adjacency):
    # p = 1: one Gaussian of sensitivity k, 2k for replace, composed by the machine and not by the closed form.
    answer = composition(copies, 1.0, noise, repetitions, adjacency, merge_gaussians=False).epsilon(delta)
    mu = mpmath.mpf(copies) * mpmath.sqrt(repetitions) / noise * (2 if adjacency == "replace" else 1)
    assert gaussian_delta(mu, answer.epsilon) <= delta
    assert gaussian_delta(mu, answer.epsilon * 0.9995) > delta or answer.epsilon < 1e-3
    assert answer.error_share < 0.01


@pytest.mark.parametrize("adjacency", ["zero-out", "replace"])
@pytest.mark.parametrize(
    ("copies", "probability", "noise", "delta"),
    [
        (1, 0.5, 1.0, 1e-3),
        (3, 0.1, 0.8, 1e-5),
        (1, 1e-6, 0.3, 1e-9),
        (8, 0.3, 4.0, 1e-8),
        (2, 0.01, 0.25, 1e-6),
        (1, 0.9, 0.09, 1e-3),
    ],
)
def test_never_below_quadrature_of_one_step(copies, probability, noise, delta, adjacency):
    step = OneStep(copies, probability, noise, adjacency)
    found = composition(copies, probability, noise, 1, adjacency).epsilon(delta).epsilon
    directions = ["upper"] if adjacency == "replace" else ["upper", "lower"]
    assert max(step.delta(found, direction) for direction in directions) <= delta * (1 + 1e-9)
    assert max(step.delta(found * 0.999 - 1e-4, direction) for direction in directions) > delta


@pytest.mark.parametrize(
    ("copies", "probability", "noise", "delta", "adjacency"),
    [(1, 0.2, 1.0, 1e-6, "zero-out"), (3, 0.05, 0.9, 1e-8, "replace"), (2, 0.3, 2.0, 1e-4, "zero-out")],
)
def test_never_below_quadrature(copies, probability, noise, delta, adjacency):
    step = OneStep(copies, probability, noise, adjacency)
    found = composition(copies, probability, noise, 2, adjacency).epsilon(delta).epsilon
    directions = ["upper"] if adjacency == "replace" else ["upper", "lower"]
    assert max(step.delta_of_two(found, direction) for direction in directions) <= delta * (1 + 1e-6)
    assert max(step.delta_of_two(found * 0.998, direction) for direction in directions) > delta


@pytest.mark.parametrize(
    ("copies", "probability", "noise", "repetitions", "delta", "adjacency"),
    [
        (3, 0.01, 1.0, 300, 1e-8, "zero-out"),
        (2, 0.02, 1.2, 200, 1e-8, "replace"),
        (1, 0.004, 0.6, 200, 1e-7, "zero-out"),
        (5, 0.1, 4.0, 100, 1e-10, "zero-out"),
    ],
)
def test_never_below_the_lower_estimate(copies, probability, noise, repetitions, delta, adjacency):
    found = composition(copies, probability, noise, repetitions, adjacency).epsilon(delta).epsilon
    directions = ["upper"] if adjacency == "replace" else ["upper", "lower"]
    below = max(
        lower_estimate(copies, probability, noise, repetitions, delta, adjacency, direction, found)
        for direction in directions
    )
    assert below <= found
    assert below >= found * 0.99  # the estimate is near enough to notice an accountant that is a per cent too low


def test_the_references_would_notice(monkeypatch):
    original = tilted.ComposedLoss.__init__

    def optimistic(self, atoms, repetitions):
        original(self, atoms, repetitions)
        self.loss_error = -0.02  # as if every loss were two hundredths smaller

    monkeypatch.setattr(tilted.ComposedLoss, "__init__", optimistic)
    found = composition(3, 0.1, 0.8, 1).epsilon(1e-5).epsilon
    assert OneStep(3, 0.1, 0.8, "zero-out").delta(found, "upper") > 1e-5
    closed = composition(1, 1.0, 500.0, 10**6, merge_gaussians=False).epsilon(1e-12).epsilon
    assert gaussian_delta(2.0, closed) > 1e-12
    step = (5, 0.1, 4.0, 100, 1e-10, "zero-out")
    found = composition(*step[:4]).epsilon(step[4]).epsilon
    assert lower_estimate(*step, "upper", found) > found


@pytest.mark.parametrize("share", [0.0, 0.01, 1.0, 30.0, 1e4, 1e7])
@pytest.mark.parametrize("largest_share", [0.0, 0.5, 0.95])
def test_no_tilt_gives_less_than_the_truth(share, largest_share):
    # A bad tilt may make the bound useless, never wrong: far from its centre masses underflow and must be charged.
    for copies, probability, noise in ((6, 0.375, 0.25), (1, 0.01, 0.5)):
        step = OneStep(copies, probability, noise, "zero-out")
        loss = composition(copies, probability, noise, 1).losses(log_delta=-25.0, spacing=0.01, growth=0.05)["upper"]
        near = 0.6 * loss.largest
        tail = TiltedTail(loss, share * loss.tilt_for_mean(near), near, -25.0, largest_share)
        for epsilon in (0.01, 0.1 * near, 0.4 * near, 0.9 * near, near, 1.3 * near):
            exact = step.delta(epsilon, "upper")
            assert tail.at(epsilon).log_delta >= (math.log(exact) - 1e-9 if exact > 1e-14 else -math.inf)


@pytest.mark.parametrize("share", [1.0, 1.5, 3.0, 10.0])
@pytest.mark.parametrize("largest_share", [0.5, 0.95])
def test_a_dominating_draw_is_not_forgotten(share, largest_share):
    # On a coarse grid an unfit tilt moves nearly all mass to one atom that is a draw, and it is no sum without a draw.
    for copies, probability, noise in ((1, 0.3, 0.2), (1, 0.5, 0.1)):
        step = OneStep(copies, probability, noise, "zero-out")
        loss = composition(copies, probability, noise, 1).losses(log_delta=-25.0, spacing=0.5, growth=0.5)["upper"]
        loss = loss.capped(60.0)
        near = 0.6 * loss.largest
        tail = TiltedTail(loss, share * loss.tilt_for_mean(near), near, -25.0, largest_share)
        for epsilon in (0.5 * near, near, 1.3 * near):
            assert tail.at(epsilon).log_delta >= math.log(step.delta(epsilon, "upper")) - 1e-9


# -- the curve and the search --------------------------------------------------------------------------------------


def test_delta_and_epsilon_are_inverse():
    steps = composition(3, 0.01, 1.0, 500)
    answer = steps.epsilon(1e-9)
    assert steps.deltas([answer.epsilon])[0].delta == pytest.approx(1e-9, rel=2e-3)


def test_neighbours_that_share_a_transform_agree_with_single_ones():
    steps = composition(2, 0.02, 1.0, 400)
    points = [0.0, 0.5, 1.0, 1.5, 2.0, 4.0, 8.0]
    together = [answer.delta for answer in steps.deltas(points)]
    alone = [steps.deltas([point])[0].delta for point in points]
    np.testing.assert_allclose(together, alone, rtol=3e-3)
    assert together == sorted(together, reverse=True)


def test_both_directions_count():
    # Near p = 1 and for one step the reverse direction is the larger one.
    steps = composition(1, 0.9, 0.5, 1)
    forward, backward = composition(1, 0.9, 0.5, 1), composition(1, 0.9, 0.5, 1)
    forward.directions, backward.directions = ("upper",), ("lower",)
    pairs = [s.deltas([1.0])[0].delta for s in (forward, backward)]
    assert steps.deltas([1.0])[0].delta == pytest.approx(max(pairs))
    step = OneStep(1, 0.9, 0.5, "zero-out")
    assert pairs == pytest.approx([step.delta(1.0, "upper"), step.delta(1.0, "lower")], rel=2e-3)


def test_epsilon_is_zero_where_delta_is_above_the_total_variation():
    assert composition(1, 1e-6, 0.08, 1).epsilon(1e-3).epsilon == 0.0


def test_refused_where_errors_would_take_too_much(monkeypatch):
    original = tilted.TiltedTail.__init__

    def noisy(self, *arguments, **named):
        original(self, *arguments, **named)
        self._error = 1e-3  # of every bin: as if the transform were in half precision

    monkeypatch.setattr(tilted.TiltedTail, "__init__", noisy)
    with pytest.raises(UncertifiableError, match="larger delta"):
        composition(3, 0.01, 1.0, 500).epsilon(1e-9)


@settings(max_examples=25)
@given(
    copies=st.sampled_from([1, 2, 5, 12]),
    log_probability=st.floats(-4, -0.05),
    log_noise=st.floats(0, 1.5),
    log_repetitions=st.floats(0, 3),
    log_delta=st.floats(-12, -3),
    adjacency=st.sampled_from(["zero-out", "replace"]),
)
def test_random_mechanisms_are_consistent(copies, log_probability, log_noise, log_repetitions, log_delta, adjacency):
    probability, noise = 10**log_probability, 10**log_noise
    repetitions, delta = int(10**log_repetitions), 10**log_delta
    full = copies * math.sqrt(repetitions) / noise * (2 if adjacency == "replace" else 1)
    hypothesis.assume(full < 30)  # the reference takes exp(epsilon)
    answer = composition(copies, probability, noise, repetitions, adjacency).epsilon(delta)
    # From above: drawing every copy every time is worse, and zero-concentrated DP bounds that. From below: one step.
    assert answer.epsilon <= full**2 / 2 + full * math.sqrt(-2 * math.log(delta)) + 1e-3
    assert OneStep(copies, probability, noise, adjacency).delta(answer.epsilon, "upper") <= delta * (1 + 1e-9) + 1e-16
    assert answer.error_share <= 0.01
    assert answer.looseness <= 0.001 * max(answer.epsilon, 0.01)


@pytest.mark.parametrize("adjacency", ["zero-out", "replace"])
@pytest.mark.parametrize(
    ("copies", "probability", "iterations", "noise", "delta"),
    [(1, 1e-14, 100, 1.0, 1e-15), (1, 1e-15, 100, 1.0, 1e-15), (2, 8.8e-12, 536, 453.0, 1.4e-15)],
)
def test_hardly_ever_drawn(copies, probability, iterations, noise, delta, adjacency):
    """The law without the rare draw is a single atom, which no tilt moves."""
    steps = Steps(copies=copies, probability=probability, noise_multiplier=noise, repetitions=iterations)
    found = Composition([steps], adjacency).epsilon(delta).epsilon
    assert 0 <= found < 1e-6
