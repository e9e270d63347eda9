"""The audit attacks the worst person of each tier, and finds one who was not held to their bound."""

import numpy as np
import pytest

from coowned import AttributionGraph, Greedy, PoissonSampling, certify, guarantee
from coowned.audit.curve import AuditedTier, audit_curves
from coowned.audit.run_audit import audit_plan
from coowned.content.splits import select_held_out
from coowned.exact.keys import RunKey
from coowned.models.logistic_regression import LogisticRegression
from coowned.selection.greedy import PassSelector
from coowned.tier_counts import CertifiedTiers
from coowned.training import covered
from coowned.training.plan import TrainingPlan

CAREFUL = [{"user": user, "bound": 1, "tier": "careful"} for user in range(0, 200, 2)]


def tiered_plan(*, evaluated: bool = False) -> TrainingPlan:
    graph = AttributionGraph.from_users_per_example([[i // 6] for i in range(1200)])
    selection = Greedy(contribution_bound=6, contribution_bounds=CAREFUL).select(graph)
    certificate = certify(graph, selection)
    mechanism = PoissonSampling.from_certificate(certificate, batch_size=100, iterations=8)
    shared = {}
    if evaluated:
        test = AttributionGraph.from_users_per_example([[i // 4] for i in range(800)])
        held_out = select_held_out(test, contribution_bound=4, user_bounds=selection.user_bounds)
        shared = {"held_out": certify(test, held_out), "epsilon_share": 0.6}
    return TrainingPlan(
        certificate=certificate,
        selected=selection,
        mechanism=mechanism,
        guarantee=guarantee(certificate, mechanism, noise_multiplier=1.5, delta=1e-6, adjacency="zero-out", **shared),
        clip_norm=1.0,
        optimizer="sgd",
        learning_rate=0.1,
        run_key=RunKey.from_operating_system(),
    )


def audit_of_tier(plan: TrainingPlan):
    """False-alarm probability at most 1e-4."""
    keys = (RunKey.from_seed(seed) for seed in range(100, 10**6))
    (tier,) = AuditedTier.all_of(plan)
    curves, _ = audit_curves(plan, keys.__next__, adjacencies=("zero-out",), alpha=1e-4, trials=20_000, tier=tier)
    return curves[-1]


@pytest.mark.full
def test_an_honest_tier_passes():
    plan = tiered_plan()
    assert AuditedTier.all_of(plan) == (AuditedTier(name="careful", bound=1, found=1, promised=1),)
    found = audit_of_tier(plan)
    assert found.holds
    assert found.to_dict()["tier"] == "careful"
    audit = audit_plan(plan, LogisticRegression(num_features=8), trials=2000, seed=7)
    assert [curve.tier for curve in audit.curves] == [None, None, "careful"]
    assert audit.holds


@pytest.mark.full
def test_a_tier_is_attacked_in_both_parts(monkeypatch):
    """Training and evaluation together are what a tier is promised: counts without noise contradict that."""
    plan = tiered_plan(evaluated=True)
    found = audit_of_tier(plan)
    assert found.evaluated
    assert found.tier == "careful"
    assert found.holds
    best = max(found.events, key=lambda event: event.measured_delta)
    assert best.measured_delta > 0.5 * best.delta  # its one held-out copy moves the counts
    honest = covered.evaluation_noise
    monkeypatch.setattr(covered, "evaluation_noise", lambda key, **of: np.int64(0.3 * honest(key, **of)))
    assert not audit_of_tier(plan).holds


@pytest.mark.full
def test_a_tier_above_its_bound_is_caught(monkeypatch):
    """The planted bug: everybody is selected with the bound of the rest, and the certificate does not refuse it."""

    def one_for_all(self, graph):
        return np.full(graph.num_users, self.contribution_bound, np.int32)

    def unchecked(graph, copies, per_user, bounds):
        tier = np.where(np.arange(graph.num_users) % 2, 0, 1)
        users = np.bincount(tier * 7 + per_user, minlength=14)
        return CertifiedTiers(
            names=("bound 6", "careful"), bounds=(6, 1), copies_per_user=tuple(users.tolist()),
            num_examples_opted_out=0, num_unknown_keys=0, digest=bounds.digest,
        )  # fmt: skip

    monkeypatch.setattr(PassSelector, "capacities", one_for_all)
    monkeypatch.setattr("coowned.certificate.count_tiers", unchecked)
    monkeypatch.setattr(CertifiedTiers, "check", lambda self, levels: True)
    plan = tiered_plan()
    assert AuditedTier.all_of(plan)[0].found == 6
    assert not audit_of_tier(plan).holds
    assert not audit_plan(plan, LogisticRegression(num_features=8), trials=20_000, seed=7).holds
