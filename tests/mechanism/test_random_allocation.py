"""Random allocation: its sampler, its certificate, and what it promises beside sampling by coins."""

import dataclasses

import numpy as np
import pytest
from scipy.stats import binom, chi2

from coowned import (
    AttributionGraph,
    CyclicPoisson,
    Greedy,
    PoissonSampling,
    RandomAllocation,
    Selection,
    calibrate,
    certify,
    epsilon,
    guarantee,
)
from coowned.accounting.gaussian import gaussian_epsilon
from coowned.errors import CertificateMismatchError, InputError, UncertifiableError
from coowned.exact.keys import Purpose, RunKey
from coowned.mechanism import random_allocation
from coowned.mechanism.random_allocation import AllocationBatches, draw_rounds, largest_fair_word

COPIES = 90
GRAPH = AttributionGraph.from_users_per_example([[user] for user in range(COPIES)])
ALL = Selection.from_copies(GRAPH, [1] * COPIES)
GROUPED = Selection.from_copies(GRAPH, [1] * COPIES, groups=np.arange(COPIES) % 3)


def sampler(selection=GROUPED, num_groups=3, rounds_per_epoch=5, iterations=60, seed=0):
    return AllocationBatches(
        selection=selection,
        batch_size=6,
        iterations=iterations,
        rounds_per_epoch=rounds_per_epoch,
        num_groups=num_groups,
        run_key=RunKey.from_seed(seed),
    )


def drawn(batches):
    """(iterations, copies) bool: what is in each step."""
    found = np.zeros((batches.iterations, COPIES), int)
    for batch in batches:
        np.add.at(found[batch.step], batch.examples[batch.mask], 1)
    return found


def test_every_copy_is_in_one_round_of_each_epoch():
    found = drawn(sampler(iterations=3 * 5 * 8))
    for group in range(3):
        own = np.arange(COPIES) % 3 == group
        steps = found[group::3]  # (40 rounds, copies)
        assert not steps[:, ~own].any()
        assert (steps[:, own].reshape(8, 5, -1).sum(axis=1) == 1).all()
    rest = drawn(sampler(iterations=3 * 5 * 8 + 6))[120:]  # two rounds of each group's last epoch
    assert (rest.sum(axis=0) <= 1).all()
    assert 0 < rest.sum() < COPIES


def test_rounds_are_uniform_and_independent():
    """Chi-square of rounds, of pairs of neighbours and of pairs of epochs; false-alarm probability 3e-7 in all."""
    found = drawn(sampler(ALL, num_groups=1, rounds_per_epoch=4, iterations=4 * 200))
    rounds = found.reshape(200, 4, COPIES).argmax(axis=1)  # (epochs, copies)

    def uniform(values, cells):
        counts = np.bincount(values.ravel(), minlength=cells)
        expected = values.size / cells
        return ((counts - expected) ** 2 / expected).sum() < chi2.isf(1e-7, cells - 1)

    assert uniform(rounds, 4)
    assert uniform(4 * rounds[:, ::2] + rounds[:, 1::2], 16)
    assert uniform(4 * rounds[::2] + rounds[1::2], 16)


def test_words_give_uniform_rounds(monkeypatch):
    """Every remainder has the same number of words; a word above those is replaced by a later one of the stream."""
    for rounds in (1, 2, 3, 7, 46, 1000, 2**32 - 5):
        largest = int(largest_fair_word(rounds))
        assert (largest + 1) % rounds == 0
        assert 2**64 - (largest + 1) < rounds
    given = [
        np.array([2**64 - 1, 5, 0, 2**64 - 1], np.uint64),
        np.array([2**64 - 1, 4], np.uint64),
        np.array([8], np.uint64),
    ]
    chunks = []

    def words(key, count, *, first_chunk):
        chunks.append(first_chunk)
        assert count == len(given[len(chunks) - 1])
        return given[len(chunks) - 1]

    monkeypatch.setattr(random_allocation, "random_words", words)
    key = RunKey.from_seed(0).derive(Purpose.COINS, step=0)
    assert draw_rounds(key, 4, 3).tolist() == [2, 2, 0, 1]  # 2^64 - 1 is 0 modulo 3, but unfair
    assert chunks == [0, 1, 2]


