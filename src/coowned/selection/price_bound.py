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
    contribution_bound: int,
    max_copies: int = 1,
    unattributed: str = "drop",
) -> int:
    """Returns an upper bound on the size of every S in which no user is in more than `contribution_bound` copies.

    A copy of an example e counts 1 <= Σ y + max(0, 1 - Σ y), summed over the users of e. Over all copies of S the
    first sum is at most k·Σ y, since nobody is in more than k of them, and the second at most
    Σ_e m_e·max(0, 1 - Σ y), where m_e = min(k, max_copies) is the most copies one example can have. So

        size <= k·Σ_u y_u + Σ_e m_e·max(0, 1 - Σ_{u in e} y_u)   for any prices y >= 0.

    Examples without users are outside both sums; under unattributed="keep" each adds one.

    Guarantees:
      - Never below the size of any S, whatever the prices.   (test_any_prices_bound_every_set)
      - Exact: prices are rounded to whole multiples of 2^-30 first, everything is then summed in integers, and
        the sum is rounded down.   (test_bound_is_exact)

    Args:
      prices: (num_users,) one price per user; below 0 counts as 0 and above 1 as 1, which can only lower the bound.
      max_copies: the most copies of one example: 1 without duplicates, contribution_bound or more with them.

    Cost: O(pairs).

    Example:
      >>> graph = AttributionGraph.from_users_per_example([[0], [0, 1], [0, 2]])
      >>> price_bound(graph, [1.0, 0.0, 0.0], contribution_bound=2)
      2
    """
    validate.positive(contribution_bound=contribution_bound, max_copies=max_copies)
    validate.one_of(("drop", "keep", "error"), unattributed=unattributed)
    values = np.asarray(prices, dtype=np.float64)
    validate.same_length(graph.num_users, prices=values)
    if not np.isfinite(values).all():
        raise InputError("prices must be finite numbers")
    one = 1 << PRICE_BITS
    whole = np.rint(np.clip(values, 0.0, 1.0) * one).astype(np.int32)  # (num_users,) multiples of 2^-30
    user_sum = int(whole.sum(dtype=np.int64)) if len(whole) < 1 << 32 else sum(map(int, whole))
    sums = np.empty(-(-graph.num_examples // _ROWS_PER_SUM), np.int64)
    _exact_item_sums(graph.indptr, graph.users, whole, one, sums)
    item_sum = sum(map(int, sums))  # Python's integers have no largest
    copies = min(int(contribution_bound), int(max_copies))
    bound = (int(contribution_bound) * user_sum + copies * item_sum) >> PRICE_BITS
    if unattributed == "keep":
        bound += int(np.count_nonzero(graph.users_per_example == 0))
    return bound


@numba.njit(cache=True, nogil=True)
def _exact_item_sums(indptr, users, prices, one, sums):
    """sums[i]: the sum of max(0, one - prices of its users) over the i-th block's rows that have users, exactly.

    Prices are in [0, one] and one is 2^30, so a row of up to 2^32 users and a block of 2^16 rows stay below 2^63.
    """
    for block in range(sums.shape[0]):
        total = np.int64(0)
        for item in range(block * _ROWS_PER_SUM, min((block + 1) * _ROWS_PER_SUM, indptr.shape[0] - 1)):
            if indptr[item] == indptr[item + 1]:
                continue
            worth = np.int64(one)
            for p in range(indptr[item], indptr[item + 1]):
                worth -= prices[users[p]]
            if worth > 0:
                total += worth
        sums[block] = total
