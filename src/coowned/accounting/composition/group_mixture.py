"""Discretizes the privacy loss of one subsampled step, whose dominating pair consists of Gaussian mixtures.

A user is in k copies, each with a coin of probability p, and adds at most one clip norm per drawn copy. By the proof
in docs/accounting.md the step is dominated by a mixture of Gaussians at the number of drawn copies against

- zero-out: one Gaussian at 0, in both directions;
- replace: the mirror image of the mixture (one direction is enough, x -> -x swaps the two).

Everything here is in units of the noise: unit variance, means i / noise_multiplier.

How the privacy loss becomes a finite list of atoms without ever becoming smaller:

1. Connect-the-dots (Doroshenko et al. 2022): the mass between two neighbouring losses ("dots") goes to these two dots
   so that both the mass of P and the mass of Q are kept. Dots are multiples of the grid spacing, dense where the loss
   is small and geometrically sparser away from 0, which keeps the relative error of the second moment even.
2. Interval masses come from log_ndtr on the side where the tail is small, so their error is relative.
3. Every rounding error is bounded and added on the pessimistic side: masses are inflated, splits moved up, and what
   the inversion of the loss leaves open is a shift of the loss (`loss_error`) that the composition adds to epsilon.
"""

import dataclasses
import decimal
import functools
import math
from typing import NamedTuple

import numpy as np
from scipy.special import log_ndtr

from coowned.accounting.gaussian import UNIT_ROUNDOFF, find_root

_TABLE_POINTS = 769  # of the loss, to bracket its inverse


class Mixture(NamedTuple):
    """A mixture of unit Gaussians."""

    means: np.ndarray  # (num_components,)
    log_weights: np.ndarray  # (num_components,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixturePair:
    """Two densities, `upper` and `lower`; log(upper / lower) rises with x.

    What was cut from the upper mixture's weights is `log_cut`: it is charged as an infinite loss wherever `upper` is
    the first of the pair. Cut from `lower` it only makes the loss larger.
    """

    upper: Mixture  # means >= 0
    lower: Mixture  # means <= 0
    log_cut: float
    symmetric: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossAtoms:
    """A pessimistic law of one step's privacy loss: `log_mass[i]` at `index[i] * spacing`, the rest at infinity.

    `loss_error` bounds by how much the true loss can be above the atoms' because of rounding. `bins_*` describe the
    intervals the atoms were made of: what the discretization added to the variance, to judge its looseness.
    """

    spacing: float
    index: np.ndarray  # (num_atoms,) int64, strictly increasing
    log_mass: np.ndarray  # (num_atoms,)
    log_infinity: float
    loss_error: float
    bin_loss: np.ndarray  # (num_bins,) a loss inside the interval
    bin_log_mass: np.ndarray  # (num_bins,)
    bin_spread: np.ndarray  # (num_bins,) variance the split adds, at most
    bin_is_wide: np.ndarray  # (num_bins,) bool: wider than the grid spacing
    log_capped: float = -math.inf  # of the mass that `capped` moved to infinity, on top of log_infinity

    @functools.cached_property
    def loss(self) -> np.ndarray:
        """Losses of the atoms, (num_atoms,)."""
        return self.index * self.spacing

    def tilted(self, tilt: float) -> tuple[np.ndarray, float]:
        """Returns the masses times exp(tilt * loss), (num_atoms,), over the largest of them, and the log of it."""
        exponent = self.log_mass + tilt * self.loss
        log_largest = float(exponent.max())
        return np.exp(exponent - log_largest), log_largest

    def up_to(self, cut: float) -> "LossAtoms":
        """Keeps only the atoms with losses of at most `cut`: a part of the law, not a law."""
        keep, bins = self.loss <= cut, self.bin_loss <= cut
        return dataclasses.replace(
            self,
            index=self.index[keep],
            log_mass=self.log_mass[keep],
            bin_loss=self.bin_loss[bins],
            bin_log_mass=self.bin_log_mass[bins],
            bin_spread=self.bin_spread[bins],
            bin_is_wide=self.bin_is_wide[bins],
        )

    def capped(self, cap: float) -> "LossAtoms":
        """Makes every loss above `cap` infinite.

        For delta(eps) this costs at most exp(eps - cap) times the capped mass: the rest of the composition has
        E[exp(-loss)] <= 1. It keeps rare huge losses out of the tilted law.
        """
        keep = self.loss <= cap
        if keep.all() or not keep.any():
            return self
        log_capped = float(np.logaddexp(self.log_capped, np.logaddexp.reduce(self.log_mass[~keep])))
        return dataclasses.replace(self.up_to(cap), log_capped=log_capped)


