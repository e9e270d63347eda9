"""Is the noise what is claimed: white after the strategy is undone, normal, with tails no trial would ever reach?

Counts are of signs and of values beyond fixed limits, whose laws are exactly binomial. The far tail is looked at on the
random words themselves: the smallest and largest, and those that stand for probabilities down to 2^-120.
"""

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri_exp
from scipy.stats import norm

from coowned import validate
from coowned.audit.audited_parts import AuditedParts
from coowned.audit.checks import CheckedLaw, binomial_check, certain_check, checked_law
from coowned.mechanism.keys import RunKey

_LIMITS = (1.0, 2.0, 3.0, 4.0)
_LONGEST_LAG = 64
_LARGEST_NORMAL = 13.0  # beyond it there is 6e-39 of a normal


def audit_noise(
    run_key: RunKey,
    *,
    coefficients: npt.NDArray[np.float64],
    iterations: int,
    trials: int = 4096,
    alpha: float = 1e-3,
    parts: AuditedParts | None = None,
) -> CheckedLaw:
    """Makes the noise of so many runs and undoes the strategy: what is left must be independent unit normals.

    Guarantees:
      - The probability of an alarm is at most alpha where it is.   (test_honest_noise_passes)
      - Noise correlated otherwise than claimed, reused or too small is caught.   (test_wrong_noise_is_caught)

    Example:
      >>> audit_noise(RunKey.from_seed(0), coefficients=np.array([0.8, 0.6]), iterations=20).holds
      True
    """
    validate.positive(iterations=iterations, trials=trials)
    parts = parts or AuditedParts()
    made = parts.noise(
        run_key, coefficients=coefficients, iterations=iterations, trials=trials, configuration="noise law"
    )
    rows = np.array([np.asarray(row, np.float64) for row in made])  # (iterations, trials)
    white = np.zeros_like(rows)
    for lag, coefficient in enumerate(np.asarray(coefficients)[:iterations]):
        white[lag:] += coefficient * rows[: iterations - lag]
    positive = white > 0
    checks = [binomial_check("positive values", int(positive.sum()), white.size, 0.5)]
    for limit in _LIMITS:
        beyond = int(np.count_nonzero(np.abs(white) > limit))
        checks.append(binomial_check(f"values beyond {limit:g}", beyond, white.size, float(2 * norm.sf(limit))))
    for lag in range(1, min(iterations - 1, _LONGEST_LAG) + 1):
        # Products of independent signs along a chain are themselves independent signs.
        same = positive[lag:] == positive[:-lag]
        checks.append(binomial_check(f"same sign {lag} steps later", int(same.sum()), same.size, 0.5))
    if trials > 1:
        same = positive[:, 1:] == positive[:, :-1]
        checks.append(binomial_check("same sign in the next coordinate", int(same.sum()), same.size, 0.5))
    return checked_law("noise", checks, alpha)


def audit_noise_tail(*, alpha: float = 1e-3, parts: AuditedParts | None = None) -> CheckedLaw:
    """Looks at the normals that extreme words stand for, where a float32 generator ends at 5.42.

    Guarantees:
      - A tail that ends early is caught.   (test_a_short_tail_is_caught)

    >>> audit_noise_tail().holds
    True
    """
    parts = parts or AuditedParts()
    # m, the lower 63 bits of a word, and 64 further bits stand for the tail probability (m + more / 2^64) / 2^64.
    exponents = np.arange(2, 121)
    bits = [1 << (128 - int(exponent)) for exponent in exponents]
    words = np.array([value >> 64 for value in bits], np.uint64)
    more = np.array([value & (2**64 - 1) for value in bits], np.uint64)
    expected = -ndtri_exp(-exponents * np.log(2.0))  # (119,) the normal exceeded with probability 2^-exponent
    sign = np.uint64(1 << 63)
    high, low = parts.normals(words | sign, more), parts.normals(words, more)
    # A word stands for the middle of an interval: half a unit of the last of its 64 (in the tail 128) bits.
    middle = 2.0 ** (exponents - np.where(exponents <= 17, 65.0, 129.0)) / np.minimum(expected, expected**2)
    error = float(np.max(np.abs(high - expected) / expected - 2 * middle))
    checks = [certain_check("relative error down to 2^-120", error <= 1e-9, observed=max(error, 0.0), expected=0.0)]
    mirrored = float(np.max(np.abs(high + low)))
    ends = parts.normals([0, int(sign)], [0, 0])
    checks += [
        certain_check("difference of the two tails", mirrored == 0, observed=mirrored, expected=0.0),
        certain_check(
            "largest value",
            bool(np.isfinite(ends).all()) and -ends[0] >= _LARGEST_NORMAL <= ends[1],
            observed=float(min(-ends[0], ends[1])),
            expected=_LARGEST_NORMAL,
        ),
    ]
    return checked_law("noise tail", checks, alpha)
