"""The whole-curve audit: honest plans pass, a wrong one does not, and its arithmetic is exact.

Every honest audit here may alarm falsely with probability 1e-3 at most; seeds are fixed, so that a pass is repeatable.
"""

import itertools

import numpy as np
import pytest
from tests.audit import planted_bugs

from coowned.audit.checks import lower_bound
from coowned.audit.claims import USERS, MechanismClaim
from coowned.audit.curve import audit_curves, judge
from coowned.errors import InputError
from coowned.exact.keys import RunKey
from coowned.mechanism.min_separation import MinSeparation

SCHEDULE = MinSeparation(contribution_bound=3, min_separation=3, num_bands=3, iterations=10, batch_size=4)
PLANS = {
    "poisson": planted_bugs.poisson,
    "duplicates": planted_bugs.duplicates,
    "schedule": planted_bugs.schedule,
    "cyclic": planted_bugs.cyclic,
    "scaled": planted_bugs.scaled,
}


def audit(plan, *, trials=4000, seed=0, **more):
    keys = (RunKey.from_seed(number) for number in itertools.count(1000 * seed))
    return audit_curves(plan, keys.__next__, adjacencies=("zero-out", "replace"), trials=trials, **more)


@pytest.mark.parametrize(
    "name",
    ["poisson", "schedule", *(pytest.param(one, marks=pytest.mark.full) for one in ("duplicates", "cyclic", "scaled"))],
)
def test_honest_plans_pass(name):
    plan = PLANS[name]()
    curves, noise = audit(plan)
    assert noise.holds
    for found in curves:
        assert found.holds
        assert found.trials == 4000
        # Not for want of trying: nearly all of the claimed curve is reached.
        best = max(found.events, key=lambda event: event.delta if event.measured_delta > 0 else 0)
        assert best.measured_delta > 0.8 * best.delta - 0.1
        claimed = MechanismClaim.of(plan, found.adjacency).epsilon_at(1e-5)
        assert found.epsilon_lower_bound(1e-5) <= claimed


def test_little_noise_is_caught():
    with pytest.MonkeyPatch.context() as monkeypatch:
        planted_bugs.scaled_noise(0.5)(monkeypatch)
        curves, noise = audit(planted_bugs.poisson(), trials=2000)
    assert not noise.holds
    assert not any(found.holds for found in curves)
    assert any(event.alarm for event in curves[0].events)
    assert curves[0].to_dict()["holds"] is False


def test_reused_noise_needs_the_alternating_user():
    with pytest.MonkeyPatch.context() as monkeypatch:
        planted_bugs.noise_reused_between_steps(monkeypatch)
        (found, _), _ = audit(planted_bugs.poisson())
    assert {event.user for event in found.events if event.alarm} == {"alternating"}


def test_same_keys_same_audit():
    plan = planted_bugs.poisson()
    first, again, other = (audit(plan, trials=1000, seed=seed)[0] for seed in (0, 0, 1))
    assert first == again != other


def test_time_ends_an_audit_early():
    curves, _ = audit(planted_bugs.poisson(), trials=100_000, seconds=1e-6)
    assert curves[0].iterations == 8  # its first steps alone, against the curve of a run of so many
    assert curves[0].trials < 2000
    assert all(found.holds for found in curves)


def test_an_audit_needs_trials():
    with pytest.raises(InputError, match="trials"):
        audit(planted_bugs.poisson(), trials=10)


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
        scores = random.normal(size=(2, 400)) + np.array([[0.5], [-0.5]])  # log ratios of N(1, 1) to N(0, 1)
        alarms += any(event.alarm for event in judge(claim, dict.fromkeys(USERS, scores), alpha=0.2))
    assert alarms <= 24


def test_levels_are_shared(monkeypatch):
    """Every bound is taken at alpha / (2 m)."""
    used = set()

    def watched(successes, trials, alpha):
        used.add(alpha)
        return lower_bound(successes, trials, alpha)

    monkeypatch.setattr("coowned.audit.curve.lower_bound", watched)
    claim = MechanismClaim(mechanism=SCHEDULE, noise_multiplier=1.0, adjacency="zero-out")
    noise = np.random.default_rng(0).normal(size=(2, 400))
    events = judge(claim, dict.fromkeys(USERS, noise), alpha=0.01)
    assert used == {0.01 / (2 * len(events))}
    assert len(events) == len({(f.epsilon, f.direction, f.user) for f in events})


def test_events_are_chosen_on_the_first_half():
    claim = MechanismClaim(mechanism=SCHEDULE, noise_multiplier=1.0, adjacency="zero-out")
    random = np.random.default_rng(0)
    noise = random.normal(size=2000)
    first = judge(claim, dict.fromkeys(USERS, np.stack([noise + 1, noise])), alpha=0.01)
    changed = noise.copy()
    changed[1000:] = 50.0
    second = judge(claim, dict.fromkeys(USERS, np.stack([changed + 1, changed])), alpha=0.01)
    assert [event.threshold for event in first] == [event.threshold for event in second]
    assert [event.rate for event in first] != [event.rate for event in second]
