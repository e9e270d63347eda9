"""Tables in memory: pandas, polars, Arrow, Hugging Face datasets, anything with the Arrow C interface."""

import contextlib
import datetime
import decimal
import difflib
import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute

from coowned.attribution.examples import SEVERAL, AttributedExamples, Mentions, Origin, attribute
from coowned.attribution.identifiers import Location, check_valid, first_true, is_text, is_valid, one_array, one_line
from coowned.attribution.options import DataOptions
from coowned.attribution.user_keys import Aliases, UserKeyRules, several_users_advice
from coowned.errors import InputError

pc: Any = pyarrow.compute  # its functions are created at import, so type checkers do not see them

_LOG = logging.getLogger(__name__)
ROWS_AT_ONCE = 1 << 20  # rows whose names are split and joined at once
EXACT = 2**53  # float64 holds every integer up to it
_INFERRED = b"coowned.inferred"  # in a schema's metadata: names of columns, or null for all
# Values of other types (an object, a UUID, an address, ...) become text.
_ARROW_TYPES = {
    bool: None, int: pa.int64(), float: pa.float64(), decimal.Decimal: None, str: pa.large_string(),
    bytes: pa.large_binary(), datetime.datetime: None, datetime.date: None, datetime.time: None,
}  # fmt: skip


def from_table(
    table: Any,
    users: str | Sequence[str] | None = None,
    user: str | None = None,
    example_id: str | None = None,
    separator: str | None = None,
    *,
    user_keys: UserKeyRules | None = None,
    aliases: Aliases | str | os.PathLike[str] | None = None,
    addresses: bool | None = None,
    name: str = "",
) -> AttributedExamples:
    """Builds attributed examples from a table with one example per row, or one pair per row with `user=`.

    Args:
      table: a pandas, polars or Arrow table, a Hugging Face dataset, a mapping of columns (lists, or arrays, of which
        those with more than one axis are lists of fixed size), a list of rows as dictionaries, or anything with the
        Arrow C stream interface.
      users: the column, or columns, that name an example's users ("users" by default): lists, or one name per cell.
        With several columns, or with a separator, an empty cell means no user; with one column it is an error.
      user: the column with the one user of a row.
      example_id: the column with the ids, never derived from content; the row number by default. Rows with the same id
        are copies of one example, which has the users of all of them and the other columns of the first.
      separator: between two users of one cell ("a@x; b@y").
      user_keys: the rules that make keys of spellings; `UserKeyRules()` by default, which merges on the safe side.
      aliases: an `Aliases`, or the path of a CSV file `key,user`.
      addresses: the user columns hold mail addresses, perhaps several in a cell; by default where a column's name says
        so ("to", "sender", "email", ...). In other columns a user with two addresses is an error, unless this is False.
      name: what errors call the table.

    Guarantees:
      - One example per row, in row order, for every kind of table.   (test_every_kind_of_table)
      - Rows with one id are one example with the users of all.        (test_copies_of_an_example_are_one)
      - Two addresses are no user, unless addresses=False was said.    (test_two_addresses_are_no_user)
      - Lists of Python values declare no type: each cell of content is read by itself, as in JSONL.
        (test_one_cell_changes_no_other, test_lists_declare_no_type)
      - Users that look like several are warned of, with the option that splits them; no key is shown.
        (test_several_users_in_one_cell_are_warned_of)

    Example:
      >>> examples = from_table({"sender": ["Ann", "Bob"], "to": ["bob; carol", ""]}, ["sender", "to"], separator=";")
      >>> examples.graph.users_per_example
      array([3, 1], dtype=int32)
      >>> examples.user_keys.to_pylist()
      ['ann', 'bob', 'carol']
    """
    where = Location(name)
    options = table_options(users, user, example_id, separator, addresses)
    arrow = valid_table(to_arrow_table(table, options), options, where)
    return attribute_table(arrow, options, where, user_keys=user_keys, aliases=aliases)


