"""The how-to "Outgrowing one machine", followed as it stands: from a table to a model trained by two workers."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
from safetensors.numpy import load_file

from coowned.runs.launch import free_port

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "outgrowing-one-machine.md"


def section():
    text = PAGE.read_text(encoding="utf-8")
    return text[text.index("## From a table to a model") : text.index("## Select once")]


def commands():
    """(variables, arguments) of every command of the section that is ours, in order."""
    port = str(free_port())
    for line in re.findall(r"^ {4}(.*coowned .*)$", section().replace("\\\n", ""), re.MULTILINE):
        words = shlex.split(line.replace("10.0.0.7", "127.0.0.1").replace("29500", port))
        begin = words.index("coowned")
        yield dict(word.split("=") for word in words[:begin]), words[begin + 1 :]


def write_table(folder):
    words = {"physics": "quark lepton field photon mass", "biology": "cell gene protein leaf enzyme"}
    rows = [
        {
            "id": f"paper {i}",
            "authors": [f"author {i % 500}", f"author {(11 * i + 3) % 400}"],
            "text": " ".join(words[field].split()[i % 3 :]) + f" study {i % 7}",
            "field": field,
        }
        for i, field in ((i, ["physics", "biology"][i % 2]) for i in range(1200))
    ]
    pl.DataFrame(rows).write_parquet(folder / "papers.parquet")


def start(folder, variables, arguments):
    environment = os.environ | variables
    command = [sys.executable, "-m", "coowned", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes)


def finish(*processes):
    for process in processes:
        said = process.communicate(timeout=300)[0]
        assert process.returncode == 0, said


@pytest.mark.full
@pytest.mark.parametrize("engine", ["local", "spark"])
def test_the_page_is_followed(tmp_path, engine):
    on_spark, locally, first, second, *after = commands()
    assert [arguments[0] for _, arguments in (on_spark, locally, first, second)] == ["select"] * 2 + ["train"] * 2
    assert "spark" in on_spark[1]
    write_table(tmp_path)
    [configuration] = re.findall(r"^```toml\n(.*?)^```$", section(), re.MULTILINE | re.DOTALL)
    (tmp_path / "run.toml").write_text(configuration, encoding="utf-8")
    if engine == "spark":
        words = [word.replace("hdfs://head", tmp_path.as_uri()) for word in on_spark[1]]
        words = [word.replace("spark://head:7077", "local[1]") for word in words]
        finish(start(tmp_path, {}, ["spark-package", "-o", "coowned.zip"]))
        finish(start(tmp_path, on_spark[0], words))
    else:
        finish(start(tmp_path, *locally))
    (tmp_path / "papers.parquet").unlink()  # the hosts need the shards alone
    finish(start(tmp_path, *first), start(tmp_path, *second))
    assert not (tmp_path / "RUN-1").exists()
    for command in after:
        finish(start(tmp_path, *command))
    assert (tmp_path / "RUN" / "report.html").exists()
    assert load_file(tmp_path / "released" / "model.safetensors")["weights"].shape == (4096,)
