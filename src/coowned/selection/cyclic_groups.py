"""Division of users into groups that share no selected example, for DP-MF with cyclic sampling."""

import dataclasses
import functools
import importlib.util
from typing import Annotated, Any, ClassVar

import numba
import numpy as np
import numpy.typing as npt

from coowned import threads, validate
from coowned.attribution.graph import AttributionGraph, sort_and_collapse_rows, transpose
from coowned.attribution.options import Option
from coowned.progress import Progress, silent
from coowned.selection.greedy import Greedy
from coowned.selection.greedy_with_duplicates import GreedyWithDuplicates
from coowned.selection.order import ordered_rows, part
from coowned.selection.packing import pack, user_keys
from coowned.selection.priced import Priced
from coowned.selection.selector import BoundedSelector, Selection

_IMBALANCE = 0.1  # part by which a group may exceed the mean
_WEIGHT = 60  # of an example, divided among its users: whole for up to six of them
_CLUSTERS_PER_GROUP = 8  # label propagation: a cluster has at most this part of a group
_ROUNDS = 10  # of label propagation

_njit = numba.njit(cache=True, nogil=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CyclicGroups(BoundedSelector):
    """Divides users into `num_groups` groups and selects among examples whose users are all in one.

    The selection without groups shows which examples matter: its users are partitioned so that few of its copies cross
    groups and every group has about equally many. Examples that cross are dropped, and the same selector chooses again
    among all others, so that room left by a dropped example is used. The partitioner is Mt-KaHyPar
    (deterministic preset) where the extra `coowned[cyclic]` is installed, else by label propagation, which loses more;
    `selector["partitioner"]` of the selection says which.

    Guarantees:
      - No user is in more than `contribution_bound` selected copies.   (test_check_suite)
      - No user is in two groups.   (test_groups_share_no_user)
      - The same seed gives the same selection, with any number of threads.   (test_check_suite, test_threads)
      - With one group, exactly the selection of `Greedy`, `GreedyWithDuplicates` or `Priced`.
        (test_one_group_is_the_selector_within)
      - No S under the same bound, with groups or without, is larger than `upper_bound`, which `within="priced"`
        proves.   (test_bound_holds_without_groups)

    Args:
      num_groups: number of groups of users; some may be empty on a small graph.
      contribution_bound: most selected copies that contain one user.
      allow_duplicates: whether an example may be selected more than once.
      within: the selector that holds the bound, "greedy" or "priced".
      unattributed: "keep" takes every example without users once, spread evenly over the groups.

    Cost: two selections, and a partition of the first one's users.
    What it is not: maximal. An example that crosses groups may fit under the bound.

    Example:
      >>> graph = AttributionGraph.from_users_per_example([[0, 1], [1, 2], [3, 4], [4, 5]])
      >>> CyclicGroups(num_groups=2, contribution_bound=2).select(graph).copies
      array([1, 1, 1, 1], dtype=int32)

    References: Choquette-Choo et al. (2023), https://arxiv.org/abs/2306.08153; Gottesbüren et al. (2024), Mt-KaHyPar,
      https://arxiv.org/abs/2303.17679
    """

    num_groups: Annotated[int, Option("cyclic-groups: groups of users that share no selected example.", metavar="G")]
    allow_duplicates: Annotated[bool, Option("Allow an example to be selected more than once.")] = False
    within: Annotated[str, Option("cyclic-groups: selector within each group, greedy (default) or priced.")] = "greedy"

    name: ClassVar[str] = "cyclic-groups"

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.one_of(("greedy", "priced"), within=self.within)
        validate.integer(at_least=1, at_most=2**15 - 1, num_groups=self.num_groups)

    def _select(self, graph: AttributionGraph, seed: int, progress: Progress) -> Selection:
        selector = self._selector_within()
        free = selector.select(graph, seed=seed, progress=part(progress, 0.0, 0.2))
        partitioner, group_of_user = "none", np.zeros(graph.num_users, np.int64)
        copies = free.copies.copy()
        if self.num_groups > 1:
            partitioner, group_of_user = self._divide(graph, free, part(progress, 0.2, 0.8))
            inside = np.flatnonzero(_groups_of_examples(graph, group_of_user) >= 0)
            again = selector.select(graph.subgraph(inside), seed=seed, progress=part(progress, 0.8, 1.0))
            copies[:] = 0
            copies[inside] = again.copies
        groups = np.where(copies > 0, _groups_of_examples(graph, group_of_user), -1)
        bound = free.upper_bound
        if self.unattributed == "keep":
            alone = np.flatnonzero(graph.users_per_example == 0)
            groups[alone] = np.arange(len(alone)) % self.num_groups
            bound = None if bound is None else bound + len(alone)
        settings = self.settings() | {"partitioner": partitioner}
        return self._selection(
            graph, seed, copies, groups=groups.astype(np.int32), upper_bound=bound, selector=settings
        )

    def _selector_within(self) -> BoundedSelector:
        shared = {name: getattr(self, name) for name in ("contribution_bound", "contribution_bounds", "ties")}
        if self.within == "priced":
            return Priced(**shared, allow_duplicates=self.allow_duplicates)
        return GreedyWithDuplicates(**shared) if self.allow_duplicates else Greedy(**shared)

    def _divide(
        self, graph: AttributionGraph, free: Selection, progress: Progress
    ) -> tuple[str, npt.NDArray[np.int64]]:
        """Returns the partitioner's name and the group of each user, so that few freely selected examples are cut.

        Users are numbered by their examples first, so that the groups do not depend on the users' labels.
        """
        progress(0.0, "dividing users into groups")
        seed = free.seed or 0
        rows = ordered_rows(graph, seed=seed, ties=self.ties, progress=silent)
        alike = 1 if self.contribution_bounds is None else self.capacities(graph)
        packing = pack(rows, graph.num_users, contribution_bound=alike, limit=1)
        keys = np.empty(graph.num_users, np.uint64)
        user_keys(packing.user_indptr, packing.items, packing.capacity, keys)
        label = np.empty(graph.num_users, np.int64)
        label[np.argsort(keys, kind="stable")] = np.arange(graph.num_users)
        chosen = free.copies[rows.examples] > 0  # (rows,)
        indptr = np.concatenate([[0], np.cumsum(np.diff(rows.indptr)[chosen])])
        users = label[rows.users[np.repeat(chosen, np.diff(rows.indptr))]]
        indptr, users = sort_and_collapse_rows(indptr, users)
        active, users = np.unique(users, return_inverse=True)  # of the users, those who are in a row
        copies = free.copies[rows.examples[chosen]].astype(np.int64)  # (chosen,)
        shares = np.repeat(_WEIGHT // np.maximum(np.diff(indptr), 1) * copies, np.diff(indptr))  # (pairs,)
        weights = np.maximum(np.bincount(users, weights=shares), 1).astype(np.int64)
        if importlib.util.find_spec("mtkahypar") is not None:
            name, found = "mt-kahypar", _by_mtkahypar(indptr, users, weights, copies, self.num_groups, seed)
        else:
            name, found = "label-propagation", _by_label_propagation(indptr, users, weights, self.num_groups)
        groups = np.full(graph.num_users, -1, np.int64)
        groups[active] = found
        groups = groups[label]
        _assign_rest(rows.indptr, rows.users, groups)
        return name, np.maximum(groups, 0)


def _groups_of_examples(graph: AttributionGraph, group_of_user: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns the (num_examples,) group of all users of an example; -1 if they are in several or there are none."""
    attributed = graph.users_per_example > 0
    groups = np.full(graph.num_examples, -1, np.int64)
    if attributed.any():
        of_pairs, starts = group_of_user[graph.users], graph.indptr[:-1][attributed]
        lowest, highest = np.minimum.reduceat(of_pairs, starts), np.maximum.reduceat(of_pairs, starts)
        groups[attributed] = np.where(lowest == highest, lowest, -1)
    return groups


def _by_mtkahypar(
    indptr: npt.NDArray[np.int64],
    users: npt.NDArray[np.int64],
    weights: npt.NDArray[np.int64],
    copies: npt.NDArray[np.int64],
    num_groups: int,
    seed: int,
) -> npt.NDArray[np.int64]:
    """Partitions users into groups of nearly equal weight, (num_users,), cutting rows with few copies in total."""
    import mtkahypar

    shared = np.flatnonzero(np.diff(indptr) > 1)
    if not len(shared):  # nothing can be cut
        return _lightest_first(weights, num_groups)
    rows = [users[indptr[row] : indptr[row + 1]].tolist() for row in shared]
    library = _mtkahypar()
    mtkahypar.set_seed(seed % (2**31 - 1))
    context = library.context_from_preset(mtkahypar.PresetType.DETERMINISTIC)
    context.logging = False
    context.set_partitioning_parameters(num_groups, _IMBALANCE, mtkahypar.Objective.CUT)
    worth = copies[shared].tolist()
    graph = library.create_hypergraph(context, len(weights), len(rows), rows, weights.tolist(), worth)
    return np.array(graph.partition(context).get_partition(), np.int64)


@functools.cache
def _mtkahypar() -> Any:
    """Initializes the library, which a process can do once."""
    import mtkahypar

    return mtkahypar.initialize(threads.cores(), False)


def _by_label_propagation(
    indptr: npt.NDArray[np.int64], users: npt.NDArray[np.int64], weights: npt.NDArray[np.int64], num_groups: int
) -> npt.NDArray[np.int64]:
    """Partitions users without a library: joins users of a row to clusters, clusters to groups, then moves users."""
    mean = -(-int(weights.sum()) // num_groups)
    cluster = _join_users(indptr, users, weights, mean // _CLUSTERS_PER_GROUP)
    names, cluster = np.unique(cluster, return_inverse=True)
    total = np.bincount(cluster, weights=weights, minlength=len(names)).astype(np.int64)
    groups = _lightest_first(total, num_groups)[cluster]
    held = np.bincount(groups, weights=weights, minlength=num_groups).astype(np.int64)
    rows = np.empty(len(users), np.int64)
    user_indptr = transpose(indptr, users, len(weights), rows)
    for _ in range(_ROUNDS):
        if not _move_users(indptr, users, user_indptr, rows, weights, int(mean * (1 + _IMBALANCE)), groups, held):
            break
    return groups


def _lightest_first(weights: npt.NDArray[np.int64], num_groups: int) -> npt.NDArray[np.int64]:
    """Assigns each, heaviest first, to the lightest group so far."""
    groups = np.empty(len(weights), np.int64)
    held = np.zeros(num_groups, np.int64)
    _fill_lightest(np.argsort(-weights, kind="stable"), weights, held, groups)
    return groups


# ---- groups of users, compiled ---------------------------------------------------------------------------------------


@numba.njit(inline="always")
def _root_of(parent, a):
    """Returns the root of a in a forest of parents, whose paths are halved on the way."""
    while parent[a] != a:
        parent[a] = parent[parent[a]]
        a = parent[a]
    return a


@_njit
def _join_users(indptr, users, weights, most):
    """Clusters users, (num_users,): joins the users of each row, in order, while the cluster weighs at most `most`."""
    parent, total = np.arange(weights.shape[0]), weights.copy()
    for row in range(indptr.shape[0] - 1):
        for p in range(indptr[row] + 1, indptr[row + 1]):
            a, b = _root_of(parent, users[indptr[row]]), _root_of(parent, users[p])
            if a != b and total[a] + total[b] <= most:
                parent[max(a, b)] = min(a, b)
                total[min(a, b)] = total[a] + total[b]
    for u in range(parent.shape[0]):
        parent[u] = _root_of(parent, u)
    return parent


@_njit
def _assign_rest(indptr, users, groups):
    """Assigns each user without a group (-1) to that of the first row whose other users are all in one group."""
    for row in range(indptr.shape[0] - 1):
        group = -1
        for p in range(indptr[row], indptr[row + 1]):
            found = groups[users[p]]
            if found >= 0:
                group = found if group in (-1, found) else -2
        if group >= 0:
            for p in range(indptr[row], indptr[row + 1]):
                groups[users[p]] = group


@_njit
def _fill_lightest(order, weights, held, groups):
    """Puts each of `order` in the group with the least held (groups,) so far."""
    for i in order:
        lightest = np.argmin(held)
        groups[i] = lightest
        held[lightest] += weights[i]


@_njit
def _move_users(indptr, users, user_indptr, rows, weights, most, groups, held):
    """Moves each user, in turn, to the group that keeps most of their rows whole, while it weighs at most `most`.

    user_indptr, rows: the rows of each user. Returns how many users were moved; groups and held are changed.
    """
    moved = 0
    whole = np.zeros(held.shape[0], np.int64)  # rows of the user whose other users are all in this group
    for u in range(weights.shape[0]):
        for j in range(user_indptr[u], user_indptr[u + 1]):
            group = _group_of_others(indptr, users, rows[j], u, groups)
            if group >= 0:
                whole[group] += 1
        own, best = groups[u], groups[u]
        for j in range(user_indptr[u], user_indptr[u + 1]):
            group = _group_of_others(indptr, users, rows[j], u, groups)
            if group >= 0 and whole[group] > whole[best] and held[group] + weights[u] <= most:
                best = group
        for j in range(user_indptr[u], user_indptr[u + 1]):
            group = _group_of_others(indptr, users, rows[j], u, groups)
            if group >= 0:
                whole[group] = 0
        if best != own:
            groups[u] = best
            held[own] -= weights[u]
            held[best] += weights[u]
            moved += 1
    return moved


@_njit
def _group_of_others(indptr, users, row, u, groups):
    """Returns the group of all users of a row but u; -1 if they are in several or there are none."""
    group = -1
    for p in range(indptr[row], indptr[row + 1]):
        if users[p] != u:
            if group >= 0 and groups[users[p]] != group:
                return -1
            group = groups[users[p]]
    return group
