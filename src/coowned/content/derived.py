"""Arrays that a model derives from content, made in pieces and mapped from files instead of loaded."""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from coowned import codec
from coowned.errors import CoownedError, InputError
from coowned.files import cache_folder, remove, sync_folder

OFFSETS = "offsets"  # of the arrays whose rows have lengths of their own: row r is [offsets[r]:offsets[r + 1]]
RAGGED = ("indices", "values", "ids")  # these arrays
_INDEX = "index.json"
_BUDGET = 1 << 29  # bytes of mapped files that may stay in memory
_ROW_BYTES = 1 << 16  # that a row may bring along in each file: 16 pages
_AT_ONCE = _BUDGET // _ROW_BYTES // 2  # rows that are put in their places at once
_BLOCK = 1 << 22  # bytes

Arrays = dict[str, npt.NDArray[Any]]


class _StoredArray(msgspec.Struct, frozen=True, kw_only=True):
    dtype: str
    shape: tuple[int, ...]
    digest: str


class _Index(msgspec.Struct, frozen=True, kw_only=True):
    format: Literal["coowned-derived-1"] = "coowned-derived-1"
    key: str
    arrays: dict[str, _StoredArray]
    counts: dict[str, int]


@dataclasses.dataclass(eq=False)
class MappedFiles:
    """Arrays in files, of which only recently read rows are in memory.

    Guarantees:
      - Files beyond half a gigabyte do not fill the memory, however many rows are read.
        (test_memory_of_mapped_rows)
      - A file that is missing, cut off or changed is not used.   (test_damaged_arrays_are_made_anew)

    Attributes:
      digest: of the arrays' bytes.
      arrays: by name; they stay valid whatever is let go.
      counts: what the content holds, for a private log.
    """

    digest: str
    arrays: Arrays = dataclasses.field(repr=False)
    counts: dict[str, int] = dataclasses.field(repr=False)
    _maps: list[mmap.mmap] = dataclasses.field(repr=False)
    _rows: int = 0

    def __post_init__(self) -> None:
        self._is_large = sum(map(len, self._maps)) > _BUDGET

    @classmethod
    def open(cls, folder: Path, key: str) -> "MappedFiles | None":
        """Maps the arrays of a folder; returns None if they are missing or incomplete.

        Cost: reads each file once, to check it.
        """
        try:
            index = codec.decode_json(_Index, (folder / _INDEX).read_bytes(), name=str(folder / _INDEX))
            if index.key != key:
                return None
            maps, arrays = [], {}
            for name, stored in index.arrays.items():
                path = folder / _file(name, "bin")
                if _digest_file(path) != stored.digest:
                    return None
                arrays[name], mapped = _mapped(path, stored)
                maps += [mapped] if mapped is not None else []
        except (OSError, ValueError, CoownedError):
            return None
        return cls(codec.checksum(index.arrays), arrays, index.counts, maps)

    def touch(self, rows: int) -> None:
        """Announces that this many rows are about to be read."""
        self._rows += rows if self._is_large else 0
        if self._rows * _ROW_BYTES * len(self._maps) > _BUDGET:
            self._rows = 0
            _let_go(*self._maps)


@dataclasses.dataclass(frozen=True)
class KeptArrays:
    """A disk cache of arrays derived from content, readable by its owner only: as secret as the content.

    Guarantees:
      - What was derived before is used again; of several processes one derives.   (test_derived_once)
      - Other shards, another model and other code have another key.   (test_another_model_has_arrays_of_its_own)
    What it is not: covered by any guarantee. Delete the folder `derived` of the cache when the content is deleted.
    """

    root: Path
    key: str

    @classmethod
    @contextlib.contextmanager
    def for_now(cls) -> "Iterator[KeptArrays]":
        """Yields a temporary cache that is removed at once; mapped arrays stay readable until the process ends."""
        cache = cache_folder()
        if cache is not None:
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".derived-", dir=cache) as folder:
            yield cls(Path(folder), "derived")

    def get(self, make: Callable[[Path], object]) -> MappedFiles:
        """Returns the cached arrays, or those that `make` writes to an empty folder."""
        folder = self.root / self.key
        if (found := MappedFiles.open(folder, self.key)) is not None:
            return found
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.root / f"{self.key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the process ends
            if (found := MappedFiles.open(folder, self.key)) is not None:
                return found
            with tempfile.TemporaryDirectory(prefix=f".{self.key}.", dir=self.root) as half:
                made = Path(half) / "made"
                made.mkdir(mode=0o700)
                make(made)
                remove(folder)
                os.replace(made, folder)
        found = MappedFiles.open(folder, self.key)
        if found is None:
            raise OSError(errno.EIO, "what was just written there cannot be read back", str(folder))
        return found


def derive(
    pieces: Iterable[tuple[npt.NDArray[np.int64], Arrays, Mapping[str, int]]], count: int, folder: Path, key: str
) -> None:
    """Writes the arrays of `count` rows, from pieces of them in any order, and the sums of their counts.

    Guarantees:
      - The arrays are those of one piece that holds everything.   (test_pieces_make_the_whole)
    Cost: memory of a piece; disk for the arrays twice.

    Args:
      pieces: (the rows, their arrays, counts); every row once, and at least one.
      folder: an empty one, which `MappedFiles.open` reads.
    """
    parts: dict[str, _Rows] = {}
    counts: dict[str, int] = {}
    rows = []
    for where, arrays, found in pieces:
        rows.append(where)
        for name, array in arrays.items():
            own = np.diff(array) if name == OFFSETS else array
            parts.setdefault(name, _Rows(folder / _file(name, "part"), own.dtype, own.shape[1:])).append(own)
        for name, number in found.items():
            counts[name] = counts.get(name, 0) + int(number)
    found_rows = np.concatenate(rows) if rows else np.zeros(0, np.int64)
    if not np.array_equal(np.sort(found_rows), np.arange(count)):
        raise InputError("the data changed while they were read: rows are missing or there twice; start again")
    order = np.argsort(found_rows)  # the row among the pieces of each row
    stored = _put_in_order(parts, order, folder)
    for part in parts.values():
        part.path.unlink()
    (folder / _INDEX).write_text(codec.encode_json(_Index(key=key, arrays=stored, counts=counts)), encoding="utf-8")
    sync_folder(folder)


