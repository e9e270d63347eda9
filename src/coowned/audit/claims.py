"""Computes what a claim says about a worst-case user: their rounds, likelihood ratio and delta(epsilon).

The audit does not know what may be wrong. It looks at the output in the way that would be best if the claim were
exactly right: through the likelihood ratio of the claimed mechanism with and without its worst-case user.
"""

import dataclasses
import functools
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import scipy.sparse
from scipy.stats import binom

from coowned import validate
from coowned.accounting.calculators import epsilon, epsilon_curve
from coowned.accounting.terms import check_terms
from coowned.mechanism.banded_strategy import BandedStrategy
from coowned.mechanism.mechanism import Mechanism, Steps, WorstUser
from coowned.training.plan import TrainingPlan

USERS = ("steady", "alternating")
"""Worst-case users: every gradient +clip_norm e1, or +, -, +, ... in turn, which the claim allows just as well."""
_epsilon, _epsilon_curve = functools.lru_cache(maxsize=64)(epsilon), functools.lru_cache(maxsize=64)(epsilon_curve)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MechanismClaim:
    """The claim of a mechanism at a noise multiplier, for a user who does all that is allowed.

    Guarantees:
      - `log_ratio` is the logarithm of the ratio of the claimed densities.   (test_log_ratio_is_that_of_the_densities)
      - Its expectation of exp(-ratio) under the claim is 1.   (test_log_ratio_has_mean_one)
      - `deltas` are the accountant's upper bounds.   (test_deltas_are_upper_bounds)

    Example:
      >>> from coowned import PoissonSampling
      >>> mechanism = PoissonSampling(contribution_bound=1, sampling_probability=1.0, iterations=1)
      >>> claim = MechanismClaim(mechanism=mechanism, noise_multiplier=2.0, adjacency="zero-out")
      >>> claim.log_ratio(np.array([[0.0, 1.0]]), "steady")  # (x - 1/2) / 4 at x = 0 and 1
      array([-0.125,  0.125])
    """

    mechanism: Mechanism  # with its contribution bound
    noise_multiplier: float  # in units of one copy's clip norm
    adjacency: str  # "zero-out" or "replace"
    strategy: BandedStrategy | None = None  # of correlated noise; by default the one training would use
    also: tuple[Steps, ...] = ()  # what the user's data go through besides, which `deltas` are for, too

    def __post_init__(self) -> None:
        check_terms(noise_multiplier=self.noise_multiplier, adjacency=self.adjacency)
        if self.strategy is None:
            object.__setattr__(self, "strategy", self.mechanism.strategy())

    @classmethod
    def of(cls, plan: TrainingPlan, adjacency: str) -> "MechanismClaim":
        """Returns the claim of a plan: its mechanism, noise multiplier and strategy, independent of its trainer."""
        return cls(
            mechanism=plan.mechanism,
            noise_multiplier=plan.noise_multiplier,
            adjacency=adjacency,
            strategy=plan.strategy,
        )

    @property
    def iterations(self) -> int:
        return self.mechanism.iterations

    @functools.cached_property
    def worst_user(self) -> WorstUser:
        """The worst-off user: their copies, probability, rounds and group."""
        return self.mechanism.worst_user(self.strategy)

    def signs(self, user: str) -> npt.NDArray[np.float64]:
        """Returns the (iterations,) sign of the user's gradient in each step; steps off their rounds do not count."""
        validate.one_of(USERS, user=user)
        if user == "steady":
            return np.ones(self.iterations)
        turn = np.searchsorted(self.worst_user.rounds, np.arange(self.iterations), side="right") - 1
        return np.where(turn % 2, -1.0, 1.0)

    def log_ratio(self, observed: npt.NDArray[np.float64], user: str) -> npt.NDArray[np.float64]:
        """Computes (trials,) log likelihood ratios with and without the user, of (iterations, trials) releases.

        `observed` is in units of clip_norm / batch_size. Correlated noise is whitened by the strategy first: what a
        round adds is then a multiple of its column, and the product with the column is all that matters.
        """
        signs = self.signs(user)
        if self.strategy is None:
            projected, squares = observed, np.ones(len(observed))
        elif self.mechanism.needs_schedule:
            template = self._columns @ signs[self.worst_user.rounds]  # (iterations,) all that the user adds
            projected = (self._whitening.T @ template)[None] @ observed
            squares, signs = np.array([template @ template]), np.ones(1)
        else:
            projected = (self._columns.T @ self._whitening) @ observed  # (rounds, trials)
            squares, signs = (self._columns**2).sum(axis=0), signs[self.worst_user.rounds]
        total = np.zeros(observed.shape[1])
        seen = np.ascontiguousarray(projected, np.float64), signs, squares
        law = self.noise_multiplier**2, self.adjacency == "replace", total
        if self.worst_user.rounds_per_epoch > 1:
            add_allocation_ratios(*seen, self.worst_user.rounds_per_epoch, *law)
        else:
            copies = 1 if self.mechanism.needs_schedule else self.worst_user.copies
            weights = binom.logpmf(np.arange(copies + 1), copies, self.worst_user.probability)
            add_log_ratios(*seen, weights, *law)
        return total

    def deltas(self, epsilons: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Computes the delta claimed at each epsilon: proven upper bounds, largest over directions and groups."""
        terms = {"noise_multiplier": self.noise_multiplier, "adjacency": self.adjacency, "also": self.also}
        return _epsilon_curve(self.mechanism, **terms, epsilons=tuple(epsilons.tolist())).copy()

    def epsilon_at(self, delta: float) -> float:
        """Returns the claimed epsilon at one delta."""
        terms = {"noise_multiplier": self.noise_multiplier, "adjacency": self.adjacency, "also": self.also}
        return _epsilon(self.mechanism, **terms, delta=delta)

    @functools.cached_property
    def _whitening(self) -> scipy.sparse.csr_array:
        assert self.strategy is not None
        return whitening(self.strategy.coefficients, self.iterations)

    @functools.cached_property
    def _columns(self) -> scipy.sparse.csr_array:
        """The (iterations, rounds) whitened effect of one clip norm in each of the user's rounds."""
        return self._whitening[:, self.worst_user.rounds]


def whitening(coefficients: npt.NDArray[np.float64], steps: int) -> scipy.sparse.csr_array:
    """Returns the (steps, steps) matrix C of a noise strategy, which whitens its noise."""
    bands = [np.full(steps - lag, c) for lag, c in enumerate(coefficients[:steps])]
    offsets: Any = -np.arange(len(bands))
    return scipy.sparse.csr_array(scipy.sparse.diags_array(bands, offsets=offsets))


@numba.njit(cache=True, nogil=True, error_model="numpy")
def add_log_ratios(observed, signs, squares, log_weights, variance, replace, total):
    """Adds to total (trials,) the sum over rounds of the log ratio of (rounds, trials) projections.

    With i copies drawn a projection is normal around i q with variance `variance` q, q = squares[round]: the ratio of
    i copies to none is exp((i y - i^2 q / 2) / variance). log_weights (copies + 1,): of the probability of i.
    """
    for r in range(observed.shape[0]):
        for n in range(observed.shape[1]):
            y = observed[r, n] * signs[r] / variance
            total[n] += _log_mixture(log_weights, y, squares[r] / (2 * variance))
            if replace:
                total[n] -= _log_mixture(log_weights, -y, squares[r] / (2 * variance))


@numba.njit(cache=True, nogil=True, error_model="numpy")
def add_allocation_ratios(observed, signs, squares, rounds_per_epoch, variance, replace, total):
    """Adds to total (trials,) the sum over epochs of the log ratio of (rounds, trials) projections of one copy.

    In an epoch it is the logarithm of the mean of the rounds' ratios, see `add_log_ratios`; a round after the last one
    has the ratio 1.
    """
    terms = np.zeros(rounds_per_epoch)
    for first in range(0, observed.shape[0], rounds_per_epoch):
        rounds = min(rounds_per_epoch, observed.shape[0] - first)
        for n in range(observed.shape[1]):
            for side in range(2 if replace else 1):
                sign = -1.0 if side else 1.0
                terms[:] = 0.0
                for i in range(rounds):
                    r = first + i
                    terms[i] = (sign * signs[r] * observed[r, n] - squares[r] / 2) / variance
                largest = terms.max()
                total[n] += sign * (largest + np.log(np.exp(terms - largest).mean()))


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _log_mixture(log_weights, y, half_square):
    largest = -np.inf
    for i in range(log_weights.size):
        largest = max(largest, log_weights[i] + i * y - i * i * half_square)
    value = 0.0
    for i in range(log_weights.size):
        value += np.exp(log_weights[i] + i * y - i * i * half_square - largest)
    return largest + np.log(value)
