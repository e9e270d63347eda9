"""Display of results and progress: tables for people on stdout, progress on stderr, JSON for machines."""

import io
import json
import sys
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from coowned.progress import duration
from coowned.progress_display import progress as progress

_PIPE_WIDTH = 200
_LONGEST_CELL = 30  # longer cells may be wrapped


def as_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def line(text: str = "") -> None:
    sys.stdout.write(text + "\n")


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[Any]], *, left: Container[int] = (0,)) -> None:
    """Prints a table; columns are right-aligned, except those whose numbers are in `left`.

    No number or word of a row is cut: headings are wrapped first, and a terminal that is narrower still wraps the rows
    itself. In a pipe every row is one line.
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
    # No markup: a user's key may contain brackets or colons that rich would interpret.
    on_terminal = sys.stdout.isatty()
    drawn = io.StringIO()  # we write it ourselves: rich exits the process when a pipe is closed
    console = Console(
        file=drawn,
        force_terminal=on_terminal or None,
        width=None if on_terminal else _PIPE_WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
    )
    console.print(shown, crop=False)
    sys.stdout.write(drawn.getvalue())


def count(value: Any) -> str:
    """Formats integers with thousands separators, other numbers with four digits.

    >>> count(1186128), count(4.0371)
    ('1,186,128', '4.037')
    """
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def size(num_bytes: int) -> str:
    """Formats a number of bytes in a suitable unit.

    >>> size(812), size(3_140), size(12_400_000), size(999_999)
    ('812 bytes', '3.1 kB', '12 MB', '1 MB')
    """
    if num_bytes < 1000:
        return f"{num_bytes} bytes"
    units = (("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12))
    unit, length = next(((unit, length) for unit, length in units if num_bytes < 999.5 * length), units[-1])
    return f"{num_bytes / length:.{0 if num_bytes >= 9.95 * length else 1}f} {unit}".replace(".0 ", " ")


def written(*paths: Path, seconds: float | None = None) -> None:
    """Prints which files were written, their sizes, and how long it took."""
    shown = [f"{path} ({size(_num_bytes(path))})" for path in paths]
    line(f"wrote {' and '.join(shown)}{'' if seconds is None else f' in {duration(seconds)}'}")


def _num_bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
