"""The whole-curve audit: honest mechanisms pass, a wrong one does not, and its arithmetic is exact.

Every honest audit here may alarm falsely with probability 1e-3 at most; seeds are fixed, so that a pass is repeatable.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import binom, binomtest, norm
from tests.audit import planted_bugs

from coowned import CyclicPoisson, MinSeparation, PoissonSampling, threads
from coowned.accounting.curve import epsilon_curve
from coowned.audit import noise_law, release
from coowned.audit.audited_parts import AuditedParts
from coowned.audit.checks import lower_bound, upper_bound
from coowned.audit.claims import USERS, MechanismClaim
from coowned.audit.mechanism_audit import audit_mechanism, judge
from coowned.audit.worst_case import Scores, WorstCase
from coowned.errors import InputError
from coowned.mechanism import clipping, fused_clipping, tiled_clipping
from coowned.mechanism.banded_strategy import BandedStrategy
from coowned.mechanism.batching import CyclicPoissonBatches
from coowned.mechanism.fused_clipping import RowsInPlace
from coowned.mechanism.keys import RunKey
from coowned.training.step import compiled_step

POISSON = PoissonSampling(contribution_bound=2, sampling_probability=0.1, iterations=10, batch_size=8)
SCHEDULE = MinSeparation(contribution_bound=3, min_separation=3, num_bands=3, iterations=10, batch_size=4)
CYCLIC = CyclicPoisson(
    contribution_bound=2, iterations=10, num_groups=3, num_bands=3, group_probabilities=(0.25, 0.1, 0.5), batch_size=4
)
MECHANISMS = {"poisson": POISSON, "schedule": SCHEDULE, "cyclic": CYCLIC}


def audit(mechanism, adjacency="zero-out", *, trials=20_000, seed=0, **more):
    return audit_mechanism(
        mechanism,
        noise_multiplier=1.0,
        adjacency=adjacency,
        trials=trials,
        run_key=RunKey.from_seed(seed),
        **more,
    )


@pytest.mark.parametrize("adjacency", ["zero-out", "replace"])
@pytest.mark.parametrize("name", MECHANISMS)
def test_honest_mechanisms_pass(name, adjacency):
    found = audit(MECHANISMS[name], adjacency)
    assert found.holds
    # Not for want of trying: nearly all of the claimed curve is reached.
    best = max(found.figures, key=lambda figure: figure.delta if figure.measured_delta > 0 else 0)
    assert best.measured_delta > 0.8 * best.delta - 0.02
    assert found.epsilon_lower_bound(1e-5) <= MechanismClaim(
        mechanism=MECHANISMS[name], noise_multiplier=1.0, adjacency=adjacency
    ).epsilon_at(1e-5)


def test_honest_user_in_a_crowd_passes():
    assert audit(planted_bugs.CROWD, trials=1000, users_at_once=1).holds


@pytest.mark.parametrize("name", MECHANISMS)
def test_half_the_noise_is_caught(name):
    found = audit(MECHANISMS[name], parts=planted_bugs.HalfTheNoise(), trials=8000)
    assert not found.holds
    assert found.worst.alarm
    assert found.to_dict()["holds"] is False


def test_reused_noise_needs_the_alternating_user():
    found = audit(POISSON, parts=planted_bugs.ReusedNoise(), trials=4000)
    assert {figure.user for figure in found.figures if figure.alarm} == {"alternating"}


def test_same_seed_same_audit():
    assert audit(POISSON, trials=2000) == audit(POISSON, trials=2000)
    assert audit(POISSON, trials=2000) != audit(POISSON, trials=2000, seed=1)


def test_time_ends_an_audit_early():
    found = audit(POISSON, trials=4000, users_at_once=1000, seconds=1e-9)
    assert 1000 <= found.trials <= 4000


def test_an_audit_needs_a_key_and_trials():
    with pytest.raises(InputError, match="RunKey"):
        audit_mechanism(POISSON, noise_multiplier=1.0, adjacency="zero-out", run_key=7)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="trials"):
        audit(POISSON, trials=10)


# ---- the judge -------------------------------------------------------------------------------------------------------


def test_false_alarms_are_accounted_for():
    """60 audits of an exact Gaussian at alpha = 0.2: more than 24 alarms have a probability below 2e-4."""
    claim = MechanismClaim(
        mechanism=MinSeparation(contribution_bound=1, min_separation=1, num_bands=1, iterations=1),
        noise_multiplier=1.0,
        adjacency="zero-out",
    )
    random = np.random.default_rng(5)
    alarms = 0
    for _ in range(60):
        noise = random.normal(size=(2, 400))
        present = dict.fromkeys(USERS, noise[0] + 0.5)  # log ratios of N(1, 1) to N(0, 1)
        absent = dict.fromkeys(USERS, noise[1] - 0.5)
        alarms += any(figure.alarm for figure in judge(claim, Scores(present, absent), alpha=0.2))
    assert alarms <= 24


def test_levels_are_shared(monkeypatch):
    """Every bound is taken at alpha / (2 m)."""
    used = set()

    def watched(successes, trials, alpha):
        used.add(alpha)
        return lower_bound(successes, trials, alpha)

    monkeypatch.setattr("coowned.audit.mechanism_audit.lower_bound", watched)
    found = audit(SCHEDULE, trials=1000, alpha=0.01)
    assert used == {0.01 / (2 * len(found.figures))}
    assert len(found.figures) == len({(f.epsilon, f.direction, f.user) for f in found.figures})


def test_events_are_chosen_on_the_first_half():
    claim = MechanismClaim(mechanism=SCHEDULE, noise_multiplier=1.0, adjacency="zero-out")
    random = np.random.default_rng(0)
    noise = random.normal(size=2000)
    first = judge(claim, Scores(dict.fromkeys(USERS, noise + 1), dict.fromkeys(USERS, noise)), alpha=0.01)
    changed = noise.copy()
    changed[1000:] = 50.0
    second = judge(claim, Scores(dict.fromkeys(USERS, changed + 1), dict.fromkeys(USERS, changed)), alpha=0.01)
    assert [figure.threshold for figure in first] == [figure.threshold for figure in second]
    assert [figure.rate for figure in first] != [figure.rate for figure in second]


@pytest.mark.parametrize(("count", "trials"), [(0, 10), (1, 10), (7, 10), (10, 10), (123, 4567)])
def test_clopper_pearson_is_scipys(count, trials):
    interval = binomtest(count, trials).proportion_ci(0.99, "exact")
    assert lower_bound(count, trials, 0.005) == pytest.approx(interval.low, abs=1e-12)
    assert upper_bound(count, trials, 0.005) == pytest.approx(interval.high, abs=1e-12)


@pytest.mark.parametrize("probability", [0.003, 0.2, 0.5, 0.98])
def test_clopper_pearson_covers(probability):
    """Summed over all outcomes: no chance is involved."""
    counts = np.arange(51)
    weights = binom.pmf(counts, 50, probability)
    assert weights[lower_bound(counts, 50, 0.01) > probability].sum() <= 0.01
    assert weights[upper_bound(counts, 50, 0.01) < probability].sum() <= 0.01


# ---- the claim -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adjacency", ["zero-out", "replace"])
@pytest.mark.parametrize("noise_multiplier", [0.02, 1.3])  # the first needs logarithms: exp(1 / 0.02^2) is too large
def test_log_ratio_is_that_of_the_densities(adjacency, noise_multiplier):
    mechanism = PoissonSampling(contribution_bound=3, sampling_probability=0.2, iterations=2)
    claim = MechanismClaim(mechanism=mechanism, noise_multiplier=noise_multiplier, adjacency=adjacency)
    observed = np.random.default_rng(1).normal(1.0, 1.0, size=(2, 30))
    weights = binom.logpmf(np.arange(4), 3, 0.2)[:, None, None]
    centers = np.arange(4)[:, None, None]

    def density(sign):
        return np.logaddexp.reduce(weights + norm.logpdf(observed, sign * centers, noise_multiplier)).sum(axis=0)

    without = norm.logpdf(observed, 0, noise_multiplier).sum(axis=0) if adjacency == "zero-out" else density(-1)
    assert claim.log_ratio(observed, "steady") == pytest.approx(density(1) - without, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("name", MECHANISMS)
def test_log_ratio_has_mean_one(name, user):
    """The expectation of exp(ratio) without the user is 1; 5 standard errors (P < 1e-6)."""
    claim = MechanismClaim(mechanism=MECHANISMS[name], noise_multiplier=3.0, adjacency="zero-out")
    white = 3.0 * np.random.default_rng(2).normal(size=(claim.iterations, 50_000))
    noise = np.linalg.solve(np.eye(claim.iterations) if claim.strategy is None else claim.strategy.matrix(), white)
    ratios = np.exp(claim.log_ratio(noise, user))
    assert abs(ratios.mean() - 1) < 5 * ratios.std() / np.sqrt(len(ratios))
    assert ratios.std() > 0.01


def test_deltas_are_upper_bounds():
    claim = MechanismClaim(mechanism=SCHEDULE, noise_multiplier=2.0, adjacency="replace")
    mu = 2 * np.sqrt(3) / 2.0
    points = np.array([0.0, 0.5, 2.0])
    exact = norm.cdf(mu / 2 - points / mu) - np.exp(points) * norm.cdf(-mu / 2 - points / mu)
    assert (claim.deltas(points) >= exact).all()
    assert claim.deltas(points) == pytest.approx(exact, rel=1e-6)
    own = epsilon_curve(SCHEDULE, noise_multiplier=2.0, adjacency="replace", epsilons=points.tolist())
    assert (claim.deltas(points) == own).all()


def test_participations_stay_within_what_was_accounted_for():
    strategy = BandedStrategy(num_bands=4, iterations=12)
    squares = strategy.column_norms() ** 2
    full = MinSeparation(contribution_bound=3, min_separation=4, num_bands=4, iterations=12)
    claim = MechanismClaim(mechanism=full, noise_multiplier=1.0, adjacency="zero-out")
    assert claim.rounds.tolist() == [0, 4, 8]
    late = np.sqrt(2 + squares[10]) * (1 + 1e-12)
    for accounted, expected in [(late, [0, 4, 10]), (np.sqrt(2.0) + 1e-9, [0, 4]), (1.2, [0])]:
        mechanism = MinSeparation(
            contribution_bound=3, min_separation=4, num_bands=4, iterations=12, sensitivity=float(accounted)
        )
        rounds = MechanismClaim(mechanism=mechanism, noise_multiplier=1.0, adjacency="zero-out").rounds
        assert len(rounds) == len(expected)
        assert np.sqrt(squares[rounds].sum()) <= accounted * (1 + 1e-9)
    tiny = MinSeparation(contribution_bound=1, min_separation=4, num_bands=4, iterations=12, sensitivity=0.01)
    with pytest.raises(InputError, match="sensitivity"):
        _ = MechanismClaim(mechanism=tiny, noise_multiplier=1.0, adjacency="zero-out").rounds


# ---- the worst case --------------------------------------------------------------------------------------------------


def settings(batch_size):
    return {"learning_rate": 1.0, "clip_norm": 1.0, "noise_scale": 0.5, "batch_size": float(batch_size)}


def test_worst_case_gradient_is_one_clip_norm():
    parts = AuditedParts()
    given = {"size": 16, "settings": settings(8), "noise": 0.0}
    for copies in (1, 3):
        for content in (1, -1):
            released = parts.step(user_copies=copies, content=content, other_copies=5, **given)
            assert released == pytest.approx(content * copies / 8, rel=1e-5)
        assert parts.step(user_copies=copies, content=0, other_copies=5, **given) == 0
    assert parts.step(user_copies=0, content=0, other_copies=0, size=8, settings=settings(8), noise=1.0) == 0.5


@pytest.mark.parametrize("users", [1, 50])
@pytest.mark.parametrize("name", ["poisson", "cyclic"])
def test_worst_case_user_is_at_the_bound(name, users):
    claim = MechanismClaim(mechanism=MECHANISMS[name], noise_multiplier=1.0, adjacency="zero-out")
    world = WorstCase(claim, AuditedParts(), users_at_once=users, trials=users, run_key=RunKey.from_seed(0))
    assert (world.copies_per_user == 2).all()
    assert (world.graph.by_user[0][1 : users + 1] - world.graph.by_user[0][:users] > 2).all()
    if isinstance(world.batches, CyclicPoissonBatches):
        assert claim.group == 2
        assert world.batches.group_probabilities[2] == 0.5


# ---- direct tests of noise and step ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bands", [1, 4])
def test_honest_noise_passes(bands):
    coefficients = BandedStrategy(num_bands=bands, iterations=20).coefficients
    found = noise_law.audit_noise(RunKey.from_seed(1), coefficients=coefficients, iterations=20, trials=1024)
    assert found.holds
    assert len(found.checks) == 25


@pytest.mark.parametrize("bug", [planted_bugs.OtherCorrelation, planted_bugs.ReusedNoise])
def test_wrong_noise_is_caught(bug):
    coefficients = BandedStrategy(num_bands=4, iterations=20).coefficients
    key = RunKey.from_seed(1)
    assert not noise_law.audit_noise(key, coefficients=coefficients, iterations=20, trials=1024, parts=bug()).holds


def test_a_short_tail_is_caught():
    assert noise_law.audit_noise_tail().holds
    found = noise_law.audit_noise_tail(parts=planted_bugs.ShortTail())
    assert not found.holds
    largest = next(check for check in found.checks if check.name == "largest value")
    assert largest.observed == pytest.approx(5.42, abs=0.01)


@pytest.mark.parametrize(
    "bug",
    [
        planted_bugs.LeakyClip,
        planted_bugs.LeakyOnHost,
        planted_bugs.DividedByTheDrawn,
        planted_bugs.TooLittleNoise,
    ],
)
def test_wrong_releases_are_caught(bug):
    assert release.audit_release(noise_multiplier=1.0, copies=2, batch_size=4).holds
    assert not release.audit_release(noise_multiplier=1.0, copies=2, batch_size=4, parts=bug()).holds


def test_a_copy_that_changes_others_is_caught():
    found = release.audit_release(noise_multiplier=1.0, copies=2, batch_size=4, parts=planted_bugs.OthersAreChanged())
    # With all kinds of steps and norms, zeroed and replaced, clipped and not; and by nothing that looks at one alone.
    assert len([check for check in found.failures if "a crowd" in check.name]) == 16
    assert len([check for check in found.failures if "moves others" in check.name]) == 16
    assert len(found.failures) == 32
    assert max(check.observed for check in found.checks) < 1.01


def test_a_copy_that_changes_logits_is_caught(monkeypatch):
    """By the last digit of an intercept, in the compiled step alone: where all others are clipped it is not seen."""
    honest = clipping._logistic_sums

    def shaken(weights, intercepts, features, *rest):
        usual = jnp.isfinite(features).all()
        return honest(weights, jnp.where(usual, intercepts, intercepts * (1 + 2.0**-22)), features, *rest)

    monkeypatch.setattr(clipping, "_logistic_sums", shaken)
    compiled_step.cache_clear()
    jax.clear_caches()
    try:
        found = release.audit_release(noise_multiplier=1.0, copies=2, batch_size=4)
    finally:
        compiled_step.cache_clear()
        jax.clear_caches()
    assert len(found.failures) == 8  # one model and many, norms given and not, 1 and 100 features
    assert all("moves others" in check.name and "on the host" not in check.name for check in found.failures)


@pytest.mark.parametrize(
    ("module", "at", "models"), [(fused_clipping, 8, "one model"), (tiled_clipping, 9, "many models")]
)
def test_a_part_that_is_summed_twice_is_caught(module, at, models, monkeypatch):
    """What threads share of a large batch is audited too."""
    honest = module._add_parts

    def twice(*given):
        honest(*given)
        given[at][1:] *= 2  # the sums, from the second part on

    monkeypatch.setattr(module, "_add_parts", twice)
    monkeypatch.setattr(threads, "cores", lambda: 1)
    found = release.audit_release(noise_multiplier=1.0, copies=2, batch_size=4)
    assert {f"{models}, summed on the host" in check.name for check in found.failures} == {True}


def test_a_sum_that_is_not_a_number_is_caught():
    class NotANumber(AuditedParts):
        def release(self, batch, mask, **settings):
            released = super().release(batch, mask, **settings)
            return released if np.isfinite(rows_of(batch)).all() else released * np.nan

    assert not release.audit_release(noise_multiplier=1.0, copies=2, batch_size=4, parts=NotANumber()).holds


def test_steps_are_driven_as_in_training():
    """One model and many, compiled and summed on the host; and norms that come with the rows."""
    seen = set()

    class Watched(AuditedParts):
        def release(self, batch, mask, **settings):
            way = settings.get("models"), bool(settings.get("on_host"))
            seen.add((way, "squared_norms" in batch, rows_of(batch).shape[1]))
            return super().release(batch, mask, **settings)

    assert release.audit_release(noise_multiplier=1.0, copies=2, batch_size=4, parts=Watched()).holds
    single = {((None, on_host), True, 1) for on_host in (False, True)}
    ways = itertools.product((None, 2), (False, True), (True, False))
    crowds = {((models, on_host), norms, 512 if on_host else 100) for models, on_host, norms in ways}
    ways = itertools.product((None, 2), (False, True), (True, False), (1, 100))
    not_clipped = {((models, on_host), norms, width) for models, on_host, norms, width in ways}
    assert seen == single | crowds | not_clipped


def rows_of(batch):
    features = batch["features"]
    return features.gathered() if isinstance(features, RowsInPlace) else features