def binomial_log_weights(copies: int, probability: float) -> np.ndarray:
    """Returns the log of the Binomial(copies, probability) weights, (copies + 1,), to a few units in the last digit.

    >>> np.exp(binomial_log_weights(2, 0.5))
    array([0.25, 0.5 , 0.25])
    """
    if probability >= 1.0:
        return np.array([-math.inf] * copies + [0.0])
    with decimal.localcontext() as context:
        context.prec = 40
        context.Emin, context.Emax = -(10**9), 10**9
        p = decimal.Decimal(float(probability))
        ratio = p / (1 - p)
        weight = (1 - p) ** copies
        logs = [_log(weight)]
        for i in range(copies):
            weight = weight * ratio * (copies - i) / (i + 1)
            logs.append(_log(weight))
    return np.array(logs)


def _log(value: decimal.Decimal) -> float:
    exponent = value.adjusted()
    return math.log(float(value.scaleb(-exponent))) + exponent * math.log(10.0)


def mixture_pair(
    *, copies: int, probability: float, noise_multiplier: float, adjacency: str, log_cut: float
) -> MixturePair:
    """Returns the dominating pair of one step; weights summing to less than exp(log_cut) are cut at either end.

    Cut from the top they become an infinite loss; cut from the bottom they move to the next larger number of copies
    (a stochastically larger number of drawn copies dominates: docs/accounting.md).
    """
    log_weights = binomial_log_weights(copies, probability)  # (copies + 1,)
    from_top = np.logaddexp.accumulate(log_weights[::-1])[::-1]
    last = max(int(np.searchsorted(-from_top, -log_cut, side="right")) - 1, 0)
    cut = float(from_top[last + 1]) if last < copies else -math.inf
    from_bottom = np.logaddexp.accumulate(log_weights)
    first = min(int(np.searchsorted(from_bottom, log_cut, side="left")), last)
    kept = log_weights[first : last + 1].copy()
    kept[0] = from_bottom[first]
    return _pair(np.arange(first, last + 1) / noise_multiplier, kept, cut, adjacency)


def gaussian_pair(*, shift: float, adjacency: str) -> MixturePair:
    """Returns a Gaussian at `shift` against one at 0 (or at -shift): a step without coins, in units of the noise."""
    return _pair(np.array([shift]), np.zeros(1), -math.inf, adjacency)


def _pair(means: np.ndarray, log_weights: np.ndarray, log_cut: float, adjacency: str) -> MixturePair:
    replace = adjacency == "replace"
    lower = Mixture(-means, log_weights) if replace else Mixture(np.zeros(1), np.zeros(1))
    return MixturePair(upper=Mixture(means, log_weights), lower=lower, log_cut=log_cut, symmetric=replace)


def _log_density(x: np.ndarray, mixture: Mixture) -> tuple[np.ndarray, np.ndarray]:
    """Returns the log of the mixture's density over the standard normal's, and the component's posterior mean, at x."""
    means, log_weights = mixture
    if len(means) == 1:
        return log_weights[0] + means[0] * x - means[0] ** 2 / 2, np.full_like(x, means[0])
    terms = means[:, None] * x[None, :] + (log_weights - means**2 / 2)[:, None]  # (num_components, num_x)
    top = terms.max(axis=0)
    terms -= top
    np.exp(terms, out=terms)
    total = terms.sum(axis=0)
    return top + np.log(total), means @ terms / total


