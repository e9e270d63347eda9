"""Every experiment runs its smallest point, and draws from rows alone."""

import importlib
import pkgutil

import pytest

import experiments

NAMES = [module.name for module in pkgutil.iter_modules(experiments.__path__) if module.name != "__main__"]
SLOW = {"private_abstracts"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name in SLOW else name for name in NAMES]
)
def test_smallest_point(name: str):
    module = importlib.import_module(f"experiments.{name}")
    row = module.run(module.GRID[0])
    assert module.GRID[0].items() <= row.items()
    assert str(row["size"]) in module.draw([row])


def test_there_are_experiments():
    assert "selector_sizes" in NAMES
