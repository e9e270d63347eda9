"""Tables in databases: the rows of a query, over any DB-API or ADBC connection."""

import contextlib
import os
import re
import sqlite3
import sys
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from coowned.attribution.examples import AttributedExamples
from coowned.attribution.identifiers import Location, one_line
from coowned.attribution.options import DataOptions
from coowned.attribution.tables import (
    attribute_table,
    exact_text,
    join_chunks,
    table_options,
    to_arrow_table,
    valid_table,
    values_to_arrow,
    with_inferred_types,
    with_names_as_text,
)
from coowned.attribution.user_keys import Aliases, UserKeyRules
from coowned.errors import InputError
from coowned.files import read_head
from coowned.progress import Progress, reporting

if TYPE_CHECKING:
    from coowned.attribution.sources import DataSource

_FIRST_ROWS = 1 << 10  # rows of the first chunk
_MOST_ROWS = 1 << 16  # rows of any chunk
_CHUNK_BYTES = 16 << 20  # of a chunk as Arrow; as Python objects it is a few times that


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
    addresses: bool | None = None,
    name: str = "the query",
    progress: Progress | None = None,
) -> AttributedExamples:
    """Reads attributed examples from the rows of a query; `users`, `user`, `separator`, ... as in `from_table`.

    Args:
      query: one SELECT. It must not choose or order rows by content (`WHERE text LIKE ...`, `ORDER BY length(text)`):
        what it leaves out is a selection that no certificate sees.
      connection: an open DB-API 2 connection (sqlite3, psycopg, ...) or an ADBC one; it is not closed, nor is anything
        committed.
      example_id: the column with the ids, never derived from content. No default: without ORDER BY the number of
        a row says where the database keeps it, which can depend on content.
      parameters: for the placeholders of the query, in the connection's own style.
      name: what errors call the query.
      progress: called after each chunk of rows as progress(0.0, message): the total is not known.

    A column is integers, numbers, text, ... by what it holds (where the driver gives Arrow, by its own types); integers
    among numbers become numbers, NULL is null, and any other mixture is read as text, so that no cell can stop a run.
    Training takes each cell by itself, whatever its column's type became. A repeated name is an error. Without
    ORDER BY the rows may come in another order next time; S does not depend on it, except with `ties="input"`, but a
    training run is only resumed with the same order: write `ORDER BY` the id.

    Guarantees:
      - The same rows give the same examples as `from_table`, however they are cut in chunks.   (test_same_as_a_table)
      - The row number is never an id.                                                          (test_ids_are_asked_for)
      - A column of mixed types is text.                                                        (test_mixed_columns)

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
    options = table_options(users, user, example_id, separator, addresses)
    return read_query(
        query, connection, options, parameters=parameters, user_keys=user_keys, aliases=aliases, name=name,
        progress=progress,
    )  # fmt: skip


def read_query(
    query: str,
    connection: Any,
    options: DataOptions,
    *,
    parameters: Sequence[Any] | dict[str, Any] = (),
    user_keys: UserKeyRules | None = None,
    aliases: Aliases | str | os.PathLike[str] | None = None,
    name: str = "the query",
    progress: Progress | None = None,
) -> AttributedExamples:
    """Does what `read_sql` does, with the options of a source."""
    where = Location(name)
    if not isinstance(query, str) or not query.strip():
        raise InputError(f"{where}the query must be text, not {query!r}; write a SELECT")
    if options.example_id is None:
        raise InputError(
            f"{where}query results have no row order, so row numbers cannot be ids; name the column with the ids "
            "(example_id=, --example-id)"
        )
    if not callable(getattr(connection, "cursor", None)):
        raise InputError(f"{where}{type(connection).__name__} is not a DB-API or ADBC connection: it has no cursor()")
    table = _table_of(query, connection, parameters, options, where, reporting(progress))
    for number, name in enumerate(table.column_names):
        if table.column_names.index(name) != number:
            raise InputError(f"{where}two columns are named {name!r}; rename one in the query with AS")
    table = valid_table(table, options, where)
    return attribute_table(table, options, where, user_keys=user_keys, aliases=aliases)


@contextlib.contextmanager
def open_sqlite(path: str | os.PathLike[str]) -> Iterator[sqlite3.Connection]:
    """Opens a read-only connection to a SQLite file.

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
        raise InputError(f"{file}: cannot be opened ({one_line(error)}); check the file and its permissions") from error
    with contextlib.closing(connection):
        connection.set_authorizer(_reading_only)
        connection.text_factory = lambda text: text.decode("utf-8", "replace")
        yield connection


