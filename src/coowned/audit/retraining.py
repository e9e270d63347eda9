"""Measurement of how much a model leaks about one person, by training it many times with and without their content."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from coowned import validate
from coowned.audit.checks import lower_bound, upper_bound
from coowned.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredLeak:
    """The lower bound on epsilon that an attack on one person proves."""

    # With probability at least 1 - alpha no (epsilon, delta) guarantee with a smaller epsilon holds for this person.
    epsilon_lower_bound: float
    true_positive_rate: float  # of the attack, on the half of the models its threshold was not chosen on
    false_positive_rate: float
    trials: int  # models trained, half of them with the person's content
    alpha: float  # probability that the bound is above the truth
    delta: float


def measure_leak(
    scores_with: npt.NDArray[np.float64], scores_without: npt.NDArray[np.float64], *, delta: float, alpha: float = 1e-3
) -> MeasuredLeak:
    """Returns a lower bound on epsilon from the scores of models trained with a person's content and without it.

    The threshold and the direction ("high means the person was in it", or out of it) are chosen on the first half of
    the scores; on the other half the attack's two rates have Clopper-Pearson bounds at alpha / 2 each. Since
    P(A) <= e^epsilon Q(A) + delta, epsilon >= log((lower(P) - delta) / upper(Q)).

    Guarantees:
      - Above the truth with probability at most alpha.   (test_bound_is_seldom_above_the_truth)
      - A plain leak is found.                            (test_a_plain_leak_is_found)

    Args:
      scores_with, scores_without: one for every model, in the order they were trained.
      delta: of the claim.
      alpha: probability that the bound is above the truth.

    Example:
      >>> leak = measure_leak(np.arange(100) + 1000.0, np.arange(100.0), delta=1e-6)
      >>> round(leak.epsilon_lower_bound, 2)
      1.81
    """
    validate.in_range(0, 1, open_low=True, open_high=True, delta=delta, alpha=alpha)
    inside, outside = np.asarray(scores_with, np.float64), np.asarray(scores_without, np.float64)
    if min(len(inside), len(outside)) < 4:
        raise InputError("a leak is measured on at least four models with a person's content and four without")
    if not (np.isfinite(inside).all() and np.isfinite(outside).all()):
        raise InputError("scores must be finite; check the models")
    half_in, half_out = len(inside) // 2, len(outside) // 2
    threshold, sign, complement = _choose(inside[:half_in], outside[:half_out], delta, alpha)
    # A is "guessed in" (P with, Q without), or its complement with the roles exchanged.
    hits = sign * inside[half_in:] > threshold
    false_alarms = sign * outside[half_out:] > threshold
    first, second = (~false_alarms, ~hits) if complement else (hits, false_alarms)
    bound = float(_epsilon(int(first.sum()), len(first), int(second.sum()), len(second), delta, alpha))
    return MeasuredLeak(
        epsilon_lower_bound=bound,
        true_positive_rate=float(hits.mean()),
        false_positive_rate=float(false_alarms.mean()),
        trials=len(inside) + len(outside),
        alpha=alpha,
        delta=delta,
    )


def retrain(
    train: Callable[[bool, int], float], *, trials: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Returns (scores with, scores without): `train(included, number)` returns the score of one freshly trained model.

    Models with and without alternate, so that drift cannot tell them apart.
    """
    validate.integer(at_least=8, trials=trials)
    scores = np.array([train(number % 2 == 0, number) for number in range(trials)])
    return scores[::2], scores[1::2]


def _choose(
    inside: npt.NDArray[np.float64], outside: npt.NDArray[np.float64], delta: float, alpha: float
) -> tuple[float, int, bool]:
    """Returns the threshold, direction and side for which the bound on this half would be largest."""
    best, chosen = -math.inf, (0.0, 1, False)
    for sign in (1, -1):
        ups, downs = np.sort(sign * inside), np.sort(sign * outside)
        edges = np.unique(np.concatenate([ups, downs]))
        thresholds = (edges[1:] + edges[:-1]) / 2
        hits = len(ups) - np.searchsorted(ups, thresholds, side="right")
        false_alarms = len(downs) - np.searchsorted(downs, thresholds, side="right")
        for complement in (False, True):
            if complement:
                bounds = _epsilon(len(downs) - false_alarms, len(downs), len(ups) - hits, len(ups), delta, alpha)
            else:
                bounds = _epsilon(hits, len(ups), false_alarms, len(downs), delta, alpha)
            if len(bounds) and bounds.max() > best:
                best, chosen = float(bounds.max()), (float(thresholds[bounds.argmax()]), sign, complement)
    return chosen


def _epsilon(
    first: npt.ArrayLike, of_first: int, second: npt.ArrayLike, of_second: int, delta: float, alpha: float
) -> npt.NDArray[np.float64]:
    """Computes lower bounds on epsilon from an event's counts on the likelier side and on the other."""
    low = lower_bound(first, of_first, alpha / 2)
    high = upper_bound(second, of_second, alpha / 2)
    return np.log(np.maximum(low - delta, high) / high)
