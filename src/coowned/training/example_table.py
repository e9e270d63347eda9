"""Examples of any shape as training data: named arrays of numbers, and a random key for every copy of every step."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from coowned import validate
from coowned.attribution.examples import AttributedExamples
from coowned.errors import InputError
from coowned.mechanism.compiled import compiled
from coowned.mechanism.keys import Purpose, RunKey, StreamKey, fill_words
from coowned.training.columns import column_type, is_list, is_number, numbers
from coowned.training.data import Draw, RowTable

pc: Any = pyarrow.compute  # its functions are made when it is imported: no checker sees them
KEY, USABLE = "coowned.key", "coowned.usable"  # arrays of a batch beside the example's own
_PUBLIC_SEED = 1_410_500_127  # what is held out is scored under keys anybody can repeat
_LARGEST = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExampleColumn:
    """How one column of the data becomes one entry of an example.

    Attributes:
      name: of the entry.
      column: of the data.
      shape: of the entry; () for a single number.
      whole: int32 instead of float32.
      classes: values that become their index; empty for numbers as they are.
    """

    name: str
    column: str
    shape: tuple[int, ...] = ()
    whole: bool = False
    classes: tuple[Any, ...] = ()

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.int32 if self.whole else np.float32)

    def read(self, payload: pa.Table) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
        """((rows, *shape) values, (rows,) whether the row holds what it should)."""
        column = payload.column(self.column)
        pieces = [_read(self._indices(chunk), self.shape, self.dtype) for chunk in column.chunks]
        if not pieces:
            return np.zeros((0, *self.shape), self.dtype), np.zeros(0, bool)
        return np.concatenate([piece[0] for piece in pieces]), np.concatenate([piece[1] for piece in pieces])

    def _indices(self, values: pa.Array) -> pa.Array:
        """Classes as their indices, null where it is none of them."""
        if not self.classes:
            return values
        if pa.types.is_dictionary(values.type):
            values = values.cast(values.type.value_type)
        if pa.types.is_boolean(values.type):
            values = values.cast(pa.uint8())
        return pc.index_in(values, value_set=pa.array(self.classes).cast(values.type))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ExampleTable(RowTable):
    """Arrays in memory, one row an example, for a model that takes examples as dictionaries.

    A batch also has a key for every copy, which training draws anew in every step and evaluation takes from the row
    alone, and whether the row can be used. One that cannot (a null, a list of another length, a number that is not
    finite or beyond its type, a label that is no class) holds zeros and adds nothing; it is drawn like any other.

    Guarantees:
      - `fill` gives row `rows[i]` for example i, of any part of the table.   (test_fill_gives_the_rows)
      - Only the schema refuses: a row that cannot be used changes no other.   (test_only_the_schema_refuses)
      - Keys are new in every step and every copy, and the same whenever they are asked for.
        (test_keys_are_new_for_every_step_and_copy)
      - Two tables with other content, rows or attribution have other digests.   (test_digest_follows_content)

    Attributes:
      graph: whose examples these are.
      arrays: (n, ...) float32 or int32 by name.
      usable: (n,) which rows can be used; None: all whose numbers are finite.
      rows: (graph.num_examples,) the row of each example, -1 where it was not read; None where example i is row i.

    Example:
      >>> from coowned import AttributionGraph
      >>> graph = AttributionGraph.from_users_per_example([[0], [1]])
      >>> table = ExampleTable(graph=graph, arrays={"x": [[1.0, 2.0], [3.0, float("nan")]], "y": [0, 1]})
      >>> table.num_unusable, table.shapes()["x"], table.dtypes()["y"]
      (1, (2,), dtype('int32'))
    """

    arrays: Mapping[str, npt.ArrayLike] = dataclasses.field(repr=False)
    usable: npt.NDArray[np.bool_] | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        arrays = {name: _array(name, values) for name, values in self.arrays.items()}
        if not arrays:
            raise InputError("an example needs at least one array")
        count = len(next(iter(arrays.values())))
        validate.same_length(count, **{str(name): array for name, array in arrays.items()})
        usable = np.ones(count, bool) if self.usable is None else np.array(self.usable, bool)
        validate.same_length(count, usable=usable)
        for array in arrays.values():
            if array.dtype == np.float32:
                usable &= np.isfinite(array).reshape(count, -1).all(axis=1)
        if any(array[~usable].any() for array in arrays.values()):
            arrays = {name: np.where(usable.reshape(-1, *(1,) * (a.ndim - 1)), a, 0) for name, a in arrays.items()}
        object.__setattr__(self, "arrays", arrays)
        object.__setattr__(self, "usable", usable)
        self._check_rows(arrays=usable)

    @classmethod
    def from_examples(cls, examples: AttributedExamples, columns: Sequence[ExampleColumn]) -> "ExampleTable":
        """From columns of the payload; columns of `columns_of` fit it."""
        read = {column.name: column.read(examples.payload) for column in columns}
        usable = np.all([good for _, good in read.values()], axis=0)
        return cls(graph=examples.graph, arrays={name: values for name, (values, _) in read.items()}, usable=usable)

    @property
    def num_unusable(self) -> int:
        """Rows that cannot be used: for a private log alone."""
        return int(np.count_nonzero(~np.asarray(self.usable)))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {**{name: np.shape(array)[1:] for name, array in self.arrays.items()}, KEY: (2,), USABLE: ()}

    def dtypes(self) -> dict[str, np.dtype[Any]]:
        dtypes = {name: np.asarray(array).dtype for name, array in self.arrays.items()}
        return {**dtypes, KEY: np.dtype(np.uint32), USABLE: np.dtype(np.bool_)}

    def fill(self, examples: npt.NDArray[np.int64], out: dict[str, npt.NDArray[Any]], draw: Draw | None = None) -> None:
        rows = self._rows_of(np.ascontiguousarray(examples, np.int64))
        for name, array in (*self.arrays.items(), (USABLE, self.usable)):
            np.take(np.asarray(array), rows, axis=0, out=out[name][: rows.size], mode="clip")
        if draw is None:
            key, copies = _evaluation_key(), np.zeros(rows.size, np.int32)
        else:
            key, copies = draw.run_key.derive(Purpose.DROPOUT, step=draw.step), draw.copy_numbers
        copy_keys(key, rows, np.ascontiguousarray(copies, np.int32), out[KEY])

    @property
    def digest(self) -> str:
        named = sorted({**self.arrays, USABLE: self.usable}.items())
        arrays = [np.asarray(array) for _, array in named]
        about = [[name, str(array.dtype), array.shape] for (name, _), array in zip(named, arrays, strict=True)]
        return self._digest(*about, arrays=arrays)


def columns_of(
    schema: pa.Schema, columns: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[tuple[int, ...] | None, bool]]:
    """By entry: its shape (None where lists may have any length) and whether it holds integers.

    Refuses, with InputError, columns that are missing or hold no numbers, and shapes that are not the schema's.
    """
    found = {}
    for name, column in columns.items():
        declared, kind = _shape_of(column_type(schema, column))
        if not is_number(kind):
            raise InputError(
                f"column {column!r} must contain numbers or lists of numbers, not {schema.field(column).type}; "
                "remove it, or convert it to numbers one example at a time"
            )
        wanted = shapes.get(name)
        if wanted is not None and declared is not None and np.prod(wanted) != np.prod(declared):
            raise InputError(f"column {column!r} has entries of shape {declared}, not {tuple(wanted)}")
        whole = pa.types.is_integer(kind) or pa.types.is_boolean(kind)
        found[name] = (declared if wanted is None else tuple(int(size) for size in wanted), whole)
    return found


def numeric_columns(schema: pa.Schema) -> list[str]:
    """The columns that hold numbers or lists of them."""
    return [field.name for field in schema if is_number(_shape_of(field.type)[1])]


def _evaluation_key() -> StreamKey:
    """Of keys outside training: public, and no step's, so that all models are compared under the same."""
    return RunKey.from_seed(_PUBLIC_SEED).derive(Purpose.DROPOUT, configuration="evaluation")


