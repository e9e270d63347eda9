"""One row of a plan, all of them, which is the best, what its noise means, and what would lower it."""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from coowned import codec
from coowned.accounting import calculators
from coowned.accounting.signal_to_noise import DEFAULT_PARAMETERS, GOOD, SignalToNoise
from coowned.attribution.graph import AttributionGraph
from coowned.attribution.statistics import heavy_users_advice
from coowned.errors import InputError, UncertifiableError
from coowned.mechanism.poisson_sampling import PoissonSampling
from coowned.mechanism.registry import MECHANISMS
from coowned.progress import counted

TOO_SMALL = "S is smaller than one batch"
TOO_SMALL_FOR_GROUPS = "S is smaller than two batches, one for each of two groups"
_TRIED_FACTORS = (2, 4, 8, 16, 32, 64)  # for batch size and steps, where the noise is large


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """One row of a plan. Nothing in it is a claim: a guarantee is made from the chosen certificate.

    Every row names the target it was made for, so that no epsilon in it stands alone.
    """

    # The target.
    epsilon: float
    delta: float
    adjacency: str
    other_adjacency: str
    unit: str
    # The sizes of the training.
    batch_size: int
    iterations: int

    mechanism: str
    selector: str
    contribution_bound: int  # as asked for; a schedule's is recounted
    recounted_bound: int  # what the certificate says, and the noise is for
    size: int
    num_distinct: int
    upper_bound: int | None = None
    mean_users_per_example: float | None = None  # over copies
    population_mean_users_per_example: float
    min_separation: int | None = None
    sampling_probability: float | None = None
    noise_multiplier: float | None = None  # None where it cannot be used, for the reason given
    other_epsilon: float | None = None  # of that noise under the other adjacency, at the same delta
    effective_noise: float | None = None  # the multiplier of independent noise with the same mean error of prefix sums
    num_parameters: int = DEFAULT_PARAMETERS  # of the model that the noise is for
    step_signal_to_noise: float | None = None  # of the mean gradient of one step
    signal_to_noise: float | None = None  # of the whole training, see `plan`
    prefix_error: float | None = None  # root mean squared, of the prefix sums of mean gradients, in clip norms
    num_bands: int | None = None  # of correlated noise
    num_groups: int | None = None  # of users, for cyclic sampling
    allow_duplicates: bool = False  # of cyclic sampling; other selectors say it themselves
    least_group_probability: float | None = None  # the largest is `sampling_probability`
    note: str = ""
    least_error: bool = False  # of all rows of its mechanism
    best: bool = False
    why: str = ""  # of the best, in one sentence

    @property
    def label(self) -> str:
        settings = [
            f"bound {self.contribution_bound:,}" if self.contribution_bound else "",
            f"{self.num_groups:,} groups" if self.num_groups else "",
            "with duplicates" if self.allow_duplicates else "",
            f"min separation {self.min_separation:,}" if self.min_separation else "",
        ]
        return ", ".join([self.selector, *filter(None, settings)])

    @property
    def noise(self) -> SignalToNoise:
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

    def __post_init__(self) -> None:
        if not self.choices:
            raise InputError("a plan needs at least one choice; plan again")

    def to_json(self) -> str:
        """The rows, as `coowned plan -o` writes them."""
        return codec.encode_json(self.to_rows(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Reads the rows back; advice is not stored."""
        choices = codec.decode_json(tuple[Choice, ...], text, name="plan", remedy="plan again")
        return cls(choices=choices, advice=())

    def to_rows(self) -> list[dict[str, Any]]:
        return [dataclasses.asdict(choice) for choice in self.choices]

    def notes(self) -> list[str]:
        """Why some choices cannot be used, one sentence for all whose S is too small.

        Guarantees:
          - However many choices are too small, one sentence says so.   (test_too_small_choices_share_one_sentence)
        """
        notes = []
        for note, needed in ((TOO_SMALL, "one batch"), (TOO_SMALL_FOR_GROUPS, "two groups' batches")):
            if small := [choice for choice in self.choices if choice.note == note]:
                which = "1 choice has" if len(small) == 1 else f"{len(small)} choices have"
                largest = max(choice.size for choice in small)
                notes.append(
                    f"{which} fewer copies than {needed} of {min(choice.batch_size for choice in small):,} (at most "
                    f"{largest:,}) and cannot be used; a smaller batch size or a larger bound would help."
                )
        others = [choice for choice in self.choices if choice.note not in ("", TOO_SMALL, TOO_SMALL_FOR_GROUPS)]
        return [*notes, *(f"{choice.label}: {choice.note}" for choice in others)]


def mark_best(choices: Sequence[Choice]) -> list[Choice]:
    """Marks the best row, with the sentence that says why, and the row of each mechanism with the least error."""
    usable = [choice for choice in choices if choice.signal_to_noise is not None]
    if not usable:
        return list(choices)
    by_mechanism = {kind: rows for kind in MECHANISMS if (rows := [row for row in usable if row.mechanism == kind])}
    signal, error = operator.attrgetter("signal_to_noise"), operator.attrgetter("prefix_error")
    least = [min(rows, key=error) for rows in by_mechanism.values()]
    strongest = [max(rows, key=signal) for rows in by_mechanism.values()]
    best = max(strongest, key=signal)
    others = [choice for choice in strongest if choice is not best]
    why = _why(best, others, min(usable, key=error))
    return [
        dataclasses.replace(
            one,
            best=one is best,
            why=why if one is best else "",
            least_error=any(one is choice for choice in least),
        )
        for one in choices
    ]


def _why(best: Choice, others: Sequence[Choice], least: Choice) -> str:
    """What the best choice has, beside the best of every other mechanism, in one sentence."""

    def has(choice: Choice) -> str:
        return (
            f"an error of prefix sums of {choice.prefix_error:.3g} clip norms on "
            f"{counted(choice.num_distinct, 'distinct example')} with {choice.mean_users_per_example:.2f} users each"
        )

    def name(choice: Choice) -> str:
        return f"{MECHANISMS[choice.mechanism].title} ({choice.label}, batches of {choice.batch_size:,})"

    comparison = "; ".join(f"{name(choice)} has {has(choice)}" for choice in others)
    sentence = f"Best predicted signal-to-noise, {best.signal_to_noise:.3g}: {name(best)} has {has(best)}"
    sentence += f", where {comparison}" if others else ""
    if least is best:
        return f"{sentence}; no row has less error."
    return f"{sentence}; the lowest error, {least.prefix_error:.3g}, is that of {name(least)}, which keeps " + (
        f"{counted(least.num_distinct, 'distinct example')}."
    )


def advice_on_noise(choices: Sequence[Choice], target: dict[str, Any]) -> list[str]:
    """What the noise of the best choice means, and what to change where it is large."""
    best = next((choice for choice in choices if choice.best), None)
    if best is None:
        largest = max((choice.size for choice in choices if choice.note == TOO_SMALL), default=0)
        return [f"No choice can be used; a batch size of at most {largest:,} would fit."] if largest else []
    assert best.signal_to_noise is not None
    verdict = best.noise.verdict()
    if best.signal_to_noise >= GOOD:
        is_clear = best.noise.per_step >= 1
        remedy = "" if is_clear else _remedy(best, target, "batch_size", lambda ratio: ratio.per_step >= 1)
        return [f"With the best choice, {verdict[0].lower()}{verdict[1:]}{remedy and f' Try {remedy}.'}"]
    why = f"No choice is good (the best has a predicted signal-to-noise of {best.signal_to_noise:.2g}, below {GOOD:g})."
    if best.num_distinct < GOOD**2:
        return [f"{why} It has only {best.num_distinct:,} distinct examples: too few, whatever the noise."]
    distinct = best.num_distinct
    remedies = [
        _remedy(best, target, name, lambda ratio: ratio.with_examples(distinct) >= GOOD)
        for name in ("batch_size", "iterations")
    ]
    return [f"{why} {verdict} Try {' or '.join(filter(None, remedies)) or 'more data or a larger epsilon'}."]


def _remedy(best: Choice, target: dict[str, Any], name: str, is_enough: Callable[[SignalToNoise], bool]) -> str:
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
        remedy = (
            f"--{name.replace('_', '-')} {setting[name]} ({setting[name] // factor:,} -> {setting[name]:,} lowers the "
            f"noise in the mean gradient by {lower:.0%}; noise multiplier {best.noise_multiplier:.3g} -> {noise:.3g})"
        )
        if is_enough(ratio):
            return remedy
        if name == "batch_size" and lower > 0.1:
            found = remedy
    return found


def advice_on_graph(graph: AttributionGraph, bound: int) -> list[str]:
    heavy = heavy_users_advice(graph, bound)
    advice = [] if heavy is None else [heavy]
    if without := int(np.count_nonzero(graph.users_per_example == 0)):
        advice.append(
            f"{without:,} {'example has' if without == 1 else 'examples have'} no protected user and "
            f"{'is' if without == 1 else 'are'} left out; `coowned select --unattributed keep` includes "
            f"{'it' if without == 1 else 'them'} without protection."
        )
    return advice
