"""Every bullet of a "Guarantees:" section names a test, and that test exists."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def docstrings(file):
    tree = ast.parse(file.read_text(encoding="utf-8"))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]


@functools.cache
def defined_functions():
    names = set()
    for file in (ROOT / "tests").rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        names |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return names


def bullets(text):
    """The bullets of every "Guarantees:" section, each as one line."""
    found = []
    for section in re.findall(r"Guarantees:\n((?:[ \t]*\S.*\n?)*)", text):
        body = re.split(r"\n(?=[A-Z][A-Za-z ]*:)", section)[0]
        found += [" ".join(part.split()) for part in re.split(r"(?m)^[ \t]*- ", body)[1:]]
    return found


SOURCES = sorted((ROOT / "src").rglob("*.py"))


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT / "src" / "coowned")))
def test_guarantees_name_tests(file):
    defined = defined_functions()
    for text in docstrings(file):
        for bullet in bullets(text):
            assert re.search(r"\(test_\w+(, test_\w+)*\)$", bullet), f"names no test: {bullet}"
        for name in re.findall(r"\b(test_\w+)(?=[,)])", text):
            assert name in defined, f"{file.name} names {name}, which no file in tests/ defines"


def test_the_walk_finds_something():
    assert len(SOURCES) > 20
    sample = "Guarantees:\n  - One thing\n    holds.  (test_a)\n  - Another.\n\nCost: none\n"
    assert bullets(sample) == ["One thing holds. (test_a)", "Another."]
