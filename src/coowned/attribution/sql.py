"""Tables in databases: the rows of a query, over any DB-API or ADBC connection."""

import contextlib
import datetime
import decimal
import os
import re
import sqlite3
import sys
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from coowned.attribution.examples import AttributedExamples
from coowned.attribution.identifiers import check_valid, one_line
from coowned.attribution.places import Place
from coowned.attribution.tables import attribute_table, to_arrow_table
from coowned.attribution.user_keys import Aliases, UserKeyRules
from coowned.errors import InputError

_ROWS_AT_FIRST = 1 << 10
_MOST_ROWS = 1 << 16
_BYTES_AT_ONCE = 16 << 20  # of a chunk as Arrow; as Python objects it is a few times that
# What a value is called in errors, by its type; types that are not here go to Arrow as they are.
_KINDS = {
    bool: "true or false", int: "a whole number", float: "a number", decimal.Decimal: "a decimal number", str: "text",
    bytes: "bytes", bytearray: "bytes", memoryview: "bytes", datetime.datetime: "a time", datetime.date: "a date",
    list: "a list", tuple: "a list",
}  # fmt: skip
_ARROW = {"text": pa.large_string(), "a whole number": pa.int64(), "a number": pa.float64(), "bytes": pa.large_binary()}

_NUMBERS = {"a whole number", "a number"}


def read_sql(
    query: str,
    connection: Any,
    *,
    example_id: str | None = None,
    users: str | Sequence[str] | None = None,
    user: str | None = None,
    separator: str | None = None,
    parameters: Sequence[Any] | dict[str, Any] = (),
    user_keys: UserKeyRules | None = None,
    aliases: Aliases | str | os.PathLike[str] | None = None,
    place: str = "the query",
    progress: Callable[[float, str], None] | None = None,
) -> AttributedExamples:
    """Attributed examples from the rows of a query; `users`, `user`, `separator`, ... as in `from_table`.

    Args:
      query: one SELECT. It must not choose or order rows by content (`WHERE text LIKE ...`, `ORDER BY length(text)`):
        what it leaves out is a selection that no certificate sees.
      connection: an open DB-API 2 connection (sqlite3, psycopg, ...) or an ADBC one; it is not closed, nor is anything
        committed.
      example_id: the column with the ids, never made from content. There is no default: without ORDER BY the number of
        a row says where the database keeps it, which can depend on content.
      parameters: for the placeholders of the query, in the connection's own style.
      place: what to call the query in errors.
      progress: called after each chunk of rows as progress(0.0, message): how many will come is not known.

    A column is whole numbers, numbers, text, ... by what it holds; whole numbers among numbers become numbers, NULL is
    null, and any other mixture is an error, as is a repeated name. Without ORDER BY the rows may come in another order
    next time; S does not depend on it, except with `ties="input"`, but a training run is only resumed with the same
    order: write `ORDER BY` the id.

    Guarantees:
      - The same rows give the same examples as `from_table`, however they are cut in chunks.   (test_same_as_a_table)
      - The row number is never an id.                                                          (test_ids_are_asked_for)

    Cost: memory for the result and one chunk of rows, as far as the driver itself does not hold them all.

    Example:
      >>> connection = sqlite3.connect(":memory:")
      >>> _ = connection.execute("CREATE TABLE mail (id TEXT, sender TEXT, recipients TEXT, body TEXT)")
      >>> _ = connection.execute("INSERT INTO mail VALUES ('m1', 'Ann', 'bob; carol', 'See you.')")
      >>> query = "SELECT id, sender, recipients, body FROM mail ORDER BY id"
      >>> examples = read_sql(query, connection, example_id="id", users=["sender", "recipients"], separator=";")
      >>> examples.user_keys.to_pylist(), examples.payload["body"].to_pylist()
      (['ann', 'bob', 'carol'], ['See you.'])
      >>> connection.close()
    """
    where = Place(place)
    if not isinstance(query, str) or not query.strip():
        raise InputError(f"{where}the query must be text, not {query!r}; write a SELECT")
    if example_id is None:
        raise InputError(
            f"{where}rows of a query have no order of their own, so their numbers cannot be ids; "
            "name the column with the ids (example_id=, --example-id)"
        )
    if not callable(getattr(connection, "cursor", None)):
        raise InputError(
            f"{where}{type(connection).__name__} is not a DB-API or ADBC connection; give one that has cursor()"
        )
    table = _table_of(query, connection, parameters, where, progress)
    for number, name in enumerate(table.column_names):
        if table.column_names.index(name) != number:
            raise InputError(f"{where}two columns are named {name!r}; rename one in the query with AS")
        check_valid(table.column(number), f"{where}column {name!r}")
    return attribute_table(table, users, user, example_id, separator, user_keys=user_keys, aliases=aliases, where=where)


