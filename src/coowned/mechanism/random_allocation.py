"""Implements random allocation: every copy is in exactly one round of each epoch, drawn uniformly."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from coowned import validate
from coowned.certificate import ContributionCertificate
from coowned.errors import InputError, UncertifiableError
from coowned.exact.keys import WORDS, Purpose, RunKey, StreamKey, random_words
from coowned.mechanism.banded_strategy import BandedStrategy
from coowned.mechanism.batching import Copies, GroupedBatches
from coowned.mechanism.candidates import Attempt, Candidate, SearchSpace
from coowned.mechanism.mechanism import GroupedMechanism, Selected, Steps, WorstUser
from coowned.progress import counted

_ONE_COPY = (
    "the accounting of random allocation covers users with one copy only; no bound is known for several copies, each "
    "in a round of its own"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomAllocation(GroupedMechanism):
    """Puts every copy into exactly one round of each epoch of its group; the groups of users take turns.

    The rounds of group g are the steps t = g mod `num_groups`; `rounds_per_epoch` consecutive ones are an epoch. In
    every epoch, the round of each copy is drawn uniformly and independently. With one group, this is DP-SGD with
    another sampler.

    Attributes:
      rounds_per_epoch: of every group; from a certificate, the largest group's copies over the batch size, at least 1.
      num_groups: number of groups of users.
      num_bands: bands of the strategy, at most `num_groups`; columns are at most 1 long.
      group_bounds: 1 for each group with a protected user, 0 for others, or None if all have one.

    Guarantees:
      - A contribution bound above 1, for which no bound is known, is refused.   (test_more_than_one_copy_is_refused)
      - More bands than groups are refused.   (test_more_bands_than_groups_are_refused)
      - With one round per epoch it is a Gaussian mechanism.   (test_one_round_is_the_gaussian)
      - It needs less noise than Poisson sampling at the same rate.   (test_less_noise_than_coins)

    Example:
      >>> m = RandomAllocation(contribution_bound=1, rounds_per_epoch=6, iterations=100, num_groups=8, num_bands=8)
      >>> m.rounds_of(0), m.rounds_of(7)
      (13, 12)

    References: Feldman & Shenfeld (2025), https://arxiv.org/abs/2502.08202; https://arxiv.org/abs/2602.17284
    """

    kind = "random-allocation"
    training_kind = "random-allocation"
    options = ("num_bands",)

    rounds_per_epoch: int
    num_groups: int = 1
    num_bands: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.positive(rounds_per_epoch=self.rounds_per_epoch)
        if self.contribution_bound != 1:
            raise InputError(
                f"contribution_bound must be 1, not {self.contribution_bound}: {_ONE_COPY}; use CyclicPoisson or "
                "PoissonSampling"
            )

    @classmethod
    def _certified_fields(cls, certificate: ContributionCertificate, batch_size: int | None) -> dict[str, Any]:
        assert batch_size is not None
        _check_one_copy(certificate)
        sizes = _group_sizes(certificate)
        if batch_size > certificate.size:
            size = counted(certificate.size, "copy", "copies")
            raise InputError(f"batch_size must be at most the size of S ({size}), not {batch_size}; reduce it")
        bounds = certificate.groups.bounds if certificate.groups else ()
        return {
            "rounds_per_epoch": max(1, round(max(sizes) / batch_size)),
            "num_groups": len(sizes),
            "num_bands": len(sizes),
            "group_bounds": bounds if 0 in bounds and any(bounds) else None,
        }

    def _check_certificate(self, certificate: ContributionCertificate) -> None:
        _check_one_copy(certificate)
        super()._check_certificate(certificate)

    def batches(self, selected: Selected, *, run_key: RunKey, multiple_of: int = 8) -> "AllocationBatches":
        drawing = self._drawing(selected, run_key, multiple_of)
        return AllocationBatches(**drawing, num_groups=self.num_groups, rounds_per_epoch=self.rounds_per_epoch)

    @property
    def sampling_probability(self) -> float:
        """Probability of a copy in each of its group's rounds."""
        return 1 / self.rounds_per_epoch

    def expected_copies(self, certificate: ContributionCertificate) -> int:
        largest = max(_group_sizes(certificate))
        return max(super().expected_copies(certificate), math.ceil(largest / self.rounds_per_epoch))

    def drawn_share(self, certificate: ContributionCertificate) -> float:
        assert self.batch_size is not None
        group = certificate.size / self.num_groups  # copies, on average
        return group / self.rounds_per_epoch / min(self.batch_size, group)

    def probability_of(self, group: int) -> float:
        return self.sampling_probability

    def user_steps(self, noise_multiplier: float) -> list[Steps]:
        kinds = super().user_steps(noise_multiplier)
        return [dataclasses.replace(steps, rounds_per_epoch=self.rounds_per_epoch) for steps in kinds]

    def for_example(self, certificate: ContributionCertificate) -> Self:
        return dataclasses.replace(self, group_bounds=None)  # an example may be in a group without protected users

    @classmethod
    def candidates(cls, space: SearchSpace) -> Iterator[Attempt]:
        """Tries bound 1, in one group and in as many as cyclic sampling would have."""
        if space.only or 1 in space.contribution_bounds:
            yield Attempt("random allocation", functools.partial(_allocated_candidates, space))

    def describe(self) -> str:
        return (
            f"random allocation over {counted(self.num_groups, 'group')} of users with noise correlated over "
            f"{counted(self.num_bands, 'band')}; in each epoch of {counted(self.rounds_per_epoch, 'round')} of its "
            "group, every copy is in exactly one round, drawn uniformly and independently"
        )

    def worst_user(self, strategy: BandedStrategy | None) -> WorstUser:
        return dataclasses.replace(super().worst_user(strategy), rounds_per_epoch=self.rounds_per_epoch)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AllocationBatches(GroupedBatches):
    """Draws the round of every copy in each epoch of its group, from the key of the epoch's first step.

    Guarantees:
      - Every copy is in exactly one round of each epoch, and in no step of another group.
        (test_every_copy_is_in_one_round_of_each_epoch)
      - Rounds are uniform, exactly, and independent between copies and epochs.   (test_words_give_uniform_rounds,
        test_rounds_are_uniform_and_independent)
      - `batch(step)` is the same in whatever order steps are asked for.   (test_batches_in_any_order)
      - Nothing is dropped; a step without any copy is a batch of padding.   (test_an_empty_round_is_padding)
    Cost: O(copies of a group) once per epoch, and O(|S|) memory.
    """

    rounds_per_epoch: int

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.positive(rounds_per_epoch=self.rounds_per_epoch)

    @property
    def group_probabilities(self) -> tuple[float, ...]:
        return (1 / self.rounds_per_epoch,) * self.num_groups

    @functools.cached_property
    def _epochs(self) -> dict[int, tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Last drawn epoch of every group, its copies by round, and where rounds begin."""
        return {}

    def _draw(self, step: int) -> Copies:
        turn, group = divmod(step, self.num_groups)
        epoch, number = divmod(turn, self.rounds_per_epoch)
        examples, numbers = self._groups[group]
        if self._epochs.get(group, (-1,))[0] != epoch:
            first_step = epoch * self.rounds_per_epoch * self.num_groups + group
            key = self.run_key.derive(Purpose.COINS, step=first_step)
            rounds = draw_rounds(key, len(examples), self.rounds_per_epoch)
            order = np.argsort(rounds, kind="stable")
            ends = np.searchsorted(rounds[order], np.arange(self.rounds_per_epoch + 1))
            self._epochs[group] = epoch, order, ends
        _, order, ends = self._epochs[group]
        drawn = order[ends[number] : ends[number + 1]]
        return examples[drawn], numbers[drawn]


def draw_rounds(key: StreamKey, size: int, rounds: int) -> npt.NDArray[np.int64]:
    """Draws the round of each of `size` copies, (size,), from the stream's words, without those that would bias it.

    >>> draw_rounds(RunKey.from_seed(0).derive(Purpose.COINS, step=0), 5, 3)
    array([1, 0, 0, 1, 0])
    """
    found = np.empty(size, np.int64)
    missing, chunk = np.arange(size), 0
    while len(missing):
        words = random_words(key, len(missing), first_chunk=chunk)
        chunk += -(-len(missing) // WORDS)
        fair = words <= largest_fair_word(rounds)
        found[missing[fair]] = words[fair] % np.uint64(rounds)
        missing = missing[~fair]
    return found


def largest_fair_word(rounds: int) -> np.uint64:
    """Returns the largest word up to which every remainder modulo `rounds` is equally frequent."""
    return np.uint64(2**64 - 2**64 % rounds - 1)


def _allocated_candidates(space: SearchSpace) -> Iterator[Candidate]:
    from coowned.mechanism.cyclic_poisson import best_number_of_groups

    free = space.select("greedy", contribution_bound=1)
    yield Candidate(selector="greedy", selected=free)
    number = best_number_of_groups(space, 1, free.size)
    if number is not None:
        grouped = space.select("cyclic-groups", num_groups=number, contribution_bound=1)
        yield Candidate(selector="cyclic-groups", selected=grouped)


def _group_sizes(certificate: ContributionCertificate) -> tuple[int, ...]:
    return certificate.groups.sizes if certificate.groups else (certificate.size,)


def _check_one_copy(certificate: ContributionCertificate) -> None:
    for what, copies in (
        ("a user", certificate.contribution_bound),
        ("an example", certificate.most_copies_of_one_example),
    ):
        if copies > 1:
            raise UncertifiableError(
                f"a recount found {what} in {copies} copies, but {_ONE_COPY}; select with contribution_bound = 1, or "
                "use another mechanism"
            )
