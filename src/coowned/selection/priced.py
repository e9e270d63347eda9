"""Near-optimal contribution bounding at any size, with a proven bound."""

import dataclasses
import math
import time
from typing import Annotated, ClassVar

import numba
import numpy as np
import numpy.typing as npt

from coowned import validate
from coowned.attribution.graph import AttributionGraph
from coowned.attribution.options import Option
from coowned.progress import Progress
from coowned.selection.order import ordered_rows, part
from coowned.selection.packing import FULL, Packing, Peeled, fill, pack, peel
from coowned.selection.price_bound import price_bound
from coowned.selection.price_search import Prices, find_prices, loads
from coowned.selection.selector import BoundedSelector, Selection

_SWAPS = 12  # in one walk
_MOST_ROUNDS = 400  # of walks from every user who has room although they have a price
_PATIENCE = 20  # stop after this many rounds without progress
_PROGRESS = 5e-5  # relative increase of the size that counts as progress
_MARGIN = 0.02  # reduced profit beyond which an item is surely in or out, and price up to which room costs nothing
_MOST_FILLS = 8  # times that a small core is filled, each time in a slightly different order
_PAIRS_OF_ALL_FILLS = 2_000_000  # a core of this many pairs or more is filled once

_njit = numba.njit(cache=True, nogil=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Priced(BoundedSelector):
    """Sets a price for every user, takes examples worth more than their users' prices, and improves S by swaps.

    What can be decided without losing an optimum is decided first (see `packing`). A first-order method on the linear
    relaxation then gives every user left a price, and the prices prove a bound on the size of any S (see
    `price_bound`). S is filled by reduced profit and fractional copies, with the same safe decisions after every
    choice, then improved by walks of swaps that end by dropping one example and adding two.

    Guarantees:
      - No user is in more than `contribution_bound` selected copies.   (test_check_suite)
      - No copy could be added without breaking that.   (test_nothing_can_be_added)
      - No S under the same bound is larger than `upper_bound`, with duplicates if they are allowed; the bound is
        summed in exact arithmetic. `proven_optimal` says that the size reaches it.   (test_bound_holds_for_every_set)
      - The same S on every run, with any number of threads, and however users are labelled, unless `time_limit` ends
        the work: how much is done by then is up to the machine.   (test_threads_do_not_matter)

    Args:
      contribution_bound: most selected copies that contain one user.
      allow_duplicates: whether an example may be selected more than once.
      distinct_weight: from 0 to 1; with duplicates, S is chosen for a large size + distinct_weight * num_distinct, so
        that distinct examples are not given up for copies of those with few users. `upper_bound` remains one on the
        size alone. Without duplicates it changes nothing.
      time_limit: seconds after which the best S so far is returned, with the bound proven so far; checked between
        steps, so that it may be exceeded by one (sorting the graph, or one round).
      ties: the order among examples of equal worth.
      unattributed: what becomes of an example without users; one that is kept is counted in size and bound.

    Cost: O(pairs) time for each of some hundreds of iterations, on all cores, over what the safe decisions leave;
    O(pairs) memory.
    What it is not: a proof of optimality where bound and size differ; `IntegerProgram` closes that on small graphs.

    Example:
      >>> graph = AttributionGraph.from_users_per_example([[0, 1], [1, 2], [2, 3], [3, 4], [0, 4], [1, 3]])
      >>> selection = Priced(contribution_bound=1).select(graph)
      >>> selection.size, selection.upper_bound, selection.proven_optimal
      (2, 2, True)

    References: Ganesh et al. (2025), Section 5.4, https://arxiv.org/abs/2503.03622, for the integer program
    """

    allow_duplicates: Annotated[bool, Option("Allow an example to be selected more than once.")] = False
    distinct_weight: Annotated[float, Option("priced: extra weight of the first copy of an example.")] = 0.0
    time_limit: Annotated[float | None, Option("Time limit of the integer programs and priced.", metavar="SECONDS")] = (
        None
    )

    name: ClassVar[str] = "priced"
    bound_is_enough: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.in_range(0, 1, distinct_weight=self.distinct_weight)
        if self.time_limit is not None:
            validate.positive_number(time_limit=self.time_limit)

    def _select(self, graph: AttributionGraph, seed: int, progress: Progress) -> Selection:
        deadline = time.monotonic() + (math.inf if self.time_limit is None else self.time_limit)
        # Prices may use half of the time that is left after sorting; swaps use the rest.
        rows = ordered_rows(graph, seed=seed, ties=self.ties, progress=part(progress, 0.0, 0.02))
        capacities = self.capacities(graph)
        limit = max(1, int(capacities.max(initial=0))) if self.allow_duplicates else 1
        progress(0.02, "grouping the rows by user")
        packing = pack(rows, graph.num_users, contribution_bound=capacities, limit=limit)
        weighted = limit > 1 and self.distinct_weight > 0
        by_size = peel(packing, part(progress, 0.05, 0.08))
        prices = find_prices(
            by_size.core, deadline=_halfway(deadline), progress=part(progress, 0.08, 0.3 if weighted else 0.6)
        )
        bound = price_bound(
            graph,
            _spread(by_size, prices.best),
            contribution_bound=capacities,
            max_copies=limit,
            unattributed=self.unattributed,
        )
        if weighted:
            packing = packing.with_further_copies(distinct_weight=float(self.distinct_weight))
            chosen = peel(packing, part(progress, 0.3, 0.33))
            prices = find_prices(chosen.core, deadline=_halfway(deadline), progress=part(progress, 0.33, 0.6))
        else:
            chosen = by_size
        kept = rows.num_unattributed if self.unattributed == "keep" else 0
        enough = math.inf if weighted else bound - kept - int(chosen.taken.sum(dtype=np.int64))
        taken = chosen.taken
        taken[chosen.core_items] += _fill_and_swap(
            chosen.core, prices, seed=seed, enough=enough, deadline=deadline, progress=part(progress, 0.6, 1.0)
        )
        if weighted:
            taken = taken[: graph.num_examples] + taken[graph.num_examples :]
        copies = np.empty(graph.num_examples, np.int32)
        copies[rows.examples] = taken
        return self._selection(graph, seed, copies, upper_bound=bound)


def _halfway(deadline: float) -> float:
    return (time.monotonic() + deadline) / 2


def _spread(peeled: Peeled, core_prices: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Returns the prices of all users: 0 for free ones, 1 for full ones, those of the core for the rest."""
    prices = (peeled.user_state == FULL).astype(np.float32)
    prices[peeled.core_users] = core_prices
    return prices


def _fill_and_swap(
    core: Packing, prices: Prices, *, seed: int, enough: float, deadline: float, progress: Progress
) -> npt.NDArray[np.int32]:
    """Returns the best copies found for the core; no more than `enough` are possible."""
    largest = max(core.first_limit, core.limit)
    wanted = np.ones(core.num_items, np.int32)
    if largest > 1:
        wanted = np.floor(prices.values * largest + 0.01).astype(np.int32)
    worth = prices.reduced + prices.values / (core.limits() / np.float32(largest))  # (num_items,)
    fills = min(_MOST_FILLS, max(1, _PAIRS_OF_ALL_FILLS // max(core.num_pairs, 1)))
    random = np.random.default_rng([seed, 0x5EED])
    best, best_value = np.zeros(core.num_items, np.int32), -1.0
    for number in range(fills):
        report = part(progress, number / fills, (number + 1) / fills)
        report(0.0, f"filling, {number + 1} of {fills}")
        disturbed = worth if number == 0 else worth + random.uniform(0, 0.01 * number, core.num_items)
        copies = fill(core, np.argsort(-disturbed, kind="stable").astype(core.items.dtype), wanted)
        _swap(core, prices, copies, random=random, enough=enough, deadline=deadline, progress=report)
        first, further = (int(items.sum(dtype=np.int64)) for items in np.split(copies, [core.num_first]))
        value = first * core.first_profit + further * core.profit
        if value > best_value:
            best, best_value = copies, value
        if best_value >= enough or time.monotonic() > deadline:
            break
    return best


def _swap(
    core: Packing,
    prices: Prices,
    copies: npt.NDArray[np.int32],
    *,
    random: np.random.Generator,
    enough: float,
    deadline: float,
    progress: Progress,
) -> None:
    """Improves the copies in place, round after round, until the rounds gain too little."""
    room = core.capacity.copy()
    loads(core.indptr, core.users, copies, room)
    size = int(copies.sum(dtype=np.int64))
    sizes = [size]
    states = random.integers(1, 2**63, _MOST_ROUNDS, dtype=np.uint64)
    for number in range(_MOST_ROUNDS):
        if size >= enough or time.monotonic() > deadline:
            return
        progress(number / _MOST_ROUNDS, f"swapping, round {number + 1}")
        size += _swap_round(core, prices.reduced, prices.last, _MARGIN, _SWAPS, states[number], room, copies)
        sizes.append(size)
        if number >= _PATIENCE and size - sizes[-1 - _PATIENCE] < max(1, _PROGRESS * size):
            return


# ---- compiled swaps --------------------------------------------------------------------------------------------------


@_njit
def _next(state):
    """Returns the next number of a xorshift generator: three shifts for a choice that only has to be repeatable."""
    state ^= state << np.uint64(13)
    state ^= state >> np.uint64(7)
    state ^= state << np.uint64(17)
    return state


@_njit
def _pick(state, count):
    """Returns True with probability 1 / count: keeping the last item with True draws one of count uniformly."""
    return (state >> np.uint64(33)) % np.uint64(count) == 0


@_njit
def _limit(packing, item):
    return packing.first_limit if item < packing.num_first else packing.limit


@_njit
def _add_at(packing, u, room, copies):
    """Adds every copy of an item of u that fits; returns how many."""
    added = 0
    for j in range(packing.user_indptr[u], packing.user_indptr[u + 1]):
        if room[u] == 0:
            break
        item = packing.items[j]
        count = _limit(packing, item) - copies[item]
        if count <= 0:
            continue
        for p in range(packing.indptr[item], packing.indptr[item + 1]):
            count = min(count, room[packing.users[p]])
            if count == 0:
                break
        if count > 0:
            copies[item] += count
            added += count
            for p in range(packing.indptr[item], packing.indptr[item + 1]):
                room[packing.users[p]] -= count
    return added


@_njit
def _only_full_user(packing, item, room):
    """Returns the only user of an item who has no room; -1 if there is none or more than one."""
    full = -1
    for p in range(packing.indptr[item], packing.indptr[item + 1]):
        if room[packing.users[p]] == 0:
            if full >= 0:
                return -1
            full = packing.users[p]
    return full


@_njit
def _swap_round(packing, reduced, prices, margin, steps, state, room, copies):
    """Runs a round of swaps from every user with room and a price above `margin`; returns copies gained.

    A swap adds an item of a user with room, whose other users have room but one, and drops an item of that one: the
    size is the same, and the users of what was dropped have room. Where another item now fits it is added: one was
    dropped, two were added. Otherwise the walk continues from one of those users, up to `steps` swaps. Items whose
    reduced profit is beyond the margin are surely out (or in) and are left so. `packing` is a `packing.Packing`.
    """
    gained = 0
    for start in range(packing.user_indptr.shape[0] - 1):
        if room[start] == 0 or prices[start] <= margin:
            continue
        u = start
        dropped = -1
        for _ in range(steps):
            add, full, state = _item_to_add(packing, u, dropped, reduced, margin, state, room, copies)
            if add < 0:
                break
            dropped, state = _item_to_drop(packing, full, add, reduced, margin, state, copies)
            if dropped < 0 or dropped == add:
                break
            added = _exchange(packing, add, dropped, room, copies)
            gained += added
            if added:
                break
            u, state = _next_user(packing, dropped, prices, margin, state, room)
            if u < 0:
                break
    return gained


@_njit
def _item_to_add(packing, u, dropped, reduced, margin, state, room, copies):
    """Draws an item of u with one full user; returns (item or -1, that user, the generator's state)."""
    choices = 0
    add, full = -1, -1
    for j in range(packing.user_indptr[u], packing.user_indptr[u + 1]):
        item = packing.items[j]
        if copies[item] >= _limit(packing, item) or item == dropped or reduced[item] < -margin:
            continue
        other = _only_full_user(packing, item, room)
        if other >= 0:
            choices += 1
            state = _next(state)
            if _pick(state, choices):
                add, full = item, other
    return add, full, state


@_njit
def _item_to_drop(packing, u, add, reduced, margin, state, copies):
    """Draws an item of u that may be dropped for `add`; returns (item or -1, the generator's state)."""
    choices = 0
    drop = -1
    for j in range(packing.user_indptr[u], packing.user_indptr[u + 1]):
        item = packing.items[j]
        # A first copy is never given for a further one: it may be worth more.
        worth_more = item < packing.num_first and add >= packing.num_first
        if copies[item] == 0 or reduced[item] > margin or worth_more:
            continue
        choices += 1
        state = _next(state)
        if _pick(state, choices):
            drop = item
    return drop, state


@_njit
def _exchange(packing, add, drop, room, copies):
    """Adds one item, drops the other, and adds what then fits; returns the number of copies gained."""
    indptr, users = packing.indptr, packing.users
    copies[add] += 1
    copies[drop] -= 1
    for p in range(indptr[add], indptr[add + 1]):
        room[users[p]] -= 1
    for p in range(indptr[drop], indptr[drop + 1]):
        room[users[p]] += 1
    added = 0
    for p in range(indptr[drop], indptr[drop + 1]):
        if room[users[p]] > 0:
            added += _add_at(packing, users[p], room, copies)
    return added


@_njit
def _next_user(packing, dropped, prices, margin, state, room):
    """Draws a user of a dropped item with room and a price; returns (user or -1, the generator's state)."""
    choices = 0
    u = -1
    for p in range(packing.indptr[dropped], packing.indptr[dropped + 1]):
        other = packing.users[p]
        if room[other] > 0 and prices[other] > margin:
            choices += 1
            state = _next(state)
            if _pick(state, choices):
                u = other
    return u, state
