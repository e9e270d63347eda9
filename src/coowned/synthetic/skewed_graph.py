"""The skewed graph: users who are on many examples already are more likely to be on the next one."""

import dataclasses
import math
from typing import NamedTuple

import numba
import numpy as np

from coowned import validate
from coowned.attribution.graph import AttributionGraph
from coowned.synthetic import kernels
from coowned.synthetic.kernels import GAMMA, log, mix, power, unit
from coowned.synthetic.regular_graph import SyntheticGraph

STREAM_TAG = 2  # tells the random stream of this world from those of the others
COIN_THRESHOLD = 0.25  # users likelier than this have a coin each; must be below 1/2 for the bound in `sample_skewed`
NUM_CLASSES = 32  # class c holds the users with 2^c <= 1 + examples < 2^(c + 1)
INVERSE_FACTORIALS = tuple(1.0 / math.factorial(n) for n in range(14, 0, -1))

_njit = numba.njit(cache=True, nogil=True, error_model="numpy")
_inlined = numba.njit(cache=True, nogil=True, error_model="numpy", inline="always")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SkewedGraph(SyntheticGraph):
    """Examples are generated one after another; each has user j with probability

        min(1, mean_users_per_example * (1 + d(j))^skew / sum over j' of (1 + d(j'))^skew),

    independently for each user, where d(j) counts the examples j is on so far.

    Guarantees:
      - The graph has exactly this law (up to the 53 bits of a coin), for heavy and light users alike.
                                                                (test_final_counts_follow_the_exact_law,
                                                                 test_agrees_with_dense_coins_on_larger_graphs)
      - No user is favoured by its label.                       (test_labels_are_exchangeable)
      - The same graph for the same seed, on every platform.    (test_same_bits_everywhere)
    Cost: O(mean_users_per_example + log num_examples) expected time per example, O(pairs) memory, one core;
    8 million examples in seconds (benchmarks/synthetic.py).
    Not of exactly `mean_users_per_example` users on average: the paper says the mean is kept throughout, but past skew
    1 few users come to hold most of the weight, their probability would pass 1, and what the cap cuts off is lost.

    Example:
      >>> graph = SkewedGraph(num_examples=1000).generate(seed=0)
      >>> graph.num_users, int(graph.examples_per_user.max()) > 100
      (250, True)

    References: Ganesh et al. (2025), https://arxiv.org/abs/2503.03622, "More Details on Synthetic Data Generation".
    """

    skew: float = 1.5

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.in_range(0.0, 10.0, skew=self.skew)

    def generate(self, *, seed: int) -> AttributionGraph:
        """Returns the graph of this seed."""
        validate.seed(seed)
        indptr, users = sample_skewed(
            self.num_examples,
            self.num_users,
            float(self.mean_users_per_example),
            float(self.skew),
            kernels.stream_key(seed, STREAM_TAG),
            COIN_THRESHOLD,
        )
        return AttributionGraph.from_csr(indptr, users, num_users=self.num_users)


class Classes(NamedTuple):
    """Users in line by class: line[start[c]:start[c + 1]] is class c, in no particular order."""

    line: np.ndarray  # (num_users, 2) int32 user, their examples so far: one array, since cache misses cost the time
    start: np.ndarray  # (NUM_CLASSES + 1,) int64


