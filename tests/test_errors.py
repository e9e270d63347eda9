"""The package without its extras: selection, certificates and accounting work, the rest says what to install."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import coowned
from coowned import errors

PACKAGES = {**errors.PACKAGES, "cyclic": ("mtkahypar",)}
HIDE = """
import sys
from importlib.machinery import PathFinder
hidden = set({packages!r})
class Finder(PathFinder):  # as if not installed: neither imported nor found
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in hidden else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


def run(code: str, folder, *missing: str) -> subprocess.CompletedProcess[str]:
    """What a process prints that has not got the packages of some extras."""
    hidden = HIDE.format(packages=sorted({name for extra in missing for name in PACKAGES[extra]}))
    return subprocess.run(
        [sys.executable, "-c", hidden + code], cwd=folder, capture_output=True, text=True, check=False
    )


NOT_IN_CORE = {"pyspark", "mtkahypar", "torch", "transformers", "opacus", "peft", "flax", "equinox", "mkdocs"}


def imported_at_once(text: str) -> set[str]:
    """The packages that a module imports as soon as it is imported itself."""
    imports = [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [name.name for node in imports if isinstance(node, ast.Import) for name in node.names]
    return {name.split(".")[0] for name in (*names, *(str(node.module) for node in imports if hasattr(node, "module")))}


def test_tests_are_collected_without_extras():
    """`make test` collects every test, also those that other suites run, in an environment without their packages."""
    files = Path(__file__).parent.rglob("*.py")
    found = {file.name: imported_at_once(file.read_text(encoding="utf-8")) & NOT_IN_CORE for file in files}
    assert {name for name, packages in found.items() if packages} == {"indices_out_of_range.py"}  # is not collected
    assert imported_at_once("import os, pyspark.sql\nfrom torch import nn\ndef f():\n    import peft") == {
        "os", "pyspark", "torch"
    }  # fmt: skip


WALK = """
import importlib, pkgutil, traceback
import coowned
modules = [one.name for one in pkgutil.walk_packages(coowned.__path__, "coowned.", onerror=lambda name: None)]
for name in modules:
    try:
        hasattr(importlib.import_module(name), "pytest_plugins")  # a name that modules are asked for and need not have
    except BaseException:
        print(name, traceback.format_exc())
print(len(modules), sorted(hidden & set(sys.modules)))
"""


@pytest.mark.parametrize(
    "missing",
    [
        tuple(PACKAGES),
        *(pytest.param((one,), marks=pytest.mark.full) for one in PACKAGES),
        *(pytest.param(tuple(set(PACKAGES) - {one}), marks=pytest.mark.full) for one in PACKAGES),
    ],
    ids=lambda missing: "-".join(sorted(missing)),
)
def test_every_module_can_be_imported_without(missing, tmp_path):
    """Without any extra, without each of them, and with each of them alone."""
    done = run(WALK, tmp_path, *missing)
    count, _, found = done.stdout.partition(" ")
    assert (found, done.stderr) == ("[]\n", ""), done.stdout
    assert int(count) > 150


NEEDS = """
import coowned as co, coowned.torch
from coowned.report import export, figures, page
from coowned.spark import functions, session
from coowned.models import microbatches

def says(what, extra, kind=co.MissingExtraError):
    try:
        what()
    except kind as error:
        assert str(error).endswith(f"not installed; run: pip install 'coowned[{extra}]'"), error
    else:
        raise AssertionError(what)

says(lambda: page.write_report("RUN"), "train")
says(lambda: page.write_plan(None, "plan.html"), "train")
says(lambda: figures.bundle(), "train")
says(lambda: microbatches.in_parts([1], 1), "train")
says(lambda: co.Run.predict(object.__new__(co.Run), []), "train")
says(lambda: coowned.torch.fit, "torch")
says(lambda: session().__enter__(), "spark")
says(lambda: functions.col, "spark", AttributeError)
"""


def test_what_needs_an_extra_names_it(tmp_path):
    done = run(NEEDS, tmp_path, *PACKAGES)
    assert (done.returncode, list(tmp_path.iterdir())) == (0, []), done.stderr


def test_a_lazy_module_is_imported_when_used(monkeypatch):
    lazy = errors.LazyModule("altair", extra="train", purpose="a chart")
    assert lazy.Chart is importlib.import_module("altair").Chart
    monkeypatch.setitem(sys.modules, "altair", None)
    lazy = errors.LazyModule("altair", extra="train", purpose="a chart")
    assert not hasattr(lazy, "__wrapped__")
    with pytest.raises(coowned.MissingExtraError, match=r"a chart needs altair, .* 'coowned\[train\]'"):
        _ = lazy.Chart


def test_missing_extra_is_named(monkeypatch):
    errors.require("train", "training")
    monkeypatch.setitem(sys.modules, "jax", None)
    monkeypatch.setitem(sys.modules, "optax", None)
    with pytest.raises(
        coowned.MissingExtraError, match="training needs jax, optax, which are not installed; run: "
    ) as e:
        errors.require("train", "training")
    assert "pip install 'coowned[train]'" in str(e.value)
    assert isinstance(e.value, ImportError)


def test_without_torch_it_says_what_to_install(monkeypatch):
    import coowned.torch

    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(coowned.MissingExtraError, match=r"coowned.torch needs torch, .* 'coowned\[torch\]'"):
        from coowned.torch import fit  # noqa: F401
    with pytest.raises(AttributeError, match="no attribute 'fitt'"):
        _ = coowned.torch.fitt


TRAINING = """
import coowned as co
from coowned.cli.main import run
rows = [{"users": [f"u{i % 40}"], "x": 1.0, "y": i % 2} for i in range(100)]
try:
    co.fit(co.from_table(rows), co.LogisticRegression(features=["x"], label="y"), epsilon=8.0, delta=1e-6,
           adjacency="zero-out", selector=co.Greedy(contribution_bound=2), batch_size=40, iterations=3)
except co.MissingExtraError as error:
    print(error)
sys.exit(run(["demo"]))
"""


def test_training_without_jax_says_what_to_install(tmp_path):
    done = run(TRAINING, tmp_path, "train")
    assert done.stdout.startswith("training needs jax, optax, tokenizers, jinja2, altair, vl_convert, which are not")
    assert done.stderr.startswith("coowned: the demo needs jax, ")
    assert (done.stderr.count("\n"), done.returncode, list(tmp_path.iterdir())) == (1, 2, [])


VERBS = """
import json, pathlib
import coowned as co
from coowned.cli.main import run
pathlib.Path("mail.csv").write_text("users\\n" + "".join(f"u{i % 40};u{3 * i % 40}\\n" for i in range(100)))
data = ["mail.csv", "--users", "users", "--separator", ";"]
steps = ["--epsilon", "8", "--delta", "1e-6", "--batch-size", "10", "--iterations", "5"]
for words in (
    ["inspect", *data], ["aliases", *data, "-o", "aliases.csv"],
    ["plan", *data, *steps, "--selectors", "greedy", "--contribution-bounds", "2", "-o", "plan.json"],
    ["select", *data, "--contribution-bound", "2", "-o", "S.parquet"],
    ["certify", *data, "S.parquet"],
    ["calibrate", "--certificate", "S.certificate.json", *steps, "-o", "guarantee.json"],
):
    assert run(words) == 0, words
for name in co.__all__:
    getattr(co, name)
claim = co.PrivacyGuarantee.from_json(pathlib.Path("guarantee.json").read_text())
another = co.guarantee(claim.certificate, claim.mechanism, epsilon=8.0, delta=1e-6, adjacency="zero-out")
print(co.compose([claim, another], delta=1e-5).epsilon > claim.epsilon)
sys.exit(any(name.split(".")[0] in ("jax", "altair") and sys.modules[name] for name in sys.modules))
"""


@pytest.mark.full
def test_selection_certificates_and_accounting_without_jax(tmp_path):
    done = run(VERBS, tmp_path, "train")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "True"), done.stderr
