"""Exact confidence bounds on a probability, from how often something happened."""

import numpy as np
import numpy.typing as npt
from scipy.stats import beta

from coowned import validate


def lower_bound(successes: npt.ArrayLike, trials: int, alpha: float) -> npt.NDArray[np.float64]:
    """Below the true probability but with probability alpha, whatever that is.

    Guarantees:
      - Holds with at least 1 - alpha, exactly.   (test_clopper_pearson_covers, test_clopper_pearson_is_scipys)

    >>> round(float(lower_bound(5, 100, 0.05)), 4)
    0.0199
    """
    validate.positive(trials=trials)
    count = np.asarray(successes, np.float64)
    found = beta.ppf(alpha, np.maximum(count, 1), trials - count + 1)
    return np.where(count > 0, found, 0.0)


def upper_bound(successes: npt.ArrayLike, trials: int, alpha: float) -> npt.NDArray[np.float64]:
    """Above the true probability but with probability alpha.

    >>> round(float(upper_bound(0, 100, 0.05)), 4)
    0.0295
    """
    validate.positive(trials=trials)
    count = np.asarray(successes, np.float64)
    found = beta.isf(alpha, count + 1, np.maximum(trials - count, 1))
    return np.where(count < trials, found, 1.0)
