"""How results and progress look."""

import io
import sys
import time

import hypothesis.strategies as st
import pytest
from hypothesis import given
from tests.terminal import Terminal

from coowned.cli import show


@given(st.integers(0, 10**15))
def test_sizes_are_short_and_near(num_bytes):
    shown = show.size(num_bytes)
    number, unit = shown.split()
    factor = {"bytes": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}[unit]
    assert abs(float(number) * factor - num_bytes) <= 0.051 * num_bytes
    assert len(number) <= 5


def test_what_was_written(tmp_path, capsys):
    (tmp_path / "a.json").write_bytes(b"x" * 1500)
    (tmp_path / "S").mkdir()
    (tmp_path / "S" / "part").write_bytes(b"x" * 10)
    show.written(tmp_path / "a.json", tmp_path / "S", seconds=75)
    assert capsys.readouterr().out == f"wrote {tmp_path}/a.json (1.5 kB) and {tmp_path}/S (10 bytes) in 1 min 15 s\n"


@pytest.mark.parametrize("terminal", [None, 60, 80, 200])
def test_nothing_of_a_row_is_cut(monkeypatch, terminal):
    rows = [("greedy-with-duplicates", *[f"{number}1,234.5678" for number in range(5)], "<- best")]
    headings = ("selector", *["a rather long heading"] * 5, "")
    stream = io.StringIO() if terminal is None else Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("COLUMNS", str(terminal or 80))
    show.table("", headings, rows, left=(0, 6))
    assert any(all(cell in line for cell in rows[0]) for line in stream.getvalue().splitlines())
    assert "…" not in stream.getvalue()


def test_progress_is_for_terminals_alone(monkeypatch):
    for stream in (io.StringIO(), Terminal()):
        monkeypatch.setattr(sys, "stderr", stream)
        with show.progress("counting") as progress:
            progress(0.5, "half of it")
        assert ("half of it" in stream.getvalue()) == stream.isatty()


def test_progress_stays_off_stdout(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with show.progress("counting") as progress:
        progress(1.0, "all")
    assert capsys.readouterr().out == ""


def test_a_redirected_log_gets_a_line_every_30_seconds(monkeypatch):
    stream, now = io.StringIO(), [0.0]
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with show.progress("counting") as progress:
        for now[0], done in ((10.0, 0.1), (31.0, 0.3), (45.0, 0.5), (62.0, 0.75)):
            progress(done, "pairs" if done > 0.5 else "")
    assert stream.getvalue() == "counting: 30%\ncounting: 75%, pairs\n"
