"""A Spark session that is quiet, and one sentence where a machine has no Spark."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coowned.errors import InputError
from coowned.extras import require

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_MASTER = re.compile(r"local(\[(\*|[1-9]\d*)(, *\d+)?\])?|local-cluster\[[^\]]+\]|(spark|k8s)://.+|yarn")
_OLDEST_JAVA = 17
_REMEDY = f"the Spark engine needs Java {_OLDEST_JAVA} or newer (a JDK or JRE on the PATH or in JAVA_HOME)"


def check_machine() -> None:
    """Refuses a machine without pyspark or a new enough Java, and says what to install."""
    require("spark", "the Spark engine")
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=str(Path(home) / "bin") if home else None)
    if java is None:
        raise InputError(f"no Java was found; {_REMEDY}")
    try:
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"{java} does not run ({error}); {_REMEDY}") from None
    version = re.search(r'version "(?:1\.)?(\d+)', answer.stderr + answer.stdout)
    if version is None or int(version[1]) < _OLDEST_JAVA:
        found = "of an unknown version" if version is None else f"Java {version[1]}"
        raise InputError(f"{java} is {found}; {_REMEDY}")


def check_master(master: str) -> None:
    """Refuses what Spark would end with a stack trace of Java's for.

    >>> check_master("local[two]")
    Traceback (most recent call last):
      ...
    coowned.errors.InputError: local[two]: not a Spark master; use local[N], local[*], spark://HOST:PORT, yarn or k8s://…
    """
    if not _MASTER.fullmatch(master):
        raise InputError(f"{master}: not a Spark master; use local[N], local[*], spark://HOST:PORT, yarn or k8s://…")


@contextlib.contextmanager
def session(master: str | None = None, **options: Any) -> "Iterator[SparkSession]":
    """The running Spark session, or else one started here for this master and stopped at the end.

    A started one has no web page and logs errors only; with a `local` master it also listens on this machine alone
    and has a quarter of its memory.

    Args:
      master: as Spark writes it (local[*], spark://host:7077, yarn, …); None for what Spark is configured for, else
        local[*].
      options: further settings, with __ for the dots (spark__executor__memory="4g").
    """
    check_machine()
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    running = SparkSession.getActiveSession()
    if running is not None:
        use_this_interpreter(running)
        yield running
        return
    chosen = master or os.environ.get("MASTER") or "local[*]"
    check_master(chosen)
    settings = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
    settings |= _local_settings() if chosen.startswith("local") else {"spark.log.level": "ERROR"}
    settings |= {name.replace("__", "."): str(value) for name, value in options.items()}
    builder = SparkSession.builder.master(chosen).appName("coowned")
    for name, value in settings.items():
        builder = builder.config(name, value)
    try:
        with warnings.catch_warnings():  # the package uses no pandas, whatever of it is installed
            warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
            # Spark's launcher forks and at once becomes the JVM: nothing of JAX, where loaded, runs in the child
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            started = builder.getOrCreate()
    except Exception as error:
        if not isinstance(error, PySparkException) and not type(error).__module__.startswith("py4j"):
            raise
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"Spark did not start on {chosen} ({reason}); check --master; {_REMEDY}") from error
    use_this_interpreter(started)
    try:
        yield started
    finally:
        started.stop()


def use_this_interpreter(spark: "SparkSession") -> None:
    """Python workers run the interpreter of this process, which has this package, unless another one was configured.

    Spark's own default is the first python3 on the executor's PATH.

    Guarantees:
      - It holds for sessions started here and elsewhere, locally and on a cluster; `PYSPARK_PYTHON` and
        `spark.pyspark.python` come first.   (test_python_workers_run_this_interpreter)
    """
    if hasattr(spark, "_jsc"):  # Spark Connect has no such setting
        configured = spark.sparkContext.getConf().get("spark.pyspark.python")
        spark.sparkContext.pythonExec = os.environ.get("PYSPARK_PYTHON") or configured or sys.executable


@contextlib.contextmanager
def spark_errors(source: str, *, unreadable: str = "Spark cannot read it; write it again") -> Iterator[None]:
    """Makes one sentence of what Spark raises: an InputError where the data are to blame, else an OSError.

    Spark's messages about a row are never shown: they quote cells, which are private data.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError) as error:
        text = " ".join(str(error).split())
        blame = re.search(r"\[((?:MALFORMED|FAILED_READ_FILE|CANNOT_READ|UNABLE_TO_INFER|PATH_NOT_FOUND)\w*)", text)
        if blame is not None:
            raise InputError(f"{source}: {unreadable} (Spark: {blame[1]})") from error
        raise OSError(f"{source}: Spark failed ({text.split(' SQLSTATE')[0][:300]})") from error


def _local_settings() -> dict[str, str]:
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4 >> 20 if hasattr(os, "sysconf") else 2048
    logging = Path(__file__).with_name("log4j2.properties").as_uri()
    return {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": f"{max(memory, 1024)}m",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={logging}",
        "spark.sql.shuffle.partitions": str(max(4, 2 * (os.cpu_count() or 1))),
    }
