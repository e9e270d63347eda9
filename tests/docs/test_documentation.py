"""Every Python block of the README and the documents that shows a prompt is run, and prints what it says."""

import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"`((?:docs|src|tests|examples|experiments|benchmarks)/[\w./-]+)`")


def prompts_of(page: Path) -> str:
    blocks = [block for block in BLOCK.findall(page.read_text(encoding="utf-8")) if ">>>" in block]
    return "\n".join(blocks)


@pytest.mark.full
@pytest.mark.parametrize("page", [page for page in PAGES if prompts_of(page)], ids=lambda page: page.name)
def test_blocks_print_what_they_say(page: Path):
    test = doctest.DocTestParser().get_doctest(prompts_of(page), {}, page.name, str(page), 0)
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    result = doctest.DocTestRunner(optionflags=flags).run(test)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path):
    named = LINK.findall(page.read_text(encoding="utf-8"))
    missing = [name for name in named if not (ROOT / name).exists()]
    assert missing == []


@pytest.mark.full
def test_a_wrong_block_is_caught():
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "planted", None, 0)
    output: list[str] = []
    assert doctest.DocTestRunner().run(test, out=output.append).failed == 1


MARKDOWN = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")})


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: page.name)
def test_lines_have_reading_length(page: Path):
    lines = page.read_text(encoding="utf-8").splitlines()
    long = [number for number, line in enumerate(lines, 1) if len(line) > 120 and not line.startswith("|")]
    assert long == [], f"{page}: wrap these lines at 120 characters; rows of tables may be longer"
