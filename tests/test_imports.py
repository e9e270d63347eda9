"""What a command does not use is not imported: a reader, too, need not follow it."""

import subprocess
import sys

import pytest

from coowned.mechanism.registry import MECHANISMS
from coowned.selection.registry import CLASSES


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