def test_batches_in_any_order():
    batches = sampler()
    first = [batch.examples[batch.mask].tolist() for batch in batches]
    other = sampler()
    for step in np.random.default_rng(0).permutation(60):
        batch = other.batch(int(step))
        assert batch.examples[batch.mask].tolist() == first[step]
    assert first != [batch.examples[batch.mask].tolist() for batch in sampler(seed=1)]


def test_an_empty_round_is_padding():
    few = Selection.from_copies(GRAPH, [1] + [0] * (COPIES - 1))
    batches = sampler(few, num_groups=1, rounds_per_epoch=10, iterations=10)
    sizes = [batch.num_copies for batch in batches]
    assert sorted(sizes) == [0] * 9 + [1]
    assert all(batch.physical_size >= 6 for batch in batches)


def test_selection_and_groups_must_agree():
    with pytest.raises(InputError, match="CyclicGroups"):
        sampler(ALL)
    with pytest.raises(InputError, match="num_groups"):
        sampler(num_groups=2)
    mechanism = RandomAllocation(contribution_bound=1, rounds_per_epoch=5, iterations=9, batch_size=6)
    with pytest.raises(InputError, match="num_groups"):
        mechanism.check_selected(GROUPED)


def test_from_a_certificate():
    grouped = RandomAllocation.from_certificate(certify(GRAPH, GROUPED), batch_size=7, iterations=60)
    assert (grouped.num_groups, grouped.num_bands, grouped.rounds_per_epoch) == (3, 3, 4)  # 30 / 7 rounded
    assert grouped.sampling_probability == 1 / 4
    assert grouped.expected_copies(certify(GRAPH, GROUPED)) == 8
    single = RandomAllocation.from_certificate(certify(GRAPH, ALL), batch_size=9, iterations=60)
    assert (single.num_groups, single.num_bands, single.rounds_per_epoch) == (1, 1, 10)
    whole = RandomAllocation.from_certificate(certify(GRAPH, GROUPED), batch_size=31, iterations=60)
    assert whole.rounds_per_epoch == 1  # all of a group in each of its rounds
    with pytest.raises(InputError, match=r"size of S \(90 copies\)"):
        RandomAllocation.from_certificate(certify(GRAPH, GROUPED), batch_size=91, iterations=60)
    # Groups are proven, or are not accounted for.
    with pytest.raises(UncertifiableError, match="proves 1 group"):
        grouped.check_certificate(certify(GRAPH, ALL))
    with pytest.raises(UncertifiableError, match="proves 3 groups"):
        single.check_certificate(certify(GRAPH, GROUPED))


def test_a_group_without_protected_users_is_not_the_worst():
    graph = AttributionGraph.from_users_per_example([[]] * 8 + [[user] for user in range(8)])
    certificate = certify(graph, Selection.from_copies(graph, [1] * 16, groups=[0] * 8 + [1] * 8))
    mechanism = RandomAllocation.from_certificate(certificate, batch_size=2, iterations=9)
    assert mechanism.group_bounds == (0, 1)
    assert mechanism.user_steps(1.0)[0].repetitions == 4
    assert mechanism.worst_user(None).rounds.tolist() == [1, 3, 5, 7]
    assert mechanism.for_example(certificate).user_steps(1.0)[0].repetitions == 5
    with pytest.raises(UncertifiableError, match="group 1 has"):
        dataclasses.replace(mechanism, group_bounds=(1, 0)).check_certificate(certificate)


