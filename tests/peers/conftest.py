"""PyTorch for the tests that compare with it."""

import pytest

collect_ignore = ["indices_out_of_range.py"]  # a program of its own, which imports PyTorch


@pytest.fixture(scope="session")
def torch():
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)  # two threads on a busy machine wait for one another
    return torch
