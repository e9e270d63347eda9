"""User prices for contribution bounding, by a primal-dual first-order method on its linear program.

HiGHS's PDLP was measured instead (version 1.15, no presolve, tolerance 1e-3, bound 3): it proves the same bounds (ACL
24,780 and 24,780; mailing list 17,435 and 17,435; arXiv 400,921 and, here, 400,916) in 2.3 to 2.5 times the processor
time (arXiv 1.67 s and 0.68 s); with presolve its bounds are 2 to 3% worse.

The method is the primal-dual hybrid gradient method with diagonal steps (one over the number of users of an item, one
over the number of items of a user), reflected, each point averaged with an anchor by the weights of Halpern; the
anchor is moved to the current point at intervals that grow with the number of iterations.

References:
  Chambolle and Pock (2011), https://doi.org/10.1007/s10851-010-0251-1; Pock and Chambolle (2011), diagonal steps,
  https://doi.org/10.1109/ICCV.2011.6126441; Applegate et al. (2021), restarts, https://arxiv.org/abs/2106.04756;
  Lu and Yang (2024), reflected Halpern iteration, https://arxiv.org/abs/2407.16144
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from coowned import threads
from coowned.attribution.graph import take_rows, transpose
from coowned.progress import Progress
from coowned.selection.packing import Packing

_MOST_ITERATIONS = 2000
_FEWEST_ITERATIONS = 100
_CHECK_EVERY = 20  # iterations between two evaluations of the bound, each at about half an iteration's cost
_PATIENCE = 3  # stop after this many evaluations without progress
_PROGRESS = 3e-6  # relative decrease of the bound that counts as progress, for a small core
_SMALL_CORE = 1 << 18  # pairs; a larger core must progress more, in proportion, since its iterations cost more
_LARGE_CORE = 1 << 20  # pairs from which on clear items are set aside
_SHRINK_AT = (80, 160)  # iterations after which clear items of a large core are set aside
_CLEAR = 0.15  # reduced profit beyond which an item is clearly in or out
_BALANCE = 0.5  # step of a user relative to the step of an item
_SHORTEST_ANCHOR = 32  # iterations for which an anchor is kept at least
_ANCHOR_PART = 0.4  # of all iterations so far, for which an anchor is kept at least
_PAIRS_PER_THREAD = 1 << 18  # fewer are not worth a thread

_ONE, _TWO = np.uint64(1), np.uint64(2)

_njit = numba.njit(cache=True, nogil=True)

Ranges = Callable[..., None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prices:
    best: npt.NDArray[np.float32]  # (num_users,) the prices with the lowest bound
    last: npt.NDArray[np.float32]  # (num_users,) the prices of the last iteration
    values: npt.NDArray[np.float32]  # (num_items,) fractional copies, as parts of the largest limit
    reduced: npt.NDArray[np.float32]  # (num_items,) profit less the last prices of its users


def find_prices(packing: Packing, *, deadline: float, progress: Progress) -> Prices:
    """Finds prices whose bound is near the optimum of the linear program.

    On a large core, items that are clearly in or out after some iterations are left so for the rest of the search; the
    bound, in which they all count, holds for any prices.

    Guarantees:
      - The same on every run and with any number of threads, unless a deadline (of time.monotonic) ends it.
        (test_threads_do_not_matter)

    Cost: O(pairs) per iteration, hundreds of iterations; 4 bytes for each of three values per item and four per user.
    """
    whole = _Problem.of(packing)
    large = packing.num_pairs >= _LARGE_CORE
    least = _PROGRESS * max(1.0, packing.num_pairs / _SMALL_CORE)
    active = whole  # what is iterated on
    kept = np.arange(packing.num_items)  # (active.packing.num_items,) its items among all
    values, item_anchor, reflected = (np.zeros(packing.num_items, np.float32) for _ in range(3))
    decided = np.zeros(packing.num_items, np.float32)  # values of the items left alone
    prices, user_anchor, reached, best = (np.zeros(packing.num_users, np.float32) for _ in range(4))
    reduced = np.empty(packing.num_items, np.float32)
    lowest, history, last_anchor, iteration = np.inf, [], 0, 0
    over = _divided(packing.num_pairs)
    while iteration < _MOST_ITERATIONS:
        since = iteration - last_anchor + 1
        weight = np.float32(since / (since + 1))
        over(len(values), move_items, active.items, weight, prices, item_anchor, values, reflected)
        over(len(prices), move_users, active.users, weight, reflected, user_anchor, prices, reached)
        iteration += 1
        if since >= max(_SHORTEST_ANCHOR, _ANCHOR_PART * iteration):
            np.copyto(item_anchor, values)
            np.copyto(user_anchor, prices)
            last_anchor = iteration
        late = time.monotonic() > deadline
        if iteration % _CHECK_EVERY and not late:
            continue
        bound = _dual_bound(whole, reached, reduced, over)
        if bound < lowest:
            lowest = bound
            np.copyto(best, reached)
        progress(iteration / _MOST_ITERATIONS, f"prices after {iteration} iterations, bound {lowest:.1f}")
        history.append(lowest)
        settled = iteration >= _FEWEST_ITERATIONS and len(history) > _PATIENCE
        if late or (settled and history[-1 - _PATIENCE] - lowest <= max(0.01, least * lowest)):
            break
        if large and iteration in _SHRINK_AT:
            open_items, full_items = _split(active, values, reached, over)
            decided[kept[full_items]] = active.largest_values()[full_items]
            kept = kept[open_items]
            active = _without(active, open_items, full_items)
            values, item_anchor = values[open_items], item_anchor[open_items]
            reflected = np.empty_like(values)
    decided[kept] = values
    over(len(reduced), reduced_profits, whole.items, reached, reduced)
    return Prices(best=best, last=reached, values=decided, reduced=reduced)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Problem:
    """A packing problem in the form of the kernels; copies are measured in fractions of the largest limit."""

    packing: Packing
    items: "Items"
    users: "Users"

    @classmethod
    def of(cls, packing: Packing) -> "_Problem":
        scale = 1.0 / max(packing.first_limit, packing.limit)
        items = Items(
            indptr=_unsigned(packing.indptr),
            users=_unsigned(packing.users),
            num_first=np.uint64(packing.num_first),
            first_profit=np.float32(packing.first_profit),
            first_limit=np.float32(packing.first_limit * scale),
            profit=np.float32(packing.profit),
            limit=np.float32(packing.limit * scale),
            steps=_steps(packing.indptr, 1.0 / _BALANCE),
        )
        users = Users(
            indptr=_unsigned(packing.user_indptr),
            items=_unsigned(packing.items),
            capacity=packing.capacity,
            scale=np.float32(scale),
            steps=_steps(packing.user_indptr, _BALANCE),
        )
        return cls(packing=packing, items=items, users=users)

    def largest_values(self) -> npt.NDArray[np.float32]:
        """Returns the value of each item that is in with all its copies."""
        return self.packing.limits() * self.users.scale


def _split(problem: _Problem, values: Any, prices: Any, over: Ranges) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Returns the items still in doubt, and those clearly in; the others are clearly out."""
    reduced = np.empty_like(values)
    over(len(reduced), reduced_profits, problem.items, prices, reduced)
    out = (reduced < -_CLEAR) & (values <= 0.0)
    full = (reduced > _CLEAR) & (values >= 0.999 * problem.largest_values())
    return np.flatnonzero(~(out | full)), np.flatnonzero(full)


