"""Finds the smallest noise multiplier that meets a privacy target."""

import dataclasses
import math
from collections.abc import Callable

from coowned import validate
from coowned.accounting.composition import ALLOWED_ERROR_SHARE, Answer, Composition, ZeroOutTwice, compose_steps
from coowned.accounting.gaussian import find_root, gaussian_mu
from coowned.accounting.terms import check_terms
from coowned.errors import InputError, UncertifiableError
from coowned.files import cached
from coowned.mechanism.mechanism import Mechanism, Steps

ACCOUNTANT_VERSION = 3  # raise it whenever any epsilon or noise multiplier may change
RELATIVE_TOLERANCE = 3e-4  # of the noise multiplier: distance to one that misses the target
SMALLEST, _LARGEST = 1e-4, 1e12  # noise multipliers the search looks at
_ROUGH_LOOSENESS = 3e-3  # of epsilon, while the search is still far away
_NEAR = 0.02  # of epsilon, or of the noise multiplier: from here on the search is at the finest grid
_FEW_DRAWS = 5.0  # expected in the whole run: below it the coarse search is far off
_GROWTH = 1.06  # of the noise where numerical errors are too large a part of delta

_LARGEST_STEP = math.log(2.0)  # of the noise multiplier, at the finest grid
_NO_NOISE = "no noise multiplier up to 1e12 meets the target; use a larger epsilon or delta"


def calibrate(mechanism: Mechanism, *, epsilon: float, delta: float, adjacency: str, cache: bool = True) -> float:
    """Returns the smallest noise multiplier, in clip norms of one example, that is proven to give `epsilon` at `delta`.

    Guarantees:
      - The accountant confirms it: `epsilon(...)` at the result is at most the target, 0.999 of the result misses
        it.   (test_calibration_is_private_and_tight, test_calibration_over_the_range)
      - Also where delta is just below the chance of ever being drawn.
        (test_a_delta_just_below_the_chance_of_being_drawn, test_calibration_near_the_chance_of_being_drawn)

    The search looks at noise multipliers from 0.0001, which comes back if it meets the target, to 1e12. Should
    numerical errors take more than 1% of delta at the least noise, it is raised until they do not.
    Raises UncertifiableError where no noise multiplier up to 1e12 does it, InputError where delta is so large that no
    noise is needed at all.
    Cost: a coarse search without transforms, then two to five evaluations of `epsilon`; with less than five expected
    draws in the whole run, about ten. Results are kept on disk unless `cache` is false, closed forms
    are not.

    Example:
      >>> from coowned import MinSeparation
      >>> m = MinSeparation(contribution_bound=8, min_separation=16, num_bands=16, iterations=2500)
      >>> round(calibrate(m, epsilon=8.0, delta=1e-10, adjacency="zero-out"), 3)
      2.359
    """
    check_terms(delta=delta, adjacency=adjacency, epsilon=epsilon)
    refuse_if_never_drawn(mechanism, delta)
    kinds = mechanism.user_steps(1.0)
    gaussian = [steps for steps in kinds if steps.probability >= 1]
    sampled = [steps for steps in kinds if steps.probability < 1]
    smallest = max((_calibrate_gaussian(steps, epsilon, delta, adjacency) for steps in gaussian), default=0.0)
    if not sampled:
        return smallest

    def search() -> float:
        noise_multiplier = smallest
        for steps in sampled:
            found = calibrate_sampled(steps, epsilon, delta, adjacency, at_least=noise_multiplier)
            noise_multiplier = max(noise_multiplier, found)
        return noise_multiplier

    if not cache:
        return search()
    question = {
        "accountant": ACCOUNTANT_VERSION,
        "mechanism": type(mechanism).__name__,
        "fields": dataclasses.asdict(mechanism),
        "epsilon": float(epsilon),
        "delta": float(delta),
        "adjacency": adjacency,
        "tolerance": RELATIVE_TOLERANCE,
    }
    return cached("accounting", question, search, encode=repr, decode=_finite)


