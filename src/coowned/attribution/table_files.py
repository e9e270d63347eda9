"""Tables in files: Parquet, CSV and JSON lines, one file or a folder of them."""

import contextlib
import dataclasses
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

from coowned.attribution.content_files import ContentFiles, one_schema, open_parquet
from coowned.attribution.examples import AttributedExamples
from coowned.attribution.identifiers import Location, one_line
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
from coowned.files import file_states, read_head
from coowned.progress import Progress, counted

if TYPE_CHECKING:
    from coowned.attribution.sources import DataSource

pc: Any = pyarrow.compute  # its functions are created at import, so type checkers do not see them

_BLOCK_BYTES = 1 << 24  # bytes of a file that are parsed at once
_JSON_KINDS = {
    type(None): "null", str: "text", bool: "true or false", int: "an integer", float: "a number",
    dict: "an object", list: "a list",
}  # fmt: skip
_LIST = _JSON_KINDS[list]
ID_KINDS = ("text", "an integer")
_LARGEST_BLOCK = 1 << 30  # a row longer than this is refused
_NULL = re.compile(rb"null(?<![:,]null)(?<![:,] null)")  # but for nearly all those that are a field's value
_DEEPEST = 1000  # brackets of one line that Arrow's reader may see: it needs stack for each that is open
_PEEKED_LINES = 1000  # lines of JSON that decide which fields are text


def _reader(kind: str, files: str):
    """Returns the public reader of one kind of file; all of them take the arguments of `from_table`."""

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
    """Reads attributed examples from files of one kind: parquet, csv or jsonl."""
    table, where = _read_all(kind, path, options)
    table = table if kind == "parquet" else with_inferred_types(table)
    return attribute_table(table, options, where, user_keys=user_keys, aliases=aliases)


def read_parquet_table(path: str | os.PathLike[str]) -> pa.Table:
    """Reads a Parquet file, or a folder of them, as one table."""
    return _read_all("parquet", path, DataOptions())[0]


def read_small_table(path: str | os.PathLike[str]) -> pa.Table:
    """Reads a small Parquet, CSV or JSON-lines file that goes with the data, by its suffix; CSV columns are text."""
    suffix = os.path.splitext(path)[1].lower()
    kind = next((kind for kind, known in SUFFIXES.items() if suffix in known), "csv")
    return _read_all(kind, path, DataOptions())[0]


def _read_all(kind: str, path: str | os.PathLike[str], options: DataOptions) -> tuple[pa.Table, Location]:
    """Returns the rows of all files, and where they came from."""
    read = READERS[kind]
    files = files_of(path, SUFFIXES["parquet" if kind == _METADATA else kind])
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
    """Concatenates tables with the union of their fields, in order of appearance; ids and users must be in every file.

    Nobody's cell or field of content stops the others.
    """
    if len(tables) == 1:
        return tables[0]
    metadata = _metadata_columns(options)
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


def _names(schema: pa.Schema) -> list[str]:
    return [schema.field(number).name for number in range(len(schema))]


def files_of(path: str | os.PathLike[str], suffixes: tuple[str, ...]) -> list[Path]:
    """Returns the file itself, or the folder's files with these suffixes, by name; a leading . or _ hides a file."""
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
    with open_parquet(file) as parquet:
        return parquet.read(use_threads=True)


def _read_parquet_metadata(file: Path, options: DataOptions) -> pa.Table:
    """Reads ids and users only; reads everything if one of these columns is missing or duplicated, for the error."""
    with open_parquet(file) as parquet:
        names, wanted = _names(parquet.schema_arrow), _metadata_columns(options)
        if any(names.count(name) != 1 for name in wanted):
            return parquet.read(use_threads=True)
        found = parquet.read(wanted, use_threads=True).select(wanted)
        return found if wanted else pa.table({_ROW: pa.nulls(parquet.metadata.num_rows)})


def _metadata_columns(options: DataOptions) -> list[str]:
    """Returns the columns of ids and users."""
    return list(dict.fromkeys(name for name in (*options.user_columns(), options.example_id) if name is not None))


_METADATA, _ROW = "parquet metadata", "coowned.row"


