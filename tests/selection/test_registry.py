"""One word, one file, one class; and one line that makes a selector known everywhere."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import coowned
from coowned.selection.registry import CLASSES, declared_settings, selector_class
from coowned.selection.selector import Selector


@pytest.mark.parametrize("word", CLASSES)
def test_word_file_and_class_agree(word):
    found = selector_class(word)
    assert issubclass(found, Selector)
    assert found.name == word
    assert found.__module__ == "coowned.selection." + word.replace("-", "_")
    assert found.__name__ == "".join(piece.capitalize() for piece in word.split("-"))
    assert getattr(coowned, found.__name__) is found


def test_unknown_word():
    with pytest.raises(KeyError):
        selector_class("greediest")


@pytest.mark.parametrize("word", CLASSES)
def test_declared_settings_are_the_fields(word):
    """What is read from the sources is what Python makes of them: every field has an option of its name and type."""
    kind, declared = selector_class(word), declared_settings()
    hints = typing.get_type_hints(kind)
    described = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        found, option = declared[field.name]
        if option.flag is None:  # else the command line takes a file, and Python other forms too
            assert hints[field.name] in (found, found | None)
        assert described[field.name].__metadata__ == (option,)


TOY = '''
"""Takes the first examples that fit."""

import dataclasses
from typing import Annotated, ClassVar

import numpy as np

from coowned.attribution.options import Option
from coowned.selection.selector import BoundedSelector


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstComers(BoundedSelector):
    """Takes examples in input order, all but the first `skipped`."""

    skipped: Annotated[int, Option("first-comers: examples at the beginning that are left out.", metavar="N")] = 0

    name: ClassVar[str] = "first-comers"
    bound_is_enough: ClassVar[bool] = True

    def _select(self, graph, seed, progress):
        room = np.full(graph.num_users, self.contribution_bound)
        copies = np.zeros(graph.num_examples, np.int32)
        for example in range(self.skipped, graph.num_examples):
            users = graph.users[graph.indptr[example] : graph.indptr[example + 1]]
            if len(users) and room[users].min() > 0:
                room[users] -= 1
                copies[example] = 1
        return self._selection(graph, seed, copies)
'''

PROGRAM = """
import json, sys
import coowned as co
from coowned.cli.main import run
from coowned.runs.config import TrainConfig, example

data = co.from_table({"users": [[name] for name in "aabbccdd"], "example_id": list(range(8))})
selected = co.FirstComers(contribution_bound=1, skipped=1).select(data.graph)
toml = example().replace('selector = "greedy"', 'selector = "first-comers"').replace(
    "contribution_bound = 2 ", "contribution_bound = 2\\nskipped = 3\\n#")
config = TrainConfig.from_toml(toml).selection
plan = co.plan(
    data.graph, epsilon=8.0, delta=1e-5, batch_size=2, iterations=4, adjacency="zero-out", contribution_bounds=[1],
    selectors=["first-comers"], mechanism="poisson")
options = ["--users", "users", "--example-id", "example_id", "-o", "S.parquet"]
chosen = ["--selector", "first-comers", "--contribution-bound", "2", "--skipped", "5"]
code = run(["select", "data.csv", *options, *chosen])
sys.stdout.flush()
print(json.dumps({
    "copies": selected.copies.tolist(), "toml": [config.selector, config.settings], "code": code,
    "plan": sorted({choice.selector for choice in plan.choices}), "public": "FirstComers" in dir(co)}))
run(["select", "--help"])
"""


@pytest.mark.full
def test_one_file_and_one_line_make_a_selector_known(tmp_path):
    """In Python, on the command line with its own option, in TOML and to a plan."""
    package = tmp_path / "coowned"
    shutil.copytree(Path(coowned.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "selection" / "first_comers.py").write_text(TOY)
    registry = package / "selection" / "registry.py"
    line = '    "first-comers": "coowned.selection.first_comers.FirstComers",'
    registry.write_text(registry.read_text().replace("CLASSES = {", f"CLASSES = {{\n{line}"))
    rows = "\n".join(f"{number},{user}" for number, user in enumerate("aabbccdd"))
    (tmp_path / "data.csv").write_text(f"example_id,users\n{rows}\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    shown, _, rest = done.stdout.partition("{")
    found, _, help_text = rest.partition("\n")
    assert json.loads("{" + found) == {
        "copies": [0, 1, 1, 0, 1, 0, 1, 0],
        "toml": ["first-comers", {"contribution_bound": 2, "skipped": 3}],
        "code": 0,
        "plan": ["first-comers"],
        "public": True,
    }
    assert "3 copies of 3 of 8 examples" in shown
    assert "--skipped" in help_text
