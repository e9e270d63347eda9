"""Is every damaged file either read or cleanly refused? (beyond the paper)

Each point is a process of its own, so that its peak memory is known and a crash is a row too.
"""

import json
import subprocess
import sys

import altair as alt
import polars as pl
from tests.faults.fuzzing import targets

from experiments.framework.rows import Point, Row
from experiments.framework.verdicts import Verdict, judge_cases

CLAIMS = ("Whatever a file contains, it is read or refused with one sentence, in bounded time (ours).",)
PAGE = "docs/trust.md"
CASES = 100_000
GRID = {
    "ci": [{"input": "configuration", "size": 20}],
    "small": [{"input": name, "size": -(-CASES // len(targets()))} for name in targets()],
    "paper": [],
}


def run(point: Point) -> Row:
    """Fuzzes one kind of file."""
    command = [sys.executable, "-m", "tests.faults.fuzzing", point["input"], str(point["size"])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        failed = f"exit code {done.returncode}: {done.stderr[-2000:]}"
        return {"read": 0, "refused": 0, "slowest": 0.0, "failures": [failed], "peak_megabytes": 0.0}
    return json.loads(done.stdout)


def table(rows: list[Row]) -> str:
    """A Markdown table: one line a kind of file."""
    lines = [
        "| input | cases | read | refused | anything else | slowest case (processor seconds) | peak (MB) |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row['input']} | {row['size']:,} | {row['read']:,} | {row['refused']:,} | {len(row['failures'])} "
            f"| {row['slowest']:.2f} | {row['peak_megabytes']:.0f} |"
        )
    total = {name: sum(row[name] for row in rows) for name in ("size", "read", "refused")}
    found = sum(len(row["failures"]) for row in rows)
    lines.append(f"| all | {total['size']:,} | {total['read']:,} | {total['refused']:,} | {found} | | |")
    return "\n".join(lines)


def draw(rows: list[Row]) -> alt.Chart:
    """What became of the cases."""
    shown = pl.DataFrame(
        [{"input": row["input"], "became": name, "cases": row[name]} for row in rows for name in ("read", "refused")]
    )
    return (
        alt.Chart(shown)
        .mark_bar()
        .encode(
            x=alt.X("cases:Q", title="damaged files"),
            y=alt.Y("input:N", sort=None, title=None),
            color=alt.Color("became:N", title=None),
        )
        .properties(width=260)
    )


def claims(rows: list[Row]) -> list[Verdict]:
    holding, cases = sum(row["read"] + row["refused"] for row in rows), sum(row["size"] for row in rows)
    return [judge_cases(CLAIMS[0], holding, cases, f"{holding:,} of {cases:,} damaged files")]