@dataclasses.dataclass(eq=False)
class _Rows:
    """A growing array in a file."""

    path: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]  # of a row
    rows: int = 0

    def append(self, array: npt.NDArray[Any]) -> None:
        if (array.dtype, array.shape[1:]) != (self.dtype, self.shape):
            raise InputError(f"two pieces of content gave arrays of {array.dtype} {array.shape[1:]} and {self}")
        self.rows += len(array)
        with self.path.open("ab") as file:
            file.write(np.ascontiguousarray(array).data)

    def mapped(self) -> tuple[npt.NDArray[Any], mmap.mmap | None]:
        return _mapped(self.path, _StoredArray(dtype=self.dtype.str, shape=(self.rows, *self.shape), digest=""))


def _put_in_order(parts: Mapping[str, _Rows], order: npt.NDArray[np.int64], folder: Path) -> dict[str, _StoredArray]:
    """Writes every array with row order[i] as its row i."""
    stored: dict[str, _StoredArray] = {}
    lengths = begins = ends = None
    if OFFSETS in parts:
        lengths = parts[OFFSETS].mapped()[0]
        begins = np.cumsum(lengths) - lengths
        ends = np.concatenate([[0], np.cumsum(lengths[order])])
        stored[OFFSETS] = _write(folder, OFFSETS, [ends])
    for name, part in parts.items():
        if name == OFFSETS:
            continue
        array, mapped = part.mapped()

        def blocks(name: str = name, array: Any = array, mapped: Any = mapped) -> Iterator[npt.NDArray[Any]]:
            for low in range(0, len(order), _AT_ONCE):
                some = order[low : low + _AT_ONCE]
                if name in RAGGED and begins is not None and ends is not None:
                    sizes = np.diff(ends[low : low + len(some) + 1])
                    within = np.arange(sizes.sum()) - np.repeat(ends[low : low + len(some)] - ends[low], sizes)
                    some = np.repeat(begins[some], sizes) + within
                yield array[some]
                _let_go(mapped)

        stored[name] = _write(folder, name, blocks())
    return stored


def _write(folder: Path, name: str, blocks: Iterable[npt.NDArray[Any]]) -> _StoredArray:
    hashed, rows, kind, shape = hashlib.blake2b(digest_size=32), 0, "", ()
    with (folder / _file(name, "bin")).open("wb") as file:
        for block in blocks:
            content = np.ascontiguousarray(block)
            hashed.update(content.data)
            file.write(content.data)
            rows, kind, shape = rows + len(content), content.dtype.str, content.shape[1:]
        file.flush()
        os.fsync(file.fileno())
        _advise(file.fileno(), "POSIX_FADV_DONTNEED")  # what is written lies in large pages; see `_digest_file`
    return _StoredArray(dtype=kind, shape=(rows, *shape), digest=hashed.hexdigest())


def digest_stored(arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    """Computes the digest that `MappedFiles` of these arrays has."""
    stored = {
        name: _StoredArray(dtype=array.dtype.str, shape=array.shape, digest=_digest(array))
        for name, array in arrays.items()
    }
    return codec.checksum(stored)


def _file(name: str, suffix: str) -> str:
    """Returns the file name of an array, whose own name was chosen by a user."""
    return f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.{suffix}"


def _mapped(path: Path, stored: _StoredArray) -> tuple[npt.NDArray[Any], mmap.mmap | None]:
    dtype, shape = np.dtype(stored.dtype), stored.shape
    if path.stat().st_size != int(np.prod(shape, dtype=np.int64)) * dtype.itemsize:
        raise InputError(f"{path}: not whole")
    if 0 in shape:
        return np.zeros(shape, dtype), None
    handle = os.open(path, os.O_RDONLY)
    try:
        mapped = mmap.mmap(handle, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(handle)
    return np.frombuffer(mapped, dtype).reshape(shape), mapped


def _digest(array: npt.NDArray[Any]) -> str:
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return hashlib.blake2b(content.data, digest_size=32).hexdigest()


def _digest_file(path: Path) -> str:
    """Computes the digest of an array's file.

    Read this way, it lies in small pages of the system's cache. In large ones, a row would map two megabytes.
    """
    hashed = hashlib.blake2b(digest_size=32)
    with path.open("rb", buffering=0) as file:
        _advise(file.fileno(), "POSIX_FADV_RANDOM")
        while block := file.read(_BLOCK):
            hashed.update(block)
    return hashed.hexdigest()


def _advise(handle: int, advice: str) -> None:
    if hasattr(os, "posix_fadvise"):  # not on macOS
        os.posix_fadvise(handle, 0, 0, getattr(os, advice))


def _let_go(*maps: mmap.mmap | None) -> None:
    for mapped in maps:
        if mapped is not None:
            mapped.madvise(mmap.MADV_DONTNEED)
