"""Batches: the sampler itself is tested, since shuffling passed off as Poisson hardly shows downstream."""

import numpy as np
import pytest
from scipy import stats

from coowned.attribution.graph import AttributionGraph
from coowned.errors import InputError
from coowned.exact.keys import RunKey
from coowned.mechanism.batching import (
    CyclicPoissonBatches,
    PoissonBatches,
    ScheduledBatches,
)
from coowned.selection.selector import Schedule, Selection

NUM_EXAMPLES, P, STEPS = 80, 0.1, 1500
ALPHA = 1e-7  # false-alarm probability of each of the alarms below


def graph_of(num_examples: int) -> AttributionGraph:
    return AttributionGraph.from_csr(np.arange(num_examples + 1), np.arange(num_examples), num_users=num_examples)


def selection_of(copies, groups=None) -> Selection:
    return Selection.from_copies(graph_of(len(copies)), copies, groups)


COPIES = np.array([i % 3 for i in range(NUM_EXAMPLES)])  # a third of the examples twice, a third not at all
FIRST = np.cumsum(COPIES) - COPIES
SIZE = int(COPIES.sum())


def poisson(seed=0, p=P, copies=COPIES, batch_size=8, iterations=STEPS, **more) -> PoissonBatches:
    return PoissonBatches(
        selection=selection_of(copies),
        sampling_probability=p,
        batch_size=batch_size,
        iterations=iterations,
        run_key=RunKey.from_seed(seed),
        **more,
    )


def participations(batches) -> np.ndarray:
    """(steps, copies) True where the copy was drawn."""
    drawn = np.zeros((batches.iterations, SIZE), bool)
    for batch in batches:
        drawn[batch.step, FIRST[batch.examples[batch.mask]] + batch.copy_numbers[batch.mask]] = True
    return drawn


def alarms(drawn: np.ndarray, p: float) -> set[str]:
    """What is wrong with a sampler; each alarm goes off with a probability of at most about ALPHA if nothing is."""
    steps, size = drawn.shape
    wrong = set()
    totals = drawn.sum(axis=0)
    # Exact: a copy's total is Binomial(steps, p); Bonferroni over copies and two sides.
    tails = np.minimum(stats.binom.cdf(totals, steps, p), stats.binom.sf(totals - 1, steps, p))
    # Chi-square over copies: sum of squared z is chi-square with `size` degrees of freedom.
    spread = ((totals - steps * p) ** 2).sum() / (steps * p * (1 - p))
    if tails.min() < ALPHA / (2 * size) or not stats.chi2.ppf(ALPHA / 2, size) < spread < stats.chi2.isf(
        ALPHA / 2, size
    ):
        wrong.add("participations")
    # Chi-square over steps of the batch sizes: too regular is as wrong as too irregular.
    spread = ((drawn.sum(axis=1) - size * p) ** 2).sum() / (size * p * (1 - p))
    if not stats.chi2.ppf(ALPHA / 2, steps) < spread < stats.chi2.isf(ALPHA / 2, steps):
        wrong.add("batch sizes")
    # Exact: how often two copies are drawn together is Binomial(steps, p^2); Bonferroni over pairs and two sides.
    together = (drawn.T.astype(np.float32) @ drawn)[np.triu_indices(size, 1)]
    tails = np.minimum(stats.binom.cdf(together, steps, p * p), stats.binom.sf(together - 1, steps, p * p))
    if tails.min() < ALPHA / (2 * together.size):
        wrong.add("pairs of copies")
    # Exact: how many copies two steps share is Binomial(size, p^2); Bonferroni over pairs of steps (upper side).
    shared = (drawn.astype(np.float32) @ drawn.T)[np.triu_indices(steps, 1)]
    if stats.binom.sf(shared.max() - 1, size, p * p) < ALPHA / shared.size:
        wrong.add("pairs of steps")
    # Overlap of neighbouring steps over the whole run, to the lower side too; normal approximation, variance of a sum
    # whose terms share one step with the next.
    overlap = (drawn[1:] & drawn[:-1]).sum()
    mean = (steps - 1) * size * p * p
    variance = (steps - 1) * size * p * p * (1 - p * p) + 2 * (steps - 2) * size * (p**3 - p**4)
    if abs(overlap - mean) > stats.norm.isf(ALPHA / 2) * np.sqrt(variance):
        wrong.add("neighbouring steps")
    return wrong


