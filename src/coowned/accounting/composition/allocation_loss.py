"""Discretizes the privacy loss of one epoch of random allocation: a copy is in one of t rounds, drawn uniformly.

The pair is P = (1/t) sum_i N(e_i / sigma, I_t) against Q = N(0, I_t) (docs/accounting.md, "One round of every epoch").
Under Q the likelihood ratio L = dP/dQ is the mean of t independent M = exp(r G - r^2 / 2), r = 1 / sigma, G normal.

Both directions of the pair are expectations of a convex function of L under Q, (L - a)+ and (1 - a L)+. So a law that
is larger in the convex order gives a larger delta in both, also after composition, and stays larger under sums of
independent variables. Hence no approximation ever makes the loss smaller:

1. Mass between two nodes goes to both so that mass and mean are kept (connect-the-dots): larger in the convex order.
   The mean of m + n variables is made from the means of m and of n, and its values are split onto nodes again.
2. What is cut above the last node keeps its mass under Q there, and its mass under P becomes an infinite loss. What is
   cut below the first positive node counts twice: at 0, an infinite loss of Q against P, and at that node.
3. Rounding moves a value by a factor of 1 +- `value_error`, a shift of the loss, and a mass by a factor of
   1 +- `mass_error`, by which all masses are enlarged. All numbers are positive and nothing is subtracted but
   neighbouring values, so both are relative errors; there is no transform.
"""

import dataclasses
import functools
import math

import numba
import numpy as np

from coowned.accounting.composition.group_mixture import (
    UNIT_ROUNDOFF,
    LossAtoms,
    connect,
    discretize,
    gaussian_pair,
    interval_masses,
    loss_dots,
)
from coowned.accounting.composition.spectrum import UNDERFLOW

FINENESS = 0.01  # distance of nodes, relative to the loss and at most; its square is what it adds to the variance
_TAIL_STEP = 16.0  # tails are rounded down to a multiple, so that few laws are made
_LARGEST_LOSS = 640.0  # of the losses and logarithms of tails that a law holds: the exponents of doubles end at 708


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RatioLaw:
    """Bounds the law of the mean of `count` ratios M under Q from above, in the convex order."""

    count: int
    nodes: np.ndarray  # (num_nodes,) values, strictly increasing, the first is 0
    mass: np.ndarray  # (num_nodes,) under Q; under P it is nodes * mass
    infinite: float  # mass under P of an infinite ratio
    value_error: float  # relative, of all values
    mass_error: float  # relative, of all masses


def allocation_atoms(
    *, rounds: int, run: int, noise_multiplier: float, spacing: float, growth: float, log_tail: float
) -> dict[str, LossAtoms]:
    """Returns the pessimistic atoms of one epoch in each direction under zero-out, as `discretize` does for one step.

    Args:
      rounds: among which one is drawn.
      run: how many of them take place: fewer than `rounds` where training ends within the epoch.
      noise_multiplier: sigma.
      spacing, growth, log_tail: as for `discretize`.
    """
    shift = 1 / noise_multiplier
    log_tail_kept = _TAIL_STEP * math.floor(log_tail / _TAIL_STEP)
    if rounds == 1 or _largest_loss(shift, log_tail_kept) - log_tail_kept > _LARGEST_LOSS:
        # The pair of one round dominates a mixture of such pairs: nothing is claimed for not knowing the round.
        return discretize(
            gaussian_pair(shift=shift, adjacency="zero-out"), spacing=spacing, growth=growth, log_tail=log_tail
        )
    law = mean_law(shift, run, log_tail_kept, FINENESS)
    share = run / rounds
    values = share * law.nodes + (rounds - run) / rounds  # a round that does not take place has the ratio 1
    positive = values > 0
    under_q = law.mass * (1 + law.mass_error)
    values, masses = values[positive], under_q[positive]
    loss = np.log(values)
    first, last = math.floor(loss[0] / spacing) - 1, math.ceil(loss[-1] / spacing) + 1
    dots = np.concatenate([[first], loss_dots(first, last, growth), [last]])  # (num_bins + 1,)
    bins = np.clip(np.searchsorted(dots * spacing, loss, side="right") - 1, 0, len(dots) - 2)
    error = np.full(len(dots) - 1, UNIT_ROUNDOFF * (len(values) + 8))
    with np.errstate(divide="ignore"):
        p = np.log(np.bincount(bins, weights=values * masses, minlength=len(dots) - 1))
        q = np.log(np.bincount(bins, weights=masses, minlength=len(dots) - 1))
        p_infinite = float(np.log(share * law.infinite * (1 + law.mass_error)))
        q_infinite = float(np.log(under_q[~positive].sum()))
    loss_error = law.value_error + 8 * UNIT_ROUNDOFF * (1 + float(np.abs(dots).max()) * spacing)
    upper, lower = ((p, error), (q, error)), ((q[::-1], error), (p[::-1], error))
    return {
        "upper": connect(dots, spacing, *upper, -math.inf, p_infinite, loss_error),
        "lower": connect(-dots[::-1], spacing, *lower, -math.inf, q_infinite, loss_error),
    }


