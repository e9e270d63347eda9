"""Composes training steps, and finds the epsilon of a delta or the delta of an epsilon, with errors under control.

Every answer is an upper bound whatever grid is used; a finer grid only makes it tighter. The search for the grid works
on a coarse discretization (a few hundred atoms, no transform), whose normal approximation under the tilt says where
epsilon lies, how wide a window the sum needs and how much a spacing would add. Then one transform settles it.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from coowned.accounting.composition.group_mixture import LossAtoms, discretize, gaussian_pair, mixture_pair
from coowned.accounting.composition.parted import ERROR_SHARE, PartedTail, parts_grid, plan_parts
from coowned.accounting.composition.tilted import (
    LARGEST_TRANSFORM,
    ComposedLoss,
    EmptyTail,
    GridTooFineError,
    TiltedTail,
)
from coowned.accounting.gaussian import gaussian_epsilon, gaussian_log_delta
from coowned.errors import UncertifiableError
from coowned.mechanism.mechanism import Steps

LARGEST_EPSILON = 1e4
RELATIVE_LOOSENESS = 1e-4  # of epsilon: what the discretization may add
ALLOWED_ERROR_SHARE = 0.01  # of delta: what infinity, wrap-around and round-off may take
_COARSE_GROWTH = 0.05
_LOG_TAIL_SHARE = math.log(1e-6)  # of delta: mass charged as an infinite loss, over all steps
_CAP_ABOVE = 12.0  # above epsilon a single loss counts as infinite: costs exp(-12) of delta
_MUCH_WIDER = 3.0  # a window this many times wider than two parts need is not worth its transform
_LARGEST_JUMP_SHARES = (0.5, 0.7, 0.25, 0.1, 0.05, 0.0)  # by attempt: epsilon is guessed at first
SMALLEST_LOG_DELTA = -500.0  # curves are not followed below exp(-500)
_LOG_DELTAS = (-5.0, -25.0)  # where `ZeroOutTwice` divides epsilon between the directions
_SMALLEST_EPSILON = 1e-4  # below it looseness is no longer judged relative to epsilon

_Tail = TiltedTail | PartedTail | EmptyTail


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """A proven pair of epsilon and delta, and how it was computed."""

    epsilon: float  # proven together with delta; exactly one of the two was asked for
    delta: float
    spacing: float = 0.0  # of the loss grid; 0 for a closed form
    transform_size: int = 0  # length of the FFT; 0 for a closed form or a bound that needed none
    # Part of delta that is mass at infinity, wrap-around and round-off, already included in it.
    error_share: float = 0.0
    looseness: float = 0.0  # about how much the discretization adds to epsilon

    @property
    def is_precise(self) -> bool:
        """True if numerical errors are small enough for the answer to be shown; it is an upper bound in any case."""
        return self.error_share <= ALLOWED_ERROR_SHARE and math.isfinite(self.epsilon)


def compose_steps(steps: Sequence[Steps], adjacency: str) -> "Composition | ZeroOutTwice":
    """Composes independent steps under an adjacency."""
    if adjacency == "replace" and any(step.rounds_per_epoch > 1 for step in steps):
        return ZeroOutTwice(steps)
    return Composition(steps, adjacency)


class Composition:
    """Composes independent steps of possibly different kinds under one adjacency.

    Steps without coins (probability 1) are one Gaussian together, in closed form where there are no others.
    `merge_gaussians=False` composes them like all others, so that tests can compare the two.

    Random allocation is composed under zero-out alone; `ZeroOutTwice` makes a bound for replace from that.
    """

    def __init__(self, steps: Sequence[Steps], adjacency: str, *, merge_gaussians: bool = True):
        if any(step.rounds_per_epoch > 1 and (step.copies > 1 or adjacency != "zero-out") for step in steps):
            raise UncertifiableError("random allocation is composed for one copy under zero-out only; see ZeroOutTwice")
        merged = [step for step in steps if step.probability >= 1 and merge_gaussians]
        self._steps = tuple(step for step in steps if step not in merged)
        self._adjacency = adjacency
        squares = [step.repetitions * (step.copies / step.noise_multiplier) ** 2 for step in merged]
        self._gaussian_shift = math.sqrt(math.fsum(squares))
        self.directions = ("upper",) if adjacency == "replace" else ("upper", "lower")
        self.gaussian_mu = None if self._steps else self._gaussian_shift * (2 if adjacency == "replace" else 1)
        self._num_steps = sum(step.repetitions for step in self._steps) + 1

    def losses(self, *, log_delta: float, spacing: float, growth: float) -> dict[str, ComposedLoss]:
        """Discretizes the composition in every direction, with tails cut for a delta of exp(log_delta)."""
        log_tail = log_delta + _LOG_TAIL_SHARE - math.log(self._num_steps)
        grid = {"spacing": spacing, "growth": growth, "log_tail": log_tail}
        counted: list[tuple[dict[str, LossAtoms], int]] = []
        for step in self._steps:
            if step.rounds_per_epoch == 1:
                pair = mixture_pair(
                    copies=step.copies,
                    probability=step.probability,
                    noise_multiplier=step.noise_multiplier,
                    adjacency=self._adjacency,
                    log_cut=log_tail - 1.0,
                )
                counted.append((discretize(pair, **grid), step.repetitions))
        if self._gaussian_shift > 0:
            pair = gaussian_pair(shift=self._gaussian_shift, adjacency=self._adjacency)
            counted.append((discretize(pair, **grid), 1))
        for step in self._steps:
            if step.rounds_per_epoch > 1:
                counted += _epochs(step, **grid)
        counts = [count for _, count in counted]
        return {
            direction: ComposedLoss([atoms[direction] for atoms, _ in counted], counts) for direction in self.directions
        }

    def coarse(self, log_delta: float) -> dict[str, ComposedLoss]:
        """Discretizes coarsely: still an upper bound, and good enough to guide the search."""
        scale = max(self._largest_loss(log_delta), 1e-12)
        return self.losses(log_delta=log_delta, spacing=scale * 1e-10, growth=_COARSE_GROWTH)

    def _largest_loss(self, log_delta: float) -> float:
        # The loss at x is at most max_mean * x (twice that for replace), x a few tails above the largest mean.
        reach = math.sqrt(2 * max(1.0, math.log(self._num_steps) - log_delta - _LOG_TAIL_SHARE))
        largest = [step.copies / step.noise_multiplier for step in self._steps] + [self._gaussian_shift]
        return max(mean * (reach + mean) for mean in largest)

    def epsilon(self, delta: float, *, looseness: float = RELATIVE_LOOSENESS, refuse: bool = True) -> Answer:
        """Returns the smallest epsilon proven for delta, over all directions.

        With `refuse=False` an answer too imprecise to be given comes back with its `error_share`, and an epsilon that
        is out of reach as infinity: to find one's way, not to be shown.
        """
        if self.gaussian_mu is not None:
            return Answer(epsilon=gaussian_epsilon(self.gaussian_mu, delta), delta=delta)
        log_delta = math.log(delta)
        coarse = self.coarse(log_delta)
        guesses = {direction: loss.guess(log_delta) for direction, loss in coarse.items()}
        best: Answer | None = None
        about = max(guess[1] for guess in guesses.values())
        if about > LARGEST_EPSILON and not refuse:
            return Answer(epsilon=math.inf, delta=delta, error_share=1.0)
        if about > LARGEST_EPSILON:
            raise UncertifiableError(
                f"epsilon is about {about:.3g}, above {LARGEST_EPSILON:g}: that protects nobody; use a larger noise"
                " multiplier, fewer iterations or a smaller contribution bound"
            )
        for direction in sorted(coarse, key=lambda name: -guesses[name][1]):
            if best is not None and coarse[direction].chernoff(best.epsilon) <= log_delta:
                continue  # the coarse upper bound already proves this direction at that epsilon
            search = _Search(self, direction, coarse[direction], log_delta, looseness)
            answer = search.epsilon(guesses[direction])
            if best is None or answer.epsilon > best.epsilon:
                best = answer
            if math.isinf(best.epsilon):
                break
        assert best is not None
        return dataclasses.replace(_checked(best) if refuse else best, delta=delta)

    def guesses(self, log_delta: float) -> dict[str, float]:
        """Estimates epsilon in each direction at a delta of exp(log_delta), without a transform."""
        return {direction: loss.guess(log_delta)[1] for direction, loss in self.coarse(log_delta).items()}

    def guess(self, log_delta: float) -> float:
        """Estimates epsilon over all directions."""
        return max(self.guesses(log_delta).values())

    def direction_epsilon(self, direction: str, log_delta: float, looseness: float) -> Answer | None:
        """Returns the smallest epsilon proven for one direction; None where that is not precise or out of reach."""
        if log_delta < SMALLEST_LOG_DELTA:
            return None
        coarse = self.coarse(log_delta)[direction]
        guess = coarse.guess(log_delta)
        if guess[1] > LARGEST_EPSILON:
            return None
        answer = _Search(self, direction, coarse, log_delta, looseness).epsilon(guess)
        return answer if answer.is_precise else None

    def deltas(
        self, epsilons: Sequence[float], *, looseness: float = RELATIVE_LOOSENESS, refuse: bool = True
    ) -> list[Answer]:
        """Returns the smallest delta proven for each epsilon; neighbours share a transform that is accurate enough.

        With `refuse=False` an answer too imprecise to be shown comes back with its `error_share`.
        """
        if self.gaussian_mu is not None:
            deltas = [math.exp(gaussian_log_delta(self.gaussian_mu, epsilon)) for epsilon in epsilons]
            return [Answer(epsilon=epsilon, delta=delta) for epsilon, delta in zip(epsilons, deltas, strict=True)]
        found = [self.direction_deltas(direction, epsilons, looseness) for direction in self.directions]
        best = [max(answers, key=lambda answer: answer.delta) for answers in zip(*found, strict=True)]
        return [_checked(answer) if refuse else answer for answer in best]

    def direction_deltas(self, direction: str, epsilons: Sequence[float], looseness: float) -> list[Answer]:
        """Returns an upper bound on delta at each epsilon in one direction, precise or not."""
        answers: dict[float, Answer] = {}
        shared: tuple[float, float, _Tail] | None = None  # epsilon, looseness, transform
        for epsilon in sorted(set(epsilons)):
            answer = None
            if shared is not None and abs(epsilon - shared[0]) <= 2 * shared[2].deviation:
                answer = _answer_at(shared[2], epsilon, shared[1])
            if answer is None or answer.error_share > ALLOWED_ERROR_SHARE / 4:
                shared = self._tail_for(direction, epsilon, looseness)
                answer = _answer_at(shared[2], epsilon, shared[1])
            answers[epsilon] = answer
        return [answers[epsilon] for epsilon in epsilons]

    def _tail_for(self, direction: str, epsilon: float, looseness: float) -> tuple[float, float, _Tail]:
        log_delta = -50.0
        for _ in range(8):  # the tails to cut depend on the answer
            coarse = self.coarse(log_delta)[direction]
            tilt = coarse.tilt_for_mean(epsilon)
            reached = coarse.saddle_log_delta(tilt)[1] if coarse.cumulants(tilt)[1] > 0.9 * epsilon else -math.inf
            if reached >= log_delta or log_delta <= SMALLEST_LOG_DELTA:
                break
            log_delta = max(min(reached, 2 * log_delta), SMALLEST_LOG_DELTA)
        if epsilon >= coarse.largest + coarse.loss_error:
            return epsilon, 0.0, EmptyTail(log_infinity=float(np.logaddexp(coarse.log_infinity, coarse.log_capped)))
        log_delta = max(min(coarse.saddle_log_delta(tilt)[1], -1e-3), log_delta)
        allowed = max(looseness * epsilon, 10 * looseness / (tilt + 1))
        for allowed_share in (1.0, 1e-4, 1e-6):
            search = _Search(self, direction, coarse, log_delta, looseness)
            loss, tail = search.tail(tilt, epsilon, allowed, allowed_share)
            bound = tail.at(epsilon)
            if bound.error_share <= ALLOWED_ERROR_SHARE / 4 or log_delta <= SMALLEST_LOG_DELTA:
                break
            log_delta = max(min(bound.log_delta, log_delta) - 1.0, SMALLEST_LOG_DELTA)
        if bound.error_share > ALLOWED_ERROR_SHARE / 4 and log_delta > SMALLEST_LOG_DELTA:
            parted = _Search(self, direction, coarse, log_delta, looseness).parted_tail(epsilon, allowed)
            if parted is not None and parted.at(epsilon).error_share < bound.error_share:
                return epsilon, parted.looseness(epsilon), parted
        return epsilon, loss.looseness(tilt), tail


class ZeroOutTwice:
    """Bounds replace by zero-out twice: replacing examples is zeroing them out and then filling them in.

    With delta1 and delta2 of the two directions of zero-out, for every e1,

        delta(eps) <= delta1(e1) + exp(e1) delta2(eps - e1),

    and never more than if the round of a copy were known in every epoch.
    """

    gaussian_mu = None

    def __init__(self, steps: Sequence[Steps]):
        self._zero_out = Composition(steps, "zero-out")
        self._known_rounds = Composition([_with_known_rounds(step) for step in steps], "replace")

    def epsilon(self, delta: float, *, looseness: float = RELATIVE_LOOSENESS, refuse: bool = True) -> Answer:
        """Returns the smallest epsilon proven for delta; `refuse` as for `Composition`."""
        known = self._known_rounds.epsilon(delta, looseness=looseness, refuse=refuse)
        log_half = math.log(delta / 2) - 1e-12
        first = self._zero_out.direction_epsilon("upper", log_half, looseness)
        second = first and self._zero_out.direction_epsilon("lower", log_half - first.epsilon, looseness)
        if first is None or second is None or known.epsilon <= first.epsilon + second.epsilon:
            return known
        return dataclasses.replace(
            max(first, second, key=lambda answer: answer.error_share),
            epsilon=first.epsilon + second.epsilon,
            delta=delta,
            looseness=first.looseness + second.looseness,
        )

    def deltas(
        self, epsilons: Sequence[float], *, looseness: float = RELATIVE_LOOSENESS, refuse: bool = True
    ) -> list[Answer]:
        """Returns the smallest delta proven for each epsilon, over two ways to divide it between the directions."""
        known = self._known_rounds.deltas(epsilons, looseness=looseness, refuse=refuse)
        shares = [first / max(first + second, 1e-9) for first, second in map(self._guesses, _LOG_DELTAS)]
        points = np.asarray(epsilons)[:, None] * shares  # (num_epsilons, num_shares) what the first direction has
        first = self._proven("upper", points, looseness)
        second = self._proven("lower", np.asarray(epsilons)[:, None] - points, looseness)
        with np.errstate(over="ignore"):
            twice = np.minimum((first + np.exp(points) * second) * (1 + 1e-12), 1.0).min(axis=1)
        return [
            answer if answer.is_precise and answer.delta <= delta else Answer(epsilon=epsilon, delta=delta)
            for answer, epsilon, delta in zip(known, epsilons, twice.tolist(), strict=True)
        ]

    def guess(self, log_delta: float) -> float:
        return sum(self._guesses(log_delta))

    def _guesses(self, log_delta: float) -> tuple[float, float]:
        first = self._zero_out.guesses(log_delta)["upper"]
        return first, self._zero_out.guesses(max(log_delta - first, SMALLEST_LOG_DELTA))["lower"]

    def _proven(self, direction: str, points: np.ndarray, looseness: float) -> np.ndarray:
        """Returns delta at each of `points`, in their shape; 1, which always holds, where it is not precise."""
        answers = self._zero_out.direction_deltas(direction, points.ravel().tolist(), looseness)
        return np.array([answer.delta if answer.is_precise else 1.0 for answer in answers]).reshape(points.shape)


@dataclasses.dataclass(frozen=True)
class _Search:
    """Searches one direction of a composition near one delta: its coarse law finds the grid for a fine one."""

    composition: Composition
    direction: str
    coarse: ComposedLoss
    log_delta: float
    looseness: float  # relative, of epsilon: what the discretization may add

    def epsilon(self, guess: tuple[float, float]) -> Answer:
        """Returns the smallest epsilon proven for delta, precise or not, from a guess of (tilt, epsilon)."""
        log_delta = self.log_delta
        if self.coarse.log_delta_at_zero() <= log_delta:
            return Answer(epsilon=0.0, delta=math.exp(log_delta))  # proven without a transform
        tilt, epsilon = guess
        allowed_share = 1.0  # round-off is estimated roughly, and from above
        answer: Answer | None = None
        parted: Answer | None = None
        precise = True
        for attempt in range(len(_LARGEST_JUMP_SHARES)):
            allowed = self.looseness * max(epsilon, _SMALLEST_EPSILON) / 2 ** max(attempt - 2, 0)
            if attempt > 0 and parted is None and self._is_parted(epsilon, precise):
                parted = self._parted_epsilon(epsilon)
                if parted is not None and parted.error_share <= ALLOWED_ERROR_SHARE / 4:
                    return parted
            loss, tail = self.tail(tilt, epsilon, allowed, allowed_share, _LARGEST_JUMP_SHARES[attempt])
            found = _solve(tail, log_delta, max(epsilon, 0.0))
            if math.isinf(found):  # too far from the guess for this window, or errors alone are above delta
                answer = Answer(epsilon=math.inf, delta=math.exp(log_delta), error_share=1.0)
                tilt, epsilon, allowed_share, precise = loss.tilt_for_mean(tail.top), tail.top, 1e-4, False
                continue
            right_tilt = loss.tilt_for_mean(found)
            added = loss.looseness(right_tilt)
            answer = _found(tail, found, log_delta, added)
            precise = answer.error_share <= ALLOWED_ERROR_SHARE / 4
            settled = precise and abs(found - epsilon) <= 2 * tail.deviation
            limit = 1.5 * self.looseness * max(found, _SMALLEST_EPSILON)
            if found == 0.0 or (settled and (added <= limit or tail.size >= LARGEST_TRANSFORM // 2)):
                break
            tilt, epsilon = right_tilt, found
            allowed_share = allowed_share if precise else 1e-4
        assert answer is not None
        return answer if parted is None or answer.error_share <= parted.error_share else parted

    def _is_parted(self, epsilon: float, precise: bool) -> bool:
        """Returns whether two tilts do better than one: where one is imprecise or needs a far wider window."""
        coarse = self.coarse.capped(_cap(epsilon))
        parts = plan_parts(coarse, epsilon, self.log_delta)
        if parts is None or not precise:
            return parts is not None
        window = coarse.window(coarse.best_tilt(epsilon, self.log_delta, 1.0), epsilon, self.log_delta)
        return window.top - window.low > _MUCH_WIDER * parts.width

    def _parted_epsilon(self, epsilon: float) -> Answer | None:
        """Finds `epsilon` by `PartedTail`, on a rough grid and then on a fine one; None where that fails."""
        answer: Answer | None = None
        rough, error_share = 30.0, ERROR_SHARE
        for _ in range(12):
            allowed = rough * self.looseness * max(epsilon, _SMALLEST_EPSILON)
            tail = self.parted_tail(epsilon, allowed, error_share)
            found = math.inf if tail is None else _solve(tail, self.log_delta, epsilon)
            if tail is None or math.isinf(found):
                break
            answer = _found(tail, found, self.log_delta, tail.looseness(found))
            if found == 0.0:
                return answer
            # Just below the chance of ever being drawn delta hardly depends on epsilon, and errors weigh the more.
            weight = max(-tail.at(found).slope * found, 2e-3)
            precise = answer.error_share <= min(ALLOWED_ERROR_SHARE / 4, 1e-2 * weight)
            settled = abs(found - epsilon) <= 2 * tail.deviation
            if rough == 1.0 and settled and precise:
                return answer
            if settled and not precise:
                error_share *= 1e-2
            if settled or abs(found - epsilon) <= 0.05 * epsilon:
                rough = 1.0
            # Far below the epsilon it was computed for a tail is much too large: the answer lies lower still.
            epsilon = max(found * found / epsilon, found / 4) if found < 0.7 * epsilon else found
        return answer if rough == 1.0 else None

    def parted_tail(self, epsilon: float, allowed: float, error_share: float = ERROR_SHARE) -> PartedTail | None:
        coarse = self.coarse.capped(_cap(epsilon))
        parts = plan_parts(coarse, epsilon, self.log_delta, error_share)
        if parts is None:
            return None
        spacing, growth = parts_grid(coarse, parts, epsilon, _COARSE_GROWTH, allowed)
        for loss in self._wider_and_wider(epsilon, spacing, growth):
            if loss.up_to(parts.cut) is None:
                return None
            with contextlib.suppress(GridTooFineError):
                return PartedTail(loss, parts, epsilon, self.log_delta)
        return None

    def tail(
        self, right_tilt: float, epsilon: float, allowed: float, allowed_share: float, largest_share: float = 0.95
    ) -> tuple[ComposedLoss, TiltedTail]:
        """Discretizes and transforms so that about `allowed` is added to epsilon, as far as memory permits."""
        coarse = self.coarse.capped(_cap(epsilon))
        tilt = coarse.best_tilt(epsilon, self.log_delta, allowed_share)
        window = coarse.window(tilt, epsilon, self.log_delta)
        spacing, growth = _grid(coarse, right_tilt, window.top - window.low, allowed)
        for loss in self._wider_and_wider(epsilon, spacing, growth):
            with contextlib.suppress(GridTooFineError):
                return loss, TiltedTail(loss, tilt, epsilon, self.log_delta, largest_share)
        raise UncertifiableError(
            f"no grid of {LARGEST_TRANSFORM} points holds the privacy loss near epsilon = {epsilon:.3g}; use fewer"
            " iterations or a larger noise multiplier"
        )

    def _wider_and_wider(self, epsilon: float, spacing: float, growth: float) -> Iterator[ComposedLoss]:
        """Yields the composition on a grid of that spacing, then on coarser ones, in case a transform is too long."""
        for _ in range(40):
            losses = self.composition.losses(log_delta=self.log_delta, spacing=spacing, growth=growth)
            yield losses[self.direction].capped(_cap(epsilon))
            spacing *= 1.5


def _with_known_rounds(step: Steps) -> Steps:
    """Drops the amplification: a copy is in one round of every epoch, and the round is known."""
    if step.rounds_per_epoch == 1:
        return step
    epochs = -(-step.repetitions // step.rounds_per_epoch)
    return dataclasses.replace(step, probability=1.0, repetitions=epochs, rounds_per_epoch=1)


def _cap(epsilon: float) -> float:
    """Returns the loss above which one counts as infinite; it is above what coarse atoms next to epsilon stand for."""
    return 1.1 * epsilon + _CAP_ABOVE


def _epochs(step: Steps, **grid: float) -> list[tuple[dict[str, LossAtoms], int]]:
    """Returns the atoms of whole epochs of random allocation, and of the one in which training ends."""
    from coowned.accounting.composition.allocation_loss import allocation_atoms

    rounds, noise = step.rounds_per_epoch, step.noise_multiplier
    whole, rest = divmod(step.repetitions, rounds)
    kinds = [(run, count) for run, count in ((rounds, whole), (rest, 1)) if run * count]
    return [(allocation_atoms(rounds=rounds, run=run, noise_multiplier=noise, **grid), count) for run, count in kinds]


def _grid(coarse: ComposedLoss, tilt: float, window: float, allowed: float) -> tuple[float, float]:
    """Returns spacing and growth that add about `allowed` to epsilon in all, for a window of that width."""
    from_wide = coarse.looseness(tilt)
    growth = _COARSE_GROWTH * math.sqrt(allowed / 2 / max(from_wide, 1e-300))
    growth = min(max(growth, 5e-4), 2 * _COARSE_GROWTH)
    size = 2**10
    while True:
        spacing = window * 1.05 / (size - 8)
        if (tilt + 1) / 2 * coarse.grid_spread(tilt, spacing) <= allowed / 2 or size >= LARGEST_TRANSFORM // 2:
            return spacing, growth
        size *= 2


def _solve(tail: TiltedTail | PartedTail, log_delta: float, start: float) -> float:
    """Returns the smallest epsilon >= 0 at which the tail's bound is at most log_delta, from the private side."""
    if tail.at(0.0).log_delta <= log_delta:
        return 0.0
    epsilon, low, high = start, 0.0, math.inf  # the root is in (low, high]
    for _ in range(200):
        bound = tail.at(epsilon)
        excess = bound.log_delta - log_delta
        low, high = (epsilon, high) if excess > 0 else (low, epsilon)
        if -1e-9 < excess <= 0 or (excess <= 0 and high - low <= 1e-12 * high):
            return epsilon
        if epsilon > tail.top:
            return math.inf  # what is at infinity alone is above delta
        # Newton, aimed a little beyond the root so that it is met on the private side.
        step = epsilon + (excess + 5e-10) / max(-bound.slope, 1e-12)
        limit = epsilon + 4 * tail.deviation if math.isinf(high) else high
        if not low < step <= limit:
            step = limit if math.isinf(high) else (low + high) / 2
        epsilon = step
    return high


