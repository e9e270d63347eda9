"""Near-optimal contribution bounding at any size, with a proven bound."""

import dataclasses
import math
import time
from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt

from coowned import validate
from coowned.attribution.graph import AttributionGraph
from coowned.attribution.options import Option
from coowned.progress import Progress
from coowned.selection import priced_kernels as kernels
from coowned.selection.order import ordered_rows, part
from coowned.selection.packing import Packing, Peeled, fill, pack, peel
from coowned.selection.packing_kernels import FULL
from coowned.selection.price_bound import price_bound
from coowned.selection.price_search import Prices, find_prices
from coowned.selection.selector import BoundedSelector, Selection

_SWAPS = 12  # in one walk
_MOST_ROUNDS = 400  # of walks from every user who has room although they have a price
_PATIENCE = 20  # stop after this many rounds without progress
_PROGRESS = 5e-5  # relative increase of the size that counts as progress
_MARGIN = 0.02  # reduced profit beyond which an item is surely in or out, and price up to which room costs nothing
_MOST_FILLS = 8  # times that a small core is filled, each time in a slightly different order
_PAIRS_OF_ALL_FILLS = 2_000_000  # a core of this many pairs or more is filled once


@dataclasses.dataclass(frozen=True, kw_only=True)
class Priced(BoundedSelector):
    """Puts a price on every user, takes examples worth more than their users' prices, and improves that by swaps.

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
        limit = int(self.contribution_bound) if self.allow_duplicates else 1
        progress(0.02, "grouping the rows by user")
        packing = pack(rows, graph.num_users, contribution_bound=int(self.contribution_bound), limit=limit)
        weighted = limit > 1 and self.distinct_weight > 0
        by_size = peel(packing, part(progress, 0.05, 0.08))
        prices = find_prices(
            by_size.core, deadline=_halfway(deadline), progress=part(progress, 0.08, 0.3 if weighted else 0.6)
        )
        bound = price_bound(
            graph,
            _spread(by_size, prices.best),
            contribution_bound=int(self.contribution_bound),
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
    """Prices of all users of the packing problem: 0 for free ones, 1 for full ones, those of the core for the rest."""
    prices = (peeled.user_state == FULL).astype(np.float32)
    prices[peeled.core_users] = core_prices
    return prices


def _fill_and_swap(
    core: Packing, prices: Prices, *, seed: int, enough: float, deadline: float, progress: Progress
) -> npt.NDArray[np.int32]:
    """The best copies found for the core; no more than `enough` are possible."""
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
    kernels.loads(core.indptr, core.users, copies, room)
    size = int(copies.sum(dtype=np.int64))
    sizes = [size]
    states = random.integers(1, 2**63, _MOST_ROUNDS, dtype=np.uint64)
    for number in range(_MOST_ROUNDS):
        if size >= enough or time.monotonic() > deadline:
            return
        progress(number / _MOST_ROUNDS, f"swapping, round {number + 1}")
        size += kernels.swap_round(core, prices.reduced, prices.last, _MARGIN, _SWAPS, states[number], room, copies)
        sizes.append(size)
        if number >= _PATIENCE and size - sizes[-1 - _PATIENCE] < max(1, _PROGRESS * size):
            return
