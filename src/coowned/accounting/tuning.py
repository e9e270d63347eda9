"""Privacy of the best of a random number of runs (docs/accounting.md has the proof)."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from coowned import codec, validate
from coowned.accounting.calculators import epsilon_curve
from coowned.accounting.covered import CoveredRelease
from coowned.accounting.gaussian import find_root
from coowned.errors import CertificateMismatchError, InputError, UncertifiableError
from coowned.mechanism.registry import mechanism_from_dict

Floats = npt.NDArray[np.float64]

LARGEST_EXPECTED = 1000
LARGEST_EPSILON = 500.0  # that is looked for
_TIMES_EXPECTED = 4  # the law of the number of runs ends at this many times its mean
_WEIGHT_SUM = 2**48  # about: the law's weights are whole numbers, so that it can be drawn exactly
_CELLS = 2000  # of the tail probability of a run's rank
_SMALLEST_TAIL = 1e-9  # where the first cell ends
_ROUNDING = 1e-9  # of delta: more than all roundings in sums of positive terms


@dataclasses.dataclass(frozen=True)
class NumberOfRuns:
    """The distribution of the number of runs K of a tuning: `weights[k - 1]` is proportional to P(K = k).

    Guarantees:
      - It has the mean it was asked for, to a millionth, and ends at four times that.   (test_mean_and_end_of_the_law)
      - `draw` gives every number of runs for exactly as many words as its weight, or asks for another word.
        (test_every_weight_is_drawn_exactly)

    Example:
      >>> law = NumberOfRuns.geometric(8)
      >>> law.largest, round(law.expected, 6)
      (32, 8.0)
    """

    weights: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.weights or min(self.weights) < 0 or not 0 < sum(self.weights) < 2**63:
            raise InputError("the weights of a number of runs must be whole, not negative, and sum to 1 to 2**63")

    @classmethod
    def geometric(cls, expected: float) -> "NumberOfRuns":
        """Returns the geometric law (truncated negative binomial, eta = 1) with this mean, cut at four times the mean.

        The accounting is that of the law as cut.
        """
        validate.in_range(1, LARGEST_EXPECTED, expected_runs=expected)
        if expected == 1:
            return cls((1,))
        counts = np.arange(1, math.floor(_TIMES_EXPECTED * expected) + 1)

        def mean(log_ratio: float) -> float:
            weights = np.exp(log_ratio * (counts - 1))
            return float((counts * weights).sum() / weights.sum())

        # Uncut, the ratio 1 - 1 / expected has this mean; cut, it has less, and the ratio 1 has about twice as much.
        root = find_root(lambda x: expected - mean(x), 2 * math.log1p(-1 / expected) - 1, 0.0, absolute=1e-12)
        weights = np.exp(root * (counts - 1))
        return cls(tuple(int(weight) for weight in np.rint(_WEIGHT_SUM * weights / weights.sum())))

    @property
    def largest(self) -> int:
        return len(self.weights)

    @property
    def expected(self) -> float:
        return math.fsum(k * weight for k, weight in enumerate(self.weights, start=1)) / sum(self.weights)

    def slopes(self, shares: Floats) -> Floats:
        """Returns f'(s) = E[K s^(K-1)] of the generating function f(s) = E[s^K], for s in [0, 1]."""
        total = sum(self.weights)
        coefficients = [k * weight / total for k, weight in enumerate(self.weights, start=1)]
        return np.polyval(coefficients[::-1], shares).astype(np.float64)

    def draw(self, word: int) -> int | None:
        """Returns the number of runs for a uniform 64-bit word; None where the word is one of the few to be redrawn."""
        total = sum(self.weights)
        if word >= 2**64 - 2**64 % total:
            return None
        rest = word % total
        for k, weight in enumerate(self.weights, start=1):
            if rest < weight:
                return k
            rest -= weight
        raise AssertionError("unreachable: the weights sum to their total")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PrivacyProfile:
    """Upper bounds on delta of ONE run, in both directions between two neighbouring data sets, at some epsilons.

    Attributes:
      epsilons: (n,) from 0, increasing.
      deltas: (n,) at each of them. Between two points the chord is a bound, since delta is convex in exp(epsilon).
    """

    epsilons: Floats
    deltas: Floats

    def __post_init__(self) -> None:
        increasing = self.epsilons.size > 0 and self.epsilons[0] == 0 and bool((np.diff(self.epsilons) > 0).all())
        if not increasing or self.deltas.shape != self.epsilons.shape:
            raise InputError("a privacy profile needs one delta for each epsilon, and epsilons that increase from 0")
        object.__setattr__(self, "deltas", np.minimum.accumulate(np.clip(self.deltas, 0.0, 1.0)))

    @functools.cached_property
    def _factors(self) -> Floats:
        return np.exp(self.epsilons)

    def divergences(self, factors: Floats) -> Floats:
        """Returns upper bounds on the largest P(A) - factor * Q(A), for factors >= 0."""
        above = np.interp(np.maximum(factors, 1.0), self._factors, self.deltas)
        with np.errstate(divide="ignore"):
            mirrored = np.interp(1 / np.minimum(factors, 1.0), self._factors, self.deltas)
        # H_a(P, Q) = 1 - a + a * H_(1/a)(Q, P)
        return np.where(factors >= 1, above, 1 - factors + factors * mirrored)

    def largest_probabilities(self, probabilities: Floats) -> Floats:
        """Returns upper bounds on the probability, in one world, of an event that has these in the other."""
        direct = np.ones_like(probabilities)
        for factor, delta in zip(self._factors.tolist(), self.deltas.tolist(), strict=True):
            direct = np.minimum(direct, factor * probabilities + delta)
            direct = np.minimum(direct, 1 - np.maximum(1 - probabilities - delta, 0.0) / factor)
        return direct


