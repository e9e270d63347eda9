"""The options that say where the data are, and what a shell offers for them."""

import dataclasses
import os
import subprocess
import sys

import pytest

from coowned.attribution import options
from coowned.attribution.sources import DataSource
from coowned.cli.main import run
from coowned.runs.settings import DataSettings


def complete(shell, words, **more):
    """What a shell gets when it asks for the next word of a command line, and what was imported for that."""
    code = (
        "import atexit, sys\n"
        "heavy = {'jax', 'numba', 'pyspark', 'pyarrow'}\n"
        "atexit.register(lambda: sys.stderr.write(' '.join(heavy & set(sys.modules))))\n"
        "from coowned.cli.main import main\nmain()"
    )
    asked = {"_COOWNED_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": words, "COMP_WORDS": words, **more}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ, **asked}
    )


@pytest.mark.parametrize(
    ("words", "place", "offered"),
    [
        ("coowned ins", 1, {"inspect"}),
        ("coowned select --sel", 2, {"--selector"}),
        ("coowned select mail --selector int", 4, {"integer-program"}),
        ("coowned plan mail --adjacency z", 4, {"zero-out"}),
        ("coowned inspect mail.db --quer", 3, {"--query"}),
        ("coowned inspect export --attribute-to p", 4, {"participants"}),
        ("coowned inspect mail --format s", 4, {"slack", "sql"}),
    ],
)
def test_bash_completion(words, place, offered):
    done = complete("bash", words, COMP_CWORD=str(place))
    assert (done.returncode, done.stderr) == (0, "")
    assert set(done.stdout.split()) == offered


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_of_other_shells(shell):
    done = complete(shell, "coowned ins", _TYPER_COMPLETE_FISH_ACTION="get-args")
    assert (done.returncode, done.stderr) == (0, "")
    assert "inspect" in done.stdout


def test_completion_can_be_installed(capsys):
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    assert "--install-completion" in text
    assert "--show-completion" in text


def test_options_are_declared_once(capsys):
    names = set(options.declared())
    assert {field.name for field in dataclasses.fields(DataSource)} == {*names, "path"}
    assert {field.name for field in dataclasses.fields(DataSettings)} == {*names, "path", "splits", "shards"}
    for verb in ("inspect", "plan", "select", "certify"):
        assert run([verb, "--help"]) == 0
        text = capsys.readouterr().out
        assert all(f"--{name.replace('_', '-')}" in text for name in names)
