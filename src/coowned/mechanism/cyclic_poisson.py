"""Implements cyclic DP-MF, with sampling: each group of users is drawn only in its own steps."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, Self

from coowned import validate
from coowned.certificate import CertifiedGroups, ContributionCertificate
from coowned.errors import InputError, UncertifiableError
from coowned.exact.keys import RunKey
from coowned.mechanism.batching import CyclicPoissonBatches
from coowned.mechanism.candidates import TOO_SMALL, TOO_SMALL_FOR_GROUPS, Attempt, Candidate, SearchSpace
from coowned.mechanism.mechanism import GroupedMechanism, Selected
from coowned.progress import counted

_NUMBERS_OF_GROUPS = (2, 4, 8, 16, 32, 64)  # that a plan tries


@dataclasses.dataclass(frozen=True, kw_only=True)
class CyclicPoisson(GroupedMechanism):
    """Draws group g of users only in the steps t = g mod `num_groups`.

    Every copy is drawn by its own coin. Group g has ceil((iterations - g) / num_groups) rounds. From a certificate each
    group has its own bound, and the probability min(1, batch_size / its copies).

    Attributes:
      sampling_probability: of every copy in its group's rounds; the largest where groups differ.
      num_groups: number of groups of users.
      num_bands: bands of the strategy, at most `num_groups`; columns are at most 1 long.
      group_probabilities: each group's own probability, or None if all have `sampling_probability`.
      group_bounds: most copies of one user in each group (0 if it is empty), or None if all have `contribution_bound`.

    Guarantees:
      - More bands than groups are refused.   (test_more_bands_than_groups_is_refused)
      - With one group it is `PoissonSampling`: the same epsilon, coins and trained model, to the bit.
        (test_cyclic_with_one_group_is_poisson, test_one_group_is_dp_sgd_to_the_bit)
      - The smallest and largest probability of the groups are in every statement.   (test_statement_of_groups)

    Example:
      >>> m = CyclicPoisson(contribution_bound=3, sampling_probability=0.08, iterations=10, num_groups=4, num_bands=4)
      >>> [m.rounds_of(group) for group in range(4)]
      [3, 3, 2, 2]

    References: Choquette-Choo et al. (2023), https://arxiv.org/abs/2306.08153
    """

    kind = "cyclic"
    training_kind = "cyclic-dp-mf"
    options = ("num_bands",)
    needs_groups = True

    sampling_probability: float | None = None
    group_probabilities: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
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
                    f"sampling_probability must be the largest of group_probabilities ({largest}) or left out"
                )
        if self.sampling_probability is None:
            raise InputError("sampling_probability or group_probabilities must be given")
        validate.in_range(0, 1, open_low=True, sampling_probability=self.sampling_probability)

    @classmethod
    def _certified_fields(cls, certificate: ContributionCertificate, batch_size: int | None) -> dict[str, Any]:
        assert batch_size is not None
        groups = _certified_groups(certificate)
        sizes, bounds = groups.sizes, groups.bounds
        return {
            "num_groups": len(sizes),
            "num_bands": len(sizes),
            "group_probabilities": tuple(min(1.0, batch_size / size) if size else 0.0 for size in sizes),
            "group_bounds": bounds if any(bounds) else None,  # None: nobody to protect
        }

    def _check_certificate(self, certificate: ContributionCertificate) -> None:
        _certified_groups(certificate)
        super()._check_certificate(certificate)

    def batches(self, selected: Selected, *, run_key: RunKey, multiple_of: int = 8) -> CyclicPoissonBatches:
        return CyclicPoissonBatches(**self._drawing(selected, run_key, multiple_of), num_groups=self.num_groups)

    def probability_of(self, group: int) -> float:
        """Returns the probability of every copy's coin in the group."""
        validate.integer(at_least=0, at_most=self.num_groups - 1, group=group)
        assert self.sampling_probability is not None
        return self.sampling_probability if self.group_probabilities is None else self.group_probabilities[group]

    def _for_copies(self, copies: int, group: int | None) -> Self:
        """Narrows to a known group, or to whichever is worst."""
        if group is None:
            bounds = None if self.group_bounds is None else tuple(min(bound, copies) for bound in self.group_bounds)
        else:
            validate.integer(at_least=1, at_most=self.bound_of(group), copies=copies)
            bounds = tuple(copies if other == group else 0 for other in range(self.num_groups))
        return dataclasses.replace(self, contribution_bound=copies, group_bounds=bounds)

    def for_example(self, certificate: ContributionCertificate) -> Self:
        copies = max(1, certificate.most_copies_of_one_example)
        sizes = certificate.groups.sizes if certificate.groups else ()
        bounds = tuple(copies if group < len(sizes) and sizes[group] else 0 for group in range(self.num_groups))
        return dataclasses.replace(self, contribution_bound=copies, group_bounds=bounds)

    def levels(self, certificate: ContributionCertificate) -> list[dict[str, Any]]:
        """Returns a row per group and number of copies; users in no copy are in group -1."""
        histogram = certificate.copies_per_user
        levels = [{"group": -1, "sampling_probability": 0.0, "copies": 0, "users": histogram[0] if histogram else 0}]
        width = certificate.contribution_bound + 1
        for index, users in enumerate(certificate.groups.copies_per_user if certificate.groups else ()):
            group, copies = divmod(index, width)
            if 0 < copies <= self.bound_of(group):
                probability = self.probability_of(group)
                levels.append({"group": group, "sampling_probability": probability, "copies": copies, "users": users})
        return levels

    @classmethod
    def candidates(cls, space: SearchSpace) -> Iterator[Attempt]:
        """Tries every bound, with duplicates too where these are among the selectors."""
        for duplicates in (False, True):
            for bound in space.contribution_bounds:
                if not duplicates or (bound > 1 and "greedy-with-duplicates" in space.selectors):
                    make = functools.partial(_grouped_candidates, space, bound, duplicates)
                    yield Attempt(f"cyclic-groups, bound {bound}", make)

    def describe(self) -> str:
        drawn = [p for p in map(self.probability_of, range(self.num_groups)) if p > 0]
        spread = f"{drawn[0]:.10g}" if min(drawn) == max(drawn) else f"{min(drawn):.10g} to {max(drawn):.10g} by group"
        return (
            f"cyclic Poisson sampling over {counted(self.num_groups, 'group')} of users with noise correlated over "
            f"{counted(self.num_bands, 'band')}; every copy has its own coin in its group's rounds, of probability "
            f"{spread}"
        )


