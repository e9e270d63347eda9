"""What each choice of bound and selector would cost: size of S, bias, and the noise for one privacy target."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from coowned import validate
from coowned.accounting import calculators
from coowned.accounting.terms import OTHER_ADJACENCY, UNIT
from coowned.attribution.graph import AttributionGraph
from coowned.attribution.statistics import GraphStatistics
from coowned.certificate import ContributionCertificate, certify
from coowned.errors import InfeasibleScheduleError, InputError
from coowned.mechanism.banded_strategy import BandedStrategy
from coowned.mechanism.mechanism import Mechanism
from coowned.mechanism.min_separation import MinSeparation
from coowned.mechanism.poisson_sampling import PoissonSampling
from coowned.selection.greedy_min_separation import GreedyMinSeparation, max_min_separation
from coowned.selection.registry import selector_class
from coowned.selection.selection_cache import select_once
from coowned.selection.selector import Schedule, Selection

MECHANISMS = ("all", "poisson", "min-separation")
DEFAULT_BOUNDS = (1, 2, 3, 5, 8)
DEFAULT_SELECTORS = ("greedy", "greedy-with-duplicates", "priced")
_BOUNDING = ("greedy", "greedy-with-duplicates", "priced", "integer-program")  # a bound is all they need
_HEAVY_SHARE = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """One row of a plan. Nothing in it is a claim: a guarantee is made from the chosen certificate.

    Every row names the target it was made for, so that no epsilon in it stands alone.
    """

    epsilon: float  # the target, with the four that follow
    delta: float
    adjacency: str
    other_adjacency: str
    unit: str
    batch_size: int
    iterations: int

    mechanism: str
    selector: str
    contribution_bound: int  # as asked for; a schedule's is recounted
    recounted_bound: int  # what the certificate says, and the noise is for
    size: int
    num_distinct: int
    upper_bound: int | None
    mean_users_per_example: float | None  # over copies
    population_mean_users_per_example: float
    min_separation: int | None
    sampling_probability: float | None
    noise_multiplier: float | None  # None where it cannot be used, for the reason given
    other_epsilon: float | None  # of that noise under the other adjacency, at the same delta
    effective_noise: float | None  # the multiplier of independent noise with the same mean error of prefix sums
    note: str = ""
    best: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """All choices, and what to say about the data."""

    choices: tuple[Choice, ...]
    advice: tuple[str, ...]

    def to_json(self) -> str:
        """The rows, as `coowned plan -o` writes them."""
        return json.dumps(self.to_rows(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Reads the rows back; advice is not stored."""
        try:
            return cls(choices=tuple(Choice(**row) for row in json.loads(text)), advice=())
        except (ValueError, TypeError) as error:
            raise InputError(f"not a plan ({error}); plan again") from None

    def to_rows(self) -> list[dict[str, Any]]:
        return [dataclasses.asdict(choice) for choice in self.choices]


def plan(
    graph: AttributionGraph,
    *,
    epsilon: float,
    delta: float,
    batch_size: int,
    iterations: int,
    adjacency: str,
    contribution_bounds: Sequence[int] = DEFAULT_BOUNDS,
    selectors: Sequence[str] = DEFAULT_SELECTORS,
    mechanism: str = "all",
    seed: int = 0,
    progress: Callable[[float, str], None] | None = None,
) -> Plan:
    """Tries every bound with every selector and finds the noise each needs.

    Poisson sampling is tried with every selector and bound; min-separation with the largest separation that the greedy
    schedule reaches. DP-MF's noise is correlated, so that much of it cancels: its multiplier counts times the error of
    its prefix sums over that of independent noise (`BandedStrategy.error_factor`). The best choice has the smallest
    noise by that measure, the more distinct examples deciding between equals. What bias costs is not in it: look at
    the users per example.

    Selections and calibrations are made once and kept in the cache. All of it uses the graph and public numbers only,
    so choosing from it costs no privacy.

    Guarantees:
      - The best row has the smallest effective noise of all.   (test_best_has_least_noise)
    """
    validate.one_of(MECHANISMS, mechanism=mechanism)
    validate.positive(batch_size=batch_size, iterations=iterations)
    for bound in contribution_bounds:
        validate.positive(contribution_bounds=bound)
    for word in selectors:
        if word not in _BOUNDING:
            raise InputError(
                f"{word!r} is no selector with a contribution bound alone; choose from {', '.join(_BOUNDING)}"
            )
    validate.one_of(tuple(OTHER_ADJACENCY), adjacency=adjacency)
    target = {"epsilon": epsilon, "delta": delta, "adjacency": adjacency}
    asked = {
        **target,
        "other_adjacency": OTHER_ADJACENCY[adjacency],
        "unit": UNIT,
        "batch_size": batch_size,
        "iterations": iterations,
    }
    report = progress or (lambda done, message: None)
    choices: list[Choice] = []
    steps = (
        [(word, bound) for word in selectors for bound in contribution_bounds] if mechanism != "min-separation" else []
    )
    for number, (word, bound) in enumerate(steps):
        report(number / (len(steps) + 1), f"{word}, bound {bound}")
        choices.append(_poisson_choice(graph, word, bound, seed, target, asked))
    if mechanism != "poisson":
        report(len(steps) / (len(steps) + 1), "greedy-min-separation")
        choices.append(_min_separation_choice(graph, seed, target, asked))
    report(1.0, "done")
    return Plan(choices=tuple(_mark_best(choices)), advice=tuple(_advice(graph, max(contribution_bounds, default=1))))


