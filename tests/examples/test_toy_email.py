"""The example script runs and says what the README says."""

import runpy
from pathlib import Path


def test_toy_email(capsys):
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "toy_email.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "bob is part of 4 e-mails" in printed
    assert "chosen: e1, e4, e5; a recount finds nobody in more than 2" in printed
    assert "contribution bound 2" in printed