def table_options(
    users: str | Sequence[str] | None,
    user: str | None,
    example_id: str | None,
    separator: str | None,
    addresses: bool | None,
) -> DataOptions:
    """Returns the options of one table, from the arguments of `from_table`."""
    listed = users if users is None or isinstance(users, str) else list(users)
    if listed == []:
        raise InputError("users= is empty; name at least one column")
    return DataOptions(users=listed, user=user, example_id=example_id, separator=separator, addresses=addresses)


def examples_without_users(table: Any, example_id: str | None = None) -> AttributedExamples:
    """Returns the rows of a table as examples without users, for prediction.

    Nobody's training depends on these rows, so a list of Python values has the type that its cells have in common.

    >>> examples_without_users([{"x": 1.5}, {"x": 2.5}]).graph
    AttributionGraph(num_examples=2, num_users=0, num_pairs=0)
    """
    options, where = DataOptions(users=[], example_id=example_id), Location("")
    arrow = to_arrow_table(table, options).replace_schema_metadata()
    return attribute_table(valid_table(arrow, options, where), options, where)


def attribute_table(
    table: pa.Table,
    options: DataOptions,
    where: Location,
    *,
    user_keys: UserKeyRules | None = None,
    aliases: Aliases | str | os.PathLike[str] | None = None,
) -> AttributedExamples:
    """Does what `from_table` does for a valid Arrow table; with an empty list of columns there are no users."""
    separator, example_id, pairs = options.separator, options.example_id, options.user is not None
    if separator is not None and (not isinstance(separator, str) or not separator):
        raise InputError(f"{where}separator must be text of at least one character, not {separator!r}; or omit it")
    if pairs and options.users is not None:
        raise InputError(f"{where}give users= (all users of a row) or user= (one pair per row), not both")
    columns = options.user_columns()
    if pairs and example_id is None:
        raise InputError(
            f"{where}user= (--user) needs example_id= (--example-id), the column that says which rows belong to one "
            "example"
        )
    if pairs and _is_list(_column(table, columns[0], where).type):
        raise InputError(f"{where}column {columns[0]!r} contains lists; pass it as users=, not user=")
    attributed = attribute(
        _names_by_row(table, columns, separator, lenient=len(columns) > 1, where=where)
        if columns
        else Mentions(np.zeros(table.num_rows + 1, np.int64), np.zeros(0, np.int64), pa.array([], pa.large_string())),
        example_ids=None if example_id is None else _column(table, example_id, where),
        payload=table.remove_column(table.column_names.index(columns[0])) if pairs else table,
        user_keys=user_keys,
        aliases=aliases,
        addresses=(user_keys or UserKeyRules()).bracketed_addresses and (options.has_addresses() or options.addresses),
        origin=Origin(
            where,
            columns_read=[*([] if example_id is None else [example_id]), *columns],
            repeats="" if pairs else "repeated_rows",
        ),
    )
    if SEVERAL in attributed.notes:
        in_lists = any(_is_list(_column(table, name, where).type) for name in columns)
        keys = pl.Series(attributed.user_keys)
        _LOG.warning("%s%s", where, several_users_advice(keys, attributed.key_rules, in_lists=in_lists))
    return attributed


def to_arrow_table(table: Any, options: DataOptions | None = None) -> pa.Table:
    """Converts any kind of table to an Arrow table, without a copy where its memory allows.

    Lists of Python values declare no types: columns of content that are given so are marked as inferred. Ids and users
    (of `options`) must be of one type each.
    """
    options = options or DataOptions()
    if isinstance(table, pa.Table):
        return table
    try:
        if isinstance(table, pl.LazyFrame):
            table = table.collect()
        if isinstance(table, pl.DataFrame):
            return table.to_arrow()
        if hasattr(table, "with_format") and hasattr(table, "features"):  # a Hugging Face dataset
            return pa.table(table.with_format("arrow")[:])
        if (columns := _python_columns(table)) is not None:
            return _from_columns(columns, options)
        if hasattr(table, "__arrow_c_stream__") or hasattr(table, "__arrow_c_array__"):
            return pa.table(table)
    except (pa.ArrowException, pl.exceptions.PolarsError, TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f"the table cannot be read as Arrow ({one_line(error)}); all columns need one type each and the same length"
        ) from error
    raise InputError(
        f"{type(table).__name__} is not a table; pass a pandas, polars or Arrow table, a Hugging Face dataset, "
        "a list of dictionaries, or anything with __arrow_c_stream__"
    )


