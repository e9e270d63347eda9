"""Where results are kept."""

from pathlib import Path

import pytest

from coowned.cache import cache_folder


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"COOWNED_CACHE": "/somewhere"}, Path("/somewhere")),
        ({"COOWNED_CACHE": "off"}, None),
        ({"COOWNED_CACHE": None, "XDG_CACHE_HOME": "/kept"}, Path("/kept/coowned")),
        ({"COOWNED_CACHE": None, "XDG_CACHE_HOME": None, "HOME": "/home/ann"}, Path("/home/ann/.cache/coowned")),
    ],
)
def test_folder(monkeypatch, environment, folder):
    for name, value in environment.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    assert cache_folder() == folder
