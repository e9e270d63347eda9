"""Tests of random bits at their sources: keys of the operating system, and the normals of extreme words.

No number of trials reaches the tail of the noise, and none sees that two keys are alike: both are looked at directly.
"""

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri_exp

from coowned.audit.checks import CheckedLaw, any_of, binomial_check, certain_check, share_check
from coowned.exact import normals
from coowned.exact.keys import RunKey

_LARGEST_NORMAL = 13.0  # beyond it there is 6e-39 of a normal
_KEYS = 2**18  # of 32 random bits, so many would hold 8 equal pairs on average
_LAGS = (1, 7, 8, 31, 32, 63, 64, 128)  # bits


def audit_key_source(*, alpha: float = 1e-3, keys: int = _KEYS) -> CheckedLaw:
    """Draws many keys as a run does, and tests that all differ and their bits are independent.

    Guarantees:
      - The probability of an alarm is at most alpha where keys are independent random bits.   (test_keys_pass)
      - Constant, biased or repeated bits are caught, and keys that have 32 random bits (with probability 0.9996).
        (test_wrong_key_sources_are_caught)
    What it is not: able to detect a predictable generator with good statistics.
    """
    drawn = b"".join(RunKey.from_operating_system().secret for _ in range(keys))
    words = np.frombuffer(drawn, np.uint32).reshape(keys, 8)
    bits = np.unpackbits(np.frombuffer(drawn, np.uint8)).reshape(keys, 256)
    equal = keys - len(np.unique(np.frombuffer(drawn, np.uint64)[::4]))
    ordered = np.sort(words, axis=1)
    alike = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
    flat = bits.ravel()
    checks = [
        certain_check("keys whose first 64 bits are equal", equal == 0, observed=equal),  # 2^-29
        share_check("keys with two equal 32-bit words", alike, 28 / 2**32),  # at most, by the union bound
        any_of(
            "set bits at one position",
            [binomial_check("", int(count), keys, 0.5) for count in bits.sum(axis=0, dtype=np.int64)],
        ),
        any_of("bits that equal a later one", [share_check("", flat[lag:] == flat[:-lag], 0.5) for lag in _LAGS]),
    ]
    return CheckedLaw("key source", checks, alpha)


def audit_noise_tail() -> CheckedLaw:
    """Checks the normals of extreme words, where a float32 generator ends at 5.42.

    Guarantees:
      - A tail that ends early is caught.   (test_a_short_tail_is_caught)

    >>> audit_noise_tail().holds
    True
    """
    # m, the lower 63 bits of a word, and 64 further bits stand for the tail probability (m + more / 2^64) / 2^64.
    exponents = np.arange(2, 121)
    bits = [1 << (128 - int(exponent)) for exponent in exponents]
    words = np.array([value >> 64 for value in bits], np.uint64)
    more = np.array([value & (2**64 - 1) for value in bits], np.uint64)
    expected = -ndtri_exp(-exponents * np.log(2.0))  # (119,) the normal exceeded with probability 2^-exponent
    sign = np.uint64(1 << 63)
    high, low = _normals(words | sign, more), _normals(words, more)
    # A word stands for the middle of an interval: half a unit of the last of its 64 (in the tail 128) bits.
    middle = 2.0 ** (exponents - np.where(exponents <= 17, 65.0, 129.0)) / np.minimum(expected, expected**2)
    error = float(np.max(np.abs(high - expected) / expected - 2 * middle))
    checks = [certain_check("relative error down to 2^-120", error <= 1e-9, observed=max(error, 0.0))]
    mirrored = float(np.max(np.abs(high + low)))
    ends = _normals(np.array([0, sign], np.uint64), np.zeros(2, np.uint64))
    checks += [
        certain_check("difference of the two tails", mirrored <= 2.0**-39, observed=mirrored),
        certain_check(
            "largest value",
            bool(np.isfinite(ends).all()) and -ends[0] >= _LARGEST_NORMAL <= ends[1],
            observed=float(min(-ends[0], ends[1])),
            expected=_LARGEST_NORMAL,
        ),
    ]
    return CheckedLaw("noise tail", checks, 0.5)  # certain


def _normals(words: npt.NDArray[np.uint64], more: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Returns the normals that noise is rounded from, each by the first of three ways that is precise enough."""
    found = np.empty(len(words))
    normals.approximate(words, found)
    for i in np.flatnonzero(np.isnan(found)):
        found[i] = normals.approximate_with(words[i], more[i])
    for i in np.flatnonzero(np.isnan(found)):
        known = {0: int(words[i]), 1: int(more[i]), 2: 2**63}  # in the middle of what the first two leave open
        digits = normals.Digits(lambda number, known=known: known.get(number, 0))
        low, high = -(2**45), 2**45  # in units of 2^-40
        near = round(digits.estimate() * 2**40)
        while high - low > 1:
            # First just below and just above the estimate, which leaves little to halve where it is right.
            middle = next((near + step for step in (-128, 128) if low < near + step < high), (low + high) // 2)
            low, high = (middle, high) if digits.exceeds(middle, 2**40) else (low, middle)
        found[i] = low * 2.0**-40
    return found
