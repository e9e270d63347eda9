"""Checks of the executors before any work, by at most two small jobs."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import coowned
from coowned.errors import InputError
from coowned.spark import functions as F

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PACKAGE = "`coowned spark-package -o coowned.zip` writes it, and --py-files coowned.zip brings it there"
_ENVIRONMENT = (
    "pack an environment that has coowned (venv-pack, conda-pack) and give it with "
    "--conf spark.archives=ENV.tar.gz#env --conf spark.pyspark.python=env/bin/python; integers as users need no "
    "Python there"
)


def check_python(spark: "SparkSession") -> None:
    """Raises an error if an executor's Python cannot import this version of the package and its dependencies.

    A local master's run the interpreter of this process and are not asked, unless another one was configured.

    Guarantees:
      - One sentence says what is missing, where, and how to get it there.   (test_executors_without_the_package)
    """
    context = spark.sparkContext
    if is_local(spark) and context.pythonExec == sys.executable:
        return

    def imported(_: Any) -> Iterator[tuple[str, str | None, str]]:  # pickled by value: it runs where nothing of ours is
        import socket

        try:
            import coowned
            import coowned.spark.attribution as _needed  # noqa: F401

            yield socket.gethostname(), None, coowned.__version__
        except ImportError as error:
            yield socket.gethostname(), error.name or "coowned", str(error)

    parts = 2 * context.defaultParallelism
    try:
        found = context.parallelize(range(parts), parts).mapPartitions(imported).collect()
    except Exception as error:
        said = " ".join(str(error).split())
        if "Cannot run program" in said:
            raise InputError(
                f"the executors have no Python at {context.pythonExec}; name theirs with "
                "--conf spark.pyspark.python=PATH or PYSPARK_PYTHON"
            ) from error
        if "PYTHON_VERSION_MISMATCH" in said:
            raise InputError(
                f"the executors' {context.pythonExec} is not Python {sys.version_info[0]}.{sys.version_info[1]}; "
                f"{_ENVIRONMENT}"
            ) from error
        raise
    for host, missing, version in found:
        at = f"the executors' Python ({context.pythonExec} on {host})"
        if missing is not None and missing.partition(".")[0] != "coowned":
            raise InputError(f"{at} has no {missing}, which coowned needs; {_ENVIRONMENT}")
        if missing is not None:
            raise InputError(f"{at} has no coowned {coowned.__version__}; {_PACKAGE}")
        if version != coowned.__version__:
            raise InputError(f"{at} has coowned {version}, not {coowned.__version__}; {_PACKAGE}")


def check_shared(spark: "SparkSession", folder: str) -> None:
    """Raises an error for a folder that executors on other machines would not share.

    Guarantees:
      - What executors write there is what the driver reads.   (test_a_folder_that_is_not_shared_is_refused)
    """
    rows = 2 * spark.sparkContext.defaultParallelism
    spark.range(rows, numPartitions=rows).write.parquet(f"{folder}/shared")
    if spark.read.schema("id bigint").parquet(f"{folder}/shared").agg(F.count("id")).collect()[0][0] != rows:
        raise InputError(
            f"{folder}: the executors have another disk than the driver; give --checkpoint-dir a folder that all "
            "share, or an address such as hdfs://…"
        )


def is_local(spark: "SparkSession") -> bool:
    """Returns whether the executors are threads of this machine's Java process."""
    master = spark.sparkContext.master or ""
    return master.startswith("local") and not master.startswith("local-cluster")
