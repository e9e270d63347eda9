"""How results and progress look: tables for people on stdout, progress on stderr, JSON for machines."""

import contextlib
import json
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Any

from coowned import interrupts

_PIPE_WIDTH = 200
_LONGEST_CELL = 30  # what is longer may be broken into lines


def as_json(value: Any) -> None:
    """Prints one JSON document."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def line(text: str = "") -> None:
    sys.stdout.write(text + "\n")


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[Any]], *, left: Container[int] = (0,)) -> None:
    """Prints a table; columns are aligned to the right, those numbered in `left` to the left.

    No number or word of a row is cut: headings are broken into lines first, and a terminal that is narrower still
    breaks the rows itself. A pipe has room for every row in one line.
    """
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    headings = list(columns)
    cells = [[cell if isinstance(cell, str) else count(cell) for cell in row] for row in rows]
    for number, column in enumerate(headings):
        widest = min(_LONGEST_CELL, max((len(row[number]) for row in cells), default=0))
        shown.add_column(column, justify="left" if number in left else "right", min_width=widest, overflow="fold")
    for row in cells:
        shown.add_row(*row)
    # Cells are shown as they are: a user's key may hold brackets or colons that rich would read as markup.
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    console = Console(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False)
    with console.capture() as capture:  # written by us: rich ends the process where a pipe is closed
        console.print(shown, crop=False)
    sys.stdout.write(capture.get())


def count(value: Any) -> str:
    """Whole numbers with thousands separated, others with four digits.

    >>> count(1186128), count(4.0371)
    ('1,186,128', '4.037')
    """
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def duration(seconds: float) -> str:
    """A time as a person would say it, in at most two units.

    >>> duration(0.04), duration(12.3), duration(125), duration(7260), duration(200_000)
    ('0.04 s', '12 s', '2 min 5 s', '2 h 1 min', '2 d 7 h')
    """
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    left, parts = round(seconds), []
    for name, length in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        whole, left = divmod(left, length)
        parts.append((whole, name))
    first = next(number for number, (whole, _) in enumerate(parts) if whole)
    return " ".join(f"{whole} {name}" for whole, name in parts[first : first + 2] if whole)


def size(num_bytes: int) -> str:
    """A number of bytes in the unit that fits it.

    >>> size(812), size(3_140), size(12_400_000), size(999_999)
    ('812 bytes', '3.1 kB', '12 MB', '1 MB')
    """
    if num_bytes < 1000:
        return f"{num_bytes} bytes"
    units = (("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12))
    unit, length = next(((unit, length) for unit, length in units if num_bytes < 999.5 * length), units[-1])
    return f"{num_bytes / length:.{0 if num_bytes >= 9.95 * length else 1}f} {unit}".replace(".0 ", " ")


def written(*places: Path, seconds: float | None = None) -> None:
    """Says where results are, how large they are, and how long they took."""
    shown = [f"{place} ({size(sum(map(_bytes, _files(place))))})" for place in places]
    took = "" if seconds is None else f" in {duration(seconds)}"
    line(f"written: {' and '.join(shown)}{took}")


def _files(place: Path) -> list[Path]:
    return [file for file in place.rglob("*") if file.is_file()] if place.is_dir() else [place]


def _bytes(file: Path) -> int:
    return file.stat().st_size


@contextlib.contextmanager
def progress(title: str, *, time_left: bool = True) -> Iterator[Callable[[float, str], None]]:
    """A progress bar on stderr where that is a terminal; silent elsewhere. It has the room that its text leaves.

    Without `time_left` the text says it. What is written to stderr meanwhile stands above the bar. Ends where an
    interrupt was heard.
    """
    interrupts.check()
    if not sys.stderr.isatty():
        yield lambda done, message: interrupts.check()
        interrupts.check()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        *([TimeRemainingColumn()] if time_left else []),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(title, total=1.0)

        def update(done: float, message: str) -> None:
            interrupts.check()
            bar.update(task, completed=done, description=message or title)

        yield update
    interrupts.check()
