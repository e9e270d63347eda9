"""Example ids and user keys as Arrow arrays (integers or text, 7 and "7" being the same); row names for errors."""

import bisect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute

from coowned.errors import InputError

pc: Any = pyarrow.compute  # its functions are created at import, so type checkers do not see them

_LARGEST_INT64 = 2**63 - 1


class Location:
    """The name of a source, and of the file that each of its rows came from, for errors.

    Args:
      name: the source, as the person named it; empty for a table in memory.
      files: for a folder, each file and the number of its rows, in order.

    Example:
      >>> location = Location("mail", [("mail/a.csv", 10), ("mail/b.csv", 5)])
      >>> f"{location}no user at {location.row(12)}"
      'mail: no user at row 2 of mail/b.csv'
      >>> f"{Location()}no user at {Location().row(12)}"
      'no user at row 12'
    """

    def __init__(self, name: str = "", files: Sequence[tuple[str, int]] = ()):
        self.name = name
        self.files = [file for file, _ in files]
        self.first_rows = list(itertools.accumulate((rows for _, rows in files), initial=0))

    def __str__(self) -> str:
        return f"{self.name}: " if self.name else ""

    def row(self, number: int) -> str:
        """Returns the name of row `number` of the source, counted from 0 in its own file."""
        if len(self.files) < 2:
            return f"row {number}"
        file = bisect.bisect_right(self.first_rows, number) - 1
        return f"row {number - self.first_rows[file]} of {self.files[file]}"


def as_identifiers(
    values: Any, *, name: str, length: int, row_name: Callable[[int], str] = "row {}".format, unique: bool = True
) -> pa.Array | None:
    """Converts ids or keys to an int64 or large_string array; None stays None and means "the index".

    Guarantees:
      - One entry per row, no nulls, no duplicates (unless `unique` is false), else `InputError`.
        (test_identifiers_are_checked)

    Example:
      >>> as_identifiers(["m1", 7], name="example_ids", length=2).to_pylist()
      ['m1', '7']
    """
    if values is None:
        return None
    array = text_or_integers(values, name=name)
    if len(array) != length:
        raise InputError(f"{name} must have {length} entries, one for each row, not {len(array)}")
    if array.null_count:
        row = first_true(array.is_null())
        raise InputError(f"{name} has no value at {row_name(row)}; fill in every row, or omit the argument")
    entries = pl.Series(array)
    if unique and may_repeat(array) and entries.n_unique() != length:
        row = int(np.flatnonzero(entries.is_duplicated().to_numpy())[0])
        again = int(np.flatnonzero((entries == entries[row]).to_numpy())[1])
        raise InputError(
            f"{name} must be unique, but {row_name(row)} and {row_name(again)} are both {array[row].as_py()!r}"
        )
    return array


def may_repeat(array: pa.Array | pa.ChunkedArray) -> bool:
    """Returns whether two hashes are equal: in far less memory than a set of the entries, which then decides."""
    hashes = np.sort(pl.Series(array).hash().to_numpy())
    return bool((hashes[1:] == hashes[:-1]).any())


def type_of_ids(values: Any) -> pa.DataType | None:
    """Returns the Arrow type of ids that came as text or integers in Arrow; None for lists and the index."""
    kind = None
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        kind = values.type
    elif isinstance(values, pl.Series):
        kind = values.head(0).to_arrow().type
    elif isinstance(values, np.ndarray) and values.dtype.kind in "iu":
        kind = pa.from_numpy_dtype(values.dtype)
    if kind is None or not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        return None
    return kind


def text_or_integers(values: Any, *, name: str) -> pa.Array:
    """Converts any array-like of integers or text to one int64 or large_string Arrow array."""
    array = _to_arrow(values, name=name)
    kind = array.type
    if pa.types.is_integer(kind):
        if pa.types.is_uint64(kind) and (pc.max(array).as_py() or 0) > _LARGEST_INT64:
            return array.cast(pa.large_string())
        return array.cast(pa.int64())
    if is_text(kind) or pa.types.is_null(kind):
        array = array.cast(pa.large_string())
        check_valid(array, name)
        return array
    raise InputError(f"{name} must be integers or text, not {kind}; cast the column to text")


