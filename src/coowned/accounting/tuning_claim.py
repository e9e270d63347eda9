"""What a guarantee says of the tuning whose best run it is for: the law of the number of runs, and every setting."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from coowned import validate
from coowned.accounting.calculators import epsilon_curve
from coowned.accounting.covered import CoveredRelease
from coowned.accounting.tuning import LARGEST_EPSILON, NumberOfRuns, PrivacyProfile, tuned_delta, tuned_epsilon
from coowned.errors import CertificateMismatchError, InputError, UncertifiableError
from coowned.mechanism.mechanism import Mechanism, Steps
from coowned.mechanism.registry import mechanism_from_dict

_POINTS = 120  # epsilons at which the curve of one run is computed
_FIRST_LARGEST = 8.0
_SMALLEST_LARGEST = 0.1
_ATTACK_POINTS = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class TunedSetting:
    """Settings of the grid that differ in nothing that the accountant sees.

    Attributes:
      count: how many settings of the grid these are.
      mechanism: as a mechanism's `to_dict` gives it.
      noise_multiplier: of their training.
      evaluation: what their score is; None where it is not covered by noise.
    """

    count: int
    mechanism: dict[str, Any]
    noise_multiplier: float
    evaluation: CoveredRelease | None = None

    def __post_init__(self) -> None:
        validate.positive(count=self.count)
        validate.positive_number(noise_multiplier=self.noise_multiplier)

    @property
    def drawn(self) -> Mechanism:
        return mechanism_from_dict(dict(self.mechanism))

    @property
    def also(self) -> tuple[Steps, ...]:
        """What a user's data go through beside training."""
        return () if self.evaluation is None else (self.evaluation.steps,)

    def deltas(self, adjacency: str, epsilons: Sequence[float]) -> np.ndarray:
        """Returns upper bounds on delta of one run, (len(epsilons),)."""
        claim: dict[str, Any] = {"noise_multiplier": self.noise_multiplier, "adjacency": adjacency}
        return epsilon_curve(self.drawn, **claim, epsilons=epsilons, also=self.also)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuningClaim:
    """Says that a run is the best of a random number of runs, each with a random setting of a public grid.

    Attributes:
      weights: of 1, 2, ... runs: what the number of runs was drawn by.
      settings: all of the grid, those alike together.
      grid: the values of every key, as they were given.
      untuned_noise_multiplier: what one run with the settings of the grid's first would have had at the same epsilon.

    Guarantees:
      - One run of one setting has the epsilon it has alone.   (test_a_tuning_of_one_run)
      - A guarantee whose run is not of the grid is refused.   (test_a_run_outside_of_the_grid_is_refused)
    """

    weights: tuple[int, ...]
    settings: tuple[TunedSetting, ...]
    grid: dict[str, list[Any]]
    untuned_noise_multiplier: float

    def __post_init__(self) -> None:
        if sum(setting.count for setting in self.settings) != math.prod(len(values) for values in self.grid.values()):
            raise InputError("a tuning needs every setting of its grid")

    @property
    def law(self) -> NumberOfRuns:
        return NumberOfRuns(self.weights)

    @property
    def grid_size(self) -> int:
        return sum(setting.count for setting in self.settings)

    def check_member(self, mechanism: Mechanism, noise_multiplier: float, evaluation: CoveredRelease | None) -> None:
        """Raises CertificateMismatchError unless some settings of the grid are those of this run."""
        run = (mechanism, noise_multiplier, evaluation)
        if run not in [(setting.drawn, setting.noise_multiplier, setting.evaluation) for setting in self.settings]:
            raise CertificateMismatchError("the run is not one of the tuning's grid; tune again")

    def epsilon(self, delta: float, adjacency: str) -> float:
        """Returns the epsilon of releasing the best run with its score and setting."""
        largest = _FIRST_LARGEST
        while True:
            try:
                found = tuned_epsilon(self._profile(adjacency, largest), self.law, delta)
            except UncertifiableError:
                if largest > LARGEST_EPSILON:
                    raise
                found = math.inf
            if 0.7 * largest <= found <= largest or found < _SMALLEST_LARGEST:
                return found
            # Beyond its last epsilon a curve is flat, and the bound loose; with a last one far off, it is coarse.
            largest = max(1.1 * found, _SMALLEST_LARGEST) if found < largest else 3 * largest

    def attack_bound(self, adjacency: str, *, false_alarms: float, largest: float) -> float:
        """Bounds the success of any attack on the release, by the curve up to epsilon `largest`."""
        profile = self._profile(adjacency, max(largest, 1e-3))
        points = np.linspace(0.0, float(profile.epsilons[-1]), _ATTACK_POINTS)
        bounds = [math.exp(point) * false_alarms + tuned_delta(profile, self.law, point) for point in points.tolist()]
        return min(1.0, *bounds)

    def _profile(self, adjacency: str, largest: float) -> PrivacyProfile:
        """Returns the curve of one run: the mean over settings, since the setting is drawn and released."""
        epsilons = np.linspace(0.0, largest, _POINTS)
        deltas = sum(setting.count * setting.deltas(adjacency, epsilons.tolist()) for setting in self.settings)
        return PrivacyProfile(epsilons=epsilons, deltas=np.asarray(deltas / self.grid_size))
