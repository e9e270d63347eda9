"""Helpers for named arrays: whether two dictionaries are equal, and what a table fills in."""

from typing import Any

import numpy as np


def same(one, other) -> bool:
    """Returns whether the arrays of `one` are equal to those of the same names in `other`."""
    return all(np.array_equal(one[name], other[name]) for name in one)


def filled(data, examples, draw=None) -> dict[str, Any]:
    """Returns the arrays of a batch of these examples; an entry that `fill` leaves out is 3."""
    kinds, examples = data.dtypes(), np.asarray(examples, np.int64)
    out = {name: np.full((len(examples), *shape), 3, kinds[name]) for name, shape in data.shapes().items()}
    data.fill(examples, out, draw)
    return out
