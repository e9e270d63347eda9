"""Sweeps: many configurations in one pass, each as if alone."""

import dataclasses
import json
import stat

import numpy as np
import polars as pl
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file
from tests.models.test_jax_model import dropout_loss, make_data, make_model
from tests.runs.test_run_folder import Stopped, run_and_kill, stop_after
from tests.small_world import NUM_FEATURES

from coowned import InputError, evaluate, guarantee
from coowned.content.data import FeatureTable
from coowned.errors import CertificateMismatchError
from coowned.exact.keys import RunKey
from coowned.exact.noise import NoiseStream
from coowned.models.logistic_regression import LogisticRegression
from coowned.runs import run_folder
from coowned.runs.run_folder import RunFolder
from coowned.runs.stored_run import StoredRun, read_claim
from coowned.training.loop import train
from coowned.training.sweep import grid, sweep

MODEL = LogisticRegression(num_features=NUM_FEATURES)


def members(small, kind="dp-sgd", **changes):
    plan = small.plan(kind, **changes)
    return grid(
        plan.certificate,
        plan.selected,
        plan.mechanism,
        noise_multipliers=[0.4, 1.5],
        learning_rates=[0.01, 0.1],
        clip_norms=[0.1, 1.0],
        delta=1e-5,
        adjacency="zero-out",
        run_key=plan.run_key,
        run_id="one sweep",
    )


@pytest.mark.parametrize("kind", ["dp-sgd", "dp-mf"])
def test_sweep_equals_single_runs(small, kind):
    plans = members(small, kind)
    assert len(plans) == 8
    swept = sweep(plans, MODEL, small.data)
    for number, plan in enumerate(plans):
        alone = train(plan, MODEL, small.data).parameters["coefficients"]
        assert np.linalg.norm(swept.member(number)["coefficients"] - alone) <= 1e-4 * np.linalg.norm(alone)
    different = {tuple(np.round(row, 4)) for row in swept.parameters["coefficients"].tolist()}
    assert len(different) == 8


def sweep_of_any_model(small, **changes):
    """(plans, model, data) of four members of a small network."""
    plans = [plan for plan in members(small, **changes) if plan.noise_multiplier == 0.4]
    return plans, make_model(loss=dropout_loss), make_data(small)


@pytest.mark.parametrize("kind", ["dp-sgd", pytest.param("dp-mf", marks=pytest.mark.full)])
def test_members_of_any_model_equal_single_runs(small, kind):
    plans, model, data = sweep_of_any_model(small, kind=kind)
    initial = {name: array + 0.1 for name, array in model.initial().items()}
    swept = sweep(plans, model, data, initial=initial)
    for number, plan in ((0, plans[0]), (3, plans[3])):
        alone = train(plan, model, data, initial=initial).parameters
        for name, array in swept.member(number).items():
            np.testing.assert_allclose(array, alone[name], rtol=1e-4, atol=1e-5)
    assert len({array.tobytes() for array in swept.parameters["layers/0/w"]}) == 4
    compared = swept.compare(data, split="validation")
    for number, row in enumerate(compared.to_dicts()):
        alone = evaluate(model, swept.member(number), data, split="validation")
        assert row["loss"] == pytest.approx(alone["loss"][0])
        assert row["accuracy"] == pytest.approx(alone["accuracy"][0])


def test_sweep_of_any_model_is_resumed(small, tmp_path):
    plans, model, data = sweep_of_any_model(small)
    straight = sweep(plans, model, data).parameters
    with RunFolder.open(tmp_path / "run") as folder, pytest.raises(Stopped):
        sweep(plans, model, data, folder=folder, checkpoint_every=2, progress=stop_after(0.5))
    with RunFolder.open(tmp_path / "run") as folder:
        resumed = sweep(plans, model, data, folder=folder, checkpoint_every=2).parameters
    assert all(np.array_equal(straight[name], resumed[name]) for name in straight)


@pytest.mark.full
def test_sweep_of_any_model_without_privacy(small):
    _, model, data = sweep_of_any_model(small)
    plan = small.plan(guarantee=None, clip_norm=None)
    plans = [dataclasses.replace(plan, learning_rate=rate, configuration=f"{rate}") for rate in (0.01, 0.1)]
    swept = sweep(plans, model, data)
    for number, member in enumerate(plans):
        alone = train(member, model, data).parameters
        for name, array in swept.member(number).items():
            np.testing.assert_allclose(array, alone[name], rtol=1e-3, atol=1e-4)


