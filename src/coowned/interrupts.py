"""Ctrl-C and SIGTERM, remembered until the command ends.

The exception that a signal raises comes up wherever Python happens to be. In a callback of the garbage collector, or in
a library that catches whatever an optional import raises, it is lost; elsewhere it ends as another error. So it is also
recorded here, and checked wherever a command can end: at every step of a run and every report of progress.
"""

import signal
import sys
from types import FrameType

received: list[int] = []  # state of the process, as its signals are


def install_handlers() -> None:
    """Installs the signal handlers: for the command line's process, not for a library.

    Guarantees:
      - An interrupt that was swallowed, or turned into another error, still ends the command, with one
        sentence.   (test_swallowed_interrupt_ends_the_command)
      - A second one is raised like the first.   (test_second_interrupt)
    """
    # SIGTERM ends like Ctrl-C: partial work is cleaned up.
    signal.signal(signal.SIGTERM, _receive)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as a shell starts what runs in the background
        signal.signal(signal.SIGINT, _receive)
    sys.unraisablehook = _unraisable


def was_received() -> bool:
    """Returns whether a signal was received and the command must end."""
    return bool(received)


def check() -> None:
    """Raises KeyboardInterrupt if a signal was received, even if its exception was swallowed."""
    if received:
        raise KeyboardInterrupt


def clear() -> None:
    """Clears the record, when the command has ended."""
    received.clear()


def _receive(number: int, frame: FrameType | None) -> None:
    received.append(number)
    raise KeyboardInterrupt


def _unraisable(found: "sys.UnraisableHookArgs") -> None:
    """Prints nothing about an interrupt that could not be raised: it is recorded."""
    if not (received and issubclass(found.exc_type, KeyboardInterrupt)):
        sys.__unraisablehook__(found)
