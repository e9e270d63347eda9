"""Audits of the whole privacy curve: is P(A) - exp(epsilon) Q(A) anywhere above the claimed delta?

Trials come from the trainer itself: worst-case users side by side, each with a coordinate of the model of their own,
through the run's own plan with fresh keys. A is an event of what is released at a user's coordinate, chosen on one half
of the trials; on the other half the rates of A with the user (P) and without (Q) are bounded by Clopper-Pearson, each
at alpha / (2 m), m the number of (epsilon, direction, user)s tried. An alarm where the claim holds needs one of the
2 m bounds to fail: its probability is at most alpha.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from coowned import validate
from coowned.accounting.covered import CoveredRelease
from coowned.accounting.tiers import copies_of_tiers
from coowned.audit.checks import CheckedLaw, lower_bound, upper_bound
from coowned.audit.claims import USERS, MechanismClaim
from coowned.audit.driving import World, WorldData, audited, content_for, drive
from coowned.audit.release_laws import covered_scores, too_small, whiten
from coowned.exact.keys import RunKey
from coowned.mechanism.mechanism import Mechanism
from coowned.models.example_model import linear_stand_in
from coowned.models.logistic_regression import LogisticRegression
from coowned.models.model import Model
from coowned.models.probes import BLANK, IN, OPPOSITE
from coowned.training.plan import TrainingPlan

ALPHA = 1e-3
TRIALS = 200_000
NUM_EPSILONS = 9
DIRECTIONS = ("in", "out")
_STORED = ("adjacency", "holds", "alpha", "trials", "iterations", "resolution", "noise_multiplier")
_CANDIDATES = 400  # thresholds, of which the best is used
_MOST_USERS = 1024  # side by side in one training
_BATCH_NUMBERS = 2**21  # features in a batch
_KEPT_NUMBERS = 2**23  # users times steps that are kept
_MOST_EVALUATED = 4000  # trials with an evaluation: each takes three, about half a millisecond each
_MICROBATCH = 128  # copies whose gradients JAX computes together
Scores = dict[str, npt.NDArray[np.float64]]
"""By kind of user: (2, trials) log ratios of the claim with them, and without them or with the opposite.

