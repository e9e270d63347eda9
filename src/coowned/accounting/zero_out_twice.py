"""Replace from zero-out, for steps whose loss is known under zero-out alone (random allocation)."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from coowned.accounting.numerical import RELATIVE_LOOSENESS, SMALLEST_LOG_DELTA, Answer, Composition
from coowned.mechanism.mechanism import Steps

_LOG_DELTAS = (-5.0, -25.0)  # where the division of epsilon between the directions is computed


def compose_steps(steps: Sequence[Steps], adjacency: str) -> "Composition | ZeroOutTwice":
    """The composition of independent steps under an adjacency."""
    if adjacency == "replace" and any(step.rounds_per_epoch > 1 for step in steps):
        return ZeroOutTwice(steps)
    return Composition(steps, adjacency)


class ZeroOutTwice:
    """An upper bound under replace: replacing examples is zeroing them out and then filling them in.

    With delta1 and delta2 of the two directions of zero-out, for every e1,

        delta(eps) <= delta1(e1) + exp(e1) delta2(eps - e1),

    and never more than if the round of a copy were known in every epoch.
    """

    gaussian_mu = None

    def __init__(self, steps: Sequence[Steps]):
        self._zero_out = Composition(steps, "zero-out")
        self._known_rounds = Composition([_with_known_rounds(step) for step in steps], "replace")

    def epsilon(self, delta: float, *, looseness: float = RELATIVE_LOOSENESS, refuse: bool = True) -> Answer:
        """The smallest epsilon proven for delta; `refuse` as for `Composition`."""
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
        """The smallest delta proven for each epsilon, over two ways to divide it between the directions."""
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
        """delta at each of `points`, of that shape; 1, which always holds, where it is not precise."""
        answers = self._zero_out.direction_deltas(direction, points.ravel().tolist(), looseness)
        return np.array([answer.delta if answer.is_precise else 1.0 for answer in answers]).reshape(points.shape)


def _with_known_rounds(step: Steps) -> Steps:
    """Without amplification: a copy is in one round of every epoch, and the round is known."""
    if step.rounds_per_epoch == 1:
        return step
    epochs = -(-step.repetitions // step.rounds_per_epoch)
    return dataclasses.replace(step, probability=1.0, repetitions=epochs, rounds_per_epoch=1)
