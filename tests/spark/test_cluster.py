"""A standalone master and two workers on this machine: what docs/spark.md says to do there works, and what is missing
is said in one sentence."""

import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest

from coowned.cli.main import run
from coowned.selection.shards import read_shards

pytestmark = pytest.mark.full
PAGE = Path(__file__).parents[2] / "docs" / "spark.md"
SOURCE = Path(__file__).parents[2] / "src"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[str]:
    """The address of the master; nothing but 127.0.0.1 listens, and the workers know nothing of this package."""
    import pyspark

    spark = Path(pyspark.__file__).parent
    folder, port = tmp_path_factory.mktemp("cluster"), free_port()
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYSPARK_PYTHON")
    } | {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_DAEMON_MEMORY": "256m", "SPARK_HOME": str(spark)}
    master = f"spark://127.0.0.1:{port}"
    ours = ["--host", "127.0.0.1", "--webui-port", "0"]
    daemons: list[list[str]] = [["Master", *ours, "--port", str(port)]]
    for number in range(2):
        daemons.append(["Worker", *ours, "--cores", "1", "--memory", "600m", "-d", str(folder / str(number)), master])
    with contextlib.ExitStack() as running:
        for kind, *words in daemons:
            log = running.enter_context((folder / f"{len(list(folder.iterdir()))}-{kind}.log").open("w"))
            command = [str(spark / "bin" / "spark-class"), f"org.apache.spark.deploy.{kind.lower()}.{kind}", *words]
            daemon = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
            running.callback(daemon.wait)
            running.callback(daemon.terminate)
        told = next(folder.glob("*-Master.log"))
        while told.read_text().count("Registering worker") < 2:
            assert daemon.poll() is None, told.read_text()
            time.sleep(0.2)
        yield master


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory) -> Path:
    """A Python with everything that this one has, but for this package."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    (folder / "packages").mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "coowned" not in entry.name:
            (folder / "packages" / entry.name).symlink_to(entry)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (site / "packages.pth").write_text(f"{folder / 'packages'}\n")
    return folder / "venv" / "bin" / "python"


@pytest.fixture
def data(tmp_path):
    file = tmp_path / "mail.csv"
    file.write_text("id,users\n" + "".join(f"m{i},U{i % 31};u{i % 29}\n" for i in range(60)))
    return file


def coowned(*words: object, **environment: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a process, without what Java itself says once a start, and without progress."""
    settings = os.environ | {"PYTHONPATH": str(SOURCE), "SPARK_LOCAL_IP": "127.0.0.1"} | environment
    command = [sys.executable, "-m", "coowned", *map(str, words)]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=600, check=False)
    own = ("WARNING: Using incubator modules", "Picked up ", "NOTE: Picked up ", "OpenJDK ")
    own += ("selecting with greedy: ", "inspecting: ", "recounting: ")  # a line every half minute
    said = "".join(line for line in done.stderr.splitlines(keepends=True) if not line.startswith(own))
    return done.returncode, done.stdout, said


QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
SETTINGS = {
    "driver.host": "127.0.0.1",
    "driver.memory": "512m",
    "driver.defaultJavaOptions": QUICK,
    "executor.memory": "512m",
    "executor.extraJavaOptions": QUICK,
    "sql.shuffle.partitions": "2",
    "sql.adaptive.enabled": "false",
    "sql.codegen.wholeStage": "false",
}
CONF = [word for name, value in SETTINGS.items() for word in ("--conf", f"spark.{name}={value}")]


def select(data: Path, master: str, *more: object) -> tuple[int, str, str]:
    words = ["select", data, "--example-id", "id", "--contribution-bound", "3"]
    words += ["--separator", ";"] if data.suffix == ".csv" else []
    words += ["--engine", "spark", "--master", master, "-o", data.with_name("S.parquet")]
    return coowned(*words, *CONF, *more)


def page_commands(heading: str) -> list[list[str]]:
    """The commands of a section of docs/spark.md."""
    text = PAGE.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    block = "\n".join(line[4:] for line in text.splitlines() if line.startswith("    "))
    return [shlex.split(command)[1:] for command in block.replace("\\\n", " ").splitlines()]


