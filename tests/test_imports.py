"""What a command does not use is not imported: a reader, too, need not follow it."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coowned.mechanism.registry import MECHANISMS
from coowned.selection.registry import CLASSES

SOURCE = Path(__file__).parents[1] / "src"
FILES = {".".join(file.relative_to(SOURCE).with_suffix("").parts): file for file in SOURCE.rglob("*.py")}
MODULES = {name.removesuffix(".__init__"): file for name, file in FILES.items()}


def imports_in(node: ast.AST) -> Iterator[str]:
    """Yields the modules that code imports, inside of functions too; not what type checkers alone see."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom):
            inner = [f"{child.module}.{one.name}" for one in child.names]
            yield from (name if name in MODULES else str(child.module) for name in inner)
        elif not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)):
            yield from imports_in(child)


def test_no_module_imports_itself_through_others():
    """A function that imports what imports its own module hides a cycle; it does not remove it."""
    imported = {name: set(imports_in(ast.parse(file.read_text("utf-8")))) for name, file in MODULES.items()}
    graphlib.TopologicalSorter({name: found & MODULES.keys() for name, found in imported.items()}).prepare()


def imported_by(code: str) -> set[str]:
    command = [sys.executable, "-c", f"import sys\n{code}\nprint(*(name for name in sys.modules))"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.full
def test_a_run_imports_its_own_algorithms_alone():
    code = (
        "import coowned.runs.configured_run\n"
        "from coowned.mechanism.registry import mechanism_class\n"
        "from coowned.selection.registry import selector_class\n"
        "mechanism_class('dp-sgd'), selector_class('greedy')"
    )
    found = imported_by(code)
    selectors = {path.rpartition(".")[0] for path in CLASSES.values()}
    mechanisms = {entry.path.rpartition(".")[0] for entry in MECHANISMS.values()}
    assert found & selectors == {"coowned.selection.greedy"}
    assert found & mechanisms == {"coowned.mechanism.poisson_sampling"}
    assert not found & {"coowned.models.probes", "coowned.accounting.planning", "coowned.training.covered"}
    assert not found & {"coowned.mechanism.candidates", "coowned.models.python_model", "coowned.models.example_model"}


@pytest.mark.full
def test_a_report_imports_no_training_and_no_audit():
    found = imported_by("import coowned.report.page")
    assert "coowned.report.run_page" in found
    assert not {name for name in found if name.startswith(("coowned.audit", "coowned.synthetic", "coowned.spark"))}
    assert not found & {"coowned.training.loop", "coowned.training.sweep", "coowned.runs.configured_run", "jax"}
    assert not found & {"coowned.accounting.choices", "coowned.mechanism.candidates", "coowned.attribution.table_files"}


@pytest.mark.full
def test_a_verb_imports_no_other_verb():
    code = "from coowned.cli.main import run\nimport contextlib, io\n"
    code += "with contextlib.redirect_stdout(io.StringIO()):\n    run(['inspect', '--help'])"
    verbs = {"coowned.cli.train", "coowned.cli.plan", "coowned.cli.audit", "coowned.cli.demo", "coowned.cli.inspect"}
    assert imported_by(code) & verbs == {"coowned.cli.inspect"}