def _without(problem: _Problem, open_items: npt.NDArray[Any], full_items: npt.NDArray[Any]) -> _Problem:
    """Returns the problem of the open items with the capacity that the full ones leave."""
    packing = problem.packing
    capacity = packing.capacity.copy()
    copies = np.zeros(packing.num_items, np.int32)
    copies[full_items] = packing.limits()[full_items]
    loads(packing.indptr, packing.users, copies, capacity)
    indptr, users = take_rows(packing.indptr, packing.users, open_items)
    items = np.empty(len(users), packing.items.dtype)
    return _Problem.of(
        packing._replace(
            indptr=indptr,
            users=users,
            user_indptr=transpose(indptr, users, packing.num_users, items),
            items=items,
            capacity=capacity,
            num_first=int(np.searchsorted(open_items, packing.num_first)),
        )
    )


def _unsigned(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return array.view(np.uint32 if array.dtype.itemsize == 4 else np.uint64)


def _steps(indptr: npt.NDArray[np.int64], step: float) -> npt.NDArray[np.float32]:
    longest = int(np.diff(indptr).max(initial=0))
    return (step / np.maximum(np.arange(longest + 1), 1)).astype(np.float32)


def _dual_bound(problem: _Problem, prices: Any, gains: npt.NDArray[np.float32], over: Ranges) -> float:
    """Returns the bound of these prices; gains (num_items,) is scratch."""
    packing = problem.packing
    prices = np.minimum(prices, np.float32(max(packing.first_profit, packing.profit)))
    over(len(gains), reduced_profits, problem.items, prices, gains)
    np.maximum(gains, 0, out=gains)
    first, further = (float(part.sum(dtype=np.float64)) for part in np.split(gains, [packing.num_first]))
    of_users = float((packing.capacity * prices).sum(dtype=np.float64))
    return packing.first_limit * first + packing.limit * further + of_users


def _divided(num_pairs: int) -> Ranges:
    """Returns a function that runs kernel(begin, end, ...) over 0..total, divided among threads where that pays."""
    number = max(1, min(threads.cores(), num_pairs // _PAIRS_PER_THREAD))
    parts = 1 if number == 1 else 4 * number  # rows differ in length

    def over(total: int, kernel: Callable[..., Any], *arguments: Any) -> None:
        threads.over_ranges(lambda begin, end: kernel(begin, end, *arguments), total, parts=parts, threads=number)

    return over


# ---- compiled loops --------------------------------------------------------------------------------------------------
#
# They work on a range of rows and add up each row in its own order, so that the result does not depend on how the rows
# are divided among threads. No fastmath: sums must not be reordered. Arrays are float32 to halve what is moved through
# memory; what is proven is summed in integers. Index arrays are unsigned views: a signed index costs a test for "from
# the end" every time.


class Items(NamedTuple):
    """The items of the linear program; copies are measured in fractions of the largest limit."""

    indptr: np.ndarray  # (num_items + 1,) uint64
    users: np.ndarray  # (num_pairs,) unsigned
    num_first: np.uint64  # items that are first copies
    first_profit: np.float32
    first_limit: np.float32
    profit: np.float32  # of the other items
    limit: np.float32
    steps: np.ndarray  # (most users + 1,) float32 the step of an item by its number of users


class Users(NamedTuple):
    indptr: np.ndarray  # (num_users + 1,) uint64
    items: np.ndarray  # (num_pairs,) unsigned
    capacity: np.ndarray  # (num_users,) int32
    scale: np.float32  # a copy as a part of the largest limit
    steps: np.ndarray  # (most items + 1,) float32 the step of a user by the number of items


@_njit
def move_items(begin, end, items, weight, prices, anchor, values, reflected):
    """Takes one primal step: along the reduced profits of the items, projected to [0, limit].

    reflected: twice the point reached less the point left. values: the mean of that and the anchor, by weight.
    """
    nothing, two, rest = np.float32(0.0), np.float32(2.0), np.float32(1.0) - weight
    start = items.indptr[begin]
    for item in range(np.uint64(begin), np.uint64(end)):
        stop = items.indptr[item + _ONE]
        worth = items.first_profit if item < items.num_first else items.profit
        most = items.first_limit if item < items.num_first else items.limit
        if stop - start == _TWO:  # most rows, and two reads at once are faster than a loop
            worth -= prices[items.users[start]] + prices[items.users[start + _ONE]]
        else:
            for p in range(start, stop):
                worth -= prices[items.users[p]]
        value = values[item]
        reached = min(max(value + items.steps[stop - start] * worth, nothing), most)
        reflection = two * reached - value
        reflected[item] = reflection
        values[item] = weight * reflection + rest * anchor[item]
        start = stop


@_njit
def move_users(begin, end, users, weight, reflected, anchor, prices, reached_prices):
    """Takes one dual step: prices rise where demand exceeds the capacity, and never fall below 0."""
    nothing, two, rest = np.float32(0.0), np.float32(2.0), np.float32(1.0) - weight
    start = users.indptr[begin]
    for u in range(np.uint64(begin), np.uint64(end)):
        stop = users.indptr[u + _ONE]
        excess = -users.scale * np.float32(users.capacity[u])
        for j in range(start, stop):
            excess += reflected[users.items[j]]
        price = prices[u]
        reached = max(price + users.steps[stop - start] * excess, nothing)
        reached_prices[u] = reached
        prices[u] = weight * (two * reached - price) + rest * anchor[u]
        start = stop


@_njit
def reduced_profits(begin, end, items, prices, reduced):
    """Sets reduced[item] to its profit less its users' prices."""
    for item in range(np.uint64(begin), np.uint64(end)):
        worth = items.first_profit if item < items.num_first else items.profit
        for p in range(items.indptr[item], items.indptr[item + _ONE]):
            worth -= prices[items.users[p]]
        reduced[item] = worth


@_njit
def loads(indptr, users, copies, room):
    """Subtracts the copies of every item from its users' room, which starts as their capacity."""
    for item in range(copies.shape[0]):
        if copies[item]:
            for p in range(indptr[item], indptr[item + 1]):
                room[users[p]] -= copies[item]
