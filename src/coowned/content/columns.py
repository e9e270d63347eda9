"""Columns of a payload as arrays: numbers, lists of numbers, texts, labels.

Only a declared type can refuse a column. CSV, JSONL, SQL and Python lists declare none: one odd cell turns a column
of numbers into text. There every cell is read by itself, whatever its column's type became, and what does not parse is
NaN: a row without influence. The classes of labels are declared, never collected from the data: labels are content.

Guarantees:
  - In data without declared types no cell changes what is read of another.   (test_one_cell_changes_no_other)
"""

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from coowned import validate
from coowned.attribution.identifiers import is_text
from coowned.attribution.tables import spelled, spelling, types_are_inferred, values_to_text
from coowned.errors import InputError

pc: Any = pyarrow.compute  # its functions are made when it is imported: no checker sees them


def column_type(schema: pa.Schema, name: str) -> pa.DataType:
    """Returns the type of a column's cells, dictionary-decoded; raises InputError if there is no such column."""
    if name not in schema.names:
        there = ", ".join(schema.names)
        raise InputError(f"the data have no column {name!r}, which the model reads; they have {there}")
    kind = schema.field(name).type
    return kind.value_type if pa.types.is_dictionary(kind) and is_text(kind.value_type) else kind


def check_number_columns(schema: pa.Schema, names: str | Sequence[str], *, lists: bool = False) -> list[str]:
    """Returns the names as a list; raises InputError for columns that are missing or declared non-numeric.

    Args:
      lists: allow a single column of lists.
    """
    listed = [names] if isinstance(names, str) else list(names)
    if not listed:
        raise InputError("features must name one list column or one or more columns of numbers")
    for name in listed:
        kind = column_type(schema, name)
        if lists and len(listed) == 1 and is_list(kind):
            kind = kind.value_type
        if not (is_number(kind) or types_are_inferred(schema, name)):
            lone = "one list column or " if lists else ""
            raise InputError(f"column {name!r} must contain numbers, not {kind}; name {lone}columns of numbers")
    return listed


def number_matrix(
    payload: pa.Table, names: str | Sequence[str], num_features: int | None = None
) -> npt.NDArray[np.float32]:
    """Reads number columns, or one column of lists, as a (rows, `feature_width`) float32 matrix.

    A list of another length is a row of NaN.
    """
    width = feature_width(payload.schema, names, num_features)
    columns = [payload.column(name) for name in ([names] if isinstance(names, str) else names)]
    if len(columns) == 1 and types_are_inferred(payload.schema, *([names] if isinstance(names, str) else names)):
        return inferred_numbers(columns[0], (width,))
    if len(columns) == 1 and is_list(columns[0].type):
        return numbers(columns[0], (width,))
    return np.stack([numbers(column) for column in columns], axis=1)


def feature_width(schema: pa.Schema, names: str | Sequence[str], num_features: int | None = None) -> int:
    """Returns the number of features, from the columns' types and `num_features` alone: the model's size reveals it.

    Guarantees:
      - What cells hold decides nothing: lists whose type has no length are refused without `num_features`.
        (test_width_of_lists, test_one_cell_changes_no_shape_and_no_other_row)
    """
    listed = check_number_columns(schema, names, lists=True)
    if len(listed) > 1:
        return len(listed)
    name, kind = listed[0], column_type(schema, listed[0])
    fixed, why = 1, ""
    if types_are_inferred(schema, name):  # a list of one name is a list of columns, of a number each
        fixed = None if num_features or isinstance(names, str) else 1
        why = "CSV, JSONL, SQL and Python lists do not declare how many numbers a cell has"
    elif is_list(kind):
        fixed = kind.list_size if pa.types.is_fixed_size_list(kind) else None
        why = f"its type, {kind}, does not say how long a list is"
    if fixed is None and num_features is None:
        raise InputError(
            f"column {name!r}: {why}, and the lists may not tell, since the model's size would reveal them; declare "
            "num_features (1 for a single number), or store fixed-size lists (Parquet, Arrow)"
        )
    if num_features is not None and fixed not in (None, num_features):
        raise InputError(
            f"num_features is {num_features}, but column {name!r} has {fixed} by its type; they must agree"
        )
    return num_features or fixed or 0


def numbers(column: pa.ChunkedArray, shape: tuple[int, ...] = (), dtype: Any = np.float32) -> npt.NDArray[Any]:
    """Reads (rows, *shape) numbers, rounded; NaN for null or unparsable numbers, and in cells of another shape.

    >>> numbers(pa.chunked_array([["1.5", " 2 ", "n/a", None]]))
    array([1.5, 2. , nan, nan], dtype=float32)
    """
    out, begin = np.empty((len(column), *shape), dtype), 0
    with np.errstate(over="ignore"):  # beyond float32: infinite, and then without influence
        for chunk in column.chunks:  # one at a time: lists beyond 2^31 numbers do not fit in one
            out[begin : begin + len(chunk)] = _exact_numbers(chunk, shape)
            begin += len(chunk)
    return out


