"""Finds the strategy matrix of DP-MF: lower triangular, banded, Toeplitz, no column longer than 1.

The optimum of jax_privacy, which is a dependency of tests alone (`test_as_good_as_jax_privacy`).
"""

import dataclasses
import json
import math
from fractions import Fraction
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from coowned import validate
from coowned.attribution.graph import AttributionGraph
from coowned.codec import decode_json, encode_json
from coowned.errors import InputError, UncertifiableError
from coowned.exact.compiled import compiled
from coowned.files import cached
from coowned.selection.selector import Schedule

_METHOD = "banded-toeplitz-mean-error-1"  # changes when the same inputs would give other coefficients


class _Stored(msgspec.Struct, frozen=True):
    num_bands: int
    iterations: int
    coefficients: list[float]


@dataclasses.dataclass(frozen=True, repr=False)
class BandedStrategy:
    """C_ij = coefficients[i - j] for 0 <= i - j < num_bands, with the least mean squared error of prefix sums.

    The noise of the run is C^-1 z. The objective is that of jax_privacy's `optimize_banded_toeplitz`
    (test_as_good_as_jax_privacy). The result is kept in the folder `COOWNED_CACHE` ("off": nowhere; else
    ~/.cache/coowned).

    Guarantees:
      - No column is longer than 1, exactly, whatever the cache holds.   (test_no_column_is_longer_than_one,
        test_a_forged_cache_keeps_the_bound)
      - C_ij = 0 for i - j >= num_bands.   (test_bands)
      - num_bands = 1 is the identity: DP-SGD.   (test_one_band_is_the_identity)
      - `sensitivity_of` bounds what one user can change, by as little however often they take part; columns that
        overlap are refused.   (test_sensitivity_is_that_of_the_matrix, test_sensitivity_of_many_participations,
        test_overlapping_columns_are_refused)
    Cost: an optimization is O(num_bands * iterations) a round, some dozen rounds; afterwards O(num_bands) memory.
    What it is not: amplified by sampling; `error_factor` compares at equal noise multipliers.

    Args:
      num_bands: at most the min separation of the schedule (or the number of cyclic groups).
      iterations: number of steps.
      coefficients: one's own, if given; they are divided by their norm where it exceeds 1.

    Example:
      >>> strategy = BandedStrategy(num_bands=2, iterations=4, coefficients=(0.8, 0.6))
      >>> strategy.matrix()
      array([[0.8, 0. , 0. , 0. ],
             [0.6, 0.8, 0. , 0. ],
             [0. , 0.6, 0.8, 0. ],
             [0. , 0. , 0.6, 0.8]])
      >>> strategy.column_norms()
      array([1. , 1. , 1. , 0.8])

    References: McKenna (2024), https://arxiv.org/abs/2405.15913; Choquette-Choo et al. (2023),
      https://arxiv.org/abs/2306.08153
    """

    num_bands: int
    iterations: int
    coefficients: npt.NDArray[np.float64] = None  # type: ignore[assignment]  # (num_bands,)

    FORMAT = "coowned-banded-strategy-1"

    def __post_init__(self) -> None:
        validate.positive(iterations=self.iterations)
        validate.integer(at_least=1, at_most=self.iterations, num_bands=self.num_bands)
        given = self.coefficients
        if given is None:
            given = _load_or_optimize(int(self.num_bands), int(self.iterations))
        object.__setattr__(self, "coefficients", _checked(given, self.num_bands))

    def column_norms(self) -> npt.NDArray[np.float64]:
        """Returns the norm of every column, (iterations,), rounded up, at most 1; the last are shorter."""
        return np.minimum(1.0, np.sqrt(self._squared_norms()) * (1 + 4 * 2.0**-52))

    def matrix(self) -> npt.NDArray[np.float64]:
        """Returns the matrix itself, (iterations, iterations), for tests and small cases."""
        if self.iterations > 5000:
            raise InputError(f"the matrix of {self.iterations} iterations is too large; use coefficients")
        gap = np.arange(self.iterations)[:, None] - np.arange(self.iterations)
        inside = (gap >= 0) & (gap < self.num_bands)
        return np.where(inside, self.coefficients[np.where(inside, gap, 0)], 0.0)

    def error_factor(self) -> float:
        """Returns the root mean squared error of all prefix sums over that of DP-SGD at the same noise multiplier.

        >>> BandedStrategy(num_bands=1, iterations=50).error_factor()
        1.0
        """
        identity = (self.iterations + 1) / 2
        return math.sqrt(mean_squared_error(self.coefficients, self.iterations) / identity)

    def sensitivity_of(self, schedule: Schedule, graph: AttributionGraph) -> float:
        """Returns the l2 sensitivity, in clip norms, to one user's examples under zero-out adjacency, rounded up.

        It is the root of the largest sum of squared column norms over one user's actual participations; replacing
        instead of zeroing doubles it. Cost: O(pairs of the schedule) time, O(users) memory.
        """
        if schedule.iterations != self.iterations:
            raise InputError(f"the schedule has {schedule.iterations} batches, the strategy {self.iterations} steps")
        schedule.check_graph(graph)
        last, count = np.full(graph.num_users, -self.num_bands, np.int64), np.zeros(graph.num_users, np.int64)
        step, user = _count_columns(schedule.batches, graph.indptr, graph.users, self.num_bands, last, count)
        if user >= 0:
            raise UncertifiableError(
                f"user {user} takes part at step {step} less than num_bands ({self.num_bands}) steps after they last"
                " did: their columns overlap; use fewer bands or a schedule with more separation"
            )
        if not count.any():
            return 0.0
        # All columns of a user but the last are whole: a later one begins where such a column ends.
        squares, present = self._squared_norms(), count > 0
        total = (count[present] - 1) * squares[0] + squares[last[present]]
        return float(math.sqrt(total.max()) * (1 + 4 * 2.0**-52))  # a product, a sum and a root were rounded

    def to_json(self) -> str:
        """Returns a JSON text from which coefficients read back to the bit."""
        stored = _Stored(self.num_bands, self.iterations, self.coefficients.tolist())
        return encode_json(stored, format=self.FORMAT)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads `to_json()` back, without optimizing again."""
        stored = decode_json(_Stored, text, name="strategy", format=cls.FORMAT)
        return cls(stored.num_bands, stored.iterations, stored.coefficients)  # type: ignore[arg-type]

    def _squared_norms(self) -> npt.NDArray[np.float64]:
        """Returns squared column norms, (iterations,), rounded up by more than the sums' own error, at most 1."""
        partial = np.minimum(1.0, np.cumsum(self.coefficients**2) * (1 + (self.num_bands + 4) * 2.0**-52))
        column = np.minimum(np.arange(self.iterations, 0, -1), self.num_bands)  # rows that a column reaches
        return partial[column - 1]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BandedStrategy):
            return NotImplemented
        return self.iterations == other.iterations and np.array_equal(self.coefficients, other.coefficients)

    def __hash__(self) -> int:
        return hash((self.iterations, self.coefficients.tobytes()))

    def __repr__(self) -> str:
        return f"BandedStrategy(num_bands={self.num_bands}, iterations={self.iterations})"


