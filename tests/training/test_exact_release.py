"""The attack that a noise added in floating point falls to, on a step with such a noise and on ours."""

import json
import os
import subprocess
import sys
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from coowned.exact.grid import Grid
from coowned.exact.keys import RunKey
from coowned.exact.noise import NoiseStream, release
from coowned.models.logistic_regression import LogisticRegression
from coowned.training.optimizers import OptimizerOptions, Rates, Rule, compiled_update
from coowned.training.step import Step

SIGMA, CLIP_NORM, BATCH_SIZE, FEATURES = 1.3, 1.0, 50, 20
MODEL = LogisticRegression(num_features=FEATURES)
GRID = MODEL.grid(CLIP_NORM)
RELEASES = 400


def sums() -> tuple[np.ndarray, np.ndarray]:
    """The integer sums of a batch with a user's copy, and of the same batch in which that copy is blank."""
    generator = np.random.default_rng(0)
    features = generator.standard_normal((BATCH_SIZE, FEATURES)).astype(np.float32)
    labels = (generator.random(BATCH_SIZE) < 0.5).astype(np.float32)
    parameters = {"coefficients": 0.1 * generator.standard_normal((1, FEATURES + 1)).astype(np.float32)}
    found = []
    for blank in (False, True):
        if blank:
            labels[0] = np.nan
        batch = {"features": features, "labels": labels}
        found.append(MODEL.clipped_sum(parameters, batch, np.ones(BATCH_SIZE, bool), [GRID])[0]["coefficients"][0])
    assert not np.array_equal(*found)
    return found[0], found[1]


def noise_rows(count: int, seed: int = 0) -> np.ndarray:
    """(count, parameters) integers."""
    stream = NoiseStream(
        RunKey.from_seed(seed),
        deviations=[GRID.noise_deviation(SIGMA)],
        coefficients=(1.0,),
        shapes=MODEL.shapes(),
        iterations=count,
    )
    return np.array([stream.next()["coefficients"][0] for _ in range(count)])


