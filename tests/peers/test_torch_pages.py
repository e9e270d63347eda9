"""The page and the example about PyTorch run."""

import doctest
import runpy
import sys

import pytest
from tests.docs.test_documentation import ROOT, blocks

pytestmark = pytest.mark.usefixtures("torch")


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # of Opacus
def test_blocks_of_the_page():
    page = ROOT / "docs" / "pytorch.md"
    test = doctest.DocTestParser().get_doctest("\n".join(blocks(page)), {}, page.name, str(page), 0)
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS).run(test)
    assert result.attempted > 20
    assert result.failed == 0


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # of transformers and peft
def test_lora_on_mail(monkeypatch, capsys):
    small = ["--emails", "200", "--length", "16", "--batch-size", "16", "--iterations", "4"]
    monkeypatch.setattr(sys, "argv", ["lora_mail.py", *small])
    runpy.run_path(str(ROOT / "examples" / "lora_mail.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "1. Training is (8, 1e-06)-differentially private" in printed
    assert "parameters are trained" in printed
    assert "test: loss" in printed
