"""Data sources read by Spark: the same files, options and columns as on one machine."""

import collections
import csv
import dataclasses
import functools
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet

from coowned.attribution.examples import read_aliases
from coowned.attribution.identifiers import Location, one_line
from coowned.attribution.options import SUFFIXES
from coowned.attribution.sources import DataSource, detect_format
from coowned.attribution.table_files import ID_KINDS, files_of, json_kind, not_an_id, one_schema
from coowned.attribution.tables import attribute_table
from coowned.attribution.user_keys import read_keys
from coowned.codec import unique_keys
from coowned.errors import InputError
from coowned.spark import functions as F
from coowned.spark.attribution import SparkGraph, attribute, column_named
from coowned.spark.checkpoints import hadoop_path
from coowned.spark.executors import check_python
from coowned.spark.session import spark_errors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession

_UNREADABLE = {
    "parquet": "not complete Parquet data",
    "csv": "a row has more or fewer cells than the header; quote cells that contain the delimiter or a quote",
    "jsonl": "a line is not one complete object",
}
_FILES_AT_ONCE = 8
_HEADER_BYTES = 1 << 20
_NULL = json_kind(None)
# Integers are read as text: the type of an id depends on nobody's cell.
_ARROW = {"text": pa.string(), "an integer": pa.string(), "a number": pa.float64(), "true or false": pa.bool_()}

_Kind = tuple[bool, str]  # whether it is inside a list, and what it is


def is_address(path: str | os.PathLike[str]) -> bool:
    """Returns whether only Spark can open the path: hdfs://…, s3a://…"""
    return "://" in str(path)


def check_source(source: DataSource) -> str:
    """Returns the format of a source that Spark reads as one machine does; raises an error for any other."""
    guess = _kind_of_address if is_address(source.path) else detect_format
    kind = source.format or guess(source.path)
    if kind not in SUFFIXES:
        raise InputError(f"{source.path}: Spark reads parquet, csv and jsonl, not {kind}; use the local engine")
    if source.example_id is None:
        raise InputError(f"{source.path}: Spark has no row numbers; name the column with the ids (--example-id)")
    source.refuse_unused(kind)
    return kind


def _kind_of_address(path: str | os.PathLike[str]) -> str:
    name = str(path).rstrip("/").lower()
    for kind, suffixes in SUFFIXES.items():
        if name.endswith(suffixes):
            return kind
    raise InputError(f"{path}: unknown format; choose one with --format {'|'.join(SUFFIXES)}")


def attribute_source(spark: "SparkSession", source: DataSource) -> SparkGraph:
    """Reads and attributes a `DataSource`: Parquet, CSV or JSON lines with a column of ids.

    Its path may be an address of any file system that Spark knows (hdfs://…, s3a://…). The columns of every file are
    looked at first, from the driver; JSON lines are looked through once, on the executors.

    Guarantees:
      - The same graph as `source.read()`.                       (test_sources_are_read_as_locally)
      - Files whose columns of ids and users differ are refused. (test_folders_of_other_columns_are_refused)
      - What is refused locally for its bytes or types is here.  (test_bad_files_are_refused_as_locally)
    """
    kind = check_source(source)
    unprotected = [] if source.unprotected is None else read_keys(source.unprotected)
    aliases = read_aliases(source.aliases)
    named = str(source.path)
    try:
        with spark_errors(named, unreadable=_UNREADABLE[kind]):
            return attribute(
                _read(spark, source, kind),
                None if source.user is not None and not source.users else source.users or ["users"],
                source.user,
                example_id=source.example_id or "",
                separator=source.separator,
                aliases=aliases,
                addresses=source.addresses,
                unprotected=unprotected,
            )
    except InputError as error:
        if str(error).startswith(named):
            raise
        raise InputError(f"{named}: {error}") from error


def check_rows(source: DataSource) -> None:
    """Raises an error for data whose rows Spark cannot write as shards."""
    if check_source(source) != "parquet":
        raise InputError(
            f"{source.path}: on Spark, shards are written from Parquet, whose columns have types; write the data as "
            "Parquet, or use the local engine"
        )
    if source.user is not None:
        raise InputError(
            f"{source.path}: shards need one row per example, with a list of users (--users), not one row per pair"
        )


