"""graph.json: counts of the graph before and after selection, stored with a run so that its report only reads."""

from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from coowned import codec
from coowned.attribution.graph import AttributionGraph
from coowned.attribution.statistics import histogram
from coowned.selection.selector import Schedule, Selection

NAME = "graph.json"


class CountClass(NamedTuple):
    """How many examples or users have a count in one class."""

    begin: int  # smallest count of the class
    before: int
    after: int


class GraphSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of the train split's graph and of S. None depends on ids, keys or content.

    Guarantees:
      - Every count equals a plain recount.   (test_counts_equal_a_plain_recount)

    Attributes:
      num_users_left: users in at least one copy.
      users_per_example: examples before selection and copies after it, by number of users.
      examples_per_user: users before and after, by number of examples or copies.
    """

    format: Literal["coowned-graph-summary-1"] = "coowned-graph-summary-1"
    num_examples: int
    num_users: int
    num_users_left: int
    mean_users_per_example: float
    mean_users_per_copy: float
    users_per_example: list[CountClass]
    examples_per_user: list[CountClass]

    @classmethod
    def of(cls, graph: AttributionGraph, selected: Selection | Schedule) -> "GraphSummary":
        copies = np.asarray(selected.copies, np.int64)  # (num_examples,)
        per_example = graph.users_per_example.astype(np.int64)
        weights = np.repeat(copies, per_example)  # (num_pairs,)
        per_user = np.bincount(graph.users, weights=weights, minlength=graph.num_users).astype(np.int64)
        return cls(
            num_examples=graph.num_examples,
            num_users=graph.num_users,
            num_users_left=int(np.count_nonzero(per_user)),
            mean_users_per_example=graph.num_pairs / max(1, graph.num_examples),
            mean_users_per_copy=float(copies @ per_example) / max(1, int(copies.sum())),
            users_per_example=_classes(per_example, np.repeat(per_example, copies)),
            examples_per_user=_classes(graph.examples_per_user, per_user),
        )

    def to_json(self) -> str:
        return codec.encode_json(self, indent=2) + "\n"


def _classes(before: npt.NDArray[np.int64], after: npt.NDArray[np.int64]) -> list[CountClass]:
    counts = [dict(histogram(values)) for values in (before, after)]
    begins = sorted(counts[0].keys() | counts[1].keys())
    return [CountClass(begin, counts[0].get(begin, 0), counts[1].get(begin, 0)) for begin in begins]
