"""Intermediate tables, written where every executor can read them, so that plans stay short and losses are harmless."""

import functools
import os
import re
import tempfile
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coowned.errors import InputError
from coowned.spark import functions as F
from coowned.spark.executors import check_shared, is_local

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


class Checkpoints:
    """A folder of Parquet tables that belongs to one computation.

    It is in the session's checkpoint directory (`spark.checkpoint.dir`); a local master needs none and gets a
    temporary folder. Whatever is left is removed with the session, or when its Java process ends.

    Guarantees:
      - What comes back from `save` is read from files: its plan is one scan.   (test_plans_are_truncated)
      - `clear` leaves nothing of the folder.                                    (test_nothing_is_left_behind)
      - Nor does a command that is interrupted while a table is being written.   (test_interrupt_is_one_sentence)
    """

    def __init__(self, spark: "SparkSession", directory: str | os.PathLike[str] | None = None):
        self.spark = spark
        base = _base_directory(spark, directory)
        self.root = f"{base.rstrip('/')}/coowned-{uuid.uuid4().hex}"
        if base.startswith("file:") and not is_local(spark):
            try:
                check_shared(spark, self.root)
            finally:
                self.remove("shared")

    def save(self, table: "DataFrame", name: str) -> "DataFrame":
        """Writes a table and returns it as read back."""
        remove_on_exit(self.spark, self.root)  # a table that is being written has no one to clear it
        table.write.parquet(f"{self.root}/{name}")
        return self.read([name], table.schema)

    def read(self, names: Iterable[str], schema: "StructType | str") -> "DataFrame":
        """Reads all these tables as one."""
        return self.spark.read.schema(schema).parquet(*(f"{self.root}/{name}" for name in names))

    def remove(self, *names: str) -> None:
        for name in names:
            file_system, path = hadoop_path(self.spark, f"{self.root}/{name}")
            file_system.delete(path, True)

    def clear(self) -> None:
        """Removes every table; what was read from them can no longer be used."""
        file_system, path = hadoop_path(self.spark, self.root)
        file_system.delete(path, True)


def empty_table(spark: "SparkSession", schema: str) -> "DataFrame":
    """Returns a table without rows; made by Java alone, since executors may have no Python."""
    from pyspark.sql.types import StructType

    fields: Any = StructType.fromDDL(schema)
    return spark.range(0).select(*(F.lit(None).cast(field.dataType).alias(field.name) for field in fields))


def hadoop_path(spark: "SparkSession", address: str) -> tuple[Any, Any]:
    """Returns the file system of an address, and its path there, as Hadoop's own objects."""
    context: Any = spark.sparkContext
    path = context._jvm.org.apache.hadoop.fs.Path(address)
    return path.getFileSystem(context._jsc.hadoopConfiguration()), path


def remove_on_exit(spark: "SparkSession", address: str) -> Callable[[], None]:
    """Makes a folder that the session's Java process removes when it ends; what is returned removes it before."""
    file_system, path = hadoop_path(spark, address)
    file_system.mkdirs(path)
    file_system.deleteOnExit(path)  # ignored for what does not exist
    return functools.partial(file_system.delete, path, True)


def running_session(table: "DataFrame") -> "SparkSession":
    """Returns the session of a table; raises an error for Spark Connect, which lacks file systems."""
    spark = table.sparkSession
    if not hasattr(spark, "_jsc"):
        raise InputError("Spark Connect tables are not supported; use a classic Spark session")
    return spark


def _base_directory(spark: "SparkSession", directory: str | os.PathLike[str] | None) -> str:
    if directory is not None:
        path = str(directory)
        return path if "://" in path else Path(path).resolve().as_uri()
    configured = spark.sparkContext.getCheckpointDir()
    if configured is not None:
        return re.sub("^file:/+", "file:///", configured)  # as `Path.as_uri` and we write it
    if not (spark.sparkContext.master or "").startswith("local"):
        raise InputError(
            "a cluster needs a checkpoint folder that driver and executors share; give it with --checkpoint-dir, "
            "checkpoint_dir= or spark.checkpoint.dir"
        )
    return Path(tempfile.gettempdir()).resolve().as_uri()