def is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def utf8_buffers(array: pa.Array | None, *, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns str(entry) of all entries as concatenated UTF-8: (length + 1,) int64 offsets and the (bytes,) uint8."""
    values: Any = pa.array(np.arange(length, dtype=np.int64)) if array is None else array
    text = values if pa.types.is_large_string(values.type) else pc.cast(values, pa.large_string())
    if len(text) == 0:  # such an array may have no buffers at all
        return np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.uint8)
    _, offsets_buffer, data_buffer = text.buffers()
    offsets = np.frombuffer(offsets_buffer, dtype=np.int64)[text.offset : text.offset + len(text) + 1]
    data = np.zeros(0, dtype=np.uint8) if data_buffer is None else np.frombuffer(data_buffer, dtype=np.uint8)
    return offsets, data


def first_true(mask: Any) -> int:
    """Returns the index of the first true entry of an Arrow or numpy mask that has one."""
    return int(np.flatnonzero(np.asarray(mask))[0])


def check_valid(array: pa.Array | pa.ChunkedArray, name: str) -> None:
    """Raises InputError for an Arrow array that breaks Arrow's own rules, above all text that is not UTF-8.

    Files and foreign memory can contain such arrays, and later code does not check again.
    """
    before = 0
    for chunk in array.chunks if isinstance(array, pa.ChunkedArray) else [array]:
        try:
            chunk.validate(full=True)
        except pa.ArrowInvalid as error:
            problem = "is not UTF-8" if "UTF8" in str(error) else f"is not valid Arrow data ({one_line(error)})"
            row = before + _first_invalid(chunk)
            raise InputError(f"{name} {problem} at row {row}; correct it or write the data again") from None
        before += len(chunk)


def one_line(error: object) -> str:
    return " ".join(str(error).split())


def _first_invalid(array: pa.Array) -> int:
    """Returns the first row of an array that makes it invalid."""
    return bisect.bisect_left(range(len(array)), True, key=lambda row: not is_valid(array.slice(0, row + 1)))


def is_valid(part: pa.Array | pa.ChunkedArray) -> bool:
    """Returns whether an array is valid for Arrow; its text is then UTF-8."""
    try:
        if pa.types.is_list(part.type) or pa.types.is_large_list(part.type):
            part.validate()
            part = part.flatten()  # full validation of a slice of lists would look at the whole of their entries
        part.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _to_arrow(values: Any, *, name: str) -> pa.Array:
    if isinstance(values, pl.Series):
        values = values.to_arrow()
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return one_array(values)
    if isinstance(values, np.ndarray) and values.dtype.kind in "iuS":
        if values.dtype.kind == "S":
            raise InputError(f"{name} holds bytes; decode them to text first")
        if values.ndim != 1:
            raise InputError(f"{name} must be one-dimensional, not of shape {values.shape}")
        return pa.array(values.astype(values.dtype.newbyteorder("="), copy=False))
    if isinstance(values, (str, bytes)):
        raise InputError(f"{name} must be a list of ids, not one {type(values).__name__}")
    return _listed_to_arrow(values.tolist() if isinstance(values, np.ndarray) else list(values), name=name)


def _listed_to_arrow(listed: list[Any], *, name: str) -> pa.Array:
    for value in listed:
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, str, np.integer))):
            raise InputError(f"{name} must be integers or text, not {type(value).__name__} ({value!r}); cast to text")
    if not any(isinstance(value, str) for value in listed):
        try:
            return pa.array([None if value is None else int(value) for value in listed])
        except (pa.ArrowInvalid, OverflowError):  # beyond 64 bits: as text
            pass
    text = [None if value is None else str(value) for value in listed]
    try:
        return pa.array(text, pa.large_string())
    except UnicodeEncodeError as error:
        raise InputError(f"{name} has text that is not Unicode ({error.object!r}: {error.reason}); fix it") from None


def one_array(values: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Returns the same values as one chunk, without dictionary encoding."""
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if isinstance(values, pa.Array):
        return values
    if is_text(values.type):  # 64-bit offsets first: the chunks together may hold more than 2 GB
        values = values.cast(pa.large_string())
    return values.chunk(0) if values.num_chunks == 1 else values.combine_chunks()
