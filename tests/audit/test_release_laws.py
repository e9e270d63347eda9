"""What the trainer must do: honest ones pass, with a false-alarm probability of 1e-3 at most; seeds are fixed."""

import dataclasses
import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tests.audit import planted_bugs
from tests.audit.planted_bugs import SMALL, graph

from coowned import Greedy, PoissonSampling, certify, codec, guarantee
from coowned.audit import release_laws
from coowned.audit.curve import audit_curves
from coowned.audit.driving import World, audited, audited_model, first_scales
from coowned.audit.release_laws import NUM_KEYS, TrainerLaws, audit_covered, noise_checks
from coowned.exact.keys import Purpose, RunKey
from coowned.exact.noise import NoiseStream
from coowned.models.example_model import ExampleModel
from coowned.models.jax_model import JaxModel
from coowned.models.linear_regression import LinearRegression
from coowned.models.logistic_regression import LogisticRegression
from coowned.models.probes import IN
from coowned.models.registry import model_from_description
from coowned.models.text_classifier import TextClassifier
from coowned.selection.greedy import Greedy as GreedySelector
from coowned.training import covered
from coowned.training.plan import TrainingPlan

PLANS = {
    "poisson": planted_bugs.poisson,
    "duplicates": planted_bugs.duplicates,
    "schedule": planted_bugs.schedule,
    "cyclic": planted_bugs.cyclic,
}


def laws(plan, model=planted_bugs.SMALL, devices=1):
    world = World.like(plan.certificate, plan.mechanism, users=64, strategy=plan.strategy)
    return TrainerLaws(plan=plan, model=model, world=world, devices=devices)


@pytest.mark.parametrize("name", PLANS)
def test_honest_trainers_pass(name):
    own = laws(PLANS[name]())
    assert own.noise(RunKey.from_seed(1), alpha=1e-3).holds
    assert own.gradient(RunKey.from_seed(2)).holds
    assert own.contributions(RunKey.from_seed(3), steps=6).holds
    assert own.sweep(RunKey.from_seed(4), steps=6, alpha=1e-3).holds


NEW_MODELS = {
    "softmax": LogisticRegression(num_features=9, classes=4),
    "regression": LinearRegression(num_features=9, target_bound=50.0),
    "text": TextClassifier(num_features=64),
    "text of four classes": TextClassifier(num_features=64, classes=4),
}


@pytest.mark.parametrize("name", NEW_MODELS)
def test_linear_models_pass(name):
    own = laws(planted_bugs.poisson(), NEW_MODELS[name])
    assert own.noise(RunKey.from_seed(1), alpha=1e-3).holds
    assert own.gradient(RunKey.from_seed(2)).holds
    found = own.contributions(RunKey.from_seed(3), steps=3)
    assert found.holds
    assert any(check.observed > 0 for check in found.checks)
    assert own.sweep(RunKey.from_seed(4), steps=3, alpha=1e-3).holds


@pytest.mark.parametrize("name", NEW_MODELS)
def test_leaky_linear_models_are_caught(name, monkeypatch):
    planted_bugs.leaky_clip(monkeypatch, type(NEW_MODELS[name]))
    own = laws(planted_bugs.poisson(), NEW_MODELS[name])
    assert not own.contributions(RunKey.from_seed(3), steps=3).holds


@pytest.fixture(scope="module")
def own_model():
    """Of somebody's own, with two parameters, a frozen one and a loss nobody knows."""

    def loss(parameters, example, key):
        return example["x"] @ parameters["w"] @ parameters["frozen"] + parameters["b"] ** 2

    parameters = {"w": np.ones((3, 4)), "frozen": np.ones(4), "b": np.ones(())}
    spec = JaxModel(loss=loss, parameters=parameters, trainable=lambda path: path != "frozen", microbatch=16)
    return spec.for_schema(pa.schema({"x": pa.list_(pa.float32(), 3)}))