def tuned_delta(profile: PrivacyProfile, law: NumberOfRuns, epsilon: float) -> float:
    """Returns an upper bound on delta at `epsilon` of releasing the best of K runs, K drawn from `law`.

    Each run is a fresh, independent draw from one mechanism with this profile; "best" is by any fixed order of what a
    run releases, ties broken at random. Winner, score and setting are all released; K is not.

    Guarantees:
      - Never below the exact delta of small mechanisms, whichever order.   (test_never_below_the_exact_delta)
      - A bound by one ratio, as of Koskela et al., is never smaller.   (test_never_above_the_published_bound)
      - One run costs what it costs alone.   (test_one_run_costs_what_it_costs_alone)

    Example:
      >>> from coowned import MinSeparation, epsilon_curve
      >>> m = MinSeparation(contribution_bound=4, min_separation=8, num_bands=8, iterations=100)
      >>> epsilons = np.linspace(0, 4, 50)
      >>> deltas = epsilon_curve(m, noise_multiplier=4.0, adjacency="zero-out", epsilons=epsilons)
      >>> law = NumberOfRuns.geometric(8)
      >>> profile = PrivacyProfile(epsilons=epsilons, deltas=deltas)
      >>> f"{deltas[-1]:.1e} {tuned_delta(profile, law, 4.0):.1e}"
      '2.7e-16 1.4e-10'

    References: Papernot & Steinke (2022), https://arxiv.org/abs/2110.03620; Koskela, Redberg & Wang (2024),
    https://arxiv.org/abs/2402.06701
    """
    validate.in_range(0, math.inf, open_high=True, epsilon=epsilon)
    # Cells of a = P(another run is better). In each, f'(1 - a) is largest at its beginning, and Q's weight smallest
    # where b, the same under Q, is as large as it can be at the cell's end.
    edges = np.concatenate([[0.0], np.geomspace(_SMALLEST_TAIL, 1.0, _CELLS)])
    slopes = law.slopes(1 - edges[:-1])
    offsets = math.exp(epsilon) * law.slopes(1 - profile.largest_probabilities(edges[1:]))
    slopes, offsets = _upper_envelope(slopes, offsets)
    kinks = np.diff(offsets) / np.diff(slopes)
    delta = float((np.diff(slopes) * profile.divergences(np.maximum(kinks, 0.0))).sum())
    return min(1.0, delta * (1 + _ROUNDING))


