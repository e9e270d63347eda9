"""`make experiments [ONLY=name]` runs grids and stores rows; `make tables` puts stored rows into the documentation."""

import importlib
import json
import pkgutil
import sys
from pathlib import Path

import experiments

RESULTS = Path(__file__).parent / "results"
TABLES = {
    "selector_sizes": Path("docs/choosing-a-selector.md"),
    "private_abstracts": Path("docs/results.md"),
    "audit_power": Path("docs/trust.md"),
    "canary_power": Path("docs/trust.md"),
    "spark_scaling": Path("docs/spark.md"),
}


def run(only: list[str]) -> None:
    """Runs every point that has no stored row yet; rows are stored one by one, so that a stop loses one point."""
    for name in only or [
        module.name for module in pkgutil.iter_modules(experiments.__path__) if module.name != "__main__"
    ]:
        module = importlib.import_module(f"experiments.{name}")
        rows = stored(name)
        done = [
            {key: row.get(key) for key in point}
            for point in module.GRID
            for row in rows
            if all(row.get(k) == v for k, v in point.items())
        ]
        for point in module.GRID:
            if point in done:
                continue
            rows.append(module.run(point))
            print(rows[-1], flush=True)
            (RESULTS / f"{name}.json").write_text(
                "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8"
            )


def stored(name: str) -> list[dict]:
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else []


def tables() -> None:
    """Writes each table between its two markers; the rows are the only source of its numbers."""
    for name, page in TABLES.items():
        module = importlib.import_module(f"experiments.{name}")
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        before, rest = page.read_text(encoding="utf-8").split(begin)
        _, after = rest.split(end)
        rows = [row for row in stored(name) if "made up" not in row.values()]
        page.write_text(f"{before}{begin}\n{module.draw(rows)}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["tables"]:
        tables()
    else:
        run(sys.argv[1:])