def loss_and_slope(pair: MixturePair, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns log(upper / lower) at x and its derivative there."""
    upper, upper_mean = _log_density(x, pair.upper)
    lower, lower_mean = _log_density(x, pair.lower)
    return upper - lower, upper_mean - lower_mean


def _loss_rounding(pair: MixturePair, x: np.ndarray) -> float:
    """Bounds the error with which `loss_and_slope` evaluates the loss anywhere in x."""
    reach = float(np.abs(x).max())
    scale = 0.0
    for means, log_weights in (pair.upper, pair.lower):
        largest = float(np.abs(means).max())
        scale += largest * reach + largest**2 / 2 + float(np.abs(log_weights).max()) + len(means) + 2
    return 4 * UNIT_ROUNDOFF * scale


def _invert_loss(pair: MixturePair, targets: np.ndarray, low: float, high: float) -> tuple[np.ndarray, float]:
    """Returns x with loss(x) = targets, all strictly inside (loss(low), loss(high)), and the largest residual.

    A table brackets each root; Newton steps that leave the bracket become bisections. All targets move at once.
    """
    table_x = np.linspace(low, high, _TABLE_POINTS)
    table, _ = loss_and_slope(pair, table_x)
    table = np.maximum.accumulate(table)
    right = np.clip(np.searchsorted(table, targets, side="left"), 1, _TABLE_POINTS - 1)
    left_x, right_x = table_x[right - 1].copy(), table_x[right].copy()
    gap = np.maximum(table[right] - table[right - 1], 1e-300)
    x = left_x + (right_x - left_x) * np.clip((targets - table[right - 1]) / gap, 0.0, 1.0)
    residual = np.full(len(targets), np.inf)
    best = x.copy()
    tolerance = _loss_rounding(pair, table_x) / 8
    active = np.arange(len(targets))
    for _ in range(80):
        value, slope = loss_and_slope(pair, x[active])
        error = value - targets[active]
        better = np.abs(error) < residual[active]
        residual[active] = np.where(better, np.abs(error), residual[active])
        best[active] = np.where(better, x[active], best[active])
        left_x[active] = np.where(error < 0, x[active], left_x[active])
        right_x[active] = np.where(error >= 0, x[active], right_x[active])
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            step = x[active] - error / slope
        inside = (step > left_x[active]) & (step < right_x[active])
        x[active] = np.where(inside, step, (left_x[active] + right_x[active]) / 2)
        narrow = right_x[active] - left_x[active] <= 4 * UNIT_ROUNDOFF * (np.abs(x[active]) + 1e-3)
        active = active[(np.abs(error) > tolerance) & ~narrow]
        if not len(active):
            break
    return best, float(residual.max(initial=0.0))


def interval_masses(edges: np.ndarray, mixture: Mixture) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Returns the log mass of a mixture in each interval of `edges`, a bound on its error, and the log masses outside.

    The error is of the logarithm, hence relative. It grows as an interval narrows: u / width.
    """
    u = UNIT_ROUNDOFF
    means, log_weights = mixture
    z = edges[None, :] - means[:, None]  # (num_components, num_edges)
    below, above = log_ndtr(z), log_ndtr(-z)
    use_below = z[:, :-1] + z[:, 1:] < 0  # subtract on the side where both tails are small
    larger = np.where(use_below, below[:, 1:], above[:, :-1])
    smaller = np.where(use_below, below[:, :-1], above[:, 1:])
    # Error of one log tail: its own evaluation, and the rounding of z times the hazard rate (at most |z| + 1).
    reach = np.abs(edges)[None, :] + np.abs(means)[:, None]
    tail_error = u * (8 + reach * (1 + np.abs(z)))
    error = np.maximum(tail_error[:, :-1], tail_error[:, 1:]) + 8 * u * np.abs(larger)
    gap = np.maximum(larger - smaller, 0.0)
    with np.errstate(divide="ignore", over="ignore"):
        error = error + (2 * error + 8 * u * np.abs(smaller)) / np.expm1(gap)
        terms = log_weights[:, None] + larger + np.log(-np.expm1(-gap))
    top = terms.max(axis=0)
    with np.errstate(invalid="ignore"):
        shares = np.exp(terms - np.where(np.isfinite(top), top, 0.0))  # (num_components, num_intervals)
    total = shares.sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_mass = np.where(total > 0, top + np.log(total), -np.inf)
        # The sum's error is at most the mean of its terms' errors, each weighted by its share.
        weighted = np.where(shares > 0, np.expm1(np.minimum(error, 1.0)) * shares, 0.0).sum(axis=0)
        bound = np.where(total > 0, weighted / total, 0.0)
    bound = bound + u * (8 + len(means) + 2 * np.abs(log_weights).max())
    outside_below = float(np.logaddexp.reduce(log_weights + below[:, 0]))
    outside_above = float(np.logaddexp.reduce(log_weights + above[:, -1]))
    return log_mass, bound, outside_below, outside_above


def _range_of_x(pair: MixturePair, log_tail: float) -> tuple[float, float]:
    """Returns the x below which `lower`, and the x above which `upper`, has mass exp(log_tail)."""
    reach = math.sqrt(-2 * min(log_tail, -1.0)) + 1

    def distance(means: np.ndarray, log_weights: np.ndarray) -> float:
        def beyond(x: float) -> float:
            return float(np.logaddexp.reduce(log_weights + log_ndtr(means - x))) - log_tail

        return find_root(beyond, -1.0, float(means.max()) + reach, absolute=1e-3)

    return -distance(-pair.lower.means, pair.lower.log_weights), distance(*pair.upper)


def loss_dots(first: int, last: int, growth: float) -> np.ndarray:
    """Returns integers from first to last: every one near 0, then each larger than the last by the relative growth."""
    reach = max(abs(first), abs(last))
    dense = min(math.ceil(1 / growth), reach)
    steps = max(0, math.ceil(math.log(max(reach / max(dense, 1), 1.0)) / math.log1p(growth))) + 1
    sparse = dense * np.exp(np.arange(1, steps + 1) * math.log1p(growth))
    positive = np.concatenate([np.arange(1, dense + 1), np.floor(sparse[sparse < 2**62]).astype(np.int64)])
    dots = np.unique(np.concatenate([-positive, [0], positive]).astype(np.int64))
    return dots[(dots > first) & (dots < last)]


def discretize(pair: MixturePair, *, spacing: float, growth: float, log_tail: float) -> dict[str, LossAtoms]:
    """Returns the pessimistic atoms of one step by direction: "upper" is upper against lower, "lower" the reverse.

    Args:
      spacing: the grid that carries the atoms; all steps of one composition share it.
      growth: relative distance of neighbouring dots away from 0.
      log_tail: log of the mass that may be charged as an infinite loss.
    """
    low, high = _range_of_x(pair, log_tail)
    ends, _ = loss_and_slope(pair, np.array([low, high]))
    first, last = math.floor(ends[0] / spacing) - 1, math.ceil(ends[1] / spacing) + 1
    inner = loss_dots(first, last, growth)
    inner = inner[(inner * spacing > ends[0]) & (inner * spacing < ends[1])]
    x, residual = _invert_loss(pair, inner * spacing, low, high)
    edges = np.maximum.accumulate(np.concatenate([[low], np.clip(x, low, high), [high]]))  # (num_bins + 1,)
    dots = np.concatenate([[first], inner, [last]])  # (num_bins + 1,)
    loss_error = residual + _loss_rounding(pair, edges) + 2 * UNIT_ROUNDOFF * float(np.abs(dots).max()) * spacing
    upper, lower = interval_masses(edges, pair.upper), interval_masses(edges, pair.lower)
    log_infinity = float(np.logaddexp(upper[3], pair.log_cut))
    atoms = {"upper": connect(dots, spacing, upper[:2], lower[:2], upper[2], log_infinity, loss_error)}
    if not pair.symmetric:
        first, second = ((mass[::-1], bound[::-1]) for mass, bound, _, _ in (lower, upper))
        atoms["lower"] = connect(-dots[::-1], spacing, first, second, lower[3], lower[2], loss_error)
    return atoms


def connect(
    dots: np.ndarray,
    spacing: float,
    first: tuple[np.ndarray, np.ndarray],
    second: tuple[np.ndarray, np.ndarray],
    log_below: float,
    log_infinity: float,
    loss_error: float,
) -> LossAtoms:
    """Splits the mass of each interval between its two dots, keeping both masses, errors on the pessimistic side."""
    log_mass, mass_error = first
    width = np.diff(dots) * spacing  # (num_bins,)
    with np.errstate(invalid="ignore"):
        ratio = log_mass - second[0] - dots[:-1] * spacing  # mean of the loss above the lower dot, in the sense of e^-l
    ratio = np.where(np.isfinite(ratio), ratio + mass_error + second[1] + loss_error, width)
    ratio = np.clip(ratio, 0.0, width)
    to_upper = np.expm1(-ratio) / np.expm1(-width)
    to_lower = np.exp(-ratio) * np.expm1(ratio - width) / np.expm1(-width)
    with np.errstate(divide="ignore"):
        inflated = log_mass + np.log1p(mass_error + 4 * UNIT_ROUNDOFF)
        atoms = np.full(len(dots), -np.inf)
        atoms[1:] = inflated + np.log(to_upper)
        atoms[:-1] = np.logaddexp(atoms[:-1], inflated + np.log(to_lower))
    atoms[min(1, len(atoms) - 1)] = np.logaddexp(atoms[min(1, len(atoms) - 1)], log_below)
    kept = np.isfinite(atoms)
    return LossAtoms(
        spacing=spacing,
        index=dots[kept],
        log_mass=atoms[kept],
        log_infinity=float(log_infinity),
        loss_error=loss_error,
        bin_loss=(dots[:-1] + dots[1:]) * (spacing / 2),
        bin_log_mass=log_mass,
        bin_spread=width**2 * to_upper * to_lower,
        bin_is_wide=np.diff(dots) > 1,
    )