def tuned_epsilon(profile: PrivacyProfile, law: NumberOfRuns, delta: float) -> float:
    """Returns an epsilon at which `tuned_delta` is at most `delta`, within a ten-thousandth of the smallest.

    Raises UncertifiableError where the profile does not go far enough for any.
    """
    validate.in_range(0, 1, open_low=True, open_high=True, delta=delta)
    low, high = 0.0, max(1.0, float(profile.epsilons[-1]))
    if tuned_delta(profile, law, low) <= delta:
        return low
    while tuned_delta(profile, law, high) > delta:
        low, high = high, 2 * high
        if high > LARGEST_EPSILON:
            raise UncertifiableError("no epsilon is proven for this tuning at this delta; use more noise")
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        if tuned_delta(profile, law, middle) <= delta:
            high = middle
        else:
            low = middle
    return high


def _upper_envelope(slopes: Floats, offsets: Floats) -> tuple[Floats, Floats]:
    """Returns the lines slope * L - offset that are largest somewhere on L >= 0, with the line 0 first."""
    order = np.lexsort((offsets, slopes))
    kept = [(0.0, 0.0)]
    for slope, offset in zip(slopes[order].tolist(), offsets[order].tolist(), strict=True):
        if slope <= kept[-1][0]:  # equal slopes come with the smallest offset, the largest line, first
            continue
        while len(kept) > 1 and _meets_before(kept[-2], kept[-1], (slope, offset)):
            kept.pop()
        kept.append((slope, offset))
    lines = np.array(kept)
    return lines[:, 0], lines[:, 1]


def _meets_before(first: tuple[float, float], second: tuple[float, float], third: tuple[float, float]) -> bool:
    """True if the third line overtakes the first before the second does: the second is nowhere the largest."""
    return (third[1] - first[1]) * (second[0] - first[0]) <= (second[1] - first[1]) * (third[0] - first[0])


