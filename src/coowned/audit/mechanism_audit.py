"""The whole-curve audit: is P(A) - exp(epsilon) Q(A) anywhere above the delta that is claimed?

A is an event of the output, chosen on one half of the trials; on the other half the rates of A with the user (P) and
without (Q) are bounded by Clopper-Pearson, each at alpha / (2 m), m the number of (epsilon, direction, user)s tried.
An alarm where the claim holds needs one of the 2 m bounds to fail: its probability is at most alpha.
"""

import dataclasses
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from coowned import validate
from coowned.audit.audited_parts import AuditedParts
from coowned.audit.checks import lower_bound, upper_bound
from coowned.audit.claims import USERS, MechanismClaim
from coowned.audit.worst_case import Scores, WorstCase
from coowned.errors import InputError
from coowned.mechanism.banded_strategy import BandedStrategy
from coowned.mechanism.keys import RunKey
from coowned.mechanism.mechanism import Mechanism

ALPHA = 1e-3
TRIALS = 200_000
NUM_EPSILONS = 9
DIRECTIONS = ("in", "out")
_CANDIDATES = 400  # thresholds among which the best is taken


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """One event: what was claimed of it and what was measured.

    Attributes:
      epsilon, delta: the point of the claimed curve.
      direction: "in", the event is likelier with the user; "out", without her (or with the other her).
      user: kind of worst-case user.
      threshold: the event is that the log ratio of the claim is above it ("out": below).
      rate, other_rate: Clopper-Pearson bounds, from below of the likelier side and from above of the other.
    """

    epsilon: float
    delta: float
    direction: str
    user: str
    threshold: float
    rate: float
    other_rate: float

    @property
    def measured_delta(self) -> float:
        """delta is at least this at epsilon, unless a bound failed."""
        return self.rate - math.exp(self.epsilon) * self.other_rate

    @property
    def alarm(self) -> bool:
        return self.measured_delta > self.delta

    def epsilon_at(self, delta: float) -> float:
        """epsilon is at least this at delta, unless a bound failed; 0 where nothing can be said."""
        if self.rate <= delta:
            return 0.0
        return max(0.0, math.log((self.rate - delta) / self.other_rate))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MechanismAudit:
    """What an audit of one mechanism found.

    Attributes:
      figures: one a (epsilon, direction, user).
      alpha: probability of an alarm, at most, where the claim holds.
      trials: of each side; half of them chose the events.
      users_at_once: side by side in a batch; 1 is one user in a crowd.
    """

    mechanism: Mechanism
    noise_multiplier: float
    adjacency: str
    alpha: float
    trials: int
    users_at_once: int
    figures: tuple[Figure, ...]

    @property
    def holds(self) -> bool:
        """False where the claim broke."""
        return not any(figure.alarm for figure in self.figures)

    @property
    def worst(self) -> Figure:
        """The figure that is nearest to an alarm, or furthest beyond it."""
        return max(self.figures, key=lambda figure: figure.measured_delta - figure.delta)

    @property
    def resolution(self) -> float:
        """About the smallest delta that could have been contradicted: even what was never seen may be this likely."""
        return float(upper_bound(0, self.trials // 2, self.alpha / (2 * len(self.figures))))

    def epsilon_lower_bound(self, delta: float) -> float:
        """With probability at least 1 - alpha the true epsilon at delta is not below this."""
        return max(figure.epsilon_at(delta) for figure in self.figures)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        figures = [
            dataclasses.asdict(figure) | {"measured_delta": figure.measured_delta, "alarm": figure.alarm}
            for figure in self.figures
        ]
        return {
            "adjacency": self.adjacency,
            "holds": self.holds,
            "alpha": self.alpha,
            "trials": self.trials,
            "users_at_once": self.users_at_once,
            "resolution": self.resolution,
            "noise_multiplier": self.noise_multiplier,
            "mechanism": self.mechanism.to_dict(),
            "figures": figures,
        }


def audit_mechanism(
    mechanism: Mechanism,
    *,
    noise_multiplier: float,
    adjacency: str,
    run_key: RunKey,
    alpha: float = ALPHA,
    trials: int = TRIALS,
    seconds: float | None = None,
    users_at_once: int | None = None,
    parts: AuditedParts | None = None,
    strategy: BandedStrategy | None = None,
) -> MechanismAudit:
    """Tries to contradict the whole claimed curve of a mechanism with its real sampler, clipper and noise.

    Two worst-case users are tried, whose every copy has a gradient far longer than the clip norm: always along e1, and
    along +e1 and -e1 in turn. The statistic is the likelihood ratio of the claim, so that it needs no idea of a fault.

    Guarantees:
      - The probability of an alarm is at most alpha where the claim holds.   (test_false_alarms_are_accounted_for,
        test_honest_mechanisms_pass)
      - Each of the planted bugs is caught.   (test_planted_bugs_are_caught, test_honest_mechanisms_pass_twenty_seeds)
    Cost: about 0.3 µs a trial and step side by side, 0.1 ms alone (experiments/results/audit_power.json).
    What it is not: able to see deltas below `resolution`, about 1e-4; tails of noise and coins are tested on extreme
    bit patterns (`coowned.audit.noise_law`, `coowned.audit.participation`).

    Args:
      mechanism, noise_multiplier, adjacency: the claim; its curve is the accountant's.
      run_key: of the audit alone. With a training run's key its noise would be used twice.
      alpha: probability of a false alarm.
      trials: of each side.
      seconds: end earlier, with the trials that were done.
      users_at_once: side by side in a batch (default: as many as fit in memory). 1: one user in a crowd.
      parts: with one exchanged, to try the audit itself.
      strategy: of correlated noise, where it is not the usual one.

    Example:
      >>> from coowned import PoissonSampling
      >>> mechanism = PoissonSampling(contribution_bound=2, sampling_probability=0.1, iterations=10, batch_size=8)
      >>> found = audit_mechanism(mechanism, noise_multiplier=2.0, adjacency="zero-out", trials=20_000,
      ...                         run_key=RunKey.from_seed(0))
      >>> found.holds, len(found.figures)
      (True, 36)

    References: Jagielski et al. (2020), https://arxiv.org/abs/2006.07709; Nasr et al. (2023),
      https://arxiv.org/abs/2302.07956
    """
    validate.in_range(0, 1, open_low=True, open_high=True, alpha=alpha)
    validate.integer(at_least=1000, trials=trials)
    if not isinstance(run_key, RunKey):
        raise InputError("run_key must be a RunKey of the audit's own; use RunKey.from_operating_system()")
    claim = MechanismClaim(
        mechanism=mechanism, noise_multiplier=noise_multiplier, adjacency=adjacency, strategy=strategy
    )
    at_once = _users_at_once(claim, trials) if users_at_once is None else users_at_once
    world = WorstCase(claim, parts or AuditedParts(), users_at_once=at_once, trials=trials, run_key=run_key)
    scores = world.run(trials=trials, seconds=seconds)
    return MechanismAudit(
        mechanism=mechanism,
        noise_multiplier=noise_multiplier,
        adjacency=adjacency,
        alpha=alpha,
        trials=scores.trials,
        users_at_once=at_once,
        figures=judge(claim, scores, alpha=alpha),
    )


def judge(claim: MechanismClaim, scores: Scores, *, alpha: float) -> tuple[Figure, ...]:
    """Chooses events on the first half of the trials and measures them on the second."""
    half = scores.trials // 2
    epsilons = _epsilons(claim, half)
    deltas = claim.deltas(epsilons)
    level = alpha / (2 * len(epsilons) * len(DIRECTIONS) * len(USERS))
    figures = []
    for user in USERS:
        for direction in DIRECTIONS:
            likelier, other = scores.present[user], scores.absent[user]
            if direction == "out":
                likelier, other = -other, -likelier
            thresholds, rates, other_rates = _candidates(likelier[:half], other[:half], epsilons, level)
            for epsilon, delta in zip(epsilons.tolist(), deltas.tolist(), strict=True):
                threshold = thresholds[np.argmax(rates - math.exp(epsilon) * other_rates)]
                tested = len(likelier) - half
                figures.append(
                    Figure(
                        epsilon=epsilon,
                        delta=delta,
                        direction=direction,
                        user=user,
                        threshold=float(threshold if direction == "in" else -threshold),
                        rate=float(lower_bound(np.count_nonzero(likelier[half:] > threshold), tested, level)),
                        other_rate=float(upper_bound(np.count_nonzero(other[half:] > threshold), tested, level)),
                    )
                )
    return tuple(figures)


def _epsilons(claim: MechanismClaim, trials: int) -> npt.NDArray[np.float64]:
    """From 0 to where the claimed delta is too small to be contradicted by so many trials."""
    smallest_delta = max(1e-4, 100 / trials)
    largest = min(claim.epsilon_at(min(smallest_delta, 0.5)), math.log(trials / 20))
    return np.linspace(0.0, max(largest, 1e-3), NUM_EPSILONS)


def _candidates(
    likelier: npt.NDArray[np.float64], other: npt.NDArray[np.float64], epsilons: npt.NDArray[np.float64], level: float
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """(candidates,) thresholds, and the bounds that either side's rate would have at each."""
    likelier, other = np.sort(likelier), np.sort(other)
    even = np.linspace(0, 1, _CANDIDATES // 4)
    rare = np.geomspace(1 / len(other), 1, _CANDIDATES // 4)
    places = np.concatenate([even, 1 - rare])
    # The best threshold under the claim is epsilon itself.
    thresholds = np.unique(np.concatenate([np.quantile(likelier, places), np.quantile(other, places), epsilons]))
    above = [len(side) - np.searchsorted(side, thresholds, side="right") for side in (likelier, other)]
    rates = lower_bound(above[0], len(likelier), level)
    return thresholds, rates, upper_bound(above[1], len(other), level)


def _users_at_once(claim: MechanismClaim, trials: int) -> int:
    if claim.mechanism.needs_schedule:
        return 1  # the schedule is the same for everybody
    return max(1, min(trials, 2**21 // claim.iterations, 2**21 // claim.copies))