def read_rows(spark: "SparkSession", source: DataSource) -> "DataFrame":
    """Reads all columns of Parquet data, in which an example has one row, for `coowned.spark.write_shards`.

    Guarantees:
      - Files with other columns or types are refused, as one machine does.   (test_rows_of_other_columns_are_refused)
    """
    check_rows(source)
    files = _files(spark, source.path, SUFFIXES["parquet"])
    with spark_errors(str(source.path), unreadable=_UNREADABLE["parquet"]):
        schema = one_schema(list(files.values()), _schemas(spark, files, "parquet"))
        return read_parquet(spark, source.path, schema.names, lambda found: None)


def read_parquet(
    spark: "SparkSession",
    path: str | os.PathLike[str],
    columns: Sequence[str],
    check: Callable[[pa.Schema], object],
) -> "DataFrame":
    """Reads these columns of a Parquet file, or of a folder of files with the same columns.

    Args:
      path: on this machine, or an address.
      check: called with the schema of all files together, before a row is read; refuses with InputError.
    """
    files = _files(spark, path, SUFFIXES["parquet"])
    schemas = _schemas(spark, files, "parquet")
    check(_shared_schema(files, schemas, columns))
    groups: dict[Any, list[str]] = {}
    for address, schema in zip(files, schemas, strict=True):
        groups.setdefault(tuple(schema.field(name).type for name in columns), []).append(address)
    tables = [_reader(spark).parquet(*_literal(group)) for group in groups.values()]
    tables = [table.select(*map(column_named, columns)) for table in tables]
    return functools.reduce(lambda one, other: one.unionByName(other), tables)


def _shared_schema(files: dict[str, str], schemas: list[pa.Schema], columns: Sequence[str]) -> pa.Schema:
    """Returns the columns of the first file; the named ones have the types of all files, the others are content."""
    names = list(files.values())
    named = [pa.schema([field for field in schema if field.name in columns]) for schema in schemas]
    try:
        fields = {field.name: field for field in one_schema(names, named)}
    except InputError:
        one_schema(names, schemas)  # says the same of all columns, as one machine does
        raise
    return pa.schema([fields.get(field.name, field) for field in schemas[0]])


def _schemas(spark: "SparkSession", files: dict[str, str], kind: str) -> list[pa.Schema]:
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        return list(pool.map(lambda address, name: _schema(spark, address, name, kind), files, files.values()))


def _read(spark: "SparkSession", source: DataSource, kind: str) -> "DataFrame":
    """Reads the columns of ids and users."""
    columns = list(dict.fromkeys([source.example_id or "", *source.user_columns()]))
    if kind == "parquet":
        return read_parquet(spark, source.path, columns, functools.partial(_refuse_columns, source))
    files = _files(spark, source.path, SUFFIXES[kind])
    if kind == "jsonl":
        return _read_json_lines(spark, source, files, columns)
    schemas = _schemas(spark, files, kind)
    _refuse_columns(source, _shared_schema(files, schemas, columns))
    groups: dict[tuple[str, ...], list[str]] = {}
    for address, schema in zip(files, schemas, strict=True):
        groups.setdefault((_delimiter(address), *schema.names), []).append(address)
    tables = [_read_csv(spark, group, header, columns) for (_, *header), group in groups.items()]
    table = functools.reduce(lambda one, other: one.unionByName(other), tables)
    if not _lines(spark, files).where("not valid").isEmpty():  # Spark has put a replacement character there
        for name in columns:
            if not table.where(column_named(name).contains("\ufffd")).isEmpty():
                raise InputError(f"column {name!r} is not UTF-8; save the file as UTF-8")
    return table


def _files(spark: "SparkSession", path: str | os.PathLike[str], suffixes: tuple[str, ...]) -> dict[str, str]:
    """Returns Spark's addresses of the file, or of the folder's files, with their names for errors."""
    if not is_address(path):
        files = {f"file://{file.resolve()}": str(file) for file in files_of(path, suffixes)}
    else:
        files = {file: file for file in _files_at(spark, str(path).rstrip("/"), suffixes)}
    for address, name in files.items():
        if address.rpartition("/")[2].startswith((".", "_")):
            raise InputError(f"{name}: Spark ignores files whose names begin with . or _; rename it")
    return files


def _files_at(spark: "SparkSession", path: str, suffixes: tuple[str, ...]) -> list[str]:
    """Does what `files_of` does, on any file system."""
    system, root = hadoop_path(spark, path)
    if not system.exists(root):
        raise InputError(f"{path}: no such file or folder; check the address")
    if system.getFileStatus(root).isFile():
        return [path]
    base, found = system.makeQualified(root).toString(), []
    listing = system.listFiles(root, True)
    while listing.hasNext():
        inside = listing.next().getPath().toString().removeprefix(base).strip("/")
        if inside.lower().endswith(suffixes) and not any(part.startswith((".", "_")) for part in inside.split("/")):
            found.append(f"{path}/{inside}")
    if not found:
        raise InputError(f"{path}: the folder has no {' or '.join(suffixes)} file; check the address or the format")
    return sorted(found)