_POINTS = 120  # epsilons at which the curve of one run is computed
_FIRST_LARGEST = 8.0
_SMALLEST_LARGEST = 0.1
_ATTACK_POINTS = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class TunedSetting:
    """Settings of the grid that are the same to the accountant.

    Attributes:
      count: how many settings of the grid these are.
      mechanism: as a mechanism's `to_dict` gives it.
      example: the same training as seen by one example of this setting's S, as `to_dict` gives it.
      noise_multiplier: of their training.
      evaluation: what their score is; None where it is not covered by noise.
    """

    count: int
    mechanism: dict[str, Any]
    example: dict[str, Any]
    noise_multiplier: float
    evaluation: CoveredRelease | None = None

    def __post_init__(self) -> None:
        validate.positive(count=self.count)
        validate.positive_number(noise_multiplier=self.noise_multiplier)

    def deltas(
        self, adjacency: str, epsilons: Sequence[float], *, one_example: bool = False, bound: int | None = None
    ) -> np.ndarray:
        """Returns upper bounds on delta of one run, (len(epsilons),), for a user or for one example.

        With `bound`, for a user whose own bound that is.
        """
        drawn, evaluation, also = self.mechanism, self.evaluation, ()
        if evaluation is not None:
            also = (evaluation.example_steps if one_example else evaluation.of_user(bound).steps,)
        if one_example:  # as if it were both trained on and held out: one of the two is all that it can be
            drawn = self.example
        mechanism = mechanism_from_dict(dict(drawn))
        if bound is not None:
            mechanism = mechanism.for_copies(min(bound, mechanism.contribution_bound))
        claim: dict[str, Any] = {"noise_multiplier": self.noise_multiplier, "adjacency": adjacency}
        return epsilon_curve(mechanism, **claim, epsilons=epsilons, also=also)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuningClaim:
    """The claim that a run is the best of a random number of runs, each with a random setting of a public grid.

    Attributes:
      weights: of 1, 2, ... runs: what the number of runs was drawn by.
      settings: all of the grid, those alike together.
      grid: the values of every key, as they were given.
      untuned_noise_multiplier: what one run with the settings of the grid's first would have had at the same epsilon.
      individual_bounds: whether all settings have the same bounds of single users.

    Guarantees:
      - One run of one setting has the epsilon it has alone.   (test_a_tuning_of_one_run)
      - A guarantee whose run is not of the grid is refused.   (test_a_run_outside_of_the_grid_is_refused)
    """

    weights: tuple[int, ...]
    settings: tuple[TunedSetting, ...]
    grid: dict[str, list[Any]]
    untuned_noise_multiplier: float
    individual_bounds: bool = False

    def __post_init__(self) -> None:
        if sum(setting.count for setting in self.settings) != math.prod(len(values) for values in self.grid.values()):
            raise InputError("a tuning needs every setting of its grid")

    @property
    def law(self) -> NumberOfRuns:
        return NumberOfRuns(self.weights)

    @property
    def grid_size(self) -> int:
        return sum(setting.count for setting in self.settings)

    def check_member(self, run: TunedSetting) -> None:
        """Raises CertificateMismatchError unless some settings of the grid are those of this run."""
        known = (dataclasses.replace(setting, count=run.count) for setting in self.settings)
        if codec.checksum(run) not in map(codec.checksum, known):  # what was read back has lists for tuples
            raise CertificateMismatchError("the run is not one of the tuning's grid; tune again")

    def epsilon(self, delta: float, adjacency: str, **whose: Any) -> float:
        """Returns the epsilon of releasing the best run with its score and setting.

        Args:
          whose: one_example or bound, as for `TunedSetting.deltas`; by default that of any user.
        """
        largest = _FIRST_LARGEST
        while True:
            try:
                found = tuned_epsilon(self._profile(adjacency, largest, **whose), self.law, delta)
            except UncertifiableError:
                if largest > LARGEST_EPSILON:
                    raise
                found = math.inf
            if 0.7 * largest <= found <= largest or found < _SMALLEST_LARGEST:
                return found
            # Beyond its last epsilon a curve is flat, and the bound loose; with a last one far off, it is coarse.
            largest = max(1.1 * found, _SMALLEST_LARGEST) if found < largest else 3 * largest

    def deltas(self, adjacency: str, epsilons: Sequence[float]) -> Floats:
        """Returns upper bounds on delta of the release at each epsilon, (len(epsilons),)."""
        profile = self._profile(adjacency, max(epsilons, default=0.0) or 1.0)
        return np.array([tuned_delta(profile, self.law, point) for point in epsilons])

    def attack_bound(self, adjacency: str, *, false_alarms: float, largest: float) -> float:
        """Bounds the success of any attack on the release, by the curve up to epsilon `largest`."""
        profile = self._profile(adjacency, max(largest, 1e-3))
        points = np.linspace(0.0, float(profile.epsilons[-1]), _ATTACK_POINTS)
        bounds = [math.exp(point) * false_alarms + tuned_delta(profile, self.law, point) for point in points.tolist()]
        return min(1.0, *bounds)

    def _profile(self, adjacency: str, largest: float, **whose: Any) -> PrivacyProfile:
        """Returns the curve of one run: the mean over settings, since the setting is drawn and released."""
        epsilons = np.linspace(0.0, largest, _POINTS)
        asked: dict[str, Any] = {"epsilons": epsilons.tolist(), **whose}
        deltas = sum(setting.count * setting.deltas(adjacency, **asked) for setting in self.settings)
        return PrivacyProfile(epsilons=epsilons, deltas=np.asarray(deltas / self.grid_size))
