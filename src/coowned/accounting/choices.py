"""The rows of a plan: marks the best one, and explains its noise and what would lower it."""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from coowned import codec
from coowned.accounting import calculators
from coowned.accounting.signal_to_noise import DEFAULT_PARAMETERS, GOOD, SignalToNoise
from coowned.accounting.terms import OTHER_ADJACENCY, UNIT
from coowned.errors import InputError, UncertifiableError
from coowned.mechanism.candidates import TOO_SMALL, TOO_SMALL_FOR_GROUPS, Population
from coowned.mechanism.registry import MECHANISMS, mechanism_class
from coowned.progress import counted

_TRIED_FACTORS = (2, 4, 8, 16, 32, 64)  # for batch size and steps, where the noise is large


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanTarget:
    """The privacy target, training size and model of a choice, so that no epsilon is shown alone."""

    epsilon: float
    delta: float
    adjacency: str
    batch_size: int
    iterations: int
    num_parameters: int = DEFAULT_PARAMETERS
    population_mean_users_per_example: float

    @property
    def other_adjacency(self) -> str:
        return OTHER_ADJACENCY[self.adjacency]

    @property
    def unit(self) -> str:
        return UNIT

    @property
    def claim(self) -> dict[str, Any]:
        """Epsilon, delta and adjacency, for the calculators."""
        return {"epsilon": self.epsilon, "delta": self.delta, "adjacency": self.adjacency}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectedCounts:
    """Counts of what a choice selects; all zero where nothing could be selected."""

    recounted_bound: int = 0  # which the noise is for
    size: int = 0
    num_distinct: int = 0
    upper_bound: int | None = None
    mean_users_per_example: float | None = None  # over copies
    min_separation: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings of a choice's mechanism."""

    sampling_probability: float | None = None
    least_group_probability: float | None = None  # the largest is `sampling_probability`
    num_bands: int | None = None  # of correlated noise
    num_groups: int | None = None  # of users, for cyclic sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noise:
    """Noise that meets the target."""

    noise_multiplier: float
    other_epsilon: float  # under the other adjacency, at the same delta
    effective_noise: float  # the multiplier of independent noise with the same mean error of prefix sums


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """One row of a plan. Nothing in it is a claim: a guarantee is made from the chosen certificate."""

    target: PlanTarget
    mechanism: str
    selector: str
    contribution_bound: int  # as asked for; a schedule's is recounted
    allow_duplicates: bool = False  # of cyclic sampling; other selectors say it themselves
    selected: SelectedCounts = SelectedCounts()
    sampling: Sampling = Sampling()
    noise: Noise | None = None  # None where the choice cannot be used, for the reason in `note`
    note: str = ""
    least_error: bool = False  # of all rows of its mechanism
    best: bool = False
    why: str = ""  # of the best, in one sentence

    @property
    def label(self) -> str:
        settings = [
            f"bound {self.contribution_bound:,}" if self.contribution_bound else "",
            f"{self.sampling.num_groups:,} groups" if self.sampling.num_groups else "",
            "with duplicates" if self.allow_duplicates else "",
            f"min separation {self.selected.min_separation:,}" if self.selected.min_separation else "",
        ]
        return ", ".join([self.selector, *filter(None, settings)])

    @property
    def ratio(self) -> SignalToNoise | None:
        """Signal-to-noise ratio in training; None where the choice cannot be used."""
        if self.noise is None:
            return None
        return SignalToNoise(
            batch_size=self.target.batch_size,
            iterations=self.target.iterations,
            noise_multiplier=self.noise.effective_noise,
            num_parameters=self.target.num_parameters,
        )

    @property
    def size(self) -> int:
        return self.selected.size

    @property
    def num_distinct(self) -> int:
        return self.selected.num_distinct

    @property
    def mean_users_per_example(self) -> float | None:
        return self.selected.mean_users_per_example

    @property
    def noise_multiplier(self) -> float | None:
        return None if self.noise is None else self.noise.noise_multiplier

    @property
    def signal_to_noise(self) -> float | None:
        """Predicted for the whole training, see `plan`."""
        return None if self.ratio is None else self.ratio.with_examples(self.num_distinct)

    @property
    def prefix_error(self) -> float | None:
        """Root mean squared error of the prefix sums of mean gradients, in clip norms."""
        return None if self.ratio is None else self.ratio.prefix_error

    def to_row(self) -> dict[str, Any]:
        """Returns the row as plan.json has it, all parts side by side."""
        noise = dict.fromkeys(_names(Noise)) if self.noise is None else vars(self.noise)
        return {
            **{name: getattr(self, name) for name in _OWN},
            **vars(self.target),
            "other_adjacency": self.target.other_adjacency,
            "unit": self.target.unit,
            **vars(self.selected),
            **vars(self.sampling),
            **noise,
            "step_signal_to_noise": None if self.ratio is None else self.ratio.per_step,
            "signal_to_noise": self.signal_to_noise,
            "prefix_error": self.prefix_error,
        }


