"""The attribution graph: which example belongs to which users; and compiled loops over the users of every example.

With numpy, sorting and collapsing the users of a million examples takes 113 times as long (`np.unique` of pairs), and
grouping three million pairs 18 times (a stable `argsort`). Every loop releases the interpreter lock.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numba
import numpy as np
import pyarrow as pa

from coowned import validate
from coowned.attribution import digest as digests
from coowned.attribution.identifiers import as_identifiers, type_of_ids, utf8_buffers
from coowned.errors import InputError


@dataclasses.dataclass(frozen=True)
class Absent:
    """Examples that belong to a graph but are not in memory: only their digest and their number are known.

    Attributes:
      examples: sums of their hashes.
      users: how many users are in none of the examples in memory.
    """

    examples: digests.RowSums = dataclasses.field(default_factory=digests.RowSums)
    users: int = 0


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class AttributionGraph:
    """A fixed hypergraph whose hyperedges are the examples and whose nodes are the users.

    Arrays are stored by example in compressed rows, and by user on first use. They are read-only views;
    `from_csr` keeps the caller's memory where it can, so the caller must not write to it afterwards.

    Guarantees:
      - Neither the object nor its arrays can be changed.                (test_graph_is_immutable)
      - A user repeated inside one example counts once.                  (test_repeated_users_collapse)
      - Examples without users are legal and keep their index.           (test_examples_without_users)
      - `digest` depends on the ids and the set of (id, key) pairs only. (test_digest_ignores_order_and_labels)

    Cost: O(pairs) time and memory; `digest` hashes every example once, on first use.
    What it is not: a store of content. Nothing that a selector sees depends on the text of examples.

    Example:
      >>> graph = AttributionGraph.from_users_per_example([[0, 1], [0, 1, 2], [1, 3], [2, 1], [3, 2]])
      >>> graph
      AttributionGraph(num_examples=5, num_users=4, num_pairs=11)
      >>> graph.examples_per_user
      array([2, 4, 3, 2])

    References: Ganesh et al. (2025), Section 2, https://arxiv.org/abs/2503.03622
    """

    # Takes checked arrays as they are; use one of the `from_…` constructors instead.
    indptr: np.ndarray  # (num_examples + 1,) int64
    users: np.ndarray  # (num_pairs,) int32 where they fit, increasing inside each example
    _: dataclasses.KW_ONLY
    num_users: int
    example_ids: pa.Array | None  # int64 or large_string, None: the index
    user_keys: pa.Array | None  # int64 or large_string, None: the integer
    columns_read: tuple[str, ...] = ()
    num_unprotected_users: int = 0
    id_type: pa.DataType | None = None  # of the ids in the input, which `ids_of` gives back
    absent: Absent = dataclasses.field(default_factory=Absent)  # of a graph read from shards

    def __post_init__(self) -> None:
        object.__setattr__(self, "indptr", read_only(self.indptr))
        object.__setattr__(self, "users", read_only(self.users))

    @classmethod
    def from_csr(
        cls,
        indptr: Any,
        users: Any,
        *,
        num_users: int,
        example_ids: Any = None,
        user_keys: Any = None,
        columns_read: Sequence[str] = (),
        num_unprotected_users: int = 0,
    ) -> "AttributionGraph":
        """Builds a graph from compressed rows: the users of example i are users[indptr[i]:indptr[i + 1]]."""
        validate.integer(at_least=0, num_users=num_users)
        indptr = _integers(indptr, "indptr").astype(np.int64, copy=False)
        users = _integers(users, "users")
        if len(indptr) == 0 or indptr[0] != 0 or indptr[-1] != len(users):
            raise InputError("indptr must start at 0 and end at len(users); it has num_examples + 1 entries")
        if len(indptr) > 1 and np.diff(indptr).min() < 0:
            row = int(np.flatnonzero(np.diff(indptr) < 0)[0])
            raise InputError(f"indptr must not decrease, but does after example {row}")
        small = np.int32 if num_users <= np.iinfo(np.int32).max else np.int64
        verdict = rows_are_increasing(indptr, users, num_users)
        if verdict == 2:
            wrong = int(np.flatnonzero((users < 0) | (users >= num_users))[0])
            example = int(np.searchsorted(indptr, wrong, side="right")) - 1
            raise InputError(f"example {example} has user {users[wrong]}, not in 0..{num_users - 1}; raise num_users")
        if verdict == 1:
            indptr, users = sort_and_collapse_rows(indptr, users.astype(small, copy=True))
        return cls(
            np.ascontiguousarray(indptr),
            np.ascontiguousarray(users.astype(small, copy=False)),
            num_users=int(num_users),
            example_ids=as_identifiers(example_ids, name="example_ids", length=len(indptr) - 1),
            user_keys=as_identifiers(user_keys, name="user_keys", length=num_users),
            columns_read=tuple(columns_read),
            num_unprotected_users=num_unprotected_users,
            id_type=type_of_ids(example_ids),
        )

    @classmethod
    def from_pairs(
        cls,
        example: Any,
        user: Any,
        *,
        num_examples: int,
        num_users: int,
        example_ids: Any = None,
        user_keys: Any = None,
    ) -> "AttributionGraph":
        """Builds a graph from two arrays of equal length: example[j] belongs to user[j]."""
        validate.integer(at_least=0, num_examples=num_examples, num_users=num_users)
        example, user = _integers(example, "example"), _integers(user, "user")
        validate.same_length(len(example), user=user)
        outside = (example < 0) | (example >= num_examples)
        if outside.any():
            pair = int(np.flatnonzero(outside)[0])
            raise InputError(
                f"pair {pair} has example {example[pair]}, not in 0..{num_examples - 1}; raise num_examples"
            )
        indptr, grouped = group_pairs(example, user, num_examples)
        return cls.from_csr(indptr, grouped, num_users=num_users, example_ids=example_ids, user_keys=user_keys)

    @classmethod
    def from_users_per_example(
        cls,
        users_per_example: Iterable[Iterable[int]],
        *,
        num_users: int | None = None,
        example_ids: Any = None,
        user_keys: Any = None,
    ) -> "AttributionGraph":
        """Builds a graph from one list of user integers per example; num_users defaults to the largest plus one."""
        rows = [list(row) for row in users_per_example]
        users = _integers([user for row in rows for user in row], "users_per_example")
        indptr = np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)]).astype(np.int64)
        if num_users is None:
            num_users = int(users.max(initial=-1)) + 1
            num_users = max(num_users, 0 if user_keys is None else len(user_keys))
        return cls.from_csr(indptr, users, num_users=num_users, example_ids=example_ids, user_keys=user_keys)

    def __repr__(self) -> str:
        counts = f"num_examples={self.num_examples}, num_users={self.num_users}, num_pairs={self.num_pairs}"
        return f"AttributionGraph({counts})"

    @property
    def num_examples(self) -> int:
        return len(self.indptr) - 1

    @property
    def num_pairs(self) -> int:
        return len(self.users)

    @functools.cached_property
    def users_per_example(self) -> np.ndarray:
        """(num_examples,) int32."""
        return read_only(np.diff(self.indptr).astype(np.int32))

    @functools.cached_property
    def examples_per_user(self) -> np.ndarray:
        """(num_users,) int64."""
        return read_only(np.bincount(self.users, minlength=self.num_users).astype(np.int64))

    @functools.cached_property
    def by_user(self) -> tuple[np.ndarray, np.ndarray]:
        """The same pairs by user: (num_users + 1,) int64 and (num_pairs,) examples, increasing for each user."""
        small = np.int32 if self.num_examples <= np.iinfo(np.int32).max else np.int64
        examples = np.empty(self.num_pairs, dtype=small)
        user_indptr = transpose(self.indptr, self.users, self.num_users, examples)
        return read_only(user_indptr), read_only(examples)

    @functools.cached_property
    def digest(self) -> str:
        """64 hexadecimal digits that identify the ids and the set of (example id, user key) pairs, on any platform."""
        return digests.finish("graph", self.digest_sums())

    def digest_sums(self) -> digests.RowSums:
        """Returns the mergeable sums behind `digest`; the sums of the parts of a graph, split by example, add up."""
        ids = digests.Texts(*utf8_buffers(self.example_ids, length=self.num_examples))
        keys = digests.Texts(*utf8_buffers(self.user_keys, length=self.num_users))
        return digests.sum_examples(self.indptr, self.users, ids, keys).merge(self.absent.examples)

    def subgraph(self, examples: Any) -> "AttributionGraph":
        """Returns the graph of these examples only, in this order; users, ids and keys stay the same.

        Examples that are not in memory are not in it.
        """
        rows = np.asarray(examples)
        if rows.dtype == bool:
            validate.same_length(self.num_examples, examples=rows)
            rows = np.flatnonzero(rows)
        rows = indices(rows, "examples", self.num_examples)
        if len(np.unique(rows)) != len(rows):
            raise InputError("examples must not repeat; a subgraph contains each example once")
        indptr, users = take_rows(self.indptr, self.users, rows)
        ids = pa.array(rows.astype(np.int64)) if self.example_ids is None else self.example_ids.take(pa.array(rows))
        absent = Absent(users=self.absent.users)
        return dataclasses.replace(self, indptr=indptr, users=users, example_ids=ids, absent=absent)

    def without_users(self, users: Any) -> "AttributionGraph":
        """Removes users from the attribution: they are no longer protected, and are counted but not named.

        The list must be chosen without looking at the content of examples.
        """
        gone = np.unique(indices(users, "users", self.num_users))
        stays = np.ones(self.num_users, dtype=bool)
        stays[gone] = False
        indptr, kept = drop_users(self.indptr, self.users, stays)
        keys = pa.array(np.arange(self.num_users)) if self.user_keys is None else self.user_keys
        return dataclasses.replace(
            self,
            indptr=indptr,
            users=kept,
            num_users=self.num_users - len(gone),
            user_keys=keys.filter(pa.array(stays)),
            num_unprotected_users=self.num_unprotected_users + len(gone),
        )

    def ids_of(self, examples: Any) -> pa.Array:
        """Returns the ids of these examples, in the type of the input."""
        rows = pa.array(np.asarray(examples, dtype=np.int64))
        if self.example_ids is None:
            return rows
        ids = self.example_ids.take(rows)
        return ids if self.id_type is None else ids.cast(self.id_type)


def drop_users(indptr: np.ndarray, users: np.ndarray, stays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keeps only the users for which stays (num_users,) is true in compressed rows, and renumbers them."""
    kept = stays[users]
    before = np.concatenate([[0], np.cumsum(kept)])
    return before[indptr], (np.cumsum(stays) - 1)[users[kept]].astype(users.dtype)