def calibrate_release(
    mechanism: Mechanism,
    *,
    noise_multiplier: float,
    contribution_bound: int,
    epsilon: float,
    delta: float,
    adjacency: str,
) -> float:
    """Returns the least noise of one Gaussian release with which training and release together have `epsilon`.

    A user is in `contribution_bound` copies of the release beside all that training allows. The noise is in units of
    the longest vector that one copy adds; within 0.1% of the smallest that is proven.

    Guarantees:
      - The accountant confirms it for both together.   (test_release_is_private_and_tight)

    Example:
      >>> from coowned import MinSeparation
      >>> m = MinSeparation(contribution_bound=4, min_separation=8, num_bands=8, iterations=100)
      >>> noise = calibrate(m, epsilon=1.9, delta=1e-6, adjacency="zero-out")
      >>> round(calibrate_release(m, noise_multiplier=noise, contribution_bound=2, epsilon=2.0, delta=1e-6,
      ...                         adjacency="zero-out"), 1)
      14.9
    """
    check_terms(delta=delta, adjacency=adjacency, epsilon=epsilon, noise_multiplier=noise_multiplier)
    validate.positive(contribution_bound=contribution_bound)
    kinds = mechanism.user_steps(noise_multiplier)

    def composed(noise: float) -> list[Composition | ZeroOutTwice]:
        release = Steps(copies=contribution_bound, probability=1.0, noise_multiplier=noise, repetitions=1)
        return [compose_steps([steps, release], adjacency) for steps in kinds]

    def proven(log_noise: float) -> float:
        return max(one.epsilon(delta).epsilon for one in composed(math.exp(log_noise))) - epsilon

    def search() -> float:
        # A release alone that needs all of epsilon is too noisy for nobody: a lower end of the search.
        low = math.log(contribution_bound * (2 if adjacency == "replace" else 1) / gaussian_mu(epsilon, delta))
        high = low + 1.0
        while proven(high) > 0:
            low, high = high, high + 1.0
            if high > math.log(_LARGEST):
                raise UncertifiableError(
                    f"training alone has an epsilon of {epsilon:g} or nearly so: no noise makes an evaluation free"
                )
        if (value := proven(low)) <= 0:
            return math.exp(low)
        assert value > 0
        log_noise = find_root(proven, low, high, absolute=3e-4)
        while proven(log_noise) > 0:
            log_noise += 5e-4
        return math.exp(log_noise)

    question = {
        "accountant": ACCOUNTANT_VERSION,
        "release": contribution_bound,
        "mechanism": type(mechanism).__name__,
        "fields": dataclasses.asdict(mechanism),
        "noise_multiplier": float(noise_multiplier),
        "epsilon": float(epsilon),
        "delta": float(delta),
        "adjacency": adjacency,
    }
    return cached("accounting", question, search, encode=repr, decode=_finite)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("not a noise multiplier")
    return value


def _calibrate_gaussian(steps: Steps, epsilon: float, delta: float, adjacency: str) -> float:
    sensitivity = compose_steps([steps], adjacency).gaussian_mu
    assert sensitivity is not None
    noise_multiplier = sensitivity / gaussian_mu(epsilon, delta)
    while _composed(steps, noise_multiplier, adjacency).epsilon(delta).epsilon > epsilon:
        noise_multiplier *= 1 + 1e-13
    return noise_multiplier


def _composed(steps: Steps, noise_multiplier: float, adjacency: str) -> Composition | ZeroOutTwice:
    """Composes steps that are given for noise multiplier 1 with another one."""
    steps = dataclasses.replace(steps, noise_multiplier=steps.noise_multiplier * noise_multiplier)
    return compose_steps([steps], adjacency)


