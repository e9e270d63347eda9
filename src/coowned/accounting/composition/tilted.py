"""Composes privacy losses under an exponential tilt, with every numerical error counted into delta.

The FFT of a plain loss distribution has round-off relative to its largest mass, about T * 2^-52 after T steps: at
delta = 1e-12 that is the answer itself. Here the law is tilted first, q_i = p_i exp(lambda l_i) / exp(K(lambda)), with
lambda chosen so that the T-fold sum has its mean at the epsilon in question. The composed q has its bulk where delta
is decided, and untilting happens inside the tail sum:

    delta(eps) = exp(T K - lambda eps) * sum over l > eps of exp(-lambda (l - eps)) (1 - exp(eps - l)) Q_T(l)  + ...

so round-off is relative to delta. Added to delta are: the mass at infinity, a Chernoff bound for the mass above the
window of the cyclic convolution (mass below it wraps around into the sum and only enlarges it), and an a-priori
bound of the FFT's error. Where these exceed 1% of delta the answer is refused.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy.special import erfcx

from coowned.accounting.composition.group_mixture import UNIT_ROUNDOFF, LossAtoms
from coowned.accounting.composition.spectrum import UNDERFLOW, Jumps, one_minus_exp, step_spectrum, with_a_jump
from coowned.accounting.gaussian import find_root

LARGEST_TRANSFORM = 2**23
LOG_NEGLIGIBLE = math.log(1e-5)  # of delta: mass outside the window, by a Chernoff bound


@dataclasses.dataclass(frozen=True, kw_only=True)
class TailBound:
    """Bounds delta at one epsilon, and says what part of the bound is numerical error."""

    log_delta: float
    error_share: float
    slope: float  # derivative of log_delta by epsilon, roughly


@dataclasses.dataclass(frozen=True, kw_only=True)
class JumpSplit:
    """Calls losses above `cut` jumps; sums without any exceed a threshold with at most exp(log_tail(threshold))."""

    cut: float
    tilt: float
    log_moment: float
    largest: float

    def log_tail(self, threshold: float) -> float:
        return -math.inf if threshold >= self.largest else self.log_moment - self.tilt * threshold


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """Range of losses that a cyclic grid has to hold, and the mass outside."""

    low: float
    top: float
    log_below: float  # log of the tilted law's mass below `low`
    log_above: float  # log of the law's own mass above `top`


class ComposedLoss:
    """Sums the losses of independent steps: `atoms[i]` taken `repetitions[i]` times, all on one grid."""

    def __init__(self, atoms: Sequence[LossAtoms], repetitions: Sequence[int]):
        self.atoms = tuple(atoms)
        self.repetitions = tuple(int(count) for count in repetitions)
        self.spacing = self.atoms[0].spacing
        self.counted = list(zip(self.atoms, self.repetitions, strict=True))
        self.log_infinity = float(np.logaddexp.reduce([a.log_infinity + math.log(n) for a, n in self.counted]))
        self.log_capped = float(np.logaddexp.reduce([a.log_capped + math.log(n) for a, n in self.counted]))
        self.loss_error = sum(n * a.loss_error for a, n in self.counted)
        self.largest = sum(n * float(a.loss[-1]) for a, n in self.counted)
        self.smallest = sum(n * float(a.loss[0]) for a, n in self.counted)

    def capped(self, cap: float) -> "ComposedLoss":
        """Makes every single loss above `cap` infinite (see `LossAtoms.capped`)."""
        return ComposedLoss([atoms.capped(cap) for atoms in self.atoms], self.repetitions)

    def cumulants(self, tilt: float) -> tuple[float, float, float]:
        """Returns the log moment generating function of the whole sum at `tilt`, and the tilted mean and variance."""
        total, mean, variance = 0.0, 0.0, 0.0
        for atoms, count in self.counted:
            weight, log_largest = atoms.tilted(tilt)
            norm = weight.sum()
            center = float(weight @ atoms.loss / norm)
            total += count * (log_largest + math.log(norm))
            mean += count * center
            variance += count * float(weight @ (atoms.loss - center) ** 2 / norm)
        return total, mean, variance

    def chernoff(self, epsilon: float) -> float:
        """Returns the log of an upper bound on delta(epsilon) that needs no transform."""
        tilt = self.tilt_for_mean(epsilon)
        moments, roundings = self._log_moments(np.array([tilt]))
        total, rounding = float(moments[0]), float(roundings[0])
        rounding += 32 * UNIT_ROUNDOFF * (1 + abs(total) + abs(tilt * epsilon)) * (1 + sum(self.repetitions))
        return float(np.logaddexp.reduce([total - tilt * epsilon + rounding, self.log_infinity, self.log_capped]))

    def log_delta_at_zero(self) -> float:
        """Returns the log of an upper bound on delta(0): total variations of the steps, added up."""
        terms = [self.log_infinity, self.log_capped]
        for atoms, count in self.counted:
            above = atoms.loss > -atoms.loss_error
            excess = -np.expm1(-(atoms.loss[above] + 2 * atoms.loss_error))
            with np.errstate(divide="ignore"):
                terms.append(math.log(count) + float(np.log(np.exp(atoms.log_mass[above]) @ excess + 1e-300)) + 1e-12)
        return float(np.logaddexp.reduce(terms))

    def saddle_log_delta(self, tilt: float) -> tuple[float, float]:
        """Approximates (epsilon, log delta) by a normal law under the tilt. A guess, never a claim."""
        total, mean, variance = self.cumulants(tilt)
        deviation = math.sqrt(max(variance, 1e-300))
        difference = erfcx(tilt * deviation / math.sqrt(2)) - erfcx((tilt + 1) * deviation / math.sqrt(2))
        return mean, total - tilt * mean + math.log(max(difference / 2, 1e-300))

    def guess(self, log_delta: float) -> tuple[float, float]:
        """Returns (tilt, epsilon) where the normal approximation reaches log_delta; tilt 0 below the mean."""
        return self._guess(lambda tilt: self.saddle_log_delta(tilt)[1] - log_delta)

    def tilt_for_mean(self, epsilon: float) -> float:
        """Returns the tilt >= 0 that moves the mean to epsilon."""
        return self._guess(lambda tilt: epsilon - self.cumulants(tilt)[1])[0]

    def _guess(self, falling: Callable[[float], float]) -> tuple[float, float]:
        widest = max(float(atoms.loss[-1] - atoms.loss[0]) for atoms in self.atoms)
        if widest == 0 or falling(0.0) <= 0:  # a law of one atom cannot be moved
            return 0.0, self.cumulants(0.0)[1]
        low, high = 0.0, 1.0
        limit = 1e6 / widest
        while falling(high) > 0 and high < limit:
            low, high = high, 4 * high
        tilt = high if high >= limit else find_root(falling, low, high, absolute=1e-9, relative=1e-9)
        return tilt, self.cumulants(tilt)[1]

    def window(self, tilt: float, epsilon: float, log_delta: float) -> "Window":
        """Returns the range that the tilted sum needs to find a delta of exp(log_delta) at epsilon.

        By Chernoff's bound the tilted law has less than a negligible part w of what decides delta on either side:
        top = (K(t) - K(tilt) - log w) / (t - tilt) for any t > tilt, the best of a row of t's; low likewise.
        """
        total, _, variance = self.cumulants(tilt)
        log_outside = min(log_delta - (total - tilt * epsilon), 0.0) + LOG_NEGLIGIBLE
        unit = 1 / math.sqrt(max(variance, 1e-200))
        steps = np.geomspace(0.02 * min(unit, 1 + tilt), 500 * unit, 48)
        slack = 64 * UNIT_ROUNDOFF * (1 + sum(self.repetitions))  # K is a sum of logarithms, each rounded
        own_rounding = self._log_moments(np.array([tilt]))[1]
        above, rounding = self._log_moments(tilt + steps)
        above, rounding = above - total, rounding + own_rounding
        top = float(np.min((above + rounding + slack * (1 + np.abs(above) + abs(total)) - log_outside) / steps))
        below, rounding = self._log_moments(tilt - steps)
        below, rounding = below - total, rounding + own_rounding
        low = float(np.max((log_outside - below - rounding - slack * (1 + np.abs(below) + abs(total))) / steps))
        rounding = slack * (1 + abs(total) + abs(tilt * top))
        return Window(
            low=max(low, self.smallest),
            top=min(top, self.largest),
            log_below=-math.inf if low <= self.smallest else log_outside,
            log_above=-math.inf if top >= self.largest else total - tilt * top + log_outside + rounding,
        )

    def _log_moments(self, tilts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the log moment generating function of the sum at `tilts`, (num_tilts,), and a bound on its error.

        The error of an exponent is relative to its two terms, which may cancel; that of the sum is the mean of its
        terms' errors, each weighted by its share.
        """
        total, rounding = np.zeros((2, len(tilts)))
        for atoms, count in self.counted:
            loss = atoms.loss
            exponent = atoms.log_mass[None, :] + tilts[:, None] * loss[None, :]  # (num_tilts, num_atoms)
            top = exponent.max(axis=1)
            weight = np.exp(exponent - top[:, None])
            weights = weight.sum(axis=1)
            total += count * (top + np.log(weights))
            sizes = (weight @ np.abs(atoms.log_mass) + np.abs(tilts) * (weight @ np.abs(loss))) / weights + np.abs(top)
            rounding += count * 4 * UNIT_ROUNDOFF * (16 + sizes)
        return total, rounding

    def split(self, tilt: float, epsilon: float, log_delta: float, largest_share: float) -> JumpSplit | None:
        """Separates the losses of rare draws, such that all others together never reach epsilon; None where that fails.

        Then only sums with a jump need a transform, and its round-off is relative to their small probability. Jumps
        are losses above some share of epsilon, `largest_share` at most: less where epsilon is only guessed.
        """
        if epsilon <= 0:
            return None
        if any(float(atoms.tilted(tilt)[0].sum()) >= 1.5 for atoms in self.atoms):
            return None  # no atom dominates
        tilts = np.geomspace(3.0, 3e5, 60) / epsilon
        for share in (share for share in (0.95, 0.7, 0.5, 0.35, 0.25, 0.17, 0.1, 0.05) if share <= largest_share):
            cut = share * epsilon
            rest = self.up_to(cut)
            if rest is None:
                return None
            split = rest.jump_split(cut, tilts, epsilon)
            if (
                split.log_moment - split.tilt * epsilon <= log_delta + LOG_NEGLIGIBLE
                or rest.largest < epsilon - self.loss_error
            ):
                return split
        return None

    def up_to(self, cut: float) -> "ComposedLoss | None":
        """Keeps only losses of at most `cut`: a part of the law, not a law. None where a step has no such loss."""
        kept = [
            dataclasses.replace(atoms.up_to(cut), log_infinity=-math.inf, log_capped=-math.inf) for atoms in self.atoms
        ]
        return None if any(len(atoms.index) == 0 for atoms in kept) else ComposedLoss(kept, self.repetitions)

    def jump_split(self, cut: float, tilts: np.ndarray, epsilon: float) -> JumpSplit:
        """Describes this law as the rest without losses above `cut`, with its best Chernoff bound at epsilon."""
        moments, rounding = self._log_moments(tilts)
        moments = moments + rounding + 64 * UNIT_ROUNDOFF * (1 + np.abs(moments) + np.abs(tilts * epsilon))
        best = int(np.argmin(moments - tilts * epsilon))
        largest = self.largest + 1e-9 * abs(self.largest)
        return JumpSplit(cut=cut, tilt=float(tilts[best]), log_moment=float(moments[best]), largest=largest)

    def looseness(self, tilt: float) -> float:
        """Estimates how much the discretization adds to epsilon."""
        return sum((tilt + 1) / 2 * spread for spread in self.bin_spread(tilt))

    def grid_spread(self, tilt: float, spacing: float) -> float:
        """Estimates the variance that a grid of that spacing would add to the tilted law.

        h^2 / 6 for losses spread over many cells, |l| (h - |l|) for those next to 0.
        """
        total = 0.0
        for atoms, count in self.counted:
            weight, size = atoms.tilted(tilt)[0], np.abs(atoms.loss)
            added = np.where(size < spacing, size * (spacing - size), spacing**2 / 6)
            total += count * float(weight @ added) / float(weight.sum())
        return total

    def bin_spread(self, tilt: float) -> tuple[float, float]:
        """Returns the variance that bins of one grid step, and wider ones, added to the tilted law."""
        fine, wide = 0.0, 0.0
        for atoms, count in self.counted:
            exponent = atoms.bin_log_mass + tilt * atoms.bin_loss
            weight = np.exp(exponent - exponent.max())
            spread = weight * atoms.bin_spread / weight.sum()
            wide += count * float(spread[atoms.bin_is_wide].sum())
            fine += count * float(spread[~atoms.bin_is_wide].sum())
        return fine, wide

    def best_tilt(self, epsilon: float, log_delta: float, allowed_share: float) -> float:
        """Returns the tilt with the narrowest window whose round-off is about `allowed_share` of delta or less.

        Moving the mean to epsilon is best against round-off but, where a few rare draws decide delta, puts much mass
        on sums of several such draws, far above epsilon. A weaker tilt has a narrower window and errors to spare.
        """
        central = self.tilt_for_mean(epsilon)
        _, _, variance = self.cumulants(central)
        round_off = 1e-300
        for atoms, count in self.counted:
            outside = float(atoms.tilted(central)[0].sum()) - 1  # of the largest atom, see `step_spectrum`
            round_off += count * min(outside, 1.0)
        round_off *= 160 * UNIT_ROUNDOFF / (1 + central * math.sqrt(max(variance, 0.0)))
        best, narrowest = central, math.inf
        for share in (1.0, 0.85, 0.7, 0.55):
            tilt = share * central
            excess = self.cumulants(tilt)[0] - tilt * epsilon - log_delta
            if share < 1.0 and excess + math.log(round_off) > math.log(allowed_share):
                break
            window = self.window(tilt, epsilon, log_delta)
            if window.top - window.low < 0.9 * narrowest:
                best, narrowest = tilt, window.top - window.low
        return best


