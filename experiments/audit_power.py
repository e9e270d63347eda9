"""Which test of the audit sees which planted bug, and does it leave honest trainers alone?

GRID says the points, run(point) gives a row, draw(rows) a table of how many seeds each test alarmed in.
"""

import collections
import time

from tests.audit.planted_bugs import HONEST, PLANTED

SEEDS = range(3)
ALPHA = 1e-3
CASES = {case.name: case for case in (*PLANTED, *HONEST)}
_FIRST = {"case": "coins repeated on resumption", "seed": 0}

# The quickest point first: the tests run it. Then seed by seed, so that a stop leaves some of every case.
GRID = [
    _FIRST,
    *(point for seed in SEEDS for name in CASES if (point := {"case": name, "seed": seed}) != _FIRST),
]


def run(point: dict) -> dict:
    """One audit."""
    case = CASES[point["case"]]
    started = time.process_time()  # of the processor: machines are busy
    found = case.run(1000 + point["seed"], alpha=ALPHA)
    return point | {
        "honest": case in HONEST,
        "size": found.curves[0].trials,
        "alarms": found.alarms,
        "seconds": round(time.process_time() - started, 2),
    }


def draw(rows: list[dict]) -> str:
    """A Markdown table: one line a bug, or honest trainer."""
    lines = ["| trainer | trials | audits | alarms | seen by (audits) | seconds |", "|---|---:|---:|---:|---|---:|"]
    for name in dict.fromkeys(row["case"] for row in rows):
        own = [row for row in rows if row["case"] == name]
        title = f"honest: {name}" if own[0]["honest"] else name
        seen = collections.Counter(alarm for row in own for alarm in row["alarms"])
        tests = ", ".join(f"{test} ({count})" for test, count in seen.most_common()) or "none"
        alarms, seconds = sum(bool(row["alarms"]) for row in own), sum(row["seconds"] for row in own) / len(own)
        lines.append(f"| {title} | {own[0]['size']} | {len(own)} | {alarms} | {tests} | {seconds:.1f} |")
    return "\n".join(lines)
