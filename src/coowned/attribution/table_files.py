"""Tables in files: Parquet, CSV and JSON lines, one file or a folder of them."""

import contextlib
import itertools
import json
import mmap
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from coowned.attribution.examples import AttributedExamples
from coowned.attribution.identifiers import Location, one_line
from coowned.attribution.mail_boxes import read_head
from coowned.attribution.options import SUFFIXES, DataOptions
from coowned.attribution.tables import (
    EXACT,
    attribute_table,
    exact_text,
    join_chunks,
    keeps_its_meaning,
    spelled,
    table_options,
    valid_table,
    values_to_arrow,
    with_inferred_types,
    with_names_as_text,
)
from coowned.attribution.user_keys import Aliases, UserKeyRules
from coowned.codec import unique_keys
from coowned.errors import InputError
from coowned.progress import Progress, counted

if TYPE_CHECKING:
    from coowned.attribution.sources import DataSource

pc: Any = pyarrow.compute  # its functions are created at import, so type checkers do not see them

_BLOCK_BYTES = 1 << 24  # bytes of a file that are parsed at once
_JSON_KINDS = {
    type(None): "null", str: "text", bool: "true or false", int: "an integer", float: "a number",
    dict: "an object", list: "a list",
}  # fmt: skip
ID_KINDS = ("text", "an integer")
_LARGEST_BLOCK = 1 << 30  # a row longer than this is refused
_NULL = re.compile(rb"null(?<![:,]null)(?<![:,] null)")  # but for nearly all those that are a field's value
_DEEPEST = 1000  # brackets of one line that Arrow's reader may see: it needs stack for each that is open
_PEEKED_LINES = 1000  # lines of JSON that decide which fields are text


def _reader(kind: str, files: str):
    """The public reader of one kind of file; all of them have the arguments of `from_table`."""

    def read(
        path: str | os.PathLike[str],
        users: str | Sequence[str] | None = None,
        user: str | None = None,
        example_id: str | None = None,
        separator: str | None = None,
        *,
        user_keys: UserKeyRules | None = None,
        aliases: Aliases | str | os.PathLike[str] | None = None,
        addresses: bool | None = None,
    ) -> AttributedExamples:
        options = table_options(users, user, example_id, separator, addresses)
        return read_table(kind, path, options, user_keys=user_keys, aliases=aliases)

    read.__name__ = read.__qualname__ = f"read_{kind}"
    read.__doc__ = f"Attributed examples from {files}, or a folder of them; arguments as in `from_table`."
    return read


read_parquet = _reader("parquet", "a Parquet file")
# Ids and users are read as text: 007 stays 007, and 0704.0001 does not become a number.
read_csv = _reader("csv", "a CSV file with a header line, ids and users as text")
read_jsonl = _reader("jsonl", "JSON lines, one object per line")


def read_table(
    kind: str,
    path: str | os.PathLike[str],
    options: DataOptions,
    *,
    user_keys: UserKeyRules | None = None,
    aliases: Aliases | str | os.PathLike[str] | None = None,
) -> AttributedExamples:
    """Attributed examples from files of one kind: parquet, csv or jsonl."""
    table, where = _read_all(kind, path, options)
    table = table if kind == "parquet" else with_inferred_types(table)
    return attribute_table(table, options, where, user_keys=user_keys, aliases=aliases)


def read_parquet_table(path: str | os.PathLike[str]) -> pa.Table:
    """A Parquet file, or a folder of them, as one table."""
    return _read_all("parquet", path, DataOptions())[0]


def read_small_table(path: str | os.PathLike[str]) -> pa.Table:
    """A Parquet, CSV or JSON-lines file that goes with the data, told by its suffix; columns of a CSV file are text."""
    suffix = os.path.splitext(path)[1].lower()
    kind = next((kind for kind, known in SUFFIXES.items() if suffix in known), "csv")
    return _read_all(kind, path, DataOptions())[0]


