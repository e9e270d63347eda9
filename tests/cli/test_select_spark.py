"""`coowned select --engine spark`: the S and the certificate of the local engine."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from coowned.cli.main import run


@pytest.fixture
def data(tmp_path):
    file = tmp_path / "mail.csv"
    file.write_text("id,users\n" + "".join(f"m{i},U{i % 7};u{i % 5}\n" for i in range(60)))
    return file


def select(data, *more, output="S.parquet"):
    fixed = ["select", str(data), "--separator", ";", "--contribution-bound", "3"]
    return run([*fixed, "-o", str(data.parent / output), *more])


def without_sizes(text):
    """What was printed, but for the sizes of files: Spark compresses Parquet in its own way."""
    return re.sub(r"\([\d.]+ \w+\)", "", text)


@pytest.mark.full
def test_equals_the_local_engine(data, capsys):
    words = ["--example-id", "id", "--selector", "greedy-with-duplicates", "--seed", "5"]
    assert select(data, *words, output="local.parquet") == 0
    local = capsys.readouterr().out
    assert select(data, *words, "--engine", "spark", "--master", "local[2]") == 0
    assert without_sizes(capsys.readouterr().out) == without_sizes(local.replace("local.", "S."))
    folder = data.parent
    assert (folder / "S.parquet").is_dir()
    assert (folder / "S.certificate.json").read_text() == (folder / "local.certificate.json").read_text()
    assert sorted(path.name for path in folder.iterdir() if path.name.startswith(("S", "."))) == [
        "S.certificate.json",
        "S.parquet",
    ]
    assert run(["certify", str(data), str(folder / "S.parquet"), "--separator", ";", "--example-id", "id"]) == 0
    assert "holds: " in capsys.readouterr().out

    from pyspark.sql import SparkSession

    assert SparkSession.getActiveSession() is None  # what was started was stopped


@pytest.mark.full
def test_advice_on_heavy_users_is_the_local_one(data, capsys):
    data.write_text("id,users\n" + "".join(f"m{i},owner;u{i}\n" for i in range(40)) + "alone,\n")
    assert select(data, "--example-id", "id", output="local.parquet") == 0
    said = capsys.readouterr().err
    assert said.startswith("1 user keeps 37 of 41 examples out at a contribution bound of 3. ")
    assert select(data, "--example-id", "id", "--engine", "spark", "--master", "local[1]") == 0
    assert said in capsys.readouterr().err


@pytest.mark.full
def test_json_and_bad_data(data, capsys):
    from coowned.spark import session

    with session("local[2]", spark__sql__adaptive__enabled="false", spark__sql__shuffle__partitions=2):
        assert select(data, "--example-id", "id", "--engine", "spark", "--json") == 0
        assert json.loads(capsys.readouterr().out)["contribution_bound"] == 3
        data.write_text("id,users\n1,ann\n2\n")
        assert select(data, "--example-id", "id", "--engine", "spark", output="again.parquet") == 2
        said = capsys.readouterr().err
        assert f"{data}: a row has more or fewer cells than the header" in said
        assert said.count("\n") == 1
    assert not (data.parent / "again.parquet").exists()


@pytest.mark.full
def test_bad_data_is_one_sentence_of_a_process(data):
    """What Java writes goes past capsys: only a process of its own shows it."""
    data.write_text("id,users\n1,ann\n2\n")
    words = ["select", str(data), "--example-id", "id", "--contribution-bound", "1", "--engine", "spark"]
    words += ["--master", "local[1]", "-o", str(data.parent / "S.parquet")]
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from coowned.cli.main import run; sys.exit(run(sys.argv[1:]))", *words],
        capture_output=True,
        text=True,
        timeout=1800,  # for what hangs, not for a busy machine
        check=False,
    )
    assert done.returncode == 2
    own = ("WARNING: Using incubator modules", "Picked up ", "NOTE: Picked up ", "OpenJDK ")  # the JVM's, once a start
    said = [line for line in done.stderr.splitlines() if not line.startswith(own)]
    assert len(said) == 1
    assert "a row has more or fewer cells than the header" in said[0]


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["coowned-*", "coowned-*/*/coowned-*/attributed"])
def test_interrupt_is_one_sentence(data, number, moment):
    """Ctrl-C goes to Java too: before a job and in the middle of one the command ends with 130 and leaves nothing."""
    data.write_text("id,users\n" + "".join(f"m{i},u{i % 70};u{i % 50}\n" for i in range(100_000)))
    temporary = data.with_name("tmp")
    temporary.mkdir()
    words = ["select", str(data), "--example-id", "id", "--contribution-bound", "1", "--engine", "spark"]
    words += ["--separator", ";", "--master", "local[1]", "-o", str(data.parent / "S.parquet")]
    words += ["--conf", f"spark.local.dir={temporary / 'spark'}"]
    running = subprocess.Popen(
        [sys.executable, "-m", "coowned", *words],
        stderr=subprocess.PIPE, text=True, start_new_session=True, env=os.environ | {"TMPDIR": str(temporary)},
    )  # fmt: skip
    while not list(temporary.glob(moment)):
        assert running.poll() is None
        time.sleep(0.05)
    os.killpg(running.pid, number) if number == signal.SIGINT else running.terminate()
    _, said = running.communicate(timeout=600)
    assert running.returncode == 130, said
    own = ("WARNING: Using incubator modules", "Picked up ", "NOTE: Picked up ", "OpenJDK ", "selecting with ")
    said = [line for line in said.splitlines() if not line.startswith(own)]
    assert said == ["coowned: interrupted; no partial files were left behind"]
    assert sorted(path.name for path in data.parent.iterdir()) == ["mail.csv", "tmp"]
    assert not list(temporary.glob("coowned-*"))


@pytest.mark.full
def test_addresses_go_to_spark(data, capsys):
    """file:// stands for hdfs:// and its like: whatever has an address is read and written by Spark alone."""
    words = ["--example-id", "id", "--seed", "5", "--separator", ";", "--contribution-bound", "3"]
    assert run(["select", str(data), *words, "-o", str(data.parent / "local.parquet")]) == 0
    target = f"file://{data.parent}/S.parquet"
    assert run(["select", f"file://{data}", *words, "--engine", "spark", "--master", "local[1]", "-o", target]) == 0
    assert run(["select", f"file://{data}", *words, "--engine", "spark", "--master", "local[1]", "-o", target]) == 2
    assert f"wrote {target} and file://{data.parent}/S.certificate.json" in capsys.readouterr().out.replace("\n", "")
    folder = data.parent
    assert (folder / "S.certificate.json").read_text() == (folder / "local.certificate.json").read_text()
    assert run(["certify", str(data), str(folder / "S.parquet"), "--separator", ";", "--example-id", "id"]) == 0


