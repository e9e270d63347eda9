"""Splits a composition into sums with and without a rare large loss, each under a tilt of its own.

Where a user is drawn about once in all and delta is tiny, the losses of nearly all steps together ("core") and the rare
draws ("jumps") both decide delta. No one tilt suits both: moving the mean to epsilon puts weight on sums of jumps far
above it, on a wide window, and round-off is relative to a law that hardly counts. The law of a step is a sum of two
measures, so the composition is as well, exactly:

    (core + jumps)^T = core^T + ((core + jumps)^T - core^T)

The first part has light tails and takes a strong tilt on a narrow window. The second one is computed as such, never as
a difference of rounded numbers, so that its round-off is relative to the chance of a jump and hardly any tilt is
needed. Both bounds are added. The parts may be judged by any estimate here: an unfit one makes the bound loose or
refused, never too small.
"""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from coowned.accounting.composition.group_mixture import UNIT_ROUNDOFF
from coowned.accounting.composition.tilted import (
    LARGEST_TRANSFORM,
    LOG_NEGLIGIBLE,
    ComposedLoss,
    JumpSplit,
    TailBound,
    TiltedTail,
)

_CUTS = (0.95, 0.7, 0.5, 0.35, 0.25, 0.17, 0.1, 0.05, 0.025)  # of epsilon: losses above are jumps
_TILTS = (1.0, 0.5, 0.25, 0.12, 0.06, 0.03, 0.015)  # of the one that moves the mean to epsilon: for sums with a jump
ERROR_SHARE = 1e-4  # of delta: round-off that is hoped for
_LARGEST_ERROR_SHARE = 0.03  # of delta: beyond it parts are not worth trying
_LIKELY_SIZE = 2**20  # of a transform


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """Settings for splitting a law near one epsilon, all of them guessed from a coarse law."""

    cut: float
    core_tilt: float
    core_counts: bool  # else a Chernoff bound shows that sums without a jump never reach epsilon
    jump_tilt: float
    width: float  # of both windows
    core_share: float  # of delta
    jump_slope: float  # of -log delta by epsilon, for sums with a jump


def plan_parts(loss: ComposedLoss, epsilon: float, log_delta: float, error_share: float = ERROR_SHARE) -> Parts | None:
    """Chooses cut and tilts with the narrowest windows and a round-off of about `error_share` of delta, or least."""
    if not 0 < epsilon < loss.largest:
        return None
    central = loss.tilt_for_mean(epsilon)
    log_round_off = math.log(160 * UNIT_ROUNDOFF * sum(loss.repetitions))
    tilts = []  # for sums with a jump, with the log of how many times the rate of jumps their round-off is
    for share in _TILTS:
        tilt = share * central
        window = loss.window(tilt, epsilon, log_delta)
        width = max(window.top - window.low, 1e-300)
        # In `TiltedTail` what is above the window is taken off again, with a round-off that only the tilt diminishes.
        above = math.log1p(_LIKELY_SIZE / width * math.exp(-tilt * max(width - epsilon, 0.0))) - math.log1p(tilt)
        tilts.append((width, tilt, log_round_off + loss.cumulants(tilt)[0] - tilt * epsilon + above))
    log_jump_delta, jump_slope = _one_jump(loss, epsilon)
    choices: list[tuple[float, Parts]] = []  # log of the round-off, parts
    for share in _CUTS:
        cut = share * epsilon
        core = loss.up_to(cut)
        if core is None:
            continue
        core_tilt = core.tilt_for_mean(epsilon)
        log_core = core.cumulants(core_tilt)[0] - core_tilt * epsilon
        counts = core.largest >= epsilon and log_core > log_delta + LOG_NEGLIGIBLE
        core_width, core_error, core_share = 0.0, -math.inf, 0.0
        if counts:
            window = core.window(core_tilt, epsilon, log_delta)
            core_width = window.top - window.low
            core_error = log_round_off + log_core - math.log1p(core_tilt)
            log_core_delta = core.saddle_log_delta(core_tilt)[1]
            core_share = 1 / (1 + math.exp(min(log_jump_delta - log_core_delta, 700.0)))
        for width, tilt, log_error in tilts:
            parts = Parts(
                cut=cut,
                core_tilt=core_tilt,
                core_counts=counts,
                jump_tilt=tilt,
                width=width + core_width,
                core_share=core_share,
                jump_slope=jump_slope,
            )
            choices.append((float(np.logaddexp(log_error + _log_jump_rate(loss, tilt, cut), core_error)), parts))
    fit = [choice for choice in choices if choice[0] <= log_delta + math.log(error_share)]
    if fit:
        return min(fit, key=lambda choice: choice[1].width)[1]
    least = min(choices, key=lambda choice: choice[0], default=None)
    return None if least is None or least[0] > log_delta + math.log(_LARGEST_ERROR_SHARE) else least[1]


def _one_jump(loss: ComposedLoss, epsilon: float) -> tuple[float, float]:
    """Returns log delta if one step alone decided it, and the slope of its fall with epsilon."""
    value, slope = 1e-300, 0.0
    for atoms, count in loss.counted:
        above = atoms.loss > epsilon
        mass, fading = np.exp(atoms.log_mass[above]), np.exp(epsilon - atoms.loss[above])
        value += count * float(mass @ (1 - fading))
        slope += count * float(mass @ fading)
    return math.log(value), slope / value