def _reader(spark: "SparkSession") -> "DataFrameReader":
    # Folders named key=value add no column, as on one machine.
    return spark.read.option("recursiveFileLookup", "true")


def _literal(addresses: Iterable[str]) -> list[str]:
    """Escapes a path, which Spark would read as a glob pattern."""
    return [re.sub(r"([\[\]{}*?\\])", r"\\\1", address) for address in addresses]


def _delimiter(address: str) -> str:
    return "\t" if address.lower().endswith(".tsv") else ","


def _read_csv(spark: "SparkSession", addresses: list[str], names: list[str], columns: list[str]) -> "DataFrame":
    """Reads every column as text, an empty cell as the empty text; names: the header that all files have."""
    # Quotes doubled inside quotes, line breaks allowed in cells; whole rows, so that a ragged one is seen.
    table = _reader(spark).option("columnPruning", "false").csv(
        _literal(addresses), schema=", ".join(f"c{at} string" for at in range(len(names))), header=True,
        sep=_delimiter(addresses[0]), quote='"', escape='"', multiLine=True, mode="FAILFAST",
        maxColumns=len(names) + 20480, unescapedQuoteHandling="RAISE_ERROR",
    )  # fmt: skip
    last = f"c{len(names) - 1}"  # in a file with both kinds of line ends, Spark leaves half of the longer one here
    table = table.withColumn(last, F.regexp_replace(last, r"\r\z", ""))
    return table.select(*(F.coalesce(f"c{names.index(name)}", F.lit("")).alias(name) for name in columns))


def _schema(spark: "SparkSession", address: str, name: str, kind: str) -> pa.Schema:
    """Returns the columns of one file."""
    if kind == "parquet" and is_address(name):
        from pyspark.sql.pandas.types import to_arrow_schema

        return to_arrow_schema(_reader(spark).parquet(*_literal([address])).schema)
    try:
        if kind == "parquet":
            schema = pyarrow.parquet.read_schema(name)
            names = [schema.field(number).name for number in range(len(schema))]
            return pa.schema(list(zip(names, schema.types, strict=True)))
        with _open(spark, name) as stream:
            return pa.schema([(cell, pa.string()) for cell in _header(stream, name)])
    except UnicodeError as error:
        raise InputError(f"{name}: the name of a column is not UTF-8; save the file as UTF-8") from error
    except (OSError, pa.ArrowException, csv.Error) as error:
        raise InputError(f"{name}: cannot be read ({one_line(error)}); write it again, or name its format") from error


def _open(spark: "SparkSession", name: str) -> io.BufferedReader:
    """Opens a file; of one that only Spark can find, the first bytes, enough for any header."""
    if not is_address(name):
        return io.BufferedReader(pa.input_stream(name))  # type: ignore[arg-type]
    system, path = hadoop_path(spark, name)
    stream = system.open(path)
    try:
        return io.BufferedReader(io.BytesIO(stream.readNBytes(_HEADER_BYTES)))  # type: ignore[arg-type]
    finally:
        stream.close()


def _header(stream: io.BufferedReader, name: str) -> list[str]:
    text = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
    cells = next((row for row in csv.reader(text, delimiter=_delimiter(name)) if row), None)
    if cells is None:
        raise InputError(f"{name}: the file has no header line; add one")
    "".join(cells).encode()  # what is not UTF-8 was read as halves of surrogate pairs
    return cells


def _refuse_columns(source: DataSource, schema: pa.Schema) -> None:
    """Raises the local reader's errors for missing or duplicate columns and wrong types."""
    attribute_table(schema.empty_table(), source, Location(str(source.path)), user_keys=None, aliases=None)


def _lines(spark: "SparkSession", files: dict[str, str]) -> "DataFrame":
    """Returns text, file, valid (whether the text is UTF-8); newline bytes never occur inside a character."""
    text = _reader(spark).text(_literal(files))
    return text.select("value", F.col("_metadata.file_path").alias("file"), F.is_valid_utf8("value").alias("valid"))


def _named(address: str, files: dict[str, str]) -> str:
    """Returns the name of a file that Spark reports, which spells addresses in more than one way."""
    plain = re.sub(r"^file:/+", "file:///", unquote(address))
    return next((name for file, name in files.items() if re.sub(r"^file:/+", "file:///", file) == plain), address)


