"""Which audit test finds which planted bug, and is an honest trainer ever accused? (beyond the paper)"""

import collections
import time

import altair as alt
import polars as pl
from tests.audit.planted_bugs import HONEST, PLANTED

from experiments.framework.rows import Point, Row
from experiments.framework.verdicts import Verdict, judge_cases

CLAIMS = ("Every planted bug is found, and no honest trainer is accused (ours).",)
PAGE = "docs/trust.md"
SEEDS = range(3)
ALPHA = 1e-3
CASES = {case.name: case for case in (*PLANTED, *HONEST)}
GRID = {
    "ci": [{"case": "coins repeated on resumption", "seed": 0}],
    "small": [{"case": name, "seed": seed} for seed in SEEDS for name in CASES],  # a stop leaves some of every case
    "paper": [],
}


def run(point: Point) -> Row:
    """One audit."""
    case = CASES[point["case"]]
    started = time.process_time()  # of the processor: machines are busy
    found = case.run(1000 + point["seed"], alpha=ALPHA)
    return {
        "honest": case in HONEST,
        "size": found.curves[0].trials,
        "alarms": list(found.alarms),
        "seconds": round(time.process_time() - started, 2),
    }


def table(rows: list[Row]) -> str:
    """A Markdown table: one line a bug, or honest trainer."""
    lines = ["| trainer | trials | audits | alarms | found by (audits) | seconds |", "|---|---:|---:|---:|---|---:|"]
    for name in dict.fromkeys(row["case"] for row in rows):
        own = [row for row in rows if row["case"] == name]
        title = f"honest: {name}" if own[0]["honest"] else name
        seen = collections.Counter(alarm for row in own for alarm in row["alarms"])
        tests = ", ".join(f"{test} ({count})" for test, count in seen.most_common()) or "none"
        alarms, seconds = sum(bool(row["alarms"]) for row in own), sum(row["seconds"] for row in own) / len(own)
        lines.append(f"| {title} | {own[0]['size']} | {len(own)} | {alarms} | {tests} | {seconds:.1f} |")
    return "\n".join(lines)


def draw(rows: list[Row]) -> alt.Chart:
    """How often each bug was seen."""
    seen = [
        {"trainer": row["case"], "kind": "honest" if row["honest"] else "planted bug", "alarm": bool(row["alarms"])}
        for row in rows
    ]
    counts = pl.DataFrame(seen).group_by("trainer", "kind", maintain_order=True).agg(pl.col("alarm").mean())
    return (
        alt.Chart(counts)
        .mark_bar()
        .encode(
            x=alt.X("alarm:Q", title="share of audits with an alarm", axis=alt.Axis(format="%")),
            y=alt.Y("trainer:N", title=None, axis=alt.Axis(labelLimit=400)),
            color=alt.Color("kind:N", title=None),
        )
        .properties(width=300, height=alt.Step(14))
    )


def claims(rows: list[Row]) -> list[Verdict]:
    cases = {row["case"]: row["honest"] for row in rows}
    alarmed = {name: [bool(row["alarms"]) for row in rows if row["case"] == name] for name in cases}
    right = sum(not any(alarmed[name]) if honest else all(alarmed[name]) for name, honest in cases.items())
    bugs = sum(not honest for honest in cases.values())
    found = (
        f"{right} of {len(cases)} trainers judged correctly with every seed ({bugs} bugs, {len(cases) - bugs} honest)"
    )
    return [judge_cases(CLAIMS[0], right, len(cases), found)]
