"""Does the audit catch every planted bug, and leave the honest mechanism alone? With 20 seeds each.

GRID says the points, run(point) gives a row, draw(rows) a table of how many seeds each bug was caught in.
"""

import time

from tests.audit.planted_bugs import HONEST, PLANTED

SEEDS = range(20)
ALPHA = 1e-3
CASES = {case.name: case for case in (*PLANTED, *HONEST)}

# The quickest point first: the tests run it. Then seed by seed, so that a stop leaves some of every case.
GRID = [
    {"case": "shuffling", "seed": 0},
    *({"case": name, "seed": seed} for seed in SEEDS for name in CASES if (name, seed) != ("shuffling", 0)),
]


def run(point: dict) -> dict:
    """One audit."""
    case = CASES[point["case"]]
    started = time.process_time()  # of the processor: machines are busy
    found = case.run(1000 + point["seed"], alpha=ALPHA)
    return point | {
        "honest": case in HONEST,
        "caught_by": case.caught_by,
        "size": case.trials,
        "alarm": not found.holds,
        "seconds": round(time.process_time() - started, 2),
    }


def draw(rows: list[dict]) -> str:
    """A Markdown table: one line a bug, or way of trying the honest mechanism."""
    lines = ["| mechanism | test | trials | seeds | alarms | seconds each |", "|---|---|---:|---:|---:|---:|"]
    for name in dict.fromkeys(row["case"] for row in rows):
        own = [row for row in rows if row["case"] == name]
        title = f"honest: {name}" if own[0]["honest"] else name
        alarms, seconds = sum(row["alarm"] for row in own), sum(row["seconds"] for row in own) / len(own)
        lines.append(f"| {title} | {own[0]['caught_by']} | {own[0]['size']} | {len(own)} | {alarms} | {seconds:.1f} |")
    return "\n".join(lines)