@pytest.mark.parametrize(
    ("given", "output", "words", "message"),
    [
        (
            "hdfs://head/y.parquet",
            "S.parquet",
            [],
            "hdfs://head/y.parquet: the local engine reads files of this machine",
        ),
        ("hdfs://head/y.parquet", "hdfs://head/y.parquet", ["--engine", "spark"], "would overwrite its own input"),
        ("hdfs://head/y", "hdfs://head/y/S.parquet", ["--engine", "spark"], "is inside the data folder"),
        ("hdfs://head/y", "S.parquet", ["--engine", "spark", "--example-id", "id"], "hdfs://head/y: unknown format"),
        ("hdfs://head/y.csv", "hdfs://head/", ["--engine", "spark"], "not the URL of a selection"),
    ],
)
def test_addresses_are_kept_as_they_are(tmp_path, monkeypatch, capsys, given, output, words, message):
    monkeypatch.chdir(tmp_path)
    assert run(["select", given, "--contribution-bound", "1", "-o", output, *words]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--example-id", "id", "--master", "local[2]"], "--master applies to Spark only"),
        (["--engine", "spark"], "has no row numbers; name the column with the ids (--example-id)"),
        (["--engine", "spark", "--format", "mail"], "Spark reads parquet, csv and jsonl, not mail"),
        (["--engine", "spark", "--example-id", "id", "--selector", "integer-program"], "does not run on Spark"),
        (["--engine", "spark", "--example-id", "id", "--ties", "input"], "does not apply to Spark"),
    ],
)
def test_refusals_are_one_sentence(data, capsys, words, message):
    assert select(data, *words) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert sorted(path.name for path in data.parent.iterdir()) == ["mail.csv"]
