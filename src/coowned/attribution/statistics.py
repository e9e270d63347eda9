"""Statistics of a graph: counts, histograms, components, and the cost of its heaviest users."""

import dataclasses
from typing import Any

import numpy as np

from coowned.attribution.graph import AttributionGraph, connected_components

MOST_LISTED = 10  # heaviest users that are looked at
_BOUNDS = (1, 3, 10)
_HEAVY_SHARE = 0.5  # of the examples kept out by a few users: worth a warning


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphStatistics:
    """The figures that `coowned inspect` prints. All are statistics of the graph, which is not protected.

    Guarantees:
      - Every count equals a plain recount.                                        (test_counts_equal_a_recount)
      - `blocked` is a true lower bound on what any selection leaves out.          (test_blocked_is_a_lower_bound)

    Example:
      >>> graph = AttributionGraph.from_users_per_example([[0, 1], [0, 2], [0], [3]])
      >>> statistics = GraphStatistics.of(graph)
      >>> statistics.users_per_example_histogram
      [(1, 2), (2, 2)]
      >>> statistics.blocked[1]
      2
    """

    num_examples: int
    num_users: int
    num_pairs: int
    num_unprotected_users: int
    num_examples_without_users: int
    num_users_without_examples: int
    mean_users_per_example: float
    median_users_per_example: float
    max_users_per_example: int
    mean_examples_per_user: float
    median_examples_per_user: float
    max_examples_per_user: int
    users_per_example_histogram: list[tuple[int, int]]  # (from, examples): classes 0, 1, 2, 3, 4, 5-8, 9-16, …
    examples_per_user_histogram: list[tuple[int, int]]
    heaviest_users: list[tuple[int, int]]  # (user, examples), heaviest first
    num_components: int | None  # None, like the next two, where they were not counted
    largest_component_users: int | None
    largest_component_examples: int | None
    blocked: dict[int, int]  # bound -> examples that the heaviest users alone force out of any S without duplicates

    @classmethod
    def of(cls, graph: AttributionGraph) -> "GraphStatistics":
        users_per_example, examples_per_user = graph.users_per_example, graph.examples_per_user
        of_counts: dict[str, Any] = {}
        for name, counts in (("users_per_example", users_per_example), ("examples_per_user", examples_per_user)):
            of_counts |= figures_of(name, *np.unique(counts, return_counts=True))
        heaviest = _heaviest(examples_per_user)
        heavy = HeavyUsers.of(graph, heaviest)
        component = connected_components(graph.indptr, graph.users, graph.num_users)
        _, component_of_user, component_users = np.unique(component, return_inverse=True, return_counts=True)
        first_user = graph.users[graph.indptr[:-1][users_per_example > 0]]
        component_examples = np.bincount(component_of_user[first_user], minlength=len(component_users))
        return cls(
            num_examples=graph.num_examples,
            num_users=graph.num_users,
            num_pairs=graph.num_pairs,
            num_unprotected_users=graph.num_unprotected_users,
            num_examples_without_users=int((users_per_example == 0).sum()),
            num_users_without_examples=int((examples_per_user == 0).sum()),
            heaviest_users=[(int(user), int(examples_per_user[user])) for user in heaviest],
            num_components=len(component_users),
            largest_component_users=int(component_users.max(initial=0)),
            largest_component_examples=int(component_examples.max(initial=0)),
            blocked=heavy.blocked_by_bound(),
            **of_counts,
        )

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def heavy_users_advice(graph: AttributionGraph, contribution_bound: int) -> str | None:
    """Returns advice if a few users keep most examples out of S, which a higher bound would hardly change; else None.

    Guarantees:
      - Given exactly where the heaviest users alone force out half of the examples.   (test_advice_on_heavy_users)

    Example:
      >>> graph = AttributionGraph.from_users_per_example([[0, user] for user in range(1, 101)])
      >>> heavy_users_advice(graph, 3).split(". ")[0]
      '1 user keeps 97 of 100 examples out at a contribution bound of 3'
    """
    return HeavyUsers.of(graph, _heaviest(graph.examples_per_user)).advice(contribution_bound)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class HeavyUsers:
    """The heaviest users and their cost, computed locally or on Spark."""

    num_examples: int  # of the whole graph
    held: np.ndarray  # (users,) examples of each
    added: np.ndarray  # (users,) examples of each that none of those before has

    @classmethod
    def of(cls, graph: AttributionGraph, users: np.ndarray) -> "HeavyUsers":
        rank = np.full(graph.num_users, len(users), dtype=np.int64)  # (num_users,) index in the list, or its length
        rank[users] = np.arange(len(users))
        attributed = graph.indptr[:-1][graph.users_per_example > 0]
        # (attributed examples,) index of the first listed user of each
        first = np.minimum.reduceat(rank[graph.users], attributed) if len(attributed) else np.zeros(0, np.int64)
        added = np.bincount(first, minlength=len(users))[: len(users)]
        return cls(num_examples=graph.num_examples, held=graph.examples_per_user[users], added=added)

    def blocked(self, contribution_bound: int) -> list[int]:
        """Counts the examples that any S without duplicates must leave out because of the first user, the first two, …

        Of the examples that contain at least one of the first j users, S holds at most j times contribution_bound; the
        best j counts, so that light users at the end of the list take nothing away.
        """
        capacity = np.cumsum(np.minimum(self.held, contribution_bound))
        return np.maximum.accumulate((np.cumsum(self.added) - capacity).clip(0)).tolist()

    def blocked_by_bound(self) -> dict[int, int]:
        """Returns the most that `blocked` has, for a few bounds."""
        return {bound: max(self.blocked(bound), default=0) for bound in _BOUNDS}

    def advice(self, contribution_bound: int) -> str | None:
        """Returns the sentence of `heavy_users_advice`."""
        blocked = self.blocked(contribution_bound)
        if not blocked or blocked[-1] < _HEAVY_SHARE * self.num_examples:
            return None
        enough = next(count for count, out in enumerate(blocked, 1) if out >= 0.95 * blocked[-1])  # as many as matter
        users = "1 user keeps" if enough == 1 else f"{enough:,} users keep"
        return (
            f"{users} {blocked[enough - 1]:,} of {self.num_examples:,} examples out at a contribution bound of "
            f"{contribution_bound:,}. If they consent or are not people (a mailbox owner, a mailing-list robot), "
            "exclude them with --unprotected FILE ([data] unprotected in TOML); the guarantee then does not cover "
            "them. Or change the attribution (--users, --attribute-to)."
        )


