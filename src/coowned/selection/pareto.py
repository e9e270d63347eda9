"""Compares size with users per example over the paper's 80 settings of `BiasMitigating`."""

from typing import Any

import numpy as np
import polars as pl

from coowned import validate
from coowned.attribution.graph import AttributionGraph
from coowned.progress import Progress, reporting, silent
from coowned.selection.bias_mitigating import BiasMitigating
from coowned.selection.order import ordered_rows
from coowned.selection.selector import check_is_graph

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
    """(rows,) whether another row is at least as large in both and larger in one."""
    no_less = (sizes[None, :] >= sizes[:, None]) & (means[None, :] >= means[:, None])
    more = (sizes[None, :] > sizes[:, None]) | (means[None, :] > means[:, None])
    return np.any(no_less & more, axis=1)
