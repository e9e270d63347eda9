"""What each choice of bound and selector would cost: size of S, bias, and the noise for one privacy target."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from coowned import validate
from coowned.accounting import calculators
from coowned.accounting.signal_to_noise import DEFAULT_PARAMETERS, GOOD, SignalToNoise
from coowned.accounting.terms import OTHER_ADJACENCY, UNIT, check_terms, delta_warnings, refuse_large_delta
from coowned.attribution.graph import AttributionGraph
from coowned.attribution.statistics import heavy_users_advice
from coowned.certificate import ContributionCertificate, certify
from coowned.errors import InfeasibleScheduleError, InputError, UncertifiableError
from coowned.mechanism.mechanism import Mechanism
from coowned.mechanism.min_separation import MinSeparation
from coowned.mechanism.poisson_sampling import PoissonSampling
from coowned.mechanism.registry import PLANNED
from coowned.progress import Progress
from coowned.selection.greedy_min_separation import GreedyMinSeparation, max_min_separation
from coowned.selection.registry import selector_class
from coowned.selection.selection_cache import select_once
from coowned.selection.selector import Schedule, Selection

TOO_SMALL = "S is smaller than one batch"
MECHANISMS = (*PLANNED, "all")
DEFAULT_SELECTORS = ("greedy", "greedy-with-duplicates", "priced")
_BOUNDING = ("greedy", "greedy-with-duplicates", "priced", "integer-program")  # a bound is all they need
_SMALL_BOUNDS = (1, 2, 3, 5, 8)
_LARGEST_BOUND = 128  # tried by default
_TRIED_FACTORS = (2, 4, 8, 16, 32, 64)  # for batch size and steps, where the noise is large


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
    num_parameters: int = DEFAULT_PARAMETERS  # of the model that the noise is for
    step_signal_to_noise: float | None = None  # of the mean gradient of one step
    signal_to_noise: float | None = None  # of the whole training, see `plan`
    note: str = ""
    best: bool = False

    @property
    def label(self) -> str:
        return f"{self.selector}, bound {self.contribution_bound:,}" if self.contribution_bound else self.selector

    @property
    def noise(self) -> SignalToNoise:
        """The noise of a choice that can be used."""
        assert self.effective_noise is not None
        return SignalToNoise(
            batch_size=self.batch_size,
            iterations=self.iterations,
            noise_multiplier=self.effective_noise,
            num_parameters=self.num_parameters,
        )


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

    def notes(self) -> list[str]:
        """Why some choices cannot be used, one sentence for all whose S is too small.

        Guarantees:
          - However many choices are too small, one sentence says so.   (test_too_small_choices_share_one_sentence)
        """
        small = [choice for choice in self.choices if choice.note == TOO_SMALL]
        notes = []
        if small:
            which = "1 choice has" if len(small) == 1 else f"{len(small)} choices have"
            largest = max(choice.size for choice in small)
            notes.append(
                f"{which} fewer copies than one batch of {small[0].batch_size:,} (at most {largest:,}) and cannot be "
                "used; a smaller batch size or a larger bound would help."
            )
        others = [choice for choice in self.choices if choice.note not in ("", TOO_SMALL)]
        return [*notes, *(f"{choice.label}: {choice.note}" for choice in others)]


def plan(
    graph: AttributionGraph,
    *,
    epsilon: float,
    delta: float,
    batch_size: int,
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
    """Tries every bound with every selector and finds the noise each needs.

    Poisson sampling is tried with every selector and bound; min-separation with the largest separation that the greedy
    schedule reaches. DP-MF's noise is correlated, so that much of it cancels: its multiplier counts times the error of
    its prefix sums over that of independent noise (`BandedStrategy.error_factor`).

    The best choice has the largest predicted signal-to-noise over the whole training: the clip norm over the standard
    error of the mean gradient, 1 / sqrt(1 / num_distinct + num_parameters (effective_noise / batch_size)^2 /
    iterations). The first term is what so few distinct examples leave unknown, the second the noise
    (`SignalToNoise`). What bias costs is not in it: look at the users per example.

    Selections and calibrations are made once and kept in the cache. All of it uses the graph and public numbers only,
    so choosing from it costs no privacy.

    Args:
      contribution_bounds: by default those of `default_bounds`.
      num_parameters: of the model that is to be trained; the noise is spread over all of them. The default stands for
        a small linear model.
      allow_large_delta: plan although delta is 0.1 or more.

    Guarantees:
      - The best row has the largest predicted signal-to-noise of all.   (test_best_has_the_most_signal)
      - The advice says what the noise of the best row means for the model.   (test_verdict_before_training)
      - Where no row is good, the advice says so and what would be.   (test_no_good_choice_is_said)
    """
    if contribution_bounds is None:
        contribution_bounds = default_bounds(graph)
    validate.one_of(MECHANISMS, mechanism=mechanism)
    validate.positive(batch_size=batch_size, iterations=iterations, num_parameters=num_parameters)
    for bound in contribution_bounds:
        validate.positive(contribution_bounds=bound)
    for word in selectors:
        if word not in _BOUNDING:
            raise InputError(f"A plan cannot try the selector {word!r}; choose from {', '.join(_BOUNDING)}")
    check_terms(epsilon=epsilon, delta=delta, adjacency=adjacency)
    refuse_large_delta(delta, allow_large_delta=allow_large_delta)
    target = {"epsilon": epsilon, "delta": delta, "adjacency": adjacency}
    asked = {
        **target,
        "other_adjacency": OTHER_ADJACENCY[adjacency],
        "unit": UNIT,
        "batch_size": batch_size,
        "iterations": iterations,
        "num_parameters": num_parameters,
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
    choices = _mark_best(choices)
    warnings = delta_warnings(delta, num_users=int(np.count_nonzero(graph.examples_per_user)))
    advice = [
        *warnings,
        *_advice_on_noise(choices, target),
        *_advice_on_graph(graph, max(contribution_bounds, default=1)),
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


def _poisson_choice(
    graph: AttributionGraph, word: str, bound: int, seed: int, target: dict[str, Any], asked: dict[str, Any]
) -> Choice:
    selector: Any = selector_class(word)
    selected = select_once(graph, selector(contribution_bound=bound), seed=seed)
    certificate = certify(graph, selected)
    facts: dict[str, Any] = {**asked, **_facts(graph, selected, certificate), "contribution_bound": bound}
    facts |= {"mechanism": "poisson", "selector": word}
    if certificate.size < asked["batch_size"]:
        return _unusable(facts, TOO_SMALL)
    mechanism = PoissonSampling.from_certificate(
        certificate, batch_size=asked["batch_size"], iterations=asked["iterations"]
    )
    return _calibrated(mechanism, target, facts)


def _min_separation_choice(graph: AttributionGraph, seed: int, target: dict[str, Any], asked: dict[str, Any]) -> Choice:
    size = {"batch_size": asked["batch_size"], "iterations": asked["iterations"]}
    facts: dict[str, Any] = {**asked, "mechanism": "min-separation", "selector": GreedyMinSeparation.name}
    try:
        separation = max_min_separation(graph, **size, seed=seed)
        schedule = GreedyMinSeparation(**size, min_separation=separation).select(graph, seed=seed)
    except InfeasibleScheduleError as error:
        facts |= {
            "contribution_bound": 0, "recounted_bound": 0, "size": 0, "num_distinct": 0, "upper_bound": None,
            "mean_users_per_example": None, "population_mean_users_per_example": _mean(graph), "min_separation": None,
        }  # fmt: skip
        return _unusable(facts, str(error))
    certificate = certify(graph, schedule)
    return _calibrated(
        MinSeparation.from_certificate(certificate), target, {**facts, **_facts(graph, schedule, certificate)}
    )


def _unusable(facts: dict[str, Any], note: str) -> Choice:
    return Choice(
        sampling_probability=None, noise_multiplier=None, other_epsilon=None, effective_noise=None, note=note, **facts
    )


def _calibrated(mechanism: Mechanism, target: dict[str, Any], facts: dict[str, Any]) -> Choice:
    try:
        noise = calculators.calibrate(mechanism, **target)
        other_epsilon = _other_epsilon(mechanism, noise, target)
    except UncertifiableError as error:
        return _unusable(facts, str(error))
    ratio = SignalToNoise.of(mechanism, noise_multiplier=noise, num_parameters=facts["num_parameters"])
    return Choice(
        sampling_probability=getattr(mechanism, "sampling_probability", None),
        noise_multiplier=noise,
        other_epsilon=other_epsilon,
        effective_noise=ratio.noise_multiplier,
        step_signal_to_noise=ratio.per_step,
        signal_to_noise=ratio.with_examples(facts["num_distinct"]),
        **facts,
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
    best = max(choices, key=lambda choice: choice.signal_to_noise or 0.0, default=None)
    return [dataclasses.replace(one, best=one is best and one.signal_to_noise is not None) for one in choices]


def _advice_on_noise(choices: Sequence[Choice], target: dict[str, Any]) -> list[str]:
    """What the noise of the best choice means, and what to change where it is large."""
    best = next((choice for choice in choices if choice.best), None)
    if best is None:
        largest = max((choice.size for choice in choices if choice.note == TOO_SMALL), default=0)
        return [f"No choice can be used; a batch size of at most {largest:,} would fit."] if largest else []
    assert best.signal_to_noise is not None
    verdict = best.noise.verdict()
    if best.signal_to_noise >= GOOD:
        is_clear = best.noise.per_step >= 1
        cure = "" if is_clear else _cure(best, target, "batch_size", lambda ratio: ratio.per_step >= 1)
        return [f"With the best choice, {verdict[0].lower()}{verdict[1:]}{cure and f' Try {cure}.'}"]
    why = f"No choice is good (the best has a predicted signal-to-noise of {best.signal_to_noise:.2g}, below {GOOD:g})."
    if best.num_distinct < GOOD**2:
        return [f"{why} It has only {best.num_distinct:,} distinct examples: too few, whatever the noise."]
    distinct = best.num_distinct
    cures = [
        _cure(best, target, name, lambda ratio: ratio.with_examples(distinct) >= GOOD)
        for name in ("batch_size", "iterations")
    ]
    return [f"{why} {verdict} Try {' or '.join(filter(None, cures)) or 'more data or a larger epsilon'}."]


def _cure(best: Choice, target: dict[str, Any], name: str, is_enough: Callable[[SignalToNoise], bool]) -> str:
    """The smallest tried batch size, or number of steps, that is enough, as an option with what it does to the noise.

    Where no batch is enough, the largest that fits into S; "" where nothing helps.
    """
    if best.mechanism != PoissonSampling.kind:
        return ""
    found = ""
    for factor in _TRIED_FACTORS:
        setting = {"batch_size": best.batch_size, "iterations": best.iterations}
        setting[name] *= factor
        if setting["batch_size"] > best.size:
            break
        mechanism = PoissonSampling(
            contribution_bound=best.recounted_bound,
            sampling_probability=setting["batch_size"] / best.size,
            **setting,
        )
        try:
            noise = calculators.calibrate(mechanism, **target)
        except UncertifiableError:
            break
        ratio = SignalToNoise.of(mechanism, noise_multiplier=noise, num_parameters=best.num_parameters)
        lower = 1 - best.noise.whole_training / ratio.whole_training
        cure = (
            f"--{name.replace('_', '-')} {setting[name]} ({setting[name] // factor:,} -> {setting[name]:,} lowers the "
            f"noise in the mean gradient by {lower:.0%}; noise multiplier {best.noise_multiplier:.3g} -> {noise:.3g})"
        )
        if is_enough(ratio):
            return cure
        if name == "batch_size" and lower > 0.1:
            found = cure
    return found


def _advice_on_graph(graph: AttributionGraph, bound: int) -> list[str]:
    heavy = heavy_users_advice(graph, bound)
    advice = [] if heavy is None else [heavy]
    if without := int(np.count_nonzero(graph.users_per_example == 0)):
        advice.append(
            f"{without:,} {'example has' if without == 1 else 'examples have'} no protected user and "
            f"{'is' if without == 1 else 'are'} left out; --unattributed keep would include "
            f"{'it' if without == 1 else 'them'} without protection."
        )
    return advice
