"""Losses of linear models in compiled loops: residuals of a copy, and the integers they become when clipped.

The gradient is the residual (the derivative of the loss by the score) times the row: clipping it is clipping residuals.
"""

import math

import numpy as np

from coowned.mechanism.compiled import compiled

LOGISTIC, SQUARED, SOFTMAX = range(3)

_ROUNDER = np.float32(3 * 2**22)  # adding and subtracting it rounds a float32 below 2^21 to an integer
_LOG2_E, _LN_2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)
_EXPONENT, _BIAS = np.uint32(23), np.uint32(127 << 23)
_SERIES = tuple(np.float32(1 / math.factorial(n)) for n in range(7, -1, -1))  # of e^r, the highest power first
_LARGEST = np.float32(80)  # where a sigmoid is 1e-35 from 0 or 1

_njit = compiled()


# Where x is an exact product, as a row's number times a power of two, it may be fused with the addition.
@compiled(fastmath={"contract"})
def rounded(x):
    """The integer nearest to a float32 below 2^21; without a branch, so that loops become vector code."""
    return (x + _ROUNDER) - _ROUNDER


# A product that is added without being rounded first only makes a residual better.
@compiled(fastmath={"contract"})
def sigmoid(x):
    """1 / (1 + e^-x) in float32, to a few units in the last place; without a branch. What is not a number stays so."""
    x = _LARGEST if x > _LARGEST else x
    x = -_LARGEST if x < -_LARGEST else x
    # e^-x = 2^n e^r: n in the last bits of a sum, e^r by its series, below 1e-8 from it
    moved = x * -_LOG2_E + _ROUNDER
    r = -x - (moved - _ROUNDER) * _LN_2
    series = _SERIES[0]
    for i in range(1, 8):
        series = series * r + _SERIES[i]
    power = np.uint32((np.float32(moved).view(np.uint32) << _EXPONENT) + _BIAS).view(np.float32)
    return np.float32(1) / (np.float32(1) + series * power)


@_njit
def residual(loss, score, label):
    """Of a model with one score, in float32."""
    return (sigmoid(score) if loss == LOGISTIC else score) - label


@_njit
def longest_factor(inverse, radius):
    """Below radius / |X| - 1/2, so that what is at most that large may be rounded to an integer; below 0 for no row."""
    return radius * inverse - np.float32(0.5)


@_njit
def factor_of(residual, inverse_scale, longest, unit):
    """A: the residual in grid units, over the row's scale, clipped and rounded; 0 if it is not a number."""
    factor = residual * inverse_scale * unit
    factor = longest if factor > longest else factor
    factor = -longest if factor < -longest else factor
    factor = rounded(factor)
    return factor if factor == factor and longest > 0 else np.float32(0)


@_njit
def fill_residuals(loss, scores, label, out):
    """out (scores,) float64: the residual of each score; NaN where the label is not finite or none of the classes."""
    if loss != SOFTMAX:
        out[0] = (1 / (1 + math.exp(-scores[0])) if loss == LOGISTIC else scores[0]) - label
        return
    classes, largest, total = scores.size, scores[0], 0.0
    for k in range(classes):
        largest = max(largest, scores[k])
    for k in range(classes):
        out[k] = math.exp(scores[k] - largest)
        total += out[k]
    if not (0 <= label < classes and label == np.floor(label)):
        total = np.nan
    for k in range(classes):
        out[k] = out[k] / total - (k == label)


@_njit
def clip_to_integers(residuals, scale, longest):
    """Turns residuals (float64) into integers A with |A| <= longest; gives whether they had to be shortened.

    They are multiplied by `scale`, shortened so that rounding cannot exceed the bound, and rounded. The squares of the
    integers themselves, exact below 2^53, are compared with the bound: whatever was computed before, what is longer or
    not a number becomes 0.
    """
    square = 0.0
    for k in range(residuals.size):
        square += (residuals[k] * scale) ** 2
    length, allowed = math.sqrt(square), longest - 0.5 * math.sqrt(residuals.size)
    clipped = length > allowed
    if clipped:
        scale *= allowed / length
    square = 0.0
    for k in range(residuals.size):
        residuals[k] = np.rint(residuals[k] * scale)
        square += residuals[k] ** 2
    if not (square <= longest * longest * (1 - 2.0**-50) and allowed > 0):
        residuals[:] = 0
        return False
    return clipped
