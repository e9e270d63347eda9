"""Data sources read by Spark: the same files, options and columns as on one machine."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from coowned.attribution.sources import DataSource, detect_format
from coowned.attribution.user_keys import read_keys
from coowned.errors import InputError
from coowned.spark.attribution import SparkGraph, attribute
from coowned.spark.session import spark_errors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SUFFIXES = {"parquet": "parquet,pq", "csv": "csv,tsv", "jsonl": "jsonl,ndjson,json"}


def check_source(source: DataSource) -> str:
    """The format of a source that Spark can read as one machine does; any other is refused."""
    kind = source.format or detect_format(source.path)
    if kind not in _SUFFIXES:
        raise InputError(
            f"{source.path}: Spark reads parquet, csv and jsonl, not {kind}; use the local engine, or write a table"
        )
    if source.example_id is None:
        raise InputError(
            f"{source.path}: a table on Spark has no row numbers; name the column with the ids (--example-id)"
        )
    if source.attribute_to:
        raise InputError(f"{source.path}: attribute_to means nothing for {kind} data; leave it out")
    return kind


def attribute_source(
    spark: "SparkSession", source: DataSource, *, checkpoint_dir: str | os.PathLike[str] | None = None
) -> SparkGraph:
    """Reads and attributes what a `DataSource` describes: Parquet, CSV or JSON lines with a column of ids.

    Guarantees:
      - The same graph as `source.read()`.   (test_sources_are_read_as_locally)
    """
    kind = check_source(source)
    unprotected = [] if source.unprotected is None else read_keys(source.unprotected)
    return attribute(
        _read(spark, Path(source.path), kind),
        list(source.users) or None,
        source.user,
        source.example_id or "",
        source.separator,
        aliases=source.aliases,
        unprotected=unprotected,
        checkpoint_dir=checkpoint_dir,
    )


def _read(spark: "SparkSession", path: Path, kind: str) -> "DataFrame":
    reader = spark.read
    if path.is_dir():  # whatever lies deeper too, as on one machine; folders named key=value add no column
        reader = reader.option("recursiveFileLookup", "true").option("pathGlobFilter", f"*.{{{_SUFFIXES[kind]}}}")
    place = path.resolve().as_uri()
    with spark_errors(str(path)):
        if kind == "parquet":
            return reader.parquet(place)
        if kind == "jsonl":
            return reader.json(place, mode="FAILFAST")
        first = path if path.is_file() else next(iter(sorted(path.rglob("*.tsv"))), path)
        separator = "\t" if first.suffix.lower() == ".tsv" else ","
        # Every column as text, quotes doubled inside quotes, line breaks allowed in cells.
        return reader.csv(place, header=True, sep=separator, quote='"', escape='"', multiLine=True, mode="FAILFAST")