def _names(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


_PARTS = {"target": PlanTarget, "selected": SelectedCounts, "sampling": Sampling}
_OWN = [name for name in _names(Choice) if name not in (*_PARTS, "noise")]
_ROW = msgspec.defstruct(  # of plan.json
    "Choice",
    [
        *((field.name, field.type) for field in dataclasses.fields(Choice) if field.name in _OWN),
        *((field.name, field.type) for kind in _PARTS.values() for field in dataclasses.fields(kind)),
        *((name, str) for name in ("other_adjacency", "unit")),
        *((name, float | None) for name in _names(Noise)),
        *((name, float | None) for name in ("step_signal_to_noise", "signal_to_noise", "prefix_error")),
    ],
    kw_only=True,
)


def _read_row(row: Any) -> Choice:
    parts = {name: kind(**{key: getattr(row, key) for key in _names(kind)}) for name, kind in _PARTS.items()}
    noise = {name: getattr(row, name) for name in _names(Noise)}
    own = {name: getattr(row, name) for name in _OWN}
    return Choice(**own, **parts, noise=None if row.noise_multiplier is None else Noise(**noise))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """All choices, and advice on the data."""

    choices: tuple[Choice, ...]
    advice: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.choices:
            raise InputError("a plan needs at least one choice; plan again")

    def to_json(self) -> str:
        """Returns the rows as `coowned plan -o` writes them."""
        return codec.encode_json(self.to_rows(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Reads the rows back; advice is not stored."""
        rows = codec.decode_json(tuple[_ROW, ...], text, name="plan", remedy="plan again")
        return cls(choices=tuple(map(_read_row, rows)), advice=())

    def to_rows(self) -> list[dict[str, Any]]:
        return [choice.to_row() for choice in self.choices]

    def notes(self) -> list[str]:
        """Explains why some choices cannot be used, in one sentence for all whose S is too small.

        Guarantees:
          - However many choices are too small, one sentence says so.   (test_too_small_choices_share_one_sentence)
        """
        notes = []
        for note, needed in ((TOO_SMALL, "one batch"), (TOO_SMALL_FOR_GROUPS, "two groups' batches")):
            if small := [choice for choice in self.choices if choice.note == note]:
                which = "1 choice has" if len(small) == 1 else f"{len(small)} choices have"
                largest = max(choice.size for choice in small)
                notes.append(
                    f"{which} fewer copies than {needed} of {min(one.target.batch_size for one in small):,} (at most "
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
    """Compares the best choice with the best of every other mechanism, in one sentence."""

    def has(choice: Choice) -> str:
        return (
            f"an error of prefix sums of {choice.prefix_error:.3g} clip norms on "
            f"{counted(choice.num_distinct, 'distinct example')} with {choice.mean_users_per_example:.2f} users each"
        )

    def name(choice: Choice) -> str:
        return f"{MECHANISMS[choice.mechanism].title} ({choice.label}, batches of {choice.target.batch_size:,})"

    comparison = "; ".join(f"{name(choice)} has {has(choice)}" for choice in others)
    sentence = f"Best predicted signal-to-noise, {best.signal_to_noise:.3g}: {name(best)} has {has(best)}"
    sentence += f", where {comparison}" if others else ""
    if least is best:
        return f"{sentence}; no row has less error."
    return f"{sentence}; the lowest error, {least.prefix_error:.3g}, is that of {name(least)}, which keeps " + (
        f"{counted(least.num_distinct, 'distinct example')}."
    )


def advice_on_noise(choices: Sequence[Choice]) -> list[str]:
    """Explains the noise of the best choice, and what to change where it is large."""
    best = next((choice for choice in choices if choice.best), None)
    if best is None:
        largest = max((choice.size for choice in choices if choice.note == TOO_SMALL), default=0)
        return [f"No choice can be used; a batch size of at most {largest:,} would fit."] if largest else []
    ratio, signal = best.ratio, best.signal_to_noise
    assert ratio is not None
    assert signal is not None
    verdict = ratio.verdict()
    if signal >= GOOD:
        remedy = "" if ratio.per_step >= 1 else _remedy(best, "batch_size", lambda ratio: ratio.per_step >= 1)
        return [f"With the best choice, {verdict[0].lower()}{verdict[1:]}{remedy and f' Try {remedy}.'}"]
    why = f"No choice is good (the best has a predicted signal-to-noise of {signal:.2g}, below {GOOD:g})."
    if best.num_distinct < GOOD**2:
        return [f"{why} It has only {best.num_distinct:,} distinct examples: too few, whatever the noise."]
    distinct = best.num_distinct
    remedies = [
        _remedy(best, name, lambda ratio: ratio.with_examples(distinct) >= GOOD)
        for name in ("batch_size", "iterations")
    ]
    return [f"{why} {verdict} Try {' or '.join(filter(None, remedies)) or 'more data or a larger epsilon'}."]


def _remedy(best: Choice, name: str, is_enough: Callable[[SignalToNoise], bool]) -> str:
    """Returns the smallest tried batch size, or number of steps, that is enough, and what it does to the noise.

    Where no batch is enough, the largest that fits into S; "" where nothing helps.
    """
    assert best.ratio is not None
    found = ""
    for factor in _TRIED_FACTORS:
        setting = {"batch_size": best.target.batch_size, "iterations": best.target.iterations}
        setting[name] *= factor
        if setting["batch_size"] > best.size:
            break
        mechanism = mechanism_class(best.mechanism).for_size(
            contribution_bound=best.selected.recounted_bound, size=best.size, **setting
        )
        if mechanism is None:
            break
        try:
            noise = calculators.calibrate(mechanism, **best.target.claim)
        except UncertifiableError:
            break
        ratio = SignalToNoise.of(mechanism, noise_multiplier=noise, num_parameters=best.target.num_parameters)
        lower = 1 - best.ratio.whole_training / ratio.whole_training
        remedy = (
            f"--{name.replace('_', '-')} {setting[name]} ({setting[name] // factor:,} -> {setting[name]:,} lowers the "
            f"noise in the mean gradient by {lower:.0%}; noise multiplier {best.noise_multiplier:.3g} -> {noise:.3g})"
        )
        if is_enough(ratio):
            return remedy
        if name == "batch_size" and lower > 0.1:
            found = remedy
    return found


def advice_on_graph(population: Population, bound: int) -> list[str]:
    heavy = population.heavy_users_advice(bound)
    advice = [] if heavy is None else [heavy]
    if without := population.num_examples_without_users:
        advice.append(
            f"{without:,} {'example has' if without == 1 else 'examples have'} no protected user and "
            f"{'is' if without == 1 else 'are'} left out; `coowned select --unattributed keep` includes "
            f"{'it' if without == 1 else 'them'} without protection."
        )
    return advice