@_njit
def sample_skewed(num_examples, num_users, mean_users_per_example, skew, key, coin_threshold):
    """(indptr, users) of the graph; the law does not depend on `coin_threshold` in (0, 1/2), only the time does.

    Users are kept in classes by powers of two of 1 + examples. A class in which someone may be likelier than
    `coin_threshold` has a coin for each member: those are few, since the probabilities sum to at most the mean.
    Any other class of n users with probabilities at most q is a stretch of length n·r, r = q(1 + q), of a line with a
    Poisson process of rate 1 on it: a user is hit with probability 1 - exp(-r) >= q, independently of all others,
    and then kept with probability p/(1 - exp(-r)), which makes p in all. The points come in order, so that repeated
    hits of a user are neighbours.
    """
    indptr = np.zeros(num_examples + 1, dtype=np.int64)
    expected = num_examples * mean_users_per_example
    users = np.empty(min(int(expected + 8.0 * np.sqrt(expected)), num_examples * num_users), dtype=np.int32)
    classes = Classes(np.zeros((num_users, 2), np.int32), np.full(NUM_CLASSES + 1, num_users, np.int64))
    classes.line[:, 0] = np.arange(num_users)
    classes.start[0] = 0
    num_used = 1 if num_users else 0  # classes that have ever had a user
    drawn = np.empty(num_users, dtype=np.int64)  # drawn[:count] are the positions in line of the users of the example
    weights = weights_up_to(1, skew)  # weights[n] = (1 + n)^skew, as far as needed
    total, lost = float(num_users), 0.0  # compensated sum of everyone's weight
    size, state = 0, key
    for example in range(num_examples):
        scale = mean_users_per_example / (total + lost)
        count = 0
        ahead = -1.0  # distance to the next point of the Poisson process; below 0: not drawn yet
        for c in range(num_used):
            if classes.start[c] == classes.start[c + 1]:
                continue
            q = scale * weights[(2 << c) - 2]  # nobody in the class is likelier
            if q > coin_threshold:
                state, count = draw_by_coins(classes, c, scale, weights, state, drawn, count)
            else:
                state, count, ahead = draw_by_points(classes, c, scale, weights, (state, count, ahead), drawn)
        if size + count > users.size:
            wider = np.empty(users.size + users.size // 4 + count, dtype=np.int32)
            wider[:size] = users[:size]
            users = wider
        for at in range(count - 1, -1, -1):  # from the back: a move up then never displaces who is still to come
            slot = drawn[at]
            users[size + at] = classes.line[slot, 0]
            grown = classes.line[slot, 1] + 1  # their examples, this one included
            classes.line[slot, 1] = grown
            gain = weights[grown] - weights[grown - 1]
            summed = total + gain
            lost += (total - summed) + gain if total >= gain else (gain - summed) + total
            total = summed
            if (grown + 1) & grown == 0:  # 1 + examples is a power of two
                used = move_up(classes, slot)
                if used > num_used:
                    num_used = used
                    weights = weights_up_to(num_used, skew)
        size += count
        indptr[example + 1] = size
    return indptr, users[:size].copy()


@_inlined
def draw_by_coins(classes, c, scale, weights, state, drawn, count):
    """Tosses a coin for each member of a class; returns the random state and how many users are drawn now."""
    for slot in range(classes.start[c], classes.start[c + 1]):
        state += GAMMA
        if unit(mix(state)) < scale * weights[classes.line[slot, 1]]:  # what is above 1 always comes up
            drawn[count] = slot
            count += 1
    return state, count


@_inlined
def draw_by_points(classes, c, scale, weights, walk, drawn):
    """Draws the members of a class that points of the Poisson process hit; returns the walk at the end of the class.

    walk: the random state, how many users are drawn, and the distance to the next point.
    """
    state, count, ahead = walk
    begin = classes.start[c]
    members = classes.start[c + 1] - begin
    q = scale * weights[(2 << c) - 2]
    rate = q * (1.0 + q)
    length = members * rate
    if ahead < 0.0:
        state += GAMMA
        ahead = -log(1.0 - unit(mix(state)))
    previous = -1
    while ahead < length:
        member = min(np.int64(ahead / rate), members - 1)
        if member != previous:
            previous = member
            slot = begin + member
            state += GAMMA
            if unit(mix(state)) * hit_probability(rate) < scale * weights[classes.line[slot, 1]]:
                drawn[count] = slot
                count += 1
        state += GAMMA
        ahead += -log(1.0 - unit(mix(state)))
    return state, count, ahead - length


@_inlined
def move_up(classes, slot):
    """Moves the user of a slot across the end of their class c into the next; returns c + 2."""
    line, start = classes.line, classes.start
    user, grown = line[slot, 0], line[slot, 1]
    c = 0
    while (grown + 1) >> (c + 1) > 1:
        c += 1
    end = start[c + 1] - 1
    line[slot, 0], line[slot, 1] = line[end, 0], line[end, 1]
    line[end, 0], line[end, 1] = user, grown
    start[c + 1] = end
    return c + 2


@_njit
def weights_up_to(num_classes, skew):
    """(1 + n)^skew for every n that users of the first classes may have, and the one after."""
    weights = np.empty(1 << num_classes)
    for n in range(weights.size):
        weights[n] = power(n + 1.0, skew)
    return weights


@_inlined
def hit_probability(rate):
    """1 - exp(-rate) for rate in [0, 3/4], without cancellation: the alternating series to its 14th term."""
    series = INVERSE_FACTORIALS[0]
    for coefficient in INVERSE_FACTORIALS[1:]:
        series = coefficient - rate * series
    return rate * series
