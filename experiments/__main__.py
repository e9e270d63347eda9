"""`python -m experiments NAME --scale small` runs a grid; `python -m experiments tables` renders the stored rows."""

import argparse
import sys
from pathlib import Path

from experiments.framework.graphs import MissingDataError
from experiments.framework.pages import render
from experiments.framework.rows import RESULTS
from experiments.framework.runner import SCALES, names, run_grid


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], "tables", *names()], help="experiments to run; default: all")
    parser.add_argument("--scale", choices=SCALES, default="small")
    parser.add_argument("--points", type=int, help="most points to run now; default: all that are missing")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the stored rows")
    options = parser.parse_args()
    if options.names == ["tables"]:
        render()
        return
    missing = 0
    for name in options.names or names():
        try:
            run_grid(name, options.scale, options.results, most=options.points)
        except MissingDataError as error:
            missing = 2
            print(f"{name}: {error}", file=sys.stderr)
    sys.exit(missing)


if __name__ == "__main__":
    main()
