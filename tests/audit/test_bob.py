import math

import numpy as np
import pytest
from scipy import stats

from coowned.audit.bob import BobTest, measure_leak, retrain
from coowned.errors import InputError
from coowned.training.loop import Trainer


@pytest.fixture(scope="module")
def bob():
    """Seeded, so that a pass is repeatable; alpha = 1e-3 is also the false-alarm probability over fresh seeds."""
    return BobTest(seed=1000, trials=240, alpha=1e-3)


@pytest.mark.full
def test_sender_only_breaks_the_claim(bob):
    found = bob.measure("sender")
    assert found.copies_with_bob > 20  # none of them counts against Bob: he sent none
    assert found.contribution_bound == 1
    assert found.leak.epsilon_lower_bound > found.epsilon
    assert not found.claim_holds


@pytest.mark.full
def test_everyone_keeps_the_claim(bob):
    found = bob.measure("everyone")
    assert found.copies_with_bob == 1
    assert found.claim_holds
    assert len(found.scores_with) + len(found.scores_without) == 240


def test_both_claim_the_same(bob):
    sender, everyone = bob.claim("sender"), bob.claim("everyone")
    for claim in (sender, everyone):
        assert claim.epsilon == pytest.approx(1.0, rel=1e-3)
        assert claim.epsilon <= 1.0
        assert (claim.delta, claim.adjacency, claim.certificate.contribution_bound) == (1e-5, "zero-out", 1)


def test_a_real_test_draws_from_the_operating_system():
    one, other = BobTest()._key(0), BobTest()._key(0)
    assert one.fingerprint != other.fingerprint
    assert not one.is_test_run


def test_unknown_attribution():
    with pytest.raises(InputError, match="sender, everyone"):
        BobTest().measure("recipient")


def test_clips_as_training_does(monkeypatch):
    read, run = [], Trainer.run

    def watched(self, data, *rest, **more):
        read.append("norms" in data.shapes())
        return run(self, data, *rest, **more)

    monkeypatch.setattr(Trainer, "run", watched)
    small = BobTest(num_people=60, num_emails=200, num_secret_emails=20, batch_size=4, iterations=2, trials=8, seed=1)
    small.measure("everyone")
    assert read == [True] * len(read)
    assert len(read) >= 8


def test_seeds():
    with pytest.raises(InputError, match=r"seed must be .* not -1"):
        BobTest(seed=-1)


def test_bound_is_seldom_above_the_truth():
    """Gaussian scores with mu = 1 at delta = 0.01: epsilon is 1.5 or so; at alpha = 0.2 a bound above it is rare.

    400 repetitions at 0.2 each; more than 112 have a probability below 1e-4 (binomial), so a false alarm is that rare.
    """
    mu, delta, alpha = 1.0, 0.01, 0.2
    epsilons = np.linspace(0, 5, 5001)
    deltas = stats.norm.cdf(mu / 2 - epsilons / mu) - np.exp(epsilons) * stats.norm.cdf(-mu / 2 - epsilons / mu)
    truth = float(epsilons[np.argmax(deltas <= delta)])
    rng = np.random.default_rng(0)
    above = sum(
        measure_leak(rng.normal(mu, 1, 60), rng.normal(0, 1, 60), delta=delta, alpha=alpha).epsilon_lower_bound > truth
        for _ in range(400)
    )
    assert above <= 112
    assert stats.binom.sf(112, 400, alpha) < 1e-4


@pytest.mark.parametrize("sign", [1, -1])
def test_a_plain_leak_is_found(sign):
    rng = np.random.default_rng(1)
    leak = measure_leak(sign * rng.normal(6, 1, 300), sign * rng.normal(0, 1, 300), delta=1e-6, alpha=1e-3)
    assert leak.epsilon_lower_bound > 2.5
    assert leak.trials == 600


def test_no_leak_is_no_bound():
    rng = np.random.default_rng(2)  # alpha: a positive bound here has a probability below 1e-3
    assert measure_leak(rng.normal(0, 1, 300), rng.normal(0, 1, 300), delta=1e-6).epsilon_lower_bound == 0.0


def test_a_rare_sign_is_found_by_the_other_side():
    """Without her the score is always low; with her it is usually low too: the leak is in what cannot happen."""
    rng = np.random.default_rng(3)
    inside = np.where(rng.random(2000) < 0.2, 5.0, rng.normal(0, 1, 2000))
    leak = measure_leak(inside, rng.normal(0, 0.2, 2000), delta=1e-6)
    assert leak.epsilon_lower_bound > 2


def test_models_alternate():
    asked = []
    inside, outside = retrain(lambda included, number: asked.append((included, number)) or float(number), trials=9)
    assert asked[:3] == [(True, 0), (False, 1), (True, 2)]
    assert inside.tolist() == [0, 2, 4, 6, 8]
    assert outside.tolist() == [1, 3, 5, 7]


@pytest.mark.parametrize(
    ("inside", "outside", "match"),
    [([1, 2, 3], [1, 2, 3, 4], "at least four"), ([1, 2, 3, math.nan], [0] * 4, "finite")],
)
def test_bad_scores(inside, outside, match):
    with pytest.raises(InputError, match=match):
        measure_leak(np.array(inside), np.array(outside), delta=1e-6)
