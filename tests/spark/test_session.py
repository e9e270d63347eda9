"""A machine without Spark is told what to install."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import coowned as co
from coowned import spark as spark_package
from coowned.cli.main import run
from coowned.spark.executors import check_shared
from coowned.spark.session import check_machine, check_master, session, spark_errors


def refusal(capsys, tmp_path):
    (tmp_path / "pairs.csv").write_text("id,users\n1,ann\n")
    code = run(
        f"select {tmp_path / 'pairs.csv'} --example-id id --contribution-bound 1 --engine spark".split()
        + f"-o {tmp_path / 'S.parquet'}".split()
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pairs.csv"]
    return code, capsys.readouterr().err


def test_without_the_extra(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "pyspark", None)
    code, said = refusal(capsys, tmp_path)
    assert code == 2
    assert said.count("\n") == 1
    assert "the Spark engine needs pyspark, which is not installed" in said
    assert "pip install 'coowned[spark]'" in said


def test_without_java(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: object())
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    code, said = refusal(capsys, tmp_path)
    assert code == 2
    assert said.count("\n") == 1
    assert "no Java was found" in said
    assert "Java 17 or newer" in said


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("echo 'openjdk version \"11.0.2\"' >&2", "is Java 11"),
        ("echo 'java version \"1.8.0_301\"' >&2", "is Java 8"),
        ("echo hello", "is of an unknown version"),
    ],
)
def test_old_java(monkeypatch, tmp_path, answer, message):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: object())
    (tmp_path / "bin").mkdir()
    java = tmp_path / "bin" / "java"
    java.write_text(f"#!/bin/sh\n{answer}\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(co.InputError, match=f"{message}; the Spark engine needs"):
        check_machine()


@pytest.mark.parametrize("master", ["nowhere://1", "local[zwei]", "local[0]", "localhost", "spark://", "mesos://head"])
def test_what_is_no_master_is_refused(master):
    """Spark itself writes a stack trace of Java's."""
    with pytest.raises(co.InputError, match="not a Spark master; use local"):
        check_master(master)


@pytest.mark.parametrize(
    "master",
    ["local", "local[*]", "local[2]", "local[2,3]", "local[*, 4]", "local-cluster[2,1,1024]", "spark://a:1,b:2", "yarn",
     "k8s://https://head:443"],
)  # fmt: skip
def test_masters_of_spark_are_taken(master):
    check_master(master)
    with pytest.raises(co.InputError):
        check_master(f"x{master}")


@pytest.mark.full
def test_a_running_session_is_used(spark):
    with session("local[7]") as found:
        assert found is spark or found.sparkContext is spark.sparkContext
    assert spark.range(3).count() == 3  # and not stopped
    assert spark_package.session is session


# A session of the user's own, or one of ours, where the first python3 on the PATH does not even start.
NAMES = """
import sys
import coowned as co
from coowned.spark import attribute, session
from pyspark.sql import SparkSession

kind, master, *settings = sys.argv[1:]
options = dict(one.split("=") for one in settings) | {"spark.ui.enabled": "false", "spark.driver.memory": "1g"}
if kind == "theirs":
    builder = SparkSession.builder.master(master)
    for name, value in options.items():
        builder = builder.config(name, value)
    builder.getOrCreate()
with session(master, **{name.replace(".", "__"): value for name, value in options.items()}) as spark:
    table = spark.createDataFrame([("m1", ["Ann@X.org", "bob@x.org"]), ("m2", ["ann@x.org"])], ["example_id", "users"])
    print(attribute(table).num_users)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "master", "configured"),
    [
        ("ours", "local[1]", "nothing"),
        ("theirs", "local-cluster[1,1,1024]", "nothing"),
        ("ours", "local[1]", "PYSPARK_PYTHON"),
        ("theirs", "local[1]", "spark.pyspark.python"),
    ],
)
def test_python_workers_run_this_interpreter(tmp_path, kind, master, configured):
    """And one that was configured comes first: here one that leaves a mark."""
    (tmp_path / "broken").mkdir()
    broken, own = tmp_path / "broken" / "python3", tmp_path / "own-python"
    broken.write_text("#!/bin/sh\nexit 1\n")
    own.write_text(f'#!/bin/sh\ntouch {tmp_path / "used"}\nexec {sys.executable} "$@"\n')
    for script in (broken, own):
        script.chmod(0o755)
    path = f"{broken.parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("PYSPARK_PYTHON", None)
    if configured == "PYSPARK_PYTHON":
        environment[configured] = str(own)
    settings = [f"{configured}={own}"] if configured == "spark.pyspark.python" else []
    done = subprocess.run(
        [sys.executable, "-c", NAMES, kind, master, *settings],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
    assert (tmp_path / "used").exists() == (configured != "nothing")


@pytest.mark.full
def test_a_cluster_needs_a_place_for_checkpoints(spark, monkeypatch):
    from coowned.spark.checkpoints import Checkpoints

    root = Checkpoints(spark).root
    assert root.startswith("file:///")  # Spark writes one slash, which would be taken for a relative path
    assert Path(root.removeprefix("file://")).parent.is_dir()
    monkeypatch.setattr(spark.sparkContext, "master", "spark://head:7077")
    monkeypatch.setattr(spark.sparkContext, "getCheckpointDir", lambda: None)
    with pytest.raises(co.InputError, match=r"give it with --checkpoint-dir, checkpoint_dir= or spark\.checkpoint"):
        Checkpoints(spark)
    assert Checkpoints(spark, "hdfs://head/tmp").root.startswith("hdfs://head/tmp/coowned-")


@pytest.mark.full
def test_a_folder_that_is_not_shared_is_refused(spark, monkeypatch, tmp_path):
    """Executors that write to disks of their own: what they wrote is not where the driver reads."""
    from pyspark.sql.readwriter import DataFrameWriter

    monkeypatch.setattr(spark.sparkContext, "master", "spark://head:7077")
    check_shared(spark, tmp_path.as_uri())
    assert list((tmp_path / "shared").glob("*.parquet"))
    write = DataFrameWriter.parquet

    def elsewhere(self, path):
        write(self, path)
        for part in (tmp_path / "other" / "shared").glob("*.parquet"):
            part.unlink()

    monkeypatch.setattr(DataFrameWriter, "parquet", elsewhere)
    with pytest.raises(co.InputError, match="the executors have another disk than the driver; give --checkpoint-dir"):
        check_shared(spark, (tmp_path / "other").as_uri())


@pytest.mark.full
def test_a_full_disk_names_the_folders(spark):
    """The one for tables between two steps, and that of shuffles: which of them is full is not known."""
    from pyspark.errors import PySparkException

    with (
        pytest.raises(
            OSError, match=r"mail: a disk is full; make room in .*--checkpoint-dir\) and, .*spark\.local\.dir"
        ),
        spark_errors("mail"),
    ):
        raise PySparkException("Job aborted: java.io.IOException: No space left on device at a.b.C(D.java:1)")
    with (
        pytest.raises(OSError, match=r"^mail: Spark failed \(a Python worker raised KeyError\); --verbose shows more$"),
        spark_errors("mail"),
    ):
        raise PySparkException("Job aborted: Traceback (most recent call last): File x KeyError: 'secret' at a.b.C")