@pytest.fixture(scope="module")
def drawn():
    return participations(poisson())


def test_participations_are_binomial(drawn):
    assert not alarms(drawn, P) & {"participations", "batch sizes"}


def test_pairs_of_copies_are_independent(drawn):
    assert "pairs of copies" not in alarms(drawn, P)


def test_steps_are_independent(drawn):
    assert not alarms(drawn, P) & {"pairs of steps", "neighbouring steps"}


def test_shuffling_is_caught():
    generator = np.random.default_rng(0)
    batch = round(SIZE * P)
    order = np.concatenate(
        [generator.permutation(SIZE)[: SIZE // batch * batch] for _ in range(STEPS * batch // SIZE + 2)]
    )
    shuffled = np.zeros((STEPS, SIZE), bool)
    for step in range(STEPS):
        shuffled[step, order[step * batch : (step + 1) * batch]] = True
    assert {"batch sizes", "neighbouring steps"} <= alarms(shuffled, batch / SIZE)


def test_joint_coins_of_an_example_are_caught():
    generator = np.random.default_rng(0)
    coin = generator.random((STEPS, NUM_EXAMPLES)) < P
    joint = coin[:, np.repeat(np.arange(NUM_EXAMPLES), COPIES)]
    assert "pairs of copies" in alarms(joint, P)


def test_joint_coins_of_a_user_are_caught():
    generator = np.random.default_rng(0)
    independent = generator.random((STEPS, SIZE)) < P
    independent[:, 7] = independent[:, 3]  # two examples of one user
    assert "pairs of copies" in alarms(independent, P)


def test_reused_coins_are_caught(drawn):
    reused = drawn.copy()
    step = int(drawn.sum(axis=1).argmax())  # one step only; a small batch could come again by chance
    reused[(step + 1) % STEPS] = reused[step]
    assert "pairs of steps" in alarms(reused, P)
    reused[1::2] = reused[:-1:2]
    assert {"pairs of steps", "neighbouring steps"} <= alarms(reused, P)


def test_a_higher_probability_is_caught():
    assert "participations" in alarms(participations(poisson(p=1.15 * P)), P)


def test_random_access():
    batches = poisson(iterations=50)
    in_order = [batches.batch(step) for step in range(50)]
    for step in (49, 0, 17, 17, 3):
        again = poisson(iterations=50).batch(step)
        for name in ("examples", "copy_numbers", "mask"):
            assert np.array_equal(getattr(again, name), getattr(in_order[step], name))
    assert [batch.step for batch in batches] == list(range(50))
    assert len(batches) == 50


def test_steps_outside_the_run_are_refused():
    for step in (-1, 50):
        with pytest.raises(InputError):
            poisson(iterations=50).batch(step)


def test_coins_belong_to_copies_not_to_storage():
    """Examples that are not selected do not move anybody's coins."""
    wide = np.zeros(2 * NUM_EXAMPLES, int)
    wide[::2] = COPIES
    for step in range(20):
        narrow_batch, wide_batch = poisson().batch(step), poisson(copies=wide).batch(step)
        assert np.array_equal(2 * narrow_batch.examples, wide_batch.examples)
        assert np.array_equal(narrow_batch.copy_numbers, wide_batch.copy_numbers)


def test_keys_change_the_coins():
    assert any(
        not np.array_equal(poisson(seed=0).batch(step).examples, poisson(seed=1).batch(step).examples)
        for step in range(3)
    )


@pytest.mark.parametrize("batch_size", [1, 3, 8, 600])
def test_nothing_is_dropped(batch_size):
    copies = np.full(1000, 2)
    batches = poisson(copies=copies, p=1.0, batch_size=batch_size, iterations=2, multiple_of=3)
    batch = batches.batch(1)
    pairs = list(zip(batch.examples[batch.mask], batch.copy_numbers[batch.mask], strict=True))
    assert sorted(pairs) == [(e, c) for e in range(1000) for c in range(2)]
    assert batch.num_copies == 2000 <= batch.physical_size
    assert batch.physical_size % 3 == 0


def test_an_empty_batch_is_all_padding():
    batch = poisson(p=1e-12, iterations=1).batch(0)
    assert batch.num_copies == 0
    assert batch.physical_size >= 8
    assert not batch.mask.any()
    nobody = poisson(copies=np.zeros(5, int), iterations=1).batch(0)
    assert nobody.num_copies == 0


def test_few_shapes():
    # 400 batches of about 1024; more than 4 standard deviations above happens with probability 400 * 3.2e-5.
    batches = poisson(copies=np.ones(10_240, int), p=0.1, batch_size=1024, iterations=400)
    sizes = {batch.physical_size for batch in batches}
    assert sizes <= set(batches.usual_sizes)
    assert len(batches.usual_sizes) <= 4
    assert [batches.physical_size(n) for n in (0, 1024, 1025, 5000)] == [1024, 1024, 1088, 5952]


def test_padding_is_example_zero_and_masked():
    batch = poisson(iterations=1).batch(0)
    assert (batch.examples[~batch.mask] == 0).all()
    assert (batch.copy_numbers[~batch.mask] == 0).all()
    assert batch.mask[: batch.num_copies].all()


def test_scheduled_batches():
    rows = [[0, 2, 4], [1, 2, 3], [4, 0, 4]]
    batches = ScheduledBatches(schedule=Schedule.from_batches(graph_of(5), rows), multiple_of=4)
    assert (batches.iterations, batches.batch_size, len(batches)) == (3, 3, 3)
    for step, row in enumerate(rows):
        batch = batches.batch(step)
        assert batch.examples[batch.mask].tolist() == row
        assert batch.physical_size == 4
    numbers = [batches.batch(step).copy_numbers[:3].tolist() for step in (2, 0, 1)]
    assert numbers == [[1, 1, 2], [0, 0, 0], [0, 1, 0]]


def cyclic(batch_size=8, num_groups=3, iterations=300, groups=None) -> CyclicPoissonBatches:
    groups = np.arange(NUM_EXAMPLES) % 3 if groups is None else groups
    return CyclicPoissonBatches(
        selection=selection_of(np.where(groups == 1, 2, 1), groups),
        batch_size=batch_size,
        iterations=iterations,
        num_groups=num_groups,
        run_key=RunKey.from_seed(0),
    )


def test_cyclic_groups():
    for batch in cyclic():
        assert (batch.examples[batch.mask] % 3 == batch.step % 3).all()


def test_cyclic_probabilities():
    batches = cyclic(iterations=3000)
    assert batches.group_sizes == (27, 54, 26)
    assert batches.group_probabilities == (8 / 27, 8 / 54, 8 / 26)
    for group in range(3):
        # 1000 rounds of |S_g| coins; normal approximation, |z| > 6 has probability 2e-9 each.
        total = sum(batches.batch(step).num_copies for step in range(group, 3000, 3))
        mean = 1000 * batches.group_sizes[group] * batches.group_probabilities[group]
        assert abs(total - mean) < 6 * np.sqrt(mean * (1 - batches.group_probabilities[group]))


def test_cyclic_small_and_empty_groups():
    groups = np.where(np.arange(NUM_EXAMPLES) < 4, 0, 2)
    batches = cyclic(groups=groups, num_groups=4, iterations=8)
    assert batches.group_probabilities == (1.0, 0.0, 8 / 76, 0.0)
    assert batches.batch(4).examples[:4].tolist() == [0, 1, 2, 3]
    assert batches.batch(1).num_copies == batches.batch(7).num_copies == 0


def test_cyclic_needs_groups():
    with pytest.raises(InputError, match="groups"):
        CyclicPoissonBatches(
            selection=selection_of(COPIES), batch_size=1, iterations=1, num_groups=2, run_key=RunKey.from_seed(0)
        )
    with pytest.raises(InputError, match="num_groups"):
        cyclic(num_groups=2)
