"""The selections that `coowned.plan` tries for each mechanism, from a graph and public numbers alone."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from coowned.attribution.graph import AttributionGraph
from coowned.attribution.statistics import heavy_users_advice
from coowned.certificate import ContributionCertificate, certify
from coowned.errors import InputError
from coowned.selection.registry import selector_class
from coowned.selection.selection_files import select_once
from coowned.selection.selector import Schedule, Selection, Selector
from coowned.selection.user_bounds import UserBounds

if TYPE_CHECKING:
    from coowned.mechanism.mechanism import Mechanism

TOO_SMALL = "S is smaller than one batch"
TOO_SMALL_FOR_GROUPS = "S is smaller than two batches, one for each of two groups"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A selection that a mechanism may train on."""

    selector: str
    selected: Any  # a selection, a schedule, or what a population selected elsewhere; None where nothing could be
    contribution_bound: int | None = None  # as asked for; None: as recounted
    allow_duplicates: bool = False  # for selectors whose name does not say it
    note: str = ""  # why it cannot be used; "" where it can


class Attempt(NamedTuple):
    """One piece of a plan's work: a label for its progress, and what makes its candidates."""

    label: str
    make: Callable[[], Iterable[Candidate]]


class Population(Protocol):
    """What a plan asks of a graph, wherever it is."""

    @property
    def num_examples(self) -> int: ...
    @property
    def num_pairs(self) -> int: ...
    @property
    def num_attributed_users(self) -> int:
        """The number of users with at least one example."""
        ...

    @property
    def num_examples_without_users(self) -> int: ...

    def quantile_of_examples_per_user(self, share: float) -> float: ...

    def select(self, selector: Selector[Selection], seed: int) -> Any:
        """Selects; what it returns has a `size`."""
        ...

    def count(self, selected: Any) -> tuple[ContributionCertificate, float]:
        """Recounts what was selected; returns the certificate and the mean number of users over its copies."""
        ...

    def heavy_users_advice(self, contribution_bound: int) -> str | None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalPopulation:
    """A graph in memory."""

    graph: AttributionGraph

    @property
    def num_examples(self) -> int:
        return self.graph.num_examples

    @property
    def num_pairs(self) -> int:
        return self.graph.num_pairs

    @property
    def num_attributed_users(self) -> int:
        return int(np.count_nonzero(self.graph.examples_per_user))

    @property
    def num_examples_without_users(self) -> int:
        return int(np.count_nonzero(self.graph.users_per_example == 0))

    def quantile_of_examples_per_user(self, share: float) -> float:
        return float(np.quantile(self.graph.examples_per_user, share)) if self.graph.num_users else 0.0

    def select(self, selector: Selector[Selection], seed: int) -> Selection:
        """Selects once, and from then on reads the cache."""
        return select_once(self.graph, selector, seed=seed)

    def count(self, selected: Selection | Schedule) -> tuple[ContributionCertificate, float]:
        certificate = certify(self.graph, selected)
        copies = np.asarray(selected.copies, dtype=np.float64)
        return certificate, float(copies @ self.graph.users_per_example) / max(1, certificate.size)

    def heavy_users_advice(self, contribution_bound: int) -> str | None:
        return heavy_users_advice(self.graph, contribution_bound)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """Describes what a plan searches at one batch size."""

    population: Population
    batch_size: int
    iterations: int
    contribution_bounds: tuple[int, ...]
    selectors: tuple[str, ...]
    seed: int
    only: bool  # one mechanism was asked for, not all
    noise_for: "Callable[[Mechanism], float]"  # calibrates a hypothetical mechanism to the plan's target
    user_bounds: UserBounds | None = None  # those of single users, under every contribution bound

    @property
    def graph(self) -> AttributionGraph:
        """The graph in memory; mechanisms that need more than selections of one bound have no plan elsewhere."""
        if not isinstance(self.population, LocalPopulation):
            raise InputError("only DP-SGD (mechanism poisson) can be planned on Spark; use the local engine for others")
        return self.population.graph

    def select(self, selector: str, **settings: Any) -> Any:
        """Selects with the selector of this name."""
        if self.user_bounds is not None:
            settings["contribution_bounds"] = self.user_bounds
        return self.population.select(selector_class(selector)(**settings), self.seed)

    def schedule(self, selector: str, **settings: Any) -> Schedule:
        """Schedules with the selector of this name; raises InfeasibleScheduleError where that fails."""
        shape = {"batch_size": self.batch_size, "iterations": self.iterations}
        return selector_class(selector)(**shape, **settings).select(self.graph, seed=self.seed)

    def every_selection(self) -> Iterator[Attempt]:
        """Yields every selector with every bound."""
        for word in self.selectors:
            for bound in self.contribution_bounds:
                yield Attempt(f"{word}, bound {bound}", functools.partial(self._select_with_bound, word, bound))

    def _select_with_bound(self, word: str, bound: int) -> list[Candidate]:
        selected = self.select(word, contribution_bound=bound)
        return [Candidate(selector=word, selected=selected, contribution_bound=bound)]