@contextlib.contextmanager
def open_sqlite(path: str | os.PathLike[str]) -> Iterator[sqlite3.Connection]:
    """A connection to a SQLite file that can read and nothing else.

    Guarantees:
      - No statement changes the file or makes another one.   (test_sqlite_files_are_only_read)

    Example:
      >>> import tempfile
      >>> file = Path(tempfile.mkdtemp()) / "mail.db"
      >>> sqlite3.connect(file).close()
      >>> with open_sqlite(file) as connection:
      ...     connection.execute("SELECT 1 + 1").fetchone()
      (2,)
    """
    file = Path(path)
    if not file.is_file():
        raise InputError(f"{file}: no such file; check the path of the database")
    try:
        connection = sqlite3.connect(f"file:{urllib.parse.quote(str(file.resolve()))}?mode=ro", uri=True)
    except sqlite3.Error as error:
        raise InputError(f"{file}: cannot be opened ({one_line(error)}); check the file and who may read it") from error
    with contextlib.closing(connection):
        connection.set_authorizer(_reading_only)
        yield connection


def _reading_only(action: int, *_: object) -> int:
    reading = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)
    return sqlite3.SQLITE_OK if action in reading else sqlite3.SQLITE_DENY


def _table_of(
    query: str, connection: Any, parameters: Any, where: Place, progress: Callable[[float, str], None] | None
) -> pa.Table:
    with _named_errors(connection, where), contextlib.closing(connection.cursor()) as cursor:
        if parameters:
            cursor.execute(query, parameters)
        else:
            cursor.execute(query)
        if hasattr(cursor, "fetch_arrow_table"):
            return to_arrow_table(cursor.fetch_arrow_table())
        if cursor.description is None:
            raise InputError(f"{where}the query gives no rows back; write a SELECT")
        columns = [_Column(column[0], where) for column in cursor.description]
        size, done = _ROWS_AT_FIRST, 0
        while rows := cursor.fetchmany(size):
            if isinstance(rows[0], Mapping):
                raise InputError(f"{where}the connection gives rows as mappings; let it give plain tuples")
            num_bytes = sum(
                column.add(values, done) for column, values in zip(columns, zip(*rows, strict=True), strict=True)
            )
            done += len(rows)
            # The next chunk has room for a few wide rows or for many narrow ones.
            size = max(1, min(_MOST_ROWS, len(rows) * _BYTES_AT_ONCE // max(1, num_bytes)))
            if progress is not None:
                progress(0.0, f"reading rows: {done:,}")
    return pa.table([column.finish() for column in columns], names=[column.name for column in columns])


@contextlib.contextmanager
def _named_errors(connection: Any, where: Place) -> Iterator[None]:
    """What the driver says becomes an InputError, without the cell that it may quote: cells are somebody's data."""
    errors = getattr(connection, "Error", None)  # an extension of the DB-API that most drivers have
    if not (isinstance(errors, type) and issubclass(errors, Exception)):
        package = sys.modules.get(type(connection).__module__.split(".")[0])
        errors = getattr(package, "Error", None)
    if not (isinstance(errors, type) and issubclass(errors, Exception)):
        errors = ()  # a driver that keeps its errors elsewhere: they pass as they are
    try:
        yield
    except errors as error:
        message = one_line(error)
        undecodable = re.search(r"Could not decode to UTF-8 column '(.*?)' with text", message)
        if undecodable:
            raise InputError(
                f"{where}column {undecodable[1]!r} holds text that is not UTF-8; CAST it to BLOB, or mend it"
            ) from None
        raise InputError(f"{where}the database refuses it ({message.rstrip('.')}); mend the query") from error


def _kind(value: object) -> str:
    return _KINDS.get(type(value), type(value).__name__)


class _Column:
    """One column of a result, chunk by chunk; refuses what does not fit with what came before."""

    def __init__(self, name: str, where: Place):
        self.name = str(name)
        self._where = where
        self._kind: str | None = None  # of all values so far; None while there were only NULLs
        self._kind_from = 0  # the row that decided it
        self._chunks: list[pa.Array] = []

    def add(self, values: Sequence[Any], begin: int) -> int:
        """Takes a chunk whose first row has the number `begin`; its size in bytes."""
        types = set(map(type, values)) - {type(None)}
        kinds = {_KINDS.get(kind, kind.__name__) for kind in types} | ({self._kind} if self._kind else set())
        if kinds == _NUMBERS:
            kinds, self._kind = {"a number"}, "a number"
        if len(kinds) > 1:
            raise self._mixed(values, begin)
        if types and self._kind is None:
            self._kind_from = begin + next(row for row, value in enumerate(values) if value is not None)
            (self._kind,) = kinds
        if any(kind not in _KINDS for kind in types):  # a UUID, an address, ...: as the driver would print it
            values = [None if value is None else str(value) for value in values]
        elif memoryview in types:
            values = [None if value is None else bytes(value) for value in values]
        try:
            chunk = pa.array(values, self._type())
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            raise self._refused(values, begin) from None
        self._chunks.extend(chunk.chunks if isinstance(chunk, pa.ChunkedArray) else [chunk])
        return chunk.nbytes

    def finish(self) -> pa.ChunkedArray:
        """All chunks in one type."""
        known = [chunk for chunk in self._chunks if not pa.types.is_null(chunk.type)]
        try:
            kind = pa.unify_schemas(
                [pa.schema([("", chunk.type)]) for chunk in (known or self._chunks or [pa.nulls(0)])],
                promote_options="permissive",
            )[0].type
            return pa.chunked_array([chunk.cast(kind) for chunk in self._chunks], kind)
        except pa.ArrowException:  # whole numbers that no float holds, times with and without a zone
            raise InputError(
                f"{self._where}column {self.name!r} has values that do not fit in one type; CAST it in the query"
            ) from None

    def _type(self) -> pa.DataType | None:
        if self._kind is None or self._kind in _KINDS.values():
            return _ARROW.get(self._kind or "")
        return pa.large_string()

    def _mixed(self, values: Sequence[Any], begin: int) -> InputError:
        kinds = [(begin + row, _kind(value)) for row, value in enumerate(values) if value is not None]
        first_row, first = (self._kind_from, self._kind) if self._kind else kinds[0]
        alike = {first, *(_NUMBERS if first in _NUMBERS else ())}
        row, other = next((row, kind) for row, kind in kinds if kind not in alike)
        return InputError(
            f"{self._where}column {self.name!r} is {first} at row {first_row} and {other} at row {row}; "
            "CAST it to one type in the query"
        )

    def _refused(self, values: Sequence[Any], begin: int) -> InputError:
        """Finds the first row that Arrow does not take."""
        low, high = 0, len(values)
        while high - low > 1:
            middle = (low + high) // 2
            try:
                pa.array(values[low:middle], self._type())
                low = middle
            except (pa.ArrowException, TypeError, ValueError, OverflowError):
                high = middle
        what = "too large to be kept exactly" if self._kind in _NUMBERS else "not readable"
        return InputError(
            f"{self._where}column {self.name!r} is {what} at row {begin + low}; CAST it to text in the query"
        )
