"""`coowned demo`: the road on made-up e-mails."""

import json
from pathlib import Path

import pytest

from coowned.accounting.guarantee import PrivacyGuarantee
from coowned.cli.main import run


@pytest.mark.full
def test_demo_leaves_files_that_hold(tmp_path: Path, capsys):
    folder = tmp_path / "demo"
    assert run(["demo", "-o", str(folder)]) == 0
    printed = capsys.readouterr().out
    claim = PrivacyGuarantee.from_json((folder / "guarantee.json").read_text(encoding="utf-8"))
    assert claim.statement() in printed
    assert claim.epsilon <= 8.0
    assert "without privacy" in printed
    # Fresh keys: each half of Bob's story is told wrongly with probability at most 1e-3 (see its tests).
    assert "is NOT true for Bob" in printed
    page = folder / "report.html"
    assert str(page) in printed
    assert page.stat().st_size < 3_000_000
    assert "A secret about Bob" in page.read_text(encoding="utf-8")
    assert run(["certify", str(folder / "mailbox.mbox"), str(folder / "S.parquet")]) == 0
    assert "holds" in capsys.readouterr().out


@pytest.mark.full
def test_demo_as_json(tmp_path: Path, capsys):
    (tmp_path / "mine.txt").write_text("not the demo's", encoding="utf-8")
    assert run(["demo", "-o", str(tmp_path), "--trials", "8", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert sum(row["best"] for row in shown["plan"]) == 1
    assert shown["epsilon"] <= 8.0
    accuracy = shown["accuracy_by_epsilon"]
    assert accuracy["none"] > 0.9
    # The noise is real: in 40 runs accuracy at epsilon 8 was between 0.986 and 0.999; a coin would give 0.5.
    assert accuracy["8"] > 0.8
    assert shown["audit"]["holds"]
    assert [one["attribution"] for one in shown["bob"]] == ["sender", "everyone"]
    assert (tmp_path / "mine.txt").exists()
    assert Path(shown["report"]).is_file()
