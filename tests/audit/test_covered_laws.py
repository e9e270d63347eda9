"""The audit of a covered evaluation: honest ones pass, and what somebody could get wrong is caught."""

import itertools

import numpy as np
import pytest
from tests.audit.planted_bugs import SMALL, graph

from coowned import Greedy, PoissonSampling, certify, guarantee
from coowned.audit import covered_laws
from coowned.audit.covered_laws import NUM_KEYS, audit_covered
from coowned.audit.curve import audit_curves
from coowned.exact.keys import Purpose, RunKey
from coowned.exact.noise import NoiseStream
from coowned.selection.greedy import Greedy as GreedySelector
from coowned.training import covered
from coowned.training.plan import TrainingPlan

ALPHA = 1e-6


def plan_with(epsilon_share) -> TrainingPlan:
    given, held_out = graph(900, 4), graph(200, 4)
    selected = Greedy(contribution_bound=3).select(given)
    certificate = certify(given, selected)
    claim = guarantee(
        certificate,
        mechanism := PoissonSampling.from_certificate(certificate, batch_size=24, iterations=24),
        noise_multiplier=1.0,
        delta=1e-6,
        adjacency="zero-out",
        test_run=True,
        held_out=certify(held_out, Greedy(contribution_bound=2).select(held_out)),
        epsilon_share=epsilon_share,
    )
    return TrainingPlan(
        certificate=certificate,
        selected=selected,
        mechanism=mechanism,
        guarantee=claim,
        clip_norm=0.3,
        learning_rate=0.1,
        run_key=RunKey.from_seed(0),
    )


@pytest.fixture(scope="module")
def plan() -> TrainingPlan:
    return plan_with(0.1)


def audit(plan, seed=0):
    keys = [RunKey.from_seed(1000 * seed + number) for number in range(NUM_KEYS)]
    return audit_covered(plan, SMALL, keys, alpha=ALPHA)


def test_honest_evaluations_pass(plan):
    """False alarms: 1e-6. A user reaches, but for the loss's last digits, all that was accounted for."""
    found = audit(plan)
    assert found.holds, found.failures
    moved = [check.observed for check in found.checks if "blank" in check.name]
    assert max(moved) > 0.8 * 2  # of two copies


def no_noise(monkeypatch):
    monkeypatch.setattr(covered, "evaluation_noise", lambda run_key, deviation, length: np.zeros(length, np.int64))


def smaller_noise(monkeypatch):
    honest = covered.evaluation_noise
    monkeypatch.setattr(covered, "evaluation_noise", lambda key, **of: np.int64(0.8 * honest(key, **of)))


def noise_of_training(monkeypatch):
    """The stream of the model's first tensor, in its first step."""
    [name] = SMALL.shapes()

    def reused(run_key, deviation, length):
        stream = NoiseStream(
            run_key,
            deviations=[deviation],
            coefficients=[1.0],
            shapes={name: (length,)},
            iterations=1,
            purpose=Purpose.NOISE,
        )
        return stream.next()[name][0]

    monkeypatch.setattr(covered, "evaluation_noise", reused)


def noise_of_another_evaluation(monkeypatch):
    honest = covered.evaluation_noise
    monkeypatch.setattr(covered, "evaluation_noise", lambda key, **of: honest(RunKey.from_seed(0), **of))


def bound_not_enforced(monkeypatch):
    def everything(graph, *, contribution_bound=None, seed=0):
        return GreedySelector(contribution_bound=100).select(graph, seed=seed)

    monkeypatch.setattr(covered_laws, "select_held_out", everything)


def loss_without_its_bound(monkeypatch):
    honest = covered.covered_counts

    def counts(*given, **named):
        found = honest(*given, **named)
        found[1] *= 10
        return found

    monkeypatch.setattr(covered, "covered_counts", counts)


@pytest.mark.parametrize(
    "plant",
    [
        no_noise,
        smaller_noise,
        noise_of_training,
        noise_of_another_evaluation,
        bound_not_enforced,
        loss_without_its_bound,
    ],
)
def test_planted_evaluation_bugs_are_caught(plan, monkeypatch, plant):
    plant(monkeypatch)
    assert not audit(plan).holds


def curves_of(plan, trials=4000):
    """The curves of training alone, and those of training and evaluation."""
    keys = (RunKey.from_seed(number) for number in itertools.count())
    curves, _ = audit_curves(plan, keys.__next__, adjacencies=("zero-out", "replace"), trials=trials)
    return curves[:2], curves[2:]


@pytest.mark.full
def test_honest_training_and_evaluation_pass(plan):
    """And nearly all of the joint curve is reached, which no attack on training alone does."""
    alone, joint = curves_of(plan)
    assert [curve.evaluated for curve in (*alone, *joint)] == [False, False, True, True]
    assert {event.user for event in joint[0].events} == {"steady", "alternating", "counts alone"}
    assert all(curve.holds for curve in (*alone, *joint))
    own, both = (max(event.measured_delta for event in curve.events) for curve in (alone[0], joint[0]))
    assert both > own
    best = max(joint[0].events, key=lambda event: event.measured_delta)
    assert best.measured_delta > 0.8 * best.delta - 0.1
    assert best.user != "counts alone"


@pytest.mark.full
@pytest.mark.parametrize("plant", [no_noise, noise_of_another_evaluation, bound_not_enforced])
def test_the_joint_curve_catches_evaluation_bugs(monkeypatch, plant):
    """Of an evaluation with most of epsilon: at a tenth, 4,000 trials do not see a bound that is doubled."""
    plan = plan_with(0.6)
    plant(monkeypatch)
    alone, joint = curves_of(plan)
    assert all(curve.holds for curve in alone)
    assert not joint[0].holds