def _read_all(kind: str, path: str | os.PathLike[str], options: DataOptions) -> tuple[pa.Table, Location]:
    """The rows of all files, and where they came from."""
    read = {"parquet": _read_parquet_file, "csv": _read_csv_file, "jsonl": _read_json_file}[kind]
    files = files_of(path, SUFFIXES[kind])
    tables: list[pa.Table] = []
    for file in files:
        try:
            table = read(file, options)
            _names(table.schema)
        except UnicodeDecodeError as error:
            raise InputError(
                f"{file}: the name of a column is not UTF-8 at byte {error.start} of it; save the file as UTF-8"
            ) from error
        except (OSError, pa.ArrowException) as error:
            raise InputError(
                f"{file}: cannot be read ({one_line(error).rstrip('.')}; the file has {file.stat().st_size:,} bytes); "
                "write it again, or name its format"
            ) from error
        table = valid_table(table, options, f"{file}: ")
        tables.append(with_names_as_text(table, options) if kind == "jsonl" else table)
    location = Location(str(path), [(str(file), table.num_rows) for file, table in zip(files, tables, strict=True)])
    if kind == "jsonl":
        return _joined(files, tables, options), location
    one_schema(files, [table.schema for table in tables])
    return tables[0] if len(tables) == 1 else pa.concat_tables(tables, promote_options="permissive"), location


def _joined(files: Sequence[Path], tables: Sequence[pa.Table], options: DataOptions) -> pa.Table:
    """One table of all fields, in the order in which they first appear; ids and users must be in every file.

    Nobody's cell or field of content stops the others.
    """
    if len(tables) == 1:
        return tables[0]
    metadata = [name for name in (*options.user_columns(), options.example_id) if name is not None]
    named = [[table.schema.field(name) for name in metadata if name in table.column_names] for table in tables]
    one_schema(files, list(map(pa.schema, named)))
    names = dict.fromkeys(name for table in tables for name in table.column_names)
    columns = {
        name: join_chunks(
            [table.column(name) if name in table.column_names else pa.nulls(table.num_rows) for table in tables],
            exact_text if name in metadata else None,
        )
        for name in names
    }
    return pa.table(columns)


def one_schema(files: Sequence[str | Path], schemas: Sequence[pa.Schema]) -> pa.Schema:
    """The schema of all these files together; files with other columns or types are refused."""
    together = schemas[0]
    for file, schema in zip(files, schemas, strict=True):
        if schema.names != schemas[0].names:
            raise InputError(
                f"{file}: its columns are {schema.names}, those of {files[0]} are {schemas[0].names}; "
                "all files of a folder need the same columns"
            )
        try:
            if schema != schemas[0]:
                together = pa.unify_schemas([together, schema], promote_options="permissive")
        except pa.ArrowException as error:
            raise InputError(
                f"{file}: its column types differ from those of {files[0]} ({one_line(error)}); "
                "all files of a folder need the same types"
            ) from error
    return together


def _names(schema: pa.Schema) -> list[str]:
    return [schema.field(number).name for number in range(len(schema))]


def files_of(path: str | os.PathLike[str], suffixes: tuple[str, ...]) -> list[Path]:
    """The file itself, or the folder's files with these suffixes by name; those that start with . or _ do not count."""
    root = Path(path)
    if not root.is_file() and not root.is_dir():
        raise InputError(f"{root}: no such file or folder; check the path")
    files = [root] if root.is_file() else sorted(
        file
        for file in root.rglob("*")
        if file.name.lower().endswith(suffixes)
        and file.is_file()
        and not any(part.startswith((".", "_")) for part in file.relative_to(root).parts)
    )  # fmt: skip
    if not files:
        raise InputError(f"{root}: the folder has no {' or '.join(suffixes)} file; check the path or the format")
    for file in files:
        if file.stat().st_size == 0:
            raise InputError(f"{file}: the file is empty; add data or remove it")
    return files


def _read_parquet_file(file: Path, _: DataOptions) -> pa.Table:
    # Without prefetching, peak memory is the table and the current pages.
    with pyarrow.parquet.ParquetFile(file, memory_map=True, pre_buffer=False) as parquet:
        return parquet.read(use_threads=True)


