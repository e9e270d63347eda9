"""The example script runs, tells both halves of the story and draws them."""

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "bob.py"


@pytest.mark.full
def test_bob(tmp_path, capsys):
    picture = tmp_path / "bob.svg"
    runpy.run_path(str(SCRIPT))["main"](["--trials", "200", "--seed", "5", "-o", str(picture)])
    printed = capsys.readouterr().out
    assert "the claim IS NOT TRUE FOR BOB" in printed.splitlines()[0]
    assert "the claim is not refuted by" in printed.splitlines()[1]
    assert "attributed to everyone in it" in picture.read_text(encoding="utf-8")
