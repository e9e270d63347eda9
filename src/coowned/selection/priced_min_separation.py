"""Batches for DP-MF with few and widely separated participations of each user."""

import dataclasses
from typing import Annotated, ClassVar, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from coowned import validate
from coowned.attribution.graph import AttributionGraph, take_rows
from coowned.attribution.options import Option
from coowned.errors import InfeasibleScheduleError
from coowned.progress import Progress
from coowned.selection.greedy_min_separation import SeparatedSelector
from coowned.selection.order import ordered_rows, part
from coowned.selection.priced import Priced
from coowned.selection.selector import MOST_COPIES, Schedule, Selection

_SPARE = 50  # one copy in so many more than there are slots, so that some may be left out


@dataclasses.dataclass(frozen=True, kw_only=True)
class PricedMinSeparation(SeparatedSelector):
    """Chooses S with `Priced` under a contribution bound, and spreads each user's copies over the batches.

    `GreedyMinSeparation` lets a user take part as soon as the separation allows, about iterations / min_separation
    times. Noise grows with the root of that number. Where batches need fewer participations than that, a bound on them
    keeps the noise low, and a near-optimal S under the bound keeps many distinct examples.

    Every batch takes, of the copies whose users are all free, those that have a user with most copies still to come.
    Examples are repeated only where S without repetitions is smaller than the number of slots.

    Guarantees:
      - Any `min_separation` consecutive batches together hold at most one copy that contains a given user.
        (test_separation_and_bound_are_held, test_check_suite)
      - No user is in more than `contribution_bound` copies.   (test_separation_and_bound_are_held)
      - No example is repeated where S has enough without.   (test_examples_are_repeated_only_where_needed)
      - The same seed gives the same schedule, however users are labelled.   (test_check_suite)

    Args:
      batch_size: examples in each batch.
      iterations: number of batches.
      min_separation: any two batches with the same user are at least this far apart.
      contribution_bound: most slots that contain one user.
      unattributed: "keep" lets an example without users appear once.

    Cost: one or two runs of `Priced`, and O(pairs of S) for every batch.
    What it is not: sure to find a schedule if one exists. `InfeasibleScheduleError` reports how far it got.

    Example:
      >>> graph = AttributionGraph.from_users_per_example([[0], [1], [0, 1], [2], [2]])
      >>> paced = PricedMinSeparation(batch_size=1, iterations=4, min_separation=2, contribution_bound=2)
      >>> paced.select(graph).copies
      array([0, 1, 1, 1, 1], dtype=int32)
    """

    contribution_bound: Annotated[int, Option("Largest number of selected copies that contain one user.", metavar="K")]

    name: ClassVar[str] = "priced-min-separation"

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.integer(at_least=1, at_most=MOST_COPIES, contribution_bound=self.contribution_bound)

    def _select(self, graph: AttributionGraph, seed: int, progress: Progress) -> Schedule:
        selection = self._selection(graph, seed, part(progress, 0.0, 0.6))
        if selection.size < self._num_slots:
            raise InfeasibleScheduleError(
                f"the schedule has {self._num_slots} slots, but only {selection.size} copies were found with no user "
                f"in more than {self.contribution_bound}; raise contribution_bound, or reduce iterations or batch_size",
                filled=0,
                needed=self._num_slots,
            )
        examples = self._copies(graph, seed, selection, part(progress, 0.6, 0.7))
        slots = self._spread(graph, examples, part(progress, 0.7, 1.0))
        return self._schedule(graph, seed, examples[slots])

    def _selection(self, graph: AttributionGraph, seed: int, progress: Progress) -> Selection:
        bounded = Priced(contribution_bound=self.contribution_bound, ties=self.ties, unattributed=self.unattributed)
        selection = bounded.select(graph, seed=seed, progress=part(progress, 0.0, 0.5))
        if selection.size >= self._num_slots:
            return selection
        repeated = dataclasses.replace(bounded, allow_duplicates=True, distinct_weight=1.0)
        return repeated.select(graph, seed=seed, progress=part(progress, 0.5, 1.0))

    def _copies(
        self, graph: AttributionGraph, seed: int, selection: Selection, progress: Progress
    ) -> npt.NDArray[np.int64]:
        """Returns the (copies,) example of each: first copies first, then by most users; few more than needed."""
        rows = ordered_rows(graph, seed=seed, ties=self.ties, progress=progress)
        examples = rows.examples[::-1].astype(np.int64)
        counts = selection.copies[examples].astype(np.int64)
        examples = np.repeat(examples, counts)
        numbers = np.arange(len(examples)) - np.repeat(np.cumsum(counts) - counts, counts)
        if numbers.max(initial=0) == 0:
            return examples
        return examples[np.argsort(numbers, kind="stable")][: self._num_slots + self._num_slots // _SPARE]

    def _spread(
        self, graph: AttributionGraph, examples: npt.NDArray[np.int64], progress: Progress
    ) -> npt.NDArray[np.int64]:
        """Returns the (iterations, batch_size) copy in each slot."""
        indptr, users = take_rows(graph.indptr, graph.users, examples)
        pacing = _Pacing(
            indptr=indptr,
            users=users,
            left=np.arange(len(examples)),
            remaining=np.bincount(users, minlength=graph.num_users).astype(np.int32),
            free_from=np.zeros(graph.num_users, np.int32),
            urgency=np.empty(len(examples), np.int32),
            order=np.empty(len(examples), np.int64),
        )
        slots = np.empty((self.iterations, self.batch_size), np.int64)
        separation, left = min(self.min_separation, self.iterations), len(examples)
        for step, batch in enumerate(slots):
            progress(step / self.iterations, f"filling batch {step + 1} of {self.iterations}")
            filled, left = _fill_batch(pacing, left, step, separation, batch)
            if filled < self.batch_size:
                filled += step * self.batch_size
                raise InfeasibleScheduleError(
                    f"filled {filled} of {slots.size} slots: no copy left can enter batch {step} of {self.iterations}; "
                    f"reduce min_separation ({self.min_separation}) or raise contribution_bound "
                    f"({self.contribution_bound})",
                    filled=filled,
                    needed=slots.size,
                )
        return slots


class _Pacing(NamedTuple):
    """A schedule under construction: copies not yet in a batch, and how many their users still have ahead."""

    indptr: np.ndarray  # (copies + 1,)
    users: np.ndarray  # (pairs,) users of each copy
    left: np.ndarray  # (copies,) int64 the first ones are not placed yet, in the order in which ties are broken
    remaining: np.ndarray  # (num_users,) int32 copies of each user that are not placed yet
    free_from: np.ndarray  # (num_users,) int32 the first batch each user may be in again
    urgency: np.ndarray  # (copies,) int32 of each copy left, in the current batch
    order: np.ndarray  # (copies,) int64 the copies left that may enter the current batch, most urgent first


@numba.njit(cache=True, nogil=True)
def _fill_batch(pacing, num_left, step, min_separation, batch):
    """Fills a batch with copies whose users have most of theirs still ahead; returns (filled, copies left).

    A copy may enter if all its users are free. Its urgency is the most copies that one of its users has left.
    """
    indptr, users, left, remaining, free_from, urgency, order = pacing
    most = 0
    for i in range(num_left):
        urgency[i] = _urgency(indptr, users, left[i], remaining, free_from, step)
        most = max(most, urgency[i])
    first = np.zeros(most + 2, np.int64)  # where each urgency begins in the order, the largest first
    for i in range(num_left):
        if urgency[i] >= 0:
            first[most - urgency[i] + 1] += 1
    for level in range(most + 1):
        first[level + 1] += first[level]
    can_enter = first[most + 1]
    for i in range(num_left):
        if urgency[i] >= 0:
            level = most - urgency[i]
            order[first[level]] = i
            first[level] += 1
    filled = 0
    for position in range(can_enter):
        if filled == batch.shape[0]:
            break
        i = order[position]
        copy = left[i]
        if _urgency(indptr, users, copy, remaining, free_from, step) < 0:  # a user has entered meanwhile
            continue
        for pair in range(indptr[copy], indptr[copy + 1]):
            free_from[users[pair]] = step + min_separation
            remaining[users[pair]] -= 1
        batch[filled] = copy
        filled += 1
        left[i] = -1
    kept = 0
    for i in range(num_left):
        if left[i] >= 0:
            left[kept] = left[i]
            kept += 1
    return filled, kept


@numba.njit(inline="always")
def _urgency(indptr, users, copy, remaining, free_from, step):
    """Returns the most copies that one of the users has left; -1 if one of them is not free."""
    most = 0
    for pair in range(indptr[copy], indptr[copy + 1]):
        if free_from[users[pair]] > step:
            return -1
        most = max(most, remaining[users[pair]])
    return most
