"""The participation audit: exact counts of coins that are independent, and of some that are not.

Honest samplers may alarm falsely with probability 1e-3 at most; seeds are fixed.
"""

import dataclasses
import secrets
import tracemalloc

import numpy as np
import pytest
from tests.audit import planted_bugs

from coowned.attribution.graph import AttributionGraph
from coowned.audit.randomness import (
    audit_allocation,
    audit_coin_words,
    audit_key_source,
    audit_noise_tail,
    audit_participation,
)
from coowned.errors import InputError
from coowned.exact.coins import PoissonCoins
from coowned.exact.keys import RunKey
from coowned.mechanism.batching import CyclicPoissonBatches, PoissonBatches
from coowned.mechanism.random_allocation import AllocationBatches
from coowned.selection.selector import Selection

COPIES = 120


def selection(groups=None):
    graph = AttributionGraph.from_users_per_example([[i // 3] for i in range(COPIES)])
    return Selection.from_copies(graph, np.ones(COPIES, int), groups)


def sampler(kind, probability=0.1, iterations=600, seed=0):
    return kind(
        selection=selection(),
        sampling_probability=probability,
        batch_size=max(1, round(probability * COPIES)),
        iterations=iterations,
        run_key=RunKey.from_seed(seed),
    )


@pytest.mark.parametrize("probability", [0.02, 0.1, 0.6])
def test_honest_samplers_pass(probability):
    for seed in range(5):
        found = audit_participation(
            [sampler(PoissonBatches, probability, seed=seed)], selection(), probability=probability
        )
        assert found.holds, found.failures


def cyclic(kind, groups):
    chosen = selection(groups)
    batches = kind(selection=chosen, batch_size=4, iterations=900, num_groups=3, run_key=RunKey.from_seed(1))
    return audit_participation([batches], chosen, probability=0.1, num_groups=3, group=1)


def test_cyclic_samplers():
    groups = np.arange(COPIES) % 3
    assert cyclic(CyclicPoissonBatches, groups).holds

    @dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
    class OutOfTurn(CyclicPoissonBatches):
        def _draw(self, step):
            return super()._draw(step + 1 if step == 501 else step)

    found = cyclic(OutOfTurn, groups)
    assert [check.name for check in found.failures] == ["copies drawn out of turn"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (planted_bugs.ShuffledBatches, "a copy again 1 steps later"),
        (planted_bugs.TruncatedBatches, "batches with more than 14"),
        (planted_bugs.JointBatches, "neighbouring copies together"),
    ],
)
def test_wrong_samplers_are_caught(kind, name):
    found = audit_participation([sampler(kind)], selection(), probability=0.1)
    assert not found.holds
    assert name in [check.name for check in found.failures]


def test_a_probability_that_is_too_large_is_caught():
    found = audit_participation([sampler(PoissonBatches, 0.11)], selection(), probability=0.1)
    assert "participations" in [check.name for check in found.failures]


@pytest.mark.parametrize("probability", [0.5, 0.01, 1e-3, 0.9])
def test_coins_that_were_rounded_up_are_caught(probability):
    assert audit_coin_words(PoissonCoins(probability)).holds

    class Rounded(PoissonCoins):
        @property
        def thresholds(self):  # type: ignore[override]
            return PoissonCoins(probability * (1 + 2.0**-20)).thresholds

    assert not audit_coin_words(Rounded(probability)).holds


def test_too_little_to_count_is_refused():
    with pytest.raises(InputError, match="too few"):
        audit_participation([sampler(PoissonBatches, iterations=3)], selection(), probability=0.1)


def test_every_copy_of_an_example_has_its_own_coin():
    twice = Selection.from_copies(selection().graph, np.full(COPIES, 2))
    batches = dataclasses.replace(sampler(PoissonBatches), selection=twice)
    assert audit_participation([batches], twice, probability=0.1).holds
    joint = dataclasses.replace(sampler(planted_bugs.JointBatches), selection=twice)
    assert not audit_participation([joint], twice, probability=0.1).holds


def test_several_keys_make_up_for_few_steps():
    short = [sampler(PoissonBatches, iterations=4, seed=seed) for seed in range(100)]
    found = audit_participation(short, selection(), probability=0.1, rounds=250)
    assert found.holds
    assert next(check for check in found.checks if check.name == "participations").expected == 250 * COPIES * 0.1


def test_many_copies_need_little_memory():
    """Of a million copies 50,000 are kept, and the sizes of all batches."""
    count = 1_000_000
    graph = AttributionGraph.from_csr(np.arange(count + 1), np.arange(count, dtype=np.int32), num_users=count)
    chosen = Selection.from_copies(graph, np.ones(count, np.int32))
    batches = PoissonBatches(
        selection=chosen, sampling_probability=1e-4, batch_size=100, iterations=1000, run_key=RunKey.from_seed(0)
    )
    batches.batch(0)
    tracemalloc.start()
    try:
        found = audit_participation([batches], chosen, probability=1e-4)
        used = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.holds
    assert used < 200e6
    assert next(check for check in found.checks if check.name == "participations").expected == pytest.approx(1e5)


def test_a_sampler_that_draws_too_often_is_caught_at_small_probabilities():
    found = audit_participation([sampler(PoissonBatches, 1e-2)], selection(), probability=1e-3)
    assert "participations" in [check.name for check in found.failures]


def allocated(kind, seed=0, iterations=600, rounds_per_epoch=5, groups=None, **settings):
    chosen = selection(groups)
    number = 1 if groups is None else int(groups.max()) + 1
    batches = kind(
        selection=chosen,
        batch_size=24,
        iterations=iterations,
        rounds_per_epoch=rounds_per_epoch,
        num_groups=number,
        run_key=RunKey.from_seed(seed),
    )
    return audit_allocation([batches], chosen, rounds_per_epoch=rounds_per_epoch, num_groups=number, **settings)


def test_honest_allocation_passes():
    for seed in range(5):
        for found in (
            allocated(AllocationBatches, seed),
            allocated(AllocationBatches, seed, iterations=603),  # ends within an epoch
            allocated(AllocationBatches, seed, iterations=3),  # has no whole epoch
            allocated(AllocationBatches, seed, groups=np.arange(COPIES) % 3, group=1),
        ):
            assert found.holds, found.failures


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TogetherBatches(AllocationBatches):
    """Neighbouring copies share a round."""

    def _draw(self, step):
        examples = super()._draw(step)[0]  # one copy each
        even = examples[examples % 2 == 0]
        together = np.sort(np.concatenate([even, even + 1]))
        return together, np.zeros(len(together), np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class NeverLast(AllocationBatches):
    """The last round of an epoch is lost."""

    def _draw(self, step):
        examples, numbers = super()._draw(step)
        last = step // self.num_groups % self.rounds_per_epoch == self.rounds_per_epoch - 1
        return (examples[:0], numbers[:0]) if last else (examples, numbers)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RatherFirst(AllocationBatches):
    """Of the copies of the last round a tenth go to the first."""

    def _draw(self, step):
        epoch, number = divmod(step, self.rounds_per_epoch)
        last = super()._draw((epoch + 1) * self.rounds_per_epoch - 1)[0]
        moved = last[last % 10 == 0]
        own = np.setdiff1d(super()._draw(step)[0], moved)
        own = np.union1d(own, moved) if number == 0 else own
        return own, np.zeros(len(own), np.int32)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (planted_bugs.TwoRoundsAnEpoch, "copies not in exactly one round of an epoch"),
        (planted_bugs.RepeatedAllocation, "the same round as an epoch before"),
        (TogetherBatches, "neighbouring copies together"),
        (NeverLast, "copies not in exactly one round of an epoch"),
        (RatherFirst, "copies in the first round"),
    ],
)
def test_wrong_allocations_are_caught(kind, name):
    found = allocated(kind, iterations=1000)
    assert name in [check.name for check in found.failures]
    found = allocated(kind, iterations=993)  # ends within an epoch
    assert name in [check.name for check in found.failures]


def test_an_allocation_of_few_copies_is_refused():
    graph = AttributionGraph.from_users_per_example([[0], [1]])
    few = Selection.from_copies(graph, [1, 1])
    batches = AllocationBatches(
        selection=few, batch_size=1, iterations=9, rounds_per_epoch=3, num_groups=1, run_key=RunKey.from_seed(0)
    )
    with pytest.raises(InputError, match="too few"):
        audit_allocation([batches], few, rounds_per_epoch=3)


def test_keys_pass():
    assert audit_key_source(alpha=1e-6, keys=2**14).holds


def repeated_bits(size):
    return 8 * secrets.token_bytes(4)


def few_bits(size):
    """32 random bits, however well they are spread."""
    import hashlib

    return hashlib.sha256(secrets.token_bytes(4)).digest()


def constant_bit(size):
    return bytes([secrets.token_bytes(1)[0] | 1]) + secrets.token_bytes(31)


def counter():
    numbers = iter(range(2**30))
    return lambda size: next(numbers).to_bytes(32, "little")


@pytest.mark.parametrize("source", [repeated_bits, constant_bit, counter(), lambda size: bytes(32)])
def test_wrong_key_sources_are_caught(source, monkeypatch):
    monkeypatch.setattr(secrets, "token_bytes", _only_for_keys(source))
    assert not audit_key_source(alpha=1e-6, keys=2**12).holds


def test_keys_of_few_random_bits_are_caught(monkeypatch):
    """With 2^18 keys; missed with probability exp(-8) = 3e-4 over runs of this test."""
    monkeypatch.setattr(secrets, "token_bytes", _only_for_keys(few_bits))
    found = audit_key_source(alpha=1e-6)
    assert [check.name for check in found.failures] == ["keys whose first 64 bits are equal"]


def _only_for_keys(source):
    honest = secrets.token_bytes
    return lambda size: source(size) if size == 32 else honest(size)


def test_a_short_tail_is_caught(monkeypatch):
    assert audit_noise_tail().holds
    planted_bugs.short_tail(monkeypatch)
    found = audit_noise_tail()
    assert not found.holds
    largest = next(check for check in found.checks if check.name == "largest value")
    assert largest.observed == pytest.approx(5.42, abs=0.01)
    assert np.isfinite(largest.observed)
