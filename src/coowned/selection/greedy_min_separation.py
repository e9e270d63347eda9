"""Greedy batches with a minimum separation between a user's participations, for DP-MF."""

import dataclasses
from typing import Annotated, Any, ClassVar, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from coowned import validate
from coowned.attribution.graph import AttributionGraph
from coowned.attribution.options import Option
from coowned.errors import InfeasibleScheduleError
from coowned.progress import Progress, one_of, reporting
from coowned.selection.order import ordered_rows, part
from coowned.selection.selector import OrderedSelector, Schedule, check_is_graph

ROWS = 1 << 24  # rows the kernel passes between two calls of progress: well under a second
_ROWS_TOGETHER = 64  # rows of which the first batch that any of them may enter is remembered


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeparatedSelector(OrderedSelector[Schedule]):
    """Base class of the selectors of schedules; rejects graphs that obviously have no schedule."""

    batch_size: Annotated[int, Option("Schedules: size of a batch.", metavar="B")]
    iterations: Annotated[int, Option("Schedules: number of batches.", metavar="T")]
    min_separation: Annotated[
        int, Option("Schedules: least distance, in batches, between two that contain the same user.", metavar="b")
    ]

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.integer(at_least=1, at_most=2**30 - 1, batch_size=self.batch_size, iterations=self.iterations)
        validate.positive(min_separation=self.min_separation)

    def _check(self, graph: AttributionGraph) -> None:
        super()._check(graph)
        kept = int(np.count_nonzero(graph.users_per_example == 0)) if self.unattributed == "keep" else 0
        attributed = int(np.count_nonzero(graph.users_per_example))
        active = int(np.count_nonzero(graph.examples_per_user))
        window = min(self.min_separation, self.iterations)
        most = min(active, attributed) + kept
        if self.batch_size * window > most:
            raise InfeasibleScheduleError(
                f"{window} consecutive batches of {self.batch_size} need {self.batch_size * window} examples without a "
                f"common user, but {attributed} examples of {active} users"
                f"{f' and {kept} without users' if kept else ''} give at most {most}; "
                f"reduce batch_size ({self.batch_size}) or min_separation ({self.min_separation})",
                filled=0,
                needed=self._num_slots,
            )

    @property
    def _num_slots(self) -> int:
        return self.batch_size * self.iterations

    def _schedule(self, graph: AttributionGraph, seed: int, batches: npt.NDArray[Any], **fields: Any) -> Schedule:
        fields |= {"min_separation": int(self.min_separation), "selector": self.settings(), "seed": seed}
        return Schedule(graph=graph, batches=batches, num_examples=graph.num_examples, **fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GreedyMinSeparation(SeparatedSelector):
    """Fills batch after batch, cycling through the examples, fewest users first.

    A candidate enters batch t if none of its users is in batch t or in one of the `min_separation` - 1 batches before
    it. A candidate that cannot enter is skipped; the walk continues from there, cyclically, until exactly
    `iterations` * `batch_size` slots are filled (the paper's `<=` is a slip). Where no candidate at all can enter the
    current batch, it raises `InfeasibleScheduleError`.

    Guarantees:
      - Any `min_separation` consecutive batches together hold at most one copy that contains a given user.
        (test_separation_is_held)
      - A user is in at most ceil(iterations / min_separation) copies.
        (test_separation_is_held)
      - Exactly the paper's sequential result in the shared order.   (test_equals_the_paper)

    Args:
      batch_size: examples in each batch.
      iterations: number of batches.
      min_separation: any two batches with the same user are at least this far apart; above `iterations` it means no
        more than `iterations` does.
      unattributed: "keep" lets an example without users appear once in the whole schedule.

    Cost: an example is examined again only when the user that blocked it is free: O(slots + pairs * iterations /
    min_separation) examinations at most, plus one check for every 64 examples a round, where the plain walk may
    examine every example for every batch. O(pairs) memory in addition to the graph and the slots.
    What it is not: the schedule with the smallest contribution bound (`MinSeparationProgram`, for small graphs).
    That it fails does not prove that no schedule exists.

    Example:
      >>> graph = AttributionGraph.from_users_per_example([[0], [1], [2], [0, 1]])
      >>> separated = GreedyMinSeparation(batch_size=1, iterations=4, min_separation=2, ties="input")
      >>> separated.select(graph).batches.tolist()
      [[0], [1], [2], [3]]

    References: Ganesh et al. (2025), Algorithm 4, https://arxiv.org/abs/2503.03622
    """

    name: ClassVar[str] = "greedy-min-separation"

    def _select(self, graph: AttributionGraph, seed: int, progress: Progress) -> Schedule:
        walk = _Walk(graph, seed, self.ties, self.unattributed, part(progress, 0.0, 0.1))
        filled, slots = walk.fill(self.batch_size, self.iterations, self.min_separation, part(progress, 0.1, 1.0))
        if filled < self._num_slots:
            reducible = [f"min_separation ({self.min_separation})"] if self.min_separation > 1 else []
            reducible += [f"batch_size ({self.batch_size})", *(["iterations"] if filled >= self.batch_size else [])]
            raise InfeasibleScheduleError(
                f"filled {filled} of {self._num_slots} slots: no example can enter batch {filled // self.batch_size} "
                f"of {self.iterations}; reduce {one_of(reducible)}",
                filled=filled,
                needed=self._num_slots,
            )
        return self._schedule(graph, seed, walk.examples[slots].reshape(self.iterations, self.batch_size))


def max_min_separation(
    graph: AttributionGraph,
    *,
    batch_size: int,
    iterations: int,
    seed: int = 0,
    ties: str = "hash",
    unattributed: str = "drop",
    search: str = "sweep",
    progress: Progress | None = None,
) -> int:
    """Returns the largest min separation up to which `GreedyMinSeparation` never fails: the paper's sweep, done faster.

    The paper raises the min separation until Algorithm 4 first fails and takes the value before that. Success at one
    value does not prove success at a smaller one, so this is what is returned: the largest b such that every one of
    1..b succeeds, at most `iterations`, beyond which nothing changes. Where even 1 fails it raises
    `InfeasibleScheduleError`.

    With `search="bisection"` a few values are tried instead of all: Algorithm 4 succeeds at the value returned and
    fails at the next one, but a smaller value that fails may have been missed.

    Guarantees:
      - The same number as the plain sweep.   (test_max_min_separation_is_the_sweep)
      - Bisection returns a value that succeeds, whose successor fails or is above `iterations`.
        (test_bisection_ends_between_success_and_failure)

    Cost: the examples are sorted once. No value is tried that must succeed (so few examples fit in the window that they
    cannot block all others) or must fail: until batch b no user is free again, so one run that never frees a user
    tells which values get stuck before. Each value between the two takes one run of `GreedyMinSeparation`; bisection
    needs the logarithm of their number.

    Example:
      >>> graph = AttributionGraph.from_users_per_example([[0], [1], [2], [0, 1]])
      >>> max_min_separation(graph, batch_size=1, iterations=4)
      3

    References: Ganesh et al. (2025), Appendix on hyperparameters, https://arxiv.org/abs/2503.03622
    """
    check_is_graph(graph)
    validate.seed(seed)
    validate.one_of(("sweep", "bisection"), search=search)
    report = reporting(progress)
    first = GreedyMinSeparation(
        batch_size=batch_size, iterations=iterations, min_separation=1, ties=ties, unattributed=unattributed
    )
    first._check(graph)
    walk = _Walk(graph, seed, ties, unattributed, part(report, 0.0, 0.05))
    filled, _ = walk.fill(batch_size, iterations, iterations, part(report, 0.05, 0.1))
    most = min(filled // batch_size, iterations)  # b > most fails before batch b
    bisects = search == "bisection"
    succeeds = most if bisects and most == iterations else min(walk.safe_separation(batch_size), most)
    fails = most + 1
    doubtful = fails - succeeds
    while fails - succeeds > 1:
        b = (succeeds + fails) // 2 if bisects else succeeds + 1
        done = 1 - (fails - succeeds) / doubtful
        filled, _ = walk.fill(batch_size, iterations, b, part(report, 0.1 + 0.9 * done, 0.1 + 0.9 * done))
        if filled == batch_size * iterations:
            succeeds = b
        else:
            fails = b
    if succeeds == 0:
        first.select(graph, seed=seed)  # raises, and says how far it gets
    return succeeds


class _Walk:
    """The rows of a graph in walking order, for one or more runs of Algorithm 4."""

    def __init__(self, graph: AttributionGraph, seed: int, ties: str, unattributed: str, progress: Progress):
        rows = ordered_rows(graph, seed=seed, ties=ties, progress=progress)
        first = 0 if unattributed == "keep" else rows.num_unattributed  # rows without users come first
        self.examples = rows.examples[first:]  # (rows,) example of each row
        self.indptr = rows.indptr[first:]  # (rows + 1,)
        self.users = rows.users
        self.graph = graph
        self.num_attributed = len(rows.attributed)

    def fill(
        self, batch_size: int, iterations: int, min_separation: int, progress: Progress
    ) -> tuple[int, npt.NDArray[Any]]:
        """Runs Algorithm 4; returns the number of filled slots and the row in each."""
        rows, needed = len(self.examples), batch_size * iterations
        batches = _Batches(
            indptr=self.indptr,
            users=self.users,
            batch_size=batch_size,
            iterations=iterations,
            min_separation=min(min_separation, iterations),
            free_from=np.zeros(self.graph.num_users, np.int32),
            due=np.zeros(rows, np.int32),
            first_due=np.zeros(-(-rows // _ROWS_TOGETHER), np.int32),
            slots=np.empty(needed, self.examples.dtype),
            state=np.zeros(4, np.int64),
        )
        verdict = 0
        while verdict == 0:
            filled = int(batches.state[0])
            progress(filled / needed, f"min_separation {min_separation}: {filled} of {needed} slots filled")
            verdict = _fill_batches(batches, ROWS)
        return int(batches.state[0]), batches.slots

    def safe_separation(self, batch_size: int) -> int:
        """Returns a min separation up to which no run can get stuck.

        While a slot of the current batch is empty, at most batch_size * b - 1 other copies are in the last b batches,
        of different examples, each of which blocks at most the examples of its users. Where the largest that many
        such numbers sum to less than the number of examples, some example is free.
        """
        if not self.num_attributed:
            return 0
        blocked = np.zeros(len(self.examples), np.int64)  # (rows,) examples that a copy of each row blocks
        attributed = self.indptr[:-1] < self.indptr[1:]
        others = self.graph.examples_per_user[self.users] - 1
        blocked[attributed] = 1 + np.add.reduceat(others, self.indptr[:-1][attributed])
        total = np.cumsum(np.sort(blocked)[::-1])  # (rows,) most examples that 1, 2, ... copies block
        copies = int(np.searchsorted(total, self.num_attributed, side="left"))  # so many leave an example free
        return (copies + 1) // batch_size


# ---- Algorithm 4, compiled -------------------------------------------------------------------------------------------


class _Batches(NamedTuple):
    """The state of Algorithm 4: rows in walking order, the shape of the batches, and what is filled so far.

    A row that cannot enter batch t cannot before the largest free_from of its users, because free_from never falls:
    `due` remembers that batch, so that a row is examined again only then, at most once for each participation of one
    of its users. Most groups of rows none of which is due are passed in one step.
    """

    indptr: np.ndarray  # (rows + 1,)
    users: np.ndarray  # (pairs,)
    batch_size: int
    iterations: int
    min_separation: int
    free_from: np.ndarray  # (num_users,) int32 the first batch each user may be in again
    due: np.ndarray  # (rows,) int32 the first batch each row may enter
    first_due: np.ndarray  # (groups of _ROWS_TOGETHER rows,) int32 no more than the least due of each group
    slots: np.ndarray  # (iterations * batch_size,) row in each slot
    state: np.ndarray  # (4,) int64 slots filled, batch, next row, rows passed in vain


@numba.njit(cache=True, nogil=True)
def _fill_batches(batches, budget):
    """Runs Algorithm 4 until about `budget` rows were visited. A row without users enters once.

    Returns 0: budget used up; 1: all slots filled; 2: stuck, no row can enter the current batch.
    """
    indptr, users, due, first_due = batches.indptr, batches.users, batches.due, batches.first_due
    free_from, slots, state = batches.free_from, batches.slots, batches.state
    B, T, b = batches.batch_size, batches.iterations, batches.min_separation
    filled, t, row, in_vain = state
    rows = due.shape[0]
    candidates = np.empty(_ROWS_TOGETHER, np.int64)
    verdict = 2 if rows == 0 else 0
    while verdict == 0 and budget > 0:
        group = row // _ROWS_TOGETHER
        end = min((group + 1) * _ROWS_TOGETHER, rows)
        if first_due[group] > t:
            budget -= 1
            in_vain += end - row
            row = end
        else:
            budget -= _ROWS_TOGETHER
            count = 0
            for r in range(row, end):  # without a branch
                candidates[count] = r
                count += due[r] <= t
            in_vain -= row  # counts from the row after the one that entered last
            row = end
            for c in range(count):
                r = candidates[c]
                latest = np.int32(0)
                for i in range(indptr[r], indptr[r + 1]):
                    latest = max(latest, free_from[users[i]])
                due[r] = latest
                if latest > t:
                    continue
                due[r] = t + b if indptr[r] < indptr[r + 1] else 2 * T
                for i in range(indptr[r], indptr[r + 1]):
                    free_from[users[i]] = t + b
                slots[filled] = r
                filled += 1
                in_vain = -(r + 1)
                if filled == (t + 1) * B:  # rows that were not due in this batch may be in the next
                    t += 1
                    row = r + 1
                    break
            in_vain += row
            least = due[group * _ROWS_TOGETHER]
            for r in range(group * _ROWS_TOGETHER, end):
                least = min(least, due[r])
            first_due[group] = least
        if row == rows:
            row = 0
        if t == T:
            verdict = 1
        elif in_vain >= rows:
            verdict = 2
    state[0], state[1], state[2], state[3] = filled, t, row, in_vain
    return verdict