def _exact_numbers(cells: pa.Array, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Reads the numbers as float64."""
    if isinstance(cells, pa.ExtensionArray):
        cells = cells.storage
    if pa.types.is_dictionary(cells.type):
        cells = cells.cast(cells.type.value_type)
    if is_list(cells.type) and shape:
        # A list may hold all numbers of a cell, or lists of its further axes.
        length, rest = (shape[0], shape[1:]) if is_list(cells.type.value_type) else (math.prod(shape), ())
        whole = np.asarray(pc.list_value_length(cells).fill_null(-1)) == length
        if whole.all():
            return _exact_numbers(pc.list_flatten(cells), rest).reshape(len(cells), *shape)
        found = np.full((len(cells), *shape), np.nan)
        found[whole] = _exact_numbers(cells.filter(pa.array(whole)), shape)
        return found
    if pa.types.is_large_binary(cells.type):
        cells = values_to_text(cells.to_pylist())
    if (is_text(cells.type) or pa.types.is_decimal(cells.type)) and not shape:
        import polars as pl

        text = pl.Series(cells.cast(pa.large_string())).str.strip_chars()
        logical = text.str.to_lowercase().replace_strict({"true": 1.0, "false": 0.0}, default=None)
        return text.cast(pl.Float64, strict=False).fill_null(logical).fill_null(float("nan")).to_numpy()
    if is_number(cells.type) and not shape:
        cells = cells.cast(pa.uint8()) if pa.types.is_boolean(cells.type) else cells
        # A safe cast refuses integers that must be rounded.
        return np.array(cells.cast(pa.float64(), safe=False).fill_null(float("nan")), np.float64)
    return np.full((len(cells), *shape), np.nan)


def inferred_numbers(column: pa.ChunkedArray, shape: tuple[int, ...], dtype: Any = np.float32) -> npt.NDArray[Any]:
    """Reads numbers of a column without a declared type: a cell may hold a list or spell it as JSON.

    A single number stands for a list of one.

    >>> inferred_numbers(pa.chunked_array([["[1, 2.5]", "oops", "[1]"]]), (2,)).tolist()
    [[1.0, 2.5], [nan, nan], [nan, nan]]
    """
    kind, size = column.type, math.prod(shape)
    while is_list(kind):
        kind = kind.value_type
    if is_list(column.type) and not is_text(kind):
        return numbers(column, shape or (1,), dtype).reshape(len(column), *shape)
    found = np.full((len(column), size), np.nan)
    if is_list(column.type):
        cells: Iterable[tuple[int, Any]] = enumerate(column.to_pylist())
    else:
        if size == 1:
            found[:, 0] = numbers(column, dtype=np.float64)
        cells = _json_cells(column)
    rows, entries = [], []
    for row, cell in cells:
        if (flat := _flat(cell, shape or (1,))) is not None:
            rows.append(row)
            entries += flat
    if rows:
        found[rows] = _exact_numbers(pa.array(entries, pa.large_string()), ()).reshape(len(rows), size)
    with np.errstate(over="ignore"):  # beyond float32: infinite, and then without influence
        return found.astype(dtype).reshape(len(column), *shape)


def _json_cells(column: pa.ChunkedArray) -> list[tuple[int, Any]]:
    """Returns (row, value) of the cells that spell a list as JSON."""
    if not is_text(column.type):
        return []
    import polars as pl

    text = pl.Series(column.cast(pa.large_string()))
    rows = text.str.contains(r"^\s*\[").fill_null(False).arg_true()
    return [(row, cell) for row, cell in zip(rows, map(_json_list, text.gather(rows)), strict=True) if cell is not None]


def _json_list(text: str) -> list[Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) else None


def _flat(cell: Any, shape: tuple[int, ...]) -> list[str] | None:
    """Returns the entries of a cell as text, from one flat list or from nested lists; None if it is neither."""
    if not isinstance(cell, list):
        return None
    lists = [_json_list(entry) if isinstance(entry, str) else entry for entry in cell]
    if not any(isinstance(entry, list) for entry in lists):
        return ["" if entry is None else spelling(entry) for entry in cell] if len(cell) == math.prod(shape) else None
    parts = [_flat(entry, shape[1:]) for entry in lists] if len(shape) > 1 and len(cell) == shape[0] else [None]
    return None if any(part is None for part in parts) else [entry for part in parts for entry in part or ()]


def check_text_columns(schema: pa.Schema, text: str | Sequence[str]) -> list[str]:
    """Returns the names of the text columns; raises InputError for columns that are missing or of another type."""
    names = [text] if isinstance(text, str) else list(text)
    if not names:
        raise InputError("text must name one or more columns of text")
    for name in names:
        kind = column_type(schema, name)
        if not (is_text(kind) or pa.types.is_null(kind) or types_are_inferred(schema, name)):
            raise InputError(f"column {name!r} must contain text, not {kind}; name a column of text")
    return names


def text_column(payload: pa.Table, text: str | Sequence[str]) -> pa.ChunkedArray:
    """Returns one text per row: that of a column, or of several joined by newlines."""
    columns = [spelled(payload.column(name)) for name in check_text_columns(payload.schema, text)]
    if len(columns) == 1:
        return columns[0]
    between = pa.scalar("\n", pa.large_string())
    return pc.binary_join_element_wise(*columns, between, null_handling="replace", null_replacement="")


def joined_text(text: str | Sequence[str]) -> str:
    """Returns the sentence that explains how `text_column` joins several columns; "" for one."""
    return "" if isinstance(text, str) else f"A text is {' and '.join(text)}, with a new line between them."


def is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def is_number(kind: pa.DataType) -> bool:
    known = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    return known or pa.types.is_boolean(kind)


Classes = int | Sequence[str | int]
"""How many there are (0, 1, ...), or their names in the order of their indices, as the data spell them."""


def declared_classes(classes: Classes) -> tuple[str | int, ...]:
    """Returns the names of the classes; raises InputError for fewer than two, duplicates, or mixed types.

    >>> declared_classes(3), declared_classes(["spam", "ham"])
    ((0, 1, 2), ('spam', 'ham'))
    """
    if not isinstance(classes, Sequence) or isinstance(classes, str):
        validate.integer(at_least=2, classes=classes)
        return tuple(range(int(classes)))
    names = tuple(classes)
    texts = [isinstance(name, str) for name in names]
    whole = [isinstance(name, int) and not isinstance(name, bool) for name in names]
    if len(set(names)) != len(names) or len(names) < 2 or not (all(texts) or all(whole)):
        raise InputError(
            f"classes must be two or more different texts or integers, or how many there are, not {classes!r}"
        )
    return names


def check_label_column(schema: pa.Schema, label: str | None, classes: Sequence[str | int] | None) -> None:
    """Raises InputError for a column that is missing or whose declared type cannot hold these classes.

    Without a label there is no column to check; without classes labels are numbers.
    """
    if label is None:
        return
    if classes is None:
        check_number_columns(schema, [label])
        return
    kind = column_type(schema, label)
    if types_are_inferred(schema, label):
        return
    if is_text(kind) and not isinstance(classes[0], str):
        raise InputError(
            f'column {label!r} holds text: declare its classes, classes = ["...", "..."]; collecting them from '
            "the data would reveal them"
        )
    number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    if not (is_text(kind) or (number and not isinstance(classes[0], str)) or pa.types.is_null(kind)):
        raise InputError(
            f"column {label!r} holds {kind}, and classes are {list(classes)}; declare them as the data spell them"
        )


def read_labels(payload: pa.Table, label: str | None, classes: Sequence[str | int] | None) -> npt.NDArray[np.float32]:
    """Returns each label's (rows,) class index, or the label itself in a regression; NaN without a label column."""
    check_label_column(payload.schema, label, classes)
    if label is None:
        return np.full(len(payload), np.nan, np.float32)
    column = payload.column(label)
    return numbers(column) if classes is None else class_indices(column, classes)


def class_indices(column: pa.ChunkedArray, classes: Sequence[str | int]) -> npt.NDArray[np.float32]:
    """Returns the (rows,) class index of each label; NaN if it is none of the classes: its row has no influence.

    Guarantees:
      - A label depends on its own cell alone.   (test_labels_depend_on_their_own_cell)

    >>> class_indices(pa.chunked_array([["ham", "eggs", None, "spam"]]), ["spam", "ham"])
    array([ 1., nan, nan,  0.], dtype=float32)
    >>> class_indices(pa.chunked_array([[True, False]]), (0, 1)), class_indices(pa.chunked_array([[7.0, 7.5]]), [3, 7])
    (array([1., 0.], dtype=float32), array([ 1., nan], dtype=float32))
    """
    if isinstance(classes[0], str):
        names, cells = pa.array(classes, pa.large_string()), spelled(column)
    else:
        names, cells = pa.array(classes, pa.float64()), pa.array(numbers(column, dtype=np.float64))
    found = pc.index_in(cells, value_set=names).cast(pa.float32())
    return np.array(found.fill_null(float("nan")), np.float32)