def _python_columns(table: Any) -> Mapping[str, Any] | None:
    """Returns the columns of a mapping, of rows as dictionaries or of pandas; None for any other kind of table."""
    if isinstance(table, Mapping):
        return table
    if type(table).__module__.split(".")[0] == "pandas" and hasattr(table, "columns"):
        if not table.columns.is_unique:
            raise InputError("two columns of the table have one name; rename one")
        return {str(name): column for name, column in table.items()}
    if isinstance(table, list) and all(isinstance(row, Mapping) for row in table):
        names = dict.fromkeys(name for row in table for name in row)
        return {name: [row.get(name) for row in table] for name in names}
    return None


def _from_columns(columns: Mapping[str, Any], options: DataOptions) -> pa.Table:
    """Returns columns as one table; each cell of a list, or of an array of objects, is read by itself, as in JSONL."""
    columns = {name: _untyped(values) for name, values in columns.items()}
    undeclared = []
    for name, values in columns.items():
        if isinstance(values, list) and name not in {*options.user_columns(), options.example_id}:
            columns[name] = values_to_arrow(values)
            undeclared.append(name)
        elif isinstance(values, np.ndarray) and values.ndim > 1:
            columns[name] = pa.array(values.reshape(-1))
            for size in values.shape[:0:-1]:
                columns[name] = pa.FixedSizeListArray.from_arrays(columns[name], size)
        elif isinstance(values, list):
            try:
                columns[name] = pa.array(values)
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                raise pa.ArrowInvalid(f"column {name!r}: {error}") from error
    return with_inferred_types(pa.table(columns), undeclared)


def _untyped(values: Any) -> Any:
    """Returns a list where values have no type but that of any object, with None for what pandas calls missing."""
    if isinstance(kind := getattr(values, "dtype", None), np.dtype) and kind.kind == "O":
        return [None if isinstance(value, float) and math.isnan(value) else value for value in values]
    return list(values) if isinstance(values, tuple) else values


def valid_table(table: pa.Table, options: DataOptions, where: Location | str) -> pa.Table:
    """Returns the same table with all text valid UTF-8.

    In the columns of ids and users anything else is refused; in all others it is replaced, so that nobody's content can
    stop a run.
    """
    metadata = {*options.user_columns(), options.example_id}
    for number in range(table.num_columns):
        name, column = table.field(number).name, table.column(number)
        if name not in metadata and _is_repairable(column.type) and not all(map(is_valid, column.chunks)):
            table = table.set_column(number, name, pa.chunked_array(list(map(_repaired, column.chunks))))
        else:
            check_valid(column, f"{where}column {name!r}")
    return table


def _is_repairable(kind: pa.DataType) -> bool:
    """Returns whether a type is text, or lists of it at any depth."""
    while pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    return is_text(kind)


def _repaired(array: pa.Array) -> pa.Array:
    """Replaces bytes that are not UTF-8 in text, or lists of it, by replacement characters."""
    if not is_text(array.type):
        ends = _ends(np.asarray(pc.list_value_length(array).fill_null(0)))
        return pa.LargeListArray.from_arrays(pa.array(ends), _repaired(array.flatten()), mask=array.is_null())
    raw = array.cast(pa.large_string(), safe=False).view(pa.large_binary()).to_pylist()
    return pa.array([None if cell is None else cell.decode("utf-8", "replace") for cell in raw], pa.large_string())