@compiled()
def _count_columns(batches, indptr, users, num_bands, last, count):
    """Counts each user's steps and notes the last; returns the first (step, user) whose columns overlap, or (-1, -1).

    last (num_users,) starts at -num_bands; count (num_users,) at 0.
    """
    for t in range(batches.shape[0]):
        for j in range(batches.shape[1]):
            e = batches[t, j]
            for i in range(indptr[e], indptr[e + 1]):
                u = users[i]
                if t - last[u] < num_bands:
                    return t, np.int64(u)
                last[u] = t
                count[u] += 1
    return -1, np.int64(-1)


def _checked(coefficients: Any, num_bands: int) -> npt.NDArray[np.float64]:
    """Returns the coefficients, read-only, scaled so that their exact norm is at most 1."""
    own = np.array(coefficients, np.float64)
    if own.shape != (num_bands,):
        raise InputError(f"coefficients must be num_bands ({num_bands}) numbers, not of shape {own.shape}")
    if not np.isfinite(own).all() or own[0] <= 0:
        raise InputError("coefficients must be finite and the first above 0: C must have an inverse")
    if _squared_norm(own) > 1:
        own = own / math.sqrt(math.fsum(own * own))
    while _squared_norm(own) > 1:  # rounding of the division; one or two rounds
        own *= 1 - 2.0**-52
    own.flags.writeable = False
    return own


def _squared_norm(coefficients: npt.NDArray[np.float64]) -> Fraction:
    """Computes the squared norm without any rounding."""
    return sum((Fraction(c) ** 2 for c in coefficients.tolist()), Fraction(0))


def _solve(coefficients: npt.NDArray[np.float64], right: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Computes C^-1 right, as a recursive filter."""
    from scipy.signal import lfilter  # slow to import, and not needed for accounting

    return np.asarray(lfilter([1.0], coefficients, right))


def mean_squared_error(coefficients: npt.NDArray[np.float64], iterations: int) -> float:
    prefix = _solve(coefficients, np.ones(iterations))  # first column of A C^-1, which is Toeplitz as well
    return float(np.dot(prefix * prefix, np.arange(iterations, 0, -1)) / iterations)


def optimize(num_bands: int, iterations: int) -> npt.NDArray[np.float64]:
    """Minimizes log(mean squared error) + log(squared column norm): the scale of C does not matter."""
    from scipy.optimize import minimize

    weights = np.arange(iterations, 0, -1) / iterations  # entry j of the first column is in iterations - j rows
    ones = np.ones(iterations)

    def objective(c: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
        prefix = _solve(c, ones)  # C prefix = 1
        error = float(np.dot(weights, prefix * prefix))
        if not math.isfinite(error):
            return math.inf, np.zeros_like(c)
        adjoint = _solve(c, (2 * weights * prefix)[::-1])[::-1]  # C^T adjoint = d error / d prefix
        slope = np.array([-np.dot(adjoint[r:], prefix[: iterations - r]) for r in range(num_bands)])
        square = float(np.dot(c, c))
        return math.log(error) + math.log(square), slope / error + 2 * c / square

    k = np.arange(1, num_bands)
    start = np.ones(num_bands)
    start[1:] = np.cumprod((2 * k - 1) / (2 * k))  # optimal for the largest error, all bands
    settings = {"maxiter": 1000, "maxfun": 4000, "ftol": 1e-15, "gtol": 1e-10, "maxcor": 20}
    with np.errstate(over="ignore", invalid="ignore"):  # a step of the search may go too far; it then comes back
        found = minimize(objective, start, jac=True, method="L-BFGS-B", options=settings)
    best = found.x if np.isfinite(found.fun) and found.fun <= objective(start)[0] and found.x[0] > 0 else start
    return best / math.sqrt(math.fsum(best * best))


def _load_or_optimize(num_bands: int, iterations: int) -> npt.NDArray[np.float64]:
    if num_bands == 1:
        return np.ones(1)
    return cached(
        "strategies",
        {"method": _METHOD, "num_bands": num_bands, "iterations": iterations},
        lambda: optimize(num_bands, iterations),
        encode=encode_json,
        decode=lambda text: _checked(json.loads(text), num_bands),
    )
