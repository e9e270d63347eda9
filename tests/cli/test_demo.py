"""`coowned demo`: the road on made-up e-mails."""

import json
import random
from pathlib import Path

import pytest

from coowned.accounting.privacy_guarantee import PrivacyGuarantee
from coowned.audit import run_audit
from coowned.cli.main import run
from coowned.demo import Demo
from coowned.exact import keys
from coowned.runs.stored_run import StoredRun


@pytest.fixture
def repeatable(request, monkeypatch):
    """Every secret of the demo follows from the test's name, and its audit stops after as many trials on any machine.

    Else an honest audit may alarm falsely with probability 1e-3, and each half of Bob's story be told wrongly with as
    much. The keys still pass for the operating system's: the demo claims what it claims elsewhere.
    """
    monkeypatch.setattr(keys.secrets, "token_bytes", random.Random(request.node.name).randbytes)
    audit = run_audit.audit_run
    monkeypatch.setattr(run_audit, "audit_run", lambda folder, *, seconds: audit(folder, trials=2000))


@pytest.mark.full
def test_demo_leaves_files_that_hold(tmp_path: Path, capsys, repeatable):
    folder = tmp_path / "demo"
    assert run(["demo", "-o", str(folder)]) == 0
    printed = capsys.readouterr().out
    claim = PrivacyGuarantee.from_json((folder / "guarantee.json").read_text(encoding="utf-8"))
    assert claim.statement() in printed
    assert claim.epsilon <= 8.0
    trained = StoredRun.open(folder / "run-epsilon-8").guarantee
    counted = trained.certificate
    assert f"{counted.num_distinct:,} of the {counted.num_examples:,} e-mails of the train split. They" in printed
    assert f"epsilon 8 (unit: {trained.unit}; contribution bound" in printed
    assert "without privacy" in printed
    assert "is NOT true for Bob" in printed
    page = folder / "report.html"
    assert str(page) in printed
    assert page.stat().st_size < 3_000_000
    assert "A secret about Bob" in page.read_text(encoding="utf-8")
    assert run(["certify", str(folder / "mailbox.mbox"), str(folder / "S.parquet")]) == 0
    assert "holds" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["report.html", "run-epsilon-2", "epsilon-8.toml"])
def test_others_files_are_kept(tmp_path: Path, capsys, name: str):
    theirs = tmp_path / name if "." in name else tmp_path / name / "thesis.txt"
    theirs.parent.mkdir(exist_ok=True)
    theirs.write_text("years of work", encoding="utf-8")
    assert run(["demo", "-o", str(tmp_path)]) == 2
    assert "was not written by a demo" in capsys.readouterr().err
    assert theirs.read_text(encoding="utf-8") == "years of work"


def test_interrupted_demo_can_be_given_again(tmp_path: Path):
    folder = tmp_path / "demo"
    Demo(folder).prepare()
    (folder / "mailbox.mbox").write_text("half of", encoding="utf-8")
    (folder / "run-epsilon-2").mkdir()
    Demo(folder).prepare()
    assert [file.name for file in folder.iterdir()] == [".coowned-demo"]


@pytest.mark.full
def test_demo_as_json(tmp_path: Path, capsys, repeatable):
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


def test_a_folder_that_cannot_be_made_is_bad_input(tmp_path: Path, capsys, monkeypatch):
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert run(["demo", "-o", str(tmp_path / "file" / "demo")]) == 2
    assert "cannot create the folder (Not a directory)" in capsys.readouterr().err

    def forbidden(self, *given, **more):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", forbidden)
    assert run(["demo", "-o", str(tmp_path / "demo")]) == 2
    said = capsys.readouterr().err
    assert "cannot create the folder (Permission denied); choose another with -o" in said
    assert said.count("\n") == 1