def test_members_differ_in_options(small):
    plan = small.plan()
    options = {"decay": ["constant", "cosine"], "average": ["none", "tail", "exponential"], "weight_decay": [0.0, 0.5]}
    plans = grid(
        plan.certificate, plan.selected, plan.mechanism, noise_multipliers=[0.4], learning_rates=[0.1],
        clip_norms=[1.0], delta=1e-5, adjacency="zero-out", run_key=plan.run_key, **options,
    )  # fmt: skip
    swept = sweep(plans, MODEL, small.data)
    assert swept.members()["average"].to_list() == [member.average for member in plans]
    for number, member in enumerate(plans):
        alone = train(member, MODEL, small.data).parameters["coefficients"]
        assert np.linalg.norm(swept.member(number)["coefficients"] - alone) <= 1e-4 * np.linalg.norm(alone)
    assert len({tuple(np.round(row, 4)) for row in swept.parameters["coefficients"].tolist()}) == 12
    with pytest.raises(InputError, match="averages"):
        grid(
            plan.certificate, plan.selected, plan.mechanism, noise_multipliers=[0.4], learning_rates=[0.1],
            clip_norms=[1.0], delta=1e-5, adjacency="zero-out", run_key=plan.run_key, averages=["tail"],
        )  # fmt: skip


def test_a_sweep_of_one(small):
    plan = small.plan()
    swept = sweep([plan], MODEL, small.data)
    assert np.array_equal(swept.member(0)["coefficients"], train(plan, MODEL, small.data).parameters["coefficients"])


def test_members_have_their_own_noise(small):
    """The noise of two members over 300 run keys: 2100 pairs of numbers.

    The correlation of so many independent pairs exceeds 0.11 with probability 5e-7.
    """
    one, two = [], []
    for seed in range(300):
        a, b = noise_row(RunKey.from_seed(seed))
        one.append(a)
        two.append(b)
    assert abs(np.corrcoef(np.ravel(one), np.ravel(two))[0, 1]) < 0.11
    # And that is what the sweep adds: after one step of sgd, two members of equal settings differ by their noise alone.
    plan = small.plan(iterations=1, optimizer="sgd", learning_rate=1.0)
    pair = [dataclasses.replace(plan, configuration=name) for name in ("a", "b")]
    coefficients = sweep(pair, MODEL, small.data).parameters["coefficients"]
    rows = noise_row(plan.run_key)
    expected = -(rows[0] - rows[1]) * 2.0**-30 * plan.clip_norm * plan.noise_multiplier / plan.batch_size
    np.testing.assert_allclose(coefficients[0] - coefficients[1], expected, rtol=1e-5, atol=1e-6)
    assert np.abs(expected).max() > 1e-3


def noise_row(run_key):
    settings = {"coefficients": (1.0,), "shapes": MODEL.shapes(), "iterations": 1}
    stream = NoiseStream(run_key, deviations=[2.0**30] * 2, configurations=["a", "b"], **settings)
    return stream.next()["coefficients"]


def test_plans_that_differ_are_refused(small):
    plans = members(small)
    with pytest.raises(InputError, match="at least one"):
        sweep([], MODEL, small.data)
    with pytest.raises(InputError, match="share noise"):
        sweep([plans[0], plans[0]], MODEL, small.data)
    for other in (
        small.plan(iterations=13, configuration="x"),
        small.plan(seed=4, configuration="x"),
        small.plan(optimizer="sgd", configuration="x"),
        small.plan("dp-mf", configuration="x"),
        small.plan(guarantee=None, configuration="x"),
    ):
        with pytest.raises(InputError, match="sweep them separately"):
            sweep([plans[0], other], MODEL, small.data)


def test_statement_covers_one_model(small):
    plans = members(small)
    swept = sweep(plans, MODEL, small.data)
    said = swept.statement(3)
    assert "ONE model of a sweep of 8" in said
    assert "is not a bound" in said
    assert said.startswith("1. No guarantee")  # a test run
    alone = sweep([small.plan(guarantee=None)], MODEL, small.data)
    assert alone.statement(0).startswith("No guarantee")
    with pytest.raises(InputError, match="without privacy"):
        alone.noise_multiplier_of_all()


def test_noise_multiplier_of_all(small):
    plans = members(small)
    swept = sweep(plans, MODEL, small.data)
    sigmas = np.array([plan.noise_multiplier for plan in plans])
    assert swept.noise_multiplier_of_all() == pytest.approx((sigmas**-2.0).sum() ** -0.5)
    assert swept.noise_multiplier_of_all() < sigmas.min()


def test_compare(small):
    plans = members(small)
    swept = sweep(plans, MODEL, small.data)
    table = swept.compare(small.data, split="validation")
    assert table.height == 8
    assert table["split"].unique().to_list() == ["validation"]
    logits = (
        small.world.features(np.arange(300)) @ swept.member(2)["coefficients"][:-1]
        + swept.member(2)["coefficients"][-1]
    )
    right = (logits > 0) == (small.world.labels(np.arange(300)) > 0)
    assert table["accuracy"][2] == pytest.approx(right.mean())
    assert not table["covered_by_guarantee"].any()


