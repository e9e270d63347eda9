"""How a user's copies reach the training steps: what the sampler does and the accounting counts.

One object is read by the sampler, the noise and the accountant, so they cannot disagree. All three classes say "noise
multiplier" in units of one example's clip norm. None of them claims anything: a claim needs a certificate.
"""

import dataclasses
import json
import math
from typing import Any

from coowned import validate
from coowned.certificate import ContributionCertificate
from coowned.errors import InputError, UncertifiableError


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoissonSampling:
    """DP-SGD: in each of `iterations` steps every copy is drawn by its own coin of probability `sampling_probability`.

    Attributes:
      contribution_bound: most copies that contain one user.
      sampling_probability: expected batch size over the number of copies (not of distinct examples).
      iterations: number of steps.
      batch_size: the public number that sums of gradients are divided by; accounting does not need it.

    Example:
      >>> PoissonSampling(contribution_bound=3, sampling_probability=0.01, iterations=2500).iterations
      2500

    References: Charles et al. (2024), https://arxiv.org/abs/2407.07737
    """

    contribution_bound: int
    sampling_probability: float
    iterations: int
    batch_size: int | None = None

    def __post_init__(self):
        _plain_numbers(self)
        validate.positive(contribution_bound=self.contribution_bound, iterations=self.iterations)
        validate.in_range(0, 1, open_low=True, sampling_probability=self.sampling_probability)
        _check_batch_size(self.batch_size)

    @classmethod
    def from_certificate(
        cls, certificate: ContributionCertificate, *, batch_size: int, iterations: int
    ) -> "PoissonSampling":
        """The mechanism for what was certified: the recounted bound, and p = batch_size / copies (not distinct).

        Guarantees:
          - The probability is batch_size over the number of copies.   (test_probability_counts_copies)
        """
        validate.positive(batch_size=batch_size)
        _refuse_nobody(certificate)
        if batch_size > certificate.size:
            raise InputError(
                f"batch_size must be at most the size of S ({certificate.size} copies), not {batch_size}; reduce it "
                "or raise the bound"
            )
        return cls(
            contribution_bound=certificate.contribution_bound,
            sampling_probability=batch_size / certificate.size,
            iterations=iterations,
            batch_size=batch_size,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, read back by `mechanism_from_dict`."""
        return {"kind": "poisson", **dataclasses.asdict(self)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> "PoissonSampling":
        return _from_json(cls, text)

    def for_copies(self, copies: int) -> "PoissonSampling":
        """The same training seen by somebody who is in `copies` copies."""
        validate.integer(at_least=1, at_most=self.contribution_bound, copies=copies)
        return dataclasses.replace(self, contribution_bound=copies)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MinSeparation:
    """DP-MF: a fixed schedule in which a user takes part at most `contribution_bound` times, `min_separation` apart.

    The noise is correlated by a lower triangular strategy of `num_bands` bands (C_ij = 0 for i - j >= num_bands). Two
    of a user's columns have no row in common exactly if they are num_bands apart, so her sensitivity is the root of
    the sum of her columns' squared norms: sqrt(contribution_bound) where no column is longer than 1.

    Attributes:
      contribution_bound: most participations of one user in the whole schedule.
      min_separation: any so many consecutive batches hold at most one copy of a user.
      num_bands: bands of the strategy, at most `min_separation`.
      iterations: number of steps, equal to the schedule's and the strategy's.
      sensitivity: for columns that are not 1: sqrt of the largest sum of squared column norms over one user's
        participations, rounded up. None: sqrt(contribution_bound) times `max_column_norm`.
      max_column_norm: an upper bound on the norm of every column. None: 1, or unknown where `sensitivity` is given.

    Guarantees:
      - More bands than the separation allows are refused.   (test_more_bands_than_separation_is_refused)

    Example:
      >>> MinSeparation(contribution_bound=9, min_separation=16, num_bands=16, iterations=2500).sensitivity_of(4)
      2.0

    References: Choquette-Choo et al. (2023), https://arxiv.org/abs/2306.08153
    """

    contribution_bound: int
    min_separation: int
    num_bands: int
    iterations: int
    sensitivity: float | None = None
    max_column_norm: float | None = None
    batch_size: int | None = None

    def __post_init__(self):
        _plain_numbers(self)
        _check_batch_size(self.batch_size)
        validate.positive(
            contribution_bound=self.contribution_bound,
            min_separation=self.min_separation,
            num_bands=self.num_bands,
            iterations=self.iterations,
        )
        if self.num_bands > self.min_separation:
            raise InputError(
                f"num_bands ({self.num_bands}) must not exceed min_separation ({self.min_separation}): columns closer"
                " than num_bands overlap and the sensitivity is no longer that of separate participations; use fewer"
                " bands or a schedule with more separation"
            )
        if self.sensitivity is not None:
            validate.positive_number(sensitivity=self.sensitivity)
        if self.max_column_norm is not None:
            validate.positive_number(max_column_norm=self.max_column_norm)

    @classmethod
    def from_certificate(
        cls,
        certificate: ContributionCertificate,
        *,
        num_bands: int | None = None,
        sensitivity: float | None = None,
        max_column_norm: float | None = None,
    ) -> "MinSeparation":
        """The mechanism for a certified schedule, with as many bands as its separation allows, or fewer."""
        _refuse_nobody(certificate)
        if certificate.min_separation is None or certificate.iterations is None:
            raise UncertifiableError("the certificate is not for a schedule; select with greedy-min-separation")
        if certificate.min_separation == 0:
            raise UncertifiableError("some batch of the schedule holds two copies of one user: no min separation holds")
        return cls(
            contribution_bound=certificate.contribution_bound,
            min_separation=certificate.min_separation,
            num_bands=certificate.min_separation if num_bands is None else num_bands,
            iterations=certificate.iterations,
            sensitivity=sensitivity,
            max_column_norm=max_column_norm,
            batch_size=certificate.batch_size,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, read back by `mechanism_from_dict`."""
        return {"kind": "min-separation", **dataclasses.asdict(self)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> "MinSeparation":
        return _from_json(cls, text)

    def sensitivity_of(self, participations: int) -> float:
        """An upper bound on the l2 sensitivity, in clip norms, of what one user adds in so many participations."""
        validate.integer(at_least=1, at_most=self.contribution_bound, participations=participations)
        if self.sensitivity is not None and self.max_column_norm is None:
            return self.sensitivity
        scaled = math.sqrt(participations) * (1.0 if self.max_column_norm is None else self.max_column_norm)
        return scaled if self.sensitivity is None else min(scaled, self.sensitivity)

    def for_copies(self, copies: int) -> "MinSeparation":
        """The same training seen by somebody who takes part `copies` times."""
        validate.integer(at_least=1, at_most=self.contribution_bound, copies=copies)
        return dataclasses.replace(
            self,
            contribution_bound=copies,
            sensitivity=None if self.sensitivity is None else self.sensitivity_of(copies),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CyclicPoisson:
    """Banded DP-MF with sampling: users are in groups, group g is drawn only in the steps t = g mod `num_groups`.

    Every copy is drawn by its own coin. Group g has ceil((iterations - g) / num_groups) rounds.

    Attributes:
      contribution_bound: most copies that contain one user, over all groups.
      sampling_probability: of every copy in its group's rounds; the largest where groups differ.
      iterations: number of steps.
      num_groups: number of groups of users.
      num_bands: bands of the strategy, at most `num_groups`; columns are at most 1 long.
      group_probabilities: each group's own probability, or None if all have `sampling_probability`.
      group_bounds: most copies of one user in each group, or None if all have `contribution_bound`; 0 for an empty
        group.

    Guarantees:
      - More bands than groups are refused.   (test_more_bands_than_groups_is_refused)
      - With one group it is `PoissonSampling`.   (test_cyclic_with_one_group_is_poisson)

    Example:
      >>> m = CyclicPoisson(contribution_bound=3, sampling_probability=0.08, iterations=10, num_groups=4, num_bands=4)
      >>> [m.rounds_of(group) for group in range(4)]
      [3, 3, 2, 2]

    References: Choquette-Choo et al. (2023), https://arxiv.org/abs/2306.08153
    """

    contribution_bound: int
    iterations: int
    num_groups: int
    num_bands: int
    sampling_probability: float | None = None
    group_probabilities: tuple[float, ...] | None = None
    group_bounds: tuple[int, ...] | None = None
    batch_size: int | None = None

    def __post_init__(self):
        _plain_numbers(self)
        _check_batch_size(self.batch_size)
        validate.positive(
            contribution_bound=self.contribution_bound,
            iterations=self.iterations,
            num_groups=self.num_groups,
            num_bands=self.num_bands,
        )
        if self.num_bands > self.num_groups:
            raise InputError(
                f"num_bands ({self.num_bands}) must not exceed num_groups ({self.num_groups}): a group's next round"
                " would fall into rows its last round still reaches; use fewer bands or more groups"
            )
        if self.group_probabilities is not None:
            object.__setattr__(self, "group_probabilities", tuple(self.group_probabilities))
            validate.same_length(self.num_groups, group_probabilities=self.group_probabilities)
            for probability in self.group_probabilities:
                validate.in_range(0, 1, group_probabilities=probability)
            largest = max(self.group_probabilities)
            if self.sampling_probability is None:
                object.__setattr__(self, "sampling_probability", largest)
            elif self.sampling_probability != largest:
                raise InputError(
                    f"sampling_probability ({self.sampling_probability}) must be the largest of group_probabilities"
                    f" ({largest}) or left out"
                )
        if self.sampling_probability is None:
            raise InputError("sampling_probability or group_probabilities must be given")
        validate.in_range(0, 1, open_low=True, sampling_probability=self.sampling_probability)
        if self.group_bounds is not None:
            object.__setattr__(self, "group_bounds", tuple(self.group_bounds))
            validate.same_length(self.num_groups, group_bounds=self.group_bounds)
            for bound in self.group_bounds:
                validate.integer(at_least=0, at_most=self.contribution_bound, group_bounds=bound)
            if max(self.group_bounds) != self.contribution_bound:
                raise InputError(
                    f"the largest of group_bounds ({max(self.group_bounds)}) must be contribution_bound"
                    f" ({self.contribution_bound})"
                )

    @classmethod
    def from_certificate(
        cls, certificate: ContributionCertificate, *, batch_size: int, iterations: int, num_bands: int | None = None
    ) -> "CyclicPoisson":
        """The mechanism for certified groups: each with its own bound and p_g = min(1, batch_size / its copies)."""
        validate.positive(batch_size=batch_size)
        _refuse_nobody(certificate)
        sizes, bounds = certificate.group_sizes, certificate.group_bounds
        if certificate.groups is None or sizes is None or bounds is None:
            raise UncertifiableError(
                "the certificate does not prove that every user is in one group only, which cyclic sampling needs; "
                "select with groups"
            )
        return cls(
            contribution_bound=certificate.contribution_bound,
            iterations=iterations,
            num_groups=len(sizes),
            num_bands=len(sizes) if num_bands is None else num_bands,
            group_probabilities=tuple(min(1.0, batch_size / size) if size else 0.0 for size in sizes),
            group_bounds=bounds,
            batch_size=batch_size,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, read back by `mechanism_from_dict`."""
        return {"kind": "cyclic", **dataclasses.asdict(self)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> "CyclicPoisson":
        return _from_json(cls, text)

    def rounds_of(self, group: int) -> int:
        """Number of steps in which the group can be drawn."""
        validate.integer(at_least=0, at_most=self.num_groups - 1, group=group)
        return max(0, -(-(self.iterations - group) // self.num_groups))

    def probability_of(self, group: int) -> float:
        """The coin of every copy in the group."""
        validate.integer(at_least=0, at_most=self.num_groups - 1, group=group)
        assert self.sampling_probability is not None
        return self.sampling_probability if self.group_probabilities is None else self.group_probabilities[group]

    def bound_of(self, group: int) -> int:
        """Most copies of one user in the group."""
        validate.integer(at_least=0, at_most=self.num_groups - 1, group=group)
        return self.contribution_bound if self.group_bounds is None else self.group_bounds[group]

    def for_copies(self, copies: int, *, group: int | None = None) -> "CyclicPoisson":
        """The same training seen by somebody with `copies` copies, in a known group or in whichever is worst."""
        validate.integer(at_least=1, at_most=self.contribution_bound, copies=copies)
        if group is None:
            bounds = None if self.group_bounds is None else tuple(min(bound, copies) for bound in self.group_bounds)
        else:
            validate.integer(at_least=1, at_most=self.bound_of(group), copies=copies)
            bounds = tuple(copies if other == group else 0 for other in range(self.num_groups))
        return dataclasses.replace(self, contribution_bound=copies, group_bounds=bounds)


Mechanism = PoissonSampling | MinSeparation | CyclicPoisson


def mechanism_from_dict(stored: dict[str, Any]) -> Mechanism:
    """Reads `to_dict()` back.

    >>> mechanism = PoissonSampling(contribution_bound=2, sampling_probability=0.5, iterations=3)
    >>> mechanism_from_dict(mechanism.to_dict()) == mechanism
    True
    """
    fields = dict(stored)
    kinds = {"poisson": PoissonSampling, "min-separation": MinSeparation, "cyclic": CyclicPoisson}
    kind = kinds.get(fields.pop("kind", ""))
    if kind is None or not set(fields) <= {field.name for field in dataclasses.fields(kind)}:
        raise InputError(f"not the fields of a mechanism: {sorted(stored)}; make it again")
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})


def _from_json(kind: type[Any], text: str) -> Any:
    try:
        stored = json.loads(text)
    except ValueError as error:
        raise InputError(f"the mechanism is not JSON ({error}); make it again") from None
    made = mechanism_from_dict(stored) if isinstance(stored, dict) else None
    if not isinstance(made, kind):
        raise InputError(f"a {kind.__name__} was expected; make it again")
    return made


def _plain_numbers(mechanism: Any) -> None:
    """Numbers of numpy become Python's, so that what is stored is plain JSON."""
    for field in dataclasses.fields(mechanism):
        value = getattr(mechanism, field.name)
        if hasattr(value, "item"):
            object.__setattr__(mechanism, field.name, value.item())


def _check_batch_size(batch_size: int | None) -> None:
    if batch_size is not None:
        validate.positive(batch_size=batch_size)


def _refuse_nobody(certificate: ContributionCertificate) -> None:
    if not isinstance(certificate, ContributionCertificate):
        kind = type(certificate).__name__
        raise InputError(f"a ContributionCertificate is needed, not {kind}; make one with certify")
    if certificate.contribution_bound == 0:
        raise UncertifiableError("no protected user is in the training set: nobody to make a claim for; select again")
