"""Display of progress: a bar on a terminal or in a notebook, occasional lines in a log."""

import contextlib
import html
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from coowned import interrupts
from coowned.progress import Progress

LOG_EVERY = 30.0  # seconds between two lines of a log
Announce = Callable[[str], None]
"""Announces or tells one text."""


def to_stderr(text: str) -> None:
    """Prints a line to stderr, above a bar if there is one."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def in_notebook() -> bool:
    """Returns whether this process runs in a notebook, without importing IPython."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


def is_watched() -> bool:
    """Returns whether somebody sees a bar: on a terminal or in a notebook."""
    return sys.stderr.isatty() or in_notebook()


@contextlib.contextmanager
def progress(title: str, *, time_left: bool = True, log: Announce = to_stderr) -> Iterator[Progress]:
    """Shows a progress bar on a terminal or in a notebook; elsewhere a line every 30 seconds, which `log` writes.

    The line is written while one long step reports nothing, too, from a thread of its own.

    Without `time_left` the messages state the time themselves. What else is written to stderr appears above the bar.
    Raises KeyboardInterrupt after an interrupt.
    """
    interrupts.check()
    shown = _in_notebook(title) if in_notebook() else None
    with shown or (_bar(title, time_left) if sys.stderr.isatty() else _lines(title, log)) as update:

        def report(done: float, message: str) -> None:
            interrupts.check()
            update(done, message or title)

        yield report
    interrupts.check()


@contextlib.contextmanager
def training(*, log: Announce = to_stderr, above: Announce = to_stderr) -> Iterator[tuple[Progress, Announce]]:
    """Yields (progress, announce) for `run_configuration`: a bar, or a line every 30 seconds.

    The last announcement is written above both after the first step. Its first line, which has the
    whole claim, is in every line of a log, which may be read alone.
    """
    announced, begun = "", False

    def announce(text: str) -> None:
        nonlocal announced
        announced = text
        update(0.0, text.splitlines()[0])

    def report(done: float, text: str) -> None:
        nonlocal begun
        if not begun:
            above(announced)
        begun = True
        if is_watched():
            update(done, f"{math.floor(100 * done)}%: {text or 'started'}")
        else:
            update(done, f"{text or 'started'}; {announced.splitlines()[0].removeprefix('training: ')}")

    with progress("training", time_left=False, log=log) as update:
        yield report, announce


@contextlib.contextmanager
def _bar(title: str, time_left: bool) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    bar = Bar(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        *([TimeRemainingColumn()] if time_left else []),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(title, total=1.0)
        yield lambda done, message: bar.update(task, completed=done, description=message)


@contextlib.contextmanager
def _in_notebook(title: str) -> Iterator[Progress]:
    """Shows a bar in one output of the cell, which is updated in place, and cleared at the end."""
    shown: Any = sys.modules["IPython.display"]
    handle = shown.display(shown.HTML(notebook_bar(0.0, title)), display_id=True)
    try:
        yield lambda done, message: handle.update(shown.HTML(notebook_bar(done, message)))
    finally:
        handle.update(shown.HTML(""))


def notebook_bar(done: float, message: str) -> str:
    """Returns the bar as HTML.

    >>> notebook_bar(0.25, "3 < 4")
    '<progress value="0.25" max="1"></progress> 3 &lt; 4'
    """
    return f'<progress value="{done:g}" max="1"></progress> {html.escape(message)}'


@contextlib.contextmanager
def _lines(title: str, log: Announce) -> Iterator[Progress]:
    """Writes a line every LOG_EVERY seconds, also while one piece of work reports nothing."""
    newest, last, writing, over = (0.0, title), time.monotonic(), threading.Lock(), threading.Event()

    def write() -> None:
        nonlocal last
        with writing:
            if not over.is_set() and time.monotonic() - last >= LOG_EVERY:
                last = time.monotonic()
                done, message = newest
                log(f"{title}: {done:.0%}{'' if message == title else f', {message}'}")

    def update(done: float, message: str) -> None:
        nonlocal newest
        newest = (done, message)
        write()

    def repeat() -> None:
        with contextlib.suppress(OSError, ValueError):  # the reader of the log is gone
            while not over.wait(max(LOG_EVERY, 1.0)):
                write()

    watcher = threading.Thread(target=repeat, name="coowned-progress", daemon=True)
    watcher.start()
    try:
        yield update
    finally:
        with writing:
            over.set()
        watcher.join()
