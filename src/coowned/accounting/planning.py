"""Plans a training: tries mechanisms, bounds, selectors and sizes, and finds the noise that each needs for a target."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypedDict, Unpack

from coowned import validate
from coowned.accounting import calculators
from coowned.accounting.choices import (
    Choice,
    Noise,
    Plan,
    PlanTarget,
    Sampling,
    SelectedCounts,
    advice_on_graph,
    advice_on_noise,
    mark_best,
)
from coowned.accounting.signal_to_noise import DEFAULT_PARAMETERS, SignalToNoise
from coowned.accounting.terms import check_terms, delta_warnings, refuse_large_delta
from coowned.attribution.graph import AttributionGraph
from coowned.certificate import ContributionCertificate
from coowned.errors import InputError, UncertifiableError
from coowned.mechanism.candidates import TOO_SMALL, Attempt, Candidate, LocalPopulation, Population, SearchSpace
from coowned.mechanism.mechanism import Mechanism
from coowned.mechanism.registry import MECHANISMS, mechanism_class
from coowned.progress import Progress, counted, reporting
from coowned.selection.registry import needs_bound_alone, selectors_by_bound
from coowned.selection.user_bounds import Bounds, UserBounds

COPIES = 5_000_000  # a budget: whose gradients are computed in a whole training
_NUMBERS = 5_000_000_000  # the same in numbers, for models that are not linear: copies times parameters
_FEWEST_COPIES = 20_000
_STEPS = (200, 500)


class TrainingSizes(NamedTuple):
    """Batch size and number of steps."""

    batch_size: int
    iterations: int


def training_sizes(
    size: int,
    *,
    budget: int = COPIES,
    batch_size: int | None = None,
    iterations: int | None = None,
) -> TrainingSizes:
    """Returns the sizes of a training on S: what is given is kept.

    Over a whole training, batches of half of S leave nearly as little noise as S whole, at any number of steps: the
    more copies in a batch, the less noise beside the mean gradient. So batches are as large as the budget allows, up to
    half of S, with as many of 200 to 500 steps as are left.

    Guarantees:
      - No batch is larger than S, and what is given is kept.   (test_sizes_fit)
      - No more copies are drawn than the budget allows, unless a single copy a step does.   (test_sizes_fit)

    >>> training_sizes(3_000), training_sizes(1_000_000)
    (TrainingSizes(batch_size=1500, iterations=500), TrainingSizes(batch_size=25000, iterations=200))
    """
    fewest, most = _STEPS
    half = max(1, (size + 1) // 2)
    if iterations is None:
        iterations = max(fewest, min(most, budget // (batch_size or half)))
    if batch_size is None:
        batch_size = max(1, min(half, budget // iterations))
    return TrainingSizes(batch_size, iterations)


def budget_for(num_parameters: int, *, is_linear: bool) -> int:
    """Returns the copies whose gradients are computed: fewer for large models that are not linear.

    >>> budget_for(16_385, is_linear=True), budget_for(100_000, is_linear=False)
    (5000000, 50000)
    """
    return COPIES if is_linear else max(_FEWEST_COPIES, min(COPIES, _NUMBERS // num_parameters))


DEFAULT_SELECTORS = ("greedy", "greedy-with-duplicates", "priced")
_ALL = "all"  # mechanisms
_OPEN = "poisson"  # the mechanism that is tried where S comes first, and its sizes follow
_SMALL_BOUNDS = (1, 2, 3, 5, 8)
_LARGEST_BOUND = 128  # tried by default


class PlanOptions(TypedDict, total=False):
    """Keywords of `plan` that have a default."""

    contribution_bounds: Sequence[int] | None
    user_bounds: Bounds
    selectors: Sequence[str]
    mechanism: str
    num_parameters: int
    allow_large_delta: bool
    seed: int
    budget: int


def plan(
    graph: AttributionGraph | Population,
    *,
    epsilon: float,
    delta: float,
    adjacency: str,
    batch_size: int | Sequence[int] | None = None,
    iterations: int | None = None,
    progress: Progress | None = None,
    **options: Unpack[PlanOptions],
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
      batch_size: one, or several to try. Where it or `iterations` is None, DP-SGD alone is tried, with the sizes that
        `training_sizes` gives each S.
      contribution_bounds: by default those of `default_bounds`.
      user_bounds: bounds of single users, as a selector takes them, under each of these. No schedules are tried then.
      mechanism: "poisson", "min-separation", "cyclic", "random-allocation" or "all".
      num_parameters: of the model that is to be trained; the noise is spread over all of them. The default stands for
        a small linear model.
      allow_large_delta: plan although delta is 0.1 or more.
      budget: copies whose gradients may be computed in a training whose sizes are left open.

    Guarantees:
      - The best row has the largest predicted signal-to-noise of all, and one sentence says why.
        (test_best_has_the_most_signal, test_the_choice_is_explained)
      - The row of each mechanism with the least error is marked, and errors are those of its strategy and noise.
        (test_least_error_of_each_mechanism)
      - The advice says what the noise of the best row means for the model.   (test_verdict_before_training)
      - Where no row is good, the advice says so and what would be.   (test_no_good_choice_is_said)
      - Rows are of sets that keep the bounds of single users.   (test_bounds_of_single_users_are_kept)
      - What would have no row is refused.   (test_nothing_to_try_is_refused)
    """
    if batch_size is None:
        sizes = (None,)
    else:
        sizes = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
    search = _Search(
        population=LocalPopulation(graph=graph) if isinstance(graph, AttributionGraph) else graph,
        epsilon=epsilon,
        delta=delta,
        adjacency=adjacency,
        batch_sizes=sizes,
        iterations=iterations,
        **options,
    )
    choices = search.choices(progress)
    return Plan(choices=tuple(choices), advice=tuple(search.advice(choices)))


