"""A new source is one file and one line in the registry: everything else finds it."""

from pathlib import Path

import pytest

import coowned as co
from coowned.attribution.options import SOURCES, SourceEntry
from coowned.attribution.sources import DataSource, detect_format
from coowned.cli.main import run

MODULE = '''
"""One example a line: its user, a number and a label."""

from pathlib import Path

from coowned import from_table


def read_toy(path, aliases=None):
    rows = [line.split() for line in Path(path).read_text().splitlines()[1:]]
    columns = {"users": [row[0].split("+") for row in rows], "x": [float(row[1]) for row in rows]}
    return from_table(columns | {"y": [int(row[2]) for row in rows]}, aliases=aliases)


def read_source(kind, source, progress):
    return read_toy(source.path, source.aliases)


def recognizes(kind, path):
    return path.is_file() and path.read_bytes().startswith(b"TOY")
'''
CONFIGURATION = """
[data]
path = "lines.toy"
splits = [0.8, 0.1, 0.1]
[selection]
selector = "greedy"
contribution_bound = 2
[privacy]
epsilon = 8.0
delta = 1e-6
[mechanism]
kind = "dp-sgd"
batch_size = 8
iterations = 4
clip_norm = 1.0
[model]
kind = "logistic-regression"
features = ["x"]
label = "y"
[optimizer]
learning_rate = 0.1
"""


@pytest.fixture
def lines(tmp_path: Path, monkeypatch) -> Path:
    """A file of the toy format, in a folder where the toy source's module is; that module is registered."""
    (tmp_path / "toy_source.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(SOURCES, "toy", SourceEntry("toy_source", "read_toy", (".toy",)))
    path = tmp_path / "lines.toy"
    rows = "".join(f"u{i % 60}+u{i % 59} {i % 7} {int(i % 7 > 3)}\n" for i in range(240))
    path.write_text(f"TOY\n{rows}", encoding="utf-8")
    yield path
    vars(co).pop("read_toy", None)


def test_a_registered_source_is_recognized_and_read(lines: Path):
    inside = lines.with_name("lines")
    inside.write_bytes(lines.read_bytes())
    assert detect_format(lines) == detect_format(inside) == "toy"
    (lines.parent / "folder").mkdir()
    lines.with_name("folder").joinpath("a.toy").write_bytes(lines.read_bytes())
    assert detect_format(lines.with_name("folder")) == "toy"
    assert co.read_toy(inside).graph.num_examples == 240
    assert DataSource(path=inside).read().graph.num_examples == 240
    assert DataSource(path=inside, format="toy").read_rows().graph.num_users == 60
    with pytest.raises(co.InputError, match="separator does not apply to toy data"):
        DataSource(path=lines, separator=";").read()


def test_the_command_line_and_a_configuration_read_it(lines: Path, capsys):
    assert run(["inspect", str(lines), "--format", "toy"]) == 0
    assert run(["plan", str(lines), "--epsilon", "8", "--delta", "1e-6", "--batch-size", "8", "--iterations", "4",
                "--selectors", "greedy", "--contribution-bounds", "2"]) == 0  # fmt: skip
    config, folder = lines.with_name("run.toml"), lines.with_name("RUN")
    config.write_text(CONFIGURATION, encoding="utf-8")
    assert run(["train", str(config), "-o", str(folder)]) == 0, capsys.readouterr().err
    assert run(["report", str(folder)]) == 0


def test_without_the_line_it_is_unknown(lines: Path, capsys, monkeypatch):
    monkeypatch.delitem(SOURCES, "toy")
    with pytest.raises(AttributeError, match="read_toy"):
        _ = co.read_toy
    assert run(["inspect", str(lines)]) == 2
    assert "lines.toy: unknown format" in capsys.readouterr().err
    assert run(["inspect", str(lines), "--format", "toy"]) == 2
