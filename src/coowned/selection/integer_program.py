"""The paper's integer program for contribution bounding, solved by HiGHS."""

import dataclasses
import math
import time
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
import scipy.sparse

from coowned import validate
from coowned.attribution.graph import AttributionGraph, take_rows
from coowned.attribution.options import Option
from coowned.errors import InputError
from coowned.progress import Progress
from coowned.selection import highs_program
from coowned.selection.order import ordered_rows, part
from coowned.selection.packing import Packing, pack, peel
from coowned.selection.priced import Priced
from coowned.selection.selector import BoundedSelector, Selection


@dataclasses.dataclass(frozen=True, kw_only=True)
class IntegerProgram(BoundedSelector):
    """Finds the largest S with at most `contribution_bound` copies per user, or the best within `time_limit` seconds.

    What can be decided without losing an optimum is decided first (see `packing`), equal constraints are stated once,
    and HiGHS starts from the S of `Priced`, which is returned if nothing larger is found.

    Guarantees:
      - No user is in more than `contribution_bound` selected copies.   (test_check_suite)
      - No S under the same bound is larger than `upper_bound`; `proven_optimal` says that the size reaches it.
        (test_equals_brute_force)
      - Never smaller than the S of `Priced` that it starts from.   (test_never_below_its_start)

    Args:
      contribution_bound: most selected copies that contain one user.
      allow_duplicates: whether an example may be selected more than once.
      time_limit: seconds for the whole call. What is found and proven by then depends on the machine; where the
        solver finishes before, the result is the same on every run.
      ties, unattributed: as in `Priced`.

    Cost: exponential in the worst case. The solver's
    memory is a few hundred bytes for every pair that the safe decisions leave.
    What it is not: the way to a good S on a large graph; `Priced` comes within a few parts in 10,000 of it in seconds.
    With duplicates it gives up distinct examples for copies of those with few users; see `Priced.distinct_weight`.

    Example:
      >>> graph = AttributionGraph.from_users_per_example([[0, 1], [1, 2], [2, 0]])
      >>> selection = IntegerProgram(contribution_bound=1).select(graph)
      >>> selection.size, selection.upper_bound, selection.proven_optimal
      (1, 1, True)

    References: Ganesh et al. (2025), Section 5.4, https://arxiv.org/abs/2503.03622
    """

    allow_duplicates: Annotated[bool, Option("Allow an example to be selected more than once.")] = False
    time_limit: Annotated[float, Option("Time limit of the integer programs and priced.", metavar="SECONDS")] = 60

    name: ClassVar[str] = "integer-program"
    bound_is_enough: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.positive_number(time_limit=self.time_limit)

    def _select(self, graph: AttributionGraph, seed: int, progress: Progress) -> Selection:
        deadline = time.monotonic() + self.time_limit
        priced = Priced(
            contribution_bound=self.contribution_bound,
            contribution_bounds=self.contribution_bounds,
            allow_duplicates=self.allow_duplicates,
            time_limit=self.time_limit / 2,
            ties=self.ties,
            unattributed=self.unattributed,
        )
        start = priced.select(graph, seed=seed, progress=part(progress, 0.0, 0.2))
        copies, bound = start.copies.copy(), start.upper_bound
        assert bound is not None  # Priced always has one
        if not start.proven_optimal:
            rows = ordered_rows(graph, seed=seed, ties=self.ties, progress=part(progress, 0.2, 0.25))
            capacities = self.capacities(graph)
            limit = max(1, int(capacities.max(initial=0))) if self.allow_duplicates else 1
            packing = pack(rows, graph.num_users, contribution_bound=capacities, limit=limit)
            peeled = peel(packing, part(progress, 0.25, 0.3))
            core = rows.examples[peeled.core_items]  # (core.num_items,) example of each item of the core
            seconds = max(deadline - time.monotonic(), 0.1)
            found, most = _solve(
                peeled.core, copies[core], seconds=seconds, seed=seed, progress=part(progress, 0.3, 1.0)
            )
            outside = start.size - int(copies[core].sum(dtype=np.int64))  # decided, or kept without users
            bound = min(bound, outside + most)
            if found.sum(dtype=np.int64) > copies[core].sum(dtype=np.int64):
                copies[core] = found
        return self._selection(graph, seed, copies, upper_bound=bound)


def _solve(
    core: Packing, start: npt.NDArray[np.int32], *, seconds: float, seed: int, progress: Progress
) -> tuple[npt.NDArray[Any], int]:
    """Returns the best copies of the core's items, and a bound on their number that no solution exceeds."""
    if core.num_pairs >= 2**31:
        raise InputError(f"{core.num_pairs} pairs are too many for the solver; use Priced")
    rows, which = highs_program.distinct_rows(core.user_indptr, core.items)
    capacity = core.capacity[rows].copy()
    np.minimum.at(capacity, which, core.capacity)  # users with equal items may have unequal capacity left
    indptr, items = take_rows(core.user_indptr, core.items, rows)
    program = highs_program.Program(
        cost=-np.ones(core.num_items),
        upper=core.limits().astype(np.float64),
        rows=scipy.sparse.csr_array((np.ones(len(items), np.int64), items, indptr), shape=(len(rows), core.num_items)),
        row_lower=np.full(len(rows), -np.inf),
        row_upper=capacity.astype(np.float64),
    )
    # The solver's prices are right to 1e-7 an item, and its bound is trusted no further than that.
    doubt = 1e-3 + 2e-7 * float(program.upper.sum())
    outcome = highs_program.minimize(
        program,
        warm_start=start,
        absolute_gap=max(0.0, 1.0 - 2.0 * doubt),  # sizes are integers
        time_limit=seconds,
        seed=seed,
        progress=progress,
    )
    most = int(program.upper.sum())
    if math.isfinite(outcome.dual_bound):
        most = min(most, math.floor(-outcome.dual_bound + doubt))
    values = start if outcome.values is None else outcome.values
    return values, max(most, int(values.sum(dtype=np.int64)))
