"""Contribution bounding as a packing problem, and peeling: the decisions that cost no optimum.

    maximize the sum of profit * copies, with integers 0 <= copies <= limit for every item,
    and at most capacity[u] copies that contain user u, for every user.

An item is an example; where first copies are worth more than further ones, an example is two items with equal users.
Peeling repeats two rules until neither applies, as Karp and Sipser do for matchings:

  - A user all of whose undecided copies fit under the capacity left is free: no constraint any more.
  - An item with one user that is not free, and no less profit than any other item, is selected as often as it fits: any
    solution can give up another copy of that user for it. A user without capacity left is full: all other items of
    theirs are out.

What is left is the core. Users who were set free have price 0, full ones the highest profit, and prices of the core's
users make the dual bound of the whole problem equal to that of the core plus what was selected.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from coowned.attribution import kernels as attribution_kernels
from coowned.progress import Progress
from coowned.selection import packing_kernels as kernels
from coowned.selection.order import OrderedRows


class Packing(NamedTuple):
    """A packing problem; the first `num_first` items are first copies, of the highest profit.

    A named tuple, which compiled loops accept as one argument.
    """

    indptr: npt.NDArray[np.int64]  # (num_items + 1,)
    users: npt.NDArray[Any]  # (num_pairs,) users of each item, increasing
    user_indptr: npt.NDArray[np.int64]  # (num_users + 1,)
    items: npt.NDArray[Any]  # (num_pairs,) items of each user, increasing
    capacity: npt.NDArray[np.int32]  # (num_users,) most copies that contain each user
    num_first: int
    first_limit: int  # most copies of each of the first num_first items
    first_profit: float
    limit: int  # most copies of each of the others
    profit: float

    @property
    def num_items(self) -> int:
        return len(self.indptr) - 1

    @property
    def num_users(self) -> int:
        return len(self.user_indptr) - 1

    @property
    def num_pairs(self) -> int:
        return len(self.users)

    def limits(self) -> npt.NDArray[np.int32]:
        """The most copies of each item, shape (num_items,)."""
        limits = np.full(self.num_items, self.limit, np.int32)
        limits[: self.num_first] = self.first_limit
        return limits

    def with_further_copies(self, *, distinct_weight: float) -> "Packing":
        """The same users with two items per example: first copies are worth 1 + distinct_weight, further ones 1."""
        indptr = np.concatenate([self.indptr, self.indptr[1:] + self.num_pairs])
        users = np.concatenate([self.users, self.users])
        kind = np.int32 if 2 * self.num_items < 2**31 else np.int64
        items = np.empty(len(users), kind)
        return self._replace(
            indptr=indptr,
            users=users,
            user_indptr=attribution_kernels.transpose(indptr, users, self.num_users, items),
            items=items,
            num_first=self.num_items,
            first_limit=1,
            first_profit=1.0 + distinct_weight,
            limit=self.first_limit - 1,
            profit=1.0,
        )


def pack(rows: OrderedRows, num_users: int, *, contribution_bound: int, limit: int) -> Packing:
    """The packing problem of a graph's rows, one item per row in their order; rows without users are never selected."""
    items = np.empty(len(rows.users), rows.examples.dtype)
    return Packing(
        indptr=rows.indptr,
        users=rows.users,
        user_indptr=attribution_kernels.transpose(rows.indptr, rows.users, num_users, items),
        items=items,
        capacity=np.full(num_users, contribution_bound, np.int32),
        num_first=len(rows.examples),
        first_limit=limit,
        first_profit=1.0,
        limit=limit,
        profit=1.0,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peeled:
    taken: npt.NDArray[np.int32]  # (num_items,) copies selected so far
    user_state: npt.NDArray[np.int8]  # (num_users,) UNDECIDED, FREE or FULL of packing_kernels
    core: Packing
    core_items: npt.NDArray[Any]  # (core.num_items,) which items are in the core
    core_users: npt.NDArray[Any]  # (core.num_users,) which users are in the core


def peel(packing: Packing, progress: Progress) -> Peeled:
    """Takes and excludes all that the two rules decide.

    If the second rule has a choice, the first item is selected. Items of the core are sorted by their number of users,
    users by their number of items and then by a hash of which items these are, so that the core, and everything
    computed from it, does not depend on the labels of users.
    """
    progress(0.0, "peeling")
    state = _peel(packing, np.empty(0, packing.items.dtype), np.empty(0, np.int32))
    progress(0.4, "building the core")
    undecided = np.flatnonzero(state.decided == 0).astype(packing.items.dtype)
    first, further = np.split(undecided, [np.searchsorted(undecided, packing.num_first)])
    # Rows of equal length are adjacent, so that branch prediction works in loops over them.
    core_items = np.concatenate([rows[_by_length(state.open_users[rows])] for rows in (first, further)])
    indptr = np.zeros(len(core_items) + 1, np.int64)
    np.cumsum(state.open_users[core_items], out=indptr[1:])
    core_users = np.flatnonzero(state.user_state == kernels.UNDECIDED).astype(packing.users.dtype)
    label = np.full(packing.num_users, -1, packing.users.dtype)
    label[core_users] = np.arange(len(core_users), dtype=label.dtype)
    users = np.empty(int(indptr[-1]), packing.users.dtype)
    kernels.core_rows(packing.indptr, packing.users, core_items, label, users)
    progress(0.7, "grouping the core by user")
    items = np.empty(len(users), core_items.dtype)
    user_indptr = attribution_kernels.transpose(indptr, users, len(core_users), items)
    keys = np.empty(len(core_users), np.uint64)
    kernels.user_keys(user_indptr, items, state.room[core_users], keys)
    by_key = np.argsort(keys, kind="stable")
    rows = by_key[_by_length(np.diff(user_indptr)[by_key])]
    user_indptr, sorted_items = attribution_kernels.take_rows(user_indptr, items, rows)
    attribution_kernels.transpose(user_indptr, sorted_items, len(core_items), users)
    core_users = core_users[rows]
    core = packing._replace(
        indptr=indptr,
        users=users,
        user_indptr=user_indptr,
        items=sorted_items,
        capacity=state.room[core_users],
        num_first=len(first),
    )
    return Peeled(
        taken=state.taken, user_state=state.user_state, core=core, core_items=core_items, core_users=core_users
    )


def _by_length(lengths: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Stable, and linear: numpy sorts 16 bits by counting."""
    return np.argsort(np.minimum(lengths, 2**16 - 1).astype(np.uint16), kind="stable")


def fill(packing: Packing, order: npt.NDArray[Any], wanted: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Copies of each item selected greedily in this order, peeling after every selection.

    The first walk along the order takes wanted[item] copies where they fit, the second one, the third all that fit.
    Nothing can be added to the result.
    """
    return _peel(packing, order, wanted).taken


def _peel(packing: Packing, order: npt.NDArray[Any], wanted: npt.NDArray[np.int32]) -> kernels.State:
    state = kernels.State(
        taken=np.zeros(packing.num_items, np.int32),
        decided=np.zeros(packing.num_items, np.int8),
        open_users=np.empty(packing.num_items, np.int32),
        room=packing.capacity.copy(),
        demand=np.empty(packing.num_users, np.int64),
        user_state=np.zeros(packing.num_users, np.int8),
        user_stack=np.empty(packing.num_users, packing.users.dtype),
        single=np.empty(packing.num_first, packing.items.dtype),
    )
    kernels.peel(packing, state, order, wanted)
    return state
