"""Ctrl-C and a polite kill, remembered until the command ends.

The exception that a signal raises comes up wherever Python happens to be. In a callback of the garbage collector, or in
a library that catches whatever an optional import raises, it is lost; elsewhere it ends as another error. So it is also
noted here, and looked at wherever a command can end: at every step of a run and every word of progress.
"""

import signal
import sys
from types import FrameType

_heard: list[int] = []  # state of the process, as its signals are


def listen() -> None:
    """Hears signals from now on: for a process that is the command line, not for a library.

    Guarantees:
      - An interrupt that was swallowed, or turned into another error, still ends the command, with one
        sentence.   (test_swallowed_interrupt_ends_the_command)
      - A second one is raised like the first.   (test_second_interrupt)
    """
    # A polite kill ends like Ctrl-C: what was begun is cleared away.
    signal.signal(signal.SIGTERM, _hear)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as a shell starts what runs in the background
        signal.signal(signal.SIGINT, _hear)
    sys.unraisablehook = _unraisable


def is_heard() -> bool:
    """Whether the command is to end."""
    return bool(_heard)


def check() -> None:
    """Raises KeyboardInterrupt where one was heard, whatever became of it."""
    if _heard:
        raise KeyboardInterrupt


def forget() -> None:
    """Once the command has ended for it."""
    _heard.clear()


def _hear(number: int, frame: FrameType | None) -> None:
    _heard.append(number)
    raise KeyboardInterrupt


def _unraisable(found: "sys.UnraisableHookArgs") -> None:
    """Says nothing of an interrupt that could not be raised: it is noted."""
    if not (_heard and issubclass(found.exc_type, KeyboardInterrupt)):
        sys.__unraisablehook__(found)