def indices(values: Any, name: str, count: int) -> np.ndarray:
    """Converts values to a one-dimensional array of integers in 0..count - 1; raises InputError for anything else."""
    array = _integers(values, name)
    if array.size and (array.min() < 0 or array.max() >= count):
        wrong = int(np.flatnonzero((array < 0) | (array >= count))[0])
        raise InputError(
            f"{name} must be in 0..{count - 1}, but entry {wrong} is {array[wrong]}; use the indices of this graph"
        )
    return array


def _integers(values: Any, name: str) -> np.ndarray:
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise InputError(f"{name} must be a one-dimensional array of integers ({error})") from None
    if array.size == 0 and array.dtype.kind == "f":
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputError(
            f"{name} must be a one-dimensional array of integers, not {array.dtype} of shape {array.shape}"
        )
    if array.dtype.kind == "u" and array.dtype.itemsize == 8:
        if array.max(initial=0) > np.iinfo(np.int64).max:
            raise InputError(f"{name} must be below 2^63, not {array.max()}; number them from 0")
        return array.astype(np.int64)
    return array.astype(array.dtype.newbyteorder("="), copy=False)  # compiled code wants this machine's byte order


def read_only(array: np.ndarray) -> np.ndarray:
    """Returns a read-only view of the array."""
    view = array.view()
    view.flags.writeable = False
    return view


