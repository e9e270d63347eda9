"""The command line: one verb per stage, one file per verb.

Nothing slow is imported here or at the top of a verb's file, so that `coowned --help` is fast.
"""

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer
import typer.main

import coowned
from coowned import interrupts
from coowned.errors import CertificateMismatchError, CoownedError, WorkerLostError
from coowned.files import is_full

EXIT_CLAIM, EXIT_INPUT, EXIT_MACHINE, EXIT_INTERRUPTED = 1, 2, 3, 130

VERBS = (
    "demo", "inspect", "aliases", "plan", "select", "certify", "calibrate", "train", "audit", "report", "export-model",
    "predict", "compose", "tune", "spark-package",
)  # fmt: skip

# The base class of usage errors; typer may bundle its own copy of click, so it is looked up here.
_UsageError = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"coowned {coowned.__version__}")
        raise typer.Exit()


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


def commands(verbs: Sequence[str] = VERBS) -> typer.Typer:
    """Imports these verbs and returns the command line that has them."""
    app = typer.Typer(
        name="coowned",
        help="Train models with user-level differential privacy where one example may belong to several people.",
        no_args_is_help=True,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for verb in verbs:
        app.command(name=verb)(importlib.import_module(f"coowned.cli.{verb.replace('-', '_')}").run)
    return app


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits the process with its exit code.

    Guarantees:
      - After an interrupt the exit code is 130, whatever still runs.   (test_interrupt_ends_the_process_at_once)
    """
    if "_COOWNED_COMPLETE" in os.environ:  # shell completion
        commands()(prog_name="coowned")
    interrupts.install_handlers()
    for stream in (sys.stdout, sys.stderr):  # a terminal that cannot show a character still shows the rest
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    code = run(sys.argv[1:] if arguments is None else arguments)
    if code in (EXIT_INTERRUPTED, EXIT_MACHINE):
        # XLA's threads may still be computing, or waiting for another worker, and crash when the interpreter shuts
        # down. Our own files are closed and cleaned up by now, so leave at once.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Runs one command; every expected failure is one sentence on stderr and an exit code.

    Guarantees:
      - 0 fine, 1 a claim does not hold, 2 bad input, 3 the machine failed, 130 interrupted.   (test_exit_codes)
    """
    try:
        with _raising_swallowed_interrupts():
            # Not app(arguments), which would handle interrupts and closed pipes in its own way.
            command = typer.main.get_command(commands([verb for verb in VERBS if verb in arguments[:1]] or VERBS))
            with command.make_context("coowned", list(arguments)) as context:
                command.invoke(context)
            sys.stdout.flush()
        return 0
    except typer.Exit as done:  # after --help and --version
        return done.exit_code
    except _UsageError as error:  # pyright: ignore[reportGeneralTypeIssues]
        message = error.format_message().strip()  # type: ignore[attr-defined]
        if not message:  # the help was shown instead
            return EXIT_INPUT
        return _say(f"{message.removesuffix('.')}; see --help", EXIT_INPUT)
    except CertificateMismatchError as error:
        return _say(error, EXIT_CLAIM)
    except WorkerLostError as error:
        return _say(error, EXIT_MACHINE)
    except CoownedError as error:
        return _say(error, EXIT_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        interrupts.clear()
        return _say("interrupted; no partial files were left behind", EXIT_INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except MemoryError:
        return _say("out of memory; use a machine with more memory or a smaller part of the data", EXIT_MACHINE)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        remedies = ["make room there, or write to another disk"] if is_full(error) else []
        remedies += getattr(error, "__notes__", [])  # what a verb advises
        return _say("; ".join([f"{place}{error.strerror or error}", *remedies]), EXIT_MACHINE)
    except Exception:  # a bug must not look like a claim that does not hold
        traceback.print_exc()
        return _say("this is a bug in coowned; please report it with the lines above", EXIT_MACHINE)


@contextlib.contextmanager
def _raising_swallowed_interrupts() -> Iterator[None]:
    """Raises an interrupt again that was swallowed, or turned into another error."""
    try:
        yield
    finally:
        interrupts.check()


def _say(message: object, code: int) -> int:
    print(f"coowned: {' '.join(str(message).split())}", file=sys.stderr)  # noqa: T201
    return code
