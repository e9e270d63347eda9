"""What each choice of mechanism, bound and selector would cost: size of S, bias, and noise for one privacy target."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from coowned import validate
from coowned.accounting import calculators
from coowned.accounting.choices import (
    TOO_SMALL,
    TOO_SMALL_FOR_GROUPS,
    Choice,
    Plan,
    advice_on_graph,
    advice_on_noise,
    mark_best,
)
from coowned.accounting.signal_to_noise import DEFAULT_PARAMETERS, SignalToNoise
from coowned.accounting.terms import OTHER_ADJACENCY, UNIT, check_terms, delta_warnings, refuse_large_delta
from coowned.attribution.graph import AttributionGraph
from coowned.certificate import certify
from coowned.errors import InfeasibleScheduleError, InputError, UncertifiableError
from coowned.mechanism.banded_strategy import BandedStrategy
from coowned.mechanism.cyclic_poisson import CyclicPoisson
from coowned.mechanism.mechanism import Mechanism
from coowned.mechanism.min_separation import MinSeparation
from coowned.mechanism.poisson_sampling import PoissonSampling
from coowned.mechanism.random_allocation import RandomAllocation
from coowned.mechanism.registry import MECHANISMS
from coowned.progress import Progress, counted, reporting
from coowned.selection.cyclic_groups import CyclicGroups
from coowned.selection.greedy import Greedy
from coowned.selection.greedy_min_separation import GreedyMinSeparation, max_min_separation
from coowned.selection.greedy_with_duplicates import GreedyWithDuplicates
from coowned.selection.priced import Priced
from coowned.selection.priced_min_separation import PricedMinSeparation
from coowned.selection.registry import selector_class, selectors_by_bound
from coowned.selection.selection_files import select_once
from coowned.selection.selector import Schedule, Selection, Selector

DEFAULT_SELECTORS = ("greedy", "greedy-with-duplicates", "priced")
_SMALL_BOUNDS = (1, 2, 3, 5, 8)
_LARGEST_BOUND = 128  # tried by default
_NUMBERS_OF_GROUPS = (2, 4, 8, 16, 32, 64)
_SEPARATION_SHARES = (1, 2, 4)  # of the largest min separation
_SPREAD_SHARES = (1.0, 0.85, 0.7, 0.5, 0.3)  # of the separation that a bound on participations leaves room for


def plan(
    graph: AttributionGraph,
    *,
    epsilon: float,
    delta: float,
    batch_size: int | Sequence[int],
    iterations: int,
    adjacency: str,
    contribution_bounds: Sequence[int] | None = None,
    selectors: Sequence[str] = DEFAULT_SELECTORS,
    mechanism: str = "all",
    num_parameters: int = DEFAULT_PARAMETERS,
    allow_large_delta: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> Plan:
    """Tries every mechanism, bound, selector and batch size, and finds the noise each needs.

    DP-SGD is tried with every selector and bound. DP-MF with min separation is tried with the largest separation that
    bisection finds a greedy schedule for, a half and a quarter of it; and, where `Priced` has an example for every slot
    under one of the bounds, with a schedule that holds the smallest such bound. Cyclic DP-MF is tried at every bound,
    with duplicates too where these are among the selectors, with the number of groups that would have the least error
    if greedy's S were divided evenly; the row is of what the partition keeps. Random allocation is tried at bound 1,
    the only one it is accounted for, without groups and with as many as cyclic DP-MF would have; its noise is divided
    by the mean size of its rounds. DP-MF has as many bands as separation or groups allow: more bands cost no
    privacy and never have more error. Its noise is correlated, so that much of it cancels: its multiplier counts times
    the error of its prefix sums over that of independent noise
    (`BandedStrategy.error_factor`).

    `prefix_error` is that error: of the sums of the first 1, 2, ... mean gradients, the root mean square, in clip norms
    and for one parameter. The best choice weighs it against what few examples leave unknown: it has the largest
    predicted signal-to-noise over the whole training, the clip norm over the standard error of the mean gradient,
    1 / sqrt(1 / num_distinct + num_parameters (effective_noise / batch_size)^2 / iterations) (`SignalToNoise`). What
    bias costs is in neither: look at the users per example.

    Selections and calibrations are made once and kept in the cache. All of it uses the graph and public numbers only,
    so choosing from it costs no privacy.

    Args:
      batch_size: one, or several to try.
      contribution_bounds: by default those of `default_bounds`.
      mechanism: "poisson", "min-separation", "cyclic", "random-allocation" or "all".
      num_parameters: of the model that is to be trained; the noise is spread over all of them. The default stands for
        a small linear model.
      allow_large_delta: plan although delta is 0.1 or more.

    Guarantees:
      - The best row has the largest predicted signal-to-noise of all, and one sentence says why.
        (test_best_has_the_most_signal, test_the_choice_is_explained)
      - The row of each mechanism with the least error is marked, and errors are those of its strategy and noise.
        (test_least_error_of_each_mechanism)
      - The advice says what the noise of the best row means for the model.   (test_verdict_before_training)
      - Where no row is good, the advice says so and what would be.   (test_no_good_choice_is_said)
      - What would have no row is refused, also for a mechanism that is not planned here.
        (test_nothing_to_try_is_refused)
    """
    if contribution_bounds is None:
        contribution_bounds = default_bounds(graph)
    validate.one_of((*MECHANISMS, "all"), mechanism=mechanism)
    batch_sizes = [batch_size] if isinstance(batch_size, int) else list(batch_size)
    validate.positive(iterations=iterations, num_parameters=num_parameters)
    for size in batch_sizes:
        validate.positive(batch_size=size)
    for bound in contribution_bounds:
        validate.positive(contribution_bounds=bound)
    for word in selectors:
        if word not in (known := selectors_by_bound()):
            raise InputError(f"A plan cannot try the selector {word!r}; choose from {', '.join(known)}")
    check_terms(epsilon=epsilon, delta=delta, adjacency=adjacency)
    refuse_large_delta(delta, allow_large_delta=allow_large_delta)
    target = {"epsilon": epsilon, "delta": delta, "adjacency": adjacency}
    planner = _Planner(graph=graph, target=target, iterations=iterations, seed=seed, num_parameters=num_parameters)
    jobs: list[tuple[str, Callable[[], list[Choice]]]] = []
    for size in batch_sizes:
        if mechanism in (PoissonSampling.kind, "all"):
            jobs += [
                (f"{word}, bound {bound}", functools.partial(planner.poisson, word, bound, size))
                for word in selectors
                for bound in contribution_bounds
            ]
        if mechanism in (MinSeparation.kind, "all"):
            jobs.append(("greedy-min-separation", functools.partial(planner.min_separation, size)))
            jobs.append(
                ("priced-min-separation", functools.partial(planner.bounded, size, sorted(contribution_bounds)))
            )
        if mechanism in (CyclicPoisson.kind, "all"):
            jobs += [
                (f"cyclic-groups, bound {bound}", functools.partial(planner.cyclic, bound, size, duplicates=duplicates))
                for duplicates in (False, True)
                for bound in contribution_bounds
                if not duplicates or (bound > 1 and GreedyWithDuplicates.name in selectors)
            ]
        if mechanism == RandomAllocation.kind or (mechanism == "all" and 1 in contribution_bounds):
            jobs.append(("random allocation", functools.partial(planner.allocated, size)))
    report = reporting(progress)
    choices: list[Choice] = []
    for number, (label, job) in enumerate(jobs):
        report(number / len(jobs), label)
        choices += job()
    report(1.0, "done")
    if not choices:
        raise InputError(
            f"A plan has nothing to try for mechanism {mechanism!r} with {counted(len(selectors), 'selector')}, "
            f"{counted(len(contribution_bounds), 'bound')} and {counted(len(batch_sizes), 'batch size')}; name at "
            "least one of each, or another mechanism"
        )
    choices = mark_best(choices)
    warnings = delta_warnings(delta, num_users=int(np.count_nonzero(graph.examples_per_user)))
    advice = [
        *warnings,
        *(choice.why for choice in choices if choice.best),
        *advice_on_noise(choices, target),
        *advice_on_graph(graph, max(contribution_bounds, default=1)),
    ]
    return Plan(choices=tuple(choices), advice=tuple(advice))


def default_bounds(graph: AttributionGraph) -> tuple[int, ...]:
    """1, 2, 3, 5, 8, and on by doubling while a tenth of the users have that many examples.

    >>> default_bounds(AttributionGraph.from_users_per_example([[0]] * 40))
    (1, 2, 3, 5, 8, 16, 32)
    """
    many = float(np.quantile(graph.examples_per_user, 0.9)) if graph.num_users else 0.0
    bounds: list[int] = list(_SMALL_BOUNDS)
    while 2 * bounds[-1] <= min(many, _LARGEST_BOUND):
        bounds.append(2 * bounds[-1])
    return tuple(bounds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Planner:
    """The graph and the target of a plan; each method gives the rows of one choice."""

    graph: AttributionGraph
    target: dict[str, Any]  # epsilon, delta and adjacency
    iterations: int
    seed: int
    num_parameters: int

    def poisson(self, word: str, bound: int, batch_size: int) -> list[Choice]:
        selector: Any = selector_class(word)
        selected = self._select(selector(contribution_bound=bound))
        return [self._row(PoissonSampling, word, batch_size, selected, contribution_bound=bound)]

    def min_separation(self, batch_size: int) -> list[Choice]:
        rows = []
        try:
            largest = max_min_separation(
                self.graph, batch_size=batch_size, iterations=self.iterations, seed=self.seed, search="bisection"
            )
        except InfeasibleScheduleError as error:
            return [self._row(MinSeparation, GreedyMinSeparation.name, batch_size, None, note=str(error))]
        for separation in dict.fromkeys(largest // share for share in _SEPARATION_SHARES if largest >= share):
            selector = GreedyMinSeparation(batch_size=batch_size, iterations=self.iterations, min_separation=separation)
            with contextlib.suppress(InfeasibleScheduleError):  # success at `largest` does not prove it for less
                schedule = selector.select(self.graph, seed=self.seed)
                rows.append(self._row(MinSeparation, selector.name, batch_size, schedule))
        return rows

    def bounded(self, batch_size: int, bounds: Sequence[int]) -> list[Choice]:
        """With the smallest of the bounds under which no example need be repeated, if there is one."""
        needed = batch_size * self.iterations
        enough = (
            bound
            for bound in (bounds if needed <= self.graph.num_examples else ())
            if self._select(Priced(contribution_bound=bound)).size >= needed
        )
        if (bound := next(enough, None)) is None:
            return []
        largest = self.iterations if bound == 1 else (self.iterations - 1) // (bound - 1)
        for separation in dict.fromkeys(max(1, int(share * largest)) for share in _SPREAD_SHARES):
            selector = PricedMinSeparation(
                batch_size=batch_size,
                iterations=self.iterations,
                min_separation=separation,
                contribution_bound=bound,
            )
            with contextlib.suppress(InfeasibleScheduleError):
                schedule = selector.select(self.graph, seed=self.seed)
                return [self._row(MinSeparation, selector.name, batch_size, schedule)]
        return []

    def cyclic(self, bound: int, batch_size: int, *, duplicates: bool) -> list[Choice]:
        kind = GreedyWithDuplicates if duplicates else Greedy
        free = self._select(kind(contribution_bound=bound))
        number = self._number_of_groups(bound, batch_size, free.size)
        if number is None:
            note = TOO_SMALL if free.size < batch_size else TOO_SMALL_FOR_GROUPS
            return [self._row(CyclicPoisson, CyclicGroups.name, batch_size, free, note=note)]
        selector = CyclicGroups(num_groups=number, contribution_bound=bound, allow_duplicates=duplicates)
        asked = {"contribution_bound": bound, "allow_duplicates": duplicates}
        return [self._row(CyclicPoisson, CyclicGroups.name, batch_size, self._select(selector), **asked)]

    def allocated(self, batch_size: int) -> list[Choice]:
        """At bound 1, in one group and in as many as cyclic sampling would have."""
        free = self._select(Greedy(contribution_bound=1))
        rows = [self._row(RandomAllocation, Greedy.name, batch_size, free)]
        number = self._number_of_groups(1, batch_size, free.size)
        if number is not None:
            grouped = self._select(CyclicGroups(num_groups=number, contribution_bound=1))
            rows.append(self._row(RandomAllocation, CyclicGroups.name, batch_size, grouped))
        return rows

    def _number_of_groups(self, bound: int, batch_size: int, size: int) -> int | None:
        """The number with the least error if greedy's S were divided evenly; None where two groups have no batch."""
        most = min(size // batch_size, self.iterations)
        errors: dict[int, float] = {}
        for number in (number for number in _NUMBERS_OF_GROUPS if number <= most):
            mechanism = CyclicPoisson(
                contribution_bound=bound,
                sampling_probability=batch_size * number / size,
                iterations=self.iterations,
                num_groups=number,
                num_bands=number,
            )
            with contextlib.suppress(UncertifiableError):
                noise = calculators.calibrate(mechanism, **self.target)
                errors[number] = noise * BandedStrategy(number, self.iterations).error_factor()
        return min(errors, key=errors.__getitem__, default=None)

    def _select(self, selector: Selector[Selection]) -> Selection:
        return select_once(self.graph, selector, seed=self.seed)

    def _row(
        self,
        kind: type[Mechanism],
        word: str,
        batch_size: int,
        selected: Selection | Schedule | None,
        *,
        note: str = "",
        **asked: Any,
    ) -> Choice:
        """The row of a mechanism with what a selector selected, calibrated unless a note says why it cannot be used.

        Args:
          word: the selector.
          selected: None where nothing could be.
          asked: fields of the row that are as they were asked for, not as recounted.
        """
        facts: dict[str, Any] = {
            **self.target,
            "other_adjacency": OTHER_ADJACENCY[self.target["adjacency"]],
            "unit": UNIT,
            "batch_size": batch_size,
            "iterations": self.iterations,
            "num_parameters": self.num_parameters,
            "population_mean_users_per_example": self.graph.num_pairs / max(1, self.graph.num_examples),
            "mechanism": kind.kind,
            "selector": word,
        }
        if selected is None:
            return Choice(note=note, contribution_bound=0, recounted_bound=0, size=0, num_distinct=0, **facts)
        certificate = certify(self.graph, selected)
        copies = np.asarray(selected.copies, dtype=np.float64)
        facts |= {
            "contribution_bound": certificate.contribution_bound,
            "recounted_bound": certificate.contribution_bound,
            "size": certificate.size,
            "num_distinct": certificate.num_distinct,
            "upper_bound": certificate.upper_bound,
            "mean_users_per_example": float(copies @ self.graph.users_per_example) / max(1, certificate.size),
            "min_separation": certificate.min_separation,
            **asked,
        }
        if not note and certificate.size < batch_size and not kind.needs_groups:  # whose coins are then certain
            note = TOO_SMALL
        if note:
            return Choice(note=note, **facts)
        try:
            mechanism = kind.from_certificate(certificate, batch_size=batch_size, iterations=self.iterations)
            if mechanism.cycle_length > 1:
                drawn = [p for p in map(mechanism.probability_of, range(mechanism.cycle_length)) if p > 0]
                facts |= {"num_groups": mechanism.cycle_length, "least_group_probability": min(drawn)}
            noise = calculators.calibrate(mechanism, **self.target)
            other_epsilon = calculators.epsilon(
                mechanism, noise_multiplier=noise, delta=self.target["delta"], adjacency=facts["other_adjacency"]
            )
        except UncertifiableError as error:
            return Choice(note=str(error), **facts)
        shared = noise / mechanism.drawn_share(certificate)
        ratio = SignalToNoise.of(mechanism, noise_multiplier=shared, num_parameters=self.num_parameters)
        return Choice(
            sampling_probability=getattr(mechanism, "sampling_probability", None),
            num_bands=getattr(mechanism, "num_bands", None),
            noise_multiplier=noise,
            other_epsilon=other_epsilon,
            effective_noise=ratio.noise_multiplier,
            step_signal_to_noise=ratio.per_step,
            signal_to_noise=ratio.with_examples(certificate.num_distinct),
            prefix_error=ratio.prefix_error,
            **facts,
        )
