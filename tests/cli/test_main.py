"""The command line as a whole: exit codes, help, what is imported, and that nothing half-written stays behind."""

# ruff: noqa: E501 (tables of cases: one case a line)

import os
import re
import signal
import subprocess
import sys
import textwrap

import pytest
import typer.main
from tests.folders import names

from coowned import CertificateMismatchError, InfeasibleScheduleError, InputError
from coowned.cli import main
from coowned.selection.greedy import Greedy

VERBS = sorted(command.name for command in main.commands().registered_commands)


def select(data, *more):
    return [
        "select",
        str(data),
        "--separator",
        ";",
        "--contribution-bound",
        "2",
        "-o",
        str(data.parent / "S.parquet"),
        *more,
    ]


def coowned(*arguments, **options):
    command = [sys.executable, "-c", "from coowned.cli.main import main; main()"]
    return subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, check=False, **options)


def test_exit_codes(data, monkeypatch, capsys):
    assert main.run(select(data)) == 0
    assert main.run(["certify", str(data), str(data.parent / "S.parquet"), "--separator", ";", "--users", "id"]) == 1
    assert main.run(select(data, "--selector", "nope")) == 2
    capsys.readouterr()
    for failure, code, message in [
        (CertificateMismatchError("the claim\nfails"), 1, "coowned: the claim fails\n"),
        (InputError("bad input"), 2, "coowned: bad input\n"),
        (InfeasibleScheduleError("no room", filled=1, needed=2), 2, "coowned: no room\n"),
        (
            OSError(28, "No space left on device", "/x"),
            3,
            "coowned: /x: No space left on device; make room there, or write to another disk\n",
        ),
        (MemoryError(), 3, "coowned: out of memory; use a machine with more memory or a smaller part of the data\n"),
        (KeyboardInterrupt(), 130, "coowned: interrupted; no partial files were left behind\n"),
    ]:
        (data.parent / "S.parquet").unlink(missing_ok=True)
        (data.parent / "S.certificate.json").unlink(missing_ok=True)

        def fail(*_, failure=failure, **__):
            raise failure

        monkeypatch.setattr(Greedy, "select", fail)
        assert main.run(select(data)) == code
        output = capsys.readouterr()
        assert (output.out, output.err) == ("", message)
        assert names(data.parent) == ["mail.csv"]


