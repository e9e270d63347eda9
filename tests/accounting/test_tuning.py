"""The best of a random number of runs: its bound against exact calculations on small discrete mechanisms."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from coowned.accounting.gaussian import gaussian_log_delta, gaussian_mu
from coowned.accounting.tuning import NumberOfRuns, PrivacyProfile, tuned_delta, tuned_epsilon
from coowned.errors import InputError, UncertifiableError


def best_of(outcomes, law):
    """The probability that the best of K runs is each outcome; outcomes are in order, the last is the best."""
    total = sum(law.weights)
    ranks = np.concatenate([[0.0], np.cumsum(outcomes)])
    return np.diff(sum(weight / total * ranks**k for k, weight in enumerate(law.weights, start=1)))


def exact_delta(p, q, epsilon):
    factor = math.exp(epsilon)
    return max(np.maximum(p - factor * q, 0).sum(), np.maximum(q - factor * p, 0).sum())


def exact_epsilon(p, q, delta):
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if exact_delta(p, q, middle) <= delta else (middle, high)
    return high


def profile_of(p, q):
    losses = np.abs(np.log(p / q))
    epsilons = np.unique(np.concatenate([[0.0], losses, np.linspace(0, losses.max(), 20)]))
    return PrivacyProfile(epsilons=epsilons, deltas=np.array([exact_delta(p, q, epsilon) for epsilon in epsilons]))


def random_law(rng):
    kind = rng.integers(3)
    if kind == 0:
        return NumberOfRuns.geometric(float(rng.uniform(1, 10)))
    if kind == 1:  # Poisson, at least one run
        mean = rng.uniform(0.5, 6)
        return NumberOfRuns(tuple(int(2**40 * mean**k / math.factorial(k)) for k in range(1, 20)))
    return NumberOfRuns((*map(int, rng.integers(0, 100, rng.integers(1, 7))), 1))


def random_mechanism(rng, atoms):
    p = rng.dirichlet(np.ones(atoms))
    q = p * np.exp(rng.choice([0.3, 1.0, 2.0]) * rng.standard_normal(atoms))
    return p, q / q.sum()


def worst_mechanism(rng):
    """A random mechanism, the worst place of one rare outcome in the order, and the epsilon that results.

    Other outcomes are finely divided and in the order that hides the rare one least: likely ones first.
    """
    p, q = random_mechanism(rng, rng.integers(2, 6))
    order, parts = np.argsort(-p / q), 15
    rare, ratio = 10 ** rng.uniform(-5, -3), math.exp(rng.uniform(1, 6))
    p = np.repeat(p[order], parts) / parts * (1 - rare)
    q = np.repeat(q[order], parts) / parts * (1 - rare / ratio)
    return p, q, rare, rare / ratio


def ratio_to_exact(rng, law):
    p, q, rare_p, rare_q = worst_mechanism(rng)
    delta = rare_p * 10 ** rng.uniform(-2, 0)
    exact = max(
        exact_epsilon(best_of(np.insert(p, place, rare_p), law), best_of(np.insert(q, place, rare_q), law), delta)
        for place in range(0, len(p) + 1, 3)
    )
    bound = tuned_epsilon(profile_of(np.append(p, rare_p), np.append(q, rare_q)), law, delta)
    return bound / exact


def violations(bound, *, mechanisms, seed=0):
    """How often a bound on delta is below the exact delta of a random mechanism in a random order."""
    rng, found = np.random.default_rng(seed), 0
    for _ in range(mechanisms):
        law, (p, q) = random_law(rng), random_mechanism(rng, rng.integers(2, 9))
        epsilon = rng.uniform(0, 1.2) * np.abs(np.log(p / q)).max()
        exact = exact_delta(best_of(p, law), best_of(q, law), epsilon)
        found += bound(profile_of(p, q), law, epsilon) < exact * (1 - 1e-12)
    return found


def without_any_cost(profile, law, epsilon):
    return float(profile.divergences(np.array([math.exp(epsilon)]))[0])


def a_larger_delta_alone(profile, law, epsilon):
    return law.expected * without_any_cost(profile, law, epsilon)


def the_order_hides_nothing(profile, law, epsilon):
    """The rank of an outcome is taken to be the same in both worlds."""

    class Blind(PrivacyProfile):
        def largest_probabilities(self, probabilities):
            return probabilities

    return tuned_delta(Blind(epsilons=profile.epsilons, deltas=profile.deltas), law, epsilon)


def test_never_below_the_exact_delta():
    assert violations(tuned_delta, mechanisms=60) == 0


@pytest.mark.full
def test_never_below_the_exact_delta_of_many():
    assert violations(tuned_delta, mechanisms=500, seed=1) == 0


@pytest.mark.parametrize("wrong", [without_any_cost, a_larger_delta_alone, the_order_hides_nothing])
def test_wrong_bounds_are_noticed(wrong):
    assert violations(wrong, mechanisms=60) > 0


@pytest.mark.parametrize("mechanisms", [12, pytest.param(500, marks=pytest.mark.full)])
def test_near_the_exact_epsilon_in_the_worst_order(mechanisms):
    rng = np.random.default_rng(2)
    ratios = [ratio_to_exact(rng, NumberOfRuns.geometric(rng.choice([2, 4, 8]))) for _ in range(mechanisms)]
    assert min(ratios) >= 1
    assert np.median(ratios) <= 1.1


def hiding_order(p, q, law, epsilon, parts=40):
    """The same mechanism with every outcome divided, and the telling ones where the order hides their rank best.

    Neither changes its curve. All others are in order of their ratio p / q, the least likely under p being the best.
    """
    fine_p, fine_q = np.repeat(p, parts) / parts, np.repeat(q, parts) / parts
    ratio = fine_p / fine_q
    by_ratio = np.argsort(ratio, kind="stable")
    above_p, above_q = (np.clip(np.concatenate([[0.0], np.cumsum(side[by_ratio])]), 0, 1) for side in (fine_p, fine_q))
    place = np.empty(len(ratio))
    place[by_ratio] = np.arange(len(ratio))
    for value in np.unique(ratio):
        gains = law.slopes(1 - above_p) * value - math.exp(epsilon) * law.slopes(1 - above_q)
        if gains.max() > 0:
            place[ratio == value] = gains.argmax() - 0.5
    worst_first = np.argsort(place, kind="stable")[::-1]
    return fine_p[worst_first], fine_q[worst_first]


def ratios_to_the_worst_of_a_curve(rng):
    """The bound over the exact epsilon: of the worst mechanism found with a random curve, and in a random order."""
    law = NumberOfRuns.geometric(rng.choice([2, 4, 8]))
    p, q = random_mechanism(rng, rng.integers(2, 9))
    p, q = np.concatenate([p, q]) / 2, np.concatenate([q, p]) / 2  # the same curve in both directions
    profile, delta = profile_of(p, q), 10 ** rng.uniform(-6, -2)
    bound = tuned_epsilon(profile, law, delta)
    worst = hiding_order(p, q, law, 0.97 * bound)
    same = profile_of(*worst)
    np.testing.assert_allclose(np.interp(profile.epsilons, same.epsilons, same.deltas), profile.deltas, atol=1e-9)
    return [bound / exact_epsilon(*(best_of(side, law) for side in sides), delta) for sides in (worst, (p, q))]


@pytest.mark.parametrize("curves", [12, pytest.param(500, marks=pytest.mark.full)])
def test_no_bound_from_a_curve_alone_is_much_smaller(curves):
    """Every random curve has a mechanism that comes near the bound, though a random order is far from it."""
    rng = np.random.default_rng(3)
    worst, random_order = np.array([ratios_to_the_worst_of_a_curve(rng) for _ in range(curves)]).T
    assert worst.min() >= 1
    assert np.median(worst) <= 1.1
    assert np.median(random_order) > 1.2


def test_exact_probabilities_are_those_of_all_outcomes():
    """Enumerates every number of runs and everything they may give."""
    outcomes, law = np.array([0.2, 0.5, 0.3]), NumberOfRuns((3, 2, 5))
    found = Counter()
    for k, weight in enumerate(law.weights, start=1):
        for runs in itertools.product(range(3), repeat=k):
            found[max(runs)] += weight / 10 * math.prod(outcomes[run] for run in runs)
    np.testing.assert_allclose(best_of(outcomes, law), [found[0], found[1], found[2]], rtol=1e-12)


def gaussian_profile(mu, largest, points=300):
    epsilons = np.linspace(0, largest, points)
    return PrivacyProfile(epsilons=epsilons, deltas=np.exp([gaussian_log_delta(mu, epsilon) for epsilon in epsilons]))


def test_one_run_costs_what_it_costs_alone():
    profile, law = gaussian_profile(1.0, 6.0), NumberOfRuns.geometric(1)
    assert law.weights == (1,)
    for epsilon, delta in zip(profile.epsilons[::50], profile.deltas[::50], strict=True):
        assert delta <= tuned_delta(profile, law, epsilon) <= delta * (1 + 1e-6)


@pytest.mark.parametrize("epsilon", [2.0, 5.0, 8.0])
def test_never_above_the_published_bound(epsilon):
    """Koskela, Redberg & Wang (2024), for the geometric law, at the best of their free epsilon_1."""
    profile, share = gaussian_profile(1.0, 10.0, points=1000), 0.25
    law = NumberOfRuns(tuple(int(2**50 * (1 - share) ** k) for k in range(100)))
    ones = profile.epsilons
    shifts = 2 * np.log(np.exp(ones) + (1 - share) / share * profile.deltas)
    published = min(law.expected * profile.divergences(np.exp(epsilon - shifts[shifts <= epsilon])))
    assert tuned_delta(profile, law, epsilon) <= 1.01 * published


def test_bound_rises_with_the_number_of_runs_and_falls_with_epsilon():
    profile = gaussian_profile(1.0, 12.0)
    epsilons = [tuned_epsilon(profile, NumberOfRuns.geometric(expected), 1e-6) for expected in (1, 2, 8, 32)]
    assert epsilons == sorted(epsilons)
    assert epsilons[-1] > epsilons[0] + 1
    law = NumberOfRuns.geometric(8)
    deltas = [tuned_delta(profile, law, epsilon) for epsilon in (0.0, 1.0, 4.0, 12.0)]
    assert deltas == sorted(deltas, reverse=True)
    for delta in (1e-2, 1e-6):
        assert tuned_delta(profile, law, tuned_epsilon(profile, law, delta)) <= delta


def test_noise_of_tuning_by_law():
    """The figures of docs/accounting.md: a Gaussian mechanism at epsilon 8, delta 1e-8, 8 runs expected."""
    alone = gaussian_mu(8.0, 1e-8)
    poisson = NumberOfRuns(tuple(int(2**50 * 8.0**k / math.factorial(k)) for k in range(1, 60)))
    for law, noise in ((NumberOfRuns.geometric(8), 1.28), (poisson, 1.47)):
        above, below = (
            tuned_epsilon(gaussian_profile(alone / factor, 10.0), law, 1e-8) for factor in (noise - 0.01, noise + 0.01)
        )
        assert below < 8.0 < above


def test_a_profile_that_ends_too_early_is_refused():
    with pytest.raises(UncertifiableError, match="no epsilon is proven"):
        tuned_epsilon(gaussian_profile(1.0, 1.0), NumberOfRuns.geometric(8), 1e-6)


@pytest.mark.parametrize("expected", [1, 1.5, 2, 8, 100, 1000])
def test_mean_and_end_of_the_law(expected):
    law = NumberOfRuns.geometric(expected)
    assert law.expected == pytest.approx(expected, rel=1e-6)
    assert law.largest <= 4 * expected
    ratios = np.array(law.weights[1:]) / np.array(law.weights[:-1])
    np.testing.assert_allclose(ratios, ratios.mean() if len(ratios) else 0, rtol=1e-3)


def test_every_weight_is_drawn_exactly():
    law = NumberOfRuns((1, 2, 4))
    assert Counter(law.draw(word) for word in range(7000)) == {1: 1000, 2: 2000, 3: 4000}
    assert law.draw(2**64 - 1) is None  # 2**64 = 7 * n + 2
    assert law.draw(2**64 - 3) == 3


def test_bad_laws_and_profiles_are_refused():
    with pytest.raises(InputError, match="expected_runs must be a number in"):
        NumberOfRuns.geometric(0.5)
    with pytest.raises(InputError, match="weights of a number of runs"):
        NumberOfRuns(())
    with pytest.raises(InputError, match="increase from 0"):
        PrivacyProfile(epsilons=np.array([1.0]), deltas=np.array([0.1]))