def test_members_of_a_sweep_cannot_be_composed(small):
    plan = small.plan()
    fields = {"delta": 1e-5, "adjacency": "zero-out", "test_run": True}
    apart = [guarantee(plan.certificate, plan.mechanism, noise_multiplier=sigma, **fields) for sigma in (1.0, 2.0)]
    plans = [dataclasses.replace(plan, guarantee=one, configuration=one.run_id) for one in apart]
    with pytest.raises(InputError, match="ONE run"):
        sweep(plans, MODEL, small.data)


def test_grid_makes_one_run(small):
    plan = small.plan()
    parts = (plan.certificate, plan.selected, plan.mechanism)
    terms = {"delta": 1e-5, "adjacency": "zero-out", "learning_rates": [0.01, 0.1], "clip_norms": [0.1, 1.0]}
    plans = grid(*parts, epsilons=[2, 8], **terms, run_key=plan.run_key)
    assert len({member.configuration for member in plans}) == 8
    assert len({member.guarantee.run_id for member in plans}) == 1
    assert all(member.guarantee.test_run for member in plans)
    assert [member.guarantee.target_epsilon for member in plans] == [2] * 4 + [8] * 4
    real = grid(*parts, epsilons=[2, 8], **terms, run_key=RunKey.from_operating_system())
    assert not any(member.guarantee.test_run for member in real)
    assert real[0].guarantee.run_id != plans[0].guarantee.run_id
    for wrong in ({}, {"epsilons": [2], "noise_multipliers": [1.0]}):
        with pytest.raises(InputError, match="either epsilons or noise_multipliers"):
            grid(*parts, **terms, **wrong, run_key=plan.run_key)


# ---- folders ---------------------------------------------------------------------------------------------------------


def begin_and_stop(place, small, steps, kind="dp-sgd"):
    """A sweep that is left after `steps` steps; gives its members."""
    with RunFolder.open(place) as folder:
        plans = members(small, kind, run_key=folder.run_key(3))
        with pytest.raises(Stopped):
            sweep(
                plans,
                MODEL,
                small.data,
                folder=folder,
                checkpoint_every=2,
                progress=stop_after(steps / plans[0].iterations),
            )
    return plans


def resume(place, plans, data, **options):
    with RunFolder.open(place) as folder:
        return sweep(plans, options.pop("model", MODEL), data, folder=folder, **options)


@pytest.mark.parametrize(("kind", "steps"), [("dp-sgd", 1), ("dp-sgd", 6), ("dp-mf", 5)])
def test_resumed_sweep_is_bit_identical(small, tmp_path, kind, steps):
    plans = begin_and_stop(tmp_path / "run", small, steps, kind)
    whole = sweep(plans, MODEL, small.data)
    again = resume(tmp_path / "run", plans, small.data)
    assert np.array_equal(whole.parameters["coefficients"], again.parameters["coefficients"])
    for number in range(len(plans)):
        stored = load_file(tmp_path / "run" / f"model-{number}.safetensors")
        assert np.array_equal(stored["weights"], whole.member(number)["coefficients"][:-1])
        assert np.array_equal(stored["intercept"], whole.member(number)["coefficients"][-1])


def test_a_sweep_at_another_step_would_be_seen(small, tmp_path, monkeypatch):
    """The comparison above can fail: a checkpoint that is off by one step gives other models."""
    plans = begin_and_stop(tmp_path / "run", small, 5)
    read = RunFolder._read_checkpoint
    monkeypatch.setattr(RunFolder, "_read_checkpoint", lambda self: read(self)._replace(step=3))
    again = resume(tmp_path / "run", plans, small.data)
    assert not np.array_equal(
        again.parameters["coefficients"], sweep(plans, MODEL, small.data).parameters["coefficients"]
    )


def test_files_of_a_sweep(small, tmp_path):
    """One model each, which only the owner can read: one of them may be released, and its file says so."""
    place = tmp_path / "run"
    plans = begin_and_stop(place, small, 5)
    assert stat.S_IMODE((place / "checkpoint.safetensors").stat().st_mode) == 0o600
    swept = resume(place, plans, small.data)
    models = [f"model-{number}.safetensors" for number in range(8)]
    assert sorted(file.name for file in place.iterdir()) == sorted(
        [*models, "members.parquet", "run.json", "certificate.json", "guarantee.json"]
    )
    with safe_open(place / models[3], framework="numpy") as opened:
        metadata = opened.metadata()
    assert metadata["statement"] == swept.statement(3)
    assert metadata["configuration"] == plans[3].configuration
    assert json.loads(metadata["model"]) == MODEL.describe()
    for private in (models[3], "certificate.json"):
        assert stat.S_IMODE((place / private).stat().st_mode) == 0o600
    listed = pl.read_parquet(place / "members.parquet")
    assert listed["configuration"].to_list() == [plan.configuration for plan in plans]
    assert listed["clip_norm"].to_list() == [plan.clip_norm for plan in plans]
    with RunFolder.open(place) as folder:  # its own files are no strangers
        assert folder.is_finished


