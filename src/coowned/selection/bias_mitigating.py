"""Greedy contribution bounding that alternates between examples with few and with many users."""

import dataclasses
from typing import Annotated, Any, ClassVar

import numba
import numpy as np
import numpy.typing as npt
import polars as pl

from coowned import validate
from coowned.attribution.graph import AttributionGraph
from coowned.attribution.options import Option
from coowned.progress import Progress, reporting, silent
from coowned.selection.greedy import PassSelector
from coowned.selection.order import OrderedRows, ordered_rows
from coowned.selection.selector import check_is_graph


@dataclasses.dataclass(frozen=True, kw_only=True)
class BiasMitigating(PassSelector):
    """Alternates between examples with few users and examples with many.

    The examples with at most `threshold` users and those with more form two lists, each in the shared order, fewest
    users first. A pass visits `few_user_run` examples of the first list, then `many_user_run` of the second, and so
    on; what is left of the longer list follows. A visited example is selected if every user of it has room. The paper
    leaves open what a run counts and how duplicates arise; here a run counts visited examples, selected or not, one
    pass visits every example once, and duplicates come from further passes in the same order with the room left,
    until a pass adds nothing. Examples without users are in neither list; with unattributed="keep" they are added.

    Guarantees:
      - No user is in more than `contribution_bound` selected copies.   (test_check_suite)
      - Nothing could be added without breaking that.   (test_check_suite)
      - Exactly the sequential result of the reading above.   (test_equals_the_paper)

    Args:
      contribution_bound: most selected copies that contain one user.
      threshold: most users of an example in the first list (the paper's u).
      few_user_run: examples visited in the first list at a time (the paper's c1).
      many_user_run: examples visited in the second list at a time (the paper's c2).
      allow_duplicates: False makes one pass.

    Cost: as `GreedyWithDuplicates`. What it is not: tuned; `pareto` shows what the settings trade.

    Example:
      >>> from coowned import AttributionGraph
      >>> graph = AttributionGraph.from_users_per_example([[0], [1], [2], [3], [2, 3]])
      >>> fair = BiasMitigating(contribution_bound=1, threshold=1, few_user_run=1, many_user_run=1, ties="input")
      >>> fair.select(graph).copies
      array([1, 1, 0, 0, 1], dtype=int32)

    References: Ganesh et al. (2025), Section 5.5, https://arxiv.org/abs/2503.03622
    """

    threshold: Annotated[int, Option("bias-mitigating: largest number of users of a few-user example.")]
    few_user_run: Annotated[int, Option("bias-mitigating: few-user examples visited in a row.")]
    many_user_run: Annotated[int, Option("bias-mitigating: many-user examples visited in a row.")]
    allow_duplicates: Annotated[bool, Option("Allow an example to be selected more than once.")] = True

    name: ClassVar[str] = "bias-mitigating"

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.positive(threshold=self.threshold, few_user_run=self.few_user_run, many_user_run=self.many_user_run)

    @property
    def _repeats(self) -> bool:
        return self.allow_duplicates

    def _walk(self, rows: OrderedRows) -> npt.NDArray[Any]:
        walk = rows.attributed_rows()
        _interleave(*rows.split(self.threshold), self.few_user_run, self.many_user_run, walk)
        return walk


@numba.njit(cache=True, nogil=True)
def _interleave(few, many, few_run, many_run, walk):
    """Fills walk with few_run of few, many_run of many, and so on; the rest of the longer list follows."""
    i = j = at = 0
    while at < walk.shape[0]:
        for _ in range(min(few_run, few.shape[0] - i)):
            walk[at] = few[i]
            i += 1
            at += 1
        for _ in range(min(many_run, many.shape[0] - j)):
            walk[at] = many[j]
            j += 1
            at += 1


SETTINGS = tuple(
    (threshold, few_user_run, many_user_run)
    for threshold in range(1, 5)
    for few_user_run, many_user_run in [(1, c) for c in range(1, 11)] + [(c, 1) for c in range(1, 11)]
)
"""The paper's 80 settings of (threshold, few_user_run, many_user_run); its grid names runs of 1 and 1 twice."""


def pareto(
    graph: AttributionGraph, *, contribution_bound: int, seed: int = 0, progress: Progress | None = None
) -> pl.DataFrame:
    """Runs `BiasMitigating` with each of the paper's 80 settings; one row each, in the order of `SETTINGS`.

    Columns: threshold, few_user_run, many_user_run, size, num_distinct, mean_users_per_example (over copies, null for
    an empty set), dominated: whether another setting has at least the size and at least the mean, and more of one.

    Guarantees:
      - Every row is what `BiasMitigating` gives for that setting.   (test_rows_are_the_selector)
      - No row that is not dominated is beaten by any other.   (test_dominated)

    Cost: one sort, then 80 times the passes of `BiasMitigating` over rows in the order they are visited.
    What it is not: a choice by accuracy on validation data, which would not be free of privacy cost.

    Example:
      >>> graph = AttributionGraph.from_users_per_example([[0], [1], [2], [0, 1], [1, 2]])
      >>> pareto(graph, contribution_bound=3).shape
      (80, 7)

    References: Ganesh et al. (2025), Section 5.5, https://arxiv.org/abs/2503.03622
    """
    check_is_graph(graph)
    validate.seed(seed)
    report = reporting(progress)
    rows = ordered_rows(graph, seed=seed, ties="hash", progress=silent)
    table = []
    for number, (threshold, few_user_run, many_user_run) in enumerate(SETTINGS):
        report(number / len(SETTINGS), f"setting {number + 1} of {len(SETTINGS)}")
        setting: dict[str, Any] = {"threshold": threshold, "few_user_run": few_user_run, "many_user_run": many_user_run}
        selector = BiasMitigating(contribution_bound=contribution_bound, **setting)
        copies = selector.run_passes(rows, selector.capacities(graph), silent)
        size = int(copies.sum(dtype=np.int64))
        mean = int(copies @ graph.users_per_example.astype(np.int64)) / size if size else None
        counts = {"size": size, "num_distinct": int(np.count_nonzero(copies)), "mean_users_per_example": mean}
        table.append(setting | counts)
    frame = pl.DataFrame(table, schema_overrides={"mean_users_per_example": pl.Float64})
    dominated = _dominated(frame["size"].to_numpy(), frame["mean_users_per_example"].fill_null(0.0).to_numpy())
    return frame.with_columns(pl.Series("dominated", dominated))


def _dominated(sizes: np.ndarray, means: np.ndarray) -> np.ndarray:
    """Returns for each of the (rows,) whether another one is at least as large in both and larger in one."""
    no_less = (sizes[None, :] >= sizes[:, None]) & (means[None, :] >= means[:, None])
    more = (sizes[None, :] > sizes[:, None]) | (means[None, :] > means[:, None])
    return np.any(no_less & more, axis=1)
