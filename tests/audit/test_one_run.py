"""Bounds from one run: never above the truth more often than alpha, and jax_privacy's for the same guesses."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax_privacy.auditing import CanaryScoreAuditor, Explicit
from scipy.special import expit

from coowned.accounting.gaussian import gaussian_epsilon
from coowned.audit import one_run
from coowned.audit.one_run import epsilon_lower_bound, gaussian_lower_bound
from coowned.errors import InputError


def test_honest_guesses_are_not_accused():
    """Randomized response with epsilon 1 and a Gaussian release with mu 1, 200 runs each at alpha 0.05.

    More than 22 accusations have probability below 1e-4 under an honest bound.
    """
    rng = np.random.default_rng(5)
    accused = {"pure": 0, "gaussian": 0}
    for _ in range(200):
        included = rng.random(200) < 0.5
        answer = np.where(rng.random(200) < expit(1.0), included, ~included)
        order = answer + 0.1 * rng.random(200)
        accused["pure"] += epsilon_lower_bound(order, included, delta=1e-9, alpha=0.05) > 1.0
        noisy = included + rng.normal(size=200)
        accused["gaussian"] += gaussian_lower_bound(noisy, included, delta=1e-3, alpha=0.05) > gaussian_epsilon(1, 1e-3)
    assert max(accused.values()) <= 22


@given(
    m=st.integers(10, 400),
    share=st.floats(0.05, 1.0),
    precision=st.floats(0.0, 1.0),
    delta=st.sampled_from([1e-3, 1e-6]),
    level=st.sampled_from([0.05, 1e-4]),
)
def test_no_more_than_jax_privacy(m, share, precision, delta, level):
    """n guesses of which so many are right, at one threshold: both methods to 1e-5, never above."""
    n = math.ceil(share * m)
    right = max(1, round(precision * n))
    inside = np.concatenate([np.full(right, 1.0), np.full(m - n, 0.0)])  # the rest of the canaries was in too
    theirs = CanaryScoreAuditor(inside, np.full(n - right, 1.0)) if n > right else CanaryScoreAuditor(inside, [-1.0])
    m = m if n > right else m + 1
    strategy = Explicit(0.5)
    wanted = theirs.epsilon_one_run(level, delta, threshold_strategy=strategy)
    found = one_run._largest(lambda epsilon: one_run._p_value(epsilon, delta, m, n, right) <= level)
    assert wanted - 1e-5 <= found <= wanted + 1e-6
    wanted = theirs.epsilon_one_run_fdp(level, delta, threshold_strategy=strategy)
    mu = one_run._largest(lambda mu: one_run._refutes_gaussian(mu, m, n, right, level))
    found = gaussian_epsilon(mu, delta) if mu else 0.0
    assert wanted - 2e-5 * (1 + wanted) <= found <= wanted + 2e-6 * (1 + wanted)


def test_order_of_scores_alone_matters():
    rng = np.random.default_rng(1)
    included = rng.random(200) < 0.5
    scores = included + rng.normal(size=200)
    for bound in (epsilon_lower_bound, gaussian_lower_bound):
        found = bound(scores, included, delta=1e-5, alpha=0.01)
        assert found > 0
        assert bound(np.exp(3 * scores), included, delta=1e-5, alpha=0.01) == found
        assert bound(-scores, included, delta=1e-5, alpha=0.01) == 0.0


def test_bad_arguments():
    with pytest.raises(InputError, match="included must have 3 entries"):
        epsilon_lower_bound([1, 2, 3], [True], delta=1e-5, alpha=0.1)
    with pytest.raises(InputError, match="alpha"):
        gaussian_lower_bound([1, 2], [True, False], delta=1e-5, alpha=0.0)
