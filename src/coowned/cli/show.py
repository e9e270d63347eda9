"""How results and progress look: tables for people on stdout, progress on stderr, JSON for machines."""

import contextlib
import json
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any


def as_json(value: Any) -> None:
    """Prints one JSON document."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def line(text: str = "") -> None:
    sys.stdout.write(text + "\n")


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[Any]], *, left: Container[int] = (0,)) -> None:
    """Prints a table; columns are aligned to the right, those numbered in `left` to the left."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        shown.add_column(column, justify="left" if number in left else "right")
    for row in rows:
        shown.add_row(*(cell if isinstance(cell, str) else count(cell) for cell in row))
    # Cells are shown as they are: a user's key may hold brackets or colons that rich would read as markup.
    width = None if sys.stdout.isatty() else 100
    console = Console(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False)
    with console.capture() as capture:  # written by us: rich ends the process where a pipe is closed
        console.print(shown)
    sys.stdout.write(capture.get())


def count(value: Any) -> str:
    """Whole numbers with thousands separated, others with four digits.

    >>> count(1186128), count(4.0371)
    ('1,186,128', '4.037')
    """
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


@contextlib.contextmanager
def progress(title: str) -> Iterator[Callable[[float, str], None]]:
    """A progress bar on stderr where that is a terminal; silent elsewhere."""
    if not sys.stderr.isatty():
        yield lambda done, message: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(title, total=1.0)
        yield lambda done, message: bar.update(task, completed=done, description=message or title)
