"""The tests of one registration: a toy module under one new word, and a table and a configuration to use it on."""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import coowned as co
from coowned import codec

USERS = [(f"user{i % 60}", f"user{i % 59}") for i in range(240)]
FEATURES = [i % 7 for i in range(240)]
LABELS = [int(x > 3) for x in FEATURES]
READING = ["--example-id", "id", "--separator", ";"]
SECTIONS = {
    "data": {"path": "data.csv", "example_id": "id", "separator": ";", "splits": [0.8, 0.1, 0.1]},
    "selection": {"selector": "greedy", "contribution_bound": 2},
    "privacy": {"epsilon": 8.0, "delta": 1e-6},
    "mechanism": {"kind": "dp-sgd", "batch_size": 8, "iterations": 4, "clip_norm": 1.0},
    "model": {"kind": "logistic-regression", "features": ["x"], "label": "y"},
    "optimizer": {"learning_rate": 0.1},
}


@contextmanager
def registered(
    folder: Path, module: str, code: str, registry: MutableMapping[str, Any], entry: Any, public: str
) -> Iterator[None]:
    """Writes a module into a folder from which it can be imported, and registers it as "toy".

    Args:
      public: the name that `coowned` gives it, which is forgotten at the end.
    """
    (folder / f"{module}.py").write_text(code, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setitem(registry, "toy", entry)
        yield
    vars(co).pop(public, None)


def write_table(folder: Path) -> Path:
    """Writes a table of 240 examples with an id, two users, a number and a label each."""
    rows = zip(USERS, FEATURES, LABELS, strict=True)
    lines = [f"{i},{one};{other},{x},{y}" for i, ((one, other), x, y) in enumerate(rows)]
    path = folder / "data.csv"
    path.write_text("\n".join(["id,users,x,y", *lines]) + "\n", encoding="utf-8")
    return path


def write_configuration(folder: Path, **changes: dict[str, Any]) -> Path:
    """Writes run.toml, a configuration of the table with these keys changed, by section; None leaves a key out."""
    sections = {
        name: {key: value for key, value in {**keys, **changes.get(name, {})}.items() if value is not None}
        for name, keys in SECTIONS.items()
    }
    path = folder / "run.toml"
    path.write_text(codec.encode_toml(sections), encoding="utf-8")
    return path
