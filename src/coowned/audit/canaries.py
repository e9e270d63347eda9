"""End-to-end audits of one training run by canaries: made-up users, each included by a fair coin.

Every canary user owns `contribution_bound` examples, as many as a real user may have in S. A coin of the operating
system decides whether their content is included; otherwise their examples add nothing to any gradient, and the graph
is the same. After training, the auditor ranks all canaries by how well the model fits them and guesses who was
included; a mechanism that keeps its promise makes good guesses impossible. The real data are trained on as usual.

What it is not: free. The audited model is another release of the same people's data (it should be deleted), and the
figures are computed from it. How large an epsilon can be contradicted depends on the number of canaries: even one
who guesses all of 200 right proves no epsilon above 4 (`CanaryAudit.largest_bound`).

The auditor says "in" of the first n canaries by rank. A private mechanism limits how many of these guesses are right;
more than it allows, at level alpha, refutes the claim. The n are fixed beforehand, and alpha is divided among them.

References: Steinke et al. (2023), https://arxiv.org/abs/2305.08846 (epsilon and delta); Mahloujifar et al. (2024),
  https://arxiv.org/abs/2410.22235 (a Gaussian trade-off curve).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from scipy.special import expit, ndtr, ndtri
from scipy.stats import binom, mannwhitneyu

from coowned import validate
from coowned.accounting.calculators import gaussian_dp
from coowned.accounting.gaussian import gaussian_epsilon
from coowned.accounting.terms import UNIT
from coowned.attribution.graph import AttributionGraph
from coowned.content.data import Draw, TrainingData
from coowned.errors import InputError
from coowned.exact.keys import Purpose, RunKey, random_words
from coowned.exact.linear_sums import norms_of
from coowned.models.model import Model, compiled_for
from coowned.models.probes import CanaryContent
from coowned.training.loop import Trainer
from coowned.training.plan import TrainingPlan

_GUESSED = ((0.4, 0.7), (0.2, 0.15), (0.1, 0.15))  # (share of the canaries, share of alpha); about half are in
_TOLERANCE = 1e-6  # of a bound, on the side of the lower one


def epsilon_lower_bound(scores: npt.ArrayLike, included: npt.ArrayLike, *, delta: float, alpha: float) -> float:
    """Computes a bound that exceeds the true epsilon, for this delta, with probability at most alpha.

    Guarantees:
      - An honest guesser is accused with probability at most alpha.   (test_honest_guesses_are_not_accused)
      - Nowhere above jax_privacy's bound for the same guesses.        (test_no_more_than_jax_privacy)

    Args:
      scores: (m,) how well the model knows each canary.
      included: (m,) whether it was in.

    Example:
      >>> included = np.arange(1000) < 500
      >>> round(epsilon_lower_bound(included, included, delta=1e-5, alpha=0.01), 2)
      4.3
    """

    def refutes(epsilon: float, m: int, n: int, right: int, level: float) -> bool:
        return p_value(epsilon, delta, m, n, right) <= level

    return _best(scores, included, delta, alpha, refutes)


def gaussian_lower_bound(scores: npt.ArrayLike, included: npt.ArrayLike, *, delta: float, alpha: float) -> float:
    """Bounds a mechanism with the trade-off curve of a Gaussian: the epsilon of the largest refuted mu.

    Example:
      >>> included = np.arange(1000) < 500
      >>> round(gaussian_lower_bound(included, included, delta=1e-5, alpha=0.01), 2)
      7.14
    """
    mu = _best(scores, included, delta, alpha, refutes_gaussian)
    return gaussian_epsilon(mu, delta) if mu else 0.0


def _best(
    scores: npt.ArrayLike, included: npt.ArrayLike, delta: float, alpha: float, refutes: Callable[..., bool]
) -> float:
    """Returns the largest value that some guesses refute: refutes(value, canaries, guesses, right ones, level)."""
    known, inside = np.asarray(scores, np.float64), np.asarray(included, bool)
    validate.same_length(len(known), included=inside)
    validate.in_range(0, 1, open_low=True, open_high=True, alpha=alpha, delta=delta)
    m = len(known)
    right = np.cumsum(inside[np.argsort(-known, kind="stable")])  # (m,) right ones among the first 1, 2, ... guesses
    counts = [(math.ceil(share * m), part * alpha) for share, part in _GUESSED]
    return max(largest_refuted(refutes, m, n, int(right[n - 1]), level) for n, level in counts)


def largest_refuted(refutes: Callable[..., bool], *seen: float) -> float:
    """Returns the largest value that what was seen refutes, all smaller ones being refuted too; 0 if none is."""
    if not refutes(0.0, *seen):
        return 0.0
    low, high = 0.0, 1.0
    while refutes(high, *seen):
        low, high = high, 2 * high
    while high - low > _TOLERANCE:
        middle = (low + high) / 2
        low, high = (middle, high) if refutes(middle, *seen) else (low, middle)
    return low


def p_value(epsilon: float, delta: float, m: int, n: int, right: int) -> float:
    """Bounds the probability of so many right guesses under (epsilon, delta) from above (Steinke et al., Thm 5.2)."""
    pure = binom.sf(right - 1, n, expit(epsilon))  # each guess is right with probability e^epsilon / (1 + e^epsilon)
    fewer = np.arange(1, right + 1)  # guesses that a failure of probability delta may have turned right
    gained = (binom.sf(right - fewer - 1, n, expit(epsilon)) - pure) / fewer
    return float(pure + 2 * m * delta * gained.max(initial=0.0))


def refutes_gaussian(mu: float, m: int, n: int, right: int, level: float) -> bool:
    """Returns whether so many right guesses refute mu-Gaussian privacy (Mahloujifar et al., Algorithm 3)."""
    hit, miss = level * right / m, level * (n - right) / m
    for count in range(right - 1, -1, -1):
        raised = max(miss, float(ndtr(ndtri(hit) - mu)))
        if raised == miss:  # neither changes any more
            break
        hit, miss = min(1.0, hit + count / (n - count) * (raised - miss)), raised
    return hit + miss > n / m


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DataWithCanaries:
    """Training data followed by canary examples; those of left-out canaries are empty.

    Where canary examples have more columns than the data, real examples have zeros there.

    Guarantees:
      - Real examples are what they were; the graph does not depend on who is in.   (test_graph_is_the_same_for_all)
      - A canary who is out adds nothing to any gradient.                           (test_a_canary_who_is_out_is_silent)
      - Norms come with the rows as in training, canaries' too.                     (test_canaries_have_their_norms)
    """

    data: TrainingData
    content: CanaryContent
    per_user: int
    included: npt.NDArray[np.bool_]  # (canary users,)
    graph: AttributionGraph
    norms: bool = False

    @classmethod
    def around(
        cls, data: TrainingData, content: CanaryContent, *, per_user: int, included: npt.NDArray[np.bool_]
    ) -> "DataWithCanaries":
        if len(content) != per_user * len(included):
            raise InputError(f"{len(included)} canaries need {per_user * len(included)} examples, not {len(content)}")
        return cls(
            data=data,
            content=content,
            per_user=per_user,
            included=np.asarray(included, bool),
            graph=graph_with_canaries(data.graph, num_users=len(included), per_user=per_user),
        )

    @property
    def digest(self) -> str:
        return f"{self.data.digest} with {len(self.included)} canaries"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        own = self.data.shapes()
        shapes = {
            name: tuple(max(sizes) for sizes in zip(array.shape[1:], own[name], strict=True))
            for name, array in self.content.arrays.items()
        }
        return shapes | ({"norms": ()} if self.norms else {})

    def dtypes(self) -> dict[str, np.dtype[Any]]:
        kinds = {name: array.dtype for name, array in self.content.arrays.items()}
        return kinds | ({"norms": np.dtype(np.float32)} if self.norms else {})

    def with_norms(self) -> "DataWithCanaries":
        """Returns the data with the norms of the rows, which a clipping run reads along with features."""
        return dataclasses.replace(self, norms="features" in self.content.arrays)

    def fill(self, examples: npt.NDArray[np.int64], out: dict[str, npt.NDArray[Any]], draw: Draw | None = None) -> None:
        first = self.data.graph.num_examples
        real, canary = np.flatnonzero(examples < first), np.flatnonzero(examples >= first)
        own = None if draw is None else draw._replace(copy_numbers=draw.copy_numbers[real])
        kinds = self.data.dtypes()
        room = {name: np.empty((len(real), *shape), kinds[name]) for name, shape in self.data.shapes().items()}
        if len(real):
            self.data.fill(examples[real], room, own)
        inside = self.included[(examples[canary] - first) // self.per_user]
        for name, array in self.content.arrays.items():
            out[name][real] = 0
            out[name][(real, *(slice(length) for length in room[name].shape[1:]))] = room[name]
            out[name][canary] = 0
            out[name][(canary, *(slice(length) for length in array.shape[1:]))] = array[examples[canary] - first]
            out[name][canary[~inside]] = np.nan if name == self.content.silenced_by else 0
        if self.norms:
            out["norms"][: len(examples)] = norms_of(out["features"][: len(examples)])


def graph_with_canaries(graph: AttributionGraph, *, num_users: int, per_user: int) -> AttributionGraph:
    """Returns the graph and, behind it, `num_users` users with `per_user` examples each.

    >>> graph = AttributionGraph.from_users_per_example([[0, 1], [1]])
    >>> graph_with_canaries(graph, num_users=2, per_user=2).examples_per_user.tolist()
    [1, 2, 2, 2]
    """
    validate.positive(num_users=num_users, per_user=per_user)
    count = num_users * per_user
    owners = graph.num_users + np.repeat(np.arange(num_users), per_user)
    return AttributionGraph.from_csr(
        np.concatenate([graph.indptr, graph.indptr[-1] + 1 + np.arange(count)]),
        np.concatenate([graph.users, owners]).astype(graph.users.dtype),
        num_users=graph.num_users + num_users,
        example_ids=_with_names(graph.example_ids, [f"canary-{number}" for number in range(count)]),
        user_keys=_with_names(graph.user_keys, [f"canary-{number}" for number in range(num_users)]),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CanaryAudit:
    """The lower bounds on epsilon that one run with canaries proves."""

    epsilon_lower_bound: float  # no smaller epsilon holds at this delta, but with probability `alpha` (Steinke et al.)
    # The same if the mechanism leaks like a Gaussian one, which sees more (Mahloujifar et al.).
    gaussian_lower_bound: float
    claimed_epsilon: float  # of the guarantee the run was trained under
    gaussian_claim: float  # what the claim allows the second bound to be
    delta: float
    alpha: float
    canaries: int  # synthetic users
    included: int  # how many of them were included
    largest_bound: float  # what the second bound would be had every canary been guessed right
    area_under_curve: float  # chance that a canary who is in ranks above one who is out; a half is blind guessing
    adjacency: str
    contribution_bound: int

    @property
    def claim_holds(self) -> bool:
        return self.epsilon_lower_bound <= self.claimed_epsilon and self.gaussian_lower_bound <= self.gaussian_claim

    def to_dict(self) -> dict[str, Any]:
        return {"unit": UNIT} | dataclasses.asdict(self) | {"claim_holds": self.claim_holds}


def audit_with_canaries(
    model: Model,
    data: TrainingData,
    make_plan: Callable[[AttributionGraph], TrainingPlan],
    content: CanaryContent,
    *,
    per_user: int,
    alpha: float = 1e-3,
    initial: Mapping[str, npt.NDArray[np.float32]] | None = None,
    coins: RunKey | None = None,
) -> CanaryAudit:
    """Trains once with canaries and bounds epsilon from below.

    Guarantees:
      - An honest run is accused with probability at most alpha.   (test_an_honest_run_passes)
      - A run without its noise is caught, on features and on text.   (test_a_run_without_noise_is_caught,
        test_text_without_noise_is_caught)
      - Canary users are bound like real ones.                     (test_canaries_fill_their_bound)

    Args:
      model, data, initial: what is audited, as for `train`; the model takes what the canaries hold.
      make_plan: for a graph, the plan with its selection, certificate, guarantee and its own run key.
      content: what canaries hold, `per_user` examples of a user in a row.
      per_user: examples of each; the contribution bound makes the audit strongest.
      alpha: probability that an honest run is accused.
      coins: decide who is included; from the operating system unless a test passes a key.

    References: Steinke et al. (2023), https://arxiv.org/abs/2305.08846; Mahloujifar et al. (2024),
    https://arxiv.org/abs/2410.22235.
    """
    canaries = len(content) // per_user
    validate.integer(at_least=10, canaries=canaries)
    validate.in_range(0, 1, open_low=True, open_high=True, alpha=alpha)
    coins = RunKey.from_operating_system() if coins is None else coins
    words = random_words(coins.derive(Purpose.CANARIES), canaries)
    included = (words >> np.uint64(63)).astype(bool)  # (canaries,) fair coins
    if included.all() or not included.any():
        raise InputError("all canaries were included, or all left out; use more of them")
    with_canaries = DataWithCanaries.around(data, content, per_user=per_user, included=included)
    plan = make_plan(with_canaries.graph)
    claim = plan.guarantee
    if claim is None:
        raise InputError("there is nothing to audit in a run without a guarantee")
    plan.check(with_canaries.graph)
    start = model.initial() if initial is None else dict(initial)
    trained = Trainer([plan], model).train(with_canaries.with_norms(), start)
    final = {name: array[0] for name, array in trained.items()}
    gains = _losses(model, start, content) - _losses(model, final, content)  # by how much training lowered each loss
    gains = np.nan_to_num(gains, nan=0.0, posinf=1e30, neginf=-1e30)
    known = gains.reshape(canaries, per_user).sum(axis=1)
    bounds = _bounds(known, included, claim.delta, alpha)
    mu = gaussian_dp(plan.mechanism, noise_multiplier=claim.noise_multiplier, adjacency=claim.adjacency).mu
    return CanaryAudit(
        epsilon_lower_bound=bounds[0],
        gaussian_lower_bound=bounds[1],
        claimed_epsilon=claim.epsilon,
        gaussian_claim=max(claim.epsilon, gaussian_epsilon(mu, claim.delta)),
        delta=claim.delta,
        alpha=alpha,
        canaries=canaries,
        included=int(included.sum()),
        largest_bound=max(_bounds(included, included, claim.delta, alpha)),
        area_under_curve=area_under_curve(known[included], known[~included]),
        adjacency=claim.adjacency,
        contribution_bound=claim.contribution_bound,
    )


def _bounds(scores: npt.ArrayLike, included: npt.ArrayLike, delta: float, alpha: float) -> tuple[float, float]:
    """Computes lower bounds on epsilon from canary scores, half of alpha each: for any leak, and for a Gaussian one."""
    claim = {"delta": delta, "alpha": alpha / 2}
    return epsilon_lower_bound(scores, included, **claim), gaussian_lower_bound(scores, included, **claim)


def area_under_curve(inside: npt.ArrayLike, outside: npt.ArrayLike) -> float:
    """Returns the share of pairs in which the one inside is larger; a tie is half a pair (Mann and Whitney).

    Guarantees:
      - It is the count of pairs, below a half too.   (test_area_counts_pairs)

    >>> area_under_curve([1.0, 3.0], [1.0, 2.0])
    0.625
    """
    inside, outside = np.asarray(inside), np.asarray(outside)
    return float(mannwhitneyu(inside, outside).statistic / (inside.size * outside.size))


def _losses(model: Model, parameters: Mapping[str, Any], content: CanaryContent) -> npt.NDArray[np.float64]:
    """Computes the (canary examples,) losses as if all were included."""
    return np.asarray(compiled_for(model, model.losses)(dict(parameters), dict(content.arrays))[0], np.float64)


def _with_names(names: pa.Array | None, added: list[str]) -> pa.Array | None:
    """Appends names of the canaries to the others, in the same type; None stays None (numbers)."""
    if names is None:
        return None
    if pa.types.is_integer(names.type):
        largest = max((value for value in names.to_pylist() if value is not None), default=-1)
        return pa.concat_arrays([names, pa.array(range(largest + 1, largest + 1 + len(added)), names.type)])
    return pa.concat_arrays([names, pa.array(added, names.type)])