def default_bounds(graph: AttributionGraph | Population) -> tuple[int, ...]:
    """Returns 1, 2, 3, 5, 8, and on by doubling while a tenth of the users have that many examples.

    >>> default_bounds(AttributionGraph.from_users_per_example([[0]] * 40))
    (1, 2, 3, 5, 8, 16, 32)
    """
    population = LocalPopulation(graph=graph) if isinstance(graph, AttributionGraph) else graph
    many = population.quantile_of_examples_per_user(0.9)
    bounds: list[int] = list(_SMALL_BOUNDS)
    while 2 * bounds[-1] <= min(many, _LARGEST_BOUND):
        bounds.append(2 * bounds[-1])
    return tuple(bounds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Search:
    """The checked arguments of `plan`."""

    population: Population
    epsilon: float
    delta: float
    adjacency: str
    batch_sizes: tuple[int | None, ...]
    iterations: int | None
    contribution_bounds: Sequence[int] | None = None
    user_bounds: Bounds = None
    selectors: Sequence[str] = DEFAULT_SELECTORS
    mechanism: str = _ALL
    num_parameters: int = DEFAULT_PARAMETERS
    allow_large_delta: bool = False
    seed: int = 0
    budget: int = COPIES

    def __post_init__(self) -> None:
        validate.one_of((*MECHANISMS, _ALL), mechanism=self.mechanism)
        validate.positive(num_parameters=self.num_parameters, budget=self.budget)
        if self.iterations is not None:
            validate.positive(iterations=self.iterations)
        for size in self.batch_sizes:
            if size is not None:
                validate.positive(batch_size=size)
        if self.leaves_sizes_open and self.mechanism not in (_ALL, _OPEN):
            raise InputError(f"A plan for mechanism {self.mechanism!r} needs batch_size and iterations")
        for bound in self.bounds:
            validate.positive(contribution_bounds=bound)
        if self.user_bounds is not None:
            if self.mechanism != _ALL and mechanism_class(self.mechanism).needs_schedule:
                raise InputError(
                    f"Mechanism {self.mechanism!r} has schedules, which cannot hold bounds of single users"
                )
            # Read once; a plan has bounds of its own for all others.
            object.__setattr__(self, "user_bounds", UserBounds.of(self.user_bounds, others=1))
        for word in self.selectors:
            if not needs_bound_alone(word):
                known = ", ".join(selectors_by_bound())
                raise InputError(f"A plan cannot try the selector {word!r}; choose from {known}")
        check_terms(epsilon=self.epsilon, delta=self.delta, adjacency=self.adjacency)
        refuse_large_delta(self.delta, allow_large_delta=self.allow_large_delta)

    @property
    def leaves_sizes_open(self) -> bool:
        return self.iterations is None or None in self.batch_sizes

    @property
    def bounds(self) -> tuple[int, ...]:
        given = self.contribution_bounds
        return default_bounds(self.population) if given is None else tuple(given)

    def choices(self, progress: Progress | None) -> list[Choice]:
        """Tries everything, and marks the best."""
        report = reporting(progress)
        attempts = list(self._attempts())
        choices: list[Choice] = []
        for number, (kind, size, attempt) in enumerate(attempts):
            report(number / len(attempts), attempt.label)
            choices += [self._row(kind, size, candidate) for candidate in attempt.make()]
        report(1.0, "done")
        if not choices:
            raise InputError(
                f"A plan has nothing to try for mechanism {self.mechanism!r} with "
                f"{counted(len(self.selectors), 'selector')}, {counted(len(self.bounds), 'bound')} and "
                f"{counted(len(self.batch_sizes), 'batch size')}; name at least one of each, or another mechanism"
            )
        return mark_best(choices)

    def advice(self, choices: Sequence[Choice]) -> Iterator[str]:
        """Yields advice on delta, on the best choice and its noise, and on the data."""
        yield from delta_warnings(self.delta, num_users=self.population.num_attributed_users)
        yield from (choice.why for choice in choices if choice.best)
        yield from advice_on_noise(choices)
        yield from advice_on_graph(self.population, max(self.bounds, default=1))

    def _attempts(self) -> Iterator[tuple[type[Mechanism], int | None, Attempt]]:
        kinds = (
            [self.mechanism] if (only := self.mechanism != _ALL) else [_OPEN] if self.leaves_sizes_open else MECHANISMS
        )
        classes = [kind for kind in map(mechanism_class, kinds) if self.user_bounds is None or not kind.needs_schedule]
        for size in self.batch_sizes:
            target = self._target(size, self.population.num_examples)
            space = SearchSpace(
                population=self.population,
                batch_size=target.batch_size,
                iterations=target.iterations,
                contribution_bounds=self.bounds,
                selectors=tuple(self.selectors),
                seed=self.seed,
                only=only,
                user_bounds=self.user_bounds,
                noise_for=lambda mechanism, claim=target.claim: calculators.calibrate(mechanism, **claim),
            )
            for kind in classes:
                yield from ((kind, size, attempt) for attempt in kind.candidates(space))

    def _target(self, batch_size: int | None, size: int) -> PlanTarget:
        """Returns the target for an S of this size."""
        sizes = training_sizes(size, budget=self.budget, batch_size=batch_size, iterations=self.iterations)
        return PlanTarget(
            epsilon=self.epsilon,
            delta=self.delta,
            adjacency=self.adjacency,
            batch_size=sizes.batch_size,
            iterations=sizes.iterations,
            num_parameters=self.num_parameters,
            population_mean_users_per_example=self.population.num_pairs / max(1, self.population.num_examples),
        )

    def _row(self, kind: type[Mechanism], batch_size: int | None, candidate: Candidate) -> Choice:
        """Returns the row of a candidate, calibrated unless a note says why it cannot be used."""
        size = self.population.num_examples if candidate.selected is None else candidate.selected.size
        target = self._target(batch_size, size)
        row = Choice(
            target=target,
            mechanism=kind.kind,
            selector=candidate.selector,
            contribution_bound=candidate.contribution_bound or 0,
            allow_duplicates=candidate.allow_duplicates,
            note=candidate.note,
        )
        if candidate.selected is None:
            return row
        certificate, mean_users = self.population.count(candidate.selected)
        selected = SelectedCounts(
            recounted_bound=certificate.contribution_bound,
            size=certificate.size,
            num_distinct=certificate.num_distinct,
            upper_bound=certificate.origin.upper_bound,
            mean_users_per_example=mean_users,
            min_separation=certificate.min_separation,
        )
        bound = candidate.contribution_bound or certificate.contribution_bound
        row = dataclasses.replace(row, contribution_bound=bound, selected=selected)
        if not row.note and certificate.size < target.batch_size and not kind.needs_groups:  # whose coins are certain
            row = dataclasses.replace(row, note=TOO_SMALL)
        return row if row.note else _calibrated(row, kind, certificate)


def _calibrated(row: Choice, kind: type[Mechanism], certificate: ContributionCertificate) -> Choice:
    """Adds the mechanism's settings and the noise for the target, or a note where no noise can be proven."""
    target, settings = row.target, {}
    try:
        mechanism = kind.from_certificate(certificate, batch_size=target.batch_size, iterations=target.iterations)
        if mechanism.cycle_length > 1:
            drawn = [p for p in map(mechanism.probability_of, range(mechanism.cycle_length)) if p > 0]
            settings = {"num_groups": mechanism.cycle_length, "least_group_probability": min(drawn)}
        noise = calculators.calibrate(mechanism, **target.claim)
        other_epsilon = calculators.epsilon(
            mechanism, noise_multiplier=noise, delta=target.delta, adjacency=target.other_adjacency
        )
    except UncertifiableError as error:
        return dataclasses.replace(row, sampling=Sampling(**settings), note=str(error))
    shared = noise / mechanism.drawn_share(certificate)
    ratio = SignalToNoise.of(mechanism, noise_multiplier=shared, num_parameters=target.num_parameters)
    sampling = Sampling(
        sampling_probability=getattr(mechanism, "sampling_probability", None),
        num_bands=getattr(mechanism, "num_bands", None),
        **settings,
    )
    found = Noise(noise_multiplier=noise, other_epsilon=other_epsilon, effective_noise=ratio.noise_multiplier)
    return dataclasses.replace(row, sampling=sampling, noise=found)