def test_models_of_ones_own_pass(own_model):
    """Through their clipper, with a stand-in whose gradients are known."""
    own = laws(planted_bugs.poisson(), audited_model(own_model))
    assert own.model.shapes() == own_model.shapes() == {"b": (), "w": (3, 4)}
    assert own.noise(RunKey.from_seed(1), alpha=1e-3).holds
    assert own.gradient(RunKey.from_seed(2)).holds
    found = own.contributions(RunKey.from_seed(3), steps=3)
    assert found.holds
    assert any(check.observed > 0 for check in found.checks)


def test_scaled_trainers_pass():
    """What is released before scales are undone obeys the same laws, with scales that are far apart."""
    own = laws(planted_bugs.scaled(), planted_bugs.ROWS)
    plan = audited(own.plan, own.world.selected, RunKey.from_seed(0))
    scales = np.concatenate([array.ravel() for array in first_scales(plan, own.model).values()])
    assert scales.max() > 2 * scales.min()
    assert own.noise(RunKey.from_seed(1), alpha=1e-3).holds
    assert own.gradient(RunKey.from_seed(2)).holds
    found = own.contributions(RunKey.from_seed(3), steps=6)
    assert found.holds
    assert any(check.observed > 0 for check in found.checks)


@pytest.mark.parametrize(
    ("plant", "seen_by"),
    [
        (planted_bugs.noise_scaled_like_gradients, {"contributions"}),
        (planted_bugs.scales_from_gradients_without_noise, {"contributions", "gradient"}),
        (planted_bugs.clipped_before_scaling, {"contributions", "gradient"}),
    ],
)
def test_bugs_of_scaled_trainers_are_caught(plant, seen_by, monkeypatch):
    plant(monkeypatch)
    own = laws(planted_bugs.scaled(), planted_bugs.ROWS)
    found = (own.gradient(RunKey.from_seed(2)), own.contributions(RunKey.from_seed(3), steps=6))
    assert {law.law for law in found if not law.holds} == seen_by


def test_a_leaky_model_of_ones_own_is_caught(own_model, monkeypatch):
    planted_bugs.leaky_clip(monkeypatch, type(own_model))
    own = laws(planted_bugs.poisson(), audited_model(own_model))
    assert not own.gradient(RunKey.from_seed(2)).holds
    assert not own.contributions(RunKey.from_seed(3), steps=2).holds


TWO_DEVICES = """
import jax, numpy as np, pyarrow as pa
from coowned.audit.driving import audited_model
from coowned.exact.gradient_sums import GradientSum
from coowned.exact.keys import RunKey
from coowned.models.jax_model import JaxModel
from tests.audit import planted_bugs
from tests.audit.test_release_laws import laws

spec = JaxModel(loss=lambda own, row, key: own["w"] @ row["x"], parameters={"w": np.ones(3)}, microbatch=4)
model = audited_model(spec.for_schema(pa.schema({"x": pa.list_(pa.float32(), 3)})))
honest, key = GradientSum.add, RunKey.from_seed(3)

def second_device_twice(total, gradients, mask):
    honest(total, gradients, mask)
    if jax.tree.leaves(gradients)[0].devices() != {jax.devices()[0]}:
        honest(total, gradients, mask)

for add in (honest, second_device_twice):
    GradientSum.add = add
    for devices in (1, 2):
        print(laws(planted_bugs.poisson(), model, devices=devices).contributions(key, steps=2).holds)
"""


@pytest.mark.full
def test_a_bug_of_a_second_device_is_seen_on_two():
    """Gradients of the second device are added twice: an audit on one device cannot see it."""
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", TWO_DEVICES], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "True", "True", "False"]


@pytest.mark.parametrize("clip_norm", [0.01, 0.4])
def test_huge_numbers_that_are_predicted_rightly(clip_norm):
    """They add next to nothing, and a part of the clip norm that is the larger the smaller it is: not too much."""
    plan = dataclasses.replace(planted_bugs.duplicates(), clip_norm=clip_norm)
    assert laws(plan).contributions(RunKey.from_seed(3), steps=8).holds


@pytest.fixture(scope="module", params=["masked words", "classes"])
def bert(request):
    from coowned.models.bert_files import BertConfig
    from coowned.models.bert_model import BertModel

    config = BertConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=1, intermediate_size=16, max_position_embeddings=12
    )
    if request.param == "classes":
        return BertModel.classifier(config=config, classes=5, sequence_length=12, microbatch=64)
    return BertModel.masked_lm(config=config, sequence_length=12, microbatch=64)


