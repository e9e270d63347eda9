"""Spark sessions with little logging, and clear errors on machines without Spark."""

import contextlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import unquote

from coowned.errors import InputError, require
from coowned.spark.checkpoints import remove_on_exit
from coowned.spark.executors import is_local

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_Handlers: TypeAlias = Mapping[int, Callable[[int, Any], Any]]  # by the number of the signal
_MASTER = re.compile(r"local(\[(\*|[1-9]\d*)(, *\d+)?\])?|local-cluster\[[^\]]+\]|(spark|k8s)://.+|yarn")
_OLDEST_JAVA = 17
_REMEDY = f"the Spark engine needs Java {_OLDEST_JAVA} or newer (a JDK or JRE on the PATH or in JAVA_HOME)"


def check_machine() -> None:
    """Raises an error that says what to install if pyspark or a recent enough Java is missing."""
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
    """Raises an error for masters that would end Spark with a Java stack trace.

    >>> check_master("local[two]")
    Traceback (most recent call last):
      ...
    coowned.errors.InputError: local[two]: not a Spark master; use local[N], local[*], spark://HOST:PORT, yarn or k8s://…
    """
    if not _MASTER.fullmatch(master):
        raise InputError(f"{master}: not a Spark master; use local[N], local[*], spark://HOST:PORT, yarn or k8s://…")


@contextlib.contextmanager
def session(
    master: str | None = None, *, py_files: Iterable[str] = (), quiet: bool = True, **options: Any
) -> "Iterator[SparkSession]":
    """Yields the running Spark session, or one started here for this master and stopped at the end.

    A started one has no web page and logs nothing; with a `local` master it also listens on this machine alone and has
    a quarter of its memory.

    Args:
      master: as Spark writes it (local[*], spark://host:7077, yarn, …); None for what Spark is configured for, else
        local[*].
      py_files: zips that the executors' Python imports from, such as `coowned spark-package` writes.
      quiet: what fails is raised, and Spark's own log is off.
      options: further settings, with __ for the dots (spark__executor__memory="4g").
    """
    check_machine()
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    running = SparkSession.getActiveSession()
    if running is not None:
        _prepare(running, py_files)
        yield running
        return
    chosen = master or os.environ.get("MASTER") or "local[*]"
    check_master(chosen)
    settings = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
    if quiet:
        file = Path(__file__).with_name("log4j2.properties").as_uri()
        settings["spark.driver.extraJavaOptions"] = f"-Dlog4j2.configurationFile={file}"
    settings |= _local_settings() if chosen.startswith("local") else {}
    settings |= {name.replace("__", "."): str(value) for name, value in options.items()}
    builder = SparkSession.builder.master(chosen).appName("coowned")
    for name, value in settings.items():
        builder = builder.config(name, value)
    handlers = _handlers()
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
    with _without_logs_of_py4j(), _stopped(started, handlers), _interruptible(started, handlers):
        _prepare(started, py_files)
        yield started


@contextlib.contextmanager
def _stopped(spark: "SparkSession", handlers: _Handlers) -> Iterator[None]:
    """Stops the session in the end, and then removes its checkpoint folder.

    A session on this machine without such a folder gets a temporary one, which only its owner can read.
    """
    with contextlib.ExitStack() as stack:
        with _deferred(handlers):  # Java goes on with what an interrupted thread has asked for
            if spark.sparkContext.getCheckpointDir() is None and is_local(spark):
                folder = tempfile.TemporaryDirectory(prefix="coowned-", ignore_cleanup_errors=True)
                address = Path(stack.enter_context(folder)).resolve().as_uri()
                remove_on_exit(spark, address)
                spark.sparkContext.setCheckpointDir(address)
            if (made := spark.sparkContext.getCheckpointDir()) is not None:  # inside the one that was given
                stack.callback(_quietly, remove_on_exit(spark, made))
            stack.callback(spark.stop)
            stack.callback(_quietly, _cancel_jobs, spark)
        yield


def _quietly(call: Callable[..., Any], *arguments: Any) -> None:
    with contextlib.suppress(Exception):  # Java may be gone already
        call(*arguments)


def _cancel_jobs(spark: "SparkSession") -> None:
    """Cancels the jobs and waits, half a minute at most, until no task runs: one would write again what is removed."""
    context: Any = spark.sparkContext
    tracker = context._jsc.sc().statusTracker()
    for _ in range(300):
        running = sum(executor.numRunningTasks() for executor in tracker.getExecutorInfos())
        if not running and not tracker.getActiveJobIds():
            return
        context.cancelAllJobs()
        time.sleep(0.1)


