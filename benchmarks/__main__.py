"""`make bench [ONLY=name]`: every benchmark in turn, ratios against peers and limits measured in one run.

A benchmark is a module of this folder with `run() -> list[Figure]`.
"""

import importlib
import pkgutil
import sys
import time

import benchmarks


def main(only: list[str]) -> int:
    missed = 0
    for module in sorted(module.name for module in pkgutil.iter_modules(benchmarks.__path__)):
        if module == "__main__" or (only and module not in only):
            continue
        loaded = importlib.import_module(f"benchmarks.{module}")
        if not hasattr(loaded, "run"):
            continue
        started = time.perf_counter()
        print(f"== {module}", flush=True)
        for row in loaded.run():
            verdict = {True: "ok", False: "MISSED", None: ""}[row.ok]
            missed += row.ok is False
            print(f"  {row.name:<74} {row.value:>12,.4g} {row.unit:<12} {row.bar:<16} {verdict}", flush=True)
        print(f"  ({time.perf_counter() - started:.0f} s)", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