@functools.lru_cache(maxsize=256)
def mean_law(shift: float, count: int, log_tail: float, fineness: float) -> RatioLaw:
    """Computes the mean of `count` ratios, by doubling."""
    if count == 1:
        return _one_ratio(shift, log_tail, fineness)
    half = mean_law(shift, count // 2, log_tail, fineness)
    law = _add(half, half, shift, log_tail, fineness)
    return law if count % 2 == 0 else _add(law, mean_law(shift, 1, log_tail, fineness), shift, log_tail, fineness)


def _largest_loss(shift: float, log_tail: float) -> float:
    """Returns a loss beyond which, on either side, a round has less mass than exp(log_tail) under P and under Q."""
    return shift * (math.sqrt(-2 * min(log_tail, -1.0)) + 1) + shift**2 / 2


def _one_ratio(shift: float, log_tail: float, fineness: float) -> RatioLaw:
    """Discretizes the lognormal M itself."""
    reach = _largest_loss(shift, log_tail)
    loss = _log_nodes(-reach, reach, _spread(shift, 1), fineness)
    edges = loss / shift + shift / 2  # of G
    pair = gaussian_pair(shift=shift, adjacency="zero-out")
    p_mass, p_error, _, p_above = interval_masses(edges, pair.upper)
    q_mass, q_error, q_below, q_above = interval_masses(edges, pair.lower)
    nodes = np.exp(loss)
    width = np.diff(loss)
    ratio = np.clip(p_mass - q_mass - loss[:-1], 0.0, width)  # log of the mean in an interval over its lower end
    to_upper = np.expm1(ratio) / np.expm1(width)
    inside = np.exp(q_mass)
    mass = np.zeros(len(nodes) + 1)
    mass[2:] += inside * to_upper
    mass[1:-1] += inside * (1 - to_upper)
    mass[[0, 1]] += math.exp(q_below)
    mass[-1] += math.exp(q_above)
    errors = float((p_error + q_error).max())
    return RatioLaw(
        count=1,
        nodes=np.concatenate([[0.0], nodes]),
        mass=mass + UNDERFLOW,
        infinite=math.exp(p_above) * (1 + 1e-9),
        # The loss of an edge is known up to a few roundings of its terms; the mean of an interval up to its masses'.
        value_error=errors + 16 * UNIT_ROUNDOFF * (1 + shift**2 + float(np.abs(loss).max())),
        mass_error=float(q_error.max()) + 16 * UNIT_ROUNDOFF,
    )


def _add(first: RatioLaw, second: RatioLaw, shift: float, log_tail: float, fineness: float) -> RatioLaw:
    """Combines two independent means into the mean of all their ratios."""
    count = first.count + second.count
    shares = first.count / count, second.count / count
    lowest = min(share * law.nodes[1] for share, law in zip(shares, (first, second), strict=True))
    highest = sum(share * law.nodes[-1] for share, law in zip(shares, (first, second), strict=True))
    loss = _log_nodes(math.log(lowest) - 1e-9, math.log(highest) + 1e-9, _spread(shift, count), fineness)
    nodes = np.concatenate([[0.0], np.exp(loss)])
    mass = np.zeros(len(nodes))
    add_masses(shares[0] * first.nodes, first.mass, shares[1] * second.nodes, second.mass, nodes, mass)
    terms = 2 * len(second.nodes) + len(first.nodes) + len(nodes) + 16  # added up for one mass, at most
    law = RatioLaw(
        count=count,
        nodes=nodes,
        mass=mass + UNDERFLOW,
        infinite=(shares[0] * first.infinite + shares[1] * second.infinite)
        * (1 + first.mass_error + second.mass_error + 1e-9),
        value_error=max(first.value_error, second.value_error) + 16 * UNIT_ROUNDOFF,
        mass_error=(first.mass_error + second.mass_error) * (1 + 1e-9) + terms * UNIT_ROUNDOFF,
    )
    return _trimmed(law, math.exp(log_tail) / 4)


def _trimmed(law: RatioLaw, tail: float) -> RatioLaw:
    """Cuts off nodes at either end that have less than `tail` in all, and charges them as infinite losses."""
    above = np.cumsum((law.nodes * law.mass)[::-1])[::-1]  # (num_nodes,) mass under P from a node on
    below = np.cumsum(law.mass[1:])  # (num_nodes - 1,) mass under Q up to a positive node
    last = max(int(np.searchsorted(-above, -tail, side="right")) - 1, 2)
    first = min(int(np.searchsorted(below, tail)) + 1, last - 1)
    nodes = np.concatenate([[0.0], law.nodes[first : last + 1]])
    mass = np.concatenate([[law.mass[0]], law.mass[first : last + 1]])
    cut_below = float(law.mass[1:first].sum())
    mass[[0, 1]] += cut_below
    mass[-1] += float(law.mass[last + 1 :].sum())
    infinite = law.infinite + float((law.nodes * law.mass)[last + 1 :].sum())
    return dataclasses.replace(law, nodes=nodes, mass=mass, infinite=infinite)


def _spread(shift: float, count: int) -> float:
    """Estimates the standard deviation of the logarithm of a mean of ratios; at most 1."""
    return min(math.sqrt(math.log1p(math.expm1(min(shift**2, 100.0)) / count)), 1.0)


def _log_nodes(low: float, high: float, spread: float, fineness: float) -> np.ndarray:
    """Returns logarithms of nodes from low to high, `fineness * spread` apart near 0, then sparser, up to `fineness`.

    Where losses are large, a twentieth of the largest takes the place of 1: their variance is far larger, too.
    """
    reach = max(-low, high, 1.0)
    dense = np.arange(math.ceil(1 / fineness)) * (fineness * spread)
    sparse = spread * np.exp(np.arange(math.ceil(-math.log(spread) / fineness)) * fineness)
    sides = np.concatenate([dense, sparse, np.arange(1.0, reach, fineness * max(1.0, reach / 20))])
    inner = np.unique(np.concatenate([-sides, sides]))
    margin = fineness * spread / 2
    return np.concatenate([[low], inner[(inner > low + margin) & (inner < high - margin)], [high]])


@numba.njit(cache=True, nogil=True, error_model="numpy")
def add_masses(x, x_mass, y, y_mass, nodes, mass):
    """Adds the law of X + Y on `nodes` to mass (num_nodes,); each sum is split between neighbours, keeping the mean."""
    row = np.zeros(nodes.size)
    for i in range(x.size):
        row[:] = 0.0
        k = 0
        for j in range(y.size):
            value = x[i] + y[j]
            while k < nodes.size - 2 and nodes[k + 1] <= value:
                k += 1
            to_upper = min(max((value - nodes[k]) / (nodes[k + 1] - nodes[k]), 0.0), 1.0)
            weight = x_mass[i] * y_mass[j]
            row[k] += weight * (1.0 - to_upper)
            row[k + 1] += weight * to_upper
        for k in range(nodes.size):
            mass[k] += row[k]
