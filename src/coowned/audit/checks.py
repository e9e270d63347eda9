"""Exact tests that share one false-alarm probability, and exact bounds on a probability."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import beta, binom

from coowned import validate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """The result of one check."""

    name: str  # what was counted, or looked at
    observed: float  # to be compared with what is expected
    expected: float
    p_value: float  # probability of something as far off if all is right; 0 for what cannot happen at all


@dataclasses.dataclass(frozen=True)
class CheckedLaw:
    """Checks of one law; an alarm where a p-value is below alpha over their number, so at most alpha are false."""

    law: str
    checks: Sequence[Check]
    alpha: float

    def __post_init__(self) -> None:
        validate.in_range(0, 1, open_low=True, open_high=True, alpha=self.alpha)
        validate.positive(number_of_checks=len(self.checks))

    @property
    def level(self) -> float:
        return self.alpha / len(self.checks)

    @property
    def failures(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.p_value < self.level)

    @property
    def holds(self) -> bool:
        return not self.failures

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values."""
        checks = [dataclasses.asdict(check) for check in self.checks]
        return {"law": self.law, "holds": self.holds, "alpha": self.alpha, "checks": checks}


def binomial_check(name: str, count: int, trials: int, probability: float, *, too_few: bool = False) -> Check:
    """Tests exactly: twice the smaller tail; with `too_few`, the lower tail alone.

    >>> binomial_check("heads", 5, 10, 0.5).p_value
    1.0
    """
    validate.integer(at_least=0, at_most=trials, count=count)
    low, high = binom.cdf(count, trials, probability), binom.sf(count - 1, trials, probability)
    p_value = float(low if too_few else min(1.0, 2 * min(low, high)))
    return Check(name=name, observed=float(count), expected=float(trials * probability), p_value=p_value)


def share_check(name: str, happened: npt.ArrayLike, probability: float) -> Check:
    """Checks an array of coins the same way."""
    return binomial_check(name, int(np.count_nonzero(happened)), np.size(happened), probability)


def any_of(name: str, checks: Sequence[Check]) -> Check:
    """Returns the worst of several checks as one, corrected for multiple testing."""
    worst = min(checks, key=lambda check: check.p_value)
    return dataclasses.replace(worst, name=name, p_value=min(1.0, len(checks) * worst.p_value))


def certain_check(name: str, holds: bool, *, observed: float, expected: float = 0.0) -> Check:
    """Checks a property that involves no chance."""
    observed = float(np.nan_to_num(observed, nan=np.inf, posinf=1e300, neginf=-1e300))
    return Check(name=name, observed=min(observed, 1e300), expected=float(expected), p_value=1.0 if holds else 0.0)


def lower_bound(successes: npt.ArrayLike, trials: int, alpha: float) -> npt.NDArray[np.float64]:
    """Computes Clopper and Pearson's lower bound on a probability: above it with probability at most alpha.

    Guarantees:
      - Holds with at least 1 - alpha, exactly.   (test_clopper_pearson_covers, test_clopper_pearson_is_scipys)

    >>> round(float(lower_bound(5, 100, 0.05)), 4)
    0.0199
    """
    validate.positive(trials=trials)
    count = np.asarray(successes, np.float64)
    return np.nan_to_num(beta.ppf(alpha, count, trials - count + 1), nan=0.0)  # without successes


def upper_bound(successes: npt.ArrayLike, trials: int, alpha: float) -> npt.NDArray[np.float64]:
    """Computes Clopper and Pearson's upper bound on a probability: below it with probability at most alpha.

    >>> round(float(upper_bound(0, 100, 0.05)), 4)
    0.0295
    """
    validate.positive(trials=trials)
    count = np.asarray(successes, np.float64)
    return np.nan_to_num(beta.isf(alpha, count + 1, trials - count), nan=1.0)  # without failures