def with_inferred_types(table: pa.Table, names: list[str] | None = None) -> pa.Table:
    """Marks the types of these columns (default: all) as inferred from what their cells hold.

    One cell can change the type of its column, which must decide nothing. What reads such a column takes each cell by
    itself: as `spelling` gives it, or as the number that this text is.
    """
    marked = json.dumps(names)
    return table.replace_schema_metadata({**(table.schema.metadata or {}), _INFERRED: marked}) if names != [] else table


def with_names_as_text(table: pa.Table, options: DataOptions) -> pa.Table:
    """Converts ids and users from integers to text, so that the type of an id does not depend on anybody's cell.

    >>> table = with_names_as_text(pa.table({"id": [7], "users": [[1, 2]]}), DataOptions(example_id="id"))
    >>> table.to_pylist()
    [{'id': '7', 'users': ['1', '2']}]
    """
    for name in {*options.user_columns(), options.example_id} & {*table.column_names}:
        number = table.column_names.index(name)
        kind = table.column(number).type
        if _is_name(kind):
            kind = pa.large_string()
        elif _is_list(kind) and (_is_name(kind.value_type) or pa.types.is_null(kind.value_type)):
            kind = pa.large_list(pa.large_string())
        table = table.set_column(number, name, table.column(number).cast(kind))
    return table


def types_are_inferred(schema: pa.Schema, *names: str) -> bool:
    """Returns whether the type of one of these columns (default: of any) was inferred from cells, not declared.

    So it is in CSV, JSONL, SQL and lists of Python values.
    """
    marked = json.loads((schema.metadata or {}).get(_INFERRED, b"[]"))
    return marked is None or (bool(marked) if not names else not set(marked).isdisjoint(names))


def values_to_arrow(values: Sequence[Any], text: Callable[[Any], str] | None = None) -> pa.Array:
    """Converts Python values to one Arrow array; values without a common type become text, so that no value is refused.

    `text` makes text of a value, by default `spelling`.

    >>> values_to_arrow([1, None, 2.5]).to_pylist(), values_to_arrow([1, "a", {"b": 2}]).to_pylist()
    ([1.0, None, 2.5], ['1', 'a', '{"b": 2}'])
    """
    types = set(map(type, values)) - {type(None)}
    if types & {memoryview, bytearray}:
        values = [bytes(value) if isinstance(value, (memoryview, bytearray)) else value for value in values]
        types = types - {memoryview, bytearray} | {bytes}
    if types and types <= {list, tuple}:
        return _lists_to_arrow(values, text)
    if types == {int, float} and all(abs(value) <= EXACT for value in values if isinstance(value, int)):
        types = {float}
    if len(types) <= 1 and types <= _ARROW_TYPES.keys():
        with contextlib.suppress(pa.ArrowException, TypeError, ValueError, OverflowError):
            array = pa.array(values, _ARROW_TYPES[types.pop()] if types else None)
            return array if isinstance(array, pa.Array) else array.combine_chunks()
    return values_to_text(values, text)


def _lists_to_arrow(values: Sequence[Any], text: Callable[[Any], str] | None) -> pa.Array:
    listed = [entry for value in values if value is not None for entry in value]
    entries = values_to_arrow(listed, text)
    if text is None and is_text(entries.type) and not all(entry is None or isinstance(entry, str) for entry in listed):
        return values_to_text(values)  # a list keeps its own entries, whatever others hold
    lengths = [0 if value is None else len(value) for value in values]
    missing = pa.array([value is None for value in values])
    lists = pa.LargeListArray.from_arrays(pa.array(_ends(np.array(lengths))), entries, mask=missing)
    return lists if text is not None or keeps_its_meaning(lists) else values_to_text(values)


def keeps_its_meaning(column: pa.Array | pa.ChunkedArray) -> bool:
    """Returns whether the type inferred for a column means for each cell what its JSON text would.

    The type of objects gives a cell the fields and types of others, and lists of lists that are no array are read by
    parts.
    """
    row = np.arange(len(column))  # (entries,) of the cell that each is in
    while _is_list(column.type):
        lengths = np.asarray(pc.list_value_length(column).fill_null(0), dtype=np.int64)
        row, column = np.repeat(row, lengths), pc.list_flatten(column)
        if _is_list(column.type):
            inner = np.asarray(pc.list_value_length(column).fill_null(-1), dtype=np.int64)
            if np.any((np.diff(inner) != 0) & (np.diff(row) == 0)):
                return False
    return not pa.types.is_struct(column.type)


