import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from coowned.synthetic import kernels


def test_reference_outputs_of_splitmix64():
    # Published outputs of SplitMix64 for the seeds 0 and 1234567.
    outputs = kernels.draw_at(np.uint64(0), np.arange(3))
    assert [hex(value) for value in outputs] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]
    outputs = kernels.draw_at(np.uint64(1234567), np.arange(2))
    assert outputs.tolist() == [6457827717110365317, 3203168211198807973]


@given(st.integers(0, 2**64 - 1))
def test_mix_on_python_integers_is_the_kernels(state):
    assert kernels.python_mix(state) == int(kernels.mix(np.uint64(state)))


def test_streams_have_keys_of_their_own():
    keys = {int(kernels.stream_key(seed, tag)) for seed in [*range(50), 2**63 - 1] for tag in range(10)}
    assert len(keys) == 510


@given(st.floats(1e-300, 1e300))
def test_log_is_close(x):
    assert kernels.log(x) == pytest.approx(math.log(x), rel=2e-15, abs=1e-300)


@given(st.floats(-690, 690))
def test_exp_is_close(x):
    assert kernels.exp(x) == pytest.approx(math.exp(x), rel=1e-15)


def test_exp_at_the_ends():
    assert kernels.exp(-1e9) == 0.0
    assert kernels.exp(1e9) == np.inf


@given(st.integers(1, 10**9), st.floats(0, 10))
def test_power_is_close(base, exponent):
    assert kernels.power(float(base), exponent) == pytest.approx(float(base) ** exponent, rel=1e-13)


@given(st.integers(0, 2**64 - 1), st.integers(1, 2**32 - 1))
def test_below_is_the_upper_word_of_the_product(bits, count):
    assert kernels.below(np.uint64(bits), count) == bits * count >> 64


@pytest.mark.parametrize("mean", [0.01, 1.0, 2.0, 37.5, 2000.0])
def test_poisson_cumulative(mean):
    cumulative = kernels.poisson_cumulative(mean)
    assert cumulative == pytest.approx(scipy.stats.poisson.cdf(np.arange(cumulative.size), mean), rel=1e-10, abs=1e-15)
    assert cumulative[-1] == 1.0


@pytest.mark.parametrize("columns", [1, 2, 7, 100])
def test_gaussian_rows_are_gaussian(columns):
    out = np.empty((200_000 // columns, columns), dtype=np.float32)
    kernels.fill_gaussian_rows(np.uint64(columns), np.arange(len(out)), np.float32(1.0), out)
    # False-alarm probability 1e-6 for each of the two tests, fixed key.
    assert scipy.stats.kstest(out.ravel(), "norm").pvalue > 1e-6
    tail = scipy.stats.binomtest(int((np.abs(out) > 3).sum()), out.size, 2 * scipy.stats.norm.sf(3))
    assert tail.pvalue > 1e-6


def test_the_two_numbers_of_one_draw_are_independent():
    out = np.empty((200_000, 2), dtype=np.float32)
    kernels.fill_gaussian_rows(np.uint64(0), np.arange(len(out)), np.float32(1.0), out)
    octant = (out[:, 0] > 0) * 4 + (out[:, 1] > 0) * 2 + (np.abs(out[:, 0]) > np.abs(out[:, 1]))
    # False-alarm probability 1e-6 each, fixed key.
    assert scipy.stats.chisquare(np.bincount(octant, minlength=8)).pvalue > 1e-6
    assert scipy.stats.kstest((out**2).sum(axis=1), "chi2", args=(2,)).pvalue > 1e-6
    angle = np.arctan2(out[:, 1], out[:, 0])
    assert scipy.stats.kstest(angle, "uniform", args=(-np.pi, 2 * np.pi)).pvalue > 1e-6
    assert scipy.stats.spearmanr(angle, (out**2).sum(axis=1)).pvalue > 1e-6
