"""The README and the documents: what they show is run, what they name exists."""

import dataclasses
import doctest
import importlib.util
import json
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
import typer.main

from coowned.cli.main import commands
from coowned.runs.config import TrainConfig
from coowned.runs.settings import SECTIONS

ROOT = Path(__file__).parents[2]
MARKDOWN = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")})
PAGES = [page for page in MARKDOWN if page.name not in ("CHANGELOG.md", "CONTRIBUTING.md")]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TOML = re.compile(r"^```toml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"`((?:docs|src|tests|examples|experiments|benchmarks|notebooks)/[\w./-]+)`")
SYMBOL = re.compile(r"`([\w/]+\.py)::(\w+)`")
COMMAND = re.compile(r"^ {4}(?:\.venv/bin/)?(coowned [a-z-]+ (?:.*\\\n)*.*)$", re.MULTILINE)
PAPER_LABELS = (  # every \\label{fig:…}, {eq:…} and {def:…} of arXiv 2503.03622, and its definition of fixed-graph DP
    "sec:fixed-graph-NDP", "def:nodeDP", "eq:cb-ilp", "fig:setting", "fig:dpsgd", "fig:contribution_bounding",
    "fig:contribution_bounding_dup", "fig:contribution_bounding_mf", "fig:arxiv-main", "fig:lr-dup", "fig:lr-sgd-ftrl",
    "fig:examples_greedy_vs_ilp", "fig:examples_greedy_vs_ilp_dup", "fig:greedy_vs_ilp_ratios", "fig:lr-bias",
    "fig:pareto", "fig:histogram-sample-skewed", "fig:bound-dsize", "fig:b-dpmf",
)  # fmt: skip
NOT_RUN = {"spark.md"}  # needs Spark; tests/spark runs it
PEERS = {"pytorch.md"}  # needs PyTorch; tests/peers runs it


def module(path: Path):
    """A file as a module, wherever it is."""
    name = path.with_suffix("").relative_to(ROOT).as_posix().replace("/", "_")
    if name not in sys.modules:
        found = importlib.util.spec_from_file_location(name, path)
        assert found is not None
        assert found.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(found)
        found.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning")  # in jax_privacy
@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page) and page.name not in PEERS], ids=lambda page: page.name
)
def test_blocks_print_what_they_say(page: Path):
    if page.name in NOT_RUN:
        for block in blocks(page):
            compile(block, str(page), "exec")
        return
    test = doctest.DocTestParser().get_doctest("\n".join(blocks(page)), {}, page.name, str(page), 0)
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    result = doctest.DocTestRunner(optionflags=flags).run(test)
    assert result.attempted > 0
    assert result.failed == 0


def test_every_block_has_prompts():
    """A block without a prompt would be shown and never run."""
    silent = [page.name for page in PAGES for block in blocks(page) if ">>>" not in block]
    assert set(silent) <= NOT_RUN


@pytest.mark.full
def test_a_wrong_block_is_caught():
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "planted", None, 0)
    output: list[str] = []
    assert doctest.DocTestRunner().run(test, out=output.append).failed == 1


@pytest.mark.full
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path: Path):
    module(ROOT / "docs" / "theme" / "notebooks.py").run(json.loads(path.read_text(encoding="utf-8"))["cells"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_configurations_that_are_shown_are_read(page: Path):
    for text in TOML.findall(page.read_text(encoding="utf-8")):
        tomllib.loads(text)
        if "[data]" in text:
            TrainConfig.from_toml(text, name=page.name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_are_shown_exist(page: Path):
    """Every command line is parsed, options and all; nothing is run."""
    root = typer.main.get_command(commands())
    for shown in COMMAND.findall(page.read_text(encoding="utf-8")):
        words = shlex.split(shown.replace("\\\n", " "), comments=True)
        words = words[1 : words.index(">")] if ">" in words else words[1:]
        if words[0].startswith("--"):
            continue
        command = root.commands[words[0]]  # type: ignore[attr-defined]
        command.make_context(words[0], words[1:])


def test_a_wrong_command_is_caught():
    command = typer.main.get_command(commands()).commands["certify"]  # type: ignore[attr-defined]
    with pytest.raises(Exception, match="No such option"):
        command.make_context("certify", ["mail.mbox", "S.parquet", "--no-such-option"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path):
    named = LINK.findall(page.read_text(encoding="utf-8"))
    missing = [name for name in named if not (ROOT / name).exists()]
    assert missing == []


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: page.name)
def test_lines_have_reading_length(page: Path):
    lines = page.read_text(encoding="utf-8").splitlines()
    long = [number for number, line in enumerate(lines, 1) if len(line) > 120 and not line.startswith("|")]
    assert long == [], f"{page}: wrap these lines at 120 characters; rows of tables may be longer"


@pytest.mark.full
def test_paper_map_names_what_exists():
    symbols = SYMBOL.findall((ROOT / "docs" / "paper-map.md").read_text(encoding="utf-8"))
    assert len(symbols) > 30
    for file, symbol in symbols:
        folder, *parts = Path(file).with_suffix("").parts
        name = ".".join(parts if folder == "src" else (folder, *parts))
        assert hasattr(importlib.import_module(name), symbol), f"{file}::{symbol}"


def test_paper_map_is_complete():
    """Every definition, numbered equation, figure, table and algorithm of the paper's source has a row."""
    text = (ROOT / "docs" / "paper-map.md").read_text(encoding="utf-8")
    assert [label for label in PAPER_LABELS if f"`{label}`" not in text] == []


def test_pages_that_load_from_elsewhere_are_caught():
    external = module(ROOT / "docs" / "theme" / "hooks.py").external
    assert external('<script src="https://unpkg.com/x.js"></script><img src="//cdn.org/i.png">') == [
        "https://unpkg.com/x.js",
        "//cdn.org/i.png",
    ]
    assert external('<link rel="stylesheet" href="https://fonts.org/a.css">') == ["https://fonts.org/a.css"]
    assert external('<a href="https://arxiv.org/abs/2503.03622">paper</a><script src="assets/x.js"></script>') == []
    assert external("@font-face { src: url(https://fonts.org/a.woff2) }", ".css") != []


def test_the_configuration_reference_has_every_key():
    hooks = module(ROOT / "docs" / "theme" / "hooks.py")
    _, *sections = re.split(r"^## `\[(?=\w+\]`$)", hooks.configuration(), flags=re.MULTILINE)
    rows = {(one.split("]")[0], key) for one in sections for key in re.findall(r"^\| `(\w+)` \|", one, re.MULTILINE)}
    assert {f"{section}.{key}" for section, key in rows} >= set(hooks._MEANINGS)  # no meaning of a key that is gone
    assert {("privacy", "delta"), ("optimizer", "learning_rate"), ("run", "seed"), ("data", "users")} <= rows
    for section in ("privacy", "mechanism", "optimizer", "run", "report"):
        typed = SECTIONS[section]
        assert {field.name for field in dataclasses.fields(typed)} == {key for name, key in rows if name == section}
