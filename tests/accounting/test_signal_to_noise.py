"""The signal-to-noise ratio that is known before training."""

import dataclasses
import math

import numpy as np
import pytest

from coowned import InputError, MinSeparation, PoissonSampling
from coowned.accounting.signal_to_noise import GOOD, SignalToNoise
from coowned.mechanism.banded_strategy import BandedStrategy

RATIO = SignalToNoise(batch_size=64, iterations=100, noise_multiplier=2.0, num_parameters=64, num_scores=0)


def test_ratio_is_that_of_the_noise():
    """20,000 rows of noise: their mean squared length is within 1% of its expectation with probability > 1 - 1e-9."""
    rows = np.random.default_rng(0).normal(size=(20_000, 64)) * 2.0 / 64  # in clip norms, as a step adds them
    assert 1 / math.sqrt((rows**2).sum(axis=1).mean()) == pytest.approx(RATIO.per_step, rel=0.01)
    # The mean over all steps has the noise of one, over the root of their number.
    means = rows.reshape(200, 100, 64).mean(axis=1)
    assert 1 / math.sqrt((means**2).sum(axis=1).mean()) == pytest.approx(RATIO.whole_training, rel=0.05)


def test_examples_bound_the_ratio():
    assert RATIO.with_examples(10**12) == pytest.approx(RATIO.whole_training)
    assert RATIO.with_examples(9) < 3


def test_verdict_follows_the_ratio():
    said = [
        dataclasses.replace(RATIO, num_parameters=number).verdict() for number in (64, 64 * 20, 64 * 200, 64 * 10_000)
    ]
    assert "at most 4 (batch size 64 over noise multiplier 2 times the root of 64 parameters)" in said[0]
    assert said[0].endswith("the signal is well above the noise.")
    assert said[1].endswith("a step is mostly noise, which 100 steps average out.")
    assert said[3].endswith("noise swamps the signal at this batch size.")
    assert (
        dataclasses.replace(RATIO, noise_multiplier=2000.0)
        .verdict()
        .endswith("noise swamps the signal at this batch size.")
    )
    assert RATIO.whole_training >= GOOD


def test_linear_models_meet_the_noise_of_their_own_features():
    """A score's noise is that of one coefficient times the row's length, whatever the number of features is."""
    wide = dataclasses.replace(RATIO, num_parameters=64 * 10_000, num_scores=1)
    assert wide.is_swamped
    assert wide.verdict().endswith("where the ratio is at most 32: it can learn what many examples share.")
    generator = np.random.default_rng(0)
    row = generator.normal(size=1000)
    row /= np.linalg.norm(row)
    noise = generator.normal(size=(2000, 1000)) * 2.0 / 64 @ row  # off by 10% with probability below 1e-9
    assert 1 / noise.std() == pytest.approx(wide.in_scores, rel=0.1)
    assert dataclasses.replace(wide, num_scores=4).in_scores == 16
    assert RATIO.in_scores is None
    loud = dataclasses.replace(wide, noise_multiplier=2000.0)
    assert loud.verdict().endswith("noise swamps the signal at this batch size.")
    unknown = dataclasses.replace(wide, num_scores=None)
    assert unknown.verdict().endswith("unless an example uses few of the parameters, as a hashed text does.")


def test_of_a_mechanism():
    poisson = PoissonSampling(contribution_bound=1, sampling_probability=0.1, iterations=20, batch_size=16)
    assert SignalToNoise.of(poisson, noise_multiplier=2.0, num_parameters=4).per_step == 4.0
    bands = MinSeparation(contribution_bound=2, min_separation=8, num_bands=8, iterations=16, batch_size=16)
    correlated = SignalToNoise.of(bands, noise_multiplier=2.0, num_parameters=4)
    assert correlated.noise_multiplier == 2.0 * bands.strategy().error_factor() < 2.0
    worse = BandedStrategy(num_bands=8, iterations=16, coefficients=(1.0, *[0.0] * 7))
    given = SignalToNoise.of(bands, noise_multiplier=2.0, num_parameters=4, strategy=worse)
    assert given.noise_multiplier == pytest.approx(2.0)


@pytest.mark.parametrize("wrong", [{"num_parameters": 0}, {"noise_multiplier": 0.0}, {"batch_size": 0}])
def test_refused(wrong):
    with pytest.raises(InputError):
        dataclasses.replace(RATIO, **wrong)


def test_outlook_follows_the_ratio():
    """Less noise and more examples never make it worse, and both ends of the scale are reached."""
    order = ["hopeless", "open", "promising"]
    found = []
    for noise in (0.01, 1.0, 30.0, 1000.0):
        ratio = SignalToNoise(batch_size=64, iterations=200, noise_multiplier=noise, num_parameters=50, num_scores=1)
        found.append([order.index(ratio.outlook(distinct).word) for distinct in (2, 50, 10_000)])
    assert all(row == sorted(row) for row in found)
    assert all(list(column) == sorted(column, reverse=True) for column in zip(*found, strict=True))
    assert {0, 2} <= {word for row in found for word in row}
