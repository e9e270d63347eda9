"""Greedy passes over a walk: one for a set without duplicates, passes until one adds nothing for one with them."""

from typing import Any

import numpy as np
import numpy.typing as npt

from coowned.selection import kernels
from coowned.selection.order import OrderedRows, in_ranges, part
from coowned.selection.selector import Progress

MOST_COPIES = 2**31 - 1
"""The largest contribution bound: copies are counted in 32 bits."""


def run_passes(
    rows: OrderedRows,
    walk: npt.NDArray[Any] | None,
    num_users: int,
    *,
    contribution_bound: int,
    allow_duplicates: bool,
    progress: Progress,
) -> npt.NDArray[np.int32]:
    """Copies of each example after one pass, or after passes until one adds nothing.

    A row that a pass leaves out has a user without room, and room never grows: the next pass walks only what this
    one took.

    Args:
      walk: the rows to walk, which are overwritten; None for all that have users, in their order.
    """
    copies = np.full(len(rows.examples), 0, np.int32)  # (num_examples,)
    narrow = np.min_scalar_type(contribution_bound)  # a small array stays in the cache
    room = np.full(num_users, contribution_bound, narrow)  # (num_users,) copies each user may still be in
    number = 0
    remaining = len(rows.attributed) if walk is None else len(walk)
    while remaining and (allow_duplicates or number == 0):
        number += 1
        kept = 0
        message = f"pass {number} over {remaining} examples"
        report = part(progress, 1 - 0.5 ** (number - 1), 1 - 0.5**number)  # how many passes will follow is not known
        if walk is None:
            walk = np.empty(remaining, rows.examples.dtype)
            first = rows.num_unattributed
            state = np.array([first, 1, 0, 0])  # next row, its size, its first pair, rows taken
            for _, end in in_ranges(remaining, report, message):
                kernels.first_pass(rows.counts, rows.users, state, first + end, room, walk)
            kept = int(state[3])
        else:
            for begin, end in in_ranges(remaining, report, message):
                kept = kernels.greedy_pass(walk, rows.indptr, rows.users, begin, end, kept, room)
        kernels.set_copies(walk, kept, rows.examples, number, copies)
        remaining = kept
    return copies