def refuse_if_never_drawn(mechanism: Mechanism, delta: float) -> None:
    """Raises InputError if delta is not below the chance that a user is ever drawn: no noise would be needed."""
    for steps in mechanism.user_steps(1.0):
        if steps.probability >= 1:
            continue
        chance = -math.expm1(steps.copies * steps.repetitions * math.log1p(-steps.probability))
        if chance <= delta:
            raise InputError(
                f"delta = {delta:g} is not below the probability {chance:.3g} that any copy of a user is ever drawn: "
                "the target would be met without noise, releasing their data; use a much smaller delta"
            )


def calibrate_sampled(steps: Steps, epsilon: float, delta: float, adjacency: str, *, at_least: float) -> float:
    log_delta = math.log(delta)

    def coarse(log_noise: float) -> float:
        return _composed(steps, math.exp(log_noise), adjacency).guess(log_delta) - epsilon

    answers: dict[float, Answer] = {}  # at the finest grid, by noise multiplier

    def proven(noise_multiplier: float) -> float:
        answers[noise_multiplier] = _composed(steps, noise_multiplier, adjacency).epsilon(delta, refuse=False)
        return answers[noise_multiplier].epsilon

    def rough(noise_multiplier: float) -> float:
        composed = _composed(steps, noise_multiplier, adjacency)
        return composed.epsilon(delta, refuse=False, looseness=_ROUGH_LOOSENESS).epsilon

    if at_least > 0 and proven(at_least) <= epsilon:
        noise_multiplier = at_least
    else:
        start = max(math.exp(_root(coarse)), SMALLEST)
        draws = steps.copies * steps.probability * steps.repetitions
        noise_multiplier = narrow(proven, rough, start, epsilon, near=draws > _FEW_DRAWS)
    # The search may pass through noise that cannot be certified, but may not end there.
    if not answers[noise_multiplier].error_share <= ALLOWED_ERROR_SHARE:
        return least_certified(
            lambda noise: proven(noise) <= epsilon and answers[noise].error_share <= ALLOWED_ERROR_SHARE,
            noise_multiplier,
        )
    return noise_multiplier


def least_certified(certified: Callable[[float], bool], refused: float) -> float:
    """Returns the least noise above `refused` that the accountant certifies for the target: more than is needed.

    For where numerical errors are too large a part of delta until the noise is a little larger.
    """
    growth = _GROWTH
    accepted = refused * growth
    while not certified(accepted):
        refused, growth = accepted, growth**1.5
        accepted *= growth
        if accepted > _LARGEST:
            raise UncertifiableError("no noise multiplier up to 1e12 can be certified; use a larger delta")
    while accepted > refused * (1 + 2 * RELATIVE_TOLERANCE):
        middle = math.sqrt(refused * accepted)
        if certified(middle):
            accepted = middle
        else:
            refused = middle
    return accepted


def _root(falling: Callable[[float], float]) -> float:
    """Returns about where a falling function of log(noise multiplier) is 0."""
    low, high = math.log(0.7), math.log(1.4)
    while falling(low) <= 0:
        low, high = low - math.log(2), low
        if low < math.log(SMALLEST):
            return low
    while falling(high) > 0:
        low, high = high, high + math.log(4)
        if high > math.log(_LARGEST):
            raise UncertifiableError(_NO_NOISE)
    return find_root(falling, low, high, absolute=1e-3)


def narrow(
    proven: Callable[[float], float], rough: Callable[[float], float], start: float, epsilon: float, *, near: bool
) -> float:
    """Narrows down the smallest noise multiplier that meets the target, from a start that is nearly right if `near`.

    It is not where few draws decide delta: the coarse law's normal approximation is far off.
    """
    noise, slope, value = start, -1.5, math.nan
    if near:
        value = proven(start)
        near = abs(_log_ratio(value, epsilon)) <= 5 * _NEAR
    if not near:
        noise, slope = _approach(rough, start, epsilon)
        value = proven(noise)
    bracket = _Bracket(epsilon=epsilon, slope=slope)
    for _ in range(60):
        bracket.add(noise, value)
        if bracket.met is not None and bracket.is_narrow:
            return bracket.met
        if bracket.missed is not None and bracket.missed >= _LARGEST:
            raise UncertifiableError(_NO_NOISE)
        noise = bracket.next_noise()
        value = proven(noise)
    raise UncertifiableError("the search for the noise multiplier did not settle; use a larger delta")