_njit = numba.njit(cache=True, nogil=True)


@_njit
def rows_are_increasing(indptr, users, num_users):
    """Returns 0 if all rows strictly increase within range, 1 if one does not increase, 2 if a user is out of range."""
    verdict = 0
    for row in range(indptr.shape[0] - 1):
        previous = np.int64(-1)
        for i in range(indptr[row], indptr[row + 1]):
            user = np.int64(users[i])
            if user < 0 or user >= num_users:
                return 2
            if user <= previous:
                verdict = 1
            previous = user
    return verdict


@_njit
def sort_and_collapse_rows(indptr, users):
    """Sorts every row in place and drops duplicates; returns the new (rows + 1,) indptr and the kept (pairs,) users."""
    kept = 0
    new_indptr = np.zeros(indptr.shape[0], np.int64)
    for row in range(indptr.shape[0] - 1):
        begin, end = indptr[row], indptr[row + 1]
        if end - begin > 16:
            users[begin:end] = np.sort(users[begin:end])
        else:
            for i in range(begin + 1, end):
                user = users[i]
                j = i - 1
                while j >= begin and users[j] > user:
                    users[j + 1] = users[j]
                    j -= 1
                users[j + 1] = user
        last = np.int64(-1)
        for i in range(begin, end):
            user = users[i]
            if np.int64(user) != last:
                users[kept] = user
                kept += 1
                last = np.int64(user)
        new_indptr[row + 1] = kept
    return new_indptr, users[:kept]