def _log_jump_rate(loss: ComposedLoss, tilt: float, cut: float) -> float:
    """Returns the log of the expected number of jumps in the tilted law, at most 0."""
    rate = 1e-300
    for atoms, count in loss.counted:
        weight, _ = atoms.tilted(tilt)
        rate += count * float(weight[atoms.loss > cut].sum() / weight.sum())
    return math.log(min(rate, 1.0))


def parts_grid(loss: ComposedLoss, parts: Parts, epsilon: float, growth: float, allowed: float) -> tuple[float, float]:
    """Returns spacing and growth that add about `allowed` to epsilon; `growth` is that of the coarse `loss`."""
    core = loss.up_to(parts.cut)
    assert core is not None
    finest = parts.width * 1.05 / (LARGEST_TRANSFORM // 4)
    terms = list(_weighted(parts))
    jump_weight = _weights(parts)[1]
    wide = sum(weight * core.bin_spread(tilt)[1] for weight, tilt in terms) + jump_weight * (growth * epsilon) ** 2 / 4
    growth = min(max(growth * math.sqrt(allowed / 2 / max(wide, 1e-300)), 5e-4), 2 * growth)
    spacing = parts.width * 1.05 / 2**10
    while spacing > finest:
        if sum(weight * core.grid_spread(tilt, spacing) for weight, tilt in terms) <= allowed / 2:
            break
        spacing /= 2
    return spacing, growth


def _weights(parts: Parts) -> tuple[float, float]:
    """Returns the increase of epsilon per variance added to either part: delta's shift over the slope of its sum."""
    core, jump = parts.core_share * parts.core_tilt, (1 - parts.core_share) * parts.jump_slope
    total = max(core + jump, 1e-300)
    return core / total * (parts.core_tilt + 1) / 2, jump / total * (parts.jump_slope + 1) / 2


def _weighted(parts: Parts) -> Iterator[tuple[float, float]]:
    core_weight, jump_weight = _weights(parts)
    yield jump_weight, 0.0
    if parts.core_counts:
        yield core_weight, parts.core_tilt


class PartedTail:
    """Bounds delta of a composition by the sum of two tails: `at(epsilon)` is a rigorous upper bound."""

    def __init__(self, loss: ComposedLoss, parts: Parts, epsilon: float, log_delta: float):
        core = loss.up_to(parts.cut)
        if core is None:
            raise ValueError(f"no loss of some step is at most {parts.cut:g}: there is nothing to part")
        self._core: TiltedTail | None = None
        if parts.core_counts:
            self._core = TiltedTail(core, parts.core_tilt, epsilon, log_delta, 0.0)
            split = JumpSplit(cut=parts.cut, tilt=0.0, log_moment=-math.inf, largest=math.inf)  # counted by the core
        else:
            split = core.jump_split(parts.cut, np.array([parts.core_tilt]), epsilon)
        self._jumps = TiltedTail(loss, parts.jump_tilt, epsilon, log_delta, 0.0, split=split)
        self._loss, self._parts, self._rest = loss, parts, core
        self.spacing = loss.spacing
        self.size = self._jumps.size
        self.top = self._jumps.top
        self.deviation = 0.01 * epsilon  # further away the Chernoff bound of sums without a jump is no longer small
        if self._core is not None:
            self.size = max(self.size, self._core.size)
            self.top = max(self.top, self._core.top)
            self.deviation = min(self.deviation, self._core.deviation)

    def at(self, epsilon: float) -> TailBound:
        """Returns an upper bound on delta(epsilon) of the composition, `loss_error` included."""
        jumps = self._jumps.at(epsilon)
        core = None if self._core is None else self._core.at(epsilon)
        if core is None or core.log_delta == -math.inf or jumps.log_delta == math.inf:
            return jumps
        if core.log_delta == math.inf:
            return core
        log_delta = float(np.logaddexp(jumps.log_delta, core.log_delta))
        shares = [math.exp(part.log_delta - log_delta) for part in (jumps, core)]
        return TailBound(
            log_delta=log_delta,
            error_share=shares[0] * jumps.error_share + shares[1] * core.error_share,
            slope=shares[0] * jumps.slope + (shares[1] * core.slope if math.isfinite(core.slope) else 0.0),
        )

    def looseness(self, epsilon: float) -> float:
        """Estimates how much the discretization adds to epsilon."""
        jumps = self._jumps.at(epsilon)
        share = 0.0
        if self._core is not None:
            share = 1 / (1 + math.exp(min(max(jumps.log_delta - self._core.at(epsilon).log_delta, -700.0), 700.0)))
        parts = dataclasses.replace(self._parts, core_share=share, jump_slope=max(-jumps.slope, 0.0))
        added = sum(weight * sum(self._rest.bin_spread(tilt)) for weight, tilt in _weighted(parts))
        near = [
            float(atoms.bin_spread[np.abs(atoms.bin_loss - epsilon) <= 0.2 * epsilon].max(initial=0.0))
            for atoms in self._loss.atoms
        ]
        return added + _weights(parts)[1] * max(near)
