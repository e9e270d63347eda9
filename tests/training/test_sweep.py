"""Sweeps: many configurations in one pass, each as if alone."""

import dataclasses

import numpy as np
import pytest
from tests.training.conftest import NUM_FEATURES

from coowned import InputError, guarantee
from coowned.mechanism.keys import RunKey
from coowned.mechanism.noise import NoiseStream
from coowned.training.loop import train
from coowned.training.models.logistic_regression import LogisticRegression
from coowned.training.sweep import grid, sweep

MODEL = LogisticRegression(num_features=NUM_FEATURES)


def members(small, kind="dp-sgd", **changes):
    plan = small.plan(kind, **changes)
    guarantees = [
        guarantee(
            plan.certificate,
            plan.mechanism,
            noise_multiplier=sigma,
            delta=1e-5,
            adjacency="zero-out",
            test_run=True,
            run_id="one sweep",
        )
        for sigma in (0.4, 1.5)
    ]
    return grid(plan, learning_rates=[0.01, 0.1], clip_norms=[0.1, 1.0], noise=guarantees)


@pytest.mark.parametrize("kind", ["dp-sgd", "dp-mf"])
def test_sweep_equals_single_runs(small, kind):
    plans = members(small, kind)
    assert len(plans) == 8
    swept = sweep(plans, MODEL, small.data)
    for number, plan in enumerate(plans):
        alone = train(plan, MODEL, small.data).parameters["coefficients"]
        np.testing.assert_allclose(swept.member(number)["coefficients"], alone, rtol=1e-3, atol=1e-5)
    different = {tuple(np.round(row, 4)) for row in swept.parameters["coefficients"].tolist()}
    assert len(different) == 8


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
    expected = -plan.noise_scale * (rows[0] - rows[1])
    np.testing.assert_allclose(coefficients[0] - coefficients[1], expected, rtol=1e-4, atol=1e-6)
    assert np.abs(expected).max() > 1e-3


def noise_row(run_key):
    stream = NoiseStream(run_key, coefficients=(1.0,), shapes=MODEL.shapes(), iterations=1, configurations=["a", "b"])
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
        with pytest.raises(InputError, match="sweep them apart"):
            sweep([plans[0], other], MODEL, small.data)


def test_statement_covers_one_model(small):
    plans = members(small)
    swept = sweep(plans, MODEL, small.data)
    said = swept.statement(3)
    assert "ONE model of a sweep of 8" in said
    assert "no bound" in said
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
    with pytest.raises(InputError, match="ONE run"):
        sweep(grid(plan, learning_rates=[0.1], clip_norms=[1.0], noise=apart), MODEL, small.data)
