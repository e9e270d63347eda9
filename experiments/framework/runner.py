"""Runs the points of a grid that have no stored row yet, and says how long the rest will take."""

import importlib
import inspect
import pkgutil
import time
from pathlib import Path
from types import ModuleType

import experiments
from coowned.progress import duration
from experiments.framework.graphs import data_file
from experiments.framework.rows import RESULTS, Points, read_rows, write_rows

SCALES = ("ci", "small", "paper")


def names() -> list[str]:
    """Every experiment: the modules of this package that are not the framework."""
    return [m.name for m in pkgutil.iter_modules(experiments.__path__) if not m.ispkg and m.name != "__main__"]


def load(name: str) -> ModuleType:
    """The module of an experiment.

    It has `GRID` (points by scale), `run(point) -> row`, `draw(rows) -> figure`, `CLAIMS` (the paper's statements) and
    `claims(rows) -> verdicts` on them; it may have `cost(point)`, the relative time of a point, and `table(rows)` with
    the `PAGE` that shows it; `pictures(rows)`, further figures by name; `DATA`, the real data that it needs (`FILES`);
    `PAPER`, what the paper used. Where later points depend on the rows of earlier ones, it is `run(point, rows)`.
    """
    return importlib.import_module(f"experiments.{name}")


def run_grid(name: str, scale: str, folder: Path = RESULTS, *, most: int | None = None) -> None:
    """Runs what is missing, `most` points of it, row by row: a kill loses one point, and the next call resumes."""
    module = load(name)
    if scale != "ci":
        for needed in getattr(module, "DATA", ()):
            data_file(needed)
    grid, points = module.GRID[scale], Points(module.GRID)
    cost = getattr(module, "cost", lambda point: 1.0)
    takes_rows = "rows" in inspect.signature(module.run).parameters
    done = {points.key(row) for row in read_rows(name, folder)}
    left = [point for point in grid if points.key(point) not in done]
    remaining = sum(cost(point) for point in left)
    spent = worked = 0.0
    for number, point in enumerate(left[:most], len(grid) - len(left) + 1):
        started, processor = time.perf_counter(), time.process_time()
        given = {"rows": read_rows(name, folder)} if takes_rows else {}
        row = point | module.run(point, **given)
        seconds = time.perf_counter() - started
        row.setdefault("seconds", round(seconds, 2))
        row["processor_seconds"] = round(time.process_time() - processor, 2)  # machines are busy
        write_rows(name, [*read_rows(name, folder), row], folder)
        spent, worked = spent + seconds, worked + cost(point)
        remaining -= cost(point)
        time_left = duration(max(0.0, remaining * spent / worked))
        print(f"{name} {number}/{len(grid)} {point}: {duration(seconds)}; about {time_left} left", flush=True)


def shares(name: str, folder: Path = RESULTS) -> dict[str, tuple[int, int]]:
    """For `small` and `paper`: how many points have a row, of how many."""
    module = load(name)
    points, rows = Points(module.GRID), read_rows(name, folder)
    return {
        scale: (len(points.rows_of(module.GRID[scale], rows)), len(module.GRID[scale]))
        for scale in SCALES[1:]
        if module.GRID[scale]
    }
