import pytest

from coowned.audit.bob import BobTest
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