@pytest.mark.full
def test_bert_passes(bert):
    """Its own clipper, with an example whose clipped gradient is known: with parameters of zero, and with its own."""
    own = laws(planted_bugs.poisson(), bert)
    assert own.noise(RunKey.from_seed(1), alpha=1e-3).holds
    assert own.gradient(RunKey.from_seed(2)).holds
    found = own.contributions(RunKey.from_seed(3), steps=2)
    assert found.holds
    assert max(check.observed for check in found.checks) < 1e-3


def test_a_partly_frozen_bert_is_driven_itself_where_its_last_bias_is_trained():
    frozen = planted_bugs.FROZEN_BERT
    described = model_from_description(codec.to_plain(frozen.describe()))
    assert described.shapes() == frozen.shapes() != planted_bugs.SMALL_BERT.shapes()
    assert audited_model(described) is described
    assert not any(array.any() for array in frozen.zeroed.frozen.arrays.values())
    assert any(array.any() for array in described.frozen.arrays.values())
    other, _ = frozen.training_only(["bert.encoder.*"], planted_bugs.SMALL_BERT.initial())
    stand_in = audited_model(model_from_description(codec.to_plain(other.describe())))
    assert isinstance(stand_in, ExampleModel)
    assert stand_in.shapes() == other.shapes()


@pytest.mark.full
@pytest.mark.parametrize("plan", [planted_bugs.poisson, planted_bugs.scaled])
def test_a_partly_frozen_bert_passes(plan):
    own = laws(plan(), planted_bugs.FROZEN_BERT)
    assert own.noise(RunKey.from_seed(1), alpha=1e-3).holds
    assert own.gradient(RunKey.from_seed(2)).holds
    found = own.contributions(RunKey.from_seed(3), steps=2)
    assert found.holds
    assert any(check.observed > 0 for check in found.checks)


@pytest.mark.full
def test_a_leaky_bert_is_caught(bert, monkeypatch):
    planted_bugs.leaky_clip(monkeypatch, type(bert))
    own = laws(planted_bugs.poisson(), bert)
    assert not own.gradient(RunKey.from_seed(2)).holds
    assert not own.contributions(RunKey.from_seed(3), steps=1).holds


@pytest.mark.full
def test_berts_tensors_have_noise_of_their_own(bert, monkeypatch):
    planted_bugs.same_noise_for_two_tensors(monkeypatch)
    found = laws(planted_bugs.poisson(), bert).noise(RunKey.from_seed(1), alpha=1e-3)
    assert "same sign in two tensors" in [check.name for check in found.failures]


def test_noise_checks_are_exact():
    """Of 400 samples of ideal noise, more than 8 alarms at alpha = 0.005 have a probability below 2e-4."""
    plan = planted_bugs.schedule()
    random = np.random.default_rng(0)
    alarms = 0
    for _ in range(400):
        white = plan.noise_multiplier * random.normal(size=(12, 10))
        rows = np.linalg.solve(plan.strategy.matrix()[:12, :12], white)
        checks = noise_checks({"a": rows[:, :6], "b": rows[:, 6:]}, plan)
        alarms += any(check.p_value < 0.005 / len(checks) for check in checks)
    assert alarms <= 8


def test_what_is_not_a_number_is_caught():
    plan = planted_bugs.poisson()
    rows = plan.noise_multiplier * np.random.default_rng(0).normal(size=(12, 10))
    assert min(check.p_value for check in noise_checks({"a": rows}, plan)) > 1e-5
    rows[3, 4] = np.nan
    assert min(check.p_value for check in noise_checks({"a": rows}, plan)) == 0
    own = laws(plan)
    drawn, empty = np.zeros((2, 19)), np.zeros((2, 21))
    broken = empty.copy()
    broken[1, 20] = np.nan
    found = own._compare({"coefficients": empty}, {"coefficients": broken}, drawn, IN, "")
    assert [check.p_value for check in found] == [0, 0]
    assert np.isfinite(found[0].observed)


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

    monkeypatch.setattr(release_laws, "select_held_out", everything)


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