def test_more_than_one_copy_is_refused():
    graph = AttributionGraph.from_users_per_example([[user // 2] for user in range(20)])
    certificate = certify(graph, Greedy(contribution_bound=2).select(graph))
    with pytest.raises(UncertifiableError, match="a user in 2 copies, but the accounting of random allocation"):
        RandomAllocation.from_certificate(certificate, batch_size=2, iterations=9)
    with pytest.raises(InputError, match="contribution_bound must be 1, not 2"):
        RandomAllocation(contribution_bound=2, rounds_per_epoch=3, iterations=9)
    one = RandomAllocation(contribution_bound=1, rounds_per_epoch=10, iterations=9)
    with pytest.raises(UncertifiableError, match="found a user in 2 copies"):
        guarantee(certificate, one, noise_multiplier=1.0, delta=1e-6, adjacency="zero-out")
    # An example of nobody's, in two copies.
    nobody = AttributionGraph.from_users_per_example([[], [0], [1]])
    twice = certify(nobody, Selection.from_copies(nobody, [2, 1, 1]))
    with pytest.raises(UncertifiableError, match="an example in 2 copies"):
        RandomAllocation.from_certificate(twice, batch_size=1, iterations=9)


def test_more_bands_than_groups_are_refused():
    with pytest.raises(InputError, match="must not exceed num_groups"):
        RandomAllocation(contribution_bound=1, rounds_per_epoch=3, iterations=9, num_groups=2, num_bands=3)


def test_one_round_is_the_gaussian():
    mechanism = RandomAllocation(contribution_bound=1, rounds_per_epoch=1, iterations=16)
    for adjacency, mu in (("zero-out", 2.0), ("replace", 4.0)):
        found = epsilon(mechanism, noise_multiplier=2.0, delta=1e-10, adjacency=adjacency)
        assert found == gaussian_epsilon(mu, 1e-10)


def test_less_noise_than_coins():
    """3.7% less than cyclic sampling at the same rate: the first row of the table in docs/accounting.md."""
    settings = {"iterations": 16 * 3 * 52, "num_groups": 16, "num_bands": 16, "contribution_bound": 1}
    target = {"epsilon": 8.0, "delta": 1e-10, "adjacency": "zero-out"}
    noise = calibrate(RandomAllocation(rounds_per_epoch=3, **settings), **target, cache=False)
    coins = calibrate(CyclicPoisson(sampling_probability=1 / 3, **settings), **target, cache=False)
    assert 0.96 < noise / coins < 0.967
    assert (
        epsilon(
            RandomAllocation(rounds_per_epoch=3, **settings), noise_multiplier=noise, delta=1e-10, adjacency="zero-out"
        )
        <= 8.0
    )


def test_a_run_that_ends_within_an_epoch_is_between_whole_ones():
    def found(iterations):
        mechanism = RandomAllocation(contribution_bound=1, rounds_per_epoch=8, iterations=iterations)
        return epsilon(mechanism, noise_multiplier=1.0, delta=1e-8, adjacency="zero-out")

    values = [found(iterations) for iterations in (3, 8, 12, 16)]
    assert values == sorted(values)
    assert len(set(values)) == 4
    poisson = PoissonSampling(contribution_bound=1, sampling_probability=1 / 8, iterations=16)
    assert values[-1] < epsilon(poisson, noise_multiplier=1.0, delta=1e-8, adjacency="zero-out")


def test_statement_says_how_batches_are_made():
    certificate = certify(GRAPH, GROUPED)
    mechanism = RandomAllocation.from_certificate(certificate, batch_size=6, iterations=30)
    claim = guarantee(certificate, mechanism, epsilon=4.0, delta=1e-8, adjacency="zero-out")
    assert "in each epoch of 5 rounds of its group, every copy is in exactly one round" in claim.statement()
    assert type(claim).from_json(claim.to_json()) == claim


def test_a_schedule_is_refused():
    mechanism = RandomAllocation.from_certificate(certify(GRAPH, ALL), batch_size=9, iterations=60)
    from coowned import Schedule

    schedule = Schedule.from_batches(GRAPH, [[0, 1], [2, 3]])
    with pytest.raises(UncertifiableError, match="fixed schedule"):
        mechanism.check_certificate(certify(GRAPH, schedule))
    with pytest.raises(CertificateMismatchError, match="needs a selection"):
        mechanism.check_selected(schedule)


def test_sizes_of_rounds_are_binomial():
    """Of 400 first rounds of 90 copies, those above the 99.9% quantile; false-alarm probability below 1e-6."""
    found = drawn(sampler(ALL, num_groups=1, rounds_per_epoch=3, iterations=1200))[::3].sum(axis=1)
    limit = binom.ppf(0.999, COPIES, 1 / 3)
    assert np.count_nonzero(found > limit) <= binom.isf(1e-7, 400, binom.sf(limit, COPIES, 1 / 3))
    assert abs(found.mean() - 30) < 5.5 * np.sqrt(20 / 400)
