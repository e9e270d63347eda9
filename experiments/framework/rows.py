"""Stored rows of an experiment: one Parquet file, replaced whole after every point."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import polars as pl

from coowned.files import write_file

Point = dict[str, Any]
Row = dict[str, Any]
Grid = dict[str, list[Point]]

RESULTS = Path(__file__).parents[1] / "results"


def read_rows(name: str, folder: Path = RESULTS) -> list[Row]:
    """The rows stored so far; none where the experiment never ran."""
    file = folder / f"{name}.parquet"
    return pl.read_parquet(file).to_dicts() if file.exists() else []


def write_rows(name: str, rows: list[Row], folder: Path = RESULTS) -> None:
    """Replaces the stored rows; a kill leaves the old file or the new one."""
    folder.mkdir(parents=True, exist_ok=True)
    table = pl.DataFrame(rows, infer_schema_length=None)
    write_file(folder / f"{name}.parquet", table.write_parquet)


class Points:
    """Tells which row belongs to which point: by the columns that name points, None meaning that one is absent."""

    def __init__(self, grid: Grid):
        self._columns = sorted({name for points in grid.values() for point in points for name in point})

    def key(self, values: Row) -> str:
        named = {name: values.get(name) for name in self._columns if values.get(name) is not None}
        return json.dumps({name: _plain(value) for name, value in named.items()})

    def rows_of(self, points: Iterable[Point], rows: list[Row]) -> list[Row]:
        """The stored rows of these points, in the points' order."""
        stored = {self.key(row): row for row in rows}
        return [stored[key] for point in points if (key := self.key(point)) in stored]


def _plain(value: Any) -> Any:
    """8 and 8.0 are the same: a Parquet column holds one type."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
