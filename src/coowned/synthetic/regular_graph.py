"""The probabilistic regular graph: every user is equally likely to be on every example."""

import dataclasses

import numba
import numpy as np

from coowned import validate
from coowned.attribution.graph import AttributionGraph
from coowned.errors import InputError
from coowned.synthetic import kernels
from coowned.synthetic.kernels import GAMMA, below, mix, unit

STREAM_TAG = 1  # tells the random stream of this world from those of the others
LARGEST_SCAN = 16  # drawn users are compared one by one up to this many, looked up in a table past it


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticGraph:
    """The sizes that all graph models have."""

    num_examples: int
    mean_users_per_example: float = 2.0
    mean_examples_per_user: float = 8.0

    def __post_init__(self) -> None:
        validate.integer(at_least=0, at_most=2**31 - 2, num_examples=self.num_examples)
        validate.positive_number(
            mean_users_per_example=self.mean_users_per_example, mean_examples_per_user=self.mean_examples_per_user
        )
        if self.num_users >= 2**31:
            raise InputError(
                f"{self.num_examples} examples with {self.mean_users_per_example} users each and "
                f"{self.mean_examples_per_user} examples per user make {self.num_users} users, over {2**31 - 1}; lower "
                "num_examples or raise mean_examples_per_user"
            )

    @property
    def num_users(self) -> int:
        """m = |E|·E|e|/d_u of the paper, rounded; at least one user if there is an example."""
        mean = self.num_examples * self.mean_users_per_example / self.mean_examples_per_user
        return max(round(mean), min(self.num_examples, 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegularGraph(SyntheticGraph):
    """Examples with Poisson many users, chosen uniformly without repetition.

    The number of users is `num_examples * mean_users_per_example / mean_examples_per_user`, rounded, at least 1.
    Where fewer users exist than Poisson asks for, the example has them all.

    Guarantees:
      - users_per_example ~ min(Poisson(mean_users_per_example), num_users).     (test_arity_is_poisson)
      - Given its size, every set of users is equally likely for an example.     (test_every_set_is_equally_likely)
      - The same graph for the same seed, on every platform.                     (test_same_bits_everywhere)
    Cost: O(pairs) time and memory, one core; 8 million examples in seconds (benchmarks/synthetic.py).
    Not regular in the strict sense: a user's number of examples varies as a binomial. At the mean of 2 users,
    13.5% of the examples (e^-2) have no user at all; selectors treat those by their `unattributed` setting.

    Example:
      >>> graph = RegularGraph(num_examples=1000).generate(seed=0)
      >>> graph.num_examples, graph.num_users
      (1000, 250)

    References: Ganesh et al. (2025), https://arxiv.org/abs/2503.03622, "More Details on Synthetic Data Generation".
    """

    def generate(self, *, seed: int) -> AttributionGraph:
        """Returns the graph of this seed."""
        validate.seed(seed)
        indptr, users = sample_regular(
            self.num_examples,
            self.num_users,
            kernels.poisson_cumulative(float(self.mean_users_per_example)),
            kernels.stream_key(seed, STREAM_TAG),
        )
        return AttributionGraph.from_csr(indptr, users, num_users=self.num_users)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def sample_regular(num_examples, num_users, cumulative, key):
    """(indptr, users) of the graph, users of an example in any order; `cumulative`: P(users per example <= n)."""
    state = key
    indptr = np.zeros(num_examples + 1, dtype=np.int64)
    for example in range(num_examples):  # sizes first, so that `users` is allocated once
        state += GAMMA
        u = unit(mix(state))
        count = 0
        while count < cumulative.size - 1 and u >= cumulative[count]:
            count += 1
        indptr[example + 1] = indptr[example] + min(count, num_users)
    users = np.empty(indptr[num_examples], dtype=np.int32)
    seen = np.full(num_users if cumulative.size > LARGEST_SCAN else 0, -1, dtype=np.int64)  # last example of a user
    for example in range(num_examples):
        first, count = indptr[example], indptr[example + 1] - indptr[example]
        for position in range(count):  # Floyd: a uniform set of `count` users in `count` draws
            last = num_users - count + position
            state += GAMMA
            user = below(mix(state), last + 1)
            taken = False
            if count > LARGEST_SCAN:
                taken = seen[user] == example
            else:
                for other in range(first, first + position):
                    taken = taken or users[other] == user
            if taken:
                user = last
            users[first + position] = user
            if count > LARGEST_SCAN:
                seen[user] = example
    return indptr, users
