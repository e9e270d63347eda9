"""Shards written by the executors: the selected and the held-out rows, none of which passes the driver."""

import os
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

import msgspec

from coowned.certificate import ContributionCertificate
from coowned.errors import CertificateMismatchError, InputError
from coowned.selection import shards
from coowned.spark import functions as F
from coowned.spark.attribution import SparkGraph, column_named, working_on
from coowned.spark.checkpoints import hadoop_path

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_ROWS_OF_A_FILE = 1_000_000  # an executor reads a whole file to compute its hash
_BITS = 54
_ROW = "coowned_row"  # the id as text


def write_shards(
    data: "DataFrame",
    train: SparkGraph,
    chosen: "DataFrame",
    certificate: ContributionCertificate,
    folder: str | os.PathLike[str],
    *,
    example_id: str = "example_id",
) -> shards.Manifest:
    """Writes S, its certificate, and the selected and held-out rows with all their columns to a new folder.

    Args:
      data: the table that the graph was made of, one row per example.
      train: the graph that S was selected from, `graph.train_split(splits)`.
      folder: on a disk that driver and executors share, or an address; its manifest is written last.

    Guarantees:
      - Training reads the rows that one machine writes.   (test_shards_are_those_of_one_machine)
      - Rows that are not in the graph, or in S twice, are refused.   (test_rows_that_do_not_fit_are_refused)

    Cost: a join of the data with the ids of the rows, one write, and one read of what was written for its hashes.
    """
    whole, splits = train.whole, train.splits
    if whole is None or splits is None:
        raise InputError("shards hold the rows of three splits; select from graph.train_split(splits)")
    shards.refuse_bounds(individual=certificate.tiers is not None)
    root = os.fspath(folder) if "://" in os.fspath(folder) else Path(folder).resolve().as_uri()
    system, path = hadoop_path(data.sparkSession, root)
    if system.exists(path):
        raise InputError(f"{folder}: exists already; choose another folder, or remove it")
    if taken := sorted({*shards.OWN_COLUMNS, _ROW, "group"} & {*data.columns}):
        raise InputError(f"the data have a column named {taken[0]}; rename it before writing shards")
    with working_on(train, None) as (_, checkpoints):
        text = F.col("example_id").cast("string").alias("text")
        selected = checkpoints.save(_by_text(train.examples).join(chosen.select(text), "text", "left_semi"), "in")
        rest = _by_text(train.examples).join(selected.select("text"), "text", "left_anti")
        held = _by_text(whole.examples).join(_by_text(train.examples).select("text"), "text", "left_anti")
        # In the order of the ids, whatever the partitioning; numbered once, so that a retry numbers alike.
        rows = selected.unionByName(held).orderBy("text").withColumn("position", F.monotonically_increasing_id())
        rows = checkpoints.save(rows, "rows")
        sums = train.digest_sums(rest)
        owners = rows.select(F.explode("users").alias("user")).distinct().count()
        try:
            _write_rows(data, rows, f"{root}/rows", example_id)
            chosen.write.parquet(f"{root}/{shards.SELECTION}", compression="zstd")
            files, counts = _entries(data, root)
            if sum(counts) != rows.count() or selected.count() != certificate.num_distinct:
                raise CertificateMismatchError(
                    f"{folder}: {sum(counts):,} rows were written for {rows.count():,} examples, of which S has "
                    f"{certificate.num_distinct:,}; give the table that the graph was made of, one row per example"
                )
            manifest = shards.Manifest(
                graph_digest=certificate.graph_digest,
                selection_digest=certificate.selection_digest,
                splits=(splits[0], splits[1], splits[2]),
                types_inferred=False,
                groups=shards.GROUPS,
                shard_rows=counts,
                absent=shards.AbsentRows(
                    examples=sums.count,
                    users=whole.num_users - owners,
                    lanes=(str(sums.lanes[0]), str(sums.lanes[1]), str(sums.lanes[2]), str(sums.lanes[3])),
                ),
                files=files,
            )
            _write_text(data, f"{root}/{shards.CERTIFICATE}", certificate.to_json() + "\n")
            _write_text(data, f"{root}/{shards.MANIFEST}", manifest.to_json())
        except BaseException:
            system.delete(path, True)
            raise
        checkpoints.clear()
    return msgspec.structs.replace(manifest, checksum=manifest.digest)


def _by_text(examples: "DataFrame") -> "DataFrame":
    """Returns text, id, users: ids are compared as text, since 7 and "7" are the same."""
    return examples.select(F.col("id").cast("string").alias("text"), "id", "users")


def _write_rows(data: "DataFrame", rows: "DataFrame", folder: str, example_id: str) -> None:
    shard = F.shiftrightunsigned(F.xxhash64(F.lit(shards.SEED).cast("bigint"), F.col("text")), _BITS).cast("int")
    own = data.schema[example_id].dataType
    numbered = rows.select(
        F.col("text").alias(_ROW),
        shard.alias(shards.SHARD),
        F.col("id").cast(own).alias(shards.ID),
        F.col("position").alias(shards.POSITION),
        F.col("users").cast("array<string>").alias(shards.USERS),
        (shard % shards.GROUPS).alias("group"),
    )
    joined = data.withColumn(_ROW, column_named(example_id).cast("string")).join(numbered, _ROW).drop(_ROW)
    writer = joined.repartition("group").write.option("maxRecordsPerFile", _ROWS_OF_A_FILE)
    writer.partitionBy("group").parquet(folder, compression="zstd")


def _entries(data: "DataFrame", root: str) -> tuple[tuple[shards.ShardFile, ...], tuple[int, ...]]:
    """Moves the groups to where they belong; returns the entries of all files, and the rows of every shard."""
    spark = data.sparkSession
    system, path = hadoop_path(spark, f"{root}/rows")
    for status in system.listStatus(path):
        name = status.getPath().getName()
        if name.startswith("group="):
            system.rename(status.getPath(), hadoop_path(spark, f"{root}/{name}")[1])
    system.delete(path, True)
    read = spark.read.option("recursiveFileLookup", "true").option("pathGlobFilter", "*.parquet")
    groups = [f"{root}/{status.getPath().getName()}" for status in system.listStatus(hadoop_path(spark, root)[1])
              if status.getPath().getName().startswith("group=")]  # fmt: skip
    stored = read.format("binaryFile").load(groups)
    hashes = stored.select("path", "length", F.sha2("content", 256)).collect()
    content = read.schema(f"{shards.SHARD} int").parquet(*groups)
    found = content.groupBy(F.col("_metadata.file_path").alias("file"), shards.SHARD).count().collect()
    rows: dict[str, int] = {}
    counts = [0] * shards.SHARDS
    for file, shard, number in found:
        rows[_inside(file)] = rows.get(_inside(file), 0) + number
        counts[shard] += number
    files = [
        shards.ShardFile(path=_inside(file), rows=rows.get(_inside(file), 0), bytes=length, sha256=digest)
        for file, length, digest in hashes
    ]
    return tuple(sorted(files, key=lambda file: file.path)), tuple(counts)


def _inside(address: str) -> str:
    """Returns the path of a file in the folder: its group and its name.

    >>> _inside("file:///data/shards/group=3/part-0.parquet")
    'group=3/part-0.parquet'
    """
    return "/".join(unquote(address).rsplit("/", 2)[1:])


def _write_text(data: "DataFrame", address: str, text: str) -> None:
    system, path = hadoop_path(data.sparkSession, address)
    stream = system.create(path, True)
    try:
        stream.write(bytearray(text.encode()))
    finally:
        stream.close()
