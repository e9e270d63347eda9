"""Computes, in exact arithmetic, the bound that any prices prove on the size of every training set."""

import numba
import numpy as np
import numpy.typing as npt

from coowned import validate
from coowned.attribution.graph import AttributionGraph
from coowned.errors import InputError

PRICE_BITS = 30
"""Prices are whole multiples of 2^-PRICE_BITS."""
_ROWS_PER_SUM = 1 << 16  # rows added up into one partial sum


def price_bound(
    graph: AttributionGraph,
    prices: npt.ArrayLike,
    *,
    contribution_bound: int | npt.NDArray[np.int32],
    max_copies: int = 1,
    unattributed: str = "drop",
) -> int:
    """Returns an upper bound on the size of every S in which no user is in more copies than their bound.

    A copy of an example e counts 1 <= Σ y + max(0, 1 - Σ y), summed over the users of e. Over all copies of S the
    first sum is at most Σ k_u·y_u, since nobody is in more than k_u of them, and the second at most
    Σ_e m_e·max(0, 1 - Σ y), where m_e = min(max_copies, smallest k_u of e) is the most copies e can have. So

        size <= Σ_u k_u·y_u + Σ_e m_e·max(0, 1 - Σ_{u in e} y_u)   for any prices y >= 0.

    Examples without users are outside both sums; under unattributed="keep" each adds one.

    Guarantees:
      - Never below the size of any S, whatever the prices.   (test_any_prices_bound_every_set,
        test_any_prices_bound_every_set_of_unequal_users)
      - Exact: prices are rounded to whole multiples of 2^-30 first, everything is then summed in integers, and
        the sum is rounded down.   (test_bound_is_exact)

    Args:
      contribution_bound: one for all users, or (num_users,) one for each.
      prices: (num_users,) one price per user; below 0 counts as 0 and above 1 as 1, which can only lower the bound.
      max_copies: the most copies of one example: 1 without duplicates, contribution_bound or more with them.

    Cost: O(pairs).

    Example:
      >>> graph = AttributionGraph.from_users_per_example([[0], [0, 1], [0, 2]])
      >>> price_bound(graph, [1.0, 0.0, 0.0], contribution_bound=2)
      2
    """
    validate.positive(max_copies=max_copies)
    if np.ndim(contribution_bound) == 0:
        validate.positive(contribution_bound=contribution_bound)
    capacities = np.broadcast_to(contribution_bound, graph.num_users)
    validate.one_of(("drop", "keep", "error"), unattributed=unattributed)
    values = np.asarray(prices, dtype=np.float64)
    validate.same_length(graph.num_users, prices=values)
    if not np.isfinite(values).all():
        raise InputError("prices must be finite numbers")
    one = 1 << PRICE_BITS
    whole = np.rint(np.clip(values, 0.0, 1.0) * one).astype(np.int32)  # (num_users,) multiples of 2^-30
    of_users = capacities.astype(np.int64) * whole  # (num_users,) below 2^61 each
    user_sum = (int((of_users >> PRICE_BITS).sum()) << PRICE_BITS) + int((of_users & (one - 1)).sum())
    sums = np.empty((-(-graph.num_examples // _ROWS_PER_SUM), 2), np.int64)
    most = min(int(max_copies), 2**31 - 1)
    _exact_item_sums(graph.indptr, graph.users, whole, capacities.astype(np.int32), most, sums)
    high, low = (sum(map(int, half)) for half in sums.T)  # Python's integers have no largest
    bound = (user_sum + (high << PRICE_BITS) + low) >> PRICE_BITS
    if unattributed == "keep":
        bound += int(np.count_nonzero(graph.users_per_example == 0))
    return bound


@numba.njit(cache=True, nogil=True)
def _exact_item_sums(indptr, users, prices, capacities, max_copies, sums):
    """Sets sums[i] to the i-th block's exact sum of m * max(0, one - prices of its users) over rows, in two halves.

    m is the most copies of the row. The first half counts in units of one = 2^PRICE_BITS, the second what is left.
    Prices are in [0, one], m is below 2^31: a product is below 2^61, and each half of 2^16 of them below 2^63.
    """
    one = np.int64(1) << PRICE_BITS
    for block in range(sums.shape[0]):
        high, low = np.int64(0), np.int64(0)
        for item in range(block * _ROWS_PER_SUM, min((block + 1) * _ROWS_PER_SUM, indptr.shape[0] - 1)):
            if indptr[item] == indptr[item + 1]:
                continue
            worth, most = one, np.int64(max_copies)
            for p in range(indptr[item], indptr[item + 1]):
                worth -= prices[users[p]]
                most = min(most, np.int64(capacities[users[p]]))
            if worth > 0:
                high += (most * worth) >> PRICE_BITS
                low += (most * worth) & (one - 1)
        sums[block, 0], sums[block, 1] = high, low