def _found(tail: TiltedTail | PartedTail, epsilon: float, log_delta: float, looseness: float) -> Answer:
    bound = tail.at(epsilon)
    return Answer(
        epsilon=epsilon,
        delta=math.exp(log_delta),
        spacing=tail.spacing,
        transform_size=tail.size,
        error_share=bound.error_share * math.exp(min(bound.log_delta - log_delta, 0.0)),
        looseness=looseness,
    )


def _answer_at(tail: _Tail, epsilon: float, looseness: float) -> Answer:
    bound = tail.at(epsilon)
    error_share = bound.error_share if bound.log_delta > SMALLEST_LOG_DELTA else 0.0  # nothing to be precise about
    if bound.log_delta > 0:  # no delta is above 1: errors count only as far as they keep it from there
        without_errors = math.exp(min(bound.log_delta, 600.0)) * max(0.0, 1 - bound.error_share)
        error_share = min(error_share, max(0.0, 1 - without_errors))
    return Answer(
        epsilon=epsilon,
        delta=math.exp(min(bound.log_delta, 0.0)),
        spacing=tail.spacing,
        transform_size=tail.size,
        error_share=error_share,
        looseness=looseness,
    )


def _checked(answer: Answer) -> Answer:
    if not answer.is_precise:
        raise UncertifiableError(
            f"numerical errors take {answer.error_share:.1%} of delta = {answer.delta:.3g}, more than the 1% allowed;"
            " use a larger delta, fewer iterations or a larger noise multiplier"
        )
    return answer
