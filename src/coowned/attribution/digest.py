"""Digests of sets of rows that can be computed in parts, in any order, and merged.

A set's digest is the sum, modulo 2^64 in four lanes, of the SHA-256 of each of its rows, hashed once more together
with the number of rows. Adding is associative and commutative, so partitions, row order and machines do not matter,
and any engine with SHA-256 and sums (SQL's `sha2` and `sum`) computes the same.

The rows are text, so that they are the same everywhere; lengths are in bytes, spaces are not part of them:

    example   "example:" length ":" id, then length ":" key of each of its users, in byte order of the keys
    copies    "copies:" copies ":" id
    group     "group:" group ":" id
    slot      "slot:" batch ":" position ":" id

No two graphs have the same rows, and two different sets have equal sums by accident with probability 2^-256.
What it is not: a signature, or a defence against whoever writes both graphs. Whoever can write a certificate can write
its digests, and sums, unlike SHA-256 itself, let someone free to choose millions of ids search for two sets with equal
sums (the generalized birthday problem). The digests bind files to each other.
"""

import dataclasses
import hashlib
from collections.abc import Callable

import numpy as np

from coowned.attribution import digest_kernels as kernels
from coowned.attribution.digest_kernels import Texts
from coowned.threads import over_ranges

VERSION = 2  # 1 hashed every pair in a row of its own
_ROWS_PER_TASK = 1 << 16


@dataclasses.dataclass(frozen=True)
class RowSums:
    """A sum of row hashes, and the number of rows.

    Guarantees:
      - Merging the sums of any partition of a set gives the sums of the set.   (test_digest_can_be_merged)

    Example:
      >>> a, b = RowSums(1, (1, 0, 0, 0)), RowSums(2, (2**64 - 1, 5, 0, 0))
      >>> a.merge(b)
      RowSums(count=3, lanes=(0, 5, 0, 0))
    """

    count: int = 0
    lanes: tuple[int, ...] = (0, 0, 0, 0)

    def merge(self, other: "RowSums") -> "RowSums":
        lanes = tuple((mine + theirs) % 2**64 for mine, theirs in zip(self.lanes, other.lanes, strict=True))
        return RowSums(self.count + other.count, lanes)


def finish(kind: str, *parts: RowSums) -> str:
    """Returns the digest (64 hexadecimal digits) of an object of this kind made of these sets of rows."""
    lines = [f"coowned {kind} {VERSION}"]
    lines += [f"{part.count} {' '.join(str(lane) for lane in part.lanes)}" for part in parts]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def sum_rows(word: str, numbers: np.ndarray, rows: np.ndarray, ids: Texts) -> RowSums:
    """Sums the hashes of rows "word: n1: n2: … id"; numbers (entries, columns) int64, rows (entries,) indexes ids."""
    prefix = np.frombuffer(f"{word}:".encode(), dtype=np.uint8)
    return _sum_in_parallel(lambda begin, end: kernels.hash_rows(prefix, numbers, ids, rows, begin, end), len(rows))


def sum_examples(indptr: np.ndarray, users: np.ndarray, ids: Texts, keys: Texts) -> RowSums:
    """Sums the hashes of rows "example: length: id length: key …", one per example of a graph in compressed rows."""
    prefix = np.frombuffer(b"example:", dtype=np.uint8)
    return _sum_in_parallel(
        lambda begin, end: kernels.hash_examples(prefix, indptr, users, ids, keys, begin, end), len(indptr) - 1
    )


def _sum_in_parallel(hash_range: Callable[[int, int], np.ndarray], count: int) -> RowSums:
    lanes = over_ranges(hash_range, count, parts=-(-count // _ROWS_PER_TASK) or 1)  # of (4,) uint64
    return RowSums(count, tuple(np.stack(lanes).sum(axis=0, dtype=np.uint64).tolist()))