def _read_csv_file(file: Path, _: DataOptions) -> pa.Table:
    """Reads all cells as text: with inferred types one person's cell could change everybody's."""
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
    """Returns an error that names the row, counted from 0 after the header, but no cell: cells are private data."""
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
    """Returns whether the reader took text for times, rounded integers to floats or made -0.0 of -0, at any depth."""
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
    """Returns whether Arrow's reader could misread the file or crash.

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


READERS = {
    "parquet": _read_parquet_file,
    _METADATA: _read_parquet_metadata,
    "csv": _read_csv_file,
    "jsonl": _read_json_file,
}


def _peek_schema(file: Path) -> pa.Schema | None:
    """Returns a schema that keeps text fields as text, since the reader would turn what looks like a date into one."""
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
    """Yields the lines that are not blank, with their numbers, counted from 1."""
    with file.open("rb") as lines:
        yield from ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def _read_json_values(file: Path, options: DataOptions) -> pa.Table:
    """Reads line by line what Arrow's reader refuses: a field of several types becomes text, a bad line is an error."""
    metadata = [*options.user_columns(), options.example_id]
    columns: dict[str, list[Any]] = {}
    numbers: list[int] = []  # the line of each row
    for number, line in lines_of(file):
        fields = _json_object(line, metadata, f"{file}, line {number}", is_first=number == 1)
        for name in fields:
            columns.setdefault(name, [None] * len(numbers))
        for name, values in columns.items():
            values.append(fields.get(name))
        numbers.append(number)
    for name in metadata:
        kinds = [
            (number, json_kind(value))
            for number, value in zip(numbers, columns.get(name or "", [None] * len(numbers)), strict=True)
            if value is not None
        ]
        other = next(((number, kind) for number, kind in kinds if (kind == _LIST) != (kinds[0][1] == _LIST)), None)
        if other is not None:
            raise InputError(
                f"{file}, line {other[0]}: {name!r} is {other[1]} here and {kinds[0][1]} in an earlier line; use one "
                "type"
            )
        wrong = next(((number, kind) for number, kind in kinds if kind not in ID_KINDS), None)
        if wrong and name == options.example_id:
            raise InputError(f"{file}, line {wrong[0]}: {not_an_id(name, wrong[1])}")
    names = [name.encode("utf-8", "replace").decode() for name in columns]
    arrays = [values_to_arrow(values, exact_text if name in metadata else None) for name, values in columns.items()]
    return pa.table(arrays, names=names)


def _json_object(line: bytes, metadata: Sequence[str | None], where: str, *, is_first: bool) -> dict[str, Any]:
    """Returns the fields of one line; bytes that are not UTF-8 are an error in ids and users, elsewhere replaced."""
    text = line.decode("utf-8-sig" if is_first else "utf-8", "replace")
    try:
        fields = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON ({one_line(error)}); write one complete object per line") from None
    if not isinstance(fields, dict):
        raise InputError(f"{where}: {json_kind(fields)} where an object was expected; write one object per line")
    for name in metadata:
        if "\ufffd" in text and "\ufffd" in str(fields.get(name)) and "\ufffd".encode() not in line:
            raise InputError(f"{where}: {name!r} is not UTF-8; save the file as UTF-8")
    return fields


def not_an_id(name: str, kind: str) -> str:
    """Returns the error text for an id that is neither an integer nor text: its spelling would depend on others."""
    return f"{name!r} must be an integer or text, not {kind}; write it as text"


def json_kind(value: Any) -> str:
    """Returns the name of a JSON value's type, for errors."""
    return _JSON_KINDS[type(value)]


def read_source(kind: str, source: "DataSource", progress: Progress | None) -> AttributedExamples:
    """Reads a `DataSource` of one of these formats."""
    del progress
    return read_table(kind, source.path, source, aliases=source.aliases)


def read_without_content(kind: str, source: "DataSource", progress: Progress | None) -> AttributedExamples | None:
    """Reads ids and users and leaves content in the files; None for formats whose files are read as a whole.

    Guarantees:
      - Ids, users and rows are those of reading everything.   (test_content_is_left_in_the_files)
    Cost: memory for ids and users.
    """
    del progress
    if kind != "parquet":
        return None
    files = files_of(source.path, SUFFIXES[kind])
    states = file_states(*files)
    table, where = _read_all(_METADATA, source.path, source)
    numbered = table.append_column(_ROW, pa.array(np.arange(table.num_rows)))
    examples = attribute_table(numbered, source, where, aliases=source.aliases)
    counts = np.diff(where.first_rows).tolist()
    content = ContentFiles(
        files=tuple(zip(files, counts, strict=True)),
        states=states,
        rows=np.asarray(examples.payload[_ROW]),
        left_out=() if source.user is None else (source.user,),
    )
    return dataclasses.replace(examples, payload=examples.payload.select([]), content=content)


def recognizes(kind: str, path: Path) -> bool:
    """Returns whether a file begins like one of this format; a CSV file may begin with anything."""
    begins = {"parquet": b"PAR1", "jsonl": b"{"}.get(kind)
    return begins is not None and path.is_file() and read_head(path).lstrip(b" \t\r\n").startswith(begins)