Both sides share coins and noise; a test may use what each side does alone, never their difference.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """One event: its claimed delta and the measurement."""

    epsilon: float  # with delta, a point of the claimed curve
    delta: float
    direction: str  # "in", the event is likelier with the user; "out", without (or with the opposite gradients)
    user: str  # kind of worst-case user
    threshold: float  # the event is that the log ratio of the claim is above it ("out": below)
    rate: float  # Clopper-Pearson bound from below, of the likelier side
    other_rate: float  # from above, of the other side

    @property
    def measured_delta(self) -> float:
        """A lower bound on delta at epsilon, unless a bound failed."""
        return self.rate - math.exp(self.epsilon) * self.other_rate

    @property
    def alarm(self) -> bool:
        return self.measured_delta > self.delta

    def epsilon_at(self, delta: float) -> float:
        """Computes a lower bound on epsilon at delta, unless a bound failed; 0 if nothing is proven."""
        if self.rate <= delta:
            return 0.0
        return max(0.0, math.log((self.rate - delta) / self.other_rate))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CurveAudit:
    """The findings of the trials under one adjacency."""

    mechanism: Mechanism
    noise_multiplier: float
    adjacency: str
    alpha: float  # probability of an alarm, at most, where the claim holds
    trials: int  # of each side; half of them chose the events
    iterations: int  # steps of each trial; fewer than the run's if those would take too long
    events: tuple[Event, ...]  # one a (epsilon, direction, user)
    tier: str | None = None  # of the worst-case users, where it is not that of the worst-off
    evaluated: bool = False  # whether what is released includes a covered evaluation

    @property
    def holds(self) -> bool:
        """False if the claim was refuted."""
        return not any(event.alarm for event in self.events)

    @property
    def resolution(self) -> float:
        """About the smallest delta that could have been refuted: even what was never seen may be this likely."""
        return float(upper_bound(0, self.trials // 2, self.alpha / (2 * len(self.events))))

    def epsilon_lower_bound(self, delta: float) -> float:
        """Computes a lower bound on the true epsilon at delta, with confidence 1 - alpha."""
        return max(event.epsilon_at(delta) for event in self.events)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values."""
        events = [
            dataclasses.asdict(event) | {"measured_delta": event.measured_delta, "alarm": event.alarm}
            for event in self.events
        ]
        plain = {name: getattr(self, name) for name in _STORED} | ({} if self.tier is None else {"tier": self.tier})
        plain |= {"evaluated": True} if self.evaluated else {}
        return {**plain, "mechanism": self.mechanism.to_dict(), "events": events}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditedTier:
    """A tier with a smaller bound: its recount and its guarantee."""

    name: str
    bound: int
    found: int  # the most copies of one of them
    promised: int  # copies that their epsilon is for

    @classmethod
    def all_of(cls, plan: TrainingPlan) -> tuple["AuditedTier", ...]:
        """Returns the tiers with somebody in S who are promised more than the worst-off.

        Guarantees:
          - A tier that is not held to its bound is caught.   (test_a_tier_above_its_bound_is_caught)
        """
        tiers = plan.certificate.tiers
        if tiers is None:
            return ()
        promised = copies_of_tiers(plan.certificate, plan.mechanism)
        found = {
            name: int(np.flatnonzero(level).max(initial=0))
            for name, level in zip(tiers.names, tiers.levels(), strict=True)
        }
        return tuple(
            cls(name=name, bound=tiers.by_name()[name], found=found[name], promised=copies)
            for name, copies in promised.items()
            if found[name] and 0 < copies < plan.mechanism.contribution_bound
        )


def audit_curves(
    plan: TrainingPlan,
    next_key: Callable[[], RunKey],
    *,
    adjacencies: tuple[str, ...],
    alpha: float = ALPHA,
    trials: int = TRIALS,
    seconds: float = math.inf,
    model: Model | None = None,
    tier: "AuditedTier | None" = None,
) -> tuple[tuple[CurveAudit, ...], CheckedLaw]:
    """Tries to contradict the whole claimed curve of a plan, by many trainings of worst-case users.

    Also returns a test of the size of the noise in all these trainings.

    Two worst-case users are tried, whose every copy has a gradient far longer than the clip norm: always along their
    coordinate, and along it and against it in turn. The statistic is the likelihood ratio of the claim, so that it
    needs no idea of a fault. Where a covered evaluation is part of the claim, further curves are of both together: the
    ratio of its counts is added to that of training, and also tried by itself. For a tier, its own bound of the
    held-out part is attacked.

    Guarantees:
      - The probability of an alarm is at most alpha for each adjacency where the claim holds.
        (test_false_alarms_are_accounted_for, test_honest_plans_pass)
      - Each of the planted bugs is caught.   (test_planted_bugs_are_caught, test_honest_plans_pass_twenty_seeds)
      - A covered evaluation is part of what the attacker sees: without its noise, with the same noise every time, or
        with more copies of a user than the bound, the joint claim is contradicted.
        (test_the_joint_curve_catches_evaluation_bugs)
    What it is not: able to see deltas below `resolution`, about 1e-4; tails of noise and coins are tested on extreme
    bit patterns (`coowned.audit.randomness`). Unless told otherwise it trains a linear model with a coordinate a user,
    whatever the run's model is; that model is driven by `coowned.audit.release_laws`.

    Args:
      plan: the run's; neither its key nor its S is used.
      next_key: returns a fresh key of the audit.
      adjacencies: to audit.
      alpha: probability of a false alarm, of each adjacency.
      trials: of each side, at most.
      seconds: stop earlier, after at least one training; if even that would take longer, a plan with independent
        noise is audited on its first steps alone, against the curve of a run of so many.
      model: to train instead, whose gradients are known (`coowned.models.probes.Auditable`).
      tier: attack users of this tier, with as many copies as a recount found, against what the tier is promised.

    References: Jagielski et al. (2020), https://arxiv.org/abs/2006.07709; Nasr et al. (2023),
      https://arxiv.org/abs/2302.07956
    """
    validate.in_range(0, 1, open_low=True, open_high=True, alpha=alpha)
    validate.integer(at_least=1000, trials=trials)
    side = _SideBySide(plan, model, None if tier is None else tier.found)
    mechanism = side.shortened(next_key(), seconds)
    if tier is not None:
        mechanism = mechanism.for_copies(tier.promised)
    claims = [dataclasses.replace(MechanismClaim.of(plan, name), mechanism=mechanism) for name in adjacencies]
    scores = side.scores(claims, next_key, trials=trials, seconds=seconds)
    curves = tuple(
        CurveAudit(
            mechanism=mechanism,
            noise_multiplier=plan.noise_multiplier,
            adjacency=claim.adjacency,
            alpha=alpha,
            trials=found[USERS[0]].shape[1],
            iterations=mechanism.iterations,
            events=judge(claim, found, alpha=alpha),
            tier=None if tier is None else tier.name,
        )
        for claim, found in zip(claims, scores, strict=True)
    )
    if plan.guarantee is not None and (release := plan.guarantee.evaluation) is not None:
        release = release.of_user(None if tier is None else tier.bound)
        curves += _with_evaluation(release, claims, scores, next_key, curves)
    size = too_small("mean square", side.squares, side.normals)
    return curves, CheckedLaw("noise of all trials", [size], alpha)


def _with_evaluation(
    release: CoveredRelease,
    claims: Sequence[MechanismClaim],
    scores: Sequence[Scores],
    next_key: Callable[[], RunKey],
    alone: Sequence[CurveAudit],
) -> tuple[CurveAudit, ...]:
    """Adds an evaluation to the first trials: its counts' log ratio to training's, and by itself.

    Training and evaluation have independent noise, so the log ratio of both is the sum, and the curve is that of both.
    """
    trials = min(_MOST_EVALUATED, alone[0].trials)
    counts = covered_scores(release, [next_key() for _ in range(trials)])
    curves = []
    for claim, trained, found in zip(claims, scores, alone, strict=True):
        own = counts[claim.adjacency]
        both = {user: trained[user][:, :trials] + own for user in USERS} | {"counts alone": own}
        events = judge(dataclasses.replace(claim, also=(release.steps,)), both, alpha=found.alpha)
        curves.append(dataclasses.replace(found, trials=trials, events=events, evaluated=True))
    return tuple(curves)


class _SideBySide:
    """Worst-case users side by side in a world of the plan's shape."""

    def __init__(self, plan: TrainingPlan, model: Model | None = None, copies: int | None = None):
        shape = plan.mechanism if copies is None else plan.mechanism.for_copies(copies)
        room = max(16, min(_MOST_USERS, _BATCH_NUMBERS // plan.batch_size, _KEPT_NUMBERS // plan.iterations))
        users = room if model is None else min(room, content_for(model).users)
        self._plan = plan
        self._world = World.like(plan.certificate, shape, users=users, strategy=plan.strategy)
        self._model = _linear_model(plan, self._world.users + 1) if model is None else model
        self._content = content_for(self._model)
        self.squares, self.normals = 0.0, 0  # sum and number of squares of noise
        self._data = {
            held: WorldData(world=self._world, content=self._content, held=held).in_memory()
            for held in (IN, BLANK, OPPOSITE)
        }

    def shortened(self, run_key: RunKey, seconds: float) -> Mechanism:
        """Returns the mechanism, of fewer steps where two portions of trials would take longer."""
        mechanism = self._plan.mechanism
        if math.isinf(seconds) or self._plan.strategy is not None:
            return mechanism
        self._released(run_key, IN, 4)  # compiles
        started = time.monotonic()
        self._released(run_key, IN, 16)
        step = (time.monotonic() - started) / min(16, mechanism.iterations)
        fits = int(seconds / (2 * 3 * step))
        return mechanism if fits >= mechanism.iterations else mechanism.after(max(8, fits))

    def scores(
        self, claims: list[MechanismClaim], next_key: Callable[[], RunKey], *, trials: int, seconds: float
    ) -> list[Scores]:
        """Runs this many trials for every claim, or as many (at least one training's) as fit the time."""
        started = time.monotonic()
        found: list[list[Scores]] = []  # by portion, then by claim
        done = 0
        # Another portion starts only if it can be expected to end in time.
        while not done or (done < trials and (time.monotonic() - started) * (1 + 1 / len(found)) < seconds):
            key, steps = next_key(), claims[0].iterations
            released = {held: self._released(key, held, steps) for held in (IN, BLANK, OPPOSITE)}
            white = whiten(released[BLANK], self._plan)
            self.squares, self.normals = self.squares + float((white**2).sum()), self.normals + white.size
            found.append([_scores(claim, released) for claim in claims])
            done += self._world.users
        return [
            {user: np.concatenate([part[user] for part in parts], axis=1)[:, :trials] for user in USERS}
            for parts in zip(*found, strict=True)
        ]

    def _released(self, run_key: RunKey, held: int, steps: int) -> npt.NDArray[np.float64]:
        """Computes the (steps, users) release at each user's coordinate."""
        plan = audited(self._plan, self._world.selected, run_key)
        released = drive([plan], self._model, self._data[held], steps=min(steps, plan.iterations))
        along = released[self._content.tensor]
        return along.reshape(len(along), -1)[:, : self._world.users]


def _linear_model(plan: TrainingPlan, coordinates: int) -> Model:
    """Returns logistic regression, or a linear stand-in in JAX if gradients are scaled.

    Every coordinate is then a row, and has a scale of its own.
    """
    if plan.scale_gradients:
        return linear_stand_in({"coefficients": (coordinates, 1)}, min(plan.batch_size, _MICROBATCH))
    return LogisticRegression(num_features=coordinates)


def _scores(claim: MechanismClaim, released: dict[int, npt.NDArray[np.float64]]) -> Scores:
    scores = {}
    for user in USERS:
        up = claim.signs(user)[:, None] > 0
        present = np.where(up, released[IN], released[OPPOSITE])
        absent = released[BLANK] if claim.adjacency == "zero-out" else np.where(up, released[OPPOSITE], released[IN])
        scores[user] = np.stack([claim.log_ratio(side, user) for side in (present, absent)])
    return scores


def judge(claim: MechanismClaim, scores: Scores, *, alpha: float) -> tuple[Event, ...]:
    """Chooses events on the first half of the trials and measures them on the second."""
    half = next(iter(scores.values())).shape[1] // 2
    epsilons = _epsilons(claim, half)
    deltas = claim.deltas(epsilons)
    level = alpha / (2 * len(epsilons) * len(DIRECTIONS) * len(scores))
    events = []
    for user in scores:
        for direction in DIRECTIONS:
            likelier, other = scores[user]
            if direction == "out":
                likelier, other = -other, -likelier
            thresholds, rates, other_rates = _candidates(likelier[:half], other[:half], epsilons, level)
            for epsilon, delta in zip(epsilons.tolist(), deltas.tolist(), strict=True):
                threshold = thresholds[np.argmax(rates - math.exp(epsilon) * other_rates)]
                tested = len(likelier) - half
                events.append(
                    Event(
                        epsilon=epsilon,
                        delta=delta,
                        direction=direction,
                        user=user,
                        threshold=float(threshold if direction == "in" else -threshold),
                        rate=float(lower_bound(np.count_nonzero(likelier[half:] > threshold), tested, level)),
                        other_rate=float(upper_bound(np.count_nonzero(other[half:] > threshold), tested, level)),
                    )
                )
    return tuple(events)


def _epsilons(claim: MechanismClaim, trials: int) -> npt.NDArray[np.float64]:
    """Returns epsilons from 0 to where the claimed delta is too small to be refuted by so many trials."""
    smallest_delta = max(1e-4, 100 / trials)
    largest = min(claim.epsilon_at(min(smallest_delta, 0.5)), math.log(trials / 20))
    return np.linspace(0.0, max(largest, 1e-3), NUM_EPSILONS)


def _candidates(
    likelier: npt.NDArray[np.float64], other: npt.NDArray[np.float64], epsilons: npt.NDArray[np.float64], level: float
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Returns (candidates,) thresholds, and the bounds that either side's rate would have at each."""
    likelier, other = np.sort(likelier), np.sort(other)
    even = np.linspace(0, 1, _CANDIDATES // 4)
    rare = np.geomspace(1 / len(other), 1, _CANDIDATES // 4)
    quantiles = np.concatenate([even, 1 - rare])
    # The best threshold under the claim is epsilon itself.
    thresholds = np.unique(np.concatenate([np.quantile(likelier, quantiles), np.quantile(other, quantiles), epsilons]))
    above = [len(side) - np.searchsorted(side, thresholds, side="right") for side in (likelier, other)]
    rates = lower_bound(above[0], len(likelier), level)
    return thresholds, rates, upper_bound(above[1], len(other), level)
