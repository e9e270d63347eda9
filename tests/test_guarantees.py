"""Every bullet of a "Guarantees:" section names a test, and that test exists where it is looked for."""

import ast
import collections
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
def places_of_tests():
    """Name of each test and the files that define it, as paths in tests/."""
    found = collections.defaultdict(set)
    for file in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found[node.name].add(file.relative_to(ROOT / "tests"))
    return found


def is_found(source, places):
    """Whether a test that a source file names is in the tests of its stage, or else the only one of that name.

    Without the second half another test that happens to have the name would do.
    """
    mirror = source.parts[0] if len(source.parts) > 1 else f"test_{source.name}"
    return len(places) == 1 or any(place.parts[0] == mirror for place in places)


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
    source = file.relative_to(ROOT / "src" / "coowned")
    for text in docstrings(file):
        for bullet in bullets(text):
            assert re.search(r"\(test_\w+(, test_\w+)*\)$", bullet), f"names no test: {bullet}"
        for name in re.findall(r"\b(test_\w+)(?=[,)])", text):
            places = places_of_tests().get(name, set())
            assert is_found(source, places), (
                f"{source} names {name}, which is not in the tests of its stage, and not in one other place: "
                f"{sorted(map(str, places))}"
            )


def test_the_walk_finds_something():
    assert len(SOURCES) > 20
    sample = "Guarantees:\n  - One thing\n    holds.  (test_a)\n  - Another.\n\nCost: none\n"
    assert bullets(sample) == ["One thing holds. (test_a)", "Another."]


def test_a_namesake_elsewhere_does_not_count():
    source, own = Path("audit/release.py"), Path("audit/test_release.py")
    cli, peers = Path("cli/test_audit.py"), Path("peers/test_release.py")
    assert is_found(source, {own, cli, peers})
    assert is_found(source, {cli})
    assert not is_found(source, {cli, peers})
    assert not is_found(source, set())
    assert is_found(Path("certificate.py"), {Path("test_certificate.py"), cli})
    assert not is_found(Path("certificate.py"), {Path("spark/test_certificate.py"), cli})
