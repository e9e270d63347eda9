"""Transforms of one step's tilted privacy loss, with bounds of their errors."""

import dataclasses
import math

import numpy as np

from coowned.accounting.group_mixture import UNIT_ROUNDOFF, LossAtoms

# Added where a positive number may have become 0: far from its centre a tilt is undone by factors like exp(1000).
UNDERFLOW = 1e-290


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spectrum:
    """One step's transform, so written that its T-th power is accurate: see `step_spectrum`."""

    log_modulus: np.ndarray  # (size / 2 + 1,)
    log_growth: np.ndarray  # (size / 2 + 1,) by how much log_modulus could be larger for the transform's error
    angle: np.ndarray  # (size / 2 + 1,)
    error: np.ndarray  # (size / 2 + 1,) of log modulus and angle together, from their evaluation
    shift: int  # grid steps by which the law was moved down
    log_scale: float  # log of what the tilted masses were divided by
    log_jump: np.ndarray | None  # (size / 2 + 1,) complex: log(1 + jumps / rest) where the jumps were kept apart
    jump_error: np.ndarray | None  # (size / 2 + 1,) of log_jump


def step_spectrum(atoms: LossAtoms, tilt: float, size: int, transform_error: float, cut: float | None) -> Spectrum:
    """Transform of one step's tilted law on a cycle of `size` grid points.

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
        folded = np.bincount(np.mod(atoms.index - shift, size), weights=weights, minlength=size)  # (size,)
        return np.fft.rfft(folded), transform_error * float(weights.sum()) * (1 + 1e-6)

    if rest >= 0.5:
        weight /= rest + 1.0
        jumps = np.where(atoms.loss > cut, weight, 0.0) if cut is not None else np.zeros(len(weight))
        y, error = transform(weight - jumps, 0)
        modulus, log_jump, jump_error = np.abs(y), None, None
        if cut is not None:
            y, modulus, log_jump, jump_error = _jumps_beside(y, error, *transform(jumps, 0))
        with np.errstate(divide="ignore"):
            log_modulus = np.maximum(np.log(modulus), -700.0)  # log_growth covers a modulus that vanishes
        return Spectrum(
            log_modulus=log_modulus,
            log_growth=np.log1p(error / np.maximum(modulus, math.exp(-700.0))),
            angle=np.angle(y),
            error=u * (20 + 4 * np.abs(log_modulus)),
            shift=0,
            log_scale=float(tilted[pivot]) + math.log(rest + 1.0),
            log_jump=log_jump,
            jump_error=jump_error,
        )
    shift, log_total = int(atoms.index[pivot]), math.log1p(rest)
    weight[pivot] = 0.0
    jumps = np.where(atoms.loss > cut, weight, 0.0) if cut is not None else np.zeros(len(weight))
    y, error = transform(weight - jumps, shift)
    modulus = np.abs(1 + y)
    log_jump, jump_error = None, None
    if cut is not None:
        jump, own_error = transform(jumps, shift)
        log_jump, jump_error = _jump_ratio(jump, own_error, 1 + y, modulus, error)
    return Spectrum(
        log_modulus=np.real(_log_one_plus(y)) - log_total,
        log_growth=np.log1p(error / modulus),
        angle=np.arctan2(np.imag(y), 1 + np.real(y)),
        error=u * (64 * np.abs(y) + 8 * log_total),
        shift=shift,
        log_scale=float(tilted[pivot]) + log_total,
        log_jump=log_jump,
        jump_error=jump_error,
    )


def _jump_ratio(
    jump: np.ndarray, own_error: float, rest: np.ndarray, modulus: np.ndarray, error: float
) -> tuple[np.ndarray, np.ndarray]:
    """log(1 + jump / rest) and a bound on its error, for a `rest` of that modulus that is larger than its error."""
    jump = jump / rest
    inherited = (own_error + np.abs(jump) * error) / (modulus - error)
    log_jump = _log_one_plus(jump)
    return log_jump, inherited / np.maximum(np.abs(1 + jump) - inherited, 1e-3) + 64 * UNIT_ROUNDOFF * np.abs(jump)


def _jumps_beside(
    rest: np.ndarray, error: float, jump: np.ndarray, own_error: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """What stands for the rest, its modulus, log(1 + jump / rest) and a bound on its error, where no atom dominates.

    At high frequencies the rest may vanish and the ratio says nothing. There the jumps count as 0 and the error is all
    of it: with B >= |rest| + |jump| the n-th powers of rest + jump and of rest differ by at most 2 B^n.
    """
    size = np.abs(jump) + own_error
    modulus = np.abs(rest)
    vanishes = modulus < 4 * (size + error)
    # rest -> B with jump_error log 5: the caller's error is then at least 4 B^n, enough also for a product of such
    # differences with other steps' powers, whatever these have been taken for.
    largest = (modulus + size) * (1 + 8 * UNIT_ROUNDOFF) + 1e-300
    rest = np.where(vanishes, largest, rest)
    modulus = np.where(vanishes, largest, modulus)
    jump = np.where(vanishes, 0.0, jump)
    log_jump, jump_error = _jump_ratio(jump, own_error, rest, modulus + vanishes * error, error)
    return rest, modulus, np.where(vanishes, 0.0, log_jump), np.where(vanishes, math.log(5.0), jump_error)


def _log_one_plus(z: np.ndarray) -> np.ndarray:
    """log(1 + z) of complex z, accurate near 0."""
    return 0.5 * np.log1p(2 * np.real(z) + np.real(z) ** 2 + np.imag(z) ** 2) + 1j * np.arctan2(
        np.imag(z), 1 + np.real(z)
    )


def one_minus_exp(rate: float, size: int) -> np.ndarray:
    """1 - exp(-rate + i theta) at the frequencies theta of a real transform of `size`, without cancellation."""
    theta = np.arange(size // 2 + 1) * (2 * math.pi / size)
    ratio = math.exp(-rate)
    return -math.expm1(-rate) + ratio * (2 * np.sin(theta / 2) ** 2 - 1j * np.sin(theta))
