"""Chooses batch size and number of steps from the size of S and a budget of computation."""

from typing import NamedTuple

COPIES = 5_000_000  # a budget: whose gradients are computed in a whole training
_NUMBERS = 5_000_000_000  # the same in numbers, for models that are not linear: copies times parameters
_FEWEST_COPIES = 20_000
_STEPS = (200, 500)


class TrainingSizes(NamedTuple):
    """Batch size and number of steps."""

    batch_size: int
    iterations: int


def training_sizes(
    size: int,
    *,
    budget: int = COPIES,
    batch_size: int | None = None,
    iterations: int | None = None,
) -> TrainingSizes:
    """Returns the sizes of a training on S: what is given is kept.

    Over a whole training, batches of half of S leave nearly as little noise as S whole, at any number of steps: the
    more copies in a batch, the less noise beside the mean gradient. So batches are as large as the budget allows, up to
    half of S, with as many of 200 to 500 steps as are left.

    Guarantees:
      - No batch is larger than S, and what is given is kept.   (test_sizes_fit)
      - No more copies are drawn than the budget allows, unless a single copy a step does.   (test_sizes_fit)

    >>> training_sizes(3_000), training_sizes(1_000_000)
    (TrainingSizes(batch_size=1500, iterations=500), TrainingSizes(batch_size=25000, iterations=200))
    """
    fewest, most = _STEPS
    half = max(1, (size + 1) // 2)
    if iterations is None:
        iterations = max(fewest, min(most, budget // (batch_size or half)))
    if batch_size is None:
        batch_size = max(1, min(half, budget // iterations))
    return TrainingSizes(batch_size, iterations)


def budget_for(num_parameters: int, *, is_linear: bool) -> int:
    """Returns the copies whose gradients are computed: fewer for large models that are not linear.

    >>> budget_for(16_385, is_linear=True), budget_for(100_000, is_linear=False)
    (5000000, 50000)
    """
    return COPIES if is_linear else max(_FEWEST_COPIES, min(COPIES, _NUMBERS // num_parameters))
