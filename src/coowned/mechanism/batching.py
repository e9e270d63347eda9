"""Draws the batch of each step: by coins, by schedule, or by coins within a group.

`batch(step)` is a pure function of the run key and the step: a run can be resumed anywhere, in any order. All
configurations of a sweep share the coins of a run key (never its noise), so a statement about a sweep covers one
released model only. Which copies were drawn, and how many, is as secret as the noise: it belongs in no log.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from coowned import validate
from coowned.errors import InputError
from coowned.exact.coins import PoissonCoins
from coowned.exact.compiled import compiled
from coowned.exact.keys import Purpose, RunKey
from coowned.selection.selector import Schedule, Selection

Copies = tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]  # (n,) example and (n,) copy number of some copies


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """Copies of one step, padded to one of a few shapes.

    Whatever row a padded entry fetches must be replaced by constant content before a gradient is taken.
    """

    step: int
    examples: npt.NDArray[np.int64]  # (physical size,) example of each copy; 0 for padding
    copy_numbers: npt.NDArray[np.int32]  # (physical size,) which copy of that example; 0 for padding
    mask: npt.NDArray[np.bool_]  # (physical size,) True where the entry is real

    @property
    def num_copies(self) -> int:
        """Number of real entries. Secret under Poisson sampling."""
        return int(np.count_nonzero(self.mask))

    @property
    def physical_size(self) -> int:
        """Entries, padding included."""
        return len(self.mask)


class Batches(abc.ABC):
    """Base of all ways to make batches: `batch(step)` for step in [0, iterations)."""

    iterations: int
    batch_size: int
    multiple_of: int

    def batch(self, step: int) -> Batch:
        """Returns the padded batch of a step, the same on every call."""
        validate.integer(at_least=0, at_most=self.iterations - 1, step=step)
        drawn = self._draw(int(step))
        count, size = len(drawn[0]), self.physical_size(len(drawn[0]))
        examples, numbers = np.zeros(size, np.int64), np.zeros(size, np.int32)
        examples[:count], numbers[:count] = drawn
        return Batch(int(step), examples, numbers, np.arange(size) < count)

    def __len__(self) -> int:
        return self.iterations

    def __iter__(self) -> Iterator[Batch]:
        return map(self.batch, range(self.iterations))

    @functools.cached_property
    def usual_sizes(self) -> tuple[int, ...]:
        """Smallest physical sizes: batch_size and 1, 2 and 4 standard deviations above; larger ones grow by 1/4."""
        spread = math.sqrt(self.batch_size)
        return tuple(sorted({self._round_up(math.ceil(self.batch_size + k * spread)) for k in (0, 1, 2, 4)}))

    def physical_size(self, num_copies: int) -> int:
        """Returns the smallest physical size that holds so many copies; nothing is ever dropped."""
        size = next((size for size in self.usual_sizes if num_copies <= size), self.usual_sizes[-1])
        while size < num_copies:
            size = self._round_up(size + max(1, size // 4))
        return size

    def _round_up(self, size: int) -> int:
        # Coarser for large batches: sums are made in blocks of a power of two, which then come out even.
        unit = math.lcm(self.multiple_of, 64 if self.batch_size >= 512 else 1)
        return -(-size // unit) * unit

    @abc.abstractmethod
    def _draw(self, step: int) -> Copies:
        """Returns the copies of a step, without padding."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DrawnBatches(Batches):
    """Base of batches that are drawn from S: every copy of a group by a coin of its own; the groups take turns."""

    selection: Selection  # S; example i has the copies (i, 0), (i, 1), ...
    batch_size: int  # the public one, which gradients are divided by
    iterations: int
    run_key: RunKey  # where coins come from
    multiple_of: int = 8  # every physical size is a multiple of it (the number of devices, for instance)

    def __post_init__(self) -> None:
        validate.positive(batch_size=self.batch_size, iterations=self.iterations, multiple_of=self.multiple_of)

    @property
    @abc.abstractmethod
    def group_probabilities(self) -> tuple[float, ...]:
        """Probability of each group's copies in its steps."""

    @functools.cached_property
    def coins(self) -> tuple[PoissonCoins, ...]:
        """Coins of each group's steps."""
        return tuple(PoissonCoins(float(probability)) for probability in self.group_probabilities)

    @functools.cached_property
    def _groups(self) -> list[Copies]:
        """Copies of each group: all of S, unless there are several."""
        return [_list_copies(self.selection.copies)]

    def _draw(self, step: int) -> Copies:
        group = step % len(self._groups)
        examples, numbers = self._groups[group]
        drawn = self.coins[group].draw(self.run_key.derive(Purpose.COINS, step=step), len(examples))
        return examples[drawn], numbers[drawn]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class GroupedBatches(DrawnBatches):
    """Base of batches of groups; that every protected user is in one of them is for the certificate to prove."""

    num_groups: int  # empty ones included, whose steps are pure noise

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.positive(num_groups=self.num_groups)
        groups = self.selection.groups
        if self.num_groups > 1 and groups is None:
            raise InputError("several groups need a selection with groups; use the selector CyclicGroups")
        if groups is not None and groups.size and groups.max() >= self.num_groups:
            raise InputError(f"the selection has a group {groups.max()}; num_groups ({self.num_groups}) must be larger")

    @functools.cached_property
    def _groups(self) -> list[Copies]:
        examples, numbers = _list_copies(self.selection.copies)
        if self.selection.groups is None:
            return [(examples, numbers)]
        groups = self.selection.groups[examples]  # (|S|,) group of each copy
        order = np.argsort(groups, kind="stable")
        parts = np.split(order, np.searchsorted(groups[order], np.arange(1, self.num_groups)))
        return [(examples[part], numbers[part]) for part in parts]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PoissonBatches(DrawnBatches):
    """Throws a coin for every copy in S in every step.

    Guarantees:
      - Each copy is drawn with at most `sampling_probability`, whatever the other coins show.
        (test_conditional_probability_is_at_most_p, test_participations_are_binomial,
        test_pairs_of_copies_are_independent, test_steps_are_independent)
      - `batch(step)` is the same in whatever order steps are asked for.   (test_random_access)
      - Nothing is dropped; no copy gives padding.   (test_nothing_is_dropped, test_an_empty_batch_is_all_padding)
    Cost: O(batch) a step and O(|S|) memory.
    Not to be confused with shuffling S and cutting it into batches, for which no group accounting exists.

    Example:
      >>> from coowned.attribution.graph import AttributionGraph
      >>> graph = AttributionGraph.from_users_per_example([[0], [1], [2], [3]])
      >>> selection = Selection.from_copies(graph, [2, 0, 1, 1])
      >>> batches = PoissonBatches(selection=selection, sampling_probability=0.5, batch_size=2, iterations=3,
      ...                          run_key=RunKey.from_seed(1))
      >>> [[(int(e), int(c)) for e, c in zip(b.examples[b.mask], b.copy_numbers[b.mask])] for b in batches]
      [[(0, 0), (3, 0)], [(2, 0), (3, 0)], [(0, 0), (0, 1), (3, 0)]]
    """

    sampling_probability: float  # that was accounted for

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.in_range(0, 1, open_low=True, sampling_probability=self.sampling_probability)

    @property
    def group_probabilities(self) -> tuple[float, ...]:
        return (self.sampling_probability,)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ScheduledBatches(Batches):
    """Returns the batches of a Schedule as they are; no coin is thrown.

    Guarantees:
      - Step t holds row t of the schedule; copy numbers count earlier slots of an example.   (test_scheduled_batches)

    Example:
      >>> from coowned.attribution.graph import AttributionGraph
      >>> graph = AttributionGraph.from_users_per_example([[0], [1], [2]])
      >>> batches = ScheduledBatches(schedule=Schedule.from_batches(graph, [[0, 2], [1, 2]]), multiple_of=1)
      >>> batches.batch(1).examples, batches.batch(1).copy_numbers
      (array([1, 2]), array([0, 1], dtype=int32))
    """

    schedule: Schedule
    multiple_of: int = 8

    def __post_init__(self) -> None:
        validate.positive(multiple_of=self.multiple_of)

    @property
    def iterations(self) -> int:  # type: ignore[override]
        """Number of batches."""
        return self.schedule.iterations

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        """Copies in each batch."""
        return self.schedule.batch_size

    @functools.cached_property
    def _numbers(self) -> npt.NDArray[np.int32]:
        numbers = np.empty(self.schedule.batches.shape, np.int32)
        _number_copies(self.schedule.batches, np.zeros(self.schedule.num_examples, np.int32), numbers)
        return numbers

    def _draw(self, step: int) -> Copies:
        return self.schedule.batches[step].astype(np.int64), self._numbers[step]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CyclicPoissonBatches(GroupedBatches):
    """Throws a coin in step t for every copy of group t mod num_groups, and for no other.

    Guarantees:
      - A copy is in no step but its group's.   (test_cyclic_groups)
      - Group g is drawn with min(1, batch_size / |S_g|), never more.   (test_cyclic_probabilities)
    """

    def __post_init__(self) -> None:
        if self.selection.groups is None:
            raise InputError("cyclic batches need a selection with groups; use the selector CyclicGroups")
        super().__post_init__()

    @functools.cached_property
    def group_sizes(self) -> tuple[int, ...]:
        """Copies in each group."""
        return tuple(len(examples) for examples, _ in self._groups)

    @functools.cached_property
    def group_probabilities(self) -> tuple[float, ...]:
        """Probability of each group's coins; 0 for an empty group."""
        return tuple(min(1.0, self.batch_size / size) if size else 0.0 for size in self.group_sizes)


def _list_copies(copies: npt.NDArray[np.int32]) -> Copies:
    """Lists every copy, in the order of examples."""
    chosen = np.flatnonzero(copies)
    counts = copies[chosen].astype(np.int64)
    if counts.max(initial=0) <= 1:
        return chosen, np.broadcast_to(np.int32(0), len(chosen))  # takes no memory
    examples = np.repeat(chosen, counts)
    numbers = np.arange(len(examples)) - np.repeat(np.cumsum(counts) - counts, counts)
    return examples, numbers.astype(np.int32)


@compiled()
def _number_copies(batches, seen, out):
    """Writes to out (iterations, batch_size) how often each slot's example was scheduled before; seen starts at 0."""
    for t in range(batches.shape[0]):
        for j in range(batches.shape[1]):
            out[t, j] = seen[batches[t, j]]
            seen[batches[t, j]] += 1
