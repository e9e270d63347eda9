"""Columns of a payload as arrays: numbers, lists of numbers, texts.

Only a declared type can refuse a column. A CSV or JSONL file declares none: its types are inferred from what the cells
hold, so that one odd cell turns a column of numbers into text. There cells are read one by one, and what does not parse
is NaN: a row without influence.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from coowned.attribution.identifiers import is_text
from coowned.attribution.tables import types_are_inferred
from coowned.errors import InputError

pc: Any = pyarrow.compute  # its functions are made when it is imported: no checker sees them


def column_type(schema: pa.Schema, name: str) -> pa.DataType:
    """The type of a column's cells, of those in its dictionary where it has one; InputError for no such column."""
    if name not in schema.names:
        raise InputError(f"the data have no column {name!r}; they have {', '.join(schema.names)}")
    kind = schema.field(name).type
    return kind.value_type if pa.types.is_dictionary(kind) and is_text(kind.value_type) else kind


def check_number_columns(schema: pa.Schema, names: str | Sequence[str], *, lists: bool = False) -> list[str]:
    """The names as a list; refuses, with InputError, columns that are missing or declared to hold something else.

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
        if not (is_number(kind) or types_are_inferred(schema)):
            lone = "one list column or " if lists else ""
            raise InputError(f"column {name!r} must contain numbers, not {kind}; name {lone}columns of numbers")
    return listed


def number_matrix(
    payload: pa.Table, names: str | Sequence[str], num_features: int | None = None
) -> npt.NDArray[np.float32]:
    """(rows, num_features) float32 of columns of numbers, or of one column of lists.

    The width of lists is `num_features`, else what the column's type fixes, else their most common length: that length
    is then taken as public. A list of another length is a row of NaN.
    """
    columns = [payload.column(name) for name in check_number_columns(payload.schema, names, lists=True)]
    if len(columns) == 1 and is_text(columns[0].type):
        columns = [_parsed_lists(columns[0])]
    if len(columns) == 1 and is_list(columns[0].type):
        return numbers(columns[0], (_list_width(columns[0], num_features),))
    if len(columns) == 1 and num_features not in (None, 1):  # not even one list among the cells
        return np.full((len(payload), num_features or 1), np.nan, np.float32)
    return np.stack([numbers(column) for column in columns], axis=1)


def numbers(column: pa.ChunkedArray, shape: tuple[int, ...] = (), dtype: Any = np.float32) -> npt.NDArray[Any]:
    """(rows, *shape), rounded; NaN where a number is null or does not parse, and in cells of another shape.

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
    """The same in float64."""
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
    if is_text(cells.type) and not shape:
        import polars as pl

        text = pl.Series(cells.cast(pa.large_string())).str.strip_chars()
        logical = text.str.to_lowercase().replace_strict({"true": 1.0, "false": 0.0}, default=None)
        return text.cast(pl.Float64, strict=False).fill_null(logical).fill_null(float("nan")).to_numpy()
    if is_number(cells.type) and not shape:
        cells = cells.cast(pa.uint8()) if pa.types.is_boolean(cells.type) else cells
        # A safe cast refuses integers that must be rounded.
        return np.array(cells.cast(pa.float64(), safe=False).fill_null(float("nan")), np.float64)
    return np.full((len(cells), *shape), np.nan)


def check_text_columns(schema: pa.Schema, text: str | Sequence[str]) -> list[str]:
    """The names of the text columns; refuses, with InputError, columns that are missing or of another type."""
    names = [text] if isinstance(text, str) else list(text)
    if not names:
        raise InputError("text must name one or more columns of text")
    for name in names:
        kind = column_type(schema, name)
        inferred = types_are_inferred(schema) and not pa.types.is_nested(kind)
        if not (is_text(kind) or pa.types.is_null(kind) or inferred):
            raise InputError(f"column {name!r} must contain text, not {kind}; name a column of text")
    return names


def text_column(payload: pa.Table, text: str | Sequence[str]) -> pa.ChunkedArray:
    """One text for each row: that of a column, or of several, with a new line between them."""
    schema = payload.schema
    columns = [
        payload.column(name).cast(column_type(schema, name)).cast(pa.large_string())
        for name in check_text_columns(schema, text)
    ]
    if len(columns) == 1:
        return columns[0]
    between = pa.scalar("\n", pa.large_string())
    return pc.binary_join_element_wise(*columns, between, null_handling="replace", null_replacement="")


def joined_text(text: str | Sequence[str]) -> str:
    """The sentence that says how `text_column` joins several columns; "" for one."""
    return "" if isinstance(text, str) else f"A text is {' and '.join(text)}, with a new line between them."


def is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def is_number(kind: pa.DataType) -> bool:
    known = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    return known or pa.types.is_boolean(kind)


def _list_width(column: pa.ChunkedArray, num_features: int | None) -> int:
    fixed = column.type.list_size if pa.types.is_fixed_size_list(column.type) else None
    if num_features is not None and fixed not in (None, num_features):
        raise InputError(f"num_features is {num_features}, but the column's lists have {fixed} numbers; remove it")
    lengths = np.asarray(pc.list_value_length(column).fill_null(-1))
    return num_features or fixed or max(1, int(np.bincount(lengths[lengths >= 0], minlength=2).argmax()))


def _parsed_lists(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Cells that were written as JSON because one of them is no list: as lists again, each by itself; else the column.

    >>> _parsed_lists(pa.chunked_array([["[1, 2.5]", "oops"]])).to_pylist()
    [[1.0, 2.5], None]
    """

    def entries(cell: str | None) -> list[float] | None:
        try:
            found = json.loads(cell or "")
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, list):
            return None
        return [float(entry) if isinstance(entry, int | float) else float("nan") for entry in found]

    cells = [entries(cell) for cell in column.to_pylist()]
    if not any(cell is not None for cell in cells):
        return column
    return pa.chunked_array([pa.array(cells, pa.large_list(pa.float64()))])
