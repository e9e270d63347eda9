"""S as Parquet files with its certificate, both written atomically, and read back."""

import contextlib
import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet

from coowned.attribution.table_files import files_of
from coowned.certificate import ContributionCertificate, certificate_for, certificate_path_of
from coowned.errors import InputError
from coowned.files import whole_files
from coowned.spark.checkpoints import hadoop_path, running_session
from coowned.spark.session import spark_errors
from coowned.spark.sources import read_parquet

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def write_selection(
    selection: "DataFrame", certificate: ContributionCertificate, path: str | os.PathLike[str]
) -> tuple[str, str]:
    """Writes `example_id, copies` to a folder S.parquet and the certificate to S.certificate.json next to it.

    Args:
      path: a folder on a disk that driver and executors share, or an address of any file system that Spark knows
        (hdfs://…, s3a://…, file:///…). Existing Parquet files, complete or not, are replaced.

    Guarantees:
      - Under the names given there is what was there before, or all of the new.   (test_appears_whole)
      - What a crash left half-written is replaced, and never read.                 (test_half_written_is_replaced)

    Returns both paths.
    """
    spark = running_session(selection)
    if "://" in os.fspath(path):
        return _write_by_spark(spark, selection, certificate, os.fspath(path))
    target = Path(path)
    certificate_path = certificate_path_of(target)
    with whole_files(target, certificate_path) as (folder, file):
        write_parts(selection, certificate, folder)
        file.write_text(certificate.to_json() + "\n", encoding="utf-8")
    return str(target), str(certificate_path)


def read_selection(spark: "SparkSession", path: str | os.PathLike[str]) -> "DataFrame":
    """Reads `example_id, copies` of a selection made here or on one machine: a file or folder, or its address.

    Guarantees:
      - What was written comes back.   (test_round_trip_on_spark)
      - Files that are no selection, or one that Spark cannot recount, are refused.   (test_other_files_are_refused)
    """

    def check(schema: pa.Schema) -> None:
        if {"batch", "position"} <= set(schema.names) or "group" in schema.names:
            raise InputError(f"{path}: schedules and groups are recounted on one machine; use the local engine")
        if not {"example_id", "copies"} <= set(schema.names):
            raise InputError(
                f"{path}: a selection has the columns example_id and copies, not {sorted(schema.names)}; give S.parquet"
            )
        kinds = schema.field("example_id").type, schema.field("copies").type
        text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_integer, pa.types.is_null)
        if not any(fits(kinds[0]) for fits in text) or not pa.types.is_integer(kinds[1]):
            raise InputError(f"{path}: ids must be integers or text and copies integers, not {kinds[0]} and {kinds[1]}")

    with spark_errors(str(path), unreadable="not complete Parquet data"):
        return read_parquet(spark, path, ["example_id", "copies"], check)


def read_certificate(spark: "SparkSession", address: str) -> str:
    """Reads the text of the certificate at an address."""
    with spark_errors(address):
        system, path = hadoop_path(spark, address)
        if not system.exists(path):
            raise InputError(f"{address}: no certificate found; give it with --certificate FILE")
        stream = system.open(path)
        try:
            return bytes(stream.readAllBytes()).decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{address}: not a certificate (not UTF-8); give it with --certificate FILE") from error
        finally:
            stream.close()


def exists(spark: "SparkSession", url: str) -> bool:
    """Returns whether there is a file or folder at a URL."""
    with spark_errors(url):
        system, path = hadoop_path(spark, url)
        return bool(system.exists(path))


def write_parts(selection: "DataFrame", certificate: ContributionCertificate, folder: Path) -> None:
    """Writes the parts to a local folder, and checks that all arrived."""
    selection.write.parquet(folder.resolve().as_uri(), compression="zstd")
    # Executors without a shared disk would have written to their local disks.
    found = 0
    with contextlib.suppress(InputError):
        found = sum(pyarrow.parquet.read_metadata(file).num_rows for file in files_of(folder, (".parquet",)))
    if found != certificate.num_distinct:
        raise InputError(
            f"{folder.name}: {found:,} of {certificate.num_distinct:,} rows were written; use a folder that the "
            "driver and every executor share, or an address such as hdfs://…"
        )


def _write_by_spark(
    spark, selection: "DataFrame", certificate: ContributionCertificate, address: str
) -> tuple[str, str]:
    """Writes to any file system: everything under hidden names, then renamed."""
    address = address.rstrip("/")
    parent, _, name = address.rpartition("/")
    certificate_path = certificate_for(address)
    hidden = f"{parent}/.{name}.{uuid.uuid4().hex}"
    system, target = hadoop_path(spark, address)
    old = hadoop_path(spark, f"{hidden}/replaced")[1]
    try:
        if system.exists(target) and system.getFileStatus(target).isDirectory():
            for status in system.listStatus(target):
                found = status.getPath().getName()
                if not found.endswith(".parquet") and found[0] not in "._":
                    raise InputError(f"{address}: a folder with other files in it ({found}); choose another path")
        selection.write.parquet(f"{hidden}/{name}", compression="zstd")
        stream = system.create(hadoop_path(spark, f"{hidden}/certificate")[1], True)
        stream.write(bytearray((certificate.to_json() + "\n").encode()))
        stream.close()
        # A certificate without its S is refused by every reader; an S with the certificate of another is too.
        if system.exists(target):
            _rename(system, target, old, address)
        _rename(system, hadoop_path(spark, f"{hidden}/{name}")[1], target, address)
        new = hadoop_path(spark, certificate_path)[1]
        system.delete(new, False)
        _rename(system, hadoop_path(spark, f"{hidden}/certificate")[1], new, certificate_path)
    except BaseException:
        if system.exists(old) and not system.exists(target):
            system.rename(old, target)
        raise
    finally:
        system.delete(hadoop_path(spark, hidden)[1], True)
    return address, certificate_path


def _rename(system, source, target, address: str) -> None:
    if not system.rename(source, target):
        raise InputError(f"{address}: the file system refused to rename a file to it; check its permissions")