def _read_json_lines(
    spark: "SparkSession", source: DataSource, files: dict[str, str], columns: list[str]
) -> "DataFrame":
    from pyspark.sql.pandas.types import from_arrow_schema

    check_python(spark)
    surveys: dict[str, _Survey] = collections.defaultdict(_Survey)
    for file, part in _lines(spark, files).rdd.mapPartitions(functools.partial(_survey_lines, columns)).collect():
        surveys[_named(file, files)].join(part)
    found = {name: surveys[name] for name in files.values() if name in surveys}
    for name, part in found.items():
        if part.problem is not None:
            raise InputError(f"{name}: {part.problem}")
    named = [[name for name in columns if name in part.fields] for part in found.values()]  # others are content
    one_schema(list(found), [pa.schema([(field, pa.null()) for field in fields]) for fields in named])
    fields = {field: pa.null() for field in sorted(set().union(*(part.fields for part in found.values())))}
    for column in columns:
        kind = _arrow_type(set().union(*(part.kinds[column] for part in found.values())))
        if kind is None:
            raise InputError(f"{column!r} is a list in some lines and not in others; use one type")
        if column in fields:
            fields[column] = kind
    _refuse_columns(source, pa.schema(list(fields.items())))
    known = {pa.null(): pa.string(), pa.list_(pa.null()): pa.list_(pa.string())}
    schema = from_arrow_schema(pa.schema([(name, known.get(fields[name], fields[name])) for name in columns]))
    # By way of text: Spark's own reader of JSON files refuses bytes that are not UTF-8, in any column.
    text = _reader(spark).text(_literal(files)).select(F.make_valid_utf8("value").alias("text"))
    text = text.select(F.regexp_replace("text", "^\ufeff", "").alias("text")).where(F.trim("text") != "")
    return text.select(F.from_json("text", schema, {"mode": "FAILFAST"}).alias("row")).select("row.*")


@dataclasses.dataclass(kw_only=True)
class _Survey:
    """A summary of some lines of one file: its fields, the kinds of value in the named ones, and the first problem."""

    fields: set[str] = dataclasses.field(default_factory=set)
    kinds: dict[str, set[_Kind]] = dataclasses.field(default_factory=lambda: collections.defaultdict(set))
    problem: str | None = None

    def join(self, other: "_Survey") -> None:
        self.fields |= other.fields
        for name, kinds in other.kinds.items():
            self.kinds[name] |= kinds
        self.problem = self.problem or other.problem


def _arrow_type(kinds: set[_Kind]) -> pa.DataType | None:
    """Returns the type of a column with these kinds of value, text if they differ; None for a mix with lists."""
    known = {kind for kind in kinds if kind != (False, _NULL)}
    if len({in_list for in_list, _ in known}) > 1:
        return None
    words = {word for _, word in known} - {_NULL}
    words = {"a number"} if words == {"an integer", "a number"} else words
    if len(words) == 1:
        entry = _ARROW.get(next(iter(words)), pa.struct([]))
    else:
        entry = pa.string() if words else pa.null()
    return pa.list_(entry) if any(in_list for in_list, _ in known) else entry


def _survey_lines(names: Sequence[str], rows: Iterable[Any]) -> Iterator[tuple[str, _Survey]]:
    """Summarizes some lines of each file on the executors; rows: text, file, whether the text is UTF-8."""
    found: dict[str, _Survey] = collections.defaultdict(_Survey)
    for text, file, valid in rows:
        part = found[file]
        if part.problem is not None or not text.strip():
            continue
        try:
            fields = json.loads(text.removeprefix("\ufeff"), object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            part.problem = f"not JSON ({one_line(error)}); write one complete object per line"
            continue
        if not isinstance(fields, dict):
            part.problem = f"{json_kind(fields)} where an object was expected; write one object per line"
            continue
        part.fields.update(fields)
        for name in names:
            value = fields.get(name)
            part.kinds[name].update(_kinds(value))
            if name == names[0] and json_kind(value) not in (*ID_KINDS, _NULL):
                part.problem = not_an_id(name, json_kind(value))
            if not valid and "\ufffd" in str(value):  # what Spark makes of bytes that are not UTF-8
                part.problem = f"column {name!r} is not UTF-8; save the file as UTF-8"
    yield from found.items()


def _kinds(value: Any) -> Iterator[_Kind]:
    if isinstance(value, list):
        yield True, _NULL
        yield from ((True, json_kind(entry)) for entry in value)
    else:
        yield False, json_kind(value)