def ours(total: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """What our step releases, one row of noise after the other."""
    rows = [{"w": row[None]} for row in noise]
    return np.array([release({"w": total[None]}, row, np.array([GRID.unit]), BATCH_SIZE)["w"][0] for row in rows])


def added_in_float32(total: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """The planted step: sum and noise are float32 numbers when they meet."""
    summed = np.float32(total * GRID.unit)
    return summed + np.float32(noise * GRID.unit)


def impossible_float(released: np.ndarray, blank: np.ndarray) -> bool:
    """Whether some coordinate is a float32 that no float32 noise gives when it is added to the blank sum."""
    summed = np.float32(blank * GRID.unit)
    nearest = (released - summed).astype(np.float32)
    candidates = [nearest]
    for direction in (-np.inf, np.inf):
        step = nearest
        for _ in range(3):
            step = np.nextafter(step, np.float32(direction))
            candidates.append(step)
    reachable = np.any([summed + candidate == released for candidate in candidates], axis=0)
    return not reachable.all()


def impossible_integer(released: np.ndarray, blank: np.ndarray) -> bool:
    """The same of our step: whether no integer noise on the blank sum is released as this float32."""
    scale = GRID.unit / BATCH_SIZE
    near = np.rint(released.astype(np.float64) / scale)
    # A float32 stands for many integers, or for one or none.
    found = np.any([np.float32((near + k) * scale) == released for k in range(-2, 3)], axis=0)
    del blank  # every integer minus the blank sum is an integer
    return not found.all()


def test_the_attack_succeeds_on_a_float_added_step():
    with_copy, blank = sums()
    noise = noise_rows(RELEASES)
    alarms = sum(impossible_float(row, blank) for row in added_in_float32(with_copy, noise))
    false = sum(impossible_float(row, blank) for row in added_in_float32(blank, noise))
    assert false == 0
    assert alarms > RELEASES / 2  # delta is at least that share, at every epsilon


def test_the_attack_fails_on_ours():
    with_copy, blank = sums()
    noise = noise_rows(RELEASES)
    assert not any(impossible_integer(row, blank) for row in ours(with_copy, noise))
    assert not any(impossible_integer(row, blank) for row in ours(blank, noise))


# ---- low bits --------------------------------------------------------------------------------------------------------


def low_bits_differ(noisy_sums, bits: int = 3) -> float:
    """The smaller p-value of two chi-square tests of the low bits of what is released: are they alike with the copy and
    without it, and are they uniform."""
    counts = []
    for total, seed in zip(sums(), (1, 2), strict=True):
        released = noisy_sums(total, noise_rows(4000, seed)).astype(np.int64)
        counts.append(
            [np.bincount(column, minlength=2**bits) for column in (released % 2**bits).T]
        )  # (parameters, 2^bits)
    table = np.array(counts)
    uniform = stats.chisquare(table.sum(axis=(0, 1))).pvalue
    used = table.sum(axis=0) > 0
    statistic = freedom = 0.0
    for own, shown in zip(table.transpose(1, 0, 2), used, strict=True):
        if shown.sum() > 1:
            found = stats.chi2_contingency(own[:, shown], correction=False)
            statistic, freedom = statistic + found.statistic, freedom + found.dof
    alike = float(stats.chi2.sf(statistic, freedom)) if freedom else 1.0
    return min(alike, uniform)


def test_low_bits_are_alike_in_both_worlds():
    """4,000 releases a world, 21 coordinates; false alarm 4e-6."""
    assert low_bits_differ(lambda total, noise: total + noise) > 1e-6
    assert low_bits_differ(lambda total, noise: (total + noise) >> 12) > 1e-6


@pytest.mark.parametrize(
    "planted",
    [
        lambda total, noise: total + (noise >> 12 << 12),  # noise on a coarser grid
        lambda total, noise: np.rint(np.float32(total) + np.float32(noise)),  # rounded after a float addition
        lambda total, noise: total + noise // 8 * 8,
    ],
    ids=["coarser noise", "rounded after a float addition", "a grid of 8"],
)
def test_other_low_bits_are_caught(planted):
    assert low_bits_differ(planted) < 1e-12


def test_sum_and_noise_meet_as_integers():
    """Where float64 would lose the last digit, and where the noise takes the sum back to a single unit."""
    total, noise = np.array([[2**60 + 1, 5, -(2**52) - 1]]), np.array([[-(2**60), -4, 2**52]])
    found = release({"w": total}, {"w": noise}, np.array([1.0]), 1)["w"]
    assert found.tolist() == [[1.0, 1.0, -1.0]]
    assert release({"w": total}, None, np.array([0.5]), 2)["w"].dtype == np.float32


# ---- several devices -------------------------------------------------------------------------------------------------


@pytest.mark.full
class CompiledPerPaddedSize(Step):
    """The planted bug: what follows the noise is a program for each padded size, which XLA rounds in a way of its own.

    Here the larger size multiplies by a reciprocal, as a compiler may, where the smaller divides.
    """

    def __call__(self, state, batch, mask, noise):
        summed, clipped = self.model.clipped_sum(state[0], batch, mask, self.grids)
        noisy = np.float32((summed["coefficients"] + noise["coefficients"]) * self.grids[0].unit)
        size = np.float32(self.batch_size)
        mean = noisy * (1 / size) if len(mask) > BATCH_SIZE else noisy / size
        return compiled_update(self.rule)(state, {"coefficients": mean}, self.rates), clipped


@pytest.mark.parametrize(("kind", "tells"), [(Step, False), (CompiledPerPaddedSize, True)])
def test_the_padded_size_leaves_no_trace(kind, tells):
    """It follows from how many were drawn: the same copies and noise must move the parameters to the same bits."""
    generator = np.random.default_rng(0)
    step = kind(MODEL, Rule("sgd"), Rates.of([(0.1, 1, OptimizerOptions())]), BATCH_SIZE, (GRID,))
    noise, moved = {"coefficients": noise_rows(1)}, []
    features = generator.standard_normal((2 * BATCH_SIZE, FEATURES)).astype(np.float32)
    for size in (BATCH_SIZE, 2 * BATCH_SIZE):
        state = step.rule.initial({"coefficients": jnp.zeros((1, FEATURES + 1))})
        batch = {"features": features[:size], "labels": np.zeros(size, np.float32)}
        (parameters, _), _ = step(state, batch, np.arange(size) < BATCH_SIZE, noise)
        moved.append(np.asarray(parameters["coefficients"]))
    assert np.array_equal(*moved) != tells


@pytest.mark.full
def test_two_devices_give_the_same_integers():
    """Of a model whose gradients XLA computes; in a process of its own, since devices are fixed when JAX starts."""
    code = textwrap.dedent(
        """
        import json
        import jax, numpy as np
        from tests.models.model_sums import parameters
        from tests.models.test_bert_model import MODEL, make_batch
        batch, mask, grid = make_batch(size=13), np.arange(13) != 4, MODEL.grid(1.0)
        own = {name: array[None] for name, array in parameters(MODEL).items()}
        found = []
        for devices in (1, 2):
            found.append(MODEL.clipped_sum(own, batch, mask, [grid], jax.devices()[:devices])[0])
        same = all(np.array_equal(found[0][name], found[1][name]) for name in own)
        print(json.dumps([len(jax.devices()), same]))
        """
    )
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    environment = os.environ | flags | {"PYTHONPATH": os.pathsep.join([root, os.path.join(root, "src")])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [2, True]


def test_grid_of_every_model_is_one():
    """Sum and noise are of one grid: the deviation is in the units that the sum is in."""
    assert Grid.for_linear(CLIP_NORM) == GRID
    assert GRID.noise_deviation(SIGMA) * GRID.unit == pytest.approx(SIGMA * CLIP_NORM)
