"""What a copy adds must not depend on others: one check for every head of a BERT."""

import numpy as np
from tests.models.model_sums import integer_sum


def check_any_company(model, own, batch):
    """To the last integer: alone, in a full batch, in another order and in a larger batch of other padding."""
    size = len(batch["tokens"])
    total, _, _ = integer_sum(model, own, batch, np.ones(size, bool), 1.0)
    rows = [integer_sum(model, own, batch, np.arange(size) == row, 1.0)[0] for row in range(size)]
    for name, array in total.items():
        assert np.array_equal(array, sum(row[name] for row in rows)), name
    order = np.random.default_rng(0).permutation(size)
    moved = {name: np.concatenate([np.zeros_like(array[:5]), array[order]]) for name, array in batch.items()}
    again, _, _ = integer_sum(model, own, moved, np.arange(size + 5) >= 5, 1.0)
    assert all(np.array_equal(again[name], total[name]) for name in total)