@compiled()
def copy_keys(key, rows, copies, out):
    """out (n, 2) uint32: the first word of the stream of each row's copy, in halves."""
    word = np.empty(1, np.uint64)
    for i in range(rows.size):
        fill_words(key, np.uint64(rows[i]), np.int64(copies[i]), word)
        out[i, 0] = np.uint32(word[0] & np.uint64(0xFFFFFFFF))
        out[i, 1] = np.uint32(word[0] >> np.uint64(32))


def _array(name: str, values: npt.ArrayLike) -> npt.NDArray[Any]:
    array = np.asarray(values)
    if name in (KEY, USABLE):
        raise InputError(f"{name!r} is a reserved array name; choose another")
    if array.ndim < 1 or array.dtype.kind not in "fiub":
        raise InputError(
            f"array {name!r} must contain numbers, one row per example, not {array.dtype} of {array.shape}"
        )
    if array.dtype.kind != "f" and array.size and not -_LARGEST <= int(array.min()) <= int(array.max()) <= _LARGEST:
        raise InputError(f"array {name!r} has integers beyond 32 bits; use smaller ones or floats")
    with np.errstate(over="ignore"):  # beyond float32: infinite, and then without influence
        return np.ascontiguousarray(array, np.float32 if array.dtype.kind == "f" else np.int32)