def values_to_text(values: Sequence[Any], text: Callable[[Any], str] | None = None) -> pa.Array:
    """Converts Python values to text, null to null; `text` as in `values_to_arrow`."""
    return pa.array([None if value is None else (text or spelling)(value) for value in values], pa.large_string())


def spelling(value: Any) -> str:
    """Returns the text of a content cell, which depends on its value alone and not on the type of its column.

    A number that is whole has no ".0"; a list or an object is JSON, without the fields that are null, which Arrow adds
    where another row has them.

    Guarantees:
      - A cell of a typed column has the text that it has in a mixed one.   (test_one_cell_changes_no_other)

    >>> [spelling(value) for value in (1, 1.0, 0.5, True, "a", [1.0, None], {"b": None, "a": 2.0})]
    ['1', '1', '0.5', 'true', 'a', '[1, null]', '{"a": 2}']
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).decode("utf-8", "replace")
    plain = _plain(value)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False, default=str, sort_keys=True)


def exact_text(value: Any) -> str:
    """Returns the text of an id or of a user's name: integers keep all their digits."""
    text = json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, (list, dict)) else str(value)
    return _valid(text)


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return _valid(value)
    if isinstance(value, decimal.Decimal):
        return int(value) if value.is_finite() and value == value.to_integral_value() else float(value)
    if isinstance(value, float):
        negative_zero = value == 0 and math.copysign(1, value) < 0  # which no integer is
        return int(value) if value.is_integer() and abs(value) <= EXACT and not negative_zero else value
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value if value is None or isinstance(value, int) else _valid(str(value))


