"""`coowned plan --html`."""

import json
from pathlib import Path

from coowned.cli.main import run
from coowned.report import figures

TARGET = ["--epsilon", "4", "--delta", "1e-6", "--batch-size", "10", "--iterations", "20"]


def test_page_of_a_plan(table: Path, capsys):
    page = table.with_name("plan.html")
    arguments = [
        "plan",
        str(table),
        "--example-id",
        "id",
        "--separator",
        ";",
        *TARGET,
        "--contribution-bounds",
        "1,3",
    ]
    assert run([*arguments, "--html", str(page), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    text = page.read_text(encoding="utf-8").replace(figures.bundle(), "")
    for row in rows:
        assert f"{row['size']:,}" in text
        assert figures.colour_of(row["selector"]) in text
    assert "user1" not in text  # no keys of anybody
    assert run([*arguments, "--html", str(table.parent / "no" / "plan.html")]) == 2
    assert "does not exist" in capsys.readouterr().err
