"""A random set of examples, without a contribution bound."""

import dataclasses
from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt

from coowned import validate
from coowned.attribution.graph import AttributionGraph
from coowned.attribution.options import Option
from coowned.errors import InputError
from coowned.progress import Progress
from coowned.selection.order import hash_order
from coowned.selection.selector import Selection, Selector

_HALVES = {"all": "with users", "few-users": "with at most the median number of users", "many-users": "with more users"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomSubset(Selector[Selection]):
    """Selects the `size` examples with the smallest keyed hash, ignoring users.

    For the paper's study of bias only: it holds no contribution bound, so its certificate shows the one it happens
    to have. Examples without users are left out, as by the default of the other selectors.

    Guarantees:
      - `size` different examples of the requested kind.   (test_pool)
      - A smaller subset with the same seed is contained in a larger one.   (test_nested)

    Args:
      size: number of examples to select.
      among: "all" examples, those with at most ("few-users") or those with more ("many-users") users than the
        median of users per example.

    Cost: O(examples). What it is not: private by itself, or fit for training with a guarantee.

    Example:
      >>> graph = AttributionGraph.from_users_per_example([[0], [0, 1], [0, 1, 2], [1]])
      >>> RandomSubset(size=2, among="few-users").select(graph, seed=0).copies
      array([1, 0, 0, 1], dtype=int32)

    References: Ganesh et al. (2025), Section 5.5, https://arxiv.org/abs/2503.03622
    """

    size: Annotated[int, Option("random-subset: number of examples.")]
    among: Annotated[str, Option("random-subset: all, few-users or many-users.")] = "all"

    name: ClassVar[str] = "random-subset"

    def __post_init__(self) -> None:
        validate.positive(size=self.size)
        validate.one_of(tuple(_HALVES), among=self.among)

    def _check(self, graph: AttributionGraph) -> None:
        available = int(np.count_nonzero(self._pool(graph)))
        if self.size > available:
            raise InputError(
                f"size is {self.size}, but there are only {available} examples {_HALVES[self.among]}; reduce it"
            )

    def _select(self, graph: AttributionGraph, seed: int, progress: Progress) -> Selection:
        ranks = np.where(self._pool(graph), np.int32(0), np.int32(1))  # (num_examples,) the pool comes first
        order = hash_order(ranks, graph.example_ids, seed=seed, progress=progress)
        copies = np.zeros(graph.num_examples, np.int32)
        copies[order[: self.size]] = 1
        return Selection(graph=graph, copies=copies, selector=self.settings(), seed=seed)

    def _pool(self, graph: AttributionGraph) -> npt.NDArray[np.bool_]:
        """(num_examples,) mask of the examples to choose from."""
        users_per_example = graph.users_per_example
        attributed = users_per_example > 0
        if self.among == "all" or not attributed.any():
            return attributed
        median = np.median(users_per_example[attributed])
        if self.among == "few-users":
            return attributed & (users_per_example <= median)
        return users_per_example > median