def _heaviest(examples_per_user: np.ndarray) -> np.ndarray:
    # By weight, ties by label; only those with an example.
    order = np.argsort(-examples_per_user, kind="stable")[:MOST_LISTED]
    return order[examples_per_user[order] > 0]


def figures_of(name: str, values: np.ndarray, times: np.ndarray) -> dict[str, Any]:
    """Returns mean, median, largest and histogram of counts, given as increasing values and how often each occurs.

    >>> figures_of("examples_per_user", np.array([1, 4]), np.array([3, 1]))["median_examples_per_user"]
    1.0
    """
    total = int(times.sum())
    middle = values[np.searchsorted(np.cumsum(times), [(total - 1) // 2, total // 2], side="right")] if total else [0]
    return {
        f"mean_{name}": int(values @ times) / max(1, total),
        f"median_{name}": float(np.mean(middle)),
        f"max_{name}": int(values.max(initial=0)),
        f"{name}_histogram": histogram(values, times),
    }


def histogram(values: np.ndarray, times: np.ndarray | None = None) -> list[tuple[int, int]]:
    """Counts values in classes 0, 1, 2, 3, 4, 5-8, 9-16, …, given by their lower ends; empty ones are left out."""
    largest = int(values.max(initial=0))
    begins = [0, 1, 2, 3, 4, 5]
    while begins[-1] <= largest:
        begins.append(2 * begins[-1] - 1)
    counts, _ = np.histogram(values, bins=[*begins, max(begins[-1], largest) + 1], weights=times)
    return [(begin, int(count)) for begin, count in zip(begins, counts, strict=True) if count]


def class_name(begin: int) -> str:
    """Returns the name of the `histogram` class that begins there.

    >>> class_name(4), class_name(9)
    ('4', '9–16')
    """
    return str(begin) if begin < 5 else f"{begin:,}–{2 * begin - 2:,}"