@_njit
def group_pairs(key, value, num_keys):
    """Sorts pairs by key (a stable counting sort); returns the (num_keys + 1,) indptr and the (pairs,) values."""
    indptr, grouped = np.zeros(num_keys + 1, np.int64), np.empty_like(value)
    for i in range(key.shape[0]):
        indptr[key[i] + 1] += 1
    for k in range(num_keys):
        indptr[k + 1] += indptr[k]
    next_slot = indptr[:-1].copy()
    for i in range(key.shape[0]):
        k = key[i]
        grouped[next_slot[k]] = value[i]
        next_slot[k] += 1
    return indptr, grouped


@_njit
def transpose(indptr, users, num_users, examples):
    """Groups pairs by user: returns (num_users + 1,) indptr and fills examples (pairs,), increasing for each user."""
    user_indptr = np.zeros(num_users + 1, np.int64)
    for i in range(users.shape[0]):
        user_indptr[users[i] + 1] += 1
    for u in range(num_users):
        user_indptr[u + 1] += user_indptr[u]
    next_slot = user_indptr[:-1].copy()
    for example in range(indptr.shape[0] - 1):
        for i in range(indptr[example], indptr[example + 1]):
            u = users[i]
            examples[next_slot[u]] = example
            next_slot[u] += 1
    return user_indptr


@_njit
def take_rows(indptr, users, rows):
    """Gathers the chosen rows: returns their (rows + 1,) indptr and (pairs,) users."""
    new_indptr = np.zeros(rows.shape[0] + 1, np.int64)
    for r in range(rows.shape[0]):
        new_indptr[r + 1] = new_indptr[r] + indptr[rows[r] + 1] - indptr[rows[r]]
    taken = np.empty(new_indptr[-1], users.dtype)
    for r in range(rows.shape[0]):
        begin = indptr[rows[r]]
        at = new_indptr[r]
        for i in range(new_indptr[r + 1] - at):
            taken[at + i] = users[begin + i]
    return new_indptr, taken


@numba.njit(inline="always")
def _root_of(parent, a):
    """Returns the root of a in a union-find forest, halving the paths on the way."""
    while parent[a] != a:
        parent[a] = parent[parent[a]]
        a = parent[a]
    return a


@_njit
def connected_components(indptr, users, num_users):
    """Labels every user with the smallest user of their component, by union-find: (num_users,) int64."""
    parent = np.arange(num_users)
    for example in range(indptr.shape[0] - 1):
        begin, end = indptr[example], indptr[example + 1]
        for i in range(begin + 1, end):
            a, b = _root_of(parent, np.int64(users[begin])), _root_of(parent, np.int64(users[i]))
            parent[max(a, b)] = min(a, b)
    for u in range(num_users):
        parent[u] = _root_of(parent, u)
    return parent