def test_the_steps_of_the_page(cluster, bare_python, tmp_path, capsys):
    """The package in a zip, a folder that all share, and the S and the rows of one machine from the train split."""
    mail = {
        "message_id": [f"<{number}@x.org>" for number in range(80)],
        "sender": [f"User{number % 37}@x.org" for number in range(80)],
        "to": [f"user{number % 29}@x.org;user{number % 31}@x.org" for number in range(80)],
    }
    pl.DataFrame(mail).write_parquet(tmp_path / "mail.parquet")
    (tmp_path / "tmp").mkdir()
    commands = page_commands("On a cluster")
    assert [words[0] for words in commands] == ["spark-package", "inspect", "select", "certify"]
    for words in commands:
        places = {
            "spark://head:7077": cluster,
            "hdfs://head": tmp_path.as_uri(),
            "coowned.zip": str(tmp_path / "c.zip"),
        }
        for place, here in places.items():
            words = [word.replace(place, here) for word in words]
        more = [] if words[0] == "spark-package" else [*CONF, "--conf", f"spark.pyspark.python={bare_python}"]
        assert coowned(*words, *more)[::2] == (0, ""), words
    assert list((tmp_path / "tmp").iterdir()) == []
    own = ["--users", "sender,to", "--separator", ";", "--example-id", "message_id", "--splits", "0.8,0.1,0.1"]
    local = ["select", str(tmp_path / "mail.parquet"), *own, "--contribution-bound", "3"]
    assert run([*local, "-o", str(tmp_path / "local.parquet")]) == 0
    assert (tmp_path / "S.certificate.json").read_text() == (tmp_path / "local.certificate.json").read_text()
    chosen = pl.read_parquet(tmp_path / "S.parquet" / "*.parquet").sort("example_id")
    assert chosen.equals(pl.read_parquet(tmp_path / "local.parquet").sort("example_id"))
    rows = read_shards(tmp_path / "shards")
    assert rows.manifest.graph_digest == json.loads((tmp_path / "S.certificate.json").read_text())["graph_digest"]
    assert rows.content.schema.names == list(mail)


def test_executors_without_the_package(cluster, bare_python, data):
    """And those without what it needs, of another version, or without a Python at all."""
    shared = ["--checkpoint-dir", data.parent]

    def refusal(python: object, *more: object) -> str:
        code, out, said = select(data, cluster, *shared, "--conf", f"spark.pyspark.python={python}", *more)
        assert (code, out, said.count("\n")) == (2, "", 1), said
        return said

    assert "has no coowned 0" in (said := refusal(bare_python))
    assert "`coowned spark-package -o coowned.zip` writes it, and --py-files coowned.zip" in said
    old = data.with_name("old")
    (old / "coowned" / "spark").mkdir(parents=True)
    (old / "coowned" / "__init__.py").write_text("__version__ = '0.0.1'\n")
    for name in ("__init__", "attribution"):
        (old / "coowned" / "spark" / f"{name}.py").touch()
    assert "has coowned 0.0.1, not " in refusal(bare_python, "--conf", f"spark.executorEnv.PYTHONPATH={old}")
    empty = data.with_name("empty")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(empty)], check=True)
    said = refusal(empty / "bin" / "python", "--conf", f"spark.executorEnv.PYTHONPATH={SOURCE}")
    assert "which coowned needs; pack an environment that has coowned (venv-pack, conda-pack)" in said
    assert "have no Python at /nowhere/python; name theirs" in refusal("/nowhere/python")


def test_integers_need_no_python(cluster, data):
    file = data.with_name("numbers.parquet")
    pl.DataFrame({"id": range(60), "users": [[i % 31, 40 + i % 29] for i in range(60)]}).write_parquet(file)
    more = ["--checkpoint-dir", data.parent, "--conf", "spark.pyspark.python=/nowhere/python", "--verbose"]
    code, _, said = select(file, cluster, *more)
    assert code == 0, said


def test_a_cluster_needs_a_folder_that_is_shared(cluster, data):
    code, out, said = select(data, cluster)
    assert (code, out, said.count("\n")) == (2, "", 1)
    assert "give it with --checkpoint-dir" in said