def _read_csv_file(file: Path, _: DataOptions) -> pa.Table:
    """All cells as text: types that are inferred from cells would let one person's cell change everybody's."""
    parse = pyarrow.csv.ParseOptions(delimiter="\t" if file.suffix.lower() == ".tsv" else ",", newlines_in_values=True)
    block_bytes = _BLOCK_BYTES
    while True:
        read = pyarrow.csv.ReadOptions(block_size=block_bytes, use_threads=False)
        try:
            with pyarrow.csv.open_csv(file, read_options=read, parse_options=parse) as reader:  # for the header
                types = dict.fromkeys(_names(reader.schema), pa.large_string())
            texts = pyarrow.csv.ConvertOptions(
                column_types=types, strings_can_be_null=False, quoted_strings_can_be_null=False, check_utf8=False
            )
            with pyarrow.csv.open_csv(file, read_options=read, parse_options=parse, convert_options=texts) as reader:
                return pa.Table.from_batches(list(reader), reader.schema)
        except pa.ArrowInvalid as error:
            if "straddl" not in str(error):
                raise _csv_error(file, error) from error
            # One row is longer than a block: the next try has room for it.
            why = "an unclosed quote joins all rows after it into one"
            block_bytes = _larger_block(file, block_bytes, why)


def _csv_error(file: Path, error: pa.ArrowInvalid) -> InputError:
    """Names the row, counted from 0 after the header, and never shows a cell: cells are private data."""
    message = one_line(error)
    row = re.search(r"Row #(\d+):", message)
    where = f"{file}, row {int(row[1]) - 2}" if row and int(row[1]) > 1 else str(file)
    width = re.search(r"Expected (\d+) columns, got (\d+)", message)
    if width:
        return InputError(
            f"{where}: {counted(int(width[2]), 'cell')} where the header has {width[1]}; quote cells that contain the "
            "delimiter or a quote"
        )
    if "Empty CSV" in message:
        return InputError(f"{where}: the file has no header line; add one")
    return InputError(f"{where}: {message.split(' conversion error')[0]}; correct the file or name its format")


def _larger_block(file: Path, block_bytes: int, why: str) -> int:
    if block_bytes >= min(file.stat().st_size, _LARGEST_BLOCK):
        raise InputError(f"{file}: a row has more than {block_bytes:,} bytes; {why}: correct it")
    return block_bytes * 8


def _read_json_file(file: Path, options: DataOptions) -> pa.Table:
    if _breaks_arrow(file):
        return _read_json_values(file, options)
    schema = _peek_schema(file)
    block_bytes = _BLOCK_BYTES
    while True:
        try:
            table = pyarrow.json.read_json(
                file,
                read_options=pyarrow.json.ReadOptions(block_size=block_bytes, use_threads=True),
                parse_options=pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="infer"),
            )
            if any(map(_lost_its_spelling, table.columns)):
                return _read_json_values(file, options)
            columns = [column if keeps_its_meaning(column) else spelled(column) for column in table.columns]
            return pa.table(columns, names=_names(table.schema))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            if "straddl" not in str(error):
                return _read_json_values(file, options)
            block_bytes = _larger_block(file, block_bytes, "is it one object per line?")


def _lost_its_spelling(column: pa.ChunkedArray) -> bool:
    """Whether the reader took texts for times, rounded integers among floats or made -0.0 of -0, at any depth."""
    kind = column.type
    if pa.types.is_struct(kind):
        return any(_lost_its_spelling(pc.struct_field(column, name)) for name in _names(pa.schema(list(kind))))
    if pa.types.is_nested(kind):
        return _lost_its_spelling(pc.list_flatten(column))
    if not pa.types.is_floating(kind):
        return pa.types.is_temporal(kind)
    values = np.concatenate([np.zeros(0), *(np.asarray(chunk.drop_null()) for chunk in column.chunks)])
    return bool(np.any((np.abs(values) >= EXACT) | ((values == 0) & np.signbit(values))))


def _breaks_arrow(file: Path) -> bool:
    """Whether Arrow's reader could misread the file or crash.

    It loses nulls at the beginning of a list, and crashes on a null instead of an object and on deep nesting.

    References: https://github.com/apache/arrow/issues/51305, https://github.com/apache/arrow/issues/47409
    """
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for null in _NULL.finditer(content):
            before = content[max(0, null.start() - 64) : null.start()].rstrip(b" \t\r")
            if not before or before.endswith((b"\n", b"}", b"[", b"\xef\xbb\xbf")):
                return True
        lines = (line for line in iter(content.readline, b"") if len(line) > _DEEPEST)
        return any(line.count(b"[") + line.count(b"{") > _DEEPEST for line in lines)


