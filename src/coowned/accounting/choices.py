"""One row of a plan, all of them, and which is the best."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from coowned.accounting.signal_to_noise import DEFAULT_PARAMETERS, SignalToNoise
from coowned.errors import InputError
from coowned.mechanism.registry import TITLES
from coowned.progress import counted

TOO_SMALL = "S is smaller than one batch"
TOO_SMALL_FOR_GROUPS = "S is smaller than two batches, one for each of two groups"


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
    by_mechanism = {kind: rows for kind in TITLES if (rows := [row for row in usable if row.mechanism == kind])}
    least = [min(rows, key=_error_of) for rows in by_mechanism.values()]
    strongest = {kind: max(rows, key=_signal_of) for kind, rows in by_mechanism.items()}
    best = max(strongest.values(), key=_signal_of)
    others = [choice for choice in strongest.values() if choice is not best]
    why = _why(best, others, min(usable, key=_error_of))
    return [
        dataclasses.replace(
            one,
            best=one is best,
            why=why if one is best else "",
            least_error=any(one is choice for choice in least),
        )
        for one in choices
    ]


def _signal_of(choice: Choice) -> float:
    return choice.signal_to_noise or 0.0


def _error_of(choice: Choice) -> float:
    assert choice.prefix_error is not None
    return choice.prefix_error


def _why(best: Choice, others: Sequence[Choice], least: Choice) -> str:
    """What the best choice has, beside the best of every other mechanism, in one sentence."""

    def has(choice: Choice) -> str:
        return (
            f"an error of prefix sums of {_error_of(choice):.3g} clip norms on "
            f"{counted(choice.num_distinct, 'distinct example')} with {choice.mean_users_per_example:.2f} users each"
        )

    def name(choice: Choice) -> str:
        return f"{TITLES[choice.mechanism]} ({choice.label}, batches of {choice.batch_size:,})"

    comparison = "; ".join(f"{name(choice)} has {has(choice)}" for choice in others)
    sentence = f"Best predicted signal-to-noise, {_signal_of(best):.3g}: {name(best)} has {has(best)}"
    sentence += f", where {comparison}" if others else ""
    if least is best:
        return f"{sentence}; no row has less error."
    return f"{sentence}; the lowest error, {_error_of(least):.3g}, is that of {name(least)}, which keeps " + (
        f"{counted(least.num_distinct, 'distinct example')}."
    )
