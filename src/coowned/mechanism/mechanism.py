"""Defines a mechanism: how one user's copies reach the steps, for the sampler, the noise and the accountant.

One frozen object answers all of them, so they cannot disagree. To add a mechanism, write one file with a subclass of
`Mechanism` and add it to `coowned.mechanism.registry`. A mechanism claims nothing: a claim needs a certificate.
Noise multipliers are in units of one example's clip norm.
"""

import abc
import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from coowned import codec, validate
from coowned.attribution.graph import AttributionGraph
from coowned.certificate import ContributionCertificate
from coowned.errors import CertificateMismatchError, InputError, UncertifiableError
from coowned.exact.keys import RunKey
from coowned.mechanism.banded_strategy import BandedStrategy
from coowned.mechanism.batching import Batches, GroupedBatches
from coowned.progress import counted
from coowned.selection.selector import Schedule, Selection

if TYPE_CHECKING:  # a training plans nothing
    from coowned.mechanism.candidates import Attempt, SearchSpace

Selected = Selection | Schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps:
    """The accountant's view of `repetitions` independent steps, each drawing `copies` copies with `probability`.

    `probability` 1 makes it a Gaussian of sensitivity `copies`, composed in closed form. With `rounds_per_epoch` above
    1 the steps are not independent: the one copy is in exactly one of every so many steps, drawn uniformly.
    """

    copies: int
    probability: float
    noise_multiplier: float
    repetitions: int
    rounds_per_epoch: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WorstUser:
    """The audit's view of a user who takes part as often as the mechanism allows."""

    copies: int  # of theirs in S; participations for a schedule
    probability: float  # of each copy in each round
    rounds: npt.NDArray[np.int64]  # (rounds,) the steps in which they may take part
    group: int = 0  # of the user; 0 where there are no groups
    rounds_per_epoch: int = 1  # above 1, the copy is in exactly one of every so many rounds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mechanism(abc.ABC):
    """Base of all mechanisms, which are frozen dataclasses.

    Guarantees:
      - Every mechanism in the registry passes the same contract.   (test_contract_of_every_mechanism)
      - A certificate that falls short in any way is refused.   (test_every_disagreement_is_refused)
    """

    kind: ClassVar[str]  # in stored files and `coowned calibrate --mechanism`
    training_kind: ClassVar[str]  # in `[mechanism] kind` of a training configuration
    options: ClassVar[tuple[str, ...]] = ()  # of `[mechanism]`, beside batch_size and iterations
    needs_schedule: ClassVar[bool] = False  # batches are a fixed Schedule, without coins
    needs_groups: ClassVar[bool] = False  # a group's copies are drawn with batch_size / (copies of the group)

    contribution_bound: int  # most copies that contain one user
    iterations: int
    batch_size: int | None = None  # the public number that sums of gradients are divided by, not needed for accounting

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if hasattr(value, "item"):  # a numpy number: what is stored must be plain JSON
                object.__setattr__(self, field.name, value.item())
        validate.positive(contribution_bound=self.contribution_bound, iterations=self.iterations)
        if self.batch_size is not None:
            validate.positive(batch_size=self.batch_size)

    # ---- certificates

    @classmethod
    def from_certificate(
        cls,
        certificate: ContributionCertificate,
        *,
        batch_size: int | None = None,
        iterations: int | None = None,
        num_bands: int | None = None,
        protects: bool = True,
        **settings: Any,
    ) -> Self:
        """Creates the mechanism for what was certified, with the recounted bound.

        Args:
          batch_size, iterations: needed unless the certificate is for a schedule, which has its own.
          num_bands: of a banded strategy; as many as the certificate allows by default.
          protects: False for training without a guarantee, where the certificate may find nobody to protect.
          settings: further fields of the mechanism.
        """
        bound = bound_for(certificate, protects=protects)
        if not cls.needs_schedule and (batch_size is None or iterations is None):
            raise InputError(f"The mechanism {cls.kind!r} needs batch_size and iterations (--batch-size, --iterations)")
        if batch_size is not None:
            validate.positive(batch_size=batch_size)
        fields = cls._certified_fields(certificate, batch_size)
        if num_bands not in (None, fields.get("num_bands", 1)):
            if "num_bands" not in fields:
                raise InputError(f"The mechanism {cls.kind!r} has independent noise; remove num_bands or use another")
            fields["num_bands"] = num_bands
        for name, value in (("batch_size", batch_size), ("iterations", iterations)):
            if value not in (None, fields.setdefault(name, value)):
                raise InputError(f"{name} {value} is not the schedule's ({fields[name]}); remove it")
        return cls(contribution_bound=bound, **fields, **settings)

    @classmethod
    @abc.abstractmethod
    def _certified_fields(cls, certificate: ContributionCertificate, batch_size: int | None) -> dict[str, Any]:
        """Returns the fields that follow from the certificate, beside the bound; num_bands is the most it allows."""

    def check_certificate(self, certificate: ContributionCertificate) -> None:
        """Raises UncertifiableError if the certificate proves less than this mechanism needs."""
        bound_for(certificate)
        if self.contribution_bound < certificate.contribution_bound:
            raise UncertifiableError(
                f"the mechanism has contribution bound {self.contribution_bound}, but a recount found a user in "
                f"{certificate.contribution_bound} copies; create it with from_certificate"
            )
        self._check_certificate(certificate)

    def _check_certificate(self, certificate: ContributionCertificate) -> None:
        """Checks what this mechanism needs beyond the contribution bound."""
        if certificate.schedule is not None:
            raise UncertifiableError("the certificate is for a fixed schedule, which is not drawn; use MinSeparation")

    # ---- training

    @abc.abstractmethod
    def batches(self, selected: Selected, *, run_key: RunKey, multiple_of: int = 8) -> Batches:
        """Returns the sampler."""

    def _drawing(self, selected: Selected, run_key: RunKey, multiple_of: int) -> dict[str, Any]:
        """Returns the fields that every sampler of a selection has."""
        assert isinstance(selected, Selection)
        own = {"batch_size": self.batch_size or 1, "iterations": self.iterations}
        return {"selection": selected, **own, "run_key": run_key, "multiple_of": multiple_of}

    def strategy(self) -> BandedStrategy | None:
        """Returns the strategy with the least error for the mechanism's bands; None for independent noise."""
        return None

    def check_strategy(self, strategy: BandedStrategy | None) -> BandedStrategy | None:
        """Returns the strategy to use: the given one if it fits this mechanism, by default the best one."""
        if strategy is not None and strategy.num_bands != 1:
            raise InputError(f"{type(self).__name__} has independent noise; remove the strategy")
        return strategy

    def check_selected(self, selected: Selected) -> None:
        """Raises CertificateMismatchError if the selection's batches are not those accounted for."""
        if self.needs_schedule != isinstance(selected, Schedule):
            raise CertificateMismatchError(
                f"{type(self).__name__} needs a {'schedule' if self.needs_schedule else 'selection'}, not a "
                f"{type(selected).__name__}; select again"
            )

    def check_sensitivity(self, selected: Selected, graph: AttributionGraph, strategy: BandedStrategy | None) -> None:
        """Raises CertificateMismatchError if a user adds more under the strategy than was accounted for."""
        self.check_strategy(strategy)

    @property
    def cycle_length(self) -> int:
        """Number of groups that take turns: steps after which the same copies may be drawn again."""
        return 1

    def rounds_of(self, group: int) -> int:
        """Returns the number of steps in which the group can be drawn."""
        validate.integer(at_least=0, at_most=self.cycle_length - 1, group=group)
        return len(range(group, self.iterations, self.cycle_length))

    def bound_of(self, group: int) -> int:
        """Returns the most copies of one user in the group."""
        return self.contribution_bound

    def probability_of(self, group: int) -> float:
        """Returns the probability of every copy of the group in each of its rounds; 1 where nothing is drawn."""
        return 1.0

    def expected_copies(self, certificate: ContributionCertificate) -> int:
        """Returns an upper bound on the expected number of copies in a step."""
        assert self.batch_size is not None
        return self.batch_size

    def drawn_share(self, certificate: ContributionCertificate) -> float:
        """Returns the mean size of a batch, over that which coins for the same batch size would give."""
        return 1.0

    # ---- accounting

    def user_steps(self, noise_multiplier: float) -> list[Steps]:
        """Returns the steps to account for one user, with an entry for every kind of user that could be the worst off.

        These are the groups, without those that have no more copies, probability and rounds than another one.
        """
        groups = range(self.cycle_length)
        kinds = {(self.bound_of(group), self.probability_of(group), self.rounds_of(group)) for group in groups}
        kinds = {kind for kind in kinds if min(kind) > 0}
        worst = [
            kind
            for kind in sorted(kinds)
            if not any(other != kind and all(a >= b for a, b in zip(other, kind, strict=True)) for other in kinds)
        ]
        return [
            Steps(copies=copies, probability=probability, noise_multiplier=noise_multiplier, repetitions=rounds)
            for copies, probability, rounds in worst
        ]

    def for_copies(self, copies: int, *, group: int | None = None) -> Self:
        """Returns the same training as seen by a user in `copies` copies (participations for a schedule)."""
        if group is not None and not self.needs_groups:
            raise InputError(f"group ({group}) does not apply to {type(self).__name__}; remove it")
        validate.integer(at_least=1, at_most=self.contribution_bound, copies=copies)
        return self._for_copies(copies, group)

    def _for_copies(self, copies: int, group: int | None) -> Self:
        return dataclasses.replace(self, contribution_bound=copies)

    def for_example(self, certificate: ContributionCertificate) -> Self:
        """Returns the same training as seen by one example, wherever in S it is, whether it has users or not."""
        copies = max(1, certificate.most_copies_of_one_example)
        return dataclasses.replace(self, contribution_bound=copies)

    def with_batch_size(self, batch_size: int, certificate: ContributionCertificate) -> Self:
        """Returns the same training with another expected batch size, for a simulated epsilon."""
        raise InputError(
            f"simulated_batch_size applies to Poisson sampling only, not to {type(self).__name__}; remove it"
        )

    def after(self, step: int) -> Self:
        """Returns the first `step` steps of the training, as if the run had been meant to end there."""
        return dataclasses.replace(self, iterations=step)

    def levels(self, certificate: ContributionCertificate) -> list[dict[str, Any]]:
        """Returns rows of `copies` and `users`: how many users are in 0, 1, ... copies."""
        histogram = certificate.copies_per_user
        return [
            {"copies": copies, "users": histogram[copies] if copies < len(histogram) else 0}
            for copies in range(self.contribution_bound + 1)
        ]

    # ---- plans

    @classmethod
    def candidates(cls, space: "SearchSpace") -> "Iterator[Attempt]":
        """Yields what a plan tries for this mechanism: by default, every selector with every bound."""
        return space.every_selection()

    @classmethod
    def for_size(cls, *, contribution_bound: int, size: int, batch_size: int, iterations: int) -> Self | None:
        """Returns the mechanism for any S of this size; None if more than its size matters."""
        return None

    # ---- statements and audits

    @abc.abstractmethod
    def describe(self) -> str:
        """Describes how batches are made, as the middle of a sentence of the privacy statement."""

    def worst_user(self, strategy: BandedStrategy | None) -> WorstUser:
        """Returns a user who takes part as often as was accounted for."""

        def weight(group: int) -> float:
            return self.bound_of(group) * self.probability_of(group) * math.sqrt(self.rounds_of(group))

        group = max(filter(self.bound_of, range(self.cycle_length)), key=weight)
        return WorstUser(
            copies=self.bound_of(group),
            probability=self.probability_of(group),
            rounds=np.arange(group, self.iterations, self.cycle_length),
            group=group,
        )

    # ---- storage

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, read back by `coowned.mechanism.registry.mechanism_from_dict`."""
        return {"kind": self.kind, **dataclasses.asdict(self)}

    def to_json(self) -> str:
        return codec.encode_json(self.to_dict())

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Self:
        """Reads `to_dict()` back."""
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in stored.items() if name != "kind"
        }
        known = {field.name: field.default is dataclasses.MISSING for field in dataclasses.fields(cls)}
        required = {name for name, needed in known.items() if needed}
        if stored.get("kind") != cls.kind or not required <= fields.keys() <= known.keys():
            raise InputError(f"expected the fields of a {cls.__name__}, not {sorted(stored)}; write it again")
        return cls(**fields)

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls.from_dict(codec.decode_json(dict, text, name="mechanism", remedy="make it again"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BandedMechanism(Mechanism):
    """Base of mechanisms whose noise is correlated by a banded strategy (DP-MF)."""

    num_bands: int  # bands of the strategy (C_ij = 0 for i - j >= num_bands)

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.positive(num_bands=self.num_bands)

    def strategy(self) -> BandedStrategy:
        return BandedStrategy(num_bands=self.num_bands, iterations=self.iterations)

    def check_strategy(self, strategy: BandedStrategy | None) -> BandedStrategy:
        if strategy is None:
            return self.strategy()
        if (strategy.num_bands, strategy.iterations) != (self.num_bands, self.iterations):
            raise InputError(
                f"the strategy must have {self.num_bands} bands and {self.iterations} iterations, as the mechanism has"
            )
        return strategy


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedMechanism(BandedMechanism):
    """Base of mechanisms in which groups of users take turns: group g has the steps t = g mod `num_groups`."""

    num_groups: int
    group_bounds: tuple[int, ...] | None = None  # most copies of one user in each group; None: all the same

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.positive(num_groups=self.num_groups)
        if self.num_bands > self.num_groups:
            raise InputError(
                f"num_bands ({self.num_bands}) must not exceed num_groups ({self.num_groups}): a group's next round"
                " would fall into rows its last round still reaches; use fewer bands or more groups"
            )
        if self.group_bounds is not None:
            object.__setattr__(self, "group_bounds", tuple(self.group_bounds))
            validate.same_length(self.num_groups, group_bounds=self.group_bounds)
            for bound in self.group_bounds:
                validate.integer(at_least=0, at_most=self.contribution_bound, group_bounds=bound)
            if max(self.group_bounds) != self.contribution_bound:
                raise InputError(f"the largest of group_bounds must be contribution_bound ({self.contribution_bound})")

    @property
    def cycle_length(self) -> int:
        return self.num_groups

    def _check_certificate(self, certificate: ContributionCertificate) -> None:
        super()._check_certificate(certificate)
        groups = certificate.groups
        found = len(groups.sizes) if groups else 1
        if found > self.num_groups or (groups is None and self.num_groups > 1):
            raise UncertifiableError(
                f"the certificate proves {counted(found, 'group')} of users, the mechanism has {self.num_groups}; use "
                "from_certificate"
            )
        for group, bound in enumerate(groups.bounds if groups else ()):
            if bound > self.bound_of(group):
                copies = counted(bound, "copy", "copies")
                raise UncertifiableError(
                    f"group {group} has a user in {copies}, not {self.bound_of(group)}; use from_certificate"
                )

    def check_selected(self, selected: Selected) -> None:
        super().check_selected(selected)
        batches = self.batches(selected, run_key=RunKey.from_seed(0))  # refuses other groups; nothing is drawn
        assert isinstance(batches, GroupedBatches)
        for group, probability in enumerate(batches.group_probabilities):
            accounted = self.probability_of(group)
            if probability > accounted:
                raise CertificateMismatchError(
                    f"group {group} would be drawn with {probability:.6g}, not {accounted:.6g}; use from_certificate"
                )

    def bound_of(self, group: int) -> int:
        validate.integer(at_least=0, at_most=self.num_groups - 1, group=group)
        return self.contribution_bound if self.group_bounds is None else self.group_bounds[group]


def check_mechanism(mechanism: Any) -> None:
    """Refuses what is not a mechanism."""
    if not isinstance(mechanism, Mechanism):
        raise InputError(f"{type(mechanism).__name__} is not a mechanism; use PoissonSampling.from_certificate")


def bound_for(certificate: ContributionCertificate, *, protects: bool = True) -> int:
    """Returns the certified contribution bound; with `protects`, refuses where there is nobody to protect."""
    if not isinstance(certificate, ContributionCertificate):
        raise InputError(
            f"certificate must be a ContributionCertificate, not {type(certificate).__name__}; create one with certify"
        )
    if protects and certificate.contribution_bound == 0:
        raise UncertifiableError(
            "no protected user is in the training set, so there is nobody to protect; select again"
        )
    return max(1, certificate.contribution_bound)
