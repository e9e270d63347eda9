"""Implements DP-MF: a fixed schedule with separated participations, and noise correlated over a band."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, Self

import numpy as np

from coowned import validate
from coowned.attribution.graph import AttributionGraph
from coowned.certificate import CertifiedSchedule, ContributionCertificate, separation_in_words
from coowned.errors import CertificateMismatchError, InfeasibleScheduleError, InputError, UncertifiableError
from coowned.exact.keys import RunKey
from coowned.mechanism.banded_strategy import BandedStrategy
from coowned.mechanism.batching import ScheduledBatches
from coowned.mechanism.candidates import Attempt, Candidate, SearchSpace
from coowned.mechanism.mechanism import BandedMechanism, Selected, Steps, WorstUser
from coowned.progress import counted
from coowned.selection.selector import Schedule

_SEPARATED, _BOUNDED = "greedy-min-separation", "priced-min-separation"  # the selectors that a plan tries
_SEPARATION_SHARES = (1, 2, 4)  # of the largest min separation: what a plan tries
_SPREAD_SHARES = (1.0, 0.85, 0.7, 0.5, 0.3)  # of the separation that a bound on participations leaves room for
_ROUNDING = 2.0**-40  # sqrt(k) may be rounded down in its last digit; the noise's own margin is far larger


@dataclasses.dataclass(frozen=True, kw_only=True)
class MinSeparation(BandedMechanism):
    """Trains on a fixed schedule: a user takes part at most `contribution_bound` times, `min_separation` apart.

    The noise is correlated by a lower triangular strategy of `num_bands` bands (C_ij = 0 for i - j >= num_bands). Two
    of a user's columns have no row in common exactly if they are num_bands apart, so their sensitivity is the root of
    the sum of the columns' squared norms: sqrt(contribution_bound) where no column is longer than 1.

    Attributes:
      min_separation: any so many consecutive batches hold at most one copy of a user.
      num_bands: bands of the strategy, at most `min_separation`; from a certificate as many, by default.
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

    kind = "min-separation"
    training_kind = "dp-mf"
    options = ("num_bands", "min_separation")
    needs_schedule = True

    min_separation: int
    sensitivity: float | None = None
    max_column_norm: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.positive(min_separation=self.min_separation)
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
    def _certified_fields(cls, certificate: ContributionCertificate, batch_size: int | None) -> dict[str, Any]:
        schedule = _certified_schedule(certificate)
        return {"num_bands": schedule.min_separation, **vars(schedule)}

    def _check_certificate(self, certificate: ContributionCertificate) -> None:
        schedule = _certified_schedule(certificate)
        separation = schedule.min_separation
        for name in ("min_separation", "num_bands"):
            if getattr(self, name) > separation:
                raise UncertifiableError(
                    f"{name} ({getattr(self, name)}) is above the certified min_separation ({separation}); reduce it"
                )
        if self.sensitivity is not None and self.sensitivity < self.contribution_bound**0.5:
            raise UncertifiableError(f"a certificate cannot prove a sensitivity of {self.sensitivity:.6g}; remove it")
        if self.max_column_norm is not None and self.max_column_norm < 1:
            raise UncertifiableError("a certificate cannot prove columns shorter than 1; remove max_column_norm")
        if self.iterations != schedule.iterations:
            raise UncertifiableError(
                f"the mechanism has {self.iterations} iterations, the schedule {schedule.iterations}"
            )

    def batches(self, selected: Selected, *, run_key: RunKey, multiple_of: int = 8) -> ScheduledBatches:
        assert isinstance(selected, Schedule)
        return ScheduledBatches(schedule=selected, multiple_of=multiple_of)

    def check_selected(self, selected: Selected) -> None:
        super().check_selected(selected)
        assert isinstance(selected, Schedule)
        if (selected.iterations, selected.batch_size) != (self.iterations, self.batch_size):
            raise CertificateMismatchError("the mechanism has other batches than the schedule; use from_certificate")

    def check_sensitivity(self, selected: Selected, graph: AttributionGraph, strategy: BandedStrategy | None) -> None:
        assert isinstance(selected, Schedule)
        measured = self.check_strategy(strategy).sensitivity_of(selected, graph)
        accounted = self.sensitivity_of(self.contribution_bound)
        if measured > accounted * (1 + _ROUNDING):
            raise CertificateMismatchError(
                f"one user can change what is released by {measured:.6g} clip norms, but {accounted:.6g} was accounted "
                "for; create the mechanism with sensitivity=strategy.sensitivity_of(schedule, graph)"
            )

    def sensitivity_of(self, participations: int) -> float:
        """Returns an upper bound on the l2 sensitivity, in clip norms, to one user in so many participations."""
        validate.integer(at_least=1, at_most=self.contribution_bound, participations=participations)
        if self.sensitivity is not None and self.max_column_norm is None:
            return self.sensitivity
        scaled = math.sqrt(participations) * (1.0 if self.max_column_norm is None else self.max_column_norm)
        return scaled if self.sensitivity is None else min(scaled, self.sensitivity)

    def user_steps(self, noise_multiplier: float) -> list[Steps]:
        sensitivity = self.sensitivity_of(self.contribution_bound)
        return [Steps(copies=1, probability=1.0, noise_multiplier=noise_multiplier / sensitivity, repetitions=1)]

    def _for_copies(self, copies: int, group: int | None) -> Self:
        sensitivity = None if self.sensitivity is None else self.sensitivity_of(copies)
        return dataclasses.replace(self, contribution_bound=copies, sensitivity=sensitivity)

    def for_example(self, certificate: ContributionCertificate) -> Self:
        copies = max(1, certificate.most_copies_of_one_example)
        # The separation was counted for users: copies of an example without any may be closer, and columns overlap.
        separated = certificate.num_copies_without_users == 0
        norm = 1.0 if self.max_column_norm is None else max(1.0, self.max_column_norm)
        sensitivity = norm * (copies**0.5 if separated else copies)
        return dataclasses.replace(self, contribution_bound=copies, sensitivity=sensitivity, max_column_norm=None)

    def after(self, step: int) -> Self:
        participations = min(self.contribution_bound, -(-step // self.min_separation))
        return dataclasses.replace(self.for_copies(participations), iterations=step)

    @classmethod
    def candidates(cls, space: SearchSpace) -> Iterator[Attempt]:
        """Tries the largest separation of a greedy schedule, and the smallest bound that needs no example twice."""
        yield Attempt(_SEPARATED, functools.partial(_separated_candidates, space))
        yield Attempt(_BOUNDED, functools.partial(_bounded_candidates, space))

    def describe(self) -> str:
        return (
            f"a fixed schedule in which {separation_in_words(self.min_separation)}, with noise correlated over "
            f"{counted(self.num_bands, 'band')} (DP-MF; no column of the strategy is longer than 1; no amplification "
            "by sampling)"
        )

    def worst_user(self, strategy: BandedStrategy | None) -> WorstUser:
        """Returns a user who takes part as often as they may, and adds no more than was accounted for.

        Where the accounted sensitivity is below sqrt(bound), because users are late in the schedule where columns are
        short, the last participation is moved there, or left out.
        """
        squares = self.check_strategy(strategy).column_norms() ** 2
        accounted = self.sensitivity_of(self.contribution_bound) * (1 + _ROUNDING)
        for count in range(min(self.contribution_bound, 1 + (self.iterations - 1) // self.min_separation), 0, -1):
            steps = np.arange(count) * self.min_separation
            last = np.arange(steps[-1], self.iterations)
            total = squares[steps[:-1]].sum() + squares[last]
            fits = np.flatnonzero(np.sqrt(total) <= accounted)
            if len(fits):
                steps[-1] = last[fits[np.argmax(total[fits])]]
                return WorstUser(copies=count, probability=1.0, rounds=steps)
        raise InputError("the sensitivity accounted for is below that of any single participation; nothing to audit")


def _separated_candidates(space: SearchSpace) -> Iterator[Candidate]:
    """Yields greedy schedules with the largest separation that bisection finds, a half and a quarter of it."""
    from coowned.selection.greedy_min_separation import max_min_separation

    try:
        largest = max_min_separation(
            space.graph, batch_size=space.batch_size, iterations=space.iterations, seed=space.seed, search="bisection"
        )
    except InfeasibleScheduleError as error:
        yield Candidate(selector=_SEPARATED, selected=None, note=str(error))
        return
    for separation in dict.fromkeys(largest // share for share in _SEPARATION_SHARES if largest >= share):
        with contextlib.suppress(InfeasibleScheduleError):  # success at `largest` does not prove it for less
            schedule = space.schedule(_SEPARATED, min_separation=separation)
            yield Candidate(selector=_SEPARATED, selected=schedule)


def _bounded_candidates(space: SearchSpace) -> Iterator[Candidate]:
    """Yields a schedule with the smallest bound under which no example need be repeated, if there is one."""
    needed = space.batch_size * space.iterations
    enough = (
        bound
        for bound in (sorted(space.contribution_bounds) if needed <= space.graph.num_examples else ())
        if space.select("priced", contribution_bound=bound).size >= needed
    )
    if (bound := next(enough, None)) is None:
        return
    largest = space.iterations if bound == 1 else (space.iterations - 1) // (bound - 1)
    for separation in dict.fromkeys(max(1, int(share * largest)) for share in _SPREAD_SHARES):
        settings = {"min_separation": separation, "contribution_bound": bound}
        with contextlib.suppress(InfeasibleScheduleError):
            schedule = space.schedule(_BOUNDED, **settings)
            yield Candidate(selector=_BOUNDED, selected=schedule)
            return


def _certified_schedule(certificate: ContributionCertificate) -> CertifiedSchedule:
    if certificate.schedule is None:
        raise UncertifiableError(
            "the certificate is not for a schedule and proves no min separation; select with greedy-min-separation"
        )
    if certificate.schedule.min_separation == 0:
        raise UncertifiableError("some batch of the schedule holds two copies of one user; no min separation holds")
    return certificate.schedule
