"""Lets each mechanism say what `coowned.plan` tries for it: selections, from a graph and public numbers alone."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from coowned.attribution.graph import AttributionGraph
from coowned.selection.selection_files import select_once
from coowned.selection.selector import Schedule, Selection, Selector

if TYPE_CHECKING:
    from coowned.mechanism.mechanism import Mechanism

TOO_SMALL = "S is smaller than one batch"
TOO_SMALL_FOR_GROUPS = "S is smaller than two batches, one for each of two groups"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A selection that a mechanism may train on."""

    selector: str
    selected: Selection | Schedule | None  # None where nothing could be selected
    contribution_bound: int | None = None  # as asked for; None: as recounted
    allow_duplicates: bool = False  # for selectors whose name does not say it
    note: str = ""  # why it cannot be used; "" where it can


class Attempt(NamedTuple):
    """One piece of a plan's work: a label for its progress, and what makes its candidates."""

    label: str
    make: Callable[[], Iterable[Candidate]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """Describes what a plan searches at one batch size."""

    graph: AttributionGraph
    batch_size: int
    iterations: int
    contribution_bounds: tuple[int, ...]
    selectors: tuple[str, ...]
    seed: int
    only: bool  # one mechanism was asked for, not all
    noise_for: "Callable[[Mechanism], float]"  # calibrates a hypothetical mechanism to the plan's target

    def select(self, selector: Selector[Selection]) -> Selection:
        """Selects once, and from then on reads the cache."""
        return select_once(self.graph, selector, seed=self.seed)

    def schedule(self, kind: Callable[..., Selector[Schedule]], **settings: Any) -> Schedule:
        """Schedules with this kind of selector; raises InfeasibleScheduleError where that fails."""
        selector = kind(batch_size=self.batch_size, iterations=self.iterations, **settings)
        return selector.select(self.graph, seed=self.seed)
