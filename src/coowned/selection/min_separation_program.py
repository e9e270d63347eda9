"""The paper's integer program for batches with min separation, solved by HiGHS."""

import dataclasses
import math
import time
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
import scipy.sparse

from coowned import validate
from coowned.attribution.graph import AttributionGraph
from coowned.attribution.options import Option
from coowned.errors import InfeasibleScheduleError, InputError
from coowned.progress import Progress
from coowned.selection import highs_program
from coowned.selection.greedy_min_separation import GreedyMinSeparation, SeparatedSelector
from coowned.selection.order import part
from coowned.selection.selector import Schedule

_MOST_NONZEROS = 50_000_000  # of the constraints: some gigabytes in the solver


@dataclasses.dataclass(frozen=True, kw_only=True)
class MinSeparationProgram(SeparatedSelector):
    """Finds the schedule with the smallest contribution bound for a given min separation, on small graphs.

    A variable for each example and batch; every window of `min_separation` batches holds at most one
    copy that contains a user (for a min separation above `iterations` the one window is all batches), every batch has
    exactly `batch_size` examples, and the most copies that contain one user are minimized. HiGHS starts from the
    schedule of `GreedyMinSeparation` where that finds one.

    Guarantees:
      - The schedule has the requested min separation.   (test_separation_is_held)
      - No such schedule has a contribution bound below `lower_bound`; `proven_optimal` says that this one reaches it.
        (test_equals_brute_force)
      - Where no schedule exists it raises `InfeasibleScheduleError`; its message says whether that is proven or the
        time was up.   (test_infeasible)

    Args:
      batch_size, iterations, min_separation: as in `GreedyMinSeparation`.
      time_limit: seconds for the whole call.
      ties: the order of the greedy start.
      unattributed: "keep" lets an example without users appear once in the whole schedule.

    Cost: examples * iterations variables and pairs * iterations * min_separation entries; exponential time in the
    worst case. Meant to measure how far `GreedyMinSeparation` is from the optimum.

    Example:
      >>> graph = AttributionGraph.from_users_per_example([[0], [1], [2], [0, 1]])
      >>> program = MinSeparationProgram(batch_size=1, iterations=4, min_separation=2)
      >>> schedule = program.select(graph)
      >>> schedule.proven_optimal, schedule.lower_bound
      (True, 2)

    References: Ganesh et al. (2025), Section 5.4, https://arxiv.org/abs/2503.03622
    """

    time_limit: Annotated[float, Option("Time limit of the integer programs and priced.", metavar="SECONDS")] = 60

    name: ClassVar[str] = "min-separation-program"

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.positive_number(time_limit=self.time_limit)

    def _check(self, graph: AttributionGraph) -> None:
        super()._check(graph)
        window = min(self.min_separation, self.iterations)
        windows = self.iterations - window + 1
        nonzeros = graph.num_pairs * (windows * window + self.iterations) + graph.num_examples * self.iterations
        if nonzeros > _MOST_NONZEROS:
            raise InputError(
                f"the integer program would have {nonzeros} entries, more than the {_MOST_NONZEROS} it can handle; "
                "use GreedyMinSeparation, or fewer examples or iterations"
            )

    def _select(self, graph: AttributionGraph, seed: int, progress: Progress) -> Schedule:
        deadline = time.monotonic() + self.time_limit
        filled = 0
        start = None
        try:
            settings = {field.name: getattr(self, field.name) for field in dataclasses.fields(SeparatedSelector)}
            start = GreedyMinSeparation(**settings).select(graph, seed=seed, progress=part(progress, 0.0, 0.1))
        except InfeasibleScheduleError as error:  # of the greedy walk: a schedule may exist
            filled = error.filled
        examples = np.arange(graph.num_examples)
        if self.unattributed != "keep":
            examples = np.flatnonzero(graph.users_per_example)
        program = self._program(graph, examples)
        outcome = highs_program.minimize(
            program,
            warm_start=None if start is None else self._as_values(graph, start, examples),
            absolute_gap=0.99,  # contribution bounds are integers
            time_limit=max(deadline - time.monotonic(), 0.1),
            seed=seed,
            progress=part(progress, 0.1, 1.0),
        )
        if outcome.values is not None:
            chosen = outcome.values[:-1].reshape(self.iterations, len(examples))
            batches = examples[np.nonzero(chosen)[1]].reshape(self.iterations, self.batch_size)
        elif start is not None:
            batches = start.batches
        else:
            schedule = (
                f"schedule of {self.iterations} batches of {self.batch_size} with min_separation {self.min_separation}"
            )
            raise InfeasibleScheduleError(
                f"no {schedule} exists; reduce min_separation, batch_size or iterations"
                if outcome.infeasible
                else f"no {schedule} was found in {self.time_limit} seconds; raise time_limit, or reduce "
                "min_separation, batch_size or iterations",
                filled=filled,
                needed=self._num_slots,
            )
        reached = _contribution_bound(graph, batches)
        proven = outcome.dual_bound if math.isfinite(outcome.dual_bound) else 0.0
        lowest = min(max(0, math.ceil(proven - 1e-3)), reached)
        return self._schedule(graph, seed, batches, lower_bound=lowest, proven_optimal=reached == lowest)

    def _program(self, graph: AttributionGraph, examples: npt.NDArray[np.int64]) -> highs_program.Program:
        """Builds the program, whose columns are x[t, i] for batch t and example i, and last the contribution bound."""
        user_indptr, entries = graph.subgraph(examples).by_user
        users, _ = highs_program.distinct_rows(user_indptr, entries)
        own = [entries[user_indptr[u] : user_indptr[u + 1]].astype(np.int64) for u in users]
        # An order of the constraints that does not depend on how users are labelled.
        own = sorted((examples_of for examples_of in own if len(examples_of)), key=lambda row: row.tolist())
        window = min(self.min_separation, self.iterations)
        columns = np.arange(self.iterations * len(examples)).reshape(self.iterations, len(examples))
        bound = columns.size
        rows: list[tuple[npt.NDArray[Any], float, float]] = []  # columns, least and most of their sum
        for examples_of in own:
            for first in range(self.iterations - window + 1):
                rows.append((columns[first : first + window, examples_of].ravel(), -np.inf, 1.0))
            rows.append((np.append(columns[:, examples_of].ravel(), bound), -np.inf, 0.0))
        rows += [(columns[batch], self.batch_size, self.batch_size) for batch in range(self.iterations)]
        without_users = np.flatnonzero(graph.users_per_example[examples] == 0)
        rows += [(columns[:, i], -np.inf, 1.0) for i in without_users]  # kept, and never repeated
        indices, lower, upper = zip(*rows, strict=True)
        flat, indptr = np.concatenate(indices), np.concatenate([[0], np.cumsum([len(row) for row in indices])])
        matrix = scipy.sparse.csr_array((np.where(flat == bound, -1, 1), flat, indptr), shape=(len(rows), bound + 1))
        return highs_program.Program(
            cost=np.append(np.zeros(bound), 1.0),
            upper=np.append(np.ones(bound), -(-self.iterations // window)),
            rows=matrix,
            row_lower=np.array(lower, np.float64),
            row_upper=np.array(upper, np.float64),
        )

    def _as_values(
        self, graph: AttributionGraph, start: Schedule, examples: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float64]:
        values = np.zeros((self.iterations, len(examples)))
        column = np.full(graph.num_examples, -1)
        column[examples] = np.arange(len(examples))
        values[np.arange(self.iterations)[:, None], column[start.batches]] = 1.0
        return np.append(values.ravel(), _contribution_bound(graph, start.batches))


def _contribution_bound(graph: AttributionGraph, batches: npt.NDArray[Any]) -> int:
    copies = np.bincount(np.ravel(batches), minlength=graph.num_examples)
    return int(np.bincount(graph.users, np.repeat(copies, graph.users_per_example)).max(initial=0))