@dataclasses.dataclass
class _Bracket:
    """Brackets the noise multiplier that just meets the target, and narrows the bracket by the secant method."""

    epsilon: float  # the target
    slope: float  # of log(epsilon) by log(noise)
    met: float | None = None  # the smallest noise known to meet the target
    missed: float | None = None  # the largest known to miss it
    value: float = math.nan  # the epsilon that was found last
    points: list[tuple[float, float]] = dataclasses.field(default_factory=list)  # log(noise), log(epsilon / target)

    @property
    def is_narrow(self) -> bool:
        if self.met is None:
            return False
        return self.met <= SMALLEST or (self.missed is not None and self.met / self.missed <= 1 + RELATIVE_TOLERANCE)

    def add(self, noise: float, value: float) -> None:
        """Records that `noise` gives an epsilon of `value`."""
        if value <= self.epsilon:
            self.met = noise if self.met is None else min(self.met, noise)
        else:
            self.missed = noise if self.missed is None else max(self.missed, noise)
        self.value = value
        self.points.append((math.log(noise), _log_ratio(value, self.epsilon)))

    def next_noise(self) -> float:
        """Returns the noise multiplier to try next, inside the bracket where there is one."""
        log_noise, log_ratio = self.points[-1]
        if len(self.points) > 1 and log_noise != self.points[-2][0]:
            self.slope = min((log_ratio - self.points[-2][1]) / (log_noise - self.points[-2][0]), -0.05)
        # Aim a third of the tolerance to the other side of the root than this point is, to close the bracket.
        beyond = RELATIVE_TOLERANCE / 3 if self.value > self.epsilon else -RELATIVE_TOLERANCE / 3
        step = min(max(-log_ratio / self.slope, -_LARGEST_STEP), _LARGEST_STEP)
        noise = math.exp(log_noise + step + beyond)
        if self.met is not None and self.missed is not None and not self.missed < noise < self.met:
            noise = math.sqrt(self.met * self.missed)
        elif self.met is None:
            noise = max(noise, math.exp(max(point[0] for point in self.points)) * (1 + 1e-4))
        elif self.missed is None:
            noise = min(noise, self.met * (1 - 1e-4))
        return min(max(noise, SMALLEST), _LARGEST)


def _approach(rough: Callable[[float], float], start: float, epsilon: float) -> tuple[float, float]:
    """Returns a noise multiplier that nearly meets the target, and the slope of log(epsilon) by log(noise) there.

    epsilon may be 0 over most of the range and rise steeply: a bracket that is at least halved every other time.
    """
    low, high = -math.inf, math.inf  # log noise: the largest known to miss the target, the smallest known to meet it
    above = below = 0.0  # log(epsilon / target) there
    here, step = math.log(start), math.log(1.5)
    for turn in range(200):
        ratio = _log_ratio(rough(math.exp(here)), epsilon)
        if ratio > 0:
            low, above = here, ratio
        else:
            high, below = here, ratio
        slope = min((below - above) / (high - low), -0.05) if math.isfinite(high - low) else -1.5
        if abs(ratio) <= _NEAR or high - low <= _NEAR or high <= math.log(SMALLEST):
            break
        if low >= math.log(_LARGEST):
            raise UncertifiableError(_NO_NOISE)
        if math.isinf(high):
            here, step = min(low + step, math.log(_LARGEST)), 2 * step
        elif math.isinf(low):
            here, step = max(high - step, math.log(SMALLEST)), 2 * step
        else:
            share = above / (above - below) if turn % 2 else 0.5
            here = low + min(max(share, 0.05), 0.95) * (high - low)
    return math.exp(here), slope


def _log_ratio(value: float, epsilon: float) -> float:
    return math.log(min(max(value / epsilon, 1e-6), 1e6))
