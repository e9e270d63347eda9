"""An end-to-end audit in one training run: users who do not exist, each in the data or not by a fair coin.

Every canary user owns `contribution_bound` examples of her own, as many as a real user may have in S. Whether her
content is there is decided by a coin of the operating system; where it is not, her examples add nothing to any gradient
and the graph is what it was. After training, the auditor ranks all canaries by how well the model knows them and
guesses; a mechanism that keeps its promise cannot be guessed well. The real data are trained on as ever.

What it is not: free. The audited model is another release of the same people's data (it should be thrown away), and the
figures it gives are made from it. The bound is far below the claim unless something is badly wrong: it sees the whole
road, not the last per cent of noise.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from scipy.stats import mannwhitneyu

from coowned import validate
from coowned.accounting.calculators import gaussian_dp
from coowned.accounting.gaussian import gaussian_epsilon
from coowned.accounting.guarantee import UNIT
from coowned.attribution.graph import AttributionGraph
from coowned.errors import InputError
from coowned.mechanism.keys import Purpose, RunKey, random_words
from coowned.training.data import Draw, TrainingData, with_norms
from coowned.training.evaluate import example_losses
from coowned.training.loop import Trainer
from coowned.training.model import Model
from coowned.training.plan import TrainingPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class CanaryContent:
    """What canary examples hold, and what holds nothing.

    Attributes:
      arrays: name and (examples, ...) array, as `TrainingData.fill` gives them.
      silent: name and value for which an example's gradient is zero or is refused as not finite.
    """

    arrays: Mapping[str, npt.NDArray[Any]]
    silent: Mapping[str, Any]

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))


def feature_canaries(num_examples: int, num_features: int, *, length: float, seed: int) -> CanaryContent:
    """Random directions of one length, all with label 1: gradients that hardly any other example has.

    With two labels the intercept would favour all canaries of one of them and blur the ranking.

    >>> feature_canaries(3, 5, length=2.0, seed=0).arrays["features"].shape
    (3, 5)
    """
    validate.positive(num_examples=num_examples, num_features=num_features)
    validate.positive_number(length=length)
    rng = np.random.default_rng(seed)
    directions = rng.normal(size=(num_examples, num_features))
    directions *= length / np.linalg.norm(directions, axis=1, keepdims=True)
    labels = np.ones(num_examples)
    return CanaryContent(
        arrays={"features": directions.astype(np.float32), "labels": labels.astype(np.float32)},
        silent={"features": np.float32(np.nan), "labels": np.float32(0)},
    )


def token_canaries(num_examples: int, *, vocabulary_size: int, sequence_length: int, seed: int) -> CanaryContent:
    """Random words, three in twenty of them hidden: sentences nobody would write.

    The hidden places are the same in every step, which makes a canary easier to know again than a text whose masks are
    drawn afresh.

    >>> sorted(token_canaries(2, vocabulary_size=50, sequence_length=8, seed=0).arrays)
    ['lengths', 'positions', 'targets', 'tokens', 'weights']
    """
    validate.positive(num_examples=num_examples, vocabulary_size=vocabulary_size, sequence_length=sequence_length)
    rng = np.random.default_rng(seed)
    hidden = -(-15 * sequence_length // 100)  # 15%, rounded up
    words = rng.integers(0, vocabulary_size, (num_examples, sequence_length))
    positions = np.argsort(rng.random((num_examples, sequence_length)), axis=1)[:, :hidden]
    targets = rng.integers(0, vocabulary_size, (num_examples, hidden))
    arrays = {
        "tokens": words.astype(np.int32),
        "lengths": np.full(num_examples, sequence_length, np.int32),
        "positions": np.sort(positions, axis=1).astype(np.int32),
        "targets": targets.astype(np.int32),
        "weights": np.full((num_examples, hidden), 1 / hidden, np.float32),
    }
    return CanaryContent(arrays=arrays, silent={name: array.dtype.type(0) for name, array in arrays.items()})


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DataWithCanaries:
    """Training data and canary examples behind them; those of a canary user who is out hold nothing.

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

    @classmethod
    def around(
        cls, data: TrainingData, content: CanaryContent, *, per_user: int, included: npt.NDArray[np.bool_]
    ) -> "DataWithCanaries":
        if len(content) != per_user * len(included):
            raise InputError(
                f"{len(included)} canary users need {per_user * len(included)} examples, not {len(content)}"
            )
        return cls(
            data=data,
            content=content,
            per_user=per_user,
            included=np.asarray(included, bool),
            graph=graph_with_canaries(data.graph, num_users=len(included), per_user=per_user),
        )

    def with_norms(self) -> "DataWithCanaries":
        """As a run of clipped gradients reads it: see `coowned.training.data.with_norms`."""
        return dataclasses.replace(self, data=with_norms(self.data))

    @property
    def digest(self) -> str:
        return f"{self.data.digest} with {len(self.included)} canaries"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.data.shapes()

    def dtypes(self) -> dict[str, np.dtype[Any]]:
        return self.data.dtypes()

    def fill(self, examples: npt.NDArray[np.int64], out: dict[str, npt.NDArray[Any]], draw: Draw | None = None) -> None:
        real = examples < self.data.graph.num_examples
        if real.any():
            room = {name: np.empty((int(real.sum()), *array.shape[1:]), array.dtype) for name, array in out.items()}
            own = None if draw is None else draw._replace(copy_numbers=draw.copy_numbers[real])
            self.data.fill(examples[real], room, own)
            for name, array in room.items():
                out[name][: len(examples)][real] = array
        places = np.flatnonzero(~real)
        canaries = examples[places] - self.data.graph.num_examples
        inside = self.included[canaries // self.per_user]
        for name, array in self.content.arrays.items():
            out[name][places] = array[canaries]
            out[name][places[~inside]] = self.content.silent[name]
        if "squared_norms" in out:
            from coowned.mechanism.clipping import squared_norms_of

            out["squared_norms"][places] = squared_norms_of(out["features"][places])


def graph_with_canaries(graph: AttributionGraph, *, num_users: int, per_user: int) -> AttributionGraph:
    """The graph and, behind it, `num_users` users with `per_user` examples each that are theirs alone.

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
    """What one run with canaries proves.

    Attributes:
      epsilon_lower_bound: no smaller epsilon holds at this delta, but with probability `alpha` (Steinke et al.).
      gaussian_lower_bound: the same if the mechanism leaks like a Gaussian one, which sees more (Mahloujifar et al.).
      claimed_epsilon, delta, adjacency, contribution_bound: of the guarantee the run was trained under.
      gaussian_claim: what the claim allows the second bound to be.
      canaries, included: users, and how many of them were in.
      area_under_curve: chance that a canary who is in ranks above one who is out; a half is blind guessing.
    """

    epsilon_lower_bound: float
    gaussian_lower_bound: float
    claimed_epsilon: float
    gaussian_claim: float
    delta: float
    alpha: float
    canaries: int
    included: int
    area_under_curve: float
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
    content: Callable[[int], CanaryContent],
    *,
    canaries: int,
    per_user: int,
    alpha: float = 1e-3,
    initial: Mapping[str, npt.NDArray[np.float32]] | None = None,
    coins: RunKey | None = None,
    train: Callable[[TrainingPlan, TrainingData], Mapping[str, npt.NDArray[np.float32]]] | None = None,
) -> CanaryAudit:
    """Trains once with canaries and bounds epsilon from below.

    Guarantees:
      - An honest run is accused with probability at most alpha.   (test_an_honest_run_passes)
      - A run without its noise is caught, on features and on text.   (test_a_run_without_noise_is_caught,
        test_text_without_noise_is_caught)
      - Canary users are bound like real ones.                     (test_canaries_fill_their_bound)

    Args:
      model, data, initial: what is audited, as for `train`.
      make_plan: for a graph, the plan with its selection, certificate, guarantee and a run key of its own.
      content: for a number of examples, what canaries hold.
      canaries: how many canary users.
      per_user: examples of each; the contribution bound makes the audit strongest.
      alpha: probability that an honest run is accused.
      coins: who is in; the operating system's unless a test gives a key.
      train: another trainer, to audit that one; by default this package's loop.

    References: Steinke et al. (2023), https://arxiv.org/abs/2305.08846; Mahloujifar et al. (2024),
    https://arxiv.org/abs/2410.22235.
    """
    from jax_privacy.auditing import CanaryScoreAuditor

    validate.integer(at_least=10, canaries=canaries)
    validate.in_range(0, 1, open_low=True, open_high=True, alpha=alpha)
    coins = RunKey.from_operating_system() if coins is None else coins
    words = random_words(coins.derive(Purpose.CANARIES), canaries)
    included = (words >> np.uint64(63)).astype(bool)  # (canaries,) fair coins
    if included.all() or not included.any():
        raise InputError("all canaries fell on one side; use more of them")
    held = content(canaries * per_user)
    with_canaries = DataWithCanaries.around(data, held, per_user=per_user, included=included)
    plan = make_plan(with_canaries.graph)
    if plan.guarantee is None:
        raise InputError("there is nothing to audit in a run without a guarantee")
    plan.check(with_canaries.graph)
    start = model.initial() if initial is None else dict(initial)
    final = (_train(model, start) if train is None else train)(plan, with_canaries)
    # All canaries as if they were in: what the model says of content it may have seen.
    everyone = dataclasses.replace(with_canaries, included=np.ones(canaries, bool))
    known = _gains(model, start, final, everyone, data.graph.num_examples).reshape(canaries, per_user).sum(axis=1)
    auditor = CanaryScoreAuditor(known[included], known[~included])
    delta = plan.guarantee.delta
    mu = gaussian_dp(plan.mechanism, noise_multiplier=plan.noise_multiplier, adjacency=plan.guarantee.adjacency).mu
    return CanaryAudit(
        epsilon_lower_bound=float(auditor.epsilon_one_run(alpha / 2, delta)),
        gaussian_lower_bound=float(auditor.epsilon_one_run_fdp(alpha / 2, delta)),
        claimed_epsilon=plan.guarantee.epsilon,
        gaussian_claim=max(plan.guarantee.epsilon, gaussian_epsilon(mu, delta)),
        delta=delta,
        alpha=alpha,
        canaries=canaries,
        included=int(included.sum()),
        area_under_curve=area_under_curve(known[included], known[~included]),
        adjacency=plan.guarantee.adjacency,
        contribution_bound=plan.guarantee.contribution_bound,
    )


def area_under_curve(inside: npt.ArrayLike, outside: npt.ArrayLike) -> float:
    """The share of pairs, one of each, in which the one inside is larger; a tie is half a pair (Mann and Whitney).

    Guarantees:
      - It is the count of pairs, below a half too.   (test_area_counts_pairs)

    >>> area_under_curve([1.0, 3.0], [1.0, 2.0])
    0.625
    """
    inside, outside = np.asarray(inside), np.asarray(outside)
    return float(mannwhitneyu(inside, outside).statistic / (inside.size * outside.size))


def _train(model: Model, start: Mapping[str, npt.NDArray[np.float32]]):
    def train(plan: TrainingPlan, data: TrainingData) -> dict[str, npt.NDArray[np.float32]]:
        assert isinstance(data, DataWithCanaries)
        read = data if plan.clip_norm is None else data.with_norms()
        trainer = Trainer([plan], model)
        state = trainer.run(read, trainer.initial_state(start), [], start=0, after=lambda *_: None)
        return {name: np.asarray(array) for name, array in state[0].items()}

    return train


def _gains(model: Model, start: Any, final: Any, data: DataWithCanaries, first: int) -> npt.NDArray[np.float64]:
    """(canary examples,) by how much training lowered the loss of each."""
    only = _CanariesAlone(data, first)
    before, _ = example_losses(model, start, only)
    after, _ = example_losses(model, final, only)
    return np.nan_to_num(before - after, nan=0.0, posinf=1e30, neginf=-1e30)


class _CanariesAlone:
    """The canary examples as data of their own, for `example_losses`."""

    def __init__(self, data: DataWithCanaries, first: int):
        self._data, self._first = data, first
        self.graph = data.graph.subgraph(np.arange(first, data.graph.num_examples))
        self.digest = data.digest

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._data.shapes()

    def dtypes(self) -> dict[str, np.dtype[Any]]:
        return self._data.dtypes()

    def fill(self, examples: Any, out: Any, draw: Draw | None = None) -> None:
        self._data.fill(examples + self._first, out, draw)


def _with_names(names: pa.Array | None, added: list[str]) -> pa.Array | None:
    """Names of the canaries behind the others', of the same type; None stays None (numbers)."""
    if names is None:
        return None
    if pa.types.is_integer(names.type):
        largest = max((value for value in names.to_pylist() if value is not None), default=-1)
        return pa.concat_arrays([names, pa.array(range(largest + 1, largest + 1 + len(added)), names.type)])
    return pa.concat_arrays([names, pa.array(added, names.type)])
