"""Examples of any shape as training data: named arrays of numbers, and a random key for every copy of every step."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from coowned import validate
from coowned.attribution.examples import AttributedExamples
from coowned.attribution.graph import AttributionGraph
from coowned.attribution.tables import types_are_inferred
from coowned.content.columns import class_indices, column_type, inferred_numbers, is_list, is_number, numbers
from coowned.content.data import Draw, RowTable, random_streams
from coowned.content.derived import Arrays, MappedFiles
from coowned.errors import InputError
from coowned.exact.compiled import compiled
from coowned.exact.keys import Purpose, fill_words

KEY, USABLE = "coowned.key", "coowned.usable"  # arrays of a batch beside the example's own
_ENTRY = "entry "  # before an array's own name, where it is stored
_PUBLIC_SEED = 1_410_500_127  # held-out examples are scored under reproducible keys
LARGEST = 2**31 - 1  # and its negative: what an integer of an example can be


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExampleColumn:
    """The mapping of one column of the data to one entry of an example.

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
        """Returns ((rows, *shape) values, (rows,) whether the row is valid); zeros for invalid numbers."""
        column, precision = payload.column(self.column), np.float64 if self.whole else np.float32
        if self.classes:
            found = class_indices(column, self.classes).astype(precision)
        elif types_are_inferred(payload.schema, self.column):
            found = inferred_numbers(column, self.shape, precision)
        else:
            shape = (1,) if is_list(column.type) and not self.shape else self.shape  # a list of one is that number
            found = numbers(column, shape, precision).reshape(len(column), *self.shape)
        fits = np.abs(found) <= (LARGEST if self.whole else np.finfo(np.float32).max)  # NaN is not
        found[~fits] = 0
        return found.astype(self.dtype, copy=False), np.all(fits.reshape(len(fits), math.prod(self.shape)), axis=1)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ExampleTable(RowTable):
    """Arrays in memory, one row per example, for a model that takes examples as dictionaries.

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
      arrays: (n, ...) float32 or int32 by name.
      usable: (n,) which rows can be used; None: all whose numbers are finite.

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
        if self.mapped is not None:  # checked when the files were made
            self._check_rows(arrays=np.asarray(self.usable))
            return
        arrays = {name: number_array(name, values) for name, values in self.arrays.items()}
        if not arrays:
            raise InputError("an example needs at least one array")
        count = len(next(iter(arrays.values())))
        validate.same_length(count, **{str(name): array for name, array in arrays.items()})
        usable = np.ones(count, bool) if self.usable is None else np.array(self.usable, bool)
        validate.same_length(count, usable=usable)
        for array in arrays.values():
            if array.dtype == np.float32:
                usable &= np.isfinite(array).all(axis=tuple(range(1, array.ndim)))
        if any(array[~usable].any() for array in arrays.values()):
            arrays = {name: np.where(usable.reshape(-1, *(1,) * (a.ndim - 1)), a, 0) for name, a in arrays.items()}
        object.__setattr__(self, "arrays", arrays)
        object.__setattr__(self, "usable", usable)
        self._check_rows(arrays=usable)

    @classmethod
    def from_examples(cls, examples: AttributedExamples, columns: Sequence[ExampleColumn]) -> "ExampleTable":
        """Reads columns of the payload; columns of `columns_of` fit it."""
        read = {column.name: column.read(examples.payload) for column in columns}
        usable = np.all([good for _, good in read.values()], axis=0)
        return cls(graph=examples.graph, arrays={name: values for name, (values, _) in read.items()}, usable=usable)

    def stored(self) -> Arrays:
        entries = {_ENTRY + name: np.asarray(array) for name, array in self.arrays.items()}
        return {**entries, USABLE: np.asarray(self.usable)}

    def with_stored(self, graph: AttributionGraph, arrays: Arrays, mapped: MappedFiles | None) -> "ExampleTable":
        entries = {name: arrays[_ENTRY + name] for name in self.arrays}
        return dataclasses.replace(self, graph=graph, arrays=entries, usable=arrays[USABLE], mapped=mapped)

    @property
    def num_unusable(self) -> int:
        """The number of rows that cannot be used: for a private log only."""
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
        key, copies = random_streams(draw, Purpose.DROPOUT, count=rows.size, public_seed=_PUBLIC_SEED)
        copy_keys(key, rows, copies, out[KEY])

    @property
    def digest(self) -> str:
        return self._digest()


def columns_of(
    schema: pa.Schema,
    columns: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    integers: Sequence[str] = (),
) -> dict[str, tuple[tuple[int, ...] | None, bool]]:
    """Returns for each entry its shape (None where lists may have any length) and whether it holds integers.

    Refuses, with InputError, columns that are missing or hold no numbers, and shapes that are not the schema's. Where
    the data declare no types, an entry is one number unless `shapes` says otherwise, and a float unless `integers`
    names it: what cells hold may decide neither.
    """
    found = {}
    for name, column in columns.items():
        declared, kind = _shape_of(column_type(schema, column))
        if types_are_inferred(schema, column):
            declared, kind = tuple(shapes.get(name, ())), pa.int32() if name in integers else pa.float32()
        elif name in integers and not (pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
            raise InputError(f"column {column!r} holds {schema.field(column).type}, not integers; remove it")
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
    """Returns the columns that hold numbers or lists of them, or might do so if their types are undeclared."""
    return [
        field.name for field in schema if types_are_inferred(schema, field.name) or is_number(_shape_of(field.type)[1])
    ]


@compiled()
def copy_keys(key, rows, copies, out):
    """Fills out (n, 2) uint32 with the first word of the stream of each row's copy, in halves."""
    word = np.empty(1, np.uint64)
    for i in range(rows.size):
        fill_words(key, np.uint64(rows[i]), np.int64(copies[i]), word)
        out[i, 0] = np.uint32(word[0] & np.uint64(0xFFFFFFFF))
        out[i, 1] = np.uint32(word[0] >> np.uint64(32))


def number_array(name: str, values: npt.ArrayLike) -> npt.NDArray[Any]:
    """Converts (rows, ...) values to float32 or int32; raises InputError for values out of range."""
    array = np.asarray(values)
    if name in (KEY, USABLE):
        raise InputError(f"{name!r} is a reserved array name; choose another")
    if array.ndim < 1 or array.dtype.kind not in "fiub":
        raise InputError(
            f"array {name!r} must contain numbers, one row per example, not {array.dtype} of {array.shape}"
        )
    if array.dtype.kind != "f" and array.size and not -LARGEST <= int(array.min()) <= int(array.max()) <= LARGEST:
        raise InputError(f"array {name!r} has integers beyond 32 bits; use smaller ones or floats")
    with np.errstate(over="ignore"):  # beyond float32: infinite, and then without influence
        return np.ascontiguousarray(array, np.float32 if array.dtype.kind == "f" else np.int32)


def _shape_of(kind: pa.DataType) -> tuple[tuple[int, ...] | None, pa.DataType]:
    """Returns (shape, type of the numbers); the shape is None if the schema leaves it open."""
    shape: tuple[int, ...] | None = ()
    if isinstance(kind, pa.FixedShapeTensorType):
        return tuple(kind.shape), kind.value_type
    while is_list(kind):
        fixed = pa.types.is_fixed_size_list(kind)
        shape = (*shape, kind.list_size) if fixed and shape is not None else None
        kind = kind.value_type
    return shape, kind
