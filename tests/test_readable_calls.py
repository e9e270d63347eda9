"""Calls that a person can read: how many parameters, lines, levels and branches a function may have."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "coowned"
MOST_PARAMETERS, MOST_LINES, DEEPEST, MOST_BRANCHES = 8, 80, 4, 20
PUBLIC = "a call that users write with keywords: each names one thing that they know"
MORE_PARAMETERS = {
    "fitting.py:fit": PUBLIC,
    "attribution/tables.py:from_table": PUBLIC,
    "attribution/sql.py:read_sql": PUBLIC,
}
LONGER = {"fitting.py:fit": "two thirds of it are the manual of the call that most users make"}
NESTED = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)
BRANCHES = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.comprehension, ast.Assert, ast.match_case)
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{file.relative_to(SOURCE).as_posix()}:{node.name}", node


def num_parameters(node: ast.FunctionDef) -> int:
    named = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len(named) - (named[:1] in (["self"], ["cls"]))


def depth(node: ast.AST) -> int:
    """How deep blocks stand in one another; `elif` is no deeper than its `if`."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, SCOPES):
            is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
            deepest = max(deepest, depth(child) + (isinstance(child, NESTED) and not is_elif))
    return deepest


def num_branches(node: ast.AST) -> int:
    """McCabe's complexity, with a branch for each operand of `and` and `or`."""
    found = list(ast.walk(node))
    operands = sum(len(one.values) - 1 for one in found if isinstance(one, ast.BoolOp))
    return 1 + sum(isinstance(one, BRANCHES) for one in found) + operands


def unreadable(name: str, node: ast.FunctionDef) -> list[str]:
    """Returns what a function has too much of."""
    # The parameters of a verb's `run` are the options of a command, which nobody passes by hand.
    is_verb = name.startswith("cli/") and node.name == "run"
    lines = node.end_lineno - node.lineno + 1
    found = {
        "parameters": num_parameters(node) > MOST_PARAMETERS and not is_verb and name not in MORE_PARAMETERS,
        "lines": lines > MOST_LINES and name not in LONGER,
        "levels": depth(node) > DEEPEST,
        "branches": num_branches(node) > MOST_BRANCHES,
    }
    return [what for what, too_many in found.items() if too_many]


def test_no_function_is_hard_to_read():
    assert {name: found for name, node in functions() if (found := unreadable(name, node))} == {}


def test_exceptions_are_needed():
    known = dict(functions())
    assert all(num_parameters(known[name]) > MOST_PARAMETERS for name in MORE_PARAMETERS)
    assert all(known[name].end_lineno - known[name].lineno >= MOST_LINES for name in LONGER)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(a, b, c, d, e, f, g, h): return a", []),
        ("def f(a, b, c, d, e, f, g, h, *, i): return a", ["parameters"]),
        ("class A:\n def f(self, a, b, c, d, e, f, g, h): return a", []),
        ("def f(x):\n" + "    x += 1\n" * 79, []),
        ("def f(x):\n" + "    x += 1\n" * 80, ["lines"]),
        ("def f(x):\n if x:\n  for y in x:\n   with y:\n    while y: pass\n    if y: pass\n    elif x: pass", []),
        ("def f(x):\n if x:\n  for y in x:\n   with y:\n    while y:\n     if y: pass", ["levels"]),
        ("def f(x): return " + " or ".join("x" * 20), []),
        ("def f(x): return " + " or ".join("x" * 21), ["branches"]),
    ],
)
def test_limits_are_where_they_are_said(text: str, expected: list[str]):
    (node,) = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
    assert unreadable("file.py:f", node) == expected