def _poisson_choice(
    graph: AttributionGraph, word: str, bound: int, seed: int, target: dict[str, Any], asked: dict[str, Any]
) -> Choice:
    batch_size, iterations = asked["batch_size"], asked["iterations"]
    kind: Any = selector_class(word)
    selected = select_once(graph, kind(contribution_bound=bound), seed=seed)
    certificate = certify(graph, selected)
    facts: dict[str, Any] = {**asked, **_facts(graph, selected, certificate), "contribution_bound": bound}
    if certificate.size < batch_size:
        note = f"S is smaller than one batch ({certificate.size:,} copies)"
        return Choice(
            mechanism="poisson",
            selector=word,
            sampling_probability=None,
            noise_multiplier=None,
            other_epsilon=None,
            effective_noise=None,
            note=note,
            **facts,
        )
    mechanism = PoissonSampling.from_certificate(certificate, batch_size=batch_size, iterations=iterations)
    noise = calculators.calibrate(mechanism, **target)
    return Choice(
        mechanism="poisson",
        selector=word,
        sampling_probability=mechanism.sampling_probability,
        noise_multiplier=noise,
        other_epsilon=_other_epsilon(mechanism, noise, target),
        effective_noise=noise,
        **facts,
    )


def _min_separation_choice(graph: AttributionGraph, seed: int, target: dict[str, Any], asked: dict[str, Any]) -> Choice:
    batch_size, iterations = asked["batch_size"], asked["iterations"]
    word = GreedyMinSeparation.name
    try:
        separation = max_min_separation(graph, batch_size=batch_size, iterations=iterations, seed=seed)
        schedule = GreedyMinSeparation(batch_size=batch_size, iterations=iterations, min_separation=separation).select(
            graph, seed=seed
        )
    except InfeasibleScheduleError as error:
        return Choice(
            mechanism="min-separation", selector=word, contribution_bound=0, recounted_bound=0, size=0, num_distinct=0,
            upper_bound=None, mean_users_per_example=None, population_mean_users_per_example=_mean(graph),
            min_separation=None, sampling_probability=None, noise_multiplier=None, other_epsilon=None,
            effective_noise=None, note=str(error), **asked,
        )  # fmt: skip
    certificate = certify(graph, schedule)
    mechanism = MinSeparation.from_certificate(certificate)
    noise = calculators.calibrate(mechanism, **target)
    strategy = BandedStrategy(num_bands=mechanism.num_bands, iterations=iterations)
    return Choice(
        mechanism="min-separation",
        selector=word,
        sampling_probability=None,
        noise_multiplier=noise,
        other_epsilon=_other_epsilon(mechanism, noise, target),
        effective_noise=noise * strategy.error_factor(),
        **asked,
        **_facts(graph, schedule, certificate),
    )


def _other_epsilon(mechanism: Mechanism, noise: float, target: dict[str, Any]) -> float:
    other = OTHER_ADJACENCY[target["adjacency"]]
    return calculators.epsilon(mechanism, noise_multiplier=noise, delta=target["delta"], adjacency=other)


def _facts(
    graph: AttributionGraph, selected: Selection | Schedule, certificate: ContributionCertificate
) -> dict[str, Any]:
    copies = np.asarray(selected.copies, dtype=np.float64)
    return {
        "contribution_bound": certificate.contribution_bound,
        "recounted_bound": certificate.contribution_bound,
        "size": certificate.size,
        "num_distinct": certificate.num_distinct,
        "upper_bound": certificate.upper_bound,
        "mean_users_per_example": float(copies @ graph.users_per_example) / max(1, certificate.size),
        "population_mean_users_per_example": _mean(graph),
        "min_separation": certificate.min_separation,
    }


def _mean(graph: AttributionGraph) -> float:
    return graph.num_pairs / max(1, graph.num_examples)


def _mark_best(choices: Sequence[Choice]) -> list[Choice]:
    usable = [choice for choice in choices if choice.effective_noise is not None]
    best = min(usable, key=lambda choice: (choice.effective_noise, -choice.num_distinct), default=None)
    return [dataclasses.replace(choice, best=choice is best) for choice in choices]


def _advice(graph: AttributionGraph, bound: int) -> list[str]:
    statistics = GraphStatistics.of(graph)
    advice = []
    blocked = statistics.blocked_at(graph, bound)
    if statistics.num_examples and blocked / statistics.num_examples >= _HEAVY_SHARE:
        heavy = len(statistics.heaviest_users)
        advice.append(
            f"{heavy} users alone keep {blocked:,} of {statistics.num_examples:,} examples out at bound {bound}: if "
            "any of them consent or are no "
            "people (a mailbox owner, a list robot), take them out with --unprotected; the guarantee then does not "
            "hold for them"
        )
    if statistics.num_examples_without_users:
        advice.append(
            f"{statistics.num_examples_without_users:,} examples have no protected user and are left out; "
            "--unattributed keep takes them without protection"
        )
    return advice