class TiltedTail:
    """The T-fold tilted law on a cyclic grid: `at(epsilon)` is a rigorous upper bound on delta.

    The tail sum has weights exp(-tilt a) - exp(-(tilt + 1) a), a = loss - epsilon: two geometric series. So it is taken
    in the frequency domain, where R(j) = sum over m of g_m Q(j + m) with generating function
    1 / ((1 - x exp(-tilt h)) (1 - x exp(-(tilt + 1) h))) is one division and one inverse transform. Any epsilon then
    costs four numbers of R, and round-off counts only where the weights have spectrum: at low frequencies.

    The window fits a delta of exp(log_delta) near epsilon.
    """

    def __init__(
        self,
        loss: ComposedLoss,
        tilt: float,
        epsilon: float,
        log_delta: float,
        largest_share: float,
        *,
        split: JumpSplit | None = None,
    ):
        window = loss.window(tilt, epsilon, log_delta)
        low, top = window.low, window.top
        h = loss.spacing
        size = 2 ** max(4, math.ceil(math.log2((top - low) / h + 4)))
        if size > LARGEST_TRANSFORM:
            raise GridTooFineError
        within = min(max(tilt, 2 / (size * h)), 30 / h)  # the series must converge, and not within one step
        if within != tilt:
            tilt, window = within, dataclasses.replace(window, log_below=0.0)
        self._loss, self._tilt, self._window = loss, tilt, window
        self.spacing, self.size, self.top = h, size, top + h
        self.deviation = math.sqrt(max(loss.cumulants(tilt)[2], 0.0))
        self._first = math.floor(low / h)
        u = UNIT_ROUNDOFF
        transform_error = 8 * math.log2(size) * u  # per element, times the l1 norm of the input
        # Each of these is (size / 2 + 1,): of the product of all steps' spectra, each to the power of its count.
        log_modulus, log_growth, angle, power_error = np.zeros((4, size // 2 + 1))
        self._log_scale, self._scale_rounding, shift = 0.0, 0.0, 0
        self._split = loss.split(tilt, epsilon, log_delta, largest_share) if split is None else split
        cut = None if self._split is None else self._split.cut
        jumps: list[tuple[Jumps, int]] = []
        for atoms, count in loss.counted:
            step = step_spectrum(atoms, tilt, size, transform_error, cut)
            log_modulus += count * step.log_modulus
            log_growth += count * step.log_growth
            angle += count * step.angle
            power_error += count * step.error
            shift += count * step.shift
            self._log_scale += count * step.log_scale
            self._scale_rounding += count * step.scale_size
            if step.jumps is not None:
                jumps.append((step.jumps, count))
        series = one_minus_exp(tilt * h, size) * one_minus_exp((tilt + 1) * h, size)  # (size / 2 + 1,)
        law = np.exp(log_modulus) * np.exp(1j * angle)
        relative = -np.expm1(-log_growth) + np.expm1(power_error) + 16 * u
        bound = np.exp(log_modulus + log_growth)
        error = bound * relative
        if jumps:
            law, bound, error = with_a_jump(law, bound, relative, jumps)
        error = (error + transform_error * bound) / np.abs(series)
        self._error = 2 * float(error.sum()) / size + UNDERFLOW  # of every R
        sums = np.fft.irfft(law / series, size)
        self._sums = np.roll(sums, (shift - self._first) % size)  # (size,) R at (first + i) * spacing

    def at(self, epsilon: float) -> TailBound:
        """Returns an upper bound on delta(epsilon) of the composition, `loss_error` included."""
        here = self._log_bound(epsilon)
        further = self._log_bound(epsilon + self.spacing)[0]
        slope = -math.inf if math.isinf(further) else (further - here[0]) / self.spacing
        return TailBound(log_delta=here[0], error_share=here[1], slope=slope)

    def _log_bound(self, epsilon: float) -> tuple[float, float]:
        tilt, h = self._tilt, self.spacing
        threshold = epsilon - self._loss.loss_error  # the true loss may be larger than the atoms' by that much
        start = max(math.floor(threshold / h) + 1 - self._first, 0)
        near = near_error = far = far_error = base = 0.0
        if start < self.size:  # else all of the window is below the threshold
            base = (self._first + start) * h - threshold  # of the first term above it; > 0 but for rounding
            length = (self.size - start) * h
            near, near_error = self._part(start, base)
            # R has the period of the grid: what lies above the window is taken off again.
            far, far_error = self._part(0, base + length)
            fading = math.exp(-tilt * length)
            far, far_error = fading * far, fading * far_error
        scale = self._log_scale - tilt * (threshold + base)
        rounding = 64 * UNIT_ROUNDOFF * (1 + self._scale_rounding + abs(tilt) * (abs(threshold) + abs(base)))
        value = max(near - far, 0.0) * (1 + rounding)
        error = (near_error + far_error) * self._error + 64 * UNIT_ROUNDOFF * (abs(near) + abs(far))
        outside = [self._window.log_above, self._loss.log_infinity]
        if threshold < self._window.low:  # what is below the window may be above the threshold
            outside.append(self._log_scale - tilt * threshold + self._window.log_below + rounding)
        if self._split is not None:
            outside.append(self._split.log_tail(threshold))
        with np.errstate(divide="ignore"):
            log_errors = float(np.logaddexp.reduce([scale + rounding + np.log(error), *outside]))
            log_delta = float(np.logaddexp.reduce([scale + np.log(value), self._loss.log_capped, log_errors]))
        if log_delta == -math.inf:
            return log_delta, 0.0  # beyond the largest sum of a part that has nothing at infinity
        if not log_delta < math.inf:
            return math.inf, 1.0  # also where it is not a number
        return log_delta, math.exp(min(log_errors - log_delta, 0.0)) + rounding

    def _part(self, start: int, offset: float) -> tuple[float, float]:
        """Sums weights times masses from `start` on, the first weight at `offset`; returns the factor of R's error too.

        Both without the factor exp(-tilt * offset).
        """
        h = self.spacing
        first = -math.expm1(-offset)
        second = math.exp(-self._tilt * h - h) * math.expm1(h - offset)  # negative beyond the first step
        value = first * self._sums[start] + second * self._sums[(start + 1) % self.size]
        return float(value), abs(first) + abs(second)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmptyTail:
    """Bounds delta beyond the largest finite loss: only what is at infinity is left, and no transform is needed."""

    log_infinity: float
    spacing: float = 0.0
    size: int = 0
    deviation: float = 0.0

    def at(self, epsilon: float) -> TailBound:
        return TailBound(log_delta=self.log_infinity, error_share=0.0, slope=0.0)


class GridTooFineError(Exception):
    """An error that asks for a wider spacing: the window needs a longer transform than allowed."""