def _grouped_candidates(space: SearchSpace, bound: int, duplicates: bool) -> list[Candidate]:
    free = space.select("greedy-with-duplicates" if duplicates else "greedy", contribution_bound=bound)
    number = best_number_of_groups(space, bound, free.size)
    if number is None:
        note = TOO_SMALL if free.size < space.batch_size else TOO_SMALL_FOR_GROUPS
        return [Candidate(selector="cyclic-groups", selected=free, note=note)]
    settings = {"num_groups": number, "contribution_bound": bound, "allow_duplicates": duplicates}
    return [
        Candidate(
            selector="cyclic-groups",
            selected=space.select("cyclic-groups", **settings),
            contribution_bound=bound,
            allow_duplicates=duplicates,
        )
    ]


def best_number_of_groups(space: SearchSpace, bound: int, size: int) -> int | None:
    """Returns the number with the least error if S were divided evenly; None where two groups have no batch each."""
    most = min(size // space.batch_size, space.iterations)
    errors: dict[int, float] = {}
    for number in (number for number in _NUMBERS_OF_GROUPS if number <= most):
        mechanism = CyclicPoisson(
            contribution_bound=bound,
            sampling_probability=space.batch_size * number / size,
            iterations=space.iterations,
            num_groups=number,
            num_bands=number,
        )
        with contextlib.suppress(UncertifiableError):
            errors[number] = space.noise_for(mechanism) * mechanism.strategy().error_factor()
    return min(errors, key=errors.__getitem__, default=None)


def _certified_groups(certificate: ContributionCertificate) -> CertifiedGroups:
    if certificate.groups is None:
        raise UncertifiableError(
            "the certificate does not prove that every user is in one group only, which cyclic sampling needs; "
            "select with groups"
        )
    return certificate.groups