def test_a_fault_of_ours_is_not_a_failed_claim(data, monkeypatch, capsys):
    monkeypatch.setattr(Greedy, "select", lambda *_, **__: 1 // 0)
    assert main.run(select(data)) == 3
    error = capsys.readouterr().err
    assert "ZeroDivisionError" in error
    assert error.endswith("coowned: this is a bug in coowned; please report it with the lines above\n")
    assert names(data.parent) == ["mail.csv"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["nope"],
        ["inspect"],
        ["select", "x.csv"],
        ["inspect", "x.csv", "--nope"],
        ["select", "x", "-o", "y", "--seed", "a"],
    ],
)
def test_usage_errors_are_one_sentence(arguments, capsys):
    assert main.run(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert re.fullmatch(r"coowned: .*; see --help\n", output.err)


def test_no_arguments_shows_the_help(capsys):
    assert main.run([]) == 2
    output = capsys.readouterr()
    assert "Usage: coowned" in output.out
    assert output.err == ""


def test_version(capsys):
    assert main.run(["--version"]) == 0
    assert re.fullmatch(r"coowned \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


@pytest.mark.parametrize("verb", VERBS)
def test_every_help_has_examples(verb, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main.run([verb, "--help"]) == 0
    text = capsys.readouterr().out
    assert "Example" in text
    assert f"coowned {verb}" in text
    assert "--json" in text
    # As written: a command that continues on the next line keeps its backslash.
    written = typer.main.get_command(main.commands()).commands[verb].callback.__doc__  # type: ignore[attr-defined]
    for line in re.findall(rf"(?m)^ {{8}}(coowned {verb}\b.*)$", written):
        assert line in text


def test_every_example_in_a_help_parses():
    """The commands shown name options that exist."""
    group = typer.main.get_command(main.commands())
    found = 0
    for verb in VERBS:
        command = group.commands[verb]  # type: ignore[attr-defined]
        known = {flag for option in command.params for flag in [*option.opts, *option.secondary_opts]}
        for line in re.findall(rf"(?m)^\s*coowned {verb}\b.*$", command.callback.__doc__ or command.help):
            found += 1
            assert set(re.findall(r"(?<=\s)--?[a-z][a-z-]*", line)) <= known
    assert found >= len(VERBS)


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom coowned.cli.main import run\nassert run(['--help']) == 0\nassert run(['select', '--help']) == 0\n"
        "heavy = {'jax', 'numba', 'pyspark', 'polars', 'pyarrow', 'numpy', 'scipy', 'pandas', 'dp_accounting', 'altair'}\n"
        "sys.exit(str(sorted(heavy & set(sys.modules))) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    timed = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "from coowned.cli.main import main; main(['--help'])"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert timed.returncode == 0
    imported = set(re.findall(r"\|\s+(\w+)", timed.stderr))
    assert "typer" in imported
    assert not imported & {"jax", "numba", "pyspark", "polars", "pyarrow"}


def test_as_a_process(data):
    # On a terminal that cannot show every letter, too.
    done = coowned("inspect", data, "--separator", ";", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "Heaviest users" in done.stdout
    bad = coowned("inspect", data.parent / "no.csv")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr == f"coowned: {data.parent / 'no.csv'}: no such file or folder; check the path\n"


def test_output_that_nobody_reads(data):
    command = [
        sys.executable,
        "-c",
        "from coowned.cli.main import main; main()",
        "inspect",
        str(data),
        "--separator",
        ";",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(500) == 0


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_interrupts_leave_nothing(data, kind):
    # A selection that never ends, so that the signal always arrives while files are open. Ctrl-C is heard as at a
    # terminal: whoever runs the tests in the background may have had it ignored.
    code = (
        "import signal, sys, time\nfrom coowned.cli.main import main\nfrom coowned.selection.greedy import Greedy\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def forever(*_, **__):\n    print('selecting', flush=True)\n    time.sleep(600)\n"
        "Greedy.select = forever\nmain(sys.argv[1:])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, *select(data)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "selecting\n"
        assert len(names(data.parent)) == 3  # two hidden rooms beside the data
        process.send_signal(kind)
        _, error = process.communicate(timeout=500)
    assert (process.returncode, error) == (130, "coowned: interrupted; no partial files were left behind\n")
    assert names(data.parent) == ["mail.csv"]


def interrupted(data, kind, body):
    """(exit code, stdout, stderr) of a selection that does this first; `kill()` sends the signal to the process itself."""
    code = (
        "import gc, os, signal, sys, time\nfrom coowned.cli.main import main\n"
        "from coowned.selection.greedy import Greedy\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\nselect = Greedy.select\n"
        f"def kill():\n    os.kill(os.getpid(), {int(kind)})\n    time.sleep(600)\n"
        f"def selecting(self, graph, **options):\n{textwrap.indent(textwrap.dedent(body), '    ')}\n"
        "    return select(self, graph, **options)\nGreedy.select = selecting\nmain(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *select(data)], capture_output=True, text=True, check=False, timeout=500
    )
    return done.returncode, done.stdout, done.stderr


INTERRUPTED = (130, "", "coowned: interrupted; no partial files were left behind\n")


@pytest.mark.parametrize("kind", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "body",
    [
        """
        try:  # as an optional import does
            kill()
        except BaseException:
            pass
        """,
        """
        try:
            kill()
        except BaseException:
            raise ImportError("half a module")
        """,
        """
        def callback(phase, info):
            gc.callbacks.clear()
            kill()
        gc.callbacks.append(callback)
        gc.collect()
        """,
    ],
)
def test_swallowed_interrupt_ends_the_command(data, kind, body):
    assert interrupted(data, kind, body) == INTERRUPTED


def test_second_interrupt(data):
    body = """
    try:
        kill()
    except KeyboardInterrupt:
        kill()
    """
    assert interrupted(data, signal.SIGINT, body) == INTERRUPTED
    assert names(data.parent) == ["mail.csv"]


def test_interrupt_ends_the_process_at_once(data):
    """What would crash while the interpreter is torn down does not get there."""
    body = """
    import atexit
    atexit.register(os.abort)
    kill()
    """
    assert interrupted(data, signal.SIGINT, body) == INTERRUPTED
    assert names(data.parent) == ["mail.csv"]
