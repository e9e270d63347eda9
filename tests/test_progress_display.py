"""How progress looks on a terminal, in a notebook and in a log; tests/cli/test_train.py has that of a training."""

import io
import sys
import threading
import types

from tests.terminal import Terminal
from tests.test_fitting import fit

from coowned import progress_display


class Notebook(types.ModuleType):
    """What IPython is asked for; `outputs` has what the cell showed."""

    def __init__(self):
        super().__init__("IPython")
        self.outputs = []

    def get_ipython(self):
        return types.SimpleNamespace(kernel=None)

    HTML = staticmethod(str)

    def display(self, shown, display_id):
        assert display_id
        self.update(shown)
        return self

    def update(self, shown):
        self.outputs.append(shown)


def test_a_bar_in_a_notebook(monkeypatch):
    notebook = Notebook()
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    monkeypatch.setitem(sys.modules, "IPython.display", notebook)
    with progress_display.progress("counting") as progress:
        progress(0.5, "half <of> it")
    assert notebook.outputs == [
        '<progress value="0" max="1"></progress> counting',
        '<progress value="0.5" max="1"></progress> half &lt;of&gt; it',
        "",
    ]


def test_a_terminal_shell_is_no_notebook(monkeypatch):
    shell = types.ModuleType("IPython")
    shell.get_ipython = lambda: object()
    monkeypatch.setitem(sys.modules, "IPython", shell)
    assert not progress_display.in_notebook()


def test_a_log_while_nothing_is_reported(monkeypatch):
    """A line every while, of what was reported last; none once the work is over."""
    monkeypatch.setattr(progress_display, "LOG_EVERY", 0.0)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    lines, two = [], threading.Event()

    def log(text):
        lines.append(text)
        if len(lines) >= 3:
            two.set()

    with progress_display.progress("selecting", log=log) as progress:
        progress(0.5, "one long job")
        assert two.wait(60)
    told = len(lines)
    assert set(lines) == {"selecting: 50%, one long job"}
    assert not [one for one in threading.enumerate() if one.name == "coowned-progress"]
    assert len(lines) == told


def test_fit_on_a_terminal(monkeypatch, capsys):
    """A bar with the time left, the claim once above it, and at the end how good the model is."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", "120")
    fit(iterations=300)
    shown = stream.getvalue()
    assert "100%: " in shown
    assert " left" in shown
    assert "training: epsilon 8 in all 300 steps (unit: user" in shown
    assert "How good it is (NOT covered by a guarantee): Test accuracy" in shown.splitlines()[-1]
    assert capsys.readouterr().out == ""


def test_fit_with_progress_of_its_own(monkeypatch):
    stream, seen = Terminal(), []
    monkeypatch.setattr(sys, "stderr", stream)
    fit(progress=lambda done, message: seen.append(done))
    assert seen[-1] == 1.0
    assert stream.getvalue() == ""
