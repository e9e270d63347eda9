"""Batch size and steps from the size of S and a budget."""

from hypothesis import given
from hypothesis import strategies as st

from coowned.accounting.training_sizes import COPIES, training_sizes

SIZES = st.integers(1, 10**7)


@given(size=SIZES, budget=st.integers(1_000, COPIES), batch_size=st.none() | SIZES, iterations=st.none() | SIZES)
def test_sizes_fit(size, budget, batch_size, iterations):
    found = training_sizes(size, budget=budget, batch_size=batch_size, iterations=iterations)
    assert found.batch_size == batch_size or (batch_size is None and 1 <= found.batch_size <= size)
    assert found.iterations == iterations or (iterations is None and 200 <= found.iterations <= 500)
    if batch_size is None:
        assert found.batch_size == 1 or found.batch_size * found.iterations <= budget