def _reading_only(action: int, *_: object) -> int:
    reading = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)
    return sqlite3.SQLITE_OK if action in reading else sqlite3.SQLITE_DENY


def _table_of(
    query: str, connection: Any, parameters: Any, options: DataOptions, where: Location, progress: Progress
) -> pa.Table:
    """Returns the result of a query as a table; types are the driver's if it returns Arrow, else inferred."""
    metadata = (*options.user_columns(), options.example_id)
    with _named_errors(connection, where), contextlib.closing(connection.cursor()) as cursor:
        cursor.execute(query, *([parameters] if parameters else []))
        if hasattr(cursor, "fetch_arrow_table"):
            return to_arrow_table(cursor.fetch_arrow_table())
        if cursor.description is None:
            raise InputError(f"{where}the query returns no rows; write a SELECT")
        names = [str(column[0]) for column in cursor.description]
        texts = [exact_text if name in metadata else None for name in names]
        columns: list[list[pa.Array]] = [[] for _ in names]  # chunks of each column
        size, done = _FIRST_ROWS, 0
        while rows := cursor.fetchmany(size):
            if isinstance(rows[0], Mapping):
                raise InputError(f"{where}the connection returns rows as mappings; configure it to return tuples")
            for chunks, values, text in zip(columns, zip(*rows, strict=True), texts, strict=True):
                chunks.append(values_to_arrow(values, text))
            done += len(rows)
            # The next chunk has room for a few wide rows or for many narrow ones.
            num_bytes = max(1, sum(chunks[-1].nbytes for chunks in columns))
            size = max(1, min(_MOST_ROWS, len(rows) * _CHUNK_BYTES // num_bytes))
            progress(0.0, f"reading rows: {done:,}")
    joined = [join_chunks(chunks, text) for chunks, text in zip(columns, texts, strict=True)]
    return with_inferred_types(with_names_as_text(pa.table(joined, names=names), options))


@contextlib.contextmanager
def _named_errors(connection: Any, where: Location) -> Iterator[None]:
    """Turns the driver's errors into InputError, without any cell they may quote: cells are private data."""
    package = sys.modules.get(type(connection).__module__.split(".")[0])
    # On the connection by an extension of the DB-API that most drivers have. Errors kept elsewhere pass as they are.
    kept = [getattr(place, "Error", None) for place in (connection, package)]
    errors = tuple(kind for kind in kept if isinstance(kind, type) and issubclass(kind, Exception))
    try:
        yield
    except errors as error:
        message = one_line(error)
        undecodable = re.search(r"Could not decode to UTF-8 column '(.*?)' with text", message)
        if undecodable:
            raise InputError(
                f"{where}column {undecodable[1]!r} contains text that is not UTF-8; correct it or CAST it to BLOB"
            ) from None
        raise InputError(f"{where}the database rejected the query ({message.rstrip('.')}); correct it") from error


def read_source(kind: str, source: "DataSource", progress: Progress | None) -> AttributedExamples:
    """Reads a `DataSource` of this format."""
    del kind
    if source.query is None:
        raise InputError(f"{source.path}: a database needs a query for the rows; add --query 'SELECT ...'")
    with open_sqlite(source.path) as connection:
        return read_query(
            source.query, connection, source, aliases=source.aliases, name=str(source.path), progress=progress
        )


def recognizes(kind: str, path: Path) -> bool:
    """Returns whether a file is a SQLite database."""
    del kind
    return path.is_file() and read_head(path).startswith(b"SQLite format 3\0")