def _shape_of(kind: pa.DataType) -> tuple[tuple[int, ...] | None, pa.DataType]:
    """(shape, type of the numbers); the shape is None where the schema does not say it."""
    shape: tuple[int, ...] | None = ()
    if isinstance(kind, pa.FixedShapeTensorType):
        return tuple(kind.shape), kind.value_type
    while is_list(kind):
        fixed = pa.types.is_fixed_size_list(kind)
        shape = (*shape, kind.list_size) if fixed and shape is not None else None
        kind = kind.value_type
    return shape, kind


def _read(
    values: pa.Array, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """((rows, *shape), (rows,) whether each has that shape and numbers of that type); zeros where it has not."""
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    out, good = np.zeros((len(values), *shape), dtype), np.zeros(len(values), bool)
    if not is_list(values.type):
        if shape:
            return out, good
        return _numbers(values, dtype)
    # A list may hold all numbers of an entry, or lists of its further axes.
    length, rest = (shape[0], shape[1:]) if is_list(values.type.value_type) else (int(np.prod(shape)), ())
    whole = np.asarray(pc.fill_null(pc.list_value_length(values), -1)) == length
    inner, fine = _read(pc.list_flatten(values.filter(pa.array(whole))), rest, dtype)
    out[whole] = inner.reshape(-1, *shape)
    good[whole] = fine.reshape(-1, length).all(axis=1) if length else True
    return out, good


def _numbers(values: pa.Array, dtype: np.dtype[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    if dtype == np.float32:
        found = numbers(pa.chunked_array([values]))
        good = np.isfinite(found)
        return np.where(good, found, np.float32(0)), good
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.uint8())
    low, high = (pa.scalar(end).cast(values.type, safe=False) for end in _range_of(values.type))
    inside = pc.and_(pc.less_equal(low, values), pc.less_equal(values, high))
    good = np.asarray(pc.fill_null(inside, False)).astype(bool)
    kept = pc.if_else(pa.array(good), values, pa.scalar(0).cast(values.type))
    return np.asarray(kept.cast(pa.int32())), good


def _range_of(kind: pa.DataType) -> tuple[int, int]:
    """The integers of this type that int32 has too."""
    bits, signed = kind.bit_width, pa.types.is_signed_integer(kind)
    high = min(_LARGEST, 2 ** (bits - signed) - 1)
    return (-high if signed else 0), high
