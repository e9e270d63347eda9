"""Does a command that is killed at any moment and run again end in the same bits? (beyond the paper)"""

import tempfile
from pathlib import Path

import altair as alt
import polars as pl
from tests.faults.killing import PHASES, Killer

from experiments.framework.rows import Point, Row
from experiments.framework.verdicts import Verdict, judge_cases

CLAIMS = ("A command that is killed at any moment and run again ends in the same bits (ours).",)
PAGE = "docs/trust.md"
GRID = {
    "ci": [{"verb": "select", "size": 1}],
    "small": [
        {"verb": "select", "size": 22},
        {"verb": "train", "size": 30},
        {"verb": "audit", "size": 12},
        {"verb": "report", "size": 18},
        {"verb": "predict", "size": 18},
    ],
    "paper": [],
}


def run(point: Point) -> Row:
    """Kills one verb so often, each time on a fresh copy of what it needs."""
    verb = point["verb"]
    with tempfile.TemporaryDirectory() as room:
        killer = Killer(Path(room), verbs=[verb] if verb in ("select", "train") else ["train", verb])
        tally = killer.run(verb, point["size"])
    phases = [tally.phases.get(phase, 0) for phase in PHASES[verb]]
    kinds = {f"at_{kind}": count for kind, count in tally.kills.items()}
    return {**kinds, "phases": phases, "failures": tally.failures}


def table(rows: list[Row]) -> str:
    """A Markdown table: one line a verb."""
    lines = [
        "| verb | kills | at a random time | at a file operation | half a file written | in which phase | failures |",
        "|---|---:|---:|---:|---:|---|---:|",
    ]
    for row in rows:
        hit = ", ".join(f"{phase} {count}" for phase, count in zip(PHASES[row["verb"]], row["phases"], strict=True))
        kinds = " | ".join(str(row[f"at_{kind}"]) for kind in ("time", "event", "sync"))
        lines.append(f"| `{row['verb']}` | {row['size']} | {kinds} | {hit} | {len(row['failures'])} |")
    return "\n".join(lines)


def draw(rows: list[Row]) -> alt.Chart:
    """In which phases processes were killed."""
    shown = pl.DataFrame(
        [
            {"phase": f"{row['verb']}: {phase}", "kills": count}
            for row in rows
            for phase, count in zip(PHASES[row["verb"]], row["phases"], strict=True)
        ]
    )
    return (
        alt.Chart(shown)
        .mark_bar()
        .encode(x=alt.X("kills:Q"), y=alt.Y("phase:N", sort=None, title=None))
        .properties(width=260)
    )


def claims(rows: list[Row]) -> list[Verdict]:
    kills, failures = sum(row["size"] for row in rows), sum(len(row["failures"]) for row in rows)
    return [judge_cases(CLAIMS[0], kills - failures, kills, f"{failures} failures in {kills} kills")]
