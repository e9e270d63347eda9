"""Algorithm 1, step by step."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from tests.small_world import NUM_FEATURES, forged

from coowned import InputError
from coowned.accounting.statement import rounded_up
from coowned.content.data import FeatureTable, with_norms
from coowned.errors import CertificateMismatchError
from coowned.exact.noise import NoiseStream
from coowned.mechanism.banded_strategy import BandedStrategy
from coowned.models.logistic_regression import LogisticRegression
from coowned.synthetic.logistic_data import LogisticData, WorldData
from coowned.training import optimizers
from coowned.training.loop import Trainer, train, train_without_privacy
from coowned.training.progress import privacy_so_far
from coowned.training.sweep import sweep

MODEL = LogisticRegression(num_features=NUM_FEATURES)


def plain_training(plan, data, *, forget_clip=False, divide_by_drawn=False):
    """Algorithm 1 in numpy: no JAX, no streaming, float64; returns the parameters after every step.

    z is read from the stream of independent noise; C is built as a matrix and inverted.
    """
    size = NUM_FEATURES + 1
    stream = NoiseStream(
        plan.run_key,
        deviations=[2.0**40],
        coefficients=(1.0,),
        shapes={"coefficients": (size,)},
        iterations=plan.iterations,
    )
    z = np.stack([stream.next()["coefficients"][0] for _ in range(plan.iterations)]) / 2.0**40
    strategy = np.eye(plan.iterations) if plan.strategy is None else plan.strategy.matrix()
    noise = np.linalg.inv(strategy) @ z
    parameters, first, second, after = np.zeros(size), np.zeros(size), np.zeros(size), []
    for t, batch in enumerate(plan.batches()):
        total = np.zeros(size)
        chosen = batch.examples[batch.mask]
        for example in chosen:
            x = np.append(data.world.features([example])[0].astype(np.float64), 1.0)
            y = data.world.labels([example])[0]
            gradient = (1 / (1 + math.exp(-parameters @ x)) - y) * x
            norm = np.linalg.norm(gradient)
            total += gradient if forget_clip else gradient * min(1, plan.clip_norm / norm)
        divisor = max(1, len(chosen)) if divide_by_drawn else plan.batch_size
        g = total / divisor + plan.clip_norm * plan.noise_multiplier / plan.batch_size * noise[t]
        first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g * g
        parameters = parameters - plan.learning_rate * (first / (1 - 0.9 ** (t + 1))) / (
            np.sqrt(second / (1 - 0.999 ** (t + 1))) + 1e-8
        )
        after.append(parameters)
    return np.stack(after)


def coefficients(plan, data, **options):
    return train(plan, MODEL, data, **options).parameters["coefficients"]


def steps_of(plan, data):
    """The parameters after 1, 2, ... steps."""
    trainer, path = Trainer([plan], MODEL), []
    state = trainer.initial_state(MODEL.initial())
    trainer.run(
        with_norms(data), state, [], start=0, after=lambda step, s, rows: path.append(np.array(s[0]["coefficients"][0]))
    )
    return np.stack(path)


def every_step(small, kind):
    plan = small.plan(kind)
    return plan, steps_of(plan, small.data)


@pytest.mark.parametrize("kind", ["dp-sgd", "dp-mf", "cyclic-dp-mf"])
def test_equals_plain_numpy(small, kind):
    plan, path = every_step(small, kind)
    assert path.shape == (plan.iterations, NUM_FEATURES + 1)
    # float32 against float64, and the noise's factor 1 + 1e-5; Adam divides by roots of small numbers.
    np.testing.assert_allclose(path, plain_training(plan, small.data), rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("fault", ["forget_clip", "divide_by_drawn"])
def test_the_comparison_sees_faults(small, fault):
    plan, path = every_step(small, "dp-sgd")
    wrong = plain_training(plan, small.data, **{fault: True})
    assert not np.allclose(path, wrong, rtol=2e-3, atol=2e-4)


def test_one_band_trains_as_dp_sgd(small, monkeypatch):
    """b = 1: DP-MF with one band and DP-SGD, on the same batches, through the whole loop, to the bit in every step."""
    banded = small.plan("dp-mf", num_bands=1)
    assert banded.strategy is not None
    assert banded.coefficients.tolist() == [1.0]
    plain = small.plan("dp-sgd")
    assert plain.strategy is None
    path = steps_of(banded, small.data)
    assert not np.array_equal(path, steps_of(plain, small.data))  # other batches
    own = type(plain).batches
    with monkeypatch.context() as patch:
        patch.setattr(type(plain), "batches", lambda self, **options: own(banded, **options))
        assert np.array_equal(path, steps_of(plain, small.data))
    # And with coins: Poisson batches, with no strategy and with one of one band.
    one = dataclasses.replace(plain, strategy=BandedStrategy(num_bands=1, iterations=plain.iterations))
    assert np.array_equal(steps_of(one, small.data), steps_of(plain, small.data))
    two = small.plan("dp-mf", num_bands=2)  # and it can fail: two bands are other noise on the same batches
    assert not np.allclose(steps_of(two, small.data), path, atol=1e-3)
    np.testing.assert_allclose(path, plain_training(banded, small.data), rtol=2e-3, atol=2e-4)


def test_an_empty_batch_is_a_step_of_noise(small):
    """With p so small that nothing is drawn, the model still moves, by noise over the public batch size."""
    plan = small.plan(iterations=1, optimizer="sgd", learning_rate=1.0)
    nothing = dataclasses.replace(plan.mechanism, sampling_probability=1e-12)
    made = forged(plan.guarantee, mechanism=nothing)
    plan = dataclasses.replace(plan, mechanism=nothing, guarantee=made)
    trained = train(plan, MODEL, small.data)
    assert trained.metrics["copies"].to_list() == [0]
    grid = MODEL.grid(plan.clip_norm)
    stream = NoiseStream(
        plan.run_key,
        deviations=[grid.noise_deviation(plan.noise_multiplier)],
        coefficients=(1.0,),
        shapes=MODEL.shapes(),
        iterations=1,
    )
    noise = stream.next()["coefficients"][0] * grid.unit / plan.batch_size
    np.testing.assert_allclose(trained.parameters["coefficients"], -noise, rtol=1e-6)
    assert 0.2 < np.std(noise) / (0.3 * 0.7 / 20) < 3


def test_not_finite_examples_add_nothing(small):
    features, labels = small.world.batch(np.arange(300))
    spoiled = features.copy()
    spoiled[::2] = np.nan
    spoiled[1, 0] = np.inf
    table = FeatureTable(graph=small.graph, features=spoiled, labels=labels)
    assert np.isfinite(coefficients(small.plan(), table)).all()
    without = small.plan(guarantee=None, clip_norm=None)
    plain = coefficients(without, table)
    assert np.isfinite(plain).all()
    zeroed = FeatureTable(graph=small.graph, features=np.where(np.isfinite(spoiled), spoiled, 0), labels=labels)
    assert not np.allclose(plain, coefficients(without, zeroed), atol=1e-3)  # those would add to the intercept


def test_timing_and_optimizers(small):
    plan = small.plan()
    assert np.array_equal(coefficients(plan, small.data), coefficients(plan, small.data))
    assert not np.array_equal(coefficients(plan, small.data), coefficients(small.plan(optimizer="sgd"), small.data))


def test_stored_and_made_features_agree(small):
    """Gathered, read where they lie, or made on demand."""
    features, labels = small.world.batch(np.arange(300))
    table = FeatureTable(graph=small.graph, features=features, labels=labels)
    order = np.random.default_rng(0).permutation(300)
    other = FeatureTable(graph=small.graph, features=features[order], labels=labels[order], rows=np.argsort(order))
    stored = WorldData.part(small.world.materialize())
    made = train(small.plan(), MODEL, small.data)
    for data in (table, other, stored):
        found = train(small.plan(), MODEL, data)
        assert np.array_equal(found.parameters["coefficients"], made.parameters["coefficients"])
        assert found.metrics.equals(made.metrics)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_one_program_whatever_the_batch(small, optimizer, monkeypatch):
    """Batches of many padded sizes; what follows the noise is compiled once, and gets one shape."""
    optimizers.compiled_update.cache_clear()
    plan = small.plan(batch_size=60, iterations=12, optimizer=optimizer)
    sizes = {batch.physical_size for batch in plan.batches()}
    assert len(sizes) > 1
    train(plan, MODEL, small.data)
    assert optimizers.compiled_update(optimizers.Rule(optimizer))._cache_size() == 1


def test_without_privacy(small):
    private = small.plan()
    plain = small.plan(guarantee=None, clip_norm=None)
    infinite = small.plan(guarantee=None, clip_norm=math.inf)
    one, other = coefficients(plain, small.data), coefficients(infinite, small.data)
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    assert not np.allclose(one, coefficients(private, small.data), atol=1e-3)
    trained = train(plain, MODEL, small.data)
    assert trained.statement().startswith("No guarantee: this model was trained without privacy")
    assert "epsilon" not in trained.statement()
    public = small.plan(guarantee=None, clip_norm=None, public=True)
    assert "declared public" in public.statement()


def test_mismatches_are_refused(small):
    plan = small.plan()
    other = LogisticData(num_features=NUM_FEATURES).attach(small.graph.subgraph(np.arange(299)), seed=5)
    with pytest.raises(CertificateMismatchError, match="another graph"):
        train(plan, MODEL, WorldData.part(other))
    moved = small.plan("dp-mf").selected
    with pytest.raises(CertificateMismatchError):
        train(dataclasses.replace(plan, selected=moved), MODEL, small.data)
    schedule = small.plan("dp-mf")
    small_claim = dataclasses.replace(schedule.mechanism, sensitivity=0.5)
    made = forged(schedule.guarantee, mechanism=small_claim)
    with pytest.raises(CertificateMismatchError, match="clip norms"):
        train(dataclasses.replace(schedule, mechanism=small_claim, guarantee=made), MODEL, small.data)
    cyclic = small.plan("cyclic-dp-mf")
    less = tuple(p / 2 for p in cyclic.mechanism.group_probabilities)
    less_mechanism = dataclasses.replace(cyclic.mechanism, group_probabilities=less, sampling_probability=max(less))
    made = forged(cyclic.guarantee, mechanism=less_mechanism)
    with pytest.raises(CertificateMismatchError, match="would be drawn with"):
        train(dataclasses.replace(cyclic, mechanism=less_mechanism, guarantee=made), MODEL, small.data)


def test_a_key_serves_one_run(small):
    plan = small.plan()
    real = forged(plan.guarantee, test_run=False)
    plan = dataclasses.replace(plan, guarantee=real, run_key=type(plan.run_key).from_operating_system())
    first = coefficients(plan, small.data)
    assert np.array_equal(coefficients(plan, small.data), first)  # the same run again gives nothing away
    features, labels = small.world.batch(np.arange(300))
    edited = FeatureTable(graph=small.graph, features=features, labels=1 - labels)
    for other, data in ((dataclasses.replace(plan, learning_rate=0.5), small.data), (plan, edited)):
        with pytest.raises(InputError, match="was used by another run"):
            train(other, MODEL, data)
        with pytest.raises(InputError, match="was used by another run"):
            sweep([other], MODEL, data)
    # Another configuration has other noise but the same coins: two such runs would pass for independent ones.
    with pytest.raises(InputError, match="was used by another run"):
        train(dataclasses.replace(plan, learning_rate=0.5, configuration="other"), MODEL, small.data)
    without = dataclasses.replace(plan, guarantee=None)  # the coins alone, without noise
    with pytest.raises(InputError, match="was used by another run"):
        train(without, MODEL, small.data)


def test_content_that_was_written_over_is_another_run(small):
    features, labels = small.world.batch(np.arange(300))
    data = FeatureTable(graph=small.graph, features=features, labels=labels)
    plan = small.plan()
    real = forged(plan.guarantee, test_run=False)
    plan = dataclasses.replace(plan, guarantee=real, run_key=type(plan.run_key).from_operating_system())
    train(plan, MODEL, data)
    features *= 5
    with pytest.raises(InputError, match="was used by another run"):
        train(plan, MODEL, data)


def test_bad_input(small):
    with pytest.raises(InputError, match="features"):
        train(small.plan(), LogisticRegression(num_features=7), small.data)
    with pytest.raises(InputError, match="devices"):
        train(small.plan(), MODEL, small.data, devices=99)
    with pytest.raises(InputError, match="checkpoint_every"):
        train(small.plan(), MODEL, small.data, checkpoint_every=0)
    with pytest.raises(InputError, match="initial"):
        train(small.plan(), MODEL, small.data, initial={"coefficients": np.zeros(2, np.float32)})


def test_starting_from_parameters(small):
    start = {"coefficients": np.full(NUM_FEATURES + 1, 0.5, np.float32)}
    moved = coefficients(small.plan(optimizer="sgd", learning_rate=1e-6), small.data, initial=start)
    np.testing.assert_allclose(moved, 0.5, atol=1e-4)


def test_progress_and_privacy_so_far(small):
    said = []
    train(small.plan(), MODEL, small.data, progress=lambda done, text: said.append((done, text)))
    assert said[-1][0] == 1.0
    assert "steps/s" in said[-1][1]
    assert "no guarantee" in said[-1][1]  # a test run
    for kind in ("dp-sgd", "dp-mf", "cyclic-dp-mf"):
        plan = small.plan(kind)
        real = forged(plan.guarantee, test_run=False)
        key = type(plan.run_key).from_operating_system()
        plan = dataclasses.replace(plan, guarantee=real, run_key=key)
        assert privacy_so_far(plan, 0) == ""
        half = float(privacy_so_far(plan, 6).split()[1])
        assert 0 < half < real.epsilon
        assert privacy_so_far(plan, 12) == f"epsilon {rounded_up(real.epsilon)} after 12 steps"


@pytest.mark.full
def test_two_devices_equal_one(tmp_path):
    """In processes of their own: the number of devices is fixed when JAX starts."""
    code = textwrap.dedent(
        """
        import json
        from tests.small_world import Small, NUM_FEATURES
        from coowned import AttributionGraph
        from coowned.synthetic.logistic_data import LogisticData
        from coowned.synthetic.logistic_data import WorldData
        from coowned.training.loop import train
        from coowned.models.logistic_regression import LogisticRegression
        rows = [[i % 120] for i in range(300)]
        graph = AttributionGraph.from_users_per_example(rows, num_users=120)
        world = LogisticData(num_features=NUM_FEATURES).attach(graph, seed=5)
        small = Small(graph, world, WorldData.part(world))
        import jax
        plan, model = small.plan("dp-mf", batch_size=16), LogisticRegression(num_features=NUM_FEATURES)
        found = [train(plan, model, small.data, devices=n).parameters["coefficients"].tolist() for n in (1, 2)]
        print(json.dumps([len(jax.devices()), *found]))
        """
    )
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    environment = os.environ | flags | {"PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    devices, one, two = json.loads(done.stdout)
    assert devices == 2
    np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_a_batch_lies_on_two_devices():
    """Half of its rows on each, and the parameters on both; in a process of its own, as above."""
    code = textwrap.dedent(
        """
        import json
        from tests.small_world import Small, NUM_FEATURES
        from coowned import AttributionGraph
        from coowned.synthetic.logistic_data import LogisticData
        from coowned.training import loop
        from coowned.training import step
        from coowned.synthetic.logistic_data import WorldData
        from coowned.models.logistic_regression import LogisticRegression
        graph = AttributionGraph.from_users_per_example([[i % 120] for i in range(300)], num_users=120)
        world = LogisticData(num_features=NUM_FEATURES).attach(graph, seed=5)
        small = Small(graph, world, WorldData.part(world))
        seen, compiled_mean = [], step.compiled_mean

        def placed(array):
            return [[shard.device.id, shard.data.shape[0]] for shard in getattr(array, "addressable_shards", [])]

        def watched(model):
            def look(parameters, batch, mask, *more):
                seen.append([len(mask), placed(batch["features"]), placed(mask), placed(parameters["coefficients"])])
                return compiled_mean(model)(parameters, batch, mask, *more)

            return look

        step.compiled_mean = watched
        model = LogisticRegression(num_features=NUM_FEATURES)
        plain = small.plan(batch_size=16, iterations=3, guarantee=None, clip_norm=None)
        loop.train(plain, model, small.data, devices=2)
        print(json.dumps(seen))
        """
    )
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    environment = os.environ | flags | {"PYTHONPATH": os.pathsep.join([root, os.path.join(root, "src")])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    seen = json.loads(done.stdout)
    assert len(seen) == 3
    for size, features, mask, coefficients in seen:
        assert sorted(features) == sorted(mask) == [[0, size // 2], [1, size // 2]]
        assert sorted(coefficients) == [[0, 1], [1, 1]]  # one model on each


def test_baseline_is_the_plain_run(small):
    """Without noise and without clipping, on the batches of the private run; and its key is not used up by it."""
    plan = small.plan()
    plain = train(small.plan(guarantee=None, clip_norm=None), MODEL, small.data).parameters
    found = train_without_privacy(plan, MODEL, small.data)
    assert np.array_equal(found["coefficients"], plain["coefficients"])
    assert not np.array_equal(found["coefficients"], train(plan, MODEL, small.data).parameters["coefficients"])