def _peek_schema(file: Path) -> pa.Schema | None:
    """Fields that begin as text stay text: left to itself the reader makes dates of what looks like some."""
    kinds: dict[str, pa.DataType] = {}
    for _, line in itertools.islice(lines_of(file), _PEEKED_LINES):
        with contextlib.suppress(ValueError, RecursionError):  # the reader will report the error
            fields = json.loads(line)
            for name, value in fields.items() if isinstance(fields, dict) else ():
                listed = isinstance(value, list)
                first = next((entry for entry in value if entry is not None), None) if listed else value
                if isinstance(first, str):
                    kinds.setdefault(name, pa.list_(pa.string()) if listed else pa.string())
    try:
        return pa.schema(list(kinds.items())) if kinds else None
    except UnicodeEncodeError:
        return None


def lines_of(file: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers, counted from 1."""
    with file.open("rb") as lines:
        yield from ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def _read_json_values(file: Path, options: DataOptions) -> pa.Table:
    """What Arrow's reader refuses, read line by line: a field of several types becomes text, a bad line is an error."""
    metadata = [*options.user_columns(), options.example_id]
    columns: dict[str, list[Any]] = {}
    numbers: list[int] = []  # the line of each row
    for number, line in lines_of(file):
        where = f"{file}, line {number}"
        text = line.decode("utf-8-sig" if number == 1 else "utf-8", "replace")
        try:
            fields = json.loads(text, object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: not JSON ({one_line(error)}); write one complete object per line") from None
        if not isinstance(fields, dict):
            raise InputError(f"{where}: {json_kind(fields)} where an object was expected; write one object per line")
        for name in fields:
            columns.setdefault(name, [None] * len(numbers))
        for name in metadata:
            if "\ufffd" in text and "\ufffd" in str(fields.get(name)) and "\ufffd".encode() not in line:
                raise InputError(f"{where}: {name!r} is not UTF-8; save the file as UTF-8")
        for name, values in columns.items():
            values.append(fields.get(name))
        numbers.append(number)
    for name in metadata:
        kinds = [(row, json_kind(value)) for row, value in enumerate(columns.get(name or "", ())) if value is not None]
        other = next((row for row, kind in kinds if (kind == "a list") != (kinds[0][1] == "a list")), None)
        if other is not None:
            raise InputError(
                f"{file}, line {numbers[other]}: {name!r} is {json_kind(columns[name or ''][other])} here and "
                f"{kinds[0][1]} in an earlier line; use one type"
            )
        wrong = next(((row, kind) for row, kind in kinds if kind not in ID_KINDS), None)
        if wrong and name == options.example_id:
            raise InputError(f"{file}, line {numbers[wrong[0]]}: {not_an_id(name, wrong[1])}")
    names = [name.encode("utf-8", "replace").decode() for name in columns]
    arrays = [values_to_arrow(values, exact_text if name in metadata else None) for name, values in columns.items()]
    return pa.table(arrays, names=names)


def not_an_id(name: str, kind: str) -> str:
    """What is said of an id that is neither an integer nor text, in any line: its spelling would depend on others."""
    return f"{name!r} must be an integer or text, not {kind}; write it as text"


def json_kind(value: Any) -> str:
    """What errors call a JSON value."""
    return _JSON_KINDS[type(value)]


def read_source(kind: str, source: "DataSource", progress: Progress | None) -> AttributedExamples:
    """What a `DataSource` of one of these formats describes."""
    del progress
    return read_table(kind, source.path, source, aliases=source.aliases)


def recognizes(kind: str, path: Path) -> bool:
    """Whether a file begins as those of this format do; CSV may begin in any way."""
    begins = {"parquet": b"PAR1", "jsonl": b"{"}.get(kind)
    return begins is not None and path.is_file() and read_head(path).lstrip(b" \t\r\n").startswith(begins)