@contextlib.contextmanager
def _without_logs_of_py4j() -> Iterator[None]:
    """Drops the stack traces that py4j writes to the root logger and its own; the error is raised as well."""

    def keep(record: logging.LogRecord) -> bool:
        return "py4j" not in Path(record.pathname).parts

    loggers = [logging.getLogger(name) for name in (None, "py4j.clientserver", "py4j.java_gateway")]
    for logger in loggers:
        logger.addFilter(keep)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(keep)


def _handlers() -> _Handlers:
    """Returns the handlers of the signals that end a command; none outside the main thread, which receives them."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    return {number: handler for number, handler in found.items() if callable(handler)}


@contextlib.contextmanager
def _handling(handlers: _Handlers, handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Calls another handler for these signals."""
    for number in handlers:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, before in handlers.items():
            signal.signal(number, before)


@contextlib.contextmanager
def _deferred(handlers: _Handlers) -> Iterator[None]:
    """Handles the first signal in the end, and a second one at once."""
    received: list[int] = []

    def later(number: int, frame: Any) -> None:
        received.append(number)
        if len(received) > 1:
            handlers[number](number, frame)

    with _handling(handlers, later):
        yield
    if received:
        handlers[received[0]](received[0], None)


@contextlib.contextmanager
def _interruptible(spark: "SparkSession", handlers: _Handlers) -> Iterator[None]:
    """Cancels Spark's jobs before the first signal is handled; handles a second one at once.

    Py4J has one connection per thread, and the interrupted thread's waits for the very job that is to be cancelled:
    hence a thread of its own.
    """
    received: list[int] = []

    def interrupted(number: int, frame: Any) -> None:
        received.append(number)
        if len(received) == 1:
            canceling = threading.Thread(target=_quietly, args=(_cancel_jobs, spark), daemon=True)
            canceling.start()
            canceling.join()
        handlers[number](number, frame)

    with _handling(handlers, interrupted):
        yield


def _prepare(spark: "SparkSession", py_files: Iterable[str]) -> None:
    use_this_interpreter(spark)
    for path in py_files:
        if "://" not in path and not Path(path).is_file():
            raise InputError(f"{path}: no such file; `coowned spark-package -o {path}` writes one")
        spark.sparkContext.addPyFile(path)


def use_this_interpreter(spark: "SparkSession") -> None:
    """Makes Python workers use the interpreter of this process, unless another one was configured.

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
    """Turns Spark's errors into one sentence: InputError if the data are to blame, else OSError.

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
            file = re.search(r"while reading file (\S+?)[.,]? ", text)
            named = source if file is None else unquote(re.sub("^file:/+", "/", file[1]))
            raise InputError(f"{named}: {unreadable} (Spark: {blame[1]})") from error
        if "No space left on device" in text:
            raise OSError(f"{source}: a disk is full; make room in {_folders()}") from error
        raise OSError(f"{source}: Spark failed ({_reason(text)}); --verbose shows more") from error


def _folders() -> str:
    """Returns a sentence that says where Spark writes, and how to choose another place."""
    from pyspark.sql import SparkSession

    running = SparkSession.getActiveSession()
    temporary = tempfile.gettempdir()
    if running is None:
        return f"{temporary}, or give another folder with --checkpoint-dir"
    checkpoints = re.sub("^file:/+", "/", running.sparkContext.getCheckpointDir() or temporary)
    local = running.sparkContext.getConf().get("spark.local.dir") or temporary
    return (
        f"{checkpoints} (the tables between two steps; --checkpoint-dir) and, on the executors, {local} (what they "
        "shuffle; --conf spark.local.dir=DIR), or give others"
    )


def _reason(text: str) -> str:
    """Returns the reason of a Spark failure, without stack traces.

    >>> _reason("Job aborted: An exception was thrown from the Python worker: Traceback ... KeyError: 'x' at org.a.B")
    'a Python worker raised KeyError'
    >>> _reason("Job aborted due to stage failure: Lost task 0.3 (10.0.0.1 executor 1): a.b.C: boom at a.b.C(D.java:1)")
    'Job aborted due to stage failure: Lost task 0.3 (10.0.0.1 executor 1): a.b.C: boom'
    """
    if "Traceback" in text:
        raised = re.findall(r"\b((?:\w+\.)*\w*(?:Error|Exception)): ", text.partition("Traceback")[2])
        return f"a Python worker raised {raised[0]}" if raised else "a Python worker failed"
    return re.split(r"\s+at \S+\(| SQLSTATE", text)[0][:300]


def _local_settings() -> dict[str, str]:
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4 >> 20 if hasattr(os, "sysconf") else 2048
    return {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": f"{max(memory, 1024)}m",
        "spark.sql.shuffle.partitions": str(max(4, 2 * (os.cpu_count() or 1))),
    }
