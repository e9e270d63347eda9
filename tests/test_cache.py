"""Where results are kept."""

from pathlib import Path

import pytest

from coowned.cache import cache_folder, keep


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


def test_kept_whole_or_not_at_all(tmp_path, monkeypatch):
    place = tmp_path / "kept" / "entry.json"
    keep(place, "first")
    assert place.read_text(encoding="utf-8") == "first"

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("coowned.cache.os.replace", full)
    keep(place, "second")
    assert place.read_text(encoding="utf-8") == "first"
    assert [file.name for file in place.parent.iterdir()] == ["entry.json"]
    (tmp_path / "file").write_text("")
    keep(tmp_path / "file" / "entry.json", "a folder that cannot be made")
    assert (tmp_path / "file").read_text() == ""
