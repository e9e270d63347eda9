"""Nothing outside `mechanism/` asks which class a mechanism is: a new one needs no change there."""

import ast
from pathlib import Path

import pytest

from coowned import Greedy, certify, guarantee
from coowned.errors import InputError
from coowned.mechanism.registry import mechanisms

ROOT = Path(__file__).parents[2]
NAMES = {
    parent.__name__ for kind in mechanisms() for parent in kind.__mro__ if "mechanism" in parent.__module__.split(".")
}


def questions(source: str) -> list[int]:
    """The lines that ask whether something is of a mechanism's class."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
            asked = node.args[1:]
        elif isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchClass):
            asked = [node.cls]
        else:
            continue
        # The name itself or an entry of a tuple of them; PoissonSampling.kind is a word, not the class.
        listed = [entry for one in asked for entry in (one.elts if isinstance(one, ast.Tuple) else [one])]
        if {getattr(entry, "id", getattr(entry, "attr", "")) for entry in listed} & NAMES:
            found.append(node.lineno)
    return found


@pytest.mark.parametrize(
    "planted",
    [
        "isinstance(mechanism, PoissonSampling)",
        "isinstance(x, (int, co.RandomAllocation))",
        "type(x) is CyclicPoisson",
        "x.mechanism is not MinSeparation",
        "issubclass(kind, GroupedMechanism)",
        "kind in (MinSeparation, CyclicPoisson)",
        "match x:\n    case Mechanism():\n        pass",
    ],
)
def test_the_search_finds_planted_questions(planted):
    assert questions(planted)
    assert not questions("kind == PoissonSampling.kind or isinstance(x, int)")


@pytest.mark.parametrize("folder", ["src/coowned", "experiments"])
def test_only_mechanisms_ask_for_their_class(folder):
    files = [file for file in (ROOT / folder).rglob("*.py") if file.parent.name != "mechanism"]
    assert files
    asked = {str(file.relative_to(ROOT)): questions(file.read_text(encoding="utf-8")) for file in files}
    assert not {file: lines for file, lines in asked.items() if lines}


def test_what_is_not_a_mechanism_is_named(regular_graph):
    certificate = certify(regular_graph, Greedy(contribution_bound=1).select(regular_graph))
    with pytest.raises(InputError, match=r"float is not a mechanism; use PoissonSampling\.from_certificate"):
        guarantee(certificate, 0.5, epsilon=2.0, delta=1e-6, adjacency="zero-out")
