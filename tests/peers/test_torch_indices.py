"""Every function of PyTorch that looks up, writes, counts or samples where an example's own numbers say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
VERDICTS = HERE / "indices_out_of_range.txt"  # a verdict, two spaces and an expression in each line
LEAKS = ["F.embedding(p, t)", "F.embedding(p, 1 * t, max_norm=1.0)", "t.index_fill(0, p, 0.0)"]


def verdicts(expressions, *, rule):
    """What each does, in a process of its own: some of them end it."""
    given = json.dumps({"expressions": expressions, "rule": rule})
    done = subprocess.run(
        [sys.executable, HERE / "indices_out_of_range.py"], input=given,
        capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(expressions), f"{expressions[len(found)]} ended the process: {done.stderr[-500:]}"
    return [verdict for _, verdict in found]


@pytest.mark.peers
def test_indices_out_of_range_stay_in_their_example_in_torch():
    """Each raises, leaves all other rows bit for bit as they are, or is refused: as stored, so that none changes kind.

    "impossible": PyTorch cannot differentiate it for many examples at once, which is refused as well.
    """
    stored = [line.split("  ", 1) for line in VERDICTS.read_text(encoding="utf-8").splitlines()]
    assert {verdict for verdict, _ in stored} == {"harmless", "refused", "impossible"}
    found = verdicts([expression for _, expression in stored], rule=True)
    changed = [(own, now) for own, now in zip(stored, found, strict=True) if own[0] != now]
    assert changed == []


@pytest.mark.peers
def test_the_comparison_sees_rows_that_reach_into_others():
    """Without the rule that refuses them, and without the probe."""
    assert all(verdict.endswith("other rows") for verdict in verdicts(LEAKS, rule=False))
    assert set(verdicts(LEAKS, rule=True)) == {"refused"}
