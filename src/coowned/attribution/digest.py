"""Digests of sets of rows that can be computed in parts, in any order, and merged.

A set's digest is the sum, modulo 2^64 in four lanes, of the SHA-256 of each of its rows, hashed once more together
with the number of rows. Adding is associative and commutative, so partitions, row order and machines do not matter,
and any engine with SHA-256 and sums (SQL's `sha2` and `sum`) computes the same.

The rows are text, so that they are the same everywhere:

    example   "example:" id
    pair      "pair:" length of the id in bytes ":" id key
    copies    "copies:" copies ":" id
    group     "group:" group ":" id
    slot      "slot:" batch ":" position ":" id

What it is not: a signature. Whoever can write a certificate can write its digests; they bind files to each other.
"""

import concurrent.futures
import dataclasses
import hashlib
import os
from collections.abc import Callable

import numpy as np

from coowned.attribution import kernels

_LANE = 2**64
_ROWS_PER_TASK = 1 << 16


@dataclasses.dataclass(frozen=True)
class RowSums:
    """The sum of the hashes of some rows, and how many they are.

    Guarantees:
      - Merging the sums of any partition of a set gives the sums of the set.   (test_digest_can_be_merged)

    Example:
      >>> a, b = RowSums(1, (1, 0, 0, 0)), RowSums(2, (2**64 - 1, 5, 0, 0))
      >>> a.merge(b)
      RowSums(count=3, lanes=(0, 5, 0, 0))
    """

    count: int = 0
    lanes: tuple[int, int, int, int] = (0, 0, 0, 0)

    def merge(self, other: "RowSums") -> "RowSums":
        lanes = tuple((mine + theirs) % _LANE for mine, theirs in zip(self.lanes, other.lanes, strict=True))
        return RowSums(self.count + other.count, lanes)  # pyright: ignore[reportArgumentType]


def finish(kind: str, *parts: RowSums) -> str:
    """The digest, 64 hexadecimal digits, of a thing made of these sets of rows."""
    lines = [f"coowned {kind} 1"]
    lines += [f"{part.count} {' '.join(str(lane) for lane in part.lanes)}" for part in parts]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def sum_rows(word: str, numbers: np.ndarray, rows: np.ndarray, id_offsets: np.ndarray, id_data: np.ndarray) -> RowSums:
    """Sums the rows "word: n1: n2: … id"; numbers (entries, columns) int64, rows (entries,) says which id."""
    prefix = _prefix(word)
    longest = _longest(id_offsets)

    def part(begin: int, end: int) -> np.ndarray:
        return kernels.hash_rows(prefix, numbers, id_offsets, id_data, rows, begin, end, longest)

    return RowSums(len(rows), _sum_in_parallel(part, len(rows)))


def sum_pairs(
    indptr: np.ndarray,
    users: np.ndarray,
    id_offsets: np.ndarray,
    id_data: np.ndarray,
    key_offsets: np.ndarray,
    key_data: np.ndarray,
) -> RowSums:
    """Sums the rows "pair: length: id key" of every pair of a graph in compressed rows."""
    prefix = _prefix("pair")
    longest = _longest(id_offsets) + _longest(key_offsets)

    def part(begin: int, end: int) -> np.ndarray:
        return kernels.hash_pairs(
            prefix, indptr, users, id_offsets, id_data, key_offsets, key_data, begin, end, longest
        )

    return RowSums(len(users), _sum_in_parallel(part, len(indptr) - 1))


def _prefix(word: str) -> np.ndarray:
    return np.frombuffer(f"{word}:".encode(), dtype=np.uint8)


def _longest(offsets: np.ndarray) -> int:
    return int(np.diff(offsets).max(initial=0))


def _sum_in_parallel(part: Callable[[int, int], np.ndarray], count: int) -> tuple[int, int, int, int]:
    # The kernels release the interpreter lock, so plain threads use every core.
    begins = range(0, count, _ROWS_PER_TASK)
    total = np.zeros(4, dtype=np.uint64)
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for lanes in pool.map(lambda begin: part(begin, min(begin + _ROWS_PER_TASK, count)), begins):
            total += lanes
    return tuple(int(lane) for lane in total)  # pyright: ignore[reportReturnType]