def _valid(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def spelled(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Returns (rows,) large_string: the `spelling` of each cell of a column whose type was inferred."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if is_text(column.type) or pa.types.is_null(column.type):
        return column.cast(pa.large_string())
    if pa.types.is_nested(column.type):
        return pa.chunked_array([values_to_text(column.to_pylist())])
    encoded = one_array(column).dictionary_encode()
    return pa.chunked_array([values_to_text(encoded.dictionary.to_pylist()).take(encoded.indices)])


def join_chunks(chunks: Sequence[pa.Array | pa.ChunkedArray], text: Callable[[Any], str] | None = None) -> pa.Array:
    """Joins all chunks in one common type, or as text if there is none; `text` as in `values_to_arrow`."""
    pieces = [piece for chunk in chunks for piece in getattr(chunk, "chunks", [chunk])]
    known = [chunk.type for chunk in chunks if not pa.types.is_null(chunk.type)] or [pa.null()]
    try:
        schemas = [pa.schema([("", kind)]) for kind in dict.fromkeys(known)]
        kind = pa.unify_schemas(schemas, promote_options="permissive")[0].type
        if pa.types.is_large_binary(kind) and len(schemas) > 1:
            raise pa.ArrowInvalid("text and bytes have no common type but text")
        # A cast of lists of nulls to their own type loses values (pyarrow 26).
        return pa.chunked_array([piece if piece.type == kind else piece.cast(kind) for piece in pieces], kind)
    except pa.ArrowException:  # integers that no float holds, times with and without a zone, ...
        return pa.chunked_array([values_to_text(piece.to_pylist(), text) for piece in pieces], pa.large_string())


def _column(table: pa.Table, name: str, where: Location) -> pa.ChunkedArray:
    count = table.column_names.count(name) if isinstance(name, str) else 0
    if count > 1:
        raise InputError(f"{where}{count} columns are named {name!r}; rename them")
    if count == 0:
        near = difflib.get_close_matches(str(name), table.column_names, n=1)
        listed = ", ".join(map(repr, table.column_names))
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {listed}" if listed else "it has no columns"
        raise InputError(f"{where}there is no column {name!r}; {hint}")
    return table.column(name)


def _is_name(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return is_text(kind) or pa.types.is_integer(kind)


def _is_list(kind: pa.DataType) -> bool:
    views = pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind)
    return views or pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _names_by_row(
    table: pa.Table, names: Sequence[str], separator: str | None, *, lenient: bool, where: Location
) -> pa.ChunkedArray:
    """Returns the users of each row as lists; lenient: an empty cell means no user."""
    columns = [_column(table, name, where) for name in names]
    for name, column in zip(names, columns, strict=True):
        _check_kind(column.type, name, separator, nobody_is_fine=lenient or len(column) == 0, where=where)
    if len(columns) == 1 and _is_list(columns[0].type):
        return columns[0]
    parts = []
    # Some rows at a time, and only codes kept: what is cut and joined on the way is never there for all rows at once.
    for begin in range(0, table.num_rows, ROWS_AT_ONCE):
        lists = [
            _as_lists(column.slice(begin, ROWS_AT_ONCE), name, separator, begin, lenient=lenient, where=where)
            for name, column in zip(names, columns, strict=True)
        ]
        offsets, entries = lists[0] if len(lists) == 1 else _side_by_side(lists)
        parts.append(pa.LargeListArray.from_arrays(pa.array(offsets), entries.dictionary_encode()))
    return pa.chunked_array(parts, pa.large_list(pa.dictionary(pa.int32(), pa.large_string())))


def _check_kind(kind: pa.DataType, name: str, separator: str | None, *, nobody_is_fine: bool, where: Location) -> None:
    if _is_list(kind) and (_is_name(kind.value_type) or pa.types.is_null(kind.value_type)):
        if separator:
            raise InputError(f"{where}column {name!r} already contains lists; remove the separator")
    elif not _is_name(kind) and not (pa.types.is_null(kind) and (nobody_is_fine or separator)):
        raise InputError(
            f"{where}column {name!r} is {kind}; users are text, integers, or lists of them: name another column"
        )


def _as_lists(
    column: pa.ChunkedArray, name: str, separator: str | None, begin: int, *, lenient: bool, where: Location
) -> tuple[np.ndarray, pa.Array]:
    """Returns the (rows + 1,) ends of each row's names, and the names concatenated; begin: number of the first row."""
    if _is_list(column.type):  # with several columns a null list means no users
        lengths = np.asarray(pc.fill_null(pc.list_value_length(column), 0), dtype=np.int64)
        return _ends(lengths), one_array(pc.list_flatten(column)).cast(pa.large_string())
    text = one_array(column).cast(pa.large_string())
    if separator:
        lists = pc.split_pattern(pc.fill_null(text, ""), separator)
        names = pc.utf8_trim_whitespace(lists.flatten())
        filled = np.asarray(pc.utf8_length(names)) > 0
        return _ends(filled)[np.asarray(lists.offsets) - lists.offsets[0].as_py()], names.filter(pa.array(filled))
    if not lenient:
        if text.null_count:
            row = where.row(begin + first_true(text.is_null()))
            raise InputError(f"{where}no user in column {name!r} at {row}; fill it in, or drop the row")
        return np.arange(len(text) + 1), text
    present = np.asarray(pc.fill_null(pc.utf8_length(pc.utf8_trim_whitespace(text)), 0)) > 0
    return _ends(present), text.filter(pa.array(present))


def _ends(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _side_by_side(lists: Sequence[tuple[np.ndarray, pa.Array]]) -> tuple[np.ndarray, pa.Array]:
    """Joins lists row by row: the names of the first column, then of the second, …"""
    lengths = [np.diff(ends) for ends, _ in lists]
    row = np.concatenate([np.repeat(np.arange(len(counts)), counts) for counts in lengths])  # (names,)
    order = np.argsort(row, kind="stable")
    return _ends(np.sum(lengths, axis=0)), pa.concat_arrays([names for _, names in lists]).take(pa.array(order))