def test_finished_sweep_is_refused(small, tmp_path):
    plans = begin_and_stop(tmp_path / "run", small, 5)
    resume(tmp_path / "run", plans, small.data)
    before = (tmp_path / "run" / "model-0.safetensors").read_bytes()
    with pytest.raises(InputError, match="this run is finished"):
        resume(tmp_path / "run", plans, small.data)
    assert (tmp_path / "run" / "model-0.safetensors").read_bytes() == before


def test_changed_sweep_is_refused(small, tmp_path, monkeypatch):
    place = tmp_path / "run"
    plans = begin_and_stop(place, small, 5)
    changed = dataclasses.replace(plans[7], learning_rate=0.2)
    for other in (plans[:7], [*plans[:7], changed], plans[::-1], plans[:1]):
        with pytest.raises(CertificateMismatchError, match="different selection, mechanism, noise"):
            resume(place, other, small.data)
    features, labels = small.world.batch(np.arange(300))
    table = FeatureTable(graph=small.graph, features=features, labels=1 - labels)
    with pytest.raises(CertificateMismatchError, match="different data"):
        resume(place, plans, table)
    with pytest.raises(CertificateMismatchError, match="configuration file"):
        resume(place, plans, small.data, configuration_digest="other")
    with pytest.raises(CertificateMismatchError, match="different selection"):
        resume(place, [dataclasses.replace(plan, run_key=RunKey.from_seed(4)) for plan in plans][:2], small.data)
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "code_digest", lambda: "other")
        with pytest.raises(CertificateMismatchError, match="version of the code"):
            resume(place, plans, small.data)
    with RunFolder.open(place) as folder, pytest.raises(CertificateMismatchError, match="different selection"):
        train(plans[0], MODEL, small.data, folder=folder)  # a member is not the sweep
    with pytest.raises(InputError, match="checkpoint_every"):
        resume(place, plans, small.data, checkpoint_every=0)
    resume(place, plans, small.data)  # and what has not changed is still resumed


PROGRAM = """
import sys
from coowned import AttributionGraph
from coowned.synthetic.logistic_data import LogisticData
from coowned.runs.run_folder import RunFolder
from coowned.synthetic.logistic_data import WorldData
from coowned.models.logistic_regression import LogisticRegression
from coowned.training.sweep import sweep
from tests.small_world import NUM_FEATURES, Small
from tests.training.test_sweep import members
graph = AttributionGraph.from_users_per_example([[i % 120] for i in range(300)], num_users=120)
world = LogisticData(num_features=NUM_FEATURES).attach(graph, seed=5)
small = Small(graph, world, WorldData.part(world))
with RunFolder.open(sys.argv[1]) as folder:
    plans = members(small, "dp-mf", run_key=folder.run_key(3), iterations=2000, batch_size=4)
    print("ready", flush=True)
    sweep(plans, LogisticRegression(num_features=NUM_FEATURES), small.data, folder=folder, checkpoint_every=7)
"""


@pytest.mark.full
def test_killed_sweep_is_bit_identical(tmp_path):
    run_and_kill(PROGRAM, tmp_path)
    for number in range(8):
        one, two = (load_file(tmp_path / name / f"model-{number}.safetensors") for name in ("whole", "killed"))
        assert np.array_equal(one["weights"], two["weights"])
        assert np.array_equal(one["intercept"], two["intercept"])


def test_a_sweep_counts_with_all_its_models(small, tmp_path):
    with RunFolder.open(tmp_path / "sweep") as folder:
        key = folder.run_key(None)
        first = small.plan(run_key=key, guarantee=None)
        plans = grid(
            first.certificate,
            first.selected,
            first.mechanism,
            noise_multipliers=[2.0, 3.0],
            learning_rates=[0.1],
            clip_norms=[0.3],
            delta=1e-6,
            adjacency="zero-out",
            run_key=key,
            run_id="s",
        )
        sweep(plans, MODEL, small.data, folder=folder)
    found = read_claim(tmp_path / "sweep")
    assert found.num_models == 2
    assert found.guarantee.run_id == "s"
    assert found.guarantee.noise_multiplier == pytest.approx((2.0**-2 + 3.0**-2) ** -0.5)
    assert found.guarantee.epsilon > plans[0].guarantee.epsilon
    with pytest.raises(InputError, match="a sweep"):
        StoredRun.open(tmp_path / "sweep")
