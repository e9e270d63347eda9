"""A new source is one file and one line in the registry: everything else finds it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.registration import FEATURES, LABELS, USERS, registered, write_configuration

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


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[Path]:
    """A file of the toy format, in a folder where the toy source's module is; that module is registered."""
    path = tmp_path / "lines.toy"
    rows = zip(USERS, FEATURES, LABELS, strict=True)
    path.write_text("\n".join(["TOY", *(f"{one}+{other} {x} {y}" for (one, other), x, y in rows)]), encoding="utf-8")
    entry = SourceEntry("toy_source", "read_toy", (".toy",))
    with registered(tmp_path, "toy_source", MODULE, SOURCES, entry, public="read_toy"):
        yield path


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


@pytest.mark.full
def test_the_command_line_and_a_configuration_read_it(lines: Path, capsys):
    assert run(["inspect", str(lines), "--format", "toy"]) == 0
    assert run(["plan", str(lines), "--epsilon", "8", "--delta", "1e-6", "--batch-size", "8", "--iterations", "4",
                "--selectors", "greedy", "--contribution-bounds", "2"]) == 0  # fmt: skip
    reading = {"path": "lines.toy", "example_id": None, "separator": None}
    config, folder = write_configuration(lines.parent, data=reading), lines.with_name("RUN")
    assert run(["train", str(config), "-o", str(folder)]) == 0, capsys.readouterr().err
    assert run(["report", str(folder)]) == 0


def test_without_the_line_it_is_unknown(lines: Path, capsys, monkeypatch):
    monkeypatch.delitem(SOURCES, "toy")
    with pytest.raises(AttributeError, match="read_toy"):
        _ = co.read_toy
    assert run(["inspect", str(lines)]) == 2
    assert "lines.toy: unknown format" in capsys.readouterr().err
    assert run(["inspect", str(lines), "--format", "toy"]) == 2
