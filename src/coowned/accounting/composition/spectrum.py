"""Transforms the tilted privacy loss of one step, and bounds the errors of that."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from coowned.accounting.composition.group_mixture import UNIT_ROUNDOFF, LossAtoms

# Added where a positive number may have become 0: far from its centre a tilt is undone by factors like exp(1000).
UNDERFLOW = 1e-290


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spectrum:
    """The transform of one step in a form whose T-th power is accurate: see `step_spectrum`."""

    log_modulus: np.ndarray  # (size / 2 + 1,)
    log_growth: np.ndarray  # (size / 2 + 1,) by how much log_modulus could be larger for the transform's error
    angle: np.ndarray  # (size / 2 + 1,)
    error: np.ndarray  # (size / 2 + 1,) of log modulus and angle together, from their evaluation
    shift: int  # grid steps by which the law was moved down
    log_scale: float  # log of what the tilted masses were divided by
    scale_size: float  # of the numbers log_scale was added up from: its error is a few units in their last digit
    jumps: "Jumps | None"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Jumps:
    """Transform of the losses above the cut; `Spectrum` is then about the others alone."""

    log_ratio: np.ndarray  # (size / 2 + 1,) complex: log(1 + jumps / rest)
    error: np.ndarray  # (size / 2 + 1,) of log_ratio
    log_largest: np.ndarray  # (size / 2 + 1,) log of a bound on |rest| and |rest + jumps|, errors included
    is_unknown: np.ndarray  # (size / 2 + 1,) bool: the rest may vanish, log_ratio says nothing


def step_spectrum(atoms: LossAtoms, tilt: float, size: int, transform_error: float, cut: float | None) -> Spectrum:
    """Transforms one step's tilted law on a cycle of `size` grid points.

    With small sampling probabilities nearly all mass sits in one atom. Moved to 0 it transforms exactly to a constant,
    so that only the rest is subject to round-off: spectrum = 1 + y, and log(1 + y) is accurate to u * |y|. Losses above
    `cut` ("jumps") are transformed on their own.
    """
    u = UNIT_ROUNDOFF
    tilted = atoms.log_mass + tilt * atoms.loss
    pivot = int(np.argmax(tilted))
    # The exponent's own rounding goes to the pessimistic side.
    rounding = 4 * u * (2 + np.abs(atoms.log_mass) + np.abs(tilt * atoms.loss) + abs(tilted[pivot]))
    weight = np.exp(tilted - tilted[pivot]) * (1 + rounding) + UNDERFLOW
    rest = float(weight.sum() - weight[pivot])

    def transform(weights: np.ndarray, shift: int) -> tuple[np.ndarray, float]:
        position = np.mod(atoms.index - shift, size)
        folded = np.bincount(position, weights=weights, minlength=size)  # (size,)
        most = 1 if atoms.index[-1] - atoms.index[0] < size else int(np.bincount(position).max())  # terms of one sum
        return np.fft.rfft(folded), (transform_error + most * u) * float(weights.sum()) * (1 + 1e-6)

    jumps = np.zeros(len(weight)) if cut is None else np.where(atoms.loss > cut, weight, 0.0)
    scale_size = abs(float(atoms.log_mass[pivot])) + abs(tilt * float(atoms.loss[pivot])) + math.log1p(rest) + 1.0
    if rest >= 0.5 or jumps[pivot] > 0:
        weight, jumps = weight / (rest + 1.0), jumps / (rest + 1.0)
        y, error = transform(weight - jumps, 0)
        modulus = np.abs(y)
        with np.errstate(divide="ignore"):
            log_modulus = np.maximum(np.log(modulus), -700.0)  # log_growth covers a modulus that vanishes
        return Spectrum(
            log_modulus=log_modulus,
            log_growth=np.log1p(error / np.maximum(modulus, math.exp(-700.0))),
            angle=np.angle(y),
            error=u * (20 + 4 * np.abs(log_modulus)),
            shift=0,
            log_scale=float(tilted[pivot]) + math.log(rest + 1.0),
            scale_size=scale_size,
            jumps=None if cut is None else _jumps_beside(y, modulus, error, *transform(jumps, 0), 0.0),
        )
    shift, log_total = int(atoms.index[pivot]), math.log1p(rest)
    weight[pivot] = 0.0
    y, error = transform(weight - jumps, shift)
    modulus = np.abs(1 + y)
    return Spectrum(
        log_modulus=np.real(_log_one_plus(y)) - log_total,
        log_growth=np.log1p(error / modulus),
        angle=np.arctan2(np.imag(y), 1 + np.real(y)),
        error=u * (64 * np.abs(y) + 8 * log_total),
        shift=shift,
        log_scale=float(tilted[pivot]) + log_total,
        scale_size=scale_size,
        jumps=None if cut is None else _jumps_beside(1 + y, modulus, error, *transform(jumps, shift), log_total),
    )


def _jumps_beside(
    rest: np.ndarray, modulus: np.ndarray, error: float, jump: np.ndarray, jump_error: float, log_total: float
) -> Jumps:
    """Expresses the jumps in units of the rest, which has that modulus and is known up to `error`.

    log(1 + z) with z = jump / rest moves by at most d / (|1 + z| - d) if z moves by d. At high frequencies the rest may
    vanish, and z says nothing. `log_total` is of what both are yet to be divided by.
    """
    u = UNIT_ROUNDOFF
    size = np.abs(jump)  # (size / 2 + 1,) like all arrays here
    largest = (modulus + size) * (1 + 8 * u) + error + jump_error + UNDERFLOW
    if jump_error == 0.0:  # this step has no jumps at all
        z = moved = np.zeros(len(size))
        is_unknown = np.zeros(len(size), dtype=bool)
    else:
        is_unknown = modulus <= 2 * error + 1e-6 * size
        z = np.where(is_unknown, 0.0, jump / np.where(is_unknown, 1.0, rest))
        moved = (jump_error + np.abs(z) * error) / np.where(is_unknown, 1.0, modulus - error)
    sum_size = np.abs(1 + z)
    is_unknown |= sum_size <= 2 * moved
    gap = np.where(is_unknown, 1.0, sum_size - moved)
    evaluation = 64 * u * np.abs(z) * (1 + np.abs(z)) / np.where(is_unknown, 1.0, sum_size) ** 2
    return Jumps(
        log_ratio=_log_one_plus(np.where(is_unknown, 0.0, z)),
        error=moved / gap + evaluation,
        log_largest=np.log(largest) - log_total,
        is_unknown=is_unknown,
    )


def with_a_jump(
    rest: np.ndarray, bound: np.ndarray, relative: np.ndarray, jumps: Sequence[tuple[Jumps, int]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the transform of sums with a jump, a bound on it, and its error.

    It is the product of all (rest + jump)^n less the product of all rest^n.

    `rest` is the latter product, known up to `relative` parts of `bound`. With L the sum of n log(1 + jump / rest) the
    difference is rest (exp(L) - 1): never one of rounded numbers. Where some rest vanishes, 0 stands for it, and the
    error is all of it: the two products' bounds.
    """
    log_ratio = np.zeros(len(rest), dtype=complex)
    ratio_error, log_largest = np.zeros((2, len(rest)))
    is_unknown = np.zeros(len(rest), dtype=bool)
    for jump, count in jumps:
        log_ratio += count * jump.log_ratio
        ratio_error += count * (jump.error + 16 * UNIT_ROUNDOFF * np.abs(jump.log_ratio))
        log_largest += count * jump.log_largest
        is_unknown |= jump.is_unknown
    all_of_it = 2 * np.exp(log_largest) * (1 + 1e-6) + UNDERFLOW
    with np.errstate(over="ignore", invalid="ignore"):
        factor = np.expm1(log_ratio)
        size = np.abs(factor)
        moved = (bound + UNDERFLOW) * np.exp(np.real(log_ratio)) * np.expm1(ratio_error)
        error = (bound * relative + UNDERFLOW) * size + moved
        law, bound = rest * factor, bound * size + moved
    is_unknown |= ~(error <= all_of_it)  # also where it is not a number
    return np.where(is_unknown, 0.0, law), np.where(is_unknown, 0.0, bound), np.where(is_unknown, all_of_it, error)


def _log_one_plus(z: np.ndarray) -> np.ndarray:
    """Returns log(1 + z) of complex z, accurate near 0."""
    return 0.5 * np.log1p(2 * np.real(z) + np.real(z) ** 2 + np.imag(z) ** 2) + 1j * np.arctan2(
        np.imag(z), 1 + np.real(z)
    )


def one_minus_exp(rate: float, size: int) -> np.ndarray:
    """Returns 1 - exp(-rate + i theta) at the frequencies of a real transform of `size`, without cancellation."""
    theta = np.arange(size // 2 + 1) * (2 * math.pi / size)
    ratio = math.exp(-rate)
    return -math.expm1(-rate) + ratio * (2 * np.sin(theta / 2) ** 2 - 1j * np.sin(theta))
